"""What is passed from stage to stage: dense tensors, and ragged and sparse ones, which are several tensors in one.

Functions take and return flat lists of tensors; a ragged or sparse tensor is spread out into its components there. A
dense tensor is its own only component.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

Value: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
Kind: TypeAlias = "tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec"


def is_dense(value: Value | Kind) -> bool:
    """Whether a value, or a value of this kind, is one tensor."""
    return not isinstance(value, tf.RaggedTensor | tf.SparseTensor | tf.RaggedTensorSpec | tf.SparseTensorSpec)


def has_gradient(kind: Kind | None) -> bool:
    """Whether gradients flow through values of a kind: dense, and of a dtype that has gradients."""
    return kind is not None and is_dense(kind) and is_differentiable(kind.dtype)


def is_differentiable(dtype: tf.DType) -> bool:
    """Whether gradients flow through numbers of a dtype: floating-point and complex ones."""
    return bool(dtype.is_floating or dtype.is_complex)


def kind_of(value: Value | None, shape: Sequence[int | None] | None = None) -> Kind | None:
    """The kind of a value, with its own shape or another; None for None."""
    if value is None:
        return None
    shape = value.shape if shape is None else shape
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    return (tf.SparseTensorSpec if isinstance(value, tf.SparseTensor) else tf.TensorSpec)(shape, value.dtype)


def kind_of_shape(kind: Kind, shape: Sequence[int | None]) -> Kind:
    """The same kind with another shape of the same rank."""
    if isinstance(kind, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, kind.dtype, kind.ragged_rank, kind.row_splits_dtype)
    return type(kind)(shape, kind.dtype)


def components(values: Iterable[Value | Kind | None]) -> list[tf.Tensor]:
    """The tensors (or kinds of tensors) that values consist of, in order; None has none."""
    present = [value for value in values if value is not None]
    return list(tf.nest.flatten(present, expand_composites=True))


def take_value(kind: Kind | None, flat: list[tf.Tensor]) -> Value | None:
    """Takes a value of a kind from the front of a flat list; None for None."""
    if kind is None:
        return None
    count = len(components([kind]))
    parts = [flat.pop(0) for _ in range(count)]
    return parts[0] if is_dense(kind) else tf.nest.pack_sequence_as(kind, parts, expand_composites=True)


def num_rows(value: Value) -> tf.Tensor:
    """Number of rows, a scalar int32 tensor."""
    if isinstance(value, tf.RaggedTensor):
        return value.nrows(tf.int32)
    return tf.cast(value.dense_shape[0], tf.int32) if isinstance(value, tf.SparseTensor) else tf.shape(value)[0]


def rows_of(value: Value, begin: int | tf.Tensor, size: int | tf.Tensor) -> Value:
    """Rows `begin` to `begin + size` − 1."""
    if not isinstance(value, tf.SparseTensor):
        return value[begin : begin + size]
    rest = value.dense_shape[1:]
    start = tf.concat([tf.cast([begin], tf.int64), tf.zeros_like(rest)], axis=0)
    return tf.sparse.slice(value, start, tf.concat([tf.cast([size], tf.int64), rest], axis=0))


def concatenated(parts: Sequence[Value]) -> Value:
    """Puts rows together in order."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    return tf.concat(list(parts), axis=0)
