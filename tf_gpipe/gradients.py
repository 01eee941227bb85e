"""Gradients of weights: summed over micro-batches inside the stages, and over the stages that share a weight.

A dense gradient is added to a running sum that a backward function takes and gives, in float32 for 16-bit weights.
`tf.IndexedSlices` (embeddings) come out of each backward function and are put side by side at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class GradientSums:
    """How the gradients of a stage are laid out: those of its inputs, sums of dense weights, slices of sparse ones.

    Args:
        weights: the weights that are trained.

    Attributes:
        inputs: positions of the stage's inputs whose gradients come out; known once `sort` has run, as the next two.
        dense, sparse: positions of the weights with a dense gradient, and of those with slices.
    """

    def __init__(self, weights: Sequence[keras.Variable]) -> None:
        self.weights = list(weights)
        self.inputs: tuple[int, ...] = ()
        self.dense: tuple[int, ...] = ()
        self.sparse: tuple[int, ...] = ()

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Kinds of the sums that a backward function takes.

        A sum starts as the scalar 0, which broadcasts; its shape is left open so that one function serves all.
        """
        return [tf.TensorSpec(None, _sum_dtype(v)) for v in self.weights]

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
        """What a backward function returns: as `sort`, with the dense gradients added to the sums so far."""
        made = list(flat)
        for at, i in enumerate(self.dense, start=len(self.inputs)):
            made[at] = add_gradient(self.weights[i], sums[i], tf.cast(made[at], sums[i].dtype))
        return made


def zero_sums(weights: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Where the running sums of gradients start: scalars, in float32 for 16-bit weights."""
    return [tf.zeros([], _sum_dtype(v)) for v in weights]


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
        return tf.IndexedSlices(
            tf.concat([part.values for part in parts], axis=0),
            tf.concat([tf.cast(part.indices, tf.int64) for part in parts], axis=0),
            parts[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])
