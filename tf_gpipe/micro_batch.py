"""Splits a mini-batch into micro-batches and gathers what they gave.

N rows become min(M, N) micro-batches, as equal as possible, the longer ones first, in order, so that no row is dropped
or padded. Where N is known only when the step runs, there are always M micro-batches; those beyond N repeat one row of
the mini-batch, so that no operation ever sees an empty tensor, and count for nothing: weight 0, gradients 0, outputs
dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe import values
from tf_gpipe.errors import MicroBatchError
from tf_gpipe.values import Value


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of the mini-batch each micro-batch takes.

    Attributes:
        begins: first row of each micro-batch; ints, or scalar int32 tensors.
        sizes: number of rows that count; int or tensor, 0 only where `total` is a tensor.
        total: N.
        static_size: rows of every micro-batch where all have the same known number, else None.
    """

    begins: tuple[int | tf.Tensor, ...]
    sizes: tuple[int | tf.Tensor, ...]
    total: int | tf.Tensor
    static_size: int | None

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def is_static(self) -> bool:
        """Whether the number of rows is known now."""
        return isinstance(self.total, int)

    def weight(self, m: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Share of micro-batch `m` in the mini-batch, a scalar; the shares add up to 1."""
        if self.is_static:
            return tf.constant(self.sizes[m] / max(self.total, 1), dtype)
        return tf.cast(self.sizes[m] / tf.maximum(self.total, 1), dtype)  # int32 by int32 gives float64

    def split(self, value: Value) -> list[Value]:
        """The rows of each micro-batch of a value of shape `(N, ...)`."""
        if len(self) == 1:
            return [value]
        if self.is_static and isinstance(value, tf.Tensor) and value.shape[0] == self.total:
            return list(tf.split(value, len(self) if self.static_size else self.sizes))
        sizes = self.sizes if self.is_static else [tf.maximum(size, 1) for size in self.sizes]
        return [values.rows_of(value, begin, size) for begin, size in zip(self.begins, sizes, strict=True)]

    def split_gradient(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """As `split`, for the gradient of a gathered output: zero for a micro-batch that counts for nothing."""
        parts = self.split(tensor)
        if self.is_static:
            return parts
        empty = [tf.equal(size, 0) for size in self.sizes]
        return [tf.where(none, tf.zeros_like(part), part) for none, part in zip(empty, parts, strict=True)]

    def counted(self, value: Value, m: int) -> Value:
        """The rows of an output of micro-batch `m` that belong to the mini-batch."""
        return value if self.is_static else values.rows_of(value, 0, self.sizes[m])

    def gather(self, parts: Sequence[Value]) -> Value:
        """Puts the outputs of all micro-batches together again, in order: shape `(N, ...)`."""
        if len(parts) == 1:
            return parts[0]
        whole = values.concatenated([self.counted(part, m) for m, part in enumerate(parts)])
        if self.is_static and values.is_dense(whole):
            whole.set_shape([self.total, *whole.shape[1:]])
        return whole


def split_rows(num_rows: int | tf.Tensor, num_micro_batches: int) -> Rows:
    """Rows of each micro-batch: as equal as possible, longer ones first, in order.

    Args:
        num_rows: N, an int, or a scalar int32 tensor where N is known only when the step runs.
        num_micro_batches: M ≥ 1.

    Returns:
        min(M, N) micro-batches where N is an int, else M.

    Example:
        >>> split_rows(10, 4).sizes
        (3, 3, 2, 2)
        >>> split_rows(2, 4).sizes
        (1, 1)

    Reference: Huang et al. 2019, GPipe, section 2.2 (arXiv:1811.06965).
    """
    if isinstance(num_rows, int):
        count = max(1, min(num_micro_batches, num_rows))
        short, longer = divmod(num_rows, count)
        sizes = tuple(short + (m < longer) for m in range(count))
        begins = tuple(sum(sizes[:m]) for m in range(count))
        return Rows(begins, sizes, num_rows, None if longer else short)
    short, longer = num_rows // num_micro_batches, num_rows % num_micro_batches
    index = range(num_micro_batches)
    sizes = tuple(short + tf.cast(m < longer, num_rows.dtype) for m in index)
    begins = tuple(tf.minimum(m * short + tf.minimum(m, longer), tf.maximum(num_rows - 1, 0)) for m in index)
    return Rows(begins, sizes, num_rows, None)


def count_rows(tensors: Sequence[Value], names: Sequence[str]) -> int | tf.Tensor:
    """N, the common length of the first axis of a model's inputs.

    Args:
        tensors: the inputs, each of shape `(N, ...)`.
        names: their names, for the error.

    Returns:
        N as an int where it is known, else a scalar int32 tensor.

    Raises:
        MicroBatchError: the known first axes differ, or an input has none. First axes that are known only when the step
            runs are compared then: a `tf.errors.InvalidArgumentError`.
    """
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.shape.rank == 0:
            raise MicroBatchError(
                f"Expected every input of the model to have a batch axis to split. Received: input '{name}' is a "
                "scalar. Give it one row for each example, or make it a weight or an attribute of a layer."
            )
    known = {name: t.shape[0] for t, name in zip(tensors, names, strict=True) if t.shape[0] is not None}
    if len(set(known.values())) > 1:
        raise MicroBatchError(
            f"Expected all inputs of the model to have the same number of rows. Received: {known}. "
            "Make the first axis of every input the batch axis."
        )
    first = next((i for i, tensor in enumerate(tensors) if tensor.shape[0] is not None), 0)
    rows = int(tensors[first].shape[0]) if known else values.num_rows(tensors[first])
    checks = [
        tf.debugging.assert_equal(
            values.num_rows(tensor),
            rows,
            "Expected all inputs of the model to have the same number of rows, in their first axis. Received: input "
            f"{name} differs from input {names[first]}.",
        )
        for tensor, name in zip(tensors, names, strict=True)
        if tensor.shape[0] is None and tensor is not tensors[first]
    ]
    if known or not checks:
        return rows
    with tf.control_dependencies(checks):
        return tf.identity(rows)
