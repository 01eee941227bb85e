"""What a stage takes and gives beside tensors: seeds, batch-norm statistics, losses, other variables.

A stage is pure. Its layers run in a `keras.StatelessScope`: a variable they assign is an input of the stage's function
and its new value an output, handed from micro-batch to micro-batch and assigned once, after the last. The
recomputation of a micro-batch gets the same state as its forward pass, so that dropout draws the same mask. Seeds
belong to layers, so that results do not depend on the number of stages, and one micro-batch draws plain Keras's masks.

Batch normalisation is the exception: each micro-batch is normalised with its own mean and variance, and these are
pooled over the mini-batch, from the number of values each was taken over, before the moving averages move once
(Huang et al. 2019, GPipe, section 2.2; arXiv:1811.06965). Spectral normalisation is another: a layer that assigns its
kernel does so before the first micro-batch, so that all of them see the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import compat, fused_batch_norm
from tf_gpipe.errors import ModelError
from tf_gpipe.micro_batch import Rows


class StateValues:
    """The newest value of each variable that is handed from micro-batch to micro-batch, and assigned after the last."""

    def __init__(self) -> None:
        self._variables: dict[int, keras.Variable] = {}
        self._newest: dict[int, tf.Tensor] = {}
        self._written: set[int] = set()

    def read(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Values of variables; those that nothing was written for are read now."""
        for v in variables:
            if id(v) not in self._newest:
                self._variables[id(v)] = v
                self._newest[id(v)] = compat.raw_variable(v).read_value()
        return [self._newest[id(v)] for v in variables]

    def write(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], rows: Rows, m: int) -> None:
        """Keeps what micro-batch `m` gave, unless it turns out to have no rows."""
        for v, value in zip(variables, values, strict=True):
            if not rows.is_static:
                value = tf.where(tf.equal(rows.sizes[m], 0), self._newest[id(v)], value)
            self._newest[id(v)] = value
            self._written.add(id(v))

    def assign(self) -> None:
        """Assigns what was written."""
        for key in [key for key in self._newest if key in self._written]:
            raw = compat.raw_variable(self._variables[key])
            with tf.device(raw.device):
                raw.assign(self._newest[key])


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
def collected_moments(layers: Sequence[keras.Layer], *, fused: bool) -> Iterator[list[Moments]]:
    """Collects the statistics of every training call of batch-norm layers while a stage is traced.

    `synchronized=True` asks for statistics over replicas; a pipeline is one replica, so that it means nothing here.

    Args:
        layers: the layers of the stage.
        fused: whether a layer normalises in one operation where it can.
    """
    collected: list[Moments] = []
    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(layer for layer in layers if pools_statistics(layer)):
            if fused and fused_batch_norm.is_fusible(layer):
                stack.enter_context(compat.replaced(layer, "call", _fused_call(layer, collected)))
            stack.enter_context(compat.replaced(layer, compat.MOMENTS, _collector(layer, collected)))
            if getattr(layer, "synchronized", False):
                stack.enter_context(compat.replaced(layer, "synchronized", False))
        yield collected


def _collector(layer: keras.layers.BatchNormalization, collected: list[Moments]) -> Any:
    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = getattr(type(layer), compat.MOMENTS)(layer, inputs, mask)
        if mask is None:
            count = tf.size(inputs, tf.int64) // tf.maximum(tf.size(mean, tf.int64), 1)
        else:
            count = tf.reduce_sum(tf.cast(mask, tf.int64))
        collected.append(Moments(layer, mean, variance, tf.cast(count, tf.float32)))
        return mean, variance

    return moments


def _fused_call(layer: keras.layers.BatchNormalization, collected: list[Moments]) -> Any:
    def call(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        if not (training and layer.trainable) or mask is not None or not fused_batch_norm.fits(layer, inputs):
            return type(layer).call(layer, inputs, training=training, mask=mask)
        outputs, *statistics = fused_batch_norm.normalise(layer, inputs)
        collected.append(Moments(layer, *statistics))
        return outputs

    return call


def pool(moments: Sequence[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean, biased variance and count of the union of groups of values.

    Stands for the moments of the concatenated groups: mean = Σ nᵢ mᵢ / N, variance = Σ nᵢ (vᵢ + (mᵢ − mean)²) / N;
    never E[x²] − E[x]², which cancels for a large mean. Groups of no values are left out.

    Args:
        moments: (mean, variance, count) of each group; float tensors of one shape, and float32 scalars.

    Returns:
        (mean, variance, count) of all; mean and variance are 0 where the count is 0.
    """
    if len(moments) == 1:
        return moments[0]
    means = tf.stack([mean for mean, _, _ in moments])
    variances = tf.stack([variance for _, variance, _ in moments])
    counts = tf.cast(tf.stack([count for _, _, count in moments]), means.dtype)
    shape = [-1] + [1] * (means.shape.rank - 1)
    weights = tf.reshape(tf.math.divide_no_nan(counts, tf.reduce_sum(counts)), shape)
    present = tf.reshape(counts > 0, shape)
    means, variances = (tf.where(present, value, tf.zeros_like(value)) for value in (means, variances))
    # The first group's mean as origin keeps the weighted sum exact where all means are large and near each other.
    origin = means[0]
    mean = origin + tf.reduce_sum(weights * (means - origin), axis=0)
    variance = tf.reduce_sum(weights * (variances + tf.square(means - mean)), axis=0)
    return mean, variance, tf.reduce_sum(counts)


def update_moving_averages(
    layer: keras.layers.BatchNormalization, mean: tf.Tensor, variance: tf.Tensor, count: tf.Tensor
) -> None:
    """Moves a layer's averages once, by its own momentum; a mini-batch without valid values moves nothing."""
    for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        raw = compat.raw_variable(variable)
        moving = tf.cast(raw, value.dtype)
        moved = moving * layer.momentum + value * (1.0 - layer.momentum)
        raw.assign(tf.cast(tf.where(count > 0, moved, moving), raw.dtype))


@contextlib.contextmanager
def kernels_left_alone(layers: Sequence[keras.Layer]) -> Iterator[list[keras.layers.SpectralNormalization]]:
    """Keeps layers from normalising their kernels while a stage is traced; collects those that a training call would.

    Raises:
        ValueError: a layer is called twice, and plain Keras would give each call a kernel of its own.
    """
    found: list[keras.layers.SpectralNormalization] = []

    def call_of(layer: keras.layers.SpectralNormalization) -> Any:
        def call(inputs: tf.Tensor, training: bool | None = False) -> tf.Tensor:
            if training:
                refuse_repeated_normalisation(layer, found)
                found.append(layer)
            return type(layer).call(layer, inputs, training=False)

        return call

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, keras.layers.SpectralNormalization):
                stack.enter_context(compat.replaced(layer, "call", call_of(layer)))
        yield found


def refuse_repeated_normalisation(
    layer: keras.layers.SpectralNormalization, before: Sequence[keras.layers.SpectralNormalization]
) -> None:
    """Raises where a kernel would be normalised twice in one step."""
    if any(layer is other for other in before):
        raise ModelError(
            f"Expected a SpectralNormalization to be called once in a step, since its kernel is normalised once for "
            f"all micro-batches. Received: '{layer.name}', which is called again. Use a second layer, or train without "
            "it."
        )


def normalise_kernel(layer: keras.layers.SpectralNormalization) -> None:
    """Does to a layer's kernel what its training call does, once for a mini-batch."""
    with compat.call_context(layer, training=True), compat.replaced(layer, "layer", tf.identity):
        type(layer).call(layer, tf.zeros([]), training=True)


class Choices:
    """What layers draw with Python's `random` and with numpy while they are traced, the same in every trace of a kind.

    Plain Keras bakes such choices into its one trace of a step; a stage is traced once for its forward function and
    again for each backward function.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def of(self, kind: Hashable) -> Iterator[None]:
        """Traces in here draw on from where the program is the first time, and what they drew then every other time."""
        now = random.getstate(), np.random.get_state()
        if kind not in self._before:
            self._before[kind] = now
            yield
            return
        _set_generators(self._before[kind])
        try:
            yield
        finally:
            _set_generators(now)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


# Of `tf.random`, of `tf.random.Generator`, and of losses and image operations that draw.
_STATEFUL_RANDOM = re.compile(
    "Multinomial|NonDeterministicInts|Parameterized.*Normal|Random(Crop|Gamma|Poisson|Shuffle|StandardNormal|Uniform).*"
    "|Rng.*Skip|SampleDistorted.*|Stateful.*(Binomial|Normal|Uniform).*|TruncatedNormal|.*CandidateSampler"
)
_ASSIGNMENT = re.compile("Assign.*VariableOp|ResourceScatter.*|ResourceStridedSliceAssign")


def needs_its_own_run(graph: tf.Graph) -> bool:
    """Whether a gradient must be taken where the forward pass has just run, of the same micro-batch.

    `tf.py_function` leaves a tape for its gradient, under one name for all calls, and the gradient takes it away.
    """
    return any(op.type == "EagerPyFunc" for op in compat.all_operations(graph))


def refuse_impure(graph: tf.Graph, stage: int, operations: Sequence[str]) -> None:
    """Raises where a stage would not do the same when it is run again for the backward pass.

    Args:
        graph: the graph of the stage's forward function.
        stage: the stage's index, for the message.
        operations: the names of the stage's operations, for the message.

    Raises:
        ValueError: an operation draws random numbers or assigns a variable behind Keras's back.
    """
    names = ", ".join(f"'{name}'" for name in operations)
    for op in compat.all_operations(graph):
        if _STATEFUL_RANDOM.fullmatch(op.type):
            raise ModelError(
                f"Expected random operations that can be repeated when activations are recomputed. Received: "
                f"'{op.type}' of TensorFlow ({op.name}) in stage {stage} ({names}). Draw with `keras.random` and "
                "a `keras.random.SeedGenerator` that the layer keeps as an attribute."
            )
        if _ASSIGNMENT.fullmatch(op.type):
            raise ModelError(
                f"Expected layers whose state is in `keras.Variable`s, which can be handed from micro-batch to "
                f"micro-batch. Received: an assignment to a `tf.Variable` ({op.name}) in stage {stage} ({names}). "
                "Make the variable with `self.add_weight(trainable=False)` or `keras.Variable`."
            )
