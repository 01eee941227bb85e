"""The way back through a call: gradients of its inputs and weights, and gradients of these gradients.

A backward pass runs the stages from last to first. Gradients of boundary tensors are handed from task to task, those of
weights are summed inside the stages:

    d y ──▶ backward K−1 ──d r──▶ … ──▶ backward 0 ──▶ d x           each with + d weights

A tape around a tape (gradient penalties, meta-learning) asks for the derivative of that. A backward task is a function
of its stage's inputs, its weights and what it was given, so that the derivative goes through the backward tasks in
reverse, first stage first, which gives gradients for boundary tensors, and then back through the stages once more:

    dd x ──▶ second 0 ──dd r──▶ … ──▶ second K−1 ──▶ d (d y)        each with + d weights, and d r for the next line
             backward K−1 ──▶ … ──▶ backward 0 ──▶ d x              each with + d weights
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_gpipe import compat, gradients, tracing, updates
from tf_gpipe.contraction import Contraction
from tf_gpipe.errors import ModelError
from tf_gpipe.gradients import GradientLayout
from tf_gpipe.model_graph import Ref
from tf_gpipe.placed_function import sharing_handles
from tf_gpipe.schedule import Task
from tf_gpipe.stage_functions import Backward, BackwardKind
from tf_gpipe.values import components

if TYPE_CHECKING:
    from tf_gpipe.call import Call

Boundary = tuple[Ref, int]
"""A tensor between operations, and its micro-batch."""

PLAIN_CALL = (
    "Inside `run`, as in `train_step`, plain Keras is `model.stateless_call(model.trainable_variables, "
    "model.non_trainable_variables, x)[0]`."
)
"""How to call a model without its pipeline, for errors: a stateless scope is not routed to it."""


@dataclasses.dataclass(frozen=True)
class _Done:
    """A backward task that has run: its function and kind, and the gradients it was given."""

    backward: Backward
    kind: BackwardKind
    given: list[tf.Tensor]


class _Totals:
    """Gradients of weights over all micro-batches, by stage."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.trained = [stage.trained(kind) for stage, kind in zip(call.stages, call.signatures, strict=True)]
        self.buffers = [gradients.Buffers.of(weights) for weights in self.trained]
        self.sums = [self._zeros(k) for k in range(len(call.stages))]
        self.summed: list[set[int]] = [set() for _ in call.stages]
        self.parts: list[dict[int, list[Any]]] = [{} for _ in call.stages]
        self.operands: list[dict[tuple[int, Contraction], list[tuple[tf.Tensor, tf.Tensor]]]] = [
            {} for _ in call.stages
        ]

    def _zeros(self, k: int) -> list[tf.Tensor]:
        stage = self.call.stages[k]
        with tf.device(stage.device):
            return self.buffers[k].zeros(self.trained[k], compiled=stage.jit_compile)

    def take(self, k: int, gives: GradientLayout, flat: list[tf.Tensor]) -> None:
        """Takes a stage's gradients of weights from the front of `flat`."""
        weights = self.trained[k]
        for at in gives.buffers:
            self.sums[k][at] = flat.pop(0)
        for i in gives.sparse:
            slices = tf.IndexedSlices(flat.pop(0), flat.pop(0), tf.constant(tuple(weights[i].shape), tf.int32))
            self.parts[k].setdefault(i, []).append(slices)
        for deferred in gives.deferred:
            self.operands[k].setdefault(deferred, []).append((flat.pop(0), flat.pop(0)))
        self.summed[k].update({*gives.dense} - {i for i, _ in gives.deferred})

    def make_deferred(self, k: int) -> list[tf.Tensor]:
        """Makes the gradients of a stage whose operands were taken."""
        waiting, self.operands[k] = self.operands[k], {}
        made = [(kind, [a for a, _ in pairs], [b for _, b in pairs]) for (_, kind), pairs in waiting.items()]
        weights = [self.trained[k][i] for i, _ in waiting]
        found = self.call.stages[k].deferred(made, weights) if made else []
        for (i, _), gradient in zip(waiting, found, strict=True):
            self.parts[k].setdefault(i, []).append(gradient)
        return found

    def unpack(self) -> None:
        """Divides the buffers into the gradients of weights, when all tasks have been taken."""
        for k, summed in enumerate(self.summed):
            for i, part in self._divided(k).items():
                if i in summed:
                    self.parts[k].setdefault(i, []).append(part)

    def _divided(self, k: int) -> dict[int, tf.Tensor]:
        """The sums in a stage's buffers, by the position of their weights."""
        stage, buffers, weights, sums = self.call.stages[k], self.buffers[k], self.trained[k], self.sums[k]
        used = [at for at, group in enumerate(buffers.groups) if self.summed[k].intersection(group)]
        shared = [at for at in used if len(buffers.groups[at]) > 1]

        def weight_gradients(*totals: tf.Tensor) -> list[dict[int, tf.Tensor]]:
            return [buffers.unpack(at, weights, total) for at, total in zip(shared, totals, strict=True)]

        found = [buffers.unpack(at, weights, sums[at]) for at in used if at not in shared]  # without an operation
        if shared:
            totals = [sums[at] for at in shared]
            found += updates.run(stage.device, weight_gradients, totals, compiled=stage.jit_compile)
        return {i: part for parts in found for i, part in parts.items()}

    def of(self, variable: keras.Variable) -> tf.Tensor | tf.IndexedSlices | None:
        """Gradient of a weight, summed over micro-batches and over the stages that use it."""
        with tf.device(compat.raw_variable(variable).device):
            parts: list[Any] = []
            for k, weights in enumerate(self.trained):
                for i in (i for i, v in enumerate(weights) if v is variable):
                    found = self.parts[k].get(i, [])
                    parts += [
                        part if isinstance(part, tf.IndexedSlices) else tf.cast(part, variable.dtype) for part in found
                    ]
            return gradients.total(variable, parts) if parts else None


class BackwardPass:
    """The backward tasks of a call.

    Args:
        call: the call.
        given: gradients of boundary tensors (outputs among them) to begin with.
        d_losses: for each stage, gradients of the losses that its layers added, for the whole mini-batch.
        totals: gradients of weights to add to.
    """

    def __init__(
        self,
        call: Call,
        given: dict[Boundary, list[tf.Tensor]],
        d_losses: Sequence[Sequence[tf.Tensor | None]],
        totals: _Totals | None = None,
    ) -> None:
        self.call = call
        self.rows = call.rows
        self.gradients = given
        self.d_losses = d_losses
        self.totals = totals or _Totals(call)
        self.done: dict[Task, _Done] = {}

    @classmethod
    def of_outputs(cls, call: Call, d_outputs: Sequence[tf.Tensor | None]) -> BackwardPass:
        """For gradients of a call's outputs, as `Call.float_outputs`, and of its losses; None for what is unused."""
        left = list(d_outputs)
        given: dict[Boundary, list[tf.Tensor]] = {}
        for ref in call.float_outputs:
            d = left.pop(0)
            for m, part in enumerate(call.rows.split_gradient(d) if d is not None else ()):
                given.setdefault((ref, m), []).append(part)
        d_losses = [[left.pop(0) for _ in forward.loss_owners] for forward in call.forwards]
        return cls(call, given, d_losses)

    @sharing_handles()
    def run(self) -> None:
        """Emits every backward task, the stages from last to first."""
        tasks = [task for task in self.call.schedule.order() if task.kind == "backward" and self.call.stages]
        for task in sorted(tasks, key=lambda task: (-task.micro_batch, -task.stage)):
            self._run_task(task)
        for k in reversed(range(len(self.call.stages))):
            last = Task("backward", k, 0)
            with self.call.placed(last, "weights"):
                made = self.totals.make_deferred(k)
            self.call.note_done(last, made)

    def _run_task(self, task: Task) -> None:
        k, m = task.stage, task.micro_batch
        call, stage, signature = self.call, self.call.stages[k], self.call.signatures[k]
        wanted = call.wanted(signature)
        if not any(wanted) and not stage.trained(signature):
            return
        outputs = call.forwards[k].outputs
        arrived = [*(d for ref in outputs for d in self.gradients.get((ref, m), [])), *components(self.d_losses[k])]
        with call.placed(task, arrived=arrived):
            d_values = [self._sum((ref, m)) for ref in outputs]
            d_losses = [None if d is None else d * self.rows.weight(m, d.dtype) for d in self.d_losses[k]]
            given = [d for d in [*d_values, *d_losses] if d is not None]
            if not given:
                return
            forward_task = Task("forward", k, m)
            kept = call.results[forward_task].residuals
            recorded = stage.recorded(signature, wanted) if kept else None
            if recorded is not None:
                d_values = self._completed(outputs, d_values, m)
                given = [d for d in [*d_values, *d_losses] if d is not None]
            there = tuple(d is not None for d in d_values), tuple(d is not None for d in d_losses)
            kind = BackwardKind(signature, wanted, *there)
            if recorded is not None and recorded.kind == kind:
                backward, arguments = recorded.kept_backward, kept
            else:
                backward, arguments = stage.backward(kind), call.flat_inputs[forward_task]
            made = list(backward.function(*arguments, *given, *self.totals.sums[k]))
        tracing.note_recomputed(call.recorder, task, backward.recomputed)
        call.note_done(task, made)
        self.done[task] = _Done(backward, kind, given)
        for i in backward.gives.inputs:
            self.gradients.setdefault((signature.inputs[i], m), []).append(made.pop(0))
        self.totals.take(k, backward.gives, made)

    def _completed(self, refs: Sequence[Ref], given: Sequence[tf.Tensor | None], m: int) -> list[tf.Tensor | None]:
        """Zeros for probabilities or logits where only the other has a gradient, as is usual.

        The backward pass of kept activations was traced for both.
        """
        found = dict(zip(refs, given, strict=True))
        for ref in refs:
            if ref.is_logits:
                both = [Ref(ref.index), ref]
                missing = [r for r in both if found[r] is None]
                if len(missing) == 1:
                    found[missing[0]] = tf.zeros_like(self.call.values[missing[0], m])
        return list(found.values())

    def _sum(self, key: Boundary) -> tf.Tensor | None:
        parts = self.gradients.pop(key, [])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else tf.add_n(parts)

    def gradients_of(self, inputs: Sequence[Ref], weights: Sequence[keras.Variable]) -> list[Any]:
        """Gradients of inputs of the model and of weights, for the whole mini-batch; None where unconnected."""
        self.totals.unpack()
        return [*(self._gather_input(ref) for ref in inputs), *(self.totals.of(v) for v in weights)]

    def _gather_input(self, ref: Ref) -> tf.Tensor | None:
        parts = [self._sum((ref, m)) for m in range(len(self.rows))]
        return None if any(part is None for part in parts) else self.rows.gather(parts)


class _SecondPass:
    """Goes back through a backward pass.

    Attributes:
        dd: for each boundary tensor, the gradient of what the backward pass gave as its gradient.
        given: gradients of boundary tensors that come from there, for a backward pass to begin with.
        dd_losses: for each stage, gradients of the gradients of its losses.
        totals: gradients of weights.
    """

    def __init__(
        self, first: BackwardPass, dd_inputs: Mapping[Ref, tf.Tensor | None], dd_weights: Mapping[int, tf.Tensor | None]
    ) -> None:
        self.first, self.call, self.rows = first, first.call, first.rows
        self.dd_weights = dd_weights
        there = [(ref, self.rows.split_gradient(d)) for ref, d in dd_inputs.items() if d is not None]
        self.dd = {(ref, m): part for ref, parts in there for m, part in enumerate(parts)}
        self.given: dict[Boundary, list[tf.Tensor]] = {}
        self.dd_losses: list[list[tf.Tensor | None]] = [[None] * len(f.loss_owners) for f in self.call.forwards]
        self.totals = _Totals(self.call)

    @sharing_handles()
    def run(self) -> None:
        """Emits one task for each backward task, the stages from first to last."""
        for task in sorted(self.first.done, key=lambda task: (task.micro_batch, task.stage)):
            self._run_task(task, self.first.done[task])

    def _run_task(self, task: Task, done: _Done) -> None:
        k, m = task.stage, task.micro_batch
        call, stage, signature = self.call, self.call.stages[k], self.call.signatures[k]
        weights = self.totals.trained[k]
        dd = [self.dd.get((signature.inputs[i], m)) for i in done.backward.gives.inputs]
        dd += [self.dd_weights.get(id(weights[i])) for i in done.backward.gives.dense]
        if all(d is None for d in dd):
            return
        with call.placed(task, "second"):
            second = stage.second(done.kind, tuple(d is not None for d in dd))
            arguments = [*call.flat_inputs[Task("forward", k, m)], *done.given, *(d for d in dd if d is not None)]
            made = list(second.function(*arguments, *self.totals.sums[k]))
            call.note_done(task, made)
            for ref in [ref for ref, given in zip(call.forwards[k].outputs, done.kind.d_values, strict=True) if given]:
                self.dd[ref, m] = made.pop(0)
            for i in [i for i, given in enumerate(done.kind.d_losses) if given]:
                share = self.rows.weight(m, made[0].dtype) * made.pop(0)
                before = self.dd_losses[k][i]
                self.dd_losses[k][i] = share if before is None else before + share
        for i in second.gives.inputs:
            self.given.setdefault((signature.inputs[i], m), []).append(made.pop(0))
        self.totals.take(k, second.gives, made)

    def gradients_of_outputs(self) -> list[tf.Tensor | None]:
        """Gradients of what the backward pass was given, in the order of `Call.float_outputs`."""
        found: list[tf.Tensor | None] = []
        for ref in self.call.float_outputs:
            parts = [self.dd.get((ref, m)) for m in range(len(self.rows))]
            found.append(None if any(part is None for part in parts) else self.rows.gather(parts))
        return [*found, *(d for stage in self.dd_losses for d in stage)]


def second_derivative(
    first: BackwardPass,
    results: Sequence[Any],
    dd_results: Sequence[tf.Tensor],
    inputs: Sequence[Ref],
    weights: Sequence[keras.Variable],
) -> list[Any]:
    """Gradients of a backward pass's results.

    Args:
        first: the backward pass.
        results: what its `gradients_of(inputs, weights)` gave.
        dd_results: gradients of these, for the tensors that `record_gradient` named.
        inputs: refs of inputs of the model.
        weights: weights of the model.

    Returns:
        Gradients of the gradients that the backward pass was given, of the inputs, and of the weights.
    """
    left = list(dd_results)
    dd = [_next_of(result, left, first.call.graph.model.name) for result in results]
    dd_inputs = dict(zip(inputs, dd, strict=False))
    dd_weights = {id(v): d for v, d in zip(weights, dd[len(inputs) :], strict=True)}
    second = _SecondPass(first, dd_inputs, dd_weights)
    second.run()
    losses = [[None] * len(stage) for stage in second.dd_losses]
    again = BackwardPass(first.call, second.given, losses, second.totals)
    again.run()
    return [*second.gradients_of_outputs(), *again.gradients_of(inputs, weights)]


def _next_of(result: Any, left: list[tf.Tensor], name: str) -> tf.Tensor | None:
    """The gradient of a result, taken from the front of `left`; None where there is none."""
    if result is None:
        return None
    d = left.pop(0)
    if d is None or compat.is_zeros(d):
        return None
    if isinstance(result, tf.IndexedSlices):
        if tf.executing_eagerly() and not tf.reduce_any(d != 0):
            return None
        raise ModelError(
            f"Expected second derivatives through dense gradients only. Received: one through the gradient of an "
            f"embedding of '{name}'. Leave the embedding's weights out of the inner gradient."
        )
    return d


def record_gradient(
    results: Sequence[Any],
    inputs: Sequence[tf.Tensor | None],
    weights: Sequence[tf.Variable],
    gradient: Callable[..., list[Any]],
) -> None:
    """Tells a tape around the tape, if there is one, that gradients came from gradients, inputs and weights."""
    made = [g.values if isinstance(g, tf.IndexedSlices) else g for g in results if g is not None]
    there = [tensor is not None for tensor in inputs] + [True] * len(weights)

    def of_those_there(*d_results: tf.Tensor) -> list[Any]:
        return [d for d, given in zip(gradient(*d_results), there, strict=True) if given]

    if made and compat.is_recording():
        given = [tensor for tensor in inputs if tensor is not None]
        compat.record_operation("GPipeGradient", made, given, weights, of_those_there)


def refuse_third_derivative(
    results: Sequence[Any], inputs: Sequence[tf.Tensor | None], weights: Sequence[tf.Variable], name: str
) -> None:
    """A third tape would miss the path through the stages; it gets an error instead of a wrong number."""

    def refuse(*_: Any) -> list[Any]:
        raise ModelError(
            f"Expected first and second derivatives only. Received: a third derivative of '{name}' inside "
            f"`strategy.run`. Take it of the model outside the pipeline. {PLAIN_CALL}"
        )

    record_gradient(results, inputs, weights, refuse)
