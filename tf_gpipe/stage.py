"""One stage at run time: its forward and its backward function.

Both are pure `tf.function`s, traced once for a kind of input and called once for each micro-batch:

    forward:  inputs, masks, state                                →  outputs, masks, new state, losses, moments
    backward: inputs, masks, state, d outputs, d losses, sums     →  d inputs, sums + d weights, sparse d weights

The backward function runs the forward pass again from the stage's stored inputs (rematerialisation) and takes its
gradient, adding each weight's gradient to the running sum it is given. The functions are not inlined
(`_noinline`): otherwise Grappler would merge the recomputation with the forward pass and keep all activations.
`tf.recompute_grad` is not used, see docs/decisions/0002-rematerialisation.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_gpipe import compat, residuals, state
from tf_gpipe.errors import ModelError
from tf_gpipe.gradients import GradientSums
from tf_gpipe.model_graph import Ref
from tf_gpipe.plan import StagePlan

Spec: TypeAlias = "tf.TensorSpec | None"
"""Kind of a value or mask at a boundary; None where there is none (an optional input, a tensor without mask)."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a stage's functions are traced for.

    Attributes:
        training: the training flag.
        values: kind of each input of the stage.
        masks: kind of each input's mask.
        trainable: which of the stage's weights are trained.
    """

    training: bool | None
    values: tuple[Spec, ...]
    masks: tuple[Spec, ...]
    trainable: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Forward:
    """A traced forward function.

    Attributes:
        function: flat tensors in, flat tensors out, in the order of the module's docstring.
        values, masks: kinds of the stage's outputs and their masks.
        states: variables whose state goes in and comes out.
        losses: dtype of each loss that a layer made.
        loss_owners: that layer.
        moments_of: the batch-norm layer of each group of moments.
        normalised: layers whose kernels are to be normalised before the first micro-batch.
    """

    function: Callable[..., list[tf.Tensor]]
    values: tuple[Spec, ...]
    masks: tuple[Spec, ...]
    states: tuple[keras.Variable, ...]
    losses: tuple[tf.DType, ...]
    loss_owners: tuple[keras.Layer, ...]
    moments_of: tuple[keras.layers.BatchNormalization, ...]
    normalised: tuple[keras.layers.SpectralNormalization, ...]


@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """What one call of a forward function gave."""

    values: list[tf.Tensor | None]
    masks: list[tf.Tensor | None]
    states: list[tf.Tensor]
    losses: list[tf.Tensor]
    moments: list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]
    residuals: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Backward:
    """A traced backward function.

    Attributes:
        function: flat tensors in, flat tensors out.
        inputs: positions of the stage's inputs whose gradients come out.
        dense, sparse: positions of the weights whose gradients are summed inside, and come out as `tf.IndexedSlices`.
    """

    function: Callable[..., list[tf.Tensor]]
    inputs: tuple[int, ...]
    dense: tuple[int, ...]
    sparse: tuple[int, ...]


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


@dataclasses.dataclass
class _Body:
    """What one run of the stage's operations gave, while a function is traced."""

    values: list[tf.Tensor | None]
    masks: list[tf.Tensor | None]
    states: list[tf.Tensor]
    losses: list[tf.Tensor]
    loss_owners: list[keras.Layer]
    moments: list[state.Moments]
    normalised: list[keras.layers.SpectralNormalization]
    assigned: dict[int, keras.Variable]

    @property
    def flat(self) -> list[tf.Tensor]:
        """What a forward function returns."""
        moments = [tensor for m in self.moments for tensor in (m.mean, m.variance, m.count)]
        return [*_present(self.values), *_present(self.masks), *self.states, *self.losses, *moments]


class Stage:
    """Runs one stage of a plan.

    Args:
        plan: the stage.
        jit_compile: whether XLA compiles its functions.
    """

    def __init__(self, plan: StagePlan, *, jit_compile: bool) -> None:
        self.plan = plan
        self.index = plan.index
        self.device = plan.device
        self.layers = list(dict.fromkeys(layer for step in plan.steps for layer in step.layers))
        self._jit_compile = jit_compile
        self._forwards: dict[Signature, Forward] = {}
        self._backwards: dict[Any, Backward] = {}
        self._kept: dict[Any, Kept] = {}
        self._known_states: dict[bool | None, dict[int, keras.Variable]] = {}

    @property
    def weights(self) -> list[keras.Variable]:
        """Variables that could be trained, in the order of first use."""
        return [v for v in self.plan.variables if tf.as_dtype(v.dtype).is_floating]

    def signature(self, training: bool | None, values: Sequence[Spec], masks: Sequence[Spec]) -> Signature:
        """The kind of call for which functions are traced, with what is frozen now."""
        return Signature(training, tuple(values), tuple(masks), tuple(v.trainable for v in self.weights))

    def trained(self, signature: Signature) -> list[keras.Variable]:
        """The weights that get gradients."""
        return [v for v, trainable in zip(self.weights, signature.trainable, strict=True) if trainable]

    # --- forward ---

    def forward(self, signature: Signature) -> Forward:
        """The forward function for a kind of input; traced the first time."""
        if signature not in self._forwards:
            self._forwards[signature] = self._trace_forward(signature)
        return self._forwards[signature]

    def _trace_forward(self, signature: Signature) -> Forward:
        known = self._known_states.setdefault(signature.training, self._seeds(signature.training))
        while True:
            states = tuple(known.values())
            function, body = self._trace_forward_with(signature, states)
            # A kernel that another call of this step may normalise again is taken as it is in this call.
            kernels = {id(layer.kernel): layer.kernel for layer in body.normalised}
            if set(body.assigned) | set(kernels) <= set(known):
                break
            known.update(body.assigned | kernels)  # state beside seeds: trace again with it as input
        state.refuse_impure(function.graph, self.plan.index, self.plan.operations)
        self._refuse_assigned_weights(body.assigned, signature)
        return Forward(
            function,
            tuple(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in body.values),
            tuple(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in body.masks),
            states,
            tuple(loss.dtype for loss in body.losses),
            tuple(body.loss_owners),
            tuple(m.layer for m in body.moments),
            tuple(body.normalised),
        )

    def _trace_forward_with(self, signature: Signature, states: Sequence[keras.Variable]) -> tuple[Any, _Body]:
        bodies: list[_Body] = []

        def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
            values, masks, given, _ = _unflatten(flat, signature, len(states))
            body = self._run(values, masks, signature.training, states, given)
            bodies.append(body)
            return body.flat

        return self._trace(forward, _input_specs(signature, states)), bodies[-1]

    def call_forward(self, forward: Forward, inputs: Sequence[tf.Tensor]) -> ForwardResult:
        """Calls a forward function on the flat tensors of `flatten_inputs`."""
        flat = list(forward.function(*inputs))
        values = [None if spec is None else flat.pop(0) for spec in forward.values]
        masks = [None if spec is None else flat.pop(0) for spec in forward.masks]
        states = [flat.pop(0) for _ in forward.states]
        losses = [flat.pop(0) for _ in forward.loss_owners]
        moments = [(flat.pop(0), flat.pop(0), flat.pop(0)) for _ in forward.moments_of]
        return ForwardResult(values, masks, states, losses, moments, residuals=flat)

    # --- backward ---

    def backward(
        self, signature: Signature, wanted: tuple[bool, ...], d_values: tuple[bool, ...], d_losses: tuple[bool, ...]
    ) -> Backward:
        """The backward function for a kind of input and of gradients; traced the first time.

        Args:
            signature: kind of the stage's inputs.
            wanted: for each input of the stage, whether its gradient is wanted.
            d_values: for each output, whether it has a gradient.
            d_losses: for each loss of the stage's layers, whether it has a gradient.
        """
        key = (signature, wanted, d_values, d_losses)
        if key not in self._backwards:
            self._backwards[key] = self._trace_backward(*key)
        return self._backwards[key]

    def _trace_backward(
        self, signature: Signature, wanted: tuple[bool, ...], d_values: tuple[bool, ...], d_losses: tuple[bool, ...]
    ) -> Backward:
        forward = self.forward(signature)
        sums = GradientSums(self.trained(signature))
        d_specs = _gradient_specs(forward, d_values, d_losses)

        def backward(*flat: tf.Tensor) -> list[tf.Tensor]:
            tape, body, sources, rest = self._run_recorded(flat, signature, forward.states, wanted)
            targets = [v for v, there in zip(body.values, d_values, strict=True) if there]
            targets += [loss for loss, there in zip(body.losses, d_losses, strict=True) if there]
            gradients = tape.gradient(targets, sources, output_gradients=list(rest[: len(d_specs)]))
            return sums.add(sums.sort(gradients, wanted), rest[len(d_specs) :])

        function = self._trace(backward, [*_input_specs(signature, forward.states), *d_specs, *sums.specs])
        return Backward(function, sums.inputs, sums.dense, sums.sparse)

    def kept(self, signature: Signature, wanted: tuple[bool, ...]) -> Kept:
        """The functions of a micro-batch whose activations are kept; traced the first time."""
        if (signature, wanted) not in self._kept:
            self._kept[signature, wanted] = self._trace_kept(signature, wanted)
        return self._kept[signature, wanted]

    def _trace_kept(self, signature: Signature, wanted: tuple[bool, ...]) -> Kept:
        plain = self.forward(signature)
        sums = GradientSums(self.trained(signature))
        is_float = tuple(spec is not None and spec.dtype.is_floating for spec in plain.values)
        d_specs = _gradient_specs(plain, is_float, (True,) * len(plain.loss_owners))
        traced: list[residuals.Residuals] = []

        def forward_kept(*flat: tf.Tensor) -> list[tf.Tensor]:
            tape, body, sources, _ = self._run_recorded(flat, signature, plain.states, wanted)
            targets = [v for v, there in zip(body.values, is_float, strict=True) if there]
            targets += body.losses

            def gradient(*d_outputs: tf.Tensor) -> list[tf.Tensor]:
                made = tape.gradient(targets, sources, output_gradients=list(d_outputs))
                return sums.sort(made, wanted)

            traced.append(residuals.trace(gradient, d_specs))
            return [*body.flat, *traced[-1].kept]

        def backward_kept(*flat: tf.Tensor) -> list[tf.Tensor]:
            count = len(traced[-1].kept)
            d_outputs, rest = flat[count : count + len(d_specs)], flat[count + len(d_specs) :]
            return sums.add(traced[-1].run(flat[:count], d_outputs), rest)

        forward = self._trace(forward_kept, _input_specs(signature, plain.states))
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in traced[-1].kept]
        if self._jit_compile and any(spec.dtype == tf.variant for spec in specs):
            # XLA cannot return the lists of tensors that loops keep, so that this stage is recomputed all the same.
            return Kept(plain, self.backward(signature, wanted, is_float, (True,) * len(plain.losses)), traced[-1])
        backward = self._trace(backward_kept, [*specs, *d_specs, *sums.specs])
        return Kept(
            dataclasses.replace(plain, function=forward),
            Backward(backward, sums.inputs, sums.dense, sums.sparse),
            traced[-1],
        )

    # --- the body ---

    def _run_recorded(
        self, flat: Sequence[tf.Tensor], signature: Signature, states: Sequence[keras.Variable], wanted: Sequence[bool]
    ) -> tuple[tf.GradientTape, _Body, list[Any], Sequence[tf.Tensor]]:
        """Runs the stage's operations on a tape.

        Returns the tape, what the stage gave, the sources of gradients (the wanted inputs, then the trained weights, as
        variables or as their values among the states), and what is left of `flat`.
        """
        values, masks, given, rest = _unflatten(flat, signature, len(states))
        known = {id(v): value for v, value in zip(states, given, strict=True)}
        sources = [v for v, there in zip(values, wanted, strict=True) if there]
        sources += [known.get(id(v), compat.raw_variable(v)) for v in self.trained(signature)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            body = self._run(values, masks, signature.training, states, given)
        return tape, body, sources, rest

    def _run(
        self,
        values: list[tf.Tensor | None],
        masks: list[tf.Tensor | None],
        training: bool | None,
        states: Sequence[keras.Variable],
        given: Sequence[tf.Tensor],
    ) -> _Body:
        """Runs the stage's operations without side effects."""
        plan = self.plan
        made: dict[Ref, Any] = dict(zip(plan.inputs, values, strict=True))
        for value, mask in zip(values, masks, strict=True):
            if value is not None and mask is not None:
                compat.set_keras_mask(value, mask)
        scope = compat.RecordingScope(list(zip(states, given, strict=True)))
        with contextlib.ExitStack() as during_run:
            during_run.enter_context(compat.route_models(None))
            during_run.enter_context(compat.call_context(plan.graph.model, training))
            during_run.enter_context(scope)
            moments = during_run.enter_context(state.collected_moments(self.layers if training else []))
            normalised = during_run.enter_context(state.kernels_left_alone(self.layers))
            for step in plan.steps:
                try:
                    step.run(made, training)
                except Exception as error:
                    add_note(error, f"in operation '{step.name}' of stage {self.index} of '{plan.graph.model.name}'")
                    raise
            outputs = [made[ref] for ref in plan.outputs]
            loss_owners = self._take_loss_owners(scope.losses)
            new_states = [tf.cast(scope.get_current_value(v), v.dtype) for v in states]
        pooled = {id(v) for m in moments for v in (m.layer.moving_mean, m.layer.moving_variance)}
        return _Body(
            outputs,
            [None if value is None else compat.get_keras_mask(value) for value in outputs],
            new_states,
            list(scope.losses),
            loss_owners,
            moments,
            normalised,
            {key: v for key, v in scope.assigned.items() if key not in pooled},
        )

    def _take_loss_owners(self, losses: Sequence[tf.Tensor]) -> list[keras.Layer]:
        owners = []
        for loss in losses:
            owner = next(o for step in self.plan.steps for o in step.loss_owners if id(loss) in compat.losses_of(o))
            compat.losses_of(owner).discard(id(loss))
            owners.append(owner)
        return owners

    def _seeds(self, training: bool | None) -> dict[int, keras.Variable]:
        """The variables that a training pass is sure to assign: states of seed generators."""
        seeds = [v for layer in self.layers for v in compat.own_seed_states(layer)] if training else []
        return {id(v): v for v in seeds}

    def _refuse_assigned_weights(self, assigned: dict[int, keras.Variable], signature: Signature) -> None:
        for variable in self.trained(signature):
            if id(variable) in assigned:
                raise ModelError(
                    f"Expected layers that leave their trainable weights alone while they run. Received: "
                    f"'{variable.path}' in stage {self.index} is assigned by its layer's `call`, so that micro-batches "
                    "would see different weights. Make it non-trainable, or move the assignment into a callback."
                )

    def _trace(self, body: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Callable[..., list[tf.Tensor]]:
        """Traces a function of flat tensors outside whatever graph is being built."""
        body.__name__ = f"stage_{self.index}_{body.__name__}"
        function = tf.function(
            body,
            input_signature=list(specs),
            autograph=False,
            jit_compile=self._jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        with tf.init_scope(), compat.resume_recording():
            return compat.PlacedFunction(function.get_concrete_function(), self.device)


def _gradient_specs(forward: Forward, d_values: Sequence[bool], d_losses: Sequence[bool]) -> list[tf.TensorSpec]:
    specs = [spec for spec, there in zip(forward.values, d_values, strict=True) if there]
    return [*specs, *(tf.TensorSpec([], d) for d, there in zip(forward.losses, d_losses, strict=True) if there)]


def flatten_inputs(
    values: Sequence[tf.Tensor | None], masks: Sequence[tf.Tensor | None], states: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The flat tensors that a stage's functions begin with."""
    return [*_present(values), *_present(masks), *states]


def _present(tensors: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _input_specs(signature: Signature, states: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    specs = [spec for spec in (*signature.values, *signature.masks) if spec is not None]
    return [*specs, *(tf.TensorSpec(v.shape, v.dtype) for v in states)]


def _unflatten(flat: Sequence[tf.Tensor], signature: Signature, num_states: int) -> tuple[Any, Any, Any, Any]:
    """Values, masks and states at the head of a stage function's arguments, and what follows them."""
    rest = list(flat)
    values = [None if spec is None else rest.pop(0) for spec in signature.values]
    masks = [None if spec is None else rest.pop(0) for spec in signature.masks]
    return values, masks, rest[:num_states], rest[num_states:]


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an exception's text; in Python 3.10, which has no notes, to its message."""
    if note in getattr(error, "__notes__", ()):
        return
    compat.keep_exception(error)
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
