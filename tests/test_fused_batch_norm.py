"""Batch norm of images is one operation on CPUs, with the same numbers; layers stay as they are."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, normal, train

import tf_gpipe
from tf_gpipe import compat, fused_batch_norm

BatchNorm = keras.layers.BatchNormalization


class Scaled(BatchNorm):
    """A batch norm with a `call` of its own."""

    def call(self, inputs, training=None, mask=None, times=2.0):
        """Twice the outputs."""
        return times * super().call(inputs, training=training, mask=mask)


class Shifted(BatchNorm):
    """A batch norm with statistics of its own."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean + 1.0, variance


def doubled(method):
    """A method that a decorator has changed, under its old name."""

    @functools.wraps(method)
    def run(*arguments, **named):
        return 2 * method(*arguments, **named)

    return run


class Decorated(BatchNorm):
    """A batch norm whose `call` is decorated."""

    call = doubled(BatchNorm.call)


def replaced(layer):
    """The layer with a `call` of its own."""
    layer.call = doubled(layer.call)
    return layer


def with_epsilon(layer):
    """The layer with an epsilon that is no number."""
    layer.epsilon = tf.constant(1e-3)
    return layer


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (BatchNorm(), True),
        (BatchNorm(axis=3, center=False, scale=False), True),
        (BatchNorm(dtype="float64"), False),
        (BatchNorm(dtype="mixed_bfloat16"), False),
        (BatchNorm(renorm=True), False),
        (Scaled(), False),
        (Shifted(), False),
        (Decorated(), False),
        (replaced(BatchNorm()), False),
        (with_epsilon(BatchNorm()), False),
    ],
)
def test_which_layers_are_fused(layer, fused):
    assert fused_batch_norm.is_fusible(layer) == fused


@pytest.mark.parametrize(
    ("axis", "shape", "dtype", "fits"),
    [
        (-1, [4, 3, 3, 5], "float32", True),
        (3, [None, None, None, 5], "float32", True),
        (1, [4, 5, 3, 3], "float32", False),
        (-1, [4, 5], "float32", False),
        (-1, [4, 3, 3, 3, 5], "float32", False),
        (-1, [4, 3, 3, 5], "float64", False),
        (-1, [4, 3, 3, 1], "float32", False),
    ],
)
def test_which_inputs_fit(axis, shape, dtype, fits):
    layer = BatchNorm(axis=axis)
    layer.build(shape)
    graph = tf.Graph()
    with graph.as_default():
        assert fused_batch_norm.fits(layer, tf.compat.v1.placeholder(dtype, shape)) == fits


def test_arrays_and_weights_of_another_shape_do_not_fit():
    layer = built()
    assert not fused_batch_norm.fits(layer, normal(4, 3, 3, 5))
    layer.gamma = tf.ones([1, 1, 1, 5])
    assert not fused_batch_norm.fits(layer, tf.zeros([4, 3, 3, 5]))


def test_a_method_that_was_patched_on_the_class_is_kept(monkeypatch):
    monkeypatch.setattr(BatchNorm, "call", doubled(BatchNorm.call))
    assert not fused_batch_norm.is_fusible(BatchNorm())


def built(**arguments):
    """A layer of 5 channels with other weights than it begins with."""
    layer = BatchNorm(beta_initializer="normal", gamma_initializer=keras.initializers.RandomNormal(1.0), **arguments)
    layer.build([None, None, None, 5])
    return layer


def keras_normalises(layer, x):
    """Outputs and statistics of Keras's own operations."""
    mean, variance = keras.ops.moments(x, axes=[0, 1, 2])
    gamma, beta = (None if v is None else v.value for v in (layer.gamma, layer.beta))
    return keras.ops.batch_normalization(x, mean, variance, -1, beta, gamma, layer.epsilon), mean, variance


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("arguments", [{}, {"epsilon": 0.3}, {"scale": False}, {"center": False}])
def test_results_and_gradients_are_those_of_keras(rows, arguments):
    layer = built(**arguments)
    x, d = tf.constant(3.0 + 2.0 * normal(rows, 2, 1, 5)), tf.constant(normal(rows, 2, 1, 5, seed=1))

    @tf.function
    def of(x, d, normalise):
        weights = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, *statistics = normalise(layer, x)
        return [y, *statistics[:2], *tape.gradient(y, [x, *weights], output_gradients=d)]

    for made, wanted in zip(of(x, d, fused_batch_norm.normalise), of(x, d, keras_normalises), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=2e-5)
    assert fused_batch_norm.normalise(layer, x)[3].numpy() == 2 * rows


def test_a_single_value_has_no_variance():
    layer = built()
    outputs, mean, variance, count = fused_batch_norm.normalise(layer, tf.constant(normal(1, 1, 1, 5)))
    np.testing.assert_array_equal(variance, np.zeros(5))
    np.testing.assert_array_equal(mean, normal(1, 1, 1, 5)[0, 0, 0])
    np.testing.assert_allclose(outputs[0, 0, 0], layer.beta, atol=1e-6)
    assert count == 1


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_a_large_mean_does_not_cancel(mean):
    x = (mean + normal(64, 4, 4, 5)).astype("float32")
    _, found, variance, _ = fused_batch_norm.normalise(built(), tf.constant(x))
    np.testing.assert_allclose(found, x.astype("float64").mean((0, 1, 2)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(variance, x.astype("float64").var((0, 1, 2)), rtol=1e-4)


def total(gradients):
    return tf.reduce_sum(tf.square(gradients))


def weighted(gradients):
    return tf.reduce_sum(gradients * normal(6, 2, 2, 5, seed=2))


def norms(gradients):
    return tf.reduce_sum(tf.sqrt(tf.reduce_sum(tf.square(gradients), [1, 2, 3])))


@pytest.mark.parametrize("penalty_of", [total, weighted, norms])
def test_second_derivatives_are_those_of_keras(penalty_of):
    """Keras's own, which hold the mean fixed inside the variance, so that they are not the true ones."""
    layer = built()
    x, d = tf.constant(normal(6, 2, 2, 5)), tf.constant(normal(6, 2, 2, 5, seed=1))

    @tf.function
    def of(x, normalise):
        sources = [x, layer.gamma.value, layer.beta.value]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.sin(normalise(layer, x)[0]) * d
            penalty = penalty_of(inner.gradient(y, x)) + tf.reduce_sum(y)
        return outer.gradient(penalty, sources)

    for made, wanted in zip(of(x, fused_batch_norm.normalise), of(x, keras_normalises), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4)


def images(*, frozen=True):
    """Batch norm after a convolution, without scale, in a layer, called twice, and perhaps frozen."""
    twice, last = BatchNorm(), BatchNorm(trainable=not frozen)
    inner = keras.Sequential([keras.layers.Conv2D(6, 3, use_bias=False), BatchNorm(scale=False), keras.layers.ReLU()])
    x = inputs = keras.Input([8, 8, 3])
    x = keras.layers.ReLU()(BatchNorm(momentum=0.8)(keras.layers.Conv2D(6, 3, use_bias=False)(x)))
    x = twice(last(keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)(twice(inner(x)))))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))))


def operations(model, strategy):
    """Types of the operations in a training step."""

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, ((x, y),))

    graph = step.get_concrete_function(tf.zeros([8, 8, 8, 3]), tf.zeros([8, 2])).graph
    return [op.type for op in compat.all_operations(graph)]


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_training_is_that_of_plain_keras(remat):
    data = normal(32, 8, 8, 3), normal(32, 2, seed=1)
    one = tf_gpipe.GPipeStrategy(1, 1, remat=remat)
    assert_same(train(images, data), train(images, data, one))
    two = tf_gpipe.GPipeStrategy(2, 4, remat=remat)
    assert_same(train(images, data, tf_gpipe.GPipeStrategy(1, 4, remat=remat)), train(images, data, two))


@pytest.mark.parametrize("remat", ["always", "never"])
def test_each_layer_is_one_operation(remat):
    strategy = tf_gpipe.GPipeStrategy(2, 2, remat=remat)
    make = functools.partial(images, frozen=False)
    model, _ = train(make, (normal(8, 8, 8, 3), normal(8, 2)), strategy, batch_size=8, epochs=1)
    found = operations(model, strategy)
    assert {"FusedBatchNormV3", "FusedBatchNormGradV3"} <= set(found)
    assert "Rsqrt" not in found
    assert all("call" not in vars(layer) for layer in model.layers)


def test_xla_keeps_operations_whose_variance_does_not_cancel():
    strategy = tf_gpipe.GPipeStrategy(2, 2, jit_compile=True)
    model, _ = train(images, (normal(8, 8, 8, 3), normal(8, 2)), strategy, batch_size=8, epochs=1)
    assert not [name for name in operations(model, strategy) if name.startswith("FusedBatchNorm")]
