"""Runs a stage's operations without side effects, while one of the stage's functions is traced.

Every variable that an operation reads and that is not trained is given as a tensor: state that the stage assigns
(`states`), whose new values come out, and what it only reads (`fixed`), such as moving averages in a call without
training. So the recomputation sees what the forward pass has seen, whatever was assigned in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat, moments, pointwise, state
from tf_gpipe.devices import is_cpu
from tf_gpipe.errors import ModelError
from tf_gpipe.model_graph import Ref
from tf_gpipe.plan import StagePlan
from tf_gpipe.values import Value, components


@dataclasses.dataclass
class Body:
    """What one run of the operations gave.

    Attributes:
        outputs: refs of what comes out: the stage's outputs, and logits of such of them as have some.
        values, masks: tensors for them.
        states: new values of the state that was given.
        losses: what layers passed to `add_loss`.
        loss_owners: the layer of each.
        moments: statistics of batch-norm layers.
        normalised: layers whose kernels are to be normalised before the first micro-batch.
        assigned, read: variables that were assigned, and that were read and are not trained, by identity.
    """

    outputs: tuple[Ref, ...]
    values: list[Value | None]
    masks: list[tf.Tensor | None]
    states: list[tf.Tensor]
    losses: list[tf.Tensor]
    loss_owners: list[keras.Layer]
    moments: list[moments.Moments]
    normalised: list[keras.layers.SpectralNormalization]
    assigned: dict[int, keras.Variable]
    read: dict[int, keras.Variable]

    @property
    def flat(self) -> list[tf.Tensor]:
        """What a forward function returns."""
        flat = [*components(self.values), *components(self.masks), *self.states, *self.losses]
        return [*flat, *moments.pack(self.moments)]


class StageBody:
    """The operations of one stage.

    Args:
        plan: the stage.

    Attributes:
        layers: every layer in it.
        weights: identities of the variables that were made to be trained, frozen ones among them.
    """

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self._pointwise_as_products = is_cpu(plan.device)
        self.layers = list(dict.fromkeys(layer for step in plan.steps for layer in step.layers))
        layer_weights = {id(v) for layer in self.layers for v in compat.made_trainable(layer)}
        own = {id(v) for layer in self.layers for v in layer.variables}
        passed = {id(v) for v in plan.variables if id(v) not in own and v.trainable}
        self.weights = layer_weights | passed

    @property
    def captured(self) -> set[int]:
        """Identities of the weights that functions read where they are: on the stage's own device.

        A weight of another stage (tied weights) is given, which sends it once instead of once for each micro-batch.
        """
        here = {id(v) for v in self.plan.variables if compat.raw_variable(v).device == self.plan.device}
        return self.weights & here

    def likely_states(self, training: bool | None) -> dict[int, keras.Variable]:
        """Variables that a training pass is sure to assign: states of seed generators."""
        seeds = [v for layer in self.layers for v in compat.own_seed_states(layer)] if training else []
        return {id(v): v for v in seeds}

    def likely_fixed(self, training: bool | None) -> dict[int, keras.Variable]:
        """Variables that are probably read; another one costs a second tracing."""
        pooling = [layer for layer in self.layers if moments.pools_statistics(layer) and training and layer.trainable]
        pooled = {id(v) for layer in pooling for v in (layer.moving_mean, layer.moving_variance)}
        seeds = {id(v) for layer in self.layers for v in compat.own_seed_states(layer)}
        others = [v for v in self.plan.variables if id(v) not in self.captured | pooled | seeds]
        return {id(v): v for v in others}

    def run(
        self,
        inputs: Sequence[Ref],
        values: Sequence[Value | None],
        masks: Sequence[tf.Tensor | None],
        training: bool | None,
        variables: Sequence[keras.Variable],
        given: Sequence[tf.Tensor],
        num_states: int,
    ) -> Body:
        """Runs the operations.

        Args:
            inputs: refs of the stage's inputs, and of logits of such of them as have some.
            values: tensors for them.
            masks: their masks.
            training: the training flag.
            variables: those that are given: first `num_states` that may be assigned, then those that are only read.
            given: their values.
            num_states: see there.
        """
        plan = self.plan
        if training:
            state.refuse_functions_with_state(self.layers, plan.index)
        made: dict[Ref, Any] = dict(zip(inputs, values, strict=True))
        for ref in inputs:
            if ref.is_logits:
                compat.set_logits(made[Ref(ref.index)], made[ref])
        for value, mask in zip(values, masks, strict=True):
            if value is not None and mask is not None:
                compat.set_keras_mask(value, mask)
        scope = compat.RecordingScope(list(zip(variables, given, strict=True)))
        with contextlib.ExitStack() as during_run:
            during_run.enter_context(compat.route_models(None))
            during_run.enter_context(compat.call_context(plan.graph.model, training))
            during_run.enter_context(scope)
            collected = during_run.enter_context(moments.collected(self.layers if training else []))
            normalised = during_run.enter_context(state.kernels_left_alone(self.layers))
            during_run.enter_context(pointwise.as_products(self.layers if self._pointwise_as_products else []))
            for step in plan.steps:
                try:
                    step.run(made, training)
                except Exception as error:
                    for owner in step.loss_owners:
                        compat.losses_of(owner).difference_update(map(id, scope.losses))
                    where = f"in operation '{step.name}' of stage {plan.index} of '{plan.graph.model.name}'"
                    compat.add_note(error, where)
                    raise
            loss_owners = self._take_loss_owners(scope)
            read = dict(scope.read)
            states = [_new_value(scope, v, plan) for v in variables[:num_states]]
        pooled = {id(v) for m in collected for v in (m.layer.moving_mean, m.layer.moving_variance)}
        # A kernel that another call of this step may normalise again is taken as it is in this call.
        kernels = {id(layer.kernel): layer.kernel for layer in normalised}
        outputs, results = self._outputs(made)
        return Body(
            outputs,
            results,
            [None if value is None else compat.get_keras_mask(value) for value in results],
            states,
            list(scope.losses),
            loss_owners,
            collected,
            normalised,
            {key: v for key, v in scope.assigned.items() if key not in pooled},
            {key: v for key, v in read.items() if key not in self.captured | pooled} | kernels,
        )

    def _outputs(self, made: dict[Ref, Any]) -> tuple[tuple[Ref, ...], list[Value | None]]:
        """What comes out, with the logits of a softmax or sigmoid, from which Keras takes a crossentropy.

        Layers of later stages may return such a tensor as it is, so that logits are passed on with whatever has some.
        """
        found = {ref: made[ref] for ref in self.plan.outputs}
        for ref in self.plan.outputs:
            logits = compat.logits_of(made[ref]) if made[ref] is not None else None
            if logits is not None:
                found[ref.logits] = logits
        return tuple(found), list(found.values())

    def _take_loss_owners(self, scope: compat.RecordingScope) -> list[keras.Layer]:
        owners = [scope.loss_owners[id(loss)] for loss in scope.losses]
        for loss, owner in zip(scope.losses, owners, strict=True):
            compat.losses_of(owner).discard(id(loss))
        return owners


def _new_value(scope: compat.RecordingScope, variable: keras.Variable, plan: StagePlan) -> tf.Tensor:
    """What a variable was assigned, in its own dtype, whatever layers compute in.

    Raises:
        ValueError: it was assigned inside a loop or branch, out of which Keras cannot hand the value.
    """
    value = tf.convert_to_tensor(scope.get_current_value(variable))
    if getattr(value, "graph", None) not in (None, tf.compat.v1.get_default_graph()):
        raise ModelError(
            f"Expected layers that assign their state outside loops and branches. Received: '{variable.path}' in "
            f"stage {plan.index} ({', '.join(plan.operations)}), assigned inside one, as that of `keras.layers.RNN`. "
            "Assign it before or after that; for a recurrent layer, `unroll=True` has no loop."
        )
    return tf.cast(value, compat.raw_variable(variable).dtype)
