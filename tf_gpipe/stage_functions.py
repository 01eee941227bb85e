"""What the functions of a stage take and give.

All of them take and give flat tensors:

    forward:       inputs, masks, variables                            →  outputs, masks, new state, losses, moments
    kept forward:  the same                                            →  the same, residuals
    backward:      inputs, masks, variables, d outputs, d losses, sums →  d inputs, sums + d weights, sparse …, operands
    kept backward: residuals, d outputs, d losses, sums                →  the same

Where activations are kept, a stage's operations are traced once, on a tape, as a function that gives residuals
(`residuals.py`). The forward function is this one without its last outputs: TensorFlow inlines it, and drops what is
not used. The backward function of micro-batches that keep nothing is made of it, too: the part of its graph that gives
the residuals, followed by the kept backward function's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.body import Body
from tf_gpipe.gradients import GradientLayout
from tf_gpipe.model_graph import Ref
from tf_gpipe.residuals import Residuals, part_of_work
from tf_gpipe.values import Kind, Value, components, kind_of, take_value


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
        function: flat tensors in, flat tensors out.
        graph: in which it was traced; what it gives comes first among the results.
        given: variables that it takes.
        outputs: refs of what comes out: the stage's outputs, and logits of such of them as have some.
        values, masks: kinds of these and of their masks.
        losses: kind of each loss that a layer made.
        loss_owners: that layer.
        moments_of: the batch-norm layers whose statistics come out, one for each call.
        normalised: layers whose kernels are to be normalised before the first micro-batch.
        branches: whether there is a loop or a branch in it, which keeps lists of tensors, or options, for its gradient.
    """

    function: Callable[..., list[tf.Tensor]]
    graph: Any
    given: Given
    outputs: tuple[Ref, ...]
    values: tuple[Kind | None, ...]
    masks: tuple[Kind | None, ...]
    losses: tuple[Kind | None, ...]
    loss_owners: tuple[keras.Layer, ...]
    moments_of: tuple[keras.layers.BatchNormalization, ...]
    normalised: tuple[keras.layers.SpectralNormalization, ...]
    branches: bool

    @classmethod
    def of(cls, function: Any, given: Given, made: Body) -> Forward:
        """For a function that runs a stage's operations, and what they gave when it was traced."""
        return cls(
            function,
            function.graph,
            given,
            made.outputs,
            tuple(map(kind_of, made.values)),
            tuple(map(kind_of, made.masks)),
            tuple(map(kind_of, made.losses)),
            tuple(made.loss_owners),
            tuple(m.layer for m in made.moments),
            tuple(made.normalised),
            compat.has_control_flow(function.graph),
        )

    def take(self, flat: Sequence[tf.Tensor]) -> ForwardResult:
        """Sorts what a call of the function gave."""
        rest = list(flat)
        values = [take_value(kind, rest) for kind in self.values]
        masks = [take_value(kind, rest) for kind in self.masks]
        states = [rest.pop(0) for _ in self.given.states]
        losses = [rest.pop(0) for _ in self.loss_owners]
        moments = [rest.pop(0) for _ in range(3)] if self.moments_of else []
        return ForwardResult(values, masks, states, losses, moments, residuals=rest)


@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """What one call of a forward function gave."""

    values: list[Value | None]
    masks: list[tf.Tensor | None]
    states: list[tf.Tensor]
    losses: list[tf.Tensor]
    moments: list[tf.Tensor]
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

    def targets(self, body: Body) -> list[tf.Tensor]:
        """What gradients are taken of: the values and losses that have a gradient."""
        pairs = [*zip(body.values, self.d_values, strict=True), *zip(body.losses, self.d_losses, strict=True)]
        return [tensor for tensor, there in pairs if there]

    def specs(self, values: Sequence[Kind | None], losses: Sequence[Kind | None]) -> list[tf.TensorSpec]:
        """Kinds of the gradients that are given, from those of all values and losses."""
        pairs = [*zip(values, self.d_values, strict=True), *zip(losses, self.d_losses, strict=True)]
        return [spec for spec, there in pairs if there]


@dataclasses.dataclass(frozen=True)
class Backward:
    """A traced backward function.

    Attributes:
        function: flat tensors in, flat tensors out.
        gives: which gradients these are.
        recomputed: tells which part of the stage's forward work it does again, from 0 to 1.
    """

    function: Callable[..., list[tf.Tensor]]
    gives: GradientLayout
    recomputed: Callable[[], float] = lambda: 0.0


class Recorded:
    """A stage's forward pass on a tape, and its backward pass; functions on the device are made when first asked for.

    Args:
        forward: traced: gives residuals at the end.
        made: what it takes and gives.
        num_outputs: how many tensors come before the residuals.
        kind: which gradients the backward pass takes.
        gives: and which it makes.
        residuals: the backward pass.
        place: makes a function that runs on the device, from Python code that calls traced ones and the kinds of its
            arguments.
    """

    def __init__(
        self,
        forward: Any,
        made: Forward,
        num_outputs: int,
        kind: BackwardKind,
        gives: GradientLayout,
        residuals: Residuals,
        place: Callable[[Callable[..., Any], Sequence[tf.TensorSpec]], Callable[..., list[tf.Tensor]]],
    ) -> None:
        self.kind = kind
        self._gives = gives
        self._made = made
        self._num_outputs = num_outputs
        self._traced = forward
        self._residuals = residuals
        self._place = place
        self._specs = input_specs(kind.signature, made.given)
        self._d_specs = kind.specs(made.values, made.losses)

    @property
    def branches(self) -> bool:
        """Whether there is a loop or a branch in it."""
        return self._made.branches

    @functools.cached_property
    def forward(self) -> Forward:
        """The forward pass without residuals; its function is made when it is called."""
        return dataclasses.replace(self._made, function=lambda *flat: self._forward_function(*flat))

    @functools.cached_property
    def _forward_function(self) -> Callable[..., list[tf.Tensor]]:
        def forward(*flat: tf.Tensor) -> list[tf.Tensor]:
            return list(self._traced(*flat))[: self._num_outputs]

        return self._place(forward, self._specs)

    @functools.cached_property
    def kept_forward(self) -> Forward:
        """The forward pass that gives residuals."""

        def forward_kept(*flat: tf.Tensor) -> list[tf.Tensor]:
            return list(self._traced(*flat))

        return dataclasses.replace(self._made, function=self._place(forward_kept, self._specs))

    @functools.cached_property
    def kept_backward(self) -> Backward:
        """The backward pass that takes them."""
        residual_specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self._residuals.kept]
        return self._make_backward(residual_specs, lambda kept: kept)

    @functools.cached_property
    def backward(self) -> Backward:
        """The backward pass that runs the forward pass again; no layer's code runs once more to make it."""
        again = self._make_backward(self._specs, lambda given: self._residuals.make_kept(self._traced, given))
        return dataclasses.replace(again, recomputed=self._recomputed)

    def _recomputed(self) -> float:
        every = self._traced.graph.get_operations()
        return part_of_work(self._residuals.kept, self._traced.outputs[: self._num_outputs], every)

    def _make_backward(
        self, specs: Sequence[tf.TensorSpec], kept_of: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
    ) -> Backward:
        """A backward pass that begins with arguments of these kinds, of which `kept_of` makes the residuals."""
        begin, end = len(specs), len(specs) + len(self._d_specs)
        gives = copy.copy(self._gives)  # what is deferred is found as each function is traced

        def backward(*flat: tf.Tensor) -> list[tf.Tensor]:
            return gives.add(self._residuals.run(kept_of(flat[:begin]), flat[begin:end]), flat[end:])

        return Backward(self._place(backward, [*specs, *self._d_specs, *gives.specs]), gives)


def flatten_inputs(
    values: Sequence[Value | None], masks: Sequence[tf.Tensor | None], variables: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The flat tensors that a stage's functions begin with."""
    return [*components(values), *components(masks), *variables]


def input_specs(signature: Signature, given: Given) -> list[tf.TensorSpec]:
    """Kinds of these."""
    return [
        *components((*signature.values, *signature.masks)),
        # Under mixed precision, Keras tells the dtype that a variable is read in where a model is being called.
        *(tf.TensorSpec(v.shape, compat.raw_variable(v).dtype) for v in given.variables),
    ]


def unflatten(flat: Sequence[tf.Tensor], signature: Signature, given: Given) -> tuple[Any, Any, Any, Any]:
    """Values, masks and variables at the head of a stage function's arguments, and what follows them."""
    rest = list(flat)
    values = [take_value(kind, rest) for kind in signature.values]
    masks = [take_value(kind, rest) for kind in signature.masks]
    count = len(given.variables)
    return values, masks, rest[:count], rest[count:]
