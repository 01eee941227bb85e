"""One stage at run time: its forward and its backward function.

Both are pure `tf.function`s, traced once for a kind of input and called once for each micro-batch:

    forward:  inputs, masks, variables                            →  outputs, masks, new state, losses, moments
    backward: inputs, masks, variables, d outputs, d losses, sums →  d inputs, sums + d weights, sparse …, operands

The backward function runs the forward pass again from the stage's stored inputs (rematerialisation) and takes its
gradient, adding each weight's gradient to the running sum it is given, or giving the operands of one that is deferred
(`gradients.py`). The functions are not inlined
(`_noinline`): otherwise Grappler would merge the recomputation with the forward pass and keep all activations.
`tf.recompute_grad` is not used, see docs/decisions/0002-rematerialisation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat, residuals, state
from tf_gpipe.body import Body, StageBody
from tf_gpipe.contraction import Contraction
from tf_gpipe.errors import ModelError
from tf_gpipe.gradients import GradientLayout
from tf_gpipe.model_graph import Ref
from tf_gpipe.plan import StagePlan
from tf_gpipe.values import Kind, Value, components, has_gradient, kind_of, take_value


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a stage's functions are traced for.

    Attributes:
        training: the training flag.
        inputs: refs of the stage's inputs, and of logits of such of them as have some.
        values: kind of each of them; None for an optional one that is not there.
        masks: kind of each input's mask; None where it has none.
        trainable: which of the stage's weights are trained.
    """

    training: bool | None
    inputs: tuple[Ref, ...]
    values: tuple[Kind | None, ...]
    masks: tuple[Kind | None, ...]
    trainable: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Given:
    """Variables whose values a stage's functions take beside tensors.

    Attributes:
        states: those that it may assign; new values come out.
        fixed: those that it only reads.
    """

    states: tuple[keras.Variable, ...]
    fixed: tuple[keras.Variable, ...]

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """All of them, in the order of a function's arguments."""
        return (*self.states, *self.fixed)


@dataclasses.dataclass(frozen=True)
class Forward:
    """A traced forward function.

    Attributes:
        function: flat tensors in, flat tensors out, in the order of the module's docstring.
        given: variables that it takes.
        outputs: refs of what comes out: the stage's outputs, and logits of such of them as have some.
        values, masks: kinds of these and of their masks.
        losses: kind of each loss that a layer made.
        loss_owners: that layer.
        moments_of: the batch-norm layer of each group of moments.
        normalised: layers whose kernels are to be normalised before the first micro-batch.
    """

    function: Callable[..., list[tf.Tensor]]
    given: Given
    outputs: tuple[Ref, ...]
    values: tuple[Kind | None, ...]
    masks: tuple[Kind | None, ...]
    losses: tuple[Kind | None, ...]
    loss_owners: tuple[keras.Layer, ...]
    moments_of: tuple[keras.layers.BatchNormalization, ...]
    normalised: tuple[keras.layers.SpectralNormalization, ...]


@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """What one call of a forward function gave."""

    values: list[Value | None]
    masks: list[tf.Tensor | None]
    states: list[tf.Tensor]
    losses: list[tf.Tensor]
    moments: list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]
    residuals: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class BackwardKind:
    """What a backward function is traced for.

    Attributes:
        signature: kind of the stage's inputs.
        wanted: for each input of the stage, whether its gradient is wanted.
        d_values: for each output, whether it has a gradient.
        d_losses: for each loss of the stage's layers, whether it has a gradient.
    """

    signature: Signature
    wanted: tuple[bool, ...]
    d_values: tuple[bool, ...]
    d_losses: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Backward:
    """A traced backward function.

    Attributes:
        function: flat tensors in, flat tensors out.
        gives: which gradients these are.
    """

    function: Callable[..., list[tf.Tensor]]
    gives: GradientLayout


@dataclasses.dataclass(frozen=True)
class Kept:
    """A forward function that also returns what its backward pass needs, and that backward pass.

    Attributes:
        forward: as for any forward pass; its function returns the residuals at the end.
        backward: takes the residuals, where there are any, in place of inputs, masks and state.
        traced: what `backward` was made of, which must live as long.
    """

    forward: Forward
    backward: Backward
    traced: residuals.Residuals


class Stage:
    """Runs one stage of a plan.

    Args:
        plan: the stage.
        jit_compile: whether XLA compiles its functions.
        deferral: for how many micro-batches deferring a gradient costs memory, see `GradientLayout`.
    """

    def __init__(self, plan: StagePlan, *, jit_compile: bool, deferral: int) -> None:
        self.plan = plan
        self.index = plan.index
        self.device = plan.device
        self._body = StageBody(plan)
        self._choices = state.Choices()
        self._read_from_elsewhere: dict[int, keras.Variable] = {}
        self._jit_compile = jit_compile
        self._deferral = deferral
        self._deferred: dict[Any, Callable[..., list[tf.Tensor]]] = {}
        self._forwards: dict[Signature, Forward] = {}
        self._backwards: dict[BackwardKind, Backward] = {}
        self._seconds: dict[Any, Backward] = {}
        self._kept: dict[Any, Kept] = {}
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

    def traced(
        self, training: bool | None, kinds: Mapping[Ref, tuple[Kind | None, Kind | None]]
    ) -> tuple[Signature, Forward]:
        """The kind of call, and its forward function; traced the first time.

        Args:
            training: the training flag.
            kinds: kinds of the value and of the mask of everything that there is.
        """
        while True:
            signature = self._signature(training, kinds)
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
        body, training = self._body, signature.training
        states, fixed = self._known.setdefault(training, (body.likely_states(training), body.likely_fixed(training)))
        while True:
            given = Given(tuple(states.values()), tuple(fixed.values()))
            function, made = self._trace_forward_with(signature, given)
            read = {key: v for key, v in made.read.items() if key not in states and key not in made.assigned}
            if set(made.assigned) <= set(states) and set(read) <= set(fixed):
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
        return Forward(
            function,
            given,
            made.outputs,
            tuple(map(kind_of, made.values)),
            tuple(map(kind_of, made.masks)),
            tuple(map(kind_of, made.losses)),
            tuple(made.loss_owners),
            tuple(m.layer for m in made.moments),
            tuple(made.normalised),
        )

    def _trace_forward_with(self, signature: Signature, given: Given) -> tuple[Any, Body]:
        bodies: list[Body] = []

        def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
            values, masks, variables, _ = _unflatten(flat, signature, given)
            bodies.append(self._run(signature, values, masks, given, variables))
            return bodies[-1].flat

        return self._trace(signature, forward, input_specs(signature, given)), bodies[-1]

    def _run(self, signature: Signature, values: Any, masks: Any, given: Given, variables: Any) -> Body:
        count, training = len(given.states), signature.training
        return self._body.run(signature.inputs, values, masks, training, given.variables, variables, count)

    def call_forward(self, forward: Forward, inputs: Sequence[tf.Tensor]) -> ForwardResult:
        """Calls a forward function on the flat tensors of `flatten_inputs`."""
        flat = list(forward.function(*inputs))
        values = [take_value(kind, flat) for kind in forward.values]
        masks = [take_value(kind, flat) for kind in forward.masks]
        states = [flat.pop(0) for _ in forward.given.states]
        losses = [flat.pop(0) for _ in forward.loss_owners]
        moments = [(flat.pop(0), flat.pop(0), flat.pop(0)) for _ in forward.moments_of]
        return ForwardResult(values, masks, states, losses, moments, residuals=flat)

    # --- backward ---

    def backward(self, kind: BackwardKind) -> Backward:
        """The backward function for a kind of input and of gradients; traced the first time."""
        if kind not in self._backwards:
            self._backwards[kind] = self._trace_backward(kind)
        return self._backwards[kind]

    def _trace_backward(self, kind: BackwardKind) -> Backward:
        signature, forward = kind.signature, self.forward(kind.signature)
        gives = GradientLayout(self.trained(signature), self._deferral)
        d_specs = _gradient_specs(forward, kind)

        def backward(*flat: tf.Tensor) -> list[tf.Tensor]:
            tape, body, sources, rest = self._run_recorded(flat, forward.given, kind)
            gradients = tape.gradient(_targets(body, kind), sources, output_gradients=list(rest[: len(d_specs)]))
            return gives.add(gives.sort(gradients, kind.wanted), rest[len(d_specs) :])

        function = self._trace(signature, backward, [*input_specs(signature, forward.given), *d_specs, *gives.specs])
        return Backward(function, gives)

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
        d_specs = _gradient_specs(forward, kind)
        kinds = [signature.values[i] for i in first.gives.inputs]
        kinds += [tf.TensorSpec(weights[i].shape, weights[i].dtype) for i in first.gives.dense]
        dd_specs = [spec for spec, there in zip(kinds, dd_made, strict=True) if there]

        sources_of = [i for i, there in enumerate(kind.wanted) if there]
        made_at = [sources_of.index(i) for i in first.gives.inputs] + [len(sources_of) + i for i in first.gives.dense]

        def second(*flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as outer:
                outer.watch([tensor for tensor in flat if tensor.dtype.is_floating])
                tape, body, sources, rest = self._run_recorded(flat, forward.given, kind)
                given, rest = list(rest[: len(d_specs)]), rest[len(d_specs) :]
                made = tape.gradient(_targets(body, kind), sources, output_gradients=given)
                made = [made[at] for at, there in zip(made_at, dd_made, strict=True) if there]
            dd, before = list(rest[: len(dd_specs)]), rest[len(dd_specs) :]
            found = outer.gradient(made, [*given, *sources], output_gradients=dd)
            d_given = [tf.zeros_like(g) if d is None else d for g, d in zip(given, found, strict=False)]
            return [*d_given, *gives.add(gives.sort(found[len(given) :], kind.wanted), before)]

        function = self._trace(
            signature, second, [*input_specs(signature, forward.given), *d_specs, *dd_specs, *gives.specs]
        )
        return Backward(function, gives)

    def kept(self, signature: Signature, wanted: tuple[bool, ...]) -> Kept:
        """The functions of a micro-batch whose activations are kept; traced the first time."""
        if (signature, wanted) not in self._kept:
            self._kept[signature, wanted] = self._trace_kept(signature, wanted)
        return self._kept[signature, wanted]

    def _trace_kept(self, signature: Signature, wanted: tuple[bool, ...]) -> Kept:
        plain = self.forward(signature)
        gives = GradientLayout(self.trained(signature), self._deferral)
        kind = BackwardKind(signature, wanted, tuple(map(has_gradient, plain.values)), (True,) * len(plain.losses))
        d_specs = _gradient_specs(plain, kind)
        traced: list[residuals.Residuals] = []

        def forward_kept(*flat: tf.Tensor) -> list[tf.Tensor]:
            tape, body, sources, _ = self._run_recorded(flat, plain.given, kind)
            targets = _targets(body, kind)

            def gradient(*d_outputs: tf.Tensor) -> list[tf.Tensor]:
                made = tape.gradient(targets, sources, output_gradients=list(d_outputs))
                return gives.sort(made, wanted)

            traced.append(residuals.trace(gradient, d_specs))
            return [*body.flat, *traced[-1].kept]

        def backward_kept(*flat: tf.Tensor) -> list[tf.Tensor]:
            count = len(traced[-1].kept)
            d_outputs, rest = flat[count : count + len(d_specs)], flat[count + len(d_specs) :]
            return gives.add(traced[-1].run(flat[:count], d_outputs), rest)

        forward = self._trace(signature, forward_kept, input_specs(signature, plain.given))
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in traced[-1].kept]
        if self._jit_compile and any(spec.dtype == tf.variant for spec in specs):
            # XLA cannot return the lists of tensors that loops keep, so that this stage is recomputed all the same.
            return Kept(plain, self.backward(kind), traced[-1])
        backward = self._trace(signature, backward_kept, [*specs, *d_specs, *gives.specs])
        return Kept(
            dataclasses.replace(plain, function=forward),
            Backward(backward, gives),
            traced[-1],
        )

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

            self._deferred[key] = self._trace(None, weight_gradients, specs)
        return self._deferred[key](*flat)

    # --- the body ---

    def _run_recorded(
        self, flat: Sequence[tf.Tensor], given: Given, kind: BackwardKind
    ) -> tuple[tf.GradientTape, Body, list[Any], Sequence[tf.Tensor]]:
        """Runs the stage's operations on a tape.

        Returns the tape, what the stage gave, the sources of gradients (the wanted inputs, then the trained weights, as
        variables or as the values that were given), and what is left of `flat`.
        """
        signature = kind.signature
        values, masks, variables, rest = _unflatten(flat, signature, given)
        known = {id(v): value for v, value in zip(given.variables, variables, strict=True)}
        sources = [v for v, there in zip(values, kind.wanted, strict=True) if there]
        sources += [known.get(id(v), compat.raw_variable(v)) for v in self.trained(signature)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            body = self._run(signature, values, masks, given, variables)
        return tape, body, sources, rest

    def _refuse_assigned_weights(self, assigned: dict[int, keras.Variable], signature: Signature) -> None:
        for variable in self.trained(signature):
            if id(variable) in assigned:
                raise ModelError(
                    f"Expected layers that leave their trainable weights alone while they run. Received: "
                    f"'{variable.path}' in stage {self.index} is assigned by its layer's `call`, so that micro-batches "
                    "would see different weights. Make it non-trainable, or move the assignment into a callback."
                )

    def _trace(
        self, signature: Signature | None, body: Callable[..., Any], specs: Sequence[tf.TensorSpec]
    ) -> Callable[..., list[tf.Tensor]]:
        """Traces a function of flat tensors outside whatever graph is being built."""
        body.__name__ = f"stage_{self.index}_{body.__name__}"
        function = tf.function(
            body,
            input_signature=list(specs),
            autograph=False,
            jit_compile=self._jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        with tf.init_scope(), compat.resume_recording(), self._choices.of(signature):
            return compat.PlacedFunction(function.get_concrete_function(), self.device)


def _targets(body: Body, kind: BackwardKind) -> list[tf.Tensor]:
    """What gradients are taken of: the values and losses that have a gradient."""
    pairs = [*zip(body.values, kind.d_values, strict=True), *zip(body.losses, kind.d_losses, strict=True)]
    return [tensor for tensor, there in pairs if there]


def _gradient_specs(forward: Forward, kind: BackwardKind) -> list[tf.TensorSpec]:
    pairs = [*zip(forward.values, kind.d_values, strict=True), *zip(forward.losses, kind.d_losses, strict=True)]
    return [spec for spec, there in pairs if there]


def flatten_inputs(
    values: Sequence[Value | None], masks: Sequence[tf.Tensor | None], variables: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The flat tensors that a stage's functions begin with."""
    return [*components(values), *components(masks), *variables]


def input_specs(signature: Signature, given: Given) -> list[tf.TensorSpec]:
    """Kinds of these."""
    return [
        *components((*signature.values, *signature.masks)),
        *(tf.TensorSpec(v.shape, v.dtype) for v in given.variables),
    ]


def _unflatten(flat: Sequence[tf.Tensor], signature: Signature, given: Given) -> tuple[Any, Any, Any, Any]:
    """Values, masks and variables at the head of a stage function's arguments, and what follows them."""
    rest = list(flat)
    values = [take_value(kind, rest) for kind in signature.values]
    masks = [take_value(kind, rest) for kind in signature.masks]
    count = len(given.variables)
    return values, masks, rest[:count], rest[count:]
