"""Layers in stages are as accurate as in plain Keras, against the same in float64.

Stages on CPUs run 1x1 convolutions as products, make the output of a max pooling again for its gradient, and take the
gradients of wide kernels once for all micro-batches.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import scope_of

import tf_gpipe

L = keras.layers

LAYERS = {
    "batch norm": lambda filters: L.BatchNormalization(),
    "1x1 convolution": lambda filters: L.Conv2D(filters, 1),
    "3x3 convolution": lambda filters: L.Conv2D(filters, 3, padding="same"),
    "max pooling": lambda filters: L.MaxPooling2D(2),
    "overlapping max pooling": lambda filters: L.MaxPooling2D(3, strides=1, padding="same"),
    "dense": L.Dense,
}
SIZES = {
    "few values": (4, 2, 3, 5),
    "many rows": (512, 4, 3, 3),
    "many positions": (4, 160, 8, 5),
    "many channels": (16, 4, 256, 192),
}
"""Rows, height and width, channels, filters."""
MICRO_BATCHES = 2


def outputs_and_gradients(kind, size, mean, strategy=None, dtype="float32"):
    """What a layer gives for normal values of a mean (some of them equal), and the gradients of all that it takes."""
    rows, side, channels, filters = size
    rng = np.random.default_rng(0)
    x = mean + rng.normal(size=(rows, side, side, channels)).round(2)
    with scope_of(strategy):
        layer = LAYERS[kind](filters)
        layer.dtype_policy = keras.DTypePolicy(dtype)
        model = keras.Sequential([keras.Input(x.shape[1:], dtype=dtype), layer])
    model.set_weights([rng.normal(size=weight.shape).astype("float32") for weight in model.weights])
    d = rng.normal(0.1, 1.0, size=(rows, *model.output_shape[1:]))

    def run(x, d):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = [x] if strategy is not None else tf.split(x, MICRO_BATCHES)
            y = tf.concat([model(part, training=True) for part in parts], 0)
        sources = [x, *(weight.value for weight in model.trainable_variables)]
        return [y, *tape.gradient(y, sources, output_gradients=d)]

    step = tf.function(run if strategy is None else lambda x, d: strategy.run(run, (x, d)))
    return step(*(tf.constant(array.astype("float32").astype(dtype)) for array in (x, d)))


def errors(found, truth):
    """Largest error of each, as a share of the largest value."""
    pairs = [(np.asarray(a, "float64"), np.asarray(b)) for a, b in zip(found, truth, strict=True)]
    return np.array([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_a_layer_in_a_stage_is_as_accurate_as_in_keras(kind, size, mean):
    strategy = tf_gpipe.GPipeStrategy(1, MICRO_BATCHES, remat="never")
    truth = outputs_and_gradients(kind, SIZES[size], mean, dtype="float64")
    plain, ours = (errors(outputs_and_gradients(kind, SIZES[size], mean, s), truth) for s in (None, strategy))
    assert np.all(ours <= 3 * plain + 2 * np.finfo("float32").eps), f"off by {ours}, plain Keras by {plain}"
