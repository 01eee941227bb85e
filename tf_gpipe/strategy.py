"""`GPipeStrategy`: pipeline parallelism as a `tf.distribute.Strategy`.

The strategy is thin. It has one replica, whose stages stand on several devices, so that all of tf.distribute's surface
behaves as with one replica; Keras calls `strategy.run`, and while it runs, calling a model that was made under the
strategy's scope means calling its pipeline. What TensorFlow calls back is in `distribution.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf
from keras import tree

from tf_gpipe import compat, model_graph, placement, preparation, threads, tracing
from tf_gpipe.advice import Advice
from tf_gpipe.devices import must_compile, stage_devices
from tf_gpipe.distribution import Extended, Scope, refuse_xla
from tf_gpipe.errors import ArgumentError, GPipeError, ModelError
from tf_gpipe.messages import warn
from tf_gpipe.partition import counts_or_names
from tf_gpipe.pipeline import Pipeline
from tf_gpipe.plan import Partition, Plan, follow, follow_variables, make_plan, up_to_date
from tf_gpipe.stage import Stage
from tf_gpipe.tasks import REMAT_MODES, Remat, recomputed_share
from tf_gpipe.timeline import Timeline
from tf_gpipe.values import Value, is_dense


class GPipeStrategy(tf.distribute.Strategy):
    """Trains a Keras model in stages on several devices, as on one huge device.

    The model's chain of operations is cut into K balanced stages, each on its own device; every mini-batch is split
    into M micro-batches that stream through the stages; activations are recomputed in the backward pass; gradients are
    summed and applied once. Results are those of plain Keras, for every K, M and `remat`, with three exceptions: batch
    norm normalises each micro-batch with its own statistics; random layers draw per micro-batch; state that a layer
    moves by its data in `call` moves once a micro-batch (a warning says so). With M = 1 these are the same too.

    Args:
        num_stages: K, at least 1. Default: the number of GPUs, else of logical CPU devices.
        num_micro_batches: M, at least 1. Default 4·K, for which the bubble (K − 1) / (M + K − 1) is below 1/5.
        devices: K device names; or "cpu", "gpu" or "tpu" for devices of a kind, TPU cores in the order of the ring that
            connects them. Default: GPUs, else logical CPUs.
        num_replicas: 1; more are not available yet.
        partition: "flops" for stages of equal work; or K numbers of operations; or K − 1 names of operations to cut
            before.
        remat: which micro-batches recompute their activations: "always"; "except_last" (the last keeps them, since its
            backward pass comes first); "never".
        schedule: "gpipe"; others are not available yet.
        jit_compile: whether XLA compiles each stage on its own device. "auto" takes a micro-batch of zeros through one
            stage both ways when a model is first trained, which takes as long as compiling it, and keeps what is
            faster; `plan` tells the reason. It needs mini-batches of a known size, as `drop_remainder=True` makes them.
            TPUs run nothing else, so that there it makes no difference.

    Raises:
        ValueError: an argument has a value that is not described above, or there are too few devices.

    Example:
        >>> strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=4)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones([32, 8]), np.ones([32, 1]), verbose=0)

    Reference: Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
    section 2 (arXiv:1811.06965).
    """

    def __init__(
        self,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        *,
        devices: Sequence[str] | str | None = None,
        num_replicas: int = 1,
        partition: Partition = "flops",
        remat: Remat = "except_last",
        schedule: str = "gpipe",
        jit_compile: bool | Literal["auto"] = False,
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise ArgumentError(
                f"Expected Keras to run on TensorFlow. Received: backend '{keras.backend.backend()}'. Set the "
                "environment variable KERAS_BACKEND=tensorflow before importing Keras."
            )
        num_stages = _checked_count("num_stages", num_stages)
        num_micro_batches = _checked_count("num_micro_batches", num_micro_batches)
        _check_choice("remat", remat, REMAT_MODES, advice='"always" recomputes all, "never" none.')
        _check_choice("schedule", schedule, ("gpipe",), advice="Others are not available yet.")
        if num_replicas != 1:
            raise ArgumentError(
                f"Expected num_replicas=1, since replicas are not available yet. Received: {num_replicas!r}."
            )
        if not isinstance(jit_compile, bool) and jit_compile != "auto":
            raise ArgumentError(
                f'Expected `jit_compile` to be True, False or "auto". Received: {jit_compile!r}. "auto" tries both.'
            )
        self._devices = stage_devices(devices, num_stages)
        self._num_micro_batches = num_micro_batches or 4 * len(self._devices)
        self._partition = _checked_partition(partition, len(self._devices))
        self._remat = remat
        self._jit_compile = True if must_compile(self._devices) else jit_compile
        # With what is told where updates on such a device cannot be a program: the stage that was called there last.
        self._compiled_devices: dict[str, Callable[[str], None]] = {}
        self._told: weakref.WeakSet[keras.Model] = weakref.WeakSet()  # models that do not run in stages, once each
        self._waiting: weakref.WeakSet[keras.Model] = weakref.WeakSet()  # models with variables not in their stages
        self._parts_placed: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()  # by compilation
        self._told_of_state: weakref.WeakSet[keras.Layer] = weakref.WeakSet()  # layers whose state the data move
        self._advice: weakref.WeakKeyDictionary[keras.Model, Advice] = weakref.WeakKeyDictionary()
        super().__init__(Extended(self, self._devices[-1]))

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self._devices)

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return self._num_micro_batches

    @property
    def devices(self) -> list[str]:
        """Full names of the stages' devices."""
        return list(self._devices)

    @property
    def remat(self) -> Remat:
        """Which micro-batches recompute their activations."""
        return self._remat

    def __repr__(self) -> str:
        return (
            f"GPipeStrategy(num_stages={self.num_stages}, num_micro_batches={self.num_micro_batches}, "
            f"devices={self.devices}, partition={self._partition!r}, remat={self._remat!r}, "
            f"jit_compile={self._jit_compile!r})"
        )

    def scope(self) -> Scope:
        """Models, optimizers and metrics made inside belong to the strategy."""
        return Scope(self, super().scope)

    def _place_prepared(self, model: keras.Model, batch: Any) -> None:
        """Places a model as far as it can be planned before anything is traced."""
        _check_compiled(model)
        preparation.renew_if_compiled(model)
        self._place_waiting()
        has_call = type(model).call is not keras.Model.call
        if has_call and not preparation.is_built(model):
            return
        if compat.graph_of(model) is not None:
            self.place(model)
        elif has_call and batch is not None:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with contextlib.suppress(ModelError):  # raised again where the model is called, if it is
                self._pipeline(model, x, training=True)
        placement.place_slots(model)  # those made since the variables were placed

    def _place_parts(self, model: keras.Model) -> None:
        """Places the models that a model holds, for what Keras is about to trace.

        One step at a time, as by `train_on_batch`, begins with nothing to trace: then once after each `compile`.
        """
        compilation = compat.compilation_of(model)
        name, _ = compat.entered_by() or ("", None)
        if name.endswith("_on_batch") and self._parts_placed.get(model, self) is compilation:
            return
        self._parts_placed[model] = compilation
        for part in preparation.models_inside(model):
            is_ready = compat.graph_of(part) is not None and preparation.is_built(part)
            if is_ready and compat.strategy_of(part) is self and not placement.is_placed(part):
                with contextlib.suppress(GPipeError):  # raised again where the model is called, if it is
                    self._pipeline(part, None, training=True)

    def _place_waiting(self) -> None:
        """Moves what could not be moved when its model was first called, and traces the stages anew for it."""
        for model in list(self._waiting):
            known = self._pipelines_of(model)
            before = [v.value.device for v in model.weights]
            left = [placement.place(pipeline.plan, model) for pipeline in known.values()]
            if not any(left):
                self._waiting.discard(model)
            if [v.value.device for v in model.weights] != before:
                known.update({key: pipeline.renewed() for key, pipeline in known.items()})

    @threads.in_turn
    def plan(self, model: keras.Model, inputs: Any = None) -> Plan:
        """How a model is divided into stages.

        Args:
            model: a Keras model that has an `Input`, or has been called, or comes with `inputs`.
            inputs: for a subclassed model, a structure of tensors or `tf.TensorSpec`s as its `call` takes them.

        Returns:
            The plan; `print` shows it as a table, and `plan.stages[k].model` is a stage as a Keras model.

        Raises:
            ValueError: the model cannot be divided so.

        Example:
            >>> layers = [keras.layers.Dense(16, name="wide"), keras.layers.Dense(1, name="last")]
            >>> plan = tf_gpipe.GPipeStrategy(num_stages=2).plan(keras.Sequential([keras.Input([8]), *layers]))
            >>> [stage.operations for stage in plan.stages]
            [['wide'], ['last']]
        """
        if not isinstance(model, keras.Model):
            raise ModelError(
                f"Expected a model of Keras 3 (keras.Model). Received: {type(model).__module__}.{type(model).__name__}."
                " A model of tf_keras (Keras 2) must be rebuilt with Keras 3."
            )
        _check_compiled(model)
        if type(model).call is keras.Model.call:
            raise ModelError(
                f"Expected a model with a `call`, whose operations are cut into stages. Received: '{model.name}' "
                f"({type(model).__name__}), which has none. Plan the models that its `train_step` calls."
            )
        if inputs is not None and not preparation.is_built(model):
            own = compat.strategy_of(model) is self
            with self.scope() if own else contextlib.nullcontext():
                preparation.build_if_needed(model, (inputs,), {"training": True})
        if not preparation.is_built(model):
            raise ModelError(
                f"Expected a built model, whose shapes are known. Received: '{model.name}', which is not built. Give "
                "it a `keras.Input`, or pass inputs: `strategy.plan(model, x)`."
            )
        pipelines = self._pipelines_of(model)
        if inputs is None and compat.graph_of(model) is None and pipelines:
            # It has been followed: the first is that of training, if any is.
            return up_to_date(next(iter(pipelines.values())).plan)
        known = pipelines.get(_key(model, inputs, training=True))
        plan = known.plan if known is not None else self._make_plan(model_graph.build(model, inputs, training=True))
        plan = up_to_date(plan)
        other = compat.strategy_of(model)
        if other is self:
            return plan
        trains = "on one device" if other is None else f"under the strategy of its own scope ({type(other).__name__})"
        note = f"made outside this strategy's scope: the model itself trains {trains}"
        return dataclasses.replace(plan, note=note)

    def _make_plan(self, graph: model_graph.ModelGraph) -> Plan:
        """A new plan; by "flops", where variables already have their places, in another model's plan, it keeps to them.

        A function that was traced for the other model knows them there.
        """
        again = recomputed_share(self._remat, self._num_micro_batches)
        kept = follow_variables(graph, self._devices, placement.placed, again) if self._partition == "flops" else None
        return kept or make_plan(graph, self._devices, self._partition, again)

    @threads.in_turn
    def place(self, model: keras.Model, inputs: Any = None) -> Plan:
        """Plans a model and moves its variables and optimizer slots to their stages' devices now.

        `fit`, `evaluate` and `train_on_batch` do it by themselves. Call it before tracing a `tf.function` of your own
        that uses the model, which would otherwise be traced twice.

        Args and errors: as `plan`; the model must have been made under this strategy's scope.
        """
        self._check_own(model)
        self._place_waiting()
        known = self._pipelines_of(model)
        if inputs is None and compat.graph_of(model) is None and known:
            return next(iter(known.values())).plan  # it has been followed, and placed, in a call
        return self._pipeline(model, inputs, training=True).plan

    def trace(self, model: keras.Model, batch: tuple[Any, ...]) -> Timeline:
        """Measures a training step: when each task was ready, began and ended.

        Trains on the batch twice as `model.fit` does, first as a start-up, and then sets the model, its
        optimizer and its metrics back to what they were; a copy of their variables is on the host meanwhile. Times are
        taken inside the graph (`tracing.py`), which is traced anew for each `trace`.

        Args:
            model: a compiled model that was made under this strategy's scope.
            batch: `(x, y)` or `(x, y, sample_weight)`, arrays of shape `(N, ...)`.

        Returns:
            The timeline of the second step, in seconds since 1970.

        Raises:
            ValueError: the model is another's, is not compiled or runs eagerly; or the training step does not call one
                model once for one gradient.

        Example:
            >>> strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=4)
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16), keras.layers.Dense(1)])
            ...     model.compile("sgd", "mse")
            >>> timeline = strategy.trace(model, (np.ones([32, 8]), np.ones([32, 1])))
            >>> len(timeline.events), round(sum(timeline.shares), 6)
            (16, 1.0)
        """
        self._check_own(model)
        return tracing.measure(self, model, batch)

    def _check_own(self, model: keras.Model) -> None:
        if isinstance(model, keras.Model) and compat.strategy_of(model) is not self:
            raise ModelError(
                "Expected a model that was made under this strategy's scope, since only such a model runs in the "
                f"pipeline. Received: '{model.name}', which was not. Make and compile it inside `strategy.scope()`."
            )

    def _check_optimizer(self, model: keras.Model) -> None:
        """Says what is wrong where an optimizer could not make its slots."""
        optimizer = compat.foreign_optimizer(getattr(model, "optimizer", None), self)
        if optimizer is not None:
            _refuse_optimizer(optimizer, f" of '{model.name}'")

    def _check_optimizer_in(self, error: RuntimeError) -> None:
        """Says what is wrong where an optimizer of no or another scope raised TensorFlow's error inside `run`."""
        optimizer = compat.optimizer_in(error) if compat.says_that_strategies_mix(error) else None
        if compat.foreign_optimizer(optimizer, self) is not None:
            _refuse_optimizer(optimizer)

    def _pipeline(self, model: keras.Model, inputs: Any, training: bool | None) -> Pipeline:
        """The pipeline of a model for a training flag; made, and the model placed, the first time."""
        known = self._pipelines_of(model)
        graph = compat.graph_of(model)
        key = _key(model, inputs, training)
        if key not in known:
            plan = next(iter(known.values())).plan if graph is None and known else self.plan(model, inputs)
            if graph is None and (known or not training):
                plan = follow(model_graph.build(model, inputs, training), plan)
            pipeline = Pipeline(
                plan,
                num_micro_batches=self._num_micro_batches,
                remat=self._remat,
                jit_compile=self._jit_compile,
                told=self._told_of_state,
            )
            waiting = placement.place(plan, model)
            if waiting and model not in self._waiting:
                self._waiting.add(model)
                placement.tell_of_waiting(model, waiting)
            if graph is not None:
                known.clear()  # an older graph of the same model: layers were added
            known[key] = pipeline
        return known[key]

    def _pipelines_of(self, model: keras.Model) -> dict[Any, Pipeline]:
        """The pipelines of a model, by what they serve; with every `compile` they begin anew."""
        # Kept by the model, since a pipeline refers to its model: kept by the strategy, neither would ever be freed.
        preparation.renew_if_compiled(model)
        return model.__dict__.setdefault("_gpipe_pipelines", weakref.WeakKeyDictionary()).setdefault(self, {})

    def _call_model(
        self, during_run: contextlib.ExitStack, model: keras.Model, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """What calling a model means inside `run`; what must hold until `run` ends is entered into `during_run`."""
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in tree.flatten((args, kwargs)))
        if compat.strategy_of(model) is not self or symbolic:
            if not symbolic:
                self._tell_of_foreign(model)
            return plain(*args, **kwargs)

        def pipelined(inputs: Any, training: bool | None = None, mask: Any = None, **more: Any) -> Any:
            try:
                _refuse_arguments(model, more)
                return self._call_pipeline(during_run, model, inputs, training, mask)
            except GPipeError as error:
                compat.keep_exception(error)  # it says what to do; Keras would add a list of arguments
                raise

        with threads.turn:
            preparation.build_if_needed(model, args, kwargs)
            with compat.replaced(model, "call", pipelined):
                return plain(*args, **kwargs)

    def _tell_of_foreign(self, model: keras.Model) -> None:
        """Warns, once, of a model that is compiled to be trained, not a part of another's step, but has no stages."""
        if model.compiled and self.num_stages > 1 and model not in self._told:
            self._told.add(model)
            warn(
                f"'{model.name}' was made outside the scope of the GPipeStrategy that it runs under: it runs on one "
                "device, without stages. To pipeline it, make it inside `strategy.scope()`."
            )

    def _advise(self, model: keras.Model, pipeline: Pipeline, inputs: Sequence[Value | None]) -> None:
        """Warns, once, of what a training step wastes."""
        known = next((tensor.shape[0] for tensor in inputs if tensor is not None), None)
        if model not in self._advice:
            self._advice[model] = Advice(model.name, self._num_micro_batches, chosen=self._partition != "flops")
        pooled = [layer for stage in pipeline.stages for layer in stage.pooled]
        plan = pipeline.plan
        anew = functools.partial(make_plan, plan.graph, self._devices, self._partition, plan.recomputed)
        self._advice[model].give(plan, anew, known or compat.rows_of_first_batch(model), pooled)

    # In a `tf.function` of the user's, AutoGraph would rewrite the library's code.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _call_pipeline(
        self, during_run: contextlib.ExitStack, model: keras.Model, inputs: Any, training: bool | None, mask: Any
    ) -> Any:
        refuse_xla()
        graph = compat.graph_of(model)
        if graph is None:
            inputs = tree.map_structure(_as_value, inputs)
            flat = [leaf for leaf in tree.flatten(inputs) if leaf is not None]
        else:
            flat = compat.standardize_inputs(graph, inputs)
        for tensor, part in zip(flat, tree.flatten(mask), strict=False):
            if part is not None:
                compat.set_keras_mask(tensor, part)
        pipeline = self._pipeline(model, inputs, training)
        during_run.enter_context(compat.placed_regularizers(model.trainable_variables))
        result = pipeline(flat, training)
        if training and compat.is_recording():
            self._advise(model, pipeline, flat)
        self._compiled_devices.update((stage.device, _note_of(stage)) for stage in pipeline.stages if stage.jit_compile)
        if result.losses:
            # The layers keep them, as in Keras, and the next call of any thread clears them: it waits until `run` ends.
            during_run.enter_context(threads.turn)
        for owner, loss in result.losses:
            compat.hand_back_loss(owner, loss)
        return tree.pack_sequence_as(pipeline.plan.graph.outputs, result.outputs)


def _note_of(stage: Stage) -> Callable[[str], None]:
    """`stage.note`, which keeps neither the stage nor its model alive."""
    known = weakref.ref(stage)

    def note(what: str) -> None:
        stage = known()
        if stage is not None:
            stage.note(what)

    return note


def _key(model: keras.Model, inputs: Any, training: bool | None) -> Any:
    """What a pipeline of a model serves: its graph, or what its `call` is followed for."""
    graph = compat.graph_of(model)
    return graph if graph is not None else (bool(training), repr(tree.map_structure(_kind, inputs)))


def _as_value(leaf: Any) -> Value | None:
    return leaf if leaf is None or not is_dense(leaf) else tf.convert_to_tensor(leaf)


def _kind(tensor: Any) -> tuple[str, tuple[int | None, ...], str] | None:
    """What a subclassed model is followed for: type, shape of a row, and dtype of an input."""
    if tensor is None:
        return None
    form = "dense" if is_dense(tensor) else type(tensor).__name__
    return form, tuple(tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)


def _check_compiled(model: keras.Model) -> None:
    if compat.asks_for_xla(model):
        raise ArgumentError(
            f"Expected a model compiled without XLA, which would put all stages onto one device. Received: "
            f"'{model.name}' with compile(jit_compile=True). Leave jit_compile out of `compile` and set it on the "
            "strategy: GPipeStrategy(..., jit_compile=True) compiles each stage on its own device. After loading a "
            "model that plain Keras saved on a GPU, where it decides so by itself, set `model.jit_compile = False`."
        )


def _refuse_optimizer(optimizer: keras.Optimizer, whose: str = "") -> None:
    raise ModelError(
        "Expected an optimizer that was made under the scope of its model's strategy, which places its slots. "
        f"Received: '{optimizer.name}' ({type(optimizer).__name__}){whose}, which was made outside, or under another "
        "strategy's scope. Make it, and call `compile`, inside the `strategy.scope()` of the model."
    )


def _checked_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"Expected `{name}` to be an int of at least 1. Received: {name}={value!r}.")
    return int(value)


def _checked_partition(partition: Partition, num_stages: int) -> Partition:
    if partition is not None and not isinstance(partition, (str, numbers.Number)):
        counts, names = counts_or_names(partition, num_stages)
        return counts or names
    advice = f"Write [{partition!r}] to cut before an operation." if isinstance(partition, str) else ""
    if difflib.get_close_matches(str(partition), ["flops"]):
        advice = 'Did you mean "flops"?'
    _check_choice("partition", partition, ("flops",), ", or K numbers of operations, or K - 1 operation names", advice)
    return partition


def _check_choice(name: str, value: Any, choices: Sequence[str], more: str = "", advice: str = "") -> None:
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        text = f"Expected `{name}` to be {listed}{more}. Received: {name}={value!r}. {advice}"
        raise ArgumentError(text.rstrip())


def _refuse_arguments(model: keras.Model, more: dict[str, Any]) -> None:
    given = {name: value for name, value in more.items() if value is not None}
    if given:
        raise ModelError(
            f"Expected '{model.name}' to be called with its inputs, `training` and `mask` only, since these are what "
            f"is split into micro-batches. Received: {sorted(given)}. Pass further tensors as part of the inputs."
        )
