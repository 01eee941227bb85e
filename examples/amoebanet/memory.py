"""What each stage of a pipeline needs of its device's memory, estimated from shapes."""

from __future__ import annotations

import dataclasses
import math

import keras
import tensorflow as tf

import tf_gpipe
from amoebanet.model import Block

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    Attributes:
        weights: weights, their gradients, optimizer slots and averages.
        inputs: what the stage takes in, of the whole mini-batch: it stays until the backward pass.
        activations: outputs of convolutions, norms and pools, of as many micro-batches as are kept at a time.
    """

    weights: int
    inputs: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.inputs + self.activations


def estimate(
    plan: tf_gpipe.Plan, batch_size: int, num_micro_batches: int, remat: str, values_per_weight: int
) -> list[StageMemory]:
    """The memory of each stage in training. What a single operation needs besides is not counted.

    Args:
        plan: the model in stages; it may be one that was made without weights.
        batch_size: rows of a mini-batch.
        num_micro_batches: M.
        remat: as the strategy takes it; with "never", the activations of all micro-batches are kept.
        values_per_weight: the weight, its gradient, and what the optimizer keeps for it.
    """
    rows = batch_size if remat == "never" else math.ceil(batch_size / num_micro_batches)
    estimates = []
    for stage in plan.stages:
        trainable = sum(_num_bytes(v) for v in stage.variables if v.trainable)
        state = sum(_num_bytes(v) for v in stage.variables if not v.trainable)
        inputs = sum(stage.graph.specs[ref].bytes_per_row for ref in stage.inputs)
        kept = sum(_kept_bytes(step.operation) for step in stage.steps)
        estimates.append(StageMemory(values_per_weight * trainable + state, batch_size * inputs, rows * kept))
    return estimates


def _num_bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _kept_bytes(operation: keras.Operation) -> int:
    if not isinstance(operation, Block):
        return 0
    return operation.kept_elements * tf.as_dtype(operation.compute_dtype).size


def report(plan: tf_gpipe.Plan, estimates: list[StageMemory], device_memory: float) -> str:
    """The estimates as a table, and whether each stage fits.

    Args:
        plan: the model in stages.
        estimates: one for each stage.
        device_memory: what a device has, in GiB.
    """
    lines = ["stage  weights, GiB  stage inputs  activations   total"]
    for stage, memory in zip(plan.stages, estimates, strict=True):
        parts = [part / GIB for part in (memory.weights, memory.inputs, memory.activations, memory.total)]
        lines.append("{:5}  {:12.2f}  {:12.2f}  {:11.2f}  {:6.2f}".format(stage.index, *parts))
    heaviest = max(range(len(estimates)), key=lambda k: estimates[k].total)
    needs = f"stage {heaviest} needs most, {estimates[heaviest].total / GIB:.2f} of {device_memory:g} GiB."
    if estimates[heaviest].total <= device_memory * GIB:
        lines.append(f"It fits: {needs}")
    else:
        lines.append(f"It does not fit: {needs} Take more stages, more micro-batches or a smaller batch.")
    return "\n".join(lines)
