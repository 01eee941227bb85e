"""Runs a schedule over the stages of a model: one differentiable call.

      inputs ──split──▶ x₀ x₁ … ──▶ forward tasks ──▶ y₀ y₁ … ──gather──▶ outputs, losses       [1] [2] [3]
                                        │ stage inputs, states
    d inputs ◀─gather── d x₀ d x₁ … ◀── backward tasks ◀── d y₀ d y₁ … ◀──split── d outputs      [4] [5]

The order of the tasks of a stage is the schedule's; a control dependency from each to the next enforces it on every
kind of device and bounds memory. What a stage needs is sent straight to it from wherever it was made, so that a skip
connection over several cuts passes no stage in between. The loss is not taken here: whoever called the model takes it
from the gathered outputs of the whole mini-batch, so that every reduction and mask is exact.

State that no data move starts each micro-batch where it was before the step, and moves once a mini-batch; state that
the data move is handed from micro-batch to micro-batch, and moves once a micro-batch (`state.py`).

The loop over micro-batches is unrolled: one call operation for each task. See docs/decisions/0001-form-of-the-loop.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_gpipe import compat, state, threads, tracing
from tf_gpipe.backward import PLAIN_CALL, BackwardPass, record_gradient, refuse_third_derivative, second_derivative
from tf_gpipe.dependence import moved_by_data
from tf_gpipe.errors import ModelError
from tf_gpipe.messages import listed
from tf_gpipe.micro_batch import Rows, count_rows, split_rows
from tf_gpipe.model_graph import Ref
from tf_gpipe.placed_function import sharing_handles
from tf_gpipe.schedule import Schedule, Task
from tf_gpipe.stage import Stage
from tf_gpipe.stage_functions import Forward, ForwardResult, Signature, flatten_inputs
from tf_gpipe.tasks import recomputes
from tf_gpipe.values import Kind, Value, components, has_gradient, is_dense, is_differentiable, kind_of

if TYPE_CHECKING:
    from tf_gpipe.pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class PipelineOutput:
    """What a pipelined call gives.

    Attributes:
        outputs: the model's outputs for the whole mini-batch, flat, with their masks attached.
        losses: what the model's layers passed to `add_loss`, with the layer that did.
    """

    outputs: list[Value]
    losses: list[tuple[keras.Layer, tf.Tensor]]


class Call:
    """One pipelined call: the values at all boundaries, from the first forward task to the last backward task."""

    def __init__(self, pipeline: Pipeline, inputs: list[Value | None], training: bool | None) -> None:
        self.pipeline = pipeline
        self.stages = pipeline.stages
        self.graph = pipeline.plan.graph
        self.training = training
        self.inputs = inputs
        given = [(t, self.graph.specs[ref].name) for t, ref in zip(inputs, self.graph.inputs, strict=True)]
        there = [(t, name) for t, name in given if t is not None]
        rows = count_rows([t for t, _ in there], [name for _, name in there])
        self.rows: Rows = split_rows(rows, pipeline.num_micro_batches)
        self.schedule = Schedule.gpipe(max(len(self.stages), 1), len(self.rows))
        self.values: dict[tuple[Ref, int], Value | None] = {}
        self.masks: dict[tuple[Ref, int], tf.Tensor | None] = {}
        self.results: dict[Task, ForwardResult] = {}
        self.flat_inputs: dict[Task, list[tf.Tensor]] = {}
        self.signatures: list[Signature] = []
        self.forwards: list[Forward] = []
        self.last_task: dict[int, tf.Operation] = {}
        self.specs: dict[Ref, tuple[Kind | None, Kind | None]] = {}
        self.needs_gradient: dict[Ref, bool] = {}
        self.recorder: tracing.Recorder | None = None

    @property
    def float_outputs(self) -> list[Ref]:
        """Refs of the outputs that have gradients, then of the logits of outputs."""
        refs = self.graph.flat_outputs
        return [ref for ref in (*refs, *(ref.logits for ref in refs)) if self.is_float(ref)]

    @property
    def trained(self) -> list[keras.Variable]:
        """The weights that get gradients, once each."""
        pairs = zip(self.stages, self.signatures, strict=True)
        return list({id(v): v for stage, signature in pairs for v in stage.trained(signature)}.values())

    def is_float(self, ref: Ref) -> bool:
        """Whether gradients flow through a boundary tensor; False where there is none."""
        kind, _ = self.specs.get(ref, (None, None))
        return has_gradient(kind)

    # --- [1] to [3]: forward ---

    def run(self) -> PipelineOutput:
        """The forward pass; tapes learn how to go back."""
        recording = compat.is_recording()
        if recording and self.training is not False:
            self.recorder = tracing.recorder_of(self.schedule, self.pipeline.remat, self.stages)
        with compat.stop_recording(), tf.device(_host_of(self.inputs)):
            self._split_inputs()
        kept = self._kept_micro_batches() if recording and self.training else set()
        self._trace(recording, keep=bool(kept))
        needed = self.needs_gradient if recording else None
        if self.pipeline.try_xla(self.training, self.specs, self.forwards, needed):
            self.stages = self.pipeline.stages
            self._trace(recording, keep=bool(kept))
        self._refuse_forward_mode()
        self.states = state.StateValues(self._moved_once())
        with compat.stop_recording():
            self._normalise_kernels()
            self._run_forward(kept)
            outputs = self._gather_outputs()
            losses = self._pool_losses()
            self._update_state()
        if recording:
            logits = [compat.logits_of(t) for t in outputs]
            floats = [t for t in (*outputs, *logits) if has_gradient(kind_of(t))]
            self._record([*floats, *(loss for _, loss in losses)])
        return PipelineOutput(outputs, losses)

    def _kept_micro_batches(self) -> set[int]:
        """Micro-batches whose activations are kept for the backward pass."""
        count = len(self.rows)
        return {m for m in range(count) if not recomputes(Task("backward", 0, m), self.pipeline.remat, count)}

    def _split_inputs(self) -> None:
        for ref, tensor in zip(self.graph.inputs, self.inputs, strict=True):
            mask = None if tensor is None else compat.get_keras_mask(tensor)
            for whole, parts in ((tensor, self.values), (mask, self.masks)):
                split = [None] * len(self.rows) if whole is None else self.rows.split(whole)
                parts.update({(ref, m): part for m, part in enumerate(split)})

    def _trace(self, recording: bool, *, keep: bool) -> None:
        """Traces every stage's forward function, each for what the ones before it give.

        Args:
            recording: whether a tape follows the call. Then this finds which boundary tensors need a gradient.
            keep: whether activations of some micro-batch are to be kept for its backward pass.
        """
        self.signatures, self.forwards, self.specs = [], [], {}
        for ref, tensor in zip(self.graph.inputs, self.inputs, strict=True):
            self.specs[ref] = self._input_kind(self.values[ref, 0]), self._input_kind(self.masks[ref, 0])
            self.needs_gradient[ref] = bool(recording and self.is_float(ref) and compat.is_watched([tensor]))
        for stage in self.stages:
            try:
                signature, forward = stage.traced(self.training, self.specs, self.needs_gradient if keep else None)
            except Exception as error:
                compat.add_note(error, f"while it was traced, once for all {len(self.rows)} micro-batches")
                raise
            self.specs.update(zip(forward.outputs, zip(forward.values, forward.masks, strict=True), strict=True))
            self.signatures.append(signature)
            self.forwards.append(forward)
            needs = recording and (bool(stage.trained(signature)) or any(self.wanted(signature)))
            for ref in forward.outputs:
                self.needs_gradient[ref] = needs and self.is_float(ref)
                if needs:
                    self._refuse_composite(stage, ref)

    def _input_kind(self, value: Value | None) -> Kind | None:
        return None if value is None else kind_of(value, [self.rows.static_size, *value.shape[1:]])

    def _normalise_kernels(self) -> None:
        done: list[keras.layers.SpectralNormalization] = []
        for forward in self.forwards:
            for layer in forward.normalised:
                state.refuse_repeated_normalisation(layer, done)
                done.append(layer)
                with tf.device(compat.raw_variable(layer.kernel).device):
                    state.normalise_kernel(layer)

    def _refuse_forward_mode(self) -> None:
        inputs = [tensor for ref, tensor in zip(self.graph.inputs, self.inputs, strict=True) if self.is_float(ref)]
        if compat.has_tangents(inputs, [compat.raw_variable(v) for v in self.trained]):
            raise ModelError(
                f"Expected gradients to be taken by a `tf.GradientTape`. Received: a `tf.autodiff.ForwardAccumulator` "
                f"around '{self.graph.model.name}' inside `strategy.run`. Call the model outside the pipeline for it. "
                f"{PLAIN_CALL}"
            )

    def _refuse_composite(self, stage: Stage, ref: Ref) -> None:
        """No gradient is handed from stage to stage for the values of a ragged or sparse tensor."""
        kind, _ = self.specs[ref]
        if kind is not None and not is_dense(kind) and is_differentiable(kind.dtype):
            step = next(step for step in stage.plan.steps if ref in step.outputs)
            raise ModelError(
                "Expected dense tensors where gradients leave a stage. Received: a ragged or sparse one, made by "
                f"'{step.name}' of '{self.graph.model.name}'. Make it dense in the same stage (cut elsewhere with "
                "`partition`), or pass it on as a dense tensor: `to_tensor()`, `tf.sparse.to_dense`."
            )

    @sharing_handles()
    def _run_forward(self, kept: set[int]) -> None:
        tasks = [task for task in self.schedule.order() if task.kind == "forward" and self.stages]
        # Any order in which inputs are there will do: what runs when is decided by data and control dependencies.
        for task in sorted(tasks, key=lambda task: (task.micro_batch, task.stage)):
            k, m = task.stage, task.micro_batch
            stage, forward, signature = self.stages[k], self.forwards[k], self.signatures[k]
            refs = signature.inputs
            arrived = components([source[ref, m] for source in (self.values, self.masks) for ref in refs])
            with self.placed(task, arrived=arrived):
                given = self.states.read(forward.given.variables, m)
                flat = flatten_inputs([self.values[r, m] for r in refs], [self.masks[r, m] for r in refs], given)
                recorded = stage.recorded(signature, self.wanted(signature)) if m in kept else None
                if recorded is not None and stage.keeps(recorded):
                    forward = recorded.kept_forward
                result = forward.take(forward.function(*flat))
                self.states.write(forward.given.states, result.states, self.rows, m)
            self.note_done(task, result.values)
            self.results[task], self.flat_inputs[task] = result, flat
            self.values.update({(ref, m): value for ref, value in zip(forward.outputs, result.values, strict=True)})
            self.masks.update({(ref, m): mask for ref, mask in zip(forward.outputs, result.masks, strict=True)})

    def _moved_once(self) -> set[int]:
        """Identities of the state that no data move, so that it moves once for the mini-batch; warns of the rest."""
        given = {id(v): v for f in self.forwards for v in f.given.states if not compat.is_seed_state(v)}
        if len(self.rows) == 1 or not given:
            return set()
        pairs = list(zip(self.stages, self.signatures, strict=True))
        moved, reasons = moved_by_data(
            [stage.dependence(signature) for stage, signature in pairs],
            self.graph.inputs,
            set(given),
            lambda k: pairs[k][0].dependence(pairs[k][1], any_rows=True),
        )
        self.pipeline.tell_of_moved([given[key] for key in given if key in moved], len(self.rows), reasons)
        return set(given) - moved

    def wanted(self, signature: Signature) -> tuple[bool, ...]:
        """For each input of a stage, whether its gradient is of use."""
        return tuple(self.needs_gradient[ref] for ref in signature.inputs)

    @contextlib.contextmanager
    def placed(self, task: Task, kind: str | None = None, arrived: Sequence[tf.Tensor] = ()) -> Iterator[None]:
        """The device, name and place in its stage's order of a task.

        `kind` if it is neither forward nor backward; `arrived` is what it waits for from outside its stage.
        """
        stage = self.stages[task.stage]
        before = [self.last_task[task.stage]] if task.stage in self.last_task else []
        kind = kind or task.kind
        scope = f"stage_{stage.index}/micro_batch_{task.micro_batch}/{kind}"
        try:
            with (
                tf.name_scope(scope),
                tf.device(stage.device),
                tf.control_dependencies(before),
                tracing.started(self.recorder, (kind, task.stage, task.micro_batch), arrived, stage.device),
            ):
                yield
        except Exception as error:
            where = f"in the {kind} pass of micro-batch {task.micro_batch} on stage {stage.index} ({stage.device})"
            compat.add_note(error, where)
            raise

    def note_done(self, task: Task, results: Sequence[tf.Tensor | None]) -> None:
        """The next task of the stage waits for this one."""
        made = components(results)
        if made and not tf.executing_eagerly():
            self.last_task[task.stage] = tracing.ended(self.recorder, made, self.stages[task.stage].device)

    def _gather_outputs(self) -> list[Value]:
        outputs = []
        for ref in self.graph.flat_outputs:
            parts = [self.values[ref, m] for m in range(len(self.rows))]
            masks = [self.masks[ref, m] for m in range(len(self.rows))]
            output = compat.identity_for_tapes(self._gather(ref, parts))
            if masks[0] is not None:
                compat.set_keras_mask(output, self._gather(ref, masks))
            if self.is_float(ref.logits):
                parts = [self.values[ref.logits, m] for m in range(len(self.rows))]
                compat.set_logits(output, compat.identity_for_tapes(self.rows.gather(parts)))
            outputs.append(output)
        return outputs

    def _gather(self, ref: Ref, parts: Sequence[Any]) -> Value:
        spec = self.graph.specs[ref]
        if len(parts) > 1 and (parts[0].shape.rank == 0 or (spec.shape and spec.shape[0] is not None)):
            raise ModelError(
                f"Expected outputs with one row for each row of the inputs, to put micro-batches together. Received: "
                f"output '{spec.name}' of '{self.graph.model.name}' with shape {spec.shape}. Return one row for each "
                "example and reduce in the loss or a metric, or set num_micro_batches=1."
            )
        return self.rows.gather(parts)

    def _pool_losses(self) -> list[tuple[keras.Layer, tf.Tensor]]:
        """Losses of layers over the whole mini-batch: the mean over micro-batches, weighted by their rows."""
        pooled = []
        for k, forward in enumerate(self.forwards):
            for i, owner in enumerate(forward.loss_owners):
                self._refuse_unreduced(owner, forward.losses[i])
                with tf.device(self.stages[k].device):
                    parts = [
                        self.rows.weight(m, loss.dtype) * loss
                        for m in range(len(self.rows))
                        for loss in [self.results[Task("forward", k, m)].losses[i]]
                    ]
                    pooled.append((owner, tf.add_n(parts)))
        return pooled

    def _refuse_unreduced(self, owner: keras.Layer, kind: Kind | None) -> None:
        """A loss for each row would have to be added over micro-batches, others averaged; the shape does not tell."""
        if len(self.rows) > 1 and kind is not None and kind.shape.rank != 0:
            raise ModelError(
                f"Expected layers to add scalar losses. Received: one of shape {tuple(kind.shape)} from "
                f"'{owner.name}' of '{self.graph.model.name}'. Reduce it before `add_loss`, as by `keras.ops.mean`, or "
                "set num_micro_batches=1."
            )

    def _update_state(self) -> None:
        """Assigns what the stages changed, once for the mini-batch."""
        self.states.assign()
        for k, forward in enumerate(self.forwards):
            results = [self.results[Task("forward", k, m)] for m in range(len(self.rows))]
            packed = [self._counted(result.moments, m) for m, result in enumerate(results)]
            self.stages[k].update_moving_averages(forward.moments_of, packed)

    def _counted(self, packed: list[tf.Tensor], m: int) -> list[tf.Tensor]:
        """Moments of a micro-batch, which count nothing if it turns out to have no rows."""
        if not packed or self.rows.is_static:
            return packed
        mean, variance, counts = packed
        return [mean, variance, tf.where(tf.equal(self.rows.sizes[m], 0), tf.zeros_like(counts), counts)]

    # --- [4] and [5]: backward ---

    def _record(self, differentiable: list[tf.Tensor]) -> None:
        """Tells the tapes that `differentiable` came from the inputs and the weights."""
        refs = [ref for ref in self.graph.inputs if self.needs_gradient[ref]]
        inputs = [
            tensor for ref, tensor in zip(self.graph.inputs, self.inputs, strict=True) if self.needs_gradient[ref]
        ]
        trained = self.trained
        weights = [compat.raw_variable(v) for v in trained]
        if not weights and not inputs:
            return

        given = {id(v) for forward in self.forwards for v in forward.given.variables}
        read_again = [v for stage in self.stages for v in stage.read_again if id(v) not in given]
        assigned = compat.watch_assignments([compat.raw_variable(v) for v in read_again])

        # A tape makes up zeros for outputs that nothing used, if any was. To tell them from zeros that were found, each
        # output goes through an operation of its own, which a tape leaves out when it has no gradient.
        with compat.stop_recording():
            whole = [tf.identity(tensor) for tensor in differentiable]
        used: set[int] = set()

        @threads.in_turn
        def gradient(*d_whole: tf.Tensor) -> list[Any]:
            d_outputs = [d if i in used else None for i, d in enumerate(d_whole)]
            used.clear()
            _refuse_assigned(assigned(), self.graph.model.name)
            with compat.stop_recording():
                backward = BackwardPass.of_outputs(self, d_outputs)
                backward.run()
                results = backward.gradients_of(refs, trained)

            @threads.in_turn
            def second(*dd_results: tf.Tensor) -> list[Any]:
                _refuse_assigned(assigned(), self.graph.model.name)
                with compat.stop_recording():
                    again = second_derivative(backward, results, dd_results, refs, trained)
                refuse_third_derivative(again, [*d_outputs, *inputs], weights, self.graph.model.name)
                return again

            record_gradient(results, [*d_outputs, *inputs], weights, second)
            return results

        compat.record_operation("GPipe", whole, inputs, weights, gradient)
        for i, (tensor, source) in enumerate(zip(differentiable, whole, strict=True)):

            def of_output(d: tf.Tensor, i: int = i) -> list[tf.Tensor]:
                used.add(i)
                return [d]

            compat.record_operation("GPipeOutput", [tensor], [source], [], of_output)


def _host_of(inputs: Sequence[Value | None]) -> str | None:
    """Where a mini-batch is split: where it was made, if that is known, else on the host, which it comes from."""
    made = {tensor.device for tensor in components(inputs)}
    return made.pop() or "/CPU:0" if len(made) == 1 else "/CPU:0"


def _refuse_assigned(variables: Sequence[tf.Variable], name: str) -> None:
    """The backward pass reads the weights again, and would take them as they have become."""
    if variables:
        names = listed(v.name for v in variables)
        raise ModelError(
            f"Expected the gradients of '{name}' to be taken before its weights change, since the backward pass runs "
            f"the stages again. Received: {names}, assigned since the model was called. Take all gradients of the "
            "step first, then apply them."
        )
