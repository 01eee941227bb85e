"""One stage at run time: its functions, each traced once for a kind of input and called once for each micro-batch.

They are pure `tf.function`s, described in `stage_functions.py`. The backward function runs the forward pass again from
the stage's stored inputs (rematerialisation) and takes its gradient, adding each weight's gradient to the running sum
it is given, or giving the operands of one that is deferred (`gradients.py`). The functions are not inlined where they
are called (`_noinline`): otherwise Grappler would merge the recomputation with the forward pass and keep all
activations. `tf.recompute_grad` is not used, see docs/decisions/0002-rematerialisation.md. What new values of state
depend on is read off the forward function (`dependence.py`), for a call to know how often they move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat, moments, progress, residuals, state, updates
from tf_gpipe.body import Body, StageBody
from tf_gpipe.contraction import Contraction
from tf_gpipe.dependence import Dependence, of_any_rows
from tf_gpipe.errors import ModelError
from tf_gpipe.gradients import GradientLayout
from tf_gpipe.model_graph import Ref
from tf_gpipe.placed_function import PlacedFunction
from tf_gpipe.plan import StagePlan
from tf_gpipe.stage_functions import (
    Backward,
    BackwardKind,
    Forward,
    Given,
    Recorded,
    Signature,
    input_specs,
    unflatten,
)
from tf_gpipe.values import Kind, components, has_gradient, is_differentiable


class _NoGradientError(Exception):
    """The gradient of one of a stage's operations failed, which plain Keras may never ask for."""


class NotForXLAError(ModelError):
    """A stage that XLA cannot compile."""


class Stage:
    """Runs one stage of a plan.

    Args:
        plan: the stage.
        jit_compile: whether XLA compiles its functions.
        deferral: for how many micro-batches deferring a gradient costs memory, see `GradientLayout`.
        count: the number of stages.

    Attributes:
        notes: what it does otherwise than asked for, and why, for the plan.
    """

    def __init__(self, plan: StagePlan, *, jit_compile: bool, deferral: int, count: int = 1) -> None:
        self.plan = plan
        self.index = plan.index
        self.device = plan.device
        self._body = StageBody(plan)
        self._choices = state.Choices()
        self._read_from_elsewhere: dict[int, keras.Variable] = {}
        self.jit_compile = jit_compile
        self._deferral = deferral
        self._count = count
        self._deferred: dict[Any, Callable[..., list[tf.Tensor]]] = {}
        self._forwards: dict[Signature, Forward] = {}
        self._recorded: dict[tuple[Signature, tuple[bool, ...]], Recorded | None] = {}
        self._backwards: dict[BackwardKind, Backward] = {}
        self._seconds: dict[Any, Backward] = {}
        self._dependences: dict[tuple[Signature, tuple[int, ...]], Dependence] = {}
        self.notes: list[str] = []
        self._known: dict[bool | None, tuple[dict[int, keras.Variable], dict[int, keras.Variable]]] = {}

    @property
    def weights(self) -> list[keras.Variable]:
        """Variables that could be trained, in the order of first use."""
        own = [v for v in self.plan.variables if tf.as_dtype(v.dtype).is_floating]
        return [*own, *self._read_from_elsewhere.values()]

    @property
    def read_again(self) -> list[keras.Variable]:
        """Weights that a backward function reads where they are, so that they must be as they were."""
        return [v for v in self.weights if id(v) in self._body.captured]

    @property
    def pooled(self) -> list[keras.layers.BatchNormalization]:
        """Batch-norm layers that take statistics of each micro-batch, as far as traced."""
        return list({id(layer): layer for forward in self._forwards.values() for layer in forward.moments_of}.values())

    def traced(
        self,
        training: bool | None,
        kinds: Mapping[Ref, tuple[Kind | None, Kind | None]],
        needs_gradient: Mapping[Ref, bool] | None,
    ) -> tuple[Signature, Forward]:
        """The kind of call, and its forward function; traced the first time.

        Args:
            training: the training flag.
            kinds: kinds of the value and of the mask of everything that there is.
            needs_gradient: whether the gradient of each is wanted, if activations of a micro-batch are to be kept.
        """
        while True:
            signature = self._signature(training, kinds)
            self._refuse_strings(signature)
            if needs_gradient is not None and signature not in self._forwards:
                recorded = self.recorded(signature, tuple(needs_gradient[ref] for ref in signature.inputs))
                if recorded is not None and self.keeps(recorded):
                    self._forwards[signature] = recorded.forward
            forward = self.forward(signature)
            # Tracing may find weights that no layer of the stage owns: of a layer of another stage, say.
            if len(signature.trainable) == len(self.weights):
                return signature, forward

    def _signature(self, training: bool | None, kinds: Mapping[Ref, tuple[Kind | None, Kind | None]]) -> Signature:
        """The kind of call for which functions are traced, with what is frozen now."""
        inputs = [*self.plan.inputs, *(ref.logits for ref in self.plan.inputs if ref.logits in kinds)]
        values, masks = zip(*(kinds[ref] for ref in inputs), strict=True) if inputs else ((), ())
        return Signature(training, tuple(inputs), values, masks, tuple(v.trainable for v in self.weights))

    def trained(self, signature: Signature) -> list[keras.Variable]:
        """The weights that get gradients."""
        pairs = zip(self.weights, signature.trainable, strict=False)  # weights found since are not among them
        return [v for v, trainable in pairs if trainable]

    # --- forward ---

    def forward(self, signature: Signature) -> Forward:
        """The forward function for a kind of input; traced the first time."""
        if signature not in self._forwards:
            self._forwards[signature] = self._trace_forward(signature)
        return self._forwards[signature]

    def _trace_forward(self, signature: Signature) -> Forward:
        def trace(given: Given) -> tuple[Any, Body]:
            bodies: list[Body] = []

            def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
                values, masks, variables, _ = unflatten(flat, signature, given)
                bodies.append(self._run(signature, values, masks, given, variables))
                return bodies[-1].flat

            return self._place(self._concrete(signature, forward, input_specs(signature, given))), bodies[-1]

        given, function, made = self._trace_complete(signature, trace)
        return Forward.of(function, given, made)

    def dependence(self, signature: Signature, *, any_rows: bool = False) -> Dependence:
        """What the results of the forward function depend on.

        Args:
            signature: the kind of call.
            any_rows: whether it is to hold for any number of rows. Where that number is known, and so a constant in the
                function, the stage is traced once more.
        """
        kind = of_any_rows(signature, self.plan.graph.specs) if any_rows else signature
        forward = self.forward(signature)
        key = kind, tuple(map(id, forward.given.states))
        if key not in self._dependences:
            self._dependences[key] = (
                Dependence.of(kind, forward) if kind == signature else self._traced_dependence(kind, signature)
            )
        return self._dependences[key]

    def _traced_dependence(self, kind: Signature, signature: Signature) -> Dependence:
        """As `dependence`, by a trace for a kind of call like another, for which the stage was traced before."""
        forward, bodies = self.forward(signature), list[Body]()

        def any_rows(*flat: tf.Tensor) -> list[tf.Tensor]:
            values, masks, variables, _ = unflatten(flat, kind, forward.given)
            bodies.append(self._run(kind, values, masks, forward.given, variables))
            return bodies[-1].flat

        try:
            function = self._concrete(signature, any_rows, input_specs(kind, forward.given), called=True)
        except Exception as error:  # the code of layers, which may count on the number of rows in any way
            return Dependence.unknown(forward, compat.one_line(error))
        if not _is_complete(bodies[-1], forward.given):
            return Dependence.unknown(forward, "other variables are used where the number of rows is not known")
        traced = Forward.of(function, forward.given, bodies[-1])
        return Dependence.of(kind, traced).where_alike(forward, traced)

    def _trace_complete(
        self, signature: Signature, trace: Callable[[Given], tuple[Any, Body]]
    ) -> tuple[Given, Any, Body]:
        """Traces a function of the stage's operations; once more if they read or assign more than was expected."""
        body, training = self._body, signature.training
        states, fixed = self._known.setdefault(training, (body.likely_states(training), body.likely_fixed(training)))
        while True:
            given = Given(tuple(states.values()), tuple(fixed.values()))
            function, made = trace(given)
            read = _only_read(made, given)
            if _is_complete(made, given):
                break
            states.update(made.assigned)  # trace again with what was missing as input
            fixed.update(read)
            for key in made.assigned:
                fixed.pop(key, None)
        own = {id(v) for v in self.plan.variables}
        found = {key: v for key, v in read.items() if key not in own and v.trainable}
        self._read_from_elsewhere.update((k, v) for k, v in found.items() if tf.as_dtype(v.dtype).is_floating)
        state.refuse_impure(function.graph, self.plan.index, self.plan.operations)
        self._refuse_assigned_weights(made.assigned, signature)
        return given, function, made

    def _run(self, signature: Signature, values: Any, masks: Any, given: Given, variables: Any) -> Body:
        count, training = len(given.states), signature.training
        return self._body.run(signature.inputs, values, masks, training, given.variables, variables, count)

    # --- keeping activations ---

    def recorded(self, signature: Signature, wanted: tuple[bool, ...]) -> Recorded | None:
        """The forward pass on a tape and the backward pass from all that has a gradient; traced the first time.

        Returns:
            None where there is nothing to take a gradient of, or no way: an operation has no gradient (the error comes
            where that is asked for), or only in the function that has run it (`state.needs_its_own_run`).
        """
        key = signature, wanted
        if key not in self._recorded:
            self._recorded[key] = None
            if any(wanted) or self.trained(signature):
                try:
                    self._recorded[key] = self._trace_recorded(signature, wanted)
                except _NoGradientError as error:
                    self.note(f"recomputes its activations: {compat.one_line(error.__cause__)}")
        return self._recorded[key]

    def note(self, what: str) -> None:
        """Keeps for the plan, once, what the stage does otherwise than asked for."""
        line = f"stage {self.index} {what}"
        self.notes += [line] if line not in self.notes else []

    def keeps(self, recorded: Recorded) -> bool:
        """Whether a micro-batch's activations can be kept; XLA does not know what loops and branches keep."""
        return not (self.jit_compile and recorded.branches)

    def _trace_recorded(self, signature: Signature, wanted: tuple[bool, ...]) -> Recorded | None:
        gives = GradientLayout(self.trained(signature), self._deferral)
        made_of: list[tuple[BackwardKind, residuals.Residuals]] = []

        def trace(given: Given) -> tuple[Any, Body]:
            bodies: list[Body] = []

            def forward_recorded(*flat: tf.Tensor) -> list[tf.Tensor]:
                tape, body, sources, _ = self._run_recorded(flat, given, signature, wanted)
                bodies.append(body)
                if not _is_complete(body, given):
                    return body.flat
                kind = BackwardKind(
                    signature, wanted, tuple(map(has_gradient, body.values)), (True,) * len(body.losses)
                )
                targets = kind.targets(body)

                def gradient(*d_outputs: tf.Tensor) -> list[tf.Tensor]:
                    try:
                        found = tape.gradient(targets, sources, output_gradients=list(d_outputs))
                    # Of any kind: the code is of an operation, or the user's. Here it takes part for every output, in
                    # plain Keras for those that have a loss; what these need is taken again, and raises, in `backward`.
                    except Exception as error:
                        raise _NoGradientError from error
                    return gives.sort(found, wanted)

                made_of.append((kind, residuals.trace(gradient, [tf.TensorSpec(t.shape, t.dtype) for t in targets])))
                return [*body.flat, *made_of[-1][1].kept]

            return self._concrete(signature, forward_recorded, input_specs(signature, given), called=True), bodies[-1]

        given, function, made = self._trace_complete(signature, trace)
        if state.needs_its_own_run(function.graph):
            self.note("recomputes its activations: the gradient of a `tf.py_function` needs the function's own run")
            return None

        def place(body: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> PlacedFunction:
            return self._place(self._concrete(None, body, specs))

        forward = Forward.of(function, given, made)
        count = len(function.outputs) - len(made_of[-1][1].kept)
        return Recorded(function, forward, count, made_of[-1][0], gives, made_of[-1][1], place)

    # --- backward ---

    def backward(self, kind: BackwardKind) -> Backward:
        """The backward function, from the stage's inputs, for a kind of gradients; traced the first time."""
        if kind not in self._backwards:
            recorded = self._recorded.get((kind.signature, kind.wanted))
            if recorded is not None and recorded.kind == kind and not recorded.branches:
                self._backwards[kind] = recorded.backward
            else:
                self._backwards[kind] = self._trace_backward(kind)
        return self._backwards[kind]

    def _trace_backward(self, kind: BackwardKind) -> Backward:
        signature, forward = kind.signature, self.forward(kind.signature)
        gives = GradientLayout(self.trained(signature), self._deferral)
        d_specs = kind.specs(forward.values, forward.losses)
        run: list[tuple[list[tf.Tensor], list[tf.Operation]]] = []

        def backward(*flat: tf.Tensor) -> list[tf.Tensor]:
            tape, body, sources, rest = self._run_recorded(flat, forward.given, signature, kind.wanted)
            run.append((body.flat, tf.compat.v1.get_default_graph().get_operations()))
            found = tape.gradient(kind.targets(body), sources, output_gradients=list(rest[: len(d_specs)]))
            return gives.add(gives.sort(found, kind.wanted), rest[len(d_specs) :])

        specs = [*input_specs(signature, forward.given), *d_specs, *gives.specs]
        function = self._concrete(signature, backward, specs)
        return Backward(
            self._place(function), gives, lambda: residuals.part_of_work(function.outputs, run[-1][0], run[-1][1])
        )

    def second(self, kind: BackwardKind, dd_made: tuple[bool, ...]) -> Backward:
        """The gradient of the backward function of a kind; traced the first time.

        Its function takes what that one takes, then gradients of what that one gives (`dd_made` says of which), then
        sums of weight gradients. It gives gradients of the `d outputs` and `d losses`, then of inputs and weights.
        """
        if (kind, dd_made) not in self._seconds:
            self._seconds[kind, dd_made] = self._trace_second(kind, dd_made)
        return self._seconds[kind, dd_made]

    def _trace_second(self, kind: BackwardKind, dd_made: tuple[bool, ...]) -> Backward:
        signature, forward, first = kind.signature, self.forward(kind.signature), self.backward(kind)
        weights = self.trained(signature)
        gives = GradientLayout(weights)
        d_specs = kind.specs(forward.values, forward.losses)
        kinds = [signature.values[i] for i in first.gives.inputs]
        kinds += [tf.TensorSpec(weights[i].shape, weights[i].dtype) for i in first.gives.dense]
        dd_specs = [spec for spec, there in zip(kinds, dd_made, strict=True) if there]

        sources_of = [i for i, there in enumerate(kind.wanted) if there]
        made_at = [sources_of.index(i) for i in first.gives.inputs] + [len(sources_of) + i for i in first.gives.dense]

        def second(*flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as outer:
                outer.watch([tensor for tensor in flat if is_differentiable(tensor.dtype)])
                tape, body, sources, rest = self._run_recorded(flat, forward.given, signature, kind.wanted)
                given, rest = list(rest[: len(d_specs)]), rest[len(d_specs) :]
                made = tape.gradient(kind.targets(body), sources, output_gradients=given)
                made = [made[at] for at, there in zip(made_at, dd_made, strict=True) if there]
            dd, before = list(rest[: len(dd_specs)]), rest[len(dd_specs) :]
            found = outer.gradient(made, [*given, *sources], output_gradients=dd)
            d_given = [tf.zeros_like(g) if d is None else d for g, d in zip(given, found, strict=False)]
            return [*d_given, *gives.add(gives.sort(found[len(given) :], kind.wanted), before)]

        specs = [*input_specs(signature, forward.given), *d_specs, *dd_specs, *gives.specs]
        return Backward(self._place(self._concrete(signature, second, specs)), gives)

    def _run_recorded(
        self, flat: Sequence[tf.Tensor], given: Given, signature: Signature, wanted: Sequence[bool]
    ) -> tuple[tf.GradientTape, Body, list[Any], Sequence[tf.Tensor]]:
        """Runs the stage's operations on a tape.

        Returns the tape, what the stage gave, the sources of gradients (the wanted inputs, then the trained weights, as
        variables or as the values that were given), and what is left of `flat`.
        """
        values, masks, variables, rest = unflatten(flat, signature, given)
        known = {id(v): value for v, value in zip(given.variables, variables, strict=True)}
        sources = [v for v, there in zip(values, wanted, strict=True) if there]
        sources += [known.get(id(v), compat.raw_variable(v)) for v in self.trained(signature)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            body = self._run(signature, values, masks, given, variables)
        return tape, body, sources, rest

    def deferred(
        self,
        made: Sequence[tuple[Contraction, Sequence[tf.Tensor], Sequence[tf.Tensor]]],
        weights: Sequence[keras.Variable],
    ) -> list[tf.Tensor]:
        """Deferred gradients of weights.

        Args:
            made: how each is made, and its first and its second operand from each micro-batch.
            weights: the weights.
        """
        flat = [tensor for _, first, second in made for tensor in (*first, *second)]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
        counts = [len(first) for _, first, _ in made]
        kinds = [kind for kind, _, _ in made]
        key = (*kinds, *map(id, weights), *counts, *specs)
        if key not in self._deferred:

            def weight_gradients(*flat: tf.Tensor) -> list[tf.Tensor]:
                gradients, left = [], list(flat)
                for kind, count, weight in zip(kinds, counts, weights, strict=True):
                    first, second, left = left[:count], left[count : 2 * count], left[2 * count :]
                    gradients.append(tf.reshape(kind.run(first, second), weight.shape))
                return gradients

            self._deferred[key] = self._place(self._concrete(None, weight_gradients, specs))
        return self._deferred[key](*flat)

    # --- once for a mini-batch ---

    def update_moving_averages(
        self, layers: Sequence[keras.layers.BatchNormalization], micro_batches: Sequence[moments.Packed]
    ) -> None:
        """Moves the averages of the batch-norm layers of each call by what the micro-batches gave."""

        def moving_averages(*flat: tf.Tensor) -> None:
            moments.update_moving_averages(layers, list(zip(*[iter(flat)] * 3, strict=True)))

        tensors = [tensor for packed in micro_batches for tensor in packed]
        if layers:
            updates.run(self.device, moving_averages, tensors, compiled=self.jit_compile, note=self.note)

    # --- tracing ---

    def _concrete(
        self,
        signature: Signature | None,
        body: Callable[..., Any],
        specs: Sequence[tf.TensorSpec],
        *,
        called: bool = False,
    ) -> Any:
        """Traces a function of flat tensors outside whatever graph is being built.

        Args:
            signature: the kind of call whose operations it runs; None if it only calls traced functions.
            body: its code.
            specs: kinds of its arguments.
            called: whether it is to be called, and inlined, by functions that run on the device.
        """
        progress.tracing(self.index, self._count)
        body.__name__ = f"stage_{self.index}_{body.__name__}"
        options = {} if called else {"experimental_attributes": {"_noinline": True}}
        jit_compile = True if self.jit_compile and not called else None
        function = tf.function(body, input_signature=list(specs), autograph=False, jit_compile=jit_compile, **options)
        # Tapes of the function's own, or none: one of the user's must not follow what is called inside.
        tapes = compat.stop_recording() if signature is None else compat.resume_recording()
        with tf.init_scope(), tapes, self._choices.of(signature):
            return function.get_concrete_function()

    def _place(self, function: Any) -> PlacedFunction:
        return PlacedFunction(function, self.device)

    def _refuse_strings(self, signature: Signature) -> None:
        """XLA has no strings, and would say so in a language of its own when the step runs."""
        if self.jit_compile and any(kind.dtype == tf.string for kind in components(signature.values)):
            raise NotForXLAError(
                f"Expected numbers in stages that XLA compiles. Received: strings, as an input of stage {self.index} "
                f"({', '.join(self.plan.operations)}). Set jit_compile=False on the strategy, or make numbers of them "
                "in the input pipeline."
            )

    def _refuse_assigned_weights(self, assigned: dict[int, keras.Variable], signature: Signature) -> None:
        for variable in self.trained(signature):
            if id(variable) in assigned:
                raise ModelError(
                    f"Expected layers that leave their trainable weights alone while they run. Received: "
                    f"'{variable.path}' in stage {self.index} is assigned by its layer's `call`, so that micro-batches "
                    "would see different weights. Make it non-trainable, or move the assignment into a callback."
                )


def _only_read(made: Body, given: Given) -> dict[int, keras.Variable]:
    """Variables that the stage's operations read and never assign, by identity."""
    states = {id(v) for v in given.states}
    return {key: v for key, v in made.read.items() if key not in states and key not in made.assigned}


def _is_complete(made: Body, given: Given) -> bool:
    """Whether a function was given every variable that the stage's operations assign, and every other they read."""
    states, fixed = ({id(v) for v in variables} for variables in (given.states, given.fixed))
    return set(made.assigned) <= states and set(_only_read(made, given)) <= fixed
