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

from tf_gpipe import compat, preparation, progress, threads, tracing, updates
from tf_gpipe.errors import ArgumentError, ScopeError
from tf_gpipe.input_dataset import InputDataset

if TYPE_CHECKING:
    from tf_gpipe.strategy import GPipeStrategy


class Scope:
    """What `strategy.scope()` returns: TensorFlow's scope, and a model placed as soon as Keras has built it.

    A class, since a generator that is left open (`tf.distribute.experimental_set_strategy` does, and forgets it when
    the default graph is reset) leaves its scope whenever it happens to be collected, in the middle of another.
    """

    def __init__(
        self, strategy: GPipeStrategy, make_scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self._strategy = strategy
        self._make_scope, self._scope = make_scope, make_scope()
        self._prepared: tuple[keras.Model, Any] | None = None
        self._building = contextlib.ExitStack()
        self._turn = contextlib.ExitStack()
        self._unwatch: Callable[[], Any] | None = None

    def __enter__(self) -> GPipeStrategy:
        _refuse_in_another(self._strategy)
        prepared = compat.model_being_prepared()
        with contextlib.ExitStack() as turn:
            if prepared is not None and compat.strategy_of(prepared[0]) is self._strategy:
                turn.enter_context(threads.turn)  # until Keras has built the model and its optimizer
                self._prepared = prepared
                preparation.adopt_optimizers(prepared[0], self._strategy)
                self._strategy._place_prepared(*prepared)  # refuses before Keras builds, which may fail with a riddle
            if not tf.distribute.has_strategy():
                self._unwatch = compat.watch_resets(self._reset)
            self._scope.__enter__()
            if self._prepared is not None:
                self._building.enter_context(preparation.prebuilt(*self._prepared))
            self._turn = turn.pop_all()
        return self._strategy

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with self._turn:
            self._leave(kind, error, trace)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._building.__exit__(kind, error, trace)
        self._scope.__exit__(kind, error, trace)
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._prepared is not None and isinstance(error, RuntimeError):  # TensorFlow's, of strategies that are mixed
            self._strategy._check_optimizer(self._prepared[0])
        _explain_mixing(error, "scope")
        if self._prepared is not None and error is None:
            # Keras has just built the model and its optimizer and traces nothing before `scope` is left.
            self._strategy._place_prepared(*self._prepared)
            self._strategy._place_parts(self._prepared[0])

    def _reset(self, reset: Callable[[], None]) -> None:
        """Goes on in the new default graph, where `clear_session` has reset it: TensorFlow keeps scopes in the graph.

        A scope that was set for good ends, as TensorFlow has it for every strategy.
        """
        if not tf.distribute.in_cross_replica_context():
            raise ScopeError(
                "Expected the default graph to be reset, as by `keras.backend.clear_session()`, outside "
                "`strategy.run`. Received: a reset inside it, which would forget what `run` is doing. Call it between "
                "steps."
            )
        ends = compat.is_set_for_good(self)
        self._scope.__exit__(None, None, None)
        reset()
        self._scope = self._make_scope()
        if not ends:
            self._scope.__enter__()
        elif self._unwatch is not None:
            self._unwatch()
            self._unwatch = None


def _refuse_in_another(strategy: GPipeStrategy) -> None:
    """Raises where a scope begins inside another strategy's scope, or inside a `run`."""
    current = tf.distribute.get_strategy()
    runs = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if not tf.distribute.has_strategy() or (current is strategy and not runs):
        return
    which = "the same" if current is strategy else "another" if isinstance(current, type(strategy)) else "a"
    name, owner = compat.entered_by() or ("scope", strategy)
    received = f"`{name}` of {f'{owner.name!r}' if isinstance(owner, keras.Model) else 'a GPipeStrategy'}"
    other = f"{which} {type(current).__name__}"
    if runs:
        raise ScopeError(
            f"Expected `{name}` to be called outside `run` of a strategy. Received: {received} inside `run` of "
            f"{other}. Inside `run`, call the model itself, `model(x, training=True)`, take its gradients and apply "
            "them; call `fit`, `train_on_batch`, `predict` and their like, and `run`, from outside."
        )
    raise ScopeError(
        f"Expected one strategy at a time. Received: {received} inside the scope of {other}. "
        "Leave that scope first: a model is made, trained and used under one strategy."
    )


def _explain_mixing(error: BaseException | None, where: str) -> None:
    """Raises where TensorFlow's error is of another strategy that was used inside the scope or `run` of ours."""
    if error is not None and compat.says_that_strategies_mix(error):
        raise ScopeError(
            f"Expected one strategy at a time. Received: the scope or `run` of another strategy, or what was made "
            f"under its scope, inside the {where} of a GPipeStrategy. Leave the one before you enter the other, and "
            "make models, optimizers and metrics under the strategy that trains them."
        ) from error


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
        refuse_xla()
        with contextlib.ExitStack() as during_run:
            during_run.enter_context(compat.route_models(functools.partial(strategy._call_model, during_run)))
            during_run.enter_context(compat.follow_inputs(strategy.devices[-1]))
            during_run.enter_context(ReplicaContext(strategy, replica_id_in_sync_group=0))
            # Where data end inside the step, nothing of it may have run: no counter raised, no seed drawn.
            during_run.enter_context(tf.control_dependencies(_first_tensor((args, kwargs))))
            during_run.enter_context(tracing.recorded(strategy))
            during_run.enter_context(progress.shown())
            try:
                return fn(*args, **kwargs)
            except RuntimeError as error:
                strategy._check_optimizer_in(error)
                _explain_mixing(error, "run")
                raise

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
        with compat.updating(var.device):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(lambda value: (value,), result)  # of one replica

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> InputDataset:
        compat.spare_first_epoch()
        return InputDataset(dataset)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> InputDataset:
        return InputDataset(dataset_fn(tf.distribute.InputContext()))


def refuse_xla() -> None:
    """Raises inside a function that XLA compiles as a whole: it would put all stages onto one device."""
    if compat.in_xla_function():
        raise ArgumentError(
            "Expected a pipeline outside functions that XLA compiles as a whole, since its stages are on several "
            "devices. Received: `strategy.run`, or a model in it, inside a `tf.function(jit_compile=True)`. Leave "
            "jit_compile out of that `tf.function` and set it on the strategy: GPipeStrategy(..., jit_compile=True) "
            "compiles each stage on its own device."
        )


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
