"""Convolutions by filters of one position, as the matrix products that they are, while a stage is traced for a CPU.

TensorFlow's kernels take up to a third less time for the product, and up to half for the gradient of the filters. See
docs/decisions/0012-pointwise-convolutions.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tf_gpipe import compat


@contextlib.contextmanager
def as_products(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Layers that only mix the channels of each position do so by a product in here."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if is_pointwise(layer):
                stack.enter_context(compat.replaced(layer, "convolution_op", _operation_of(layer)))
        yield


def is_pointwise(layer: keras.Layer) -> bool:
    """Whether a layer multiplies the channels of each position by its kernel, only that, and in Keras's own way.

    In 16 bits it stays a convolution: TensorFlow adds up the gradient of a bias in as many, apart from convolutions',
    and comes to a few per cent of it.
    """
    return (
        compat.runs_as_in_keras(layer, keras.layers.Conv2D)
        and set(layer.kernel_size) == {1}
        and set(layer.strides) == {1}
        and layer.groups == 1
        and layer.data_format == "channels_last"
        and layer.compute_dtype in ("float32", "float64")
    )


def _operation_of(layer: keras.layers.Conv2D) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    def convolution_op(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        if inputs.shape.rank != 4 or inputs.shape[-1] != kernel.shape[-2]:  # not known, or an error to be told
            return type(layer).convolution_op(layer, inputs, kernel)
        return product(inputs, kernel)

    return convolution_op


def product(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The convolution of `(rows, height, width, channels)` by a kernel `(1, 1, channels, filters)`."""
    channels, filters = kernel.shape[-2:]
    kernel = tf.reshape(tf.convert_to_tensor(kernel), [channels, filters])
    flat = tf.matmul(tf.reshape(inputs, [-1, channels]), kernel)
    sizes = [tf.shape(inputs)[i] if size is None else size for i, size in enumerate(inputs.shape[:-1])]
    return tf.reshape(flat, [*sizes, filters])
