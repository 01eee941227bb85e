"""Operations whose gradients are unusual: complex numbers, branches and loops, none at all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, normal, scope_of, train

import tf_gpipe

L = keras.layers


class Fourier(L.Layer):
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex64")

    def call(self, x):
        return tf.signal.fft(tf.cast(x, tf.complex64))


class RealPart(L.Layer):
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")

    def call(self, x):
        return tf.math.real(x)


class Branch(L.Layer):
    def call(self, x):
        return keras.ops.cond(keras.ops.sum(x) > -1e9, lambda: keras.ops.tanh(x) * x, lambda: x * 2)


class Loop(L.Layer):
    def call(self, x):
        return keras.ops.fori_loop(0, 3, lambda i, a: keras.ops.tanh(a) * 1.1, x)


@tf.custom_gradient
def doubled(x):
    def gradient(d):
        raise ValueError("not differentiable")

    return 2 * x, gradient


class WithoutGradient(L.Layer):
    def call(self, x):
        return doubled(x)


def trained(strategy, *layers, unused=None, batches=(12,)):
    """Weights after a step on each batch, and the model; the layer `unused` makes an output without a loss."""
    keras.utils.set_random_seed(0)
    with scope_of(strategy):
        inputs = keras.Input([6])
        x = L.Dense(4)(inputs)
        for layer in layers:
            x = layer(x)
        outputs, loss = L.Dense(3, name="used")(x), "mse"
        if unused is not None:
            outputs, loss = {"used": outputs, "unused": unused(x)}, {"used": "mse", "unused": None}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=[12, 6]).astype("float32")
    for rows in batches:
        y = x[:rows, :3]
        model.train_on_batch(x[:rows], y if unused is None else {"used": y})
    return model.get_weights(), model


def check(strategy, make, **options):
    wanted, _ = trained(None, *make(), **options)
    found, model = trained(strategy, *make(), **options)
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    return model


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_complex_numbers_cross_a_cut_in_both_directions(remat):
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat=remat, partition=[2, 2])
    check(strategy, lambda: [Fourier(), RealPart(autocast=False)])


def test_gradients_by_a_complex_input():
    strategy = tf_gpipe.GPipeStrategy(2, 3)
    with strategy.scope():
        inputs = keras.Input([6], dtype="complex64")
        model = keras.Model(inputs, L.Dense(2)(RealPart(autocast=False)(inputs)))
    x = tf.complex(tf.random.normal([6, 6]), tf.random.normal([6, 6]))

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, x)

    np.testing.assert_allclose(strategy.run(gradient), gradient(), rtol=1e-5)


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("jit_compile", [False, True, "auto"])
def test_a_branch(remat, jit_compile):
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat=remat, jit_compile=jit_compile)
    check(strategy, lambda: [Branch()], batches=(12, 6))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_loop_whose_output_has_no_loss(jit_compile):
    check(tf_gpipe.GPipeStrategy(2, 3, jit_compile=jit_compile), list, unused=Loop(name="unused"))


def test_stages_with_loops_are_not_compiled_unless_asked_for():
    strategy = tf_gpipe.GPipeStrategy(2, 3, jit_compile="auto")
    model = check(strategy, lambda: [Loop()])
    assert "XLA may not know the gradient of a loop or branch in stage" in strategy.plan(model).note


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_an_output_without_loss_needs_no_gradient(remat):
    check(tf_gpipe.GPipeStrategy(2, 3, remat=remat), list, unused=WithoutGradient(name="unused"))


@pytest.mark.parametrize("remat", ["always", "never"])
def test_an_operation_without_gradient_fails_where_one_is_needed(remat):
    with pytest.raises(ValueError, match="not differentiable"):
        trained(tf_gpipe.GPipeStrategy(2, 3, remat=remat), WithoutGradient())


class SquareInPython(L.Layer):
    """A function of Python with a gradient, which TensorFlow takes from a tape that its run leaves behind."""

    def call(self, x):
        y = tf.py_function(lambda a: a * a, [x], tf.float32)
        y.set_shape(x.shape)
        return y

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize("after", [lambda: L.Rescaling(2.0), lambda: L.Dense(2)], ids=["unused", "used"])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_a_gradient_that_python_takes(remat, after):
    def make():
        return keras.Sequential([keras.Input([4]), L.Dense(4), SquareInPython(), after()])

    data = normal(6, 4), normal(6, 4 if isinstance(after(), L.Rescaling) else 2, seed=1)
    assert_same(train(make, data), train(make, data, tf_gpipe.GPipeStrategy(2, 3, remat=remat)))


class Compiled(L.Layer):
    """A layer with a function of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @tf.function
    def call(self, x, training=None):
        return self.inner(x, training=training)


@pytest.mark.parametrize("inner", [L.BatchNormalization, lambda: L.Dropout(0.5)])
def test_a_function_that_would_hide_state_is_refused_in_training(inner):
    with pytest.raises(ValueError, match=r"whose `call` is a `tf.function`, with '.*Take `tf.function` off"):
        trained(tf_gpipe.GPipeStrategy(2, 2), Compiled(inner()))


def test_a_function_without_state_trains_as_in_plain_keras():
    wanted, _ = trained(None, Compiled(L.Dense(4, "tanh")))
    found, _ = trained(tf_gpipe.GPipeStrategy(2, 2), Compiled(L.Dense(4, "tanh")))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
