"""Convolutions by filters of one position, as the matrix products that they are, while a stage is traced for a CPU.

TensorFlow's kernels take up to a third less time for the product, and up to half for the gradient of the filters. See
docs/decisions/0012-pointwise-convolutions.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tf_gpipe import compat


@contextlib.contextmanager
def as_products(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Layers that only mix the channels of each position do so by a product in here."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if is_pointwise(layer):
                stack.enter_context(compat.replaced(layer, "convolution_op", product))
        yield


def is_pointwise(layer: keras.Layer) -> bool:
    """Whether a layer is a convolution that multiplies the channels of each position by its kernel, and only that."""
    return (
        isinstance(layer, keras.layers.Conv2D)
        and type(layer).convolution_op is keras.layers.Conv2D.convolution_op
        and set(layer.kernel_size) == {1}
        and set(layer.strides) == {1}
        and layer.groups == 1
        and layer.data_format == "channels_last"
    )


def product(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The convolution of `(rows, height, width, channels)` by a kernel `(1, 1, channels, filters)`."""
    inputs = tf.convert_to_tensor(inputs)
    kernel = tf.convert_to_tensor(kernel)
    flat = tf.matmul(tf.reshape(inputs, [-1, inputs.shape[-1]]), tf.reshape(kernel, kernel.shape[-2:]))
    sizes = [tf.shape(inputs)[i] if size is None else size for i, size in enumerate(inputs.shape[:-1])]
    return tf.reshape(flat, [*sizes, kernel.shape[-1]])
