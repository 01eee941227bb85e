"""Convolutions by 1x1 filters run as matrix products on CPUs, with the same numbers; layers stay as they are."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, normal, train

import tf_gpipe
from tf_gpipe import compat, pointwise


class Scaled(keras.layers.Conv2D):
    """A convolution with an operation of its own."""

    def convolution_op(self, inputs, kernel):
        """Twice the convolution."""
        return 2 * super().convolution_op(inputs, kernel)


class Called(keras.layers.Conv2D):
    """A convolution whose kernel is another when it is called."""

    def call(self, inputs):
        """A convolution by the kernel and its neighbours."""
        return self.convolution_op(inputs, keras.ops.tile(self.kernel, [1, 3, 1, 1]))


class Decorated(keras.layers.Conv2D):
    """A convolution whose operation is decorated."""

    convolution_op = functools.wraps(keras.layers.Conv2D.convolution_op)(
        lambda self, inputs, kernel: 2 * keras.ops.conv(inputs, kernel)
    )


def replaced(layer):
    """The layer with an operation of its own."""
    layer.convolution_op = lambda inputs, kernel: 2 * keras.ops.conv(inputs, kernel)
    return layer


@pytest.mark.parametrize(
    ("layer", "is_product"),
    [
        (keras.layers.Conv2D(5, 1), True),
        (keras.layers.Conv2D(5, 1, padding="same", dilation_rate=2, activation="relu"), True),
        (keras.layers.Conv2D(5, 1, dtype="float64"), True),
        (keras.layers.Conv2D(5, 1, dtype="mixed_bfloat16"), False),
        (keras.layers.Conv2D(5, 1, dtype="mixed_float16"), False),
        (keras.layers.Conv2D(5, (1, 3)), False),
        (keras.layers.Conv2D(5, 1, strides=2), False),
        (keras.layers.Conv2D(4, 1, groups=2), False),
        (keras.layers.Conv2D(5, 1, data_format="channels_first"), False),
        (keras.layers.Conv2DTranspose(5, 1), False),
        (keras.layers.DepthwiseConv2D(1), False),
        (keras.layers.Dense(5), False),
        (Scaled(5, 1), False),
        (Called(5, 1), False),
        (Decorated(5, 1), False),
        (replaced(keras.layers.Conv2D(5, 1)), False),
    ],
)
def test_which_layers_are_products(layer, is_product):
    assert pointwise.is_pointwise(layer) == is_product


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_is_the_convolution(size, dtype):
    layer = keras.layers.Conv2D(5, 1, activation="tanh", bias_initializer="normal", dtype=dtype)
    layer.build([None, None, None, 4])
    x = tf.constant(normal(2, 3, 3, 4), layer.compute_dtype)

    def of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, *tape.gradient(y, [x, *(v.value for v in layer.variables)])

    wanted = of(x)
    with pointwise.as_products([layer]):
        traced = tf.function(of, input_signature=[tf.TensorSpec([None, size, size, 4], x.dtype)])
        traced = traced.get_concrete_function()
    assert "convolution_op" not in vars(layer)
    operations = {op.type for op in traced.graph.get_operations()}
    assert "MatMul" in operations
    assert not any(name.startswith("Conv2D") for name in operations)
    assert traced.structured_outputs[0].shape.as_list() == [None, size, size, 5]
    for value, made in zip(wanted, traced(x), strict=True):
        np.testing.assert_allclose(made, value, rtol=1e-5, atol=1e-5)


def test_a_convolution_patched_on_the_class_stays_what_it_is(monkeypatch):
    monkeypatch.setattr(keras.layers.Conv2D, "convolution_op", lambda self, inputs, kernel: inputs)
    assert not pointwise.is_pointwise(keras.layers.Conv2D(5, 1))


class Unshaped(keras.layers.Layer):
    """Makes a tensor forget its shape."""

    def call(self, x):
        """The same values."""
        return tf.reshape(x, tf.shape(x)[tf.newaxis][0])

    def compute_output_shape(self, input_shape):
        """As the input."""
        return input_shape


@pytest.mark.parametrize("unknown", [Unshaped, keras.layers.Identity])
def test_channels_that_are_not_known_stay_a_convolution(unknown):
    def make():
        return keras.Sequential([keras.Input([6, 6, 3]), unknown(), keras.layers.Conv2D(2, 1), keras.layers.ReLU()])

    data = normal(8, 6, 6, 3), normal(8, 6, 6, 2, seed=1)
    assert_same(train(make, data, batch_size=8), train(make, data, tf_gpipe.GPipeStrategy(2, 2), batch_size=8))


def test_bias_gradients_in_bfloat16_are_as_near_as_those_of_plain_keras():
    """TensorFlow adds up 65,536 numbers in 16 bits where a bias follows anything but a convolution: 98 % off.

    On processors without instructions for 16 bits it does so after convolutions, too, and plain Keras is as far off.
    """

    def make(dtype="mixed_bfloat16"):
        layer = keras.layers.Conv2D(4, 1, dtype=dtype)
        return keras.Sequential([keras.Input([64, 64, 3]), layer, keras.layers.Activation("linear", dtype="float32")])

    data = normal(16, 64, 64, 3), np.ones([16, 64, 64, 4], "float32")

    def compile():
        return {"optimizer": keras.optimizers.SGD(1.0), "loss": "mse"}

    plain, _ = train(make, data, compile=compile, epochs=1)
    ours, _ = train(make, data, tf_gpipe.GPipeStrategy(1, 2), compile=compile, epochs=1)
    exact, _ = train(lambda: make("float32"), data, compile=compile, epochs=1)
    bias, of_keras, truth = (model.layers[0].bias.numpy() for model in (ours, plain, exact))
    assert np.all(np.abs(truth) > 0.1)
    assert np.all(np.abs(bias - truth) <= np.abs(of_keras - truth) + 0.02 * np.abs(truth))


def convolutions() -> keras.Model:
    """Stages of pointwise and other convolutions, one of them inside a layer, one called twice."""
    inner = keras.Sequential([keras.layers.Conv2D(6, 1, activation="relu"), keras.layers.BatchNormalization()])
    shared = keras.layers.Conv2D(6, 1)
    x = inputs = keras.Input([6, 6, 3])
    x = keras.layers.Conv2D(6, 3, activation="relu")(x)
    x = shared(keras.layers.BatchNormalization()(shared(inner(x))))
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_training_is_that_of_plain_keras(remat):
    data = normal(32, 6, 6, 3), normal(32, 2, seed=1)
    one = tf_gpipe.GPipeStrategy(1, 1, remat=remat)
    assert_same(train(convolutions, data), train(convolutions, data, one))
    two, plain = tf_gpipe.GPipeStrategy(2, 4, remat=remat), tf_gpipe.GPipeStrategy(1, 4, remat=remat)
    assert_same(train(convolutions, data, plain), train(convolutions, data, two))


@pytest.mark.parametrize("remat", ["always", "never"])
def test_the_stages_have_no_pointwise_convolution(remat):
    strategy = tf_gpipe.GPipeStrategy(2, 2, remat=remat)
    model, _ = train(convolutions, (normal(8, 6, 6, 3), normal(8, 2)), strategy, batch_size=8, epochs=1)

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, ((x, y),))

    graph = step.get_concrete_function(tf.zeros([8, 6, 6, 3]), tf.zeros([8, 2])).graph
    convolutions_there = [op for op in compat.all_operations(graph) if op.type == "Conv2D"]
    assert {op.inputs[1].shape.as_list()[0] for op in convolutions_there} == {3}
