"""What is kept for a backward pass, and what is made again."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, scope_of

import tf_gpipe
from tf_gpipe import residuals


def trained(strategy, pooling, rows=12):
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        inputs = keras.Input([8, 8, 2])
        x = keras.layers.Conv2D(3, 3, activation="relu", padding="same")(inputs)
        x = keras.layers.Conv2D(4, 3)(pooling(x))
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    generator = np.random.default_rng(5)
    x = generator.normal(size=[rows, 8, 8, 2]).round(1).astype("float32")  # with ties
    model.fit(x, generator.normal(size=[rows, 2]), batch_size=rows, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize(
    "pooling",
    [
        lambda: keras.layers.MaxPooling2D(2),
        lambda: keras.layers.MaxPooling2D(3, strides=1, padding="same"),
    ],
    ids=["disjoint", "overlapping"],
)
def test_what_a_max_pooling_gave_is_made_again(pooling):
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat="never", partition=[4, 1])
    wanted, found = trained(None, pooling()), trained(strategy, pooling())
    for a, b in zip(wanted.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    (pipeline,) = vars(found)["_gpipe_pipelines"][strategy].values()
    (recorded,) = pipeline.stages[0]._recorded.values()
    assert recorded._residuals.kept
    assert all(tensor.op.type != "MaxPool" for tensor in recorded._residuals.kept)
    assert any(tensor.op.type == "Relu" for tensor in recorded._residuals.kept)
    assert [op.type for _, _, op in recorded._residuals.pooled] == ["MaxPool"]


def test_an_error_of_ours_is_raised(monkeypatch):
    def fails(*_):
        raise TypeError("a fault of the library")

    monkeypatch.setattr(residuals, "trace", fails)
    with pytest.raises(TypeError, match="a fault of the library"):
        trained(tf_gpipe.GPipeStrategy(2, 3, remat="never"), keras.layers.MaxPooling2D(2))


@tf.custom_gradient
def failing(x):
    def gradient(d):
        raise TypeError("no gradient today")

    return 2 * x[:, :2], gradient


class Applies(keras.layers.Layer):
    def __init__(self, function, **arguments):
        super().__init__(**arguments)
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor([x.shape[0], 2], x.dtype)


def area(x):
    """TensorFlow knows no gradient of this."""
    return tf.reshape(tf.image.resize(tf.reshape(x, [-1, 2, 2, 1]), [1, 2], "area"), [-1, 2])


def two_outputs(strategy, function, used):
    """Trains a model one of whose outputs is that of a function; without a loss, if it is not used."""
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        inputs = keras.Input([4])
        x = keras.layers.Dense(4, name="first")(inputs)
        outputs = {"plain": keras.layers.Dense(2, name="plain")(x), "odd": Applies(function, name="odd")(x)}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), {"plain": "mse", "odd": "mse" if used else None}, jit_compile=False)
    x = np.random.default_rng(5).normal(size=[12, 4]).astype("float32")
    y = {"plain": x[:, :2], "odd": x[:, 2:]} if used else {"plain": x[:, :2]}
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    return model


REASONS = {
    area: "LookupError: gradient registry has no entry for: ResizeArea",
    failing: "TypeError: no gradient today",
}


@pytest.mark.parametrize("function", REASONS)
def test_an_output_without_gradient_or_loss_is_recomputed_and_the_plan_says_why(function):
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat="never", partition=[1, 2])
    wanted, found = two_outputs(None, function, used=False), two_outputs(strategy, function, used=False)
    assert largest_difference(wanted, found) <= 1e-6
    plan = strategy.plan(found)
    assert plan.note == f"stage 1 recomputes its activations: {REASONS[function]}"
    assert str(plan).splitlines()[-1] == plan.note
    assert strategy.plan(two_outputs(strategy, lambda x: x[:, :2], used=True)).note == ""


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("function", REASONS)
def test_a_gradient_that_is_asked_for_and_fails_is_raised(function, remat):
    kind, _, text = REASONS[function].partition(": ")
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat=remat)
    with pytest.raises({"LookupError": LookupError, "TypeError": TypeError}[kind], match=text):
        two_outputs(strategy, function, used=True)


def test_a_function_of_python_is_recomputed_and_the_plan_says_why():
    def in_python(x):
        y = tf.py_function(lambda x: 2 * x[:, :2], [x], tf.float32)
        return tf.ensure_shape(y, [None, 2])

    strategy = tf_gpipe.GPipeStrategy(2, 3, remat="never", partition=[1, 2])
    note = strategy.plan(two_outputs(strategy, in_python, used=True)).note
    assert note.startswith("stage 1 recomputes its activations: the gradient of a `tf.py_function`")
