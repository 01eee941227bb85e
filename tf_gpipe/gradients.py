"""Gradients of weights: summed over micro-batches, and over the stages that share a weight.

A stage's backward function treats the gradient of a weight in one of three ways:

- **summed**: it is added to a running sum that the function takes and gives, in float32 for 16-bit weights. Small
  weights share one buffer, so that a stage of hundreds of them passes on a few tensors from task to task;
- **deferred**: the function gives what the gradient is made of, and it is made once for all micro-batches
  (`contraction.py`), where that costs no memory, or where memory is not what is saved;
- **sparse**: `tf.IndexedSlices` (embeddings) come out of each backward function and are put side by side at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import contraction
from tf_gpipe.contraction import Contraction

SMALL = 1 << 16
"""Numbers in a weight up to which it shares a buffer: adding them costs less than handing them on one by one."""


@dataclasses.dataclass(frozen=True)
class Buffers:
    """How the running sums of a stage's weights are laid out.

    Attributes:
        groups: positions of the weights in each buffer.
        dtypes: of each buffer.
    """

    groups: tuple[tuple[int, ...], ...]
    dtypes: tuple[tf.DType, ...]

    @classmethod
    def of(cls, weights: Sequence[keras.Variable]) -> Buffers:
        """The layout for the trained weights of a stage."""
        shared: dict[tf.DType, list[int]] = {}
        groups = []
        for i, v in enumerate(weights):
            if math.prod(v.shape) > SMALL or v.overwrite_with_gradient:
                groups.append([i])
            else:
                shared.setdefault(_sum_dtype(v), []).append(i)
        groups += shared.values()
        return cls(tuple(map(tuple, groups)), tuple(_sum_dtype(weights[group[0]]) for group in groups))

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Kinds of the buffers.

        A sum may start as the scalar 0, which broadcasts; its shape is left open so that one function serves all.
        """
        return [tf.TensorSpec(None, dtype) for dtype in self.dtypes]

    def zeros(self, weights: Sequence[keras.Variable], *, compiled: bool) -> list[tf.Tensor]:
        """Where the sums start.

        Args:
            weights: the weights.
            compiled: whether XLA compiles the functions that add to them, which it does once for each shape.
        """
        if not compiled:
            return [tf.zeros([], dtype) for dtype in self.dtypes]
        shapes = [
            weights[group[0]].shape if len(group) == 1 else [sum(math.prod(weights[i].shape) for i in group)]
            for group in self.groups
        ]
        return [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]

    def pack(self, at: int, weights: Sequence[keras.Variable], gradients: dict[int, tf.Tensor]) -> tf.Tensor:
        """The gradients of the weights of a buffer, as they are in it; 0 where there is none."""
        group, dtype = self.groups[at], self.dtypes[at]
        if len(group) == 1:
            return tf.cast(gradients[group[0]], dtype)
        parts = [
            tf.reshape(tf.cast(gradients[i], dtype), [-1])
            if i in gradients
            else tf.zeros([math.prod(weights[i].shape)], dtype)
            for i in group
        ]
        return tf.concat(parts, 0)

    def unpack(self, at: int, weights: Sequence[keras.Variable], total: tf.Tensor) -> dict[int, tf.Tensor]:
        """The sum of each weight in a buffer, by position."""
        group = self.groups[at]
        if len(group) == 1:
            total.set_shape(weights[group[0]].shape)
            return {group[0]: total}
        parts = tf.split(total, [math.prod(weights[i].shape) for i in group])
        return {i: tf.reshape(part, weights[i].shape) for i, part in zip(group, parts, strict=True)}


class GradientLayout:
    """What a backward function gives: gradients of inputs, buffers, slices, and operands of deferred gradients.

    Args:
        weights: the weights that are trained.
        deferral: a gradient is deferred if its operands, this many times, are not larger than the weight. 0 defers
            none.

    Attributes:
        inputs: positions of the stage's inputs whose gradients come out; known once `sort` has run, as the rest.
        dense, sparse: positions of the weights with a dense gradient, and of those with slices.
        buffers: indices of the buffers that come out.
        deferred: those of `dense` that are deferred, and how each is made.
    """

    def __init__(self, weights: Sequence[keras.Variable], deferral: int = 0) -> None:
        self.weights = list(weights)
        self.layout = Buffers.of(self.weights)
        self.deferral = deferral
        self.inputs: tuple[int, ...] = ()
        self.dense: tuple[int, ...] = ()
        self.sparse: tuple[int, ...] = ()
        self.buffers: tuple[int, ...] = ()
        self.deferred: tuple[tuple[int, Contraction], ...] = ()

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Kinds of the buffers that a backward function takes."""
        return self.layout.specs

    def sort(self, gradients: Sequence[Any], wanted: Sequence[bool]) -> list[tf.Tensor]:
        """Flat tensors of the gradients of the wanted inputs and the weights, leaving out what is unconnected."""
        positions = [i for i, there in enumerate(wanted) if there]
        d_inputs = [(i, d) for i, d in zip(positions, gradients, strict=False) if d is not None]
        d_weights = list(enumerate(gradients[len(positions) :]))
        dense = [(i, d) for i, d in d_weights if isinstance(d, tf.Tensor)]
        sparse = [(i, d) for i, d in d_weights if isinstance(d, tf.IndexedSlices)]
        self.inputs, self.dense, self.sparse = (tuple(i for i, _ in part) for part in (d_inputs, dense, sparse))
        slices = [part for _, d in sparse for part in (d.values, d.indices)]
        return [*(tf.convert_to_tensor(d) for _, d in d_inputs), *(d for _, d in dense), *slices]

    def add(self, flat: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What a backward function returns, from what `sort` gave and the buffers so far."""
        count = len(self.inputs)
        d_inputs, slices = flat[:count], flat[count + len(self.dense) :]
        gradients = dict(zip(self.dense, flat[count : count + len(self.dense)], strict=True))
        operands: list[tf.Tensor] = []
        deferred = []
        for i in self.dense:
            found = contraction.find(gradients[i]) if self._may_defer(i) else None
            if found is not None and self.deferral * contraction.size(*found[1:]) <= math.prod(self.weights[i].shape):
                del gradients[i]
                deferred.append((i, found[0]))
                operands += found[1:]
        self.deferred = tuple(deferred)
        groups = self.layout.groups
        self.buffers = tuple(at for at, group in enumerate(groups) if any(i in gradients for i in group))
        added = []
        for at in self.buffers:
            packed = self.layout.pack(at, self.weights, gradients)
            added.append(add_gradient(self.weights[groups[at][0]], sums[at], packed))
        return [*d_inputs, *added, *slices, *operands]

    def _may_defer(self, i: int) -> bool:
        weight = self.weights[i]
        return self.deferral > 0 and math.prod(weight.shape) > SMALL and not weight.overwrite_with_gradient


def add_gradient(variable: keras.Variable, so_far: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    """Adds a micro-batch's gradient.

    The "gradient" of a float8 scale or history is its new value, the largest magnitude seen, which the optimizer
    assigns; so the largest of all micro-batches is that of the mini-batch.
    """
    return tf.maximum(so_far, gradient) if variable.overwrite_with_gradient else so_far + gradient


def _sum_dtype(variable: keras.Variable) -> tf.DType:
    dtype = tf.as_dtype(variable.dtype)
    return tf.float32 if dtype.size == 2 else dtype


def total(variable: keras.Variable, parts: list[Any]) -> tf.Tensor | tf.IndexedSlices:
    """Sum of a weight's gradients from several places.

    Slices stay slices, since Keras's optimizers treat them by another rule than dense gradients.
    """
    if len(parts) == 1:
        return parts[0]
    if variable.overwrite_with_gradient:
        return functools.reduce(functools.partial(add_gradient, variable), parts)
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        indices = [part.indices for part in parts]
        if len({part.dtype for part in indices}) > 1:
            indices = [tf.cast(part, tf.int64) for part in indices]
        values = tf.concat([part.values for part in parts], axis=0)
        return tf.IndexedSlices(values, tf.concat(indices, axis=0), parts[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])
