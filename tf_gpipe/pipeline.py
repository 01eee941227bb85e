"""A model divided into stages: what is kept between calls, and whether XLA compiles the stages."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tf_gpipe import compat, state
from tf_gpipe.call import Call, PipelineOutput
from tf_gpipe.model_graph import Ref, check_splittable
from tf_gpipe.plan import Plan, up_to_date
from tf_gpipe.stage import Stage
from tf_gpipe.stage_functions import Forward
from tf_gpipe.tasks import Remat
from tf_gpipe.trial import first_refused, xla_pays
from tf_gpipe.values import Value

UNKNOWN_ROWS = (
    "stages are not compiled: XLA can only be tried where all mini-batches are known to have the same number of rows "
    "(`drop_remainder=True`)"
)


class Pipeline:
    """A model divided into stages, ready to be called.

    Args:
        plan: the stages.
        num_micro_batches: M.
        remat: which micro-batches recompute their activations in the backward pass.
        jit_compile: whether XLA compiles the stages; "auto" to try it in the first call that trains on known shapes.
        told: layers whose state is known to be moved by the data; those that are found are added.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        num_micro_batches: int,
        remat: Remat,
        jit_compile: bool | str,
        told: weakref.WeakSet[keras.Layer],
    ) -> None:
        check_splittable(plan.graph, num_micro_batches)
        self._given = plan
        self._note = ""  # of XLA
        self.num_micro_batches = num_micro_batches
        self.remat = remat
        self.jit_compile = jit_compile
        self._told = told
        self.stages = self._make_stages(compiled=jit_compile is True)

    @property
    def plan(self) -> Plan:
        """The stages, with a note of what was found out about them since."""
        found = [self._given.note, self._note, *(note for stage in self.stages for note in stage.notes)]
        return dataclasses.replace(self._given, note="\n".join(filter(None, found)))

    def _make_stages(self, *, compiled: bool) -> list[Stage]:
        # "never" has the operands of deferred gradients in memory anyway, for a part.
        deferral = 1 if self.remat == "never" else self.num_micro_batches
        stages = [stage for stage in self._given.stages if stage.steps]
        count = len(self._given.stages)
        return [Stage(stage, jit_compile=compiled, deferral=deferral, count=count) for stage in stages]

    def try_xla(
        self,
        training: bool | None,
        kinds: Mapping[Ref, Any],
        forwards: Sequence[Forward],
        needs_gradient: Mapping[Ref, bool] | None,
    ) -> bool:
        """Settles `jit_compile="auto"` in a training call, if the shapes of what is between the stages are known.

        Args:
            training: the training flag.
            kinds: kinds of the value and of the mask of everything that there is.
            forwards: the forward functions of the stages.
            needs_gradient: whether the gradient of each is wanted; None if there is no backward pass, and nothing to
                settle.

        Returns whether the stages are to be compiled from now on.
        """
        if self.jit_compile != "auto" or not self.stages or needs_gradient is None:
            return False
        compiled = self.stages
        branching = [str(stage.index) for stage, forward in zip(self.stages, forwards, strict=True) if forward.branches]
        if branching:
            reason = f"XLA may not know the gradient of a loop or branch in stage {', '.join(branching)}"
            found: tuple[bool, str] | None = (False, f"stages are not compiled: {reason}")
        else:
            compiled = self._make_stages(compiled=True)
            pairs = zip(self.stages, compiled, strict=True)
            largest = max(pairs, key=lambda pair: (pair[0].plan.goes_back, len(pair[0].plan.steps)))
            found = xla_pays(*largest, training, kinds, needs_gradient, keep=self.remat == "never")
            others = [stage for stage in compiled if stage is not largest[1]]
            refused = first_refused(others, training, kinds) if found and found[0] else None
            if refused is not None:
                found = False, f"stages are not compiled: {refused}"
        pays, self._note = found or (False, UNKNOWN_ROWS)
        if found is not None:
            self.jit_compile = pays
        if pays:
            self.stages = compiled
        return pays

    def renewed(self) -> Pipeline:
        """The same without what was traced: for layers that have been changed."""
        renewed = Pipeline(
            up_to_date(self._given),
            num_micro_batches=self.num_micro_batches,
            remat=self.remat,
            jit_compile=self.jit_compile,
            told=self._told,
        )
        renewed._note = self._note if self.jit_compile != "auto" else ""
        return renewed

    def tell_of_moved(
        self, variables: Sequence[keras.Variable], num_micro_batches: int, reasons: Sequence[str]
    ) -> None:
        """Warns, once for each layer, of state that the data move in each micro-batch."""
        of_layer: dict[keras.Layer, list[keras.Variable]] = {}
        for variable in variables:
            of_layer.setdefault(self._owner(variable), []).append(variable)
        for layer, moved in of_layer.items():
            if layer not in self._told:
                self._told.add(layer)
                state.warn_of_state_moved_by_data(layer, moved, num_micro_batches, reasons)

    def _owner(self, variable: keras.Variable) -> keras.Layer:
        """The innermost layer that holds a variable, in a metric, perhaps; the model, for a variable of no layer."""
        layers = [layer for step in self.plan.graph.steps for layer in step.layers]
        held = {layer: [*layer.variables, *layer.metrics_variables] for layer in layers}
        owners = [layer for layer in reversed(held) if any(v is variable for v in held[layer])]
        return min(owners, key=lambda layer: len(held[layer]), default=self.plan.graph.model)

    def __call__(self, inputs: Sequence[Value | None], training: bool | None) -> PipelineOutput:
        """Runs the model on a mini-batch.

        Args:
            inputs: the model's inputs, flat, each of shape `(N, ...)`, or None for an optional one.
            training: the training flag.
        """
        compat.keep_alive(self)
        return Call(self, list(inputs), training).run()
