"""The half of the strategy that TensorFlow calls back: its scope, its extended half and its replica context.

What these do is the strategy's own work, which they call in turn: a model is placed as soon as Keras has built it, and
calling one inside `run` means calling its pipeline.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_gpipe import compat, preparation, tracing, updates
from tf_gpipe.input_dataset import InputDataset

if TYPE_CHECKING:
    from tf_gpipe.strategy import GPipeStrategy


class Scope:
    """What `strategy.scope()` returns: TensorFlow's scope, and a model placed as soon as Keras has built it.

    A class, since a generator that is left open (`tf.distribute.experimental_set_strategy` does, and forgets it when
    the default graph is reset) leaves its scope whenever it happens to be collected, in the middle of another.
    """

    def __init__(self, strategy: GPipeStrategy, scope: contextlib.AbstractContextManager[Any]) -> None:
        self._strategy = strategy
        self._scope = scope
        self._prepared: tuple[keras.Model, Any] | None = None
        self._building = contextlib.ExitStack()

    def __enter__(self) -> GPipeStrategy:
        prepared = compat.model_being_prepared()
        if prepared is not None and compat.strategy_of(prepared[0]) is self._strategy:
            self._prepared = prepared
            self._strategy._place_prepared(*prepared)  # refuses before Keras builds, which may fail with a riddle
        self._scope.__enter__()
        if self._prepared is not None:
            self._building.enter_context(preparation.prebuilt(*self._prepared))
        return self._strategy

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._building.__exit__(kind, error, trace)
        self._scope.__exit__(kind, error, trace)
        if self._prepared is not None and isinstance(error, RuntimeError):  # TensorFlow's, of strategies that are mixed
            self._strategy._check_optimizer(self._prepared[0])
        if self._prepared is not None and error is None:
            # Keras has just built the model and its optimizer and traces nothing before `scope` is left.
            self._strategy._place_prepared(*self._prepared)


class Extended(compat.OneDeviceExtended):
    """The half of a strategy that TensorFlow calls. One replica; its loss is taken on the last stage's device."""

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """New variables are made on the host, or beside the one they belong to; stages fetch theirs when placed."""
        beside = kwargs.pop("colocate_with", None)
        device = getattr(beside, "device", None) or "/CPU:0"
        # Made inside a step (slots), its initial value must not wait for the step's data: it is lifted out.
        with tf.device(device), tf.control_dependencies(None):
            return next_creator(**kwargs)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        with contextlib.ExitStack() as during_run:
            during_run.enter_context(compat.route_models(functools.partial(strategy._call_model, during_run)))
            during_run.enter_context(compat.follow_inputs(strategy.devices[-1]))
            during_run.enter_context(ReplicaContext(strategy, replica_id_in_sync_group=0))
            # Where data end inside the step, nothing of it may have run: no counter raised, no seed drawn.
            during_run.enter_context(tf.control_dependencies(_first_tensor((args, kwargs))))
            during_run.enter_context(tracing.recorded(strategy))
            return fn(*args, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        """A variable of no strategy, or of another pipeline, is as good as our own: it stands on one device, too."""
        if isinstance(colocate_with_variable, tf.Variable):
            owner = compat.strategy_of(colocate_with_variable)
            if owner is None or isinstance(owner.extended, Extended):
                return
        super()._validate_colocate_with_variable(colocate_with_variable)

    def _update(self, var: tf.Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        if updates.put_off((var, fn, args, kwargs)):
            return None
        with compat.on_device(self, var.device):
            return super()._update(var, fn, args, kwargs, group)

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> InputDataset:
        compat.prepare_outside_epochs()
        return InputDataset(dataset)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> InputDataset:
        return InputDataset(dataset_fn(tf.distribute.InputContext()))


class ReplicaContext(tf.distribute.ReplicaContext):
    """The context inside `run`: one replica, whose values are already reduced and stay where they are."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Where a replica's values are: on the last stage's device."""
        return tuple(self.strategy.extended.worker_devices)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The value itself."""
        return value

    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function across all replicas, of which there is one."""
        if tf.executing_eagerly() or not compat.only_updates(merge_fn):
            return super().merge_call(merge_fn, args, kwargs)
        with updates.gathered(self.strategy._compiled_devices):
            return super().merge_call(merge_fn, args, kwargs)


def _first_tensor(values: Any) -> list[tf.Tensor]:
    """The first tensor of a graph in a structure, in a list; none when executing eagerly."""
    flat = [] if tf.executing_eagerly() else tf.nest.flatten(values, expand_composites=True)
    return [value for value in flat if tf.is_tensor(value) and hasattr(value, "op")][:1]
