"""Batch normalisation as one operation of TensorFlow, while a stage is traced for a CPU.

Keras normalises by a dozen small operations, and goes back by two dozen; TensorFlow has one for each way, which takes a
fifth to a half of the time. See docs/decisions/0013-fused-batch-norm.md.
"""

from __future__ import annotations

import numbers
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat


def is_fusible(layer: keras.layers.BatchNormalization) -> bool:
    """Whether a layer normalises in Keras's own way, by the statistics of its inputs, in float32."""
    return (
        compat.runs_as_in_keras(layer, keras.layers.BatchNormalization)
        and not getattr(layer, "renorm", False)
        and layer.compute_dtype == "float32"
        and isinstance(layer.epsilon, numbers.Real)
    )


def fits(layer: keras.layers.BatchNormalization, inputs: Any) -> bool:
    """Whether the operation takes these inputs and weights: images, and a number for each of several channels.

    It adds up the values of a channel one after the other; of a single channel, Keras's sums are much more exact.
    """
    channels = layer.moving_mean.shape
    weights = [weight for weight in (layer.gamma, layer.beta) if weight is not None]
    return (
        tf.is_tensor(inputs)
        and inputs.dtype == tf.float32
        and inputs.shape.rank == 4
        and layer.axis in (-1, 3)
        and channels != (1,)
        and all(weight.shape == channels and weight.dtype == "float32" for weight in weights)
    )


def normalise(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """What a layer gives for its inputs in training.

    Args:
        layer: the layer.
        inputs: float32 `(rows, height, width, channels)`.

    Returns:
        The outputs; the mean and the biased variance of each channel, and over how many values they were taken.
    """
    channels = layer.moving_mean.shape
    gamma = tf.convert_to_tensor(layer.gamma) if layer.scale else tf.ones(channels)
    beta = tf.convert_to_tensor(layer.beta) if layer.center else tf.zeros(channels)
    epsilon = float(layer.epsilon)
    with compat.stop_recording():
        made = tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=gamma, offset=beta, mean=[], variance=[], epsilon=epsilon, is_training=True
        )
    spaces = {name: getattr(made, name) for name in ("reserve_space_1", "reserve_space_2", "reserve_space_3")}

    def gradient(d: tf.Tensor) -> list[tf.Tensor]:
        return _gradient(d, inputs, gamma, spaces, epsilon)

    compat.record_operation("FusedBatchNorm", [made.y], [inputs, gamma, beta], [], gradient)
    count = tf.cast(tf.size(inputs, tf.int64) // channels[0], tf.float32)
    return made.y, made.batch_mean, made.reserve_space_2, count  # `batch_variance` is the unbiased one


def _gradient(
    d: tf.Tensor, inputs: tf.Tensor, gamma: tf.Tensor, spaces: dict[str, tf.Tensor], epsilon: float
) -> list[tf.Tensor]:
    """Gradients of the inputs, gamma and beta."""
    with compat.stop_recording():
        made = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=d, x=inputs, scale=gamma, epsilon=epsilon, is_training=True, **spaces
        )
    gradients = [made.x_backprop, made.scale_backprop, made.offset_backprop]

    def second(*dd: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([d, inputs, gamma])
            again = _gradient_in_steps(d, inputs, gamma, epsilon)
        return tape.gradient(again, [d, inputs, gamma], output_gradients=list(dd))

    compat.record_operation("FusedBatchNormGradient", gradients, [d, inputs, gamma], [], second)
    return gradients


def _gradient_in_steps(d: tf.Tensor, inputs: tf.Tensor, gamma: tf.Tensor, epsilon: float) -> list[tf.Tensor]:
    """The same by Keras's operations, which have gradients of their gradients, as TensorFlow's one has not."""
    beta = tf.zeros_like(gamma)
    with tf.GradientTape() as tape:
        tape.watch([inputs, gamma, beta])
        mean, variance = keras.ops.moments(inputs, axes=[0, 1, 2])
        outputs = keras.ops.batch_normalization(inputs, mean, variance, -1, beta, gamma, epsilon)
    return tape.gradient(outputs, [inputs, gamma, beta], output_gradients=d)
