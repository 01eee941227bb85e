"""Convolutions by 1x1 filters run as matrix products on CPUs, with the same numbers; layers stay as they are."""

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


@pytest.mark.parametrize(
    ("layer", "is_product"),
    [
        (keras.layers.Conv2D(5, 1), True),
        (keras.layers.Conv2D(5, 1, padding="same", dilation_rate=2, activation="relu"), True),
        (keras.layers.Conv2D(5, 1, dtype="mixed_bfloat16"), True),
        (keras.layers.Conv2D(5, (1, 3)), False),
        (keras.layers.Conv2D(5, 1, strides=2), False),
        (keras.layers.Conv2D(4, 1, groups=2), False),
        (keras.layers.Conv2D(5, 1, data_format="channels_first"), False),
        (keras.layers.Conv2DTranspose(5, 1), False),
        (keras.layers.DepthwiseConv2D(1), False),
        (keras.layers.Dense(5), False),
        (Scaled(5, 1), False),
    ],
)
def test_which_layers_are_products(layer, is_product):
    assert pointwise.is_pointwise(layer) == is_product


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("dtype", ["float32", "float64", "mixed_bfloat16"])
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
        tolerance = 2e-2 if dtype == "mixed_bfloat16" else 1e-5
        np.testing.assert_allclose(tf.cast(made, "float64"), tf.cast(value, "float64"), rtol=tolerance, atol=tolerance)


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
