"""Measures steps: times taken inside the graph of a training step, and the timelines made of them.

While a strategy is traced, the graph of a training step takes the time three times for each task, on its stage's
device:

    arrived ──▶ ready ──┐
                        ├──▶ start ──▶ the task's operations ──▶ end ──▶ next task of the stage
    previous end ───────┘

`ready` waits for what the task gets from other stages, `start` for that and for the previous task of the stage, and
`end` for everything that the task gives. They are `tf.timestamp` under control dependencies, so that the task's own
operations and their order stay as they are. A step begins when its mini-batch is there and ends after every operation
that assigns something. All times go into one variable on the host, which keeps those of the latest step.

On an accelerator an operation is done for TensorFlow when it is in the device's queue. There the time is taken on the
host, when a number has arrived that was made on the device last: what was in the queue before is over then
(docs/decisions/0011-times-on-accelerators.md).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_gpipe import compat, threads
from tf_gpipe.devices import is_cpu
from tf_gpipe.errors import ArgumentError, ModelError
from tf_gpipe.schedule import Schedule
from tf_gpipe.tasks import Remat, Task
from tf_gpipe.timeline import Event, Timeline

if TYPE_CHECKING:
    from tf_gpipe.stage import Stage
    from tf_gpipe.strategy import GPipeStrategy

Key = tuple[str, int, int]
"""What is measured: kind ("forward", "backward" or "weights"), stage, micro-batch."""

_NO_TIMES = {"ReadVariableOp", "RemoteCall", "Timestamp", "VarHandleOp"}
"""Stateful operations that a step's end need not wait for: they assign nothing, or something else waits for them."""


class Tracer:
    """While it is kept for a strategy, training steps that are traced take the time."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []

    def timeline(self) -> Timeline:
        """The latest step.

        Raises:
            ModelError: the training step does something that a timeline cannot show, or no step was traced.
        """
        if not self.recorders:
            raise ModelError(
                "Expected a training step that calls a model made under the strategy's scope on a `tf.GradientTape`. "
                "Received: one that calls none. Make the models that `train_step` calls inside `strategy.scope()`."
            )
        self.check()
        return max(self.recorders, key=lambda recorder: recorder.latest()[0]).timeline()

    def check(self) -> None:
        """Raises a `ModelError` if what was traced so far cannot be shown as a timeline."""
        for problem in (recorder.problem for recorder in self.recorders if recorder.problem):
            raise ModelError(
                f"Expected a training step that calls one model once and takes its gradient once. Received: {problem}. "
                "Look at it with the TensorFlow profiler (`tf.profiler.experimental`) instead."
            )


class Recorder:
    """The times of one traced training step.

    Attributes:
        problem: why they are no timeline; empty if they are.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._begin = compat.timestamp()
        self._graph = self._begin.graph
        self._times: dict[Key, list[tf.Tensor]] = {}
        self._recomputed: dict[Task, float] = {}
        self._open: Key | None = None
        self._variable: tf.Variable | None = None
        self._schedule: Schedule | None = None
        self._stages: Sequence[Stage] = ()

    @property
    def is_used(self) -> bool:
        """Whether the step called a model."""
        return self._schedule is not None

    def begin_call(self, schedule: Schedule, remat: Remat, stages: Sequence[Stage]) -> None:
        """A model is called on a tape."""
        if self._schedule is not None:
            self._refuse("several calls")
        elif not stages:
            self._refuse("a model without operations")
        self._schedule, self._remat, self._stages = schedule, remat, stages

    def start(self, key: Key, arrived: Sequence[tf.Tensor], device: str) -> tf.Tensor:
        """Takes the time when `arrived` is there, and when the operations that are open as control inputs are done."""
        if key in self._times or key[0] == "second":
            self._refuse("gradients of gradients, or several gradients of one call")
        if tf.compat.v1.get_default_graph() is not self._graph:
            self._refuse("a call inside a loop, a condition or a function of its own")
        with tf.device(_clock_of(device)):
            with tf.control_dependencies(None):
                there = [copy for tensor in arrived for copy in _on_host([tensor], device)]
                with tf.control_dependencies([*there, *self._inside([self._begin])]):
                    ready = compat.timestamp()
            with tf.control_dependencies([ready]):
                start = compat.timestamp()
        self._times[key], self._open = [ready, start], key
        return start

    def end(self, made: Sequence[tf.Tensor], device: str) -> tf.Operation:
        """Takes the time when everything that was made is there."""
        if self._open is None:
            return made[0].op
        with tf.control_dependencies(None):
            there = _on_host(made, device)
        with tf.device(_clock_of(device)), tf.control_dependencies(None), tf.control_dependencies(there):
            end = compat.timestamp()
        self._times[self._open].append(end)
        self._open = None
        return end.op

    def note_recomputed(self, task: Task, part: float) -> None:
        """A backward task does this part of its stage's forward work again."""
        self._recomputed[task] = part

    def finish(self) -> None:
        """Takes the time when the step is over, and keeps all times."""
        if not any(kind == "backward" for kind, _, _ in self._times):
            self._refuse("no gradient")
        if self.problem:
            return
        self._times = {key: times for key, times in self._times.items() if len(times) == 3}
        operations = [op for op in self._graph.get_operations() if op.op_def.is_stateful and op.type not in _NO_TIMES]
        with tf.device("/CPU:0"):
            with tf.control_dependencies(operations):
                updated = self._updated()
            with tf.control_dependencies([*operations, *updated, *(times[-1] for times in self._times.values())]):
                end = compat.timestamp()
            every = [self._begin, *(time for times in self._times.values() for time in times), end]
            self._variable = compat.free_variable(np.zeros(len(every)))
            self._variable.assign(tf.stack(every))
        compat.keep_alive(self._variable)

    def latest(self) -> list[float]:
        """Times of the latest step, in seconds since 1970: its begin, those of the tasks, its end; 0 before any."""
        return [float(time) for time in self._variable.numpy()] if self._variable is not None else [0.0]

    def timeline(self) -> Timeline:
        """The latest step as a timeline.

        A task that the step does not have, since no gradient goes through its stage, takes no time: it is at the end of
        the tasks that it would have waited for.
        """
        begin, *times, end = self.latest()
        schedule = self._schedule or Schedule.gpipe(1, 1)
        found = {key: times[3 * i : 3 * i + 3] for i, key in enumerate(self._times)}
        events: dict[Task, Event] = {}
        free = [begin] * schedule.num_stages
        for task in schedule.order():
            needs = [events[need].end for need in task.needs(schedule.num_stages)]
            key = task.kind, task.stage, task.micro_batch
            ready, start, until = found.get(key, [max(free[task.stage], *needs, begin)] * 3)
            event = Event(task, ready, start, until, self._recomputed.get(task, 0.0))
            events[task], free[task.stage] = event, event.end
        weights = [found.get(("weights", k, 0), [at] * 3) for k, at in enumerate(free)]
        spans = tuple((start, until) for _, start, until in weights)
        return Timeline(schedule, tuple(events.values()), begin, end, self._remat, spans)

    def _updated(self) -> list[tf.Tensor]:
        """What to wait for until the weights of accelerators are updated, and not only their updates in the queue."""
        found = []
        for stage in self._stages:
            weights = [compat.raw_variable(weight) for weight in stage.weights]
            if weights and not is_cpu(stage.device):
                found += _on_host([weights[-1].read_value()], stage.device)
        return found

    def _inside(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Those of the graph that is being made: others cannot be waited for."""
        return [t for t in tensors if t.graph is tf.compat.v1.get_default_graph()]

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _clock_of(device: str) -> str:
    """Where the time is taken for a device; accelerators have no clock that TensorFlow reads."""
    return device if is_cpu(device) else "/CPU:0"


def _on_host(tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """What to wait for on the host until tensors are there on a device."""
    kept_there = [tensor for tensor in tensors if tensor.dtype.is_floating or tensor.dtype.is_complex]
    if is_cpu(device) or not kept_there:
        return list(tensors)
    with tf.device(device), tf.control_dependencies(tensors):
        number = tf.reshape(kept_there[0], [-1])[:1]
    with tf.device(_clock_of(device)):
        return [tf.identity(number)]


# --- what the pipeline and the strategy call ---

_recording = threading.local()


class _Tracers(threading.local):
    """Of each strategy, in one thread: steps that another thread trains meanwhile are not measured."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[GPipeStrategy, Tracer] = weakref.WeakKeyDictionary()


_tracers = _Tracers()


@contextlib.contextmanager
def recorded(strategy: GPipeStrategy) -> Iterator[None]:
    """Around what `strategy.run` runs: takes the times of a training step while the strategy has a tracer."""
    tracer = _tracers.of.get(strategy)
    if tracer is None or tf.executing_eagerly():
        yield
        return
    before = getattr(_recording, "recorder", None)
    recorder = _recording.recorder = Recorder()
    try:
        yield
    finally:
        _recording.recorder = before
    if recorder.is_used:
        recorder.finish()
        tracer.recorders.append(recorder)


def recorder_of(schedule: Schedule, remat: Remat, stages: Sequence[Stage]) -> Recorder | None:
    """The recorder of a call that begins now, if its step is measured."""
    recorder: Recorder | None = getattr(_recording, "recorder", None)
    if recorder is None or tf.executing_eagerly():
        return None
    recorder.begin_call(schedule, remat, stages)
    return recorder


@contextlib.contextmanager
def started(recorder: Recorder | None, key: Key, arrived: Sequence[tf.Tensor], device: str) -> Iterator[None]:
    """Around the operations of a task: they wait until it has started."""
    if recorder is None:
        yield
        return
    with tf.control_dependencies([recorder.start(key, arrived, device)]):
        yield


def ended(recorder: Recorder | None, made: Sequence[tf.Tensor], device: str) -> tf.Operation:
    """What the next task of the stage waits for."""
    return made[0].op if recorder is None else recorder.end(made, device)


def note_recomputed(recorder: Recorder | None, task: Task, part: Callable[[], float]) -> None:
    """Notes what a backward task does again, if its step is measured."""
    if recorder is not None:
        recorder.note_recomputed(task, part())


# --- measuring ---


def check_traceable(strategy: GPipeStrategy, model: keras.Model) -> None:
    """Raises an error if steps of a model cannot be measured."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"Expected a compiled keras.Model. Received: {type(model).__name__}.")
    if not model.compiled:
        raise ModelError(
            f"Expected a compiled model, since whole training steps are measured. Received: '{model.name}', which is "
            "not compiled. Call `model.compile` inside `strategy.scope()` first."
        )
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise ModelError(
            f"Expected a model that trains in a graph, where stages run at the same time. Received: '{model.name}', "
            "which runs eagerly. Compile it without `run_eagerly`, and leave `tf.config.run_functions_eagerly` off."
        )


def start_tracing(strategy: GPipeStrategy) -> Tracer:
    """From now on, training steps that this thread traces under a strategy are measured."""
    _tracers.of[strategy] = tracer = Tracer()
    return tracer


def stop_tracing(strategy: GPipeStrategy, tracer: Tracer | None) -> None:
    """Ends what `start_tracing` began, unless another has begun since."""
    if _tracers.of.get(strategy) is tracer:
        _tracers.of.pop(strategy, None)


def measure(strategy: GPipeStrategy, model: keras.Model, batch: Any) -> Timeline:
    """See `GPipeStrategy.trace`."""
    check_traceable(strategy, model)
    is_sequence = isinstance(batch, (tuple, list))
    if not is_sequence or not 1 <= len(batch) <= 3:
        raise ArgumentError(
            "Expected `batch` as a tuple `(x, y)` or `(x, y, sample_weight)`, as `fit` takes them. "
            f"Received: {type(batch).__name__}{f' of length {len(batch)}' if is_sequence else ''}. Pass `(x, y)`."
        )
    kept: list[tuple[tf.Variable, Any]] = []
    make_train_function = threads.attribute(model, "make_train_function")

    def make_and_keep(force: bool = False) -> None:
        """Keras has built everything by now, and trains next."""
        make_train_function(force)
        if not kept:
            kept.extend((variable, np.array(variable.numpy())) for variable in _variables_of(model))

    x, y, sample_weight = (*batch, None, None)[:3]
    rows = _rows_of(x)
    before = {name: getattr(model, name, None) for name in ("train_function", "history", "stop_training")}
    model.train_function = None
    tracer = start_tracing(strategy)
    try:
        with compat.replaced(model, "make_train_function", make_and_keep):
            for _ in ("start-up", "measured"):
                # Not `train_on_batch`, which hands a `train_step` three values where `fit` hands it `(x, y)`.
                model.fit(x, y, batch_size=rows, sample_weight=sample_weight, shuffle=False, verbose=0)
                tracer.check()
        return tracer.timeline()
    finally:
        stop_tracing(strategy, tracer)
        for name, value in before.items():
            setattr(model, name, value)
        with strategy.scope():
            for variable, value in kept:
                variable.assign(value)


def _rows_of(x: Any) -> int:
    arrays = [leaf for leaf in tf.nest.flatten(x) if leaf is not None]
    shape = tuple(getattr(arrays[0], "shape", ())) if arrays else ()
    if not shape or not isinstance(shape[0], int) or shape[0] < 1:
        received = f"shape {shape}" if shape else type(arrays[0]).__name__ if arrays else "nothing"
        raise ArgumentError(
            f"Expected `batch` to hold arrays of at least one row. Received: {received}. Pass `(x, y)` as arrays, such "
            "as `next(iter(dataset))`."
        )
    return shape[0]


def _variables_of(model: keras.Model) -> list[tf.Variable]:
    """What a training step may change: weights and state of the model, its optimizer and its metrics."""
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    every = [*model.variables, *(model.optimizer.variables if model.optimizer else ()), *metrics]
    return list({id(v): v for v in map(compat.raw_variable, every)}.values())
