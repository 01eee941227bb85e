"""Gradients of weights that are one operation over the rows: taken once for all micro-batches, from what went into it.

The gradient of a dense kernel is `xᵀ d`, a sum over the rows of its layer. Taken for every micro-batch, it is as large
as the kernel each time, is written, and is added to the sum so far: for wide layers and few rows that moves more memory
than the layer itself. The sum over micro-batches is the same operation over `x` and `d` of all of them, one below the
other:

    x₀ᵀ d₀ + x₁ᵀ d₁ + …  =  [x₀; x₁; …]ᵀ [d₀; d₁; …]

A backward function then gives `x` and `d` instead, and the operation runs once, after the stage's last backward task.
See docs/decisions/0009-weight-gradients.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_UNCHANGED = {"Cast", "Identity", "Reshape"}
"""What may follow: it changes neither the numbers, rounding apart, nor their order."""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """An operation of two operands that sums over an axis of both, which may be that of the rows.

    Attributes:
        kind: type of the operation.
        axes: that axis of the first operand and of the second.
        attributes: what else the operation is given.
    """

    kind: str
    axes: tuple[int, int]
    attributes: tuple[tuple[str, Any], ...]

    def run(self, first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum over all micro-batches, whose operands are given in the same order."""
        operands = [tf.concat(parts, axis) for parts, axis in zip((first, second), self.axes, strict=True)]
        return _RUN[self.kind](*operands, **dict(self.attributes))


def find(gradient: tf.Tensor) -> tuple[Contraction, tf.Tensor, tf.Tensor] | None:
    """The contraction that made a tensor of a graph, and its two operands; None if it was made by something else."""
    op = gradient.op
    while op.type in _UNCHANGED:
        op = op.inputs[0].op
    reader = _READ.get(op.type)
    return reader(op) if reader else None


def size(*operands: tf.Tensor) -> float:
    """How many numbers there are in them; infinite if it is not known."""
    shapes = [tensor.shape for tensor in operands]
    if not all(shape.is_fully_defined() for shape in shapes):
        return math.inf
    return sum(math.prod(shape) for shape in shapes)


def _read_matmul(op: tf.Operation) -> tuple[Contraction, tf.Tensor, tf.Tensor]:
    transposed = {name: op.get_attr(name) for name in ("transpose_a", "transpose_b")}
    axes = (0 if transposed["transpose_a"] else 1, 1 if transposed["transpose_b"] else 0)
    return Contraction(op.type, axes, tuple(transposed.items())), *op.inputs


def _read_einsum(op: tf.Operation) -> tuple[Contraction, tf.Tensor, tf.Tensor] | None:
    equation = op.get_attr("equation").decode()
    operands, result = equation.split("->")
    parts = operands.split(",")
    if len(parts) != 2 or "." in equation:
        return None
    summed = [label for label in parts[0] if label in parts[1] and label not in result]
    if not summed or any(len(set(part)) < len(part) for part in parts):
        return None
    axes = (parts[0].index(summed[0]), parts[1].index(summed[0]))
    return Contraction(op.type, axes, (("equation", equation),)), *op.inputs


def _read_convolution(op: tf.Operation) -> tuple[Contraction, tf.Tensor, tf.Tensor] | None:
    sizes = op.outputs[0].shape
    if not sizes.is_fully_defined():
        return None
    names = ("strides", "padding", "use_cudnn_on_gpu", "explicit_paddings", "data_format", "dilations")
    values = [(name, op.get_attr(name)) for name in names]
    kept = [(n, v.decode() if isinstance(v, bytes) else tuple(v) if isinstance(v, list) else v) for n, v in values]
    contraction = Contraction(op.type, (0, 0), (("sizes", tuple(sizes)), *kept))
    return contraction, op.inputs[0], op.inputs[2]


_READ: dict[str, Callable[[tf.Operation], tuple[Contraction, tf.Tensor, tf.Tensor] | None]] = {
    "Conv2DBackpropFilter": _read_convolution,
    "Einsum": _read_einsum,
    "MatMul": _read_matmul,
}


def _einsum(first: tf.Tensor, second: tf.Tensor, *, equation: str) -> tf.Tensor:
    return tf.raw_ops.Einsum(inputs=[first, second], equation=equation)


def _convolution(first: tf.Tensor, second: tf.Tensor, *, sizes: Sequence[int], **attributes: Any) -> tf.Tensor:
    filter_sizes = tf.constant(sizes, tf.int32)
    return tf.raw_ops.Conv2DBackpropFilter(input=first, filter_sizes=filter_sizes, out_backprop=second, **attributes)


def _matmul(first: tf.Tensor, second: tf.Tensor, **attributes: bool) -> tf.Tensor:
    return tf.raw_ops.MatMul(a=first, b=second, **attributes)


_RUN: dict[str, Callable[..., tf.Tensor]] = {
    "Conv2DBackpropFilter": _convolution,
    "Einsum": _einsum,
    "MatMul": _matmul,
}
