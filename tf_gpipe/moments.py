"""Statistics of batch norm: each micro-batch's own, pooled over the mini-batch before the moving averages move once.

    micro-batch m:  mean and variance of each call of a layer ──▶ normalises the micro-batch
                                │ of all calls in a stage, side by side, with the number of values behind each
    mini-batch:     pooled over m ──▶ moving averages

Source: Huang et al. 2019, GPipe, section 2.2 (arXiv:1811.06965).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import compat, threads
from tf_gpipe.errors import ModelError

Packed = Sequence[tf.Tensor]
"""Means and variances of several calls, each `(values,)`, and counts `(calls,)`."""


@dataclasses.dataclass(frozen=True)
class Moments:
    """Statistics that one call of a batch-norm layer was taken over.

    Attributes:
        layer: the layer.
        mean, variance: float tensors of the shape of the layer's moving averages; the variance is the biased one.
        count: float32 scalar, how many values each mean was taken over; with a mask, the valid ones.
    """

    layer: keras.layers.BatchNormalization
    mean: tf.Tensor
    variance: tf.Tensor
    count: tf.Tensor


def pools_statistics(layer: keras.Layer) -> bool:
    """Whether a layer's moving averages are pooled over the mini-batch.

    With `renorm=True` the moving averages take part in the training pass itself; such a layer is treated as any other
    with state: each micro-batch continues from the one before.
    """
    return isinstance(layer, keras.layers.BatchNormalization) and not getattr(layer, "renorm", False)


@contextlib.contextmanager
def collected(layers: Sequence[keras.Layer]) -> Iterator[list[Moments]]:
    """Collects the statistics of every training call of batch-norm layers while a stage is traced.

    `synchronized=True` asks for statistics over replicas; a pipeline is one replica, so that it means nothing here.

    Args:
        layers: the layers of the stage.
    """
    found = _Found(tf.compat.v1.get_default_graph(), [])
    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(layer for layer in layers if pools_statistics(layer)):
            stack.enter_context(compat.replaced(layer, compat.MOMENTS, _collector(layer, found)))
        yield found.moments


@dataclasses.dataclass(frozen=True)
class _Found:
    """What was collected, and the graph in which it must be."""

    graph: tf.Graph
    moments: list[Moments]

    def add(self, moments: Moments) -> None:
        """Adds statistics that the stage can give away."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise ModelError(
                "Expected batch norm to run where its stage does, so that its statistics can be told. Received: "
                f"'{moments.layer.name}', called inside a `tf.function`, loop or branch of the model. Call it outside "
                "of that, or normalise with `keras.layers.LayerNormalization` or `GroupNormalization`."
            )
        self.moments.append(moments)


def _collector(layer: keras.layers.BatchNormalization, found: _Found) -> Any:
    plain = threads.attribute(layer, compat.MOMENTS)
    if getattr(layer, "synchronized", False) and not threads.is_own(layer, compat.MOMENTS):
        plain = getattr(compat.seen_with(layer, synchronized=False), compat.MOMENTS)

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = plain(inputs, mask)
        if mask is None:
            count = tf.size(inputs, tf.int64) // tf.maximum(tf.size(mean, tf.int64), 1)
        else:
            count = tf.reduce_sum(tf.cast(mask, tf.int64))
        found.add(Moments(layer, mean, variance, tf.cast(count, tf.float32)))
        return mean, variance

    return moments


def pack(moments: Sequence[Moments]) -> list[tf.Tensor]:
    """Means and variances of all calls in one tensor each, and their counts; nothing if there are no calls."""
    if not moments:
        return []
    wide = any(m.mean.dtype == tf.float64 for m in moments)
    dtype = tf.float64 if wide else tf.float32

    def joined(name: str) -> tf.Tensor:
        values = [(tf.cast(getattr(m, name), dtype), m.layer.moving_mean.shape) for m in moments]
        # A layer over one channel gives scalars with a mask, since Keras squeezes them.
        return tf.concat([v if v.shape == shape else tf.broadcast_to(v, shape) for v, shape in values], 0)

    return [joined("mean"), joined("variance"), tf.stack([m.count for m in moments])]


def pool(moments: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean, biased variance and count of the union of groups of values.

    Stands for the moments of the concatenated groups: mean = Σ nᵢ mᵢ / N, variance = Σ nᵢ (vᵢ + (mᵢ − mean)²) / N;
    never E[x²] − E[x]², which cancels for a large mean. Groups of no values are left out.

    Args:
        moments: (mean, variance, count) of each group; float tensors of one shape, and float32 scalars or vectors, one
            count for each entry along the first axes.

    Returns:
        (mean, variance, count) of all; mean and variance are 0 where the count is 0.
    """
    if len(moments) == 1:
        return moments[0]
    means = tf.stack([mean for mean, _, _ in moments])
    variances = tf.stack([variance for _, variance, _ in moments])
    counts = tf.cast(tf.stack([count for _, _, count in moments]), means.dtype)
    total = tf.reduce_sum(counts, axis=0)
    for _ in range(means.shape.rank - counts.shape.rank):
        counts = counts[..., tf.newaxis]
    weights = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, axis=0))
    present = counts > 0
    means, variances = (tf.where(present, value, tf.zeros_like(value)) for value in (means, variances))
    # The first group's mean as origin keeps the weighted sum exact where all means are large and near each other.
    origin = means[0]
    mean = origin + tf.reduce_sum(weights * (means - origin), axis=0)
    variance = tf.reduce_sum(weights * (variances + tf.square(means - mean)), axis=0)
    return mean, variance, total


def update_moving_averages(layers: Sequence[keras.layers.BatchNormalization], micro_batches: Sequence[Packed]) -> None:
    """Moves averages by each layer's own momentum; calls without valid values in the whole mini-batch move nothing.

    Args:
        layers: the layer of each call; one that is called twice moves twice, in this order.
        micro_batches: what `pack` gave for each.
    """
    sizes = [layer.moving_mean.shape[0] for layer in layers]
    call_of = np.repeat(np.arange(len(layers)), sizes)
    pooled = pool([(means, variances, tf.gather(counts, call_of)) for means, variances, counts in micro_batches])
    for calls in _turns(layers):
        values = np.flatnonzero(np.isin(call_of, calls))
        _move([layers[i] for i in calls], *(tf.gather(part, values) for part in pooled))


def _turns(layers: Sequence[keras.Layer]) -> list[list[int]]:
    """Positions of the first call of each layer, of the second call of each, and so on."""
    before: collections.Counter[int] = collections.Counter()
    turns: dict[int, list[int]] = collections.defaultdict(list)
    for i, layer in enumerate(layers):
        turns[before[id(layer)]].append(i)
        before[id(layer)] += 1
    return list(turns.values())


def _move(
    layers: Sequence[keras.layers.BatchNormalization], means: tf.Tensor, variances: tf.Tensor, counts: tf.Tensor
) -> None:
    """Moves the averages of different layers once; of each value there is a mean, a variance and a count."""
    sizes = [layer.moving_mean.shape[0] for layer in layers]
    layer_of = np.repeat(np.arange(len(layers)), sizes)

    def shares(of_layers: Sequence[Any]) -> tf.Tensor:
        each = [
            tf.constant(share, means.dtype) if isinstance(share, numbers.Real) else tf.cast(share, means.dtype)
            for share in of_layers
        ]
        return tf.gather(tf.stack(each), layer_of)

    kept, taken = shares([layer.momentum for layer in layers]), shares([1.0 - layer.momentum for layer in layers])
    for name, values in (("moving_mean", means), ("moving_variance", variances)):
        variables = [compat.raw_variable(getattr(layer, name)) for layer in layers]
        before = tf.concat([tf.cast(variable, values.dtype) for variable in variables], 0)
        after = tf.where(counts > 0, before * kept + values * taken, before)
        for variable, part in zip(variables, tf.split(after, sizes), strict=True):
            variable.assign(tf.cast(part, variable.dtype))
