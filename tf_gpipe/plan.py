"""Which stage runs which operations of a model, on which device: the partition as a value.

A `Plan` prints as a table, and each of its stages is there as a Keras model of its own that shares the layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf
from keras import tree

from tf_gpipe import compat, costs, partition
from tf_gpipe.devices import short_name
from tf_gpipe.model_graph import ModelGraph, Ref, Step

Partition = str | Sequence[int] | Sequence[str]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        index: k, its place in the pipeline.
        device: full name of the device it runs on.
        graph: the model it is a part of.
        start, end: its operations are `graph.steps[start:end]`.
        flops: forward FLOPs for one row of the batch.
        parameters: number of weights; a weight shared by several stages counts at the first.
        inputs: what it takes: inputs of the model, and boundary tensors made by earlier stages.
        outputs: what later stages or the caller take from it.
        work: FLOPs of a training step for one row of the batch, as `costs.py` counts them: a frozen layer has no
            gradients of weights, and what is before all that is trained only goes forward.
    """

    index: int
    device: str
    graph: ModelGraph
    start: int
    end: int
    flops: float
    parameters: int
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    work: float

    @property
    def steps(self) -> tuple[Step, ...]:
        """Its operations."""
        return self.graph.steps[self.start : self.end]

    @property
    def goes_back(self) -> bool:
        """Whether a training step has more to do here than the forward pass."""
        return self.work > self.flops

    @property
    def operations(self) -> list[str]:
        """Names of its operations."""
        return self.graph.names[self.start : self.end]

    @property
    def variables(self) -> list[keras.Variable]:
        """Every variable its operations use, once each."""
        return list({id(v): v for step in self.steps for v in step.variables}.values())

    @property
    def received_bytes(self) -> int:
        """Bytes for one row of the batch that it receives from earlier stages."""
        made_before = set(self.inputs) - set(self.graph.inputs)
        return sum(self.graph.specs[ref].bytes_per_row for ref in made_before)

    @functools.cached_property
    def model(self) -> keras.Model:
        """The stage as a Keras model that shares the layers: to summarise, plot and run alone.

        It takes the stage's inputs and returns its outputs, single tensors or lists in the order of `inputs` and
        `outputs`; chained, the stages' models give the whole model's output.
        """
        made: dict[Ref, keras.KerasTensor] = {}
        for ref in self.inputs:
            spec = self.graph.specs[ref]
            made[ref] = keras.Input(batch_shape=(None, *spec.shape[1:]), dtype=spec.dtype)
        for step in self.steps:
            for ref in step.outputs:
                spec = self.graph.specs[ref]
                made[ref] = keras.KerasTensor(spec.shape, spec.dtype, name=spec.name)
            args, kwargs = (
                tree.map_structure(lambda leaf: made[leaf] if isinstance(leaf, Ref) else leaf, part)
                for part in (step.args, step.kwargs)
            )
            compat.Node(step.operation, call_args=args, call_kwargs=kwargs, outputs=[made[r] for r in step.outputs])
        inputs, outputs = [made[ref] for ref in self.inputs], [made[ref] for ref in self.outputs]
        name = f"{self.graph.model.name}_stage_{self.index}"
        return keras.Model(
            inputs[0] if len(inputs) == 1 else inputs, outputs[0] if len(outputs) == 1 else outputs, name=name
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model divided into stages. `print(plan)` shows it as a table.

    The column `share` and the balance tell of the work of a training step, with what is frozen when the plan is asked
    for; the column `FLOPs/row` tells of the forward pass.

    Attributes:
        graph: the model as a chain of operations.
        stages: one `StagePlan` a stage.
        note: what else is to be said of it; the last line of the table.
        recomputed: the share of the micro-batches that run a stage forward again when they go back.
    """

    graph: ModelGraph
    stages: tuple[StagePlan, ...]
    note: str = ""
    recomputed: float = 0.0

    @property
    def balance(self) -> float:
        """Mean over heaviest work of the stages; 1 is even."""
        heaviest = max(stage.work for stage in self.stages)
        return sum(stage.work for stage in self.stages) / (heaviest * len(self.stages)) if heaviest else 1.0

    def __str__(self) -> str:
        work = sum(stage.work for stage in self.stages) or 1.0
        head = ("stage", "device", "operations", "from", "to", "parameters", "FLOPs/row", "share", "received/row")
        rows: list[tuple[str, ...]] = [head]
        for stage in self.stages:
            rows.append(
                (
                    str(stage.index),
                    short_name(stage.device),
                    str(len(stage.operations)),
                    *(stage.operations[:1] or [""]),
                    *(stage.operations[-1:] or [""]),
                    f"{stage.parameters:,}",
                    _short(stage.flops),
                    f"{100 * stage.work / work:.1f} %",
                    f"{_short(stage.received_bytes)}B" if stage.index else "",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        left = (1, 3, 4)
        lines = [
            "  ".join(
                cell.ljust(w) if c in left else cell.rjust(w)
                for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.insert(1, "─" * len(lines[0]))
        lines.append(f"{len(self.graph.steps)} operations of '{self.graph.model.name}', balance {self.balance:.2f}")
        lines += [self.note] if self.note else []
        return "\n".join(line.rstrip() for line in lines)


def make_plan(graph: ModelGraph, devices: Sequence[str], how: Partition, recomputed: float = 0.0) -> Plan:
    """Divides a model into as many stages as there are devices.

    Args:
        graph: the model.
        devices: K device names.
        how: "flops", K operation counts, or K − 1 operation names to cut before.
        recomputed: the share of the micro-batches that run a stage forward again when they go back.

    Raises:
        ValueError: an explicit partition that does not fit the model.
    """
    if how == "flops":
        counts = _balanced(graph, len(devices), recomputed)
    else:
        counts = partition.explicit(how, graph.names, len(devices))
    return from_counts(graph, devices, counts, recomputed)


def _balanced(graph: ModelGraph, num_stages: int, recomputed: float) -> tuple[int, ...]:
    """Counts of operations whose heaviest stage is light; a small model leaves the last stages without any."""
    starts = [0, *itertools.accumulate(costs.pieces(graph))]
    pieces = list(itertools.pairwise(starts))
    flops, bytes_before = [cost.flops for cost in costs.costs(graph)], costs.boundary_bytes(graph)
    forward, boundary = [sum(flops[i:j]) for i, j in pieces], [bytes_before[i] for i, _ in pieces]
    used = min(num_stages, len(pieces))
    if not used:
        return (0,) * num_stages
    work, back = _work(graph, pieces, 0.0)
    if not any(back) or work == [3 * number for number in forward]:
        found = partition.balance(forward, used, boundary_bytes=boundary)
    else:
        work = [w + recomputed * f for w, f in zip(work, forward, strict=True)]
        found = partition.balance_behind(forward, work, back.index(True), used, boundary_bytes=boundary)
    ends = [0, *(starts[n] for n in itertools.accumulate(found))]
    return (*(j - i for i, j in itertools.pairwise(ends)), *[0] * (num_stages - used))


def from_counts(graph: ModelGraph, devices: Sequence[str], counts: Sequence[int], recomputed: float = 0.0) -> Plan:
    """The plan whose stages have the given numbers of operations; 0 is allowed here."""
    measured = costs.costs(graph)
    ends = list(itertools.accumulate(counts, initial=0))
    work, _ = _work(graph, list(itertools.pairwise(ends)), recomputed)
    stages = []
    for index, (device, start, end) in enumerate(zip(devices, ends[:-1], ends[1:], strict=True)):
        inputs, outputs = graph.crossing(start, end)
        part = measured[start:end]
        flops, parameters = sum(cost.flops for cost in part), sum(cost.parameters for cost in part)
        stages.append(StagePlan(index, device, graph, start, end, flops, parameters, inputs, outputs, work[index]))
    return Plan(graph, tuple(stages), recomputed=recomputed)


def _work(graph: ModelGraph, stages: Sequence[tuple[int, int]], recomputed: float) -> tuple[list[float], list[bool]]:
    """FLOPs of each stage in a training step for one row, and whether it goes back."""
    flops = [cost.flops for cost in costs.costs(graph)]
    counts, back = costs.going_back(graph, [range(i, j) for i, j in stages])
    work = [
        sum((1 + counts[i] + recomputed * there) * flops[i] for i in range(*stage))
        for stage, there in zip(stages, back, strict=True)
    ]
    return work, back


def up_to_date(plan: Plan) -> Plan:
    """The same plan with the work of what is frozen now; `plan` itself if nothing has changed."""
    work, _ = _work(plan.graph, [(stage.start, stage.end) for stage in plan.stages], plan.recomputed)
    if work == [stage.work for stage in plan.stages]:
        return plan
    stages = (dataclasses.replace(stage, work=number) for stage, number in zip(plan.stages, work, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def follow(graph: ModelGraph, reference: Plan) -> Plan:
    """The plan of a model's other graph (another training flag) whose operations stay where `reference` has them."""
    place = {name: stage.index for stage in reference.stages for name in stage.operations}
    at, counts = 0, [0] * len(reference.stages)
    for name in graph.names:
        at = max(at, place.get(name, at))
        counts[at] += 1
    return from_counts(graph, [stage.device for stage in reference.stages], counts, reference.recomputed)


def follow_variables(
    graph: ModelGraph, devices: Sequence[str], placed: Mapping[int, tf.Variable], recomputed: float = 0.0
) -> Plan | None:
    """The plan whose operations are where their variables already are.

    Args:
        graph: the model.
        devices: K device names.
        placed: variables that must stay where they are, by identity.
        recomputed: as in `make_plan`.

    Returns:
        The plan; None where the variables are in another order than the model's operations, or belong to less than half
        of its work, so that a plan of its own is better even though variables cross.
    """
    if len(set(devices)) < len(devices):
        return None
    stages: list[int | None] = []
    for step in graph.steps:
        homes = {v.device for v in map(compat.raw_variable, step.variables) if id(v) in placed}
        found = [k for k, device in enumerate(devices) if device in homes]
        if len(found) > 1:
            return None
        stages.append(found[0] if found else None)
    known = [stage for stage in stages if stage is not None]
    if not known or known != sorted(known):
        return None
    flops = [cost.flops for cost in costs.costs(graph)]
    if sum(cost for cost, stage in zip(flops, stages, strict=True) if stage is not None) <= sum(flops) / 2:
        return None
    work, _ = _work(graph, [(i, i + 1) for i in range(len(flops))], 0.0)
    return from_counts(graph, devices, partition.balance_around(work, stages, len(devices)), recomputed)


def _short(number: float) -> str:
    """`1.2 M` for 1,234,567."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} T"
