"""`TimelineCallback`: measured timelines during `fit`."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat, tracing
from tf_gpipe.errors import ArgumentError, ModelError, ScheduleError
from tf_gpipe.strategy import GPipeStrategy
from tf_gpipe.timeline import Timeline

__all__ = ["TimelineCallback"]


class TimelineCallback(keras.callbacks.Callback):
    """Measures one training step in `every` during `fit`.

    For each it writes a timeline into `directory`, `step_000100.json` for step 100, which Perfetto (ui.perfetto.dev),
    chrome://tracing and `Timeline.load` read, and scalars for TensorBoard: `gpipe/compute`, `gpipe/recompute`,
    `gpipe/transfer`, `gpipe/bubble`, `gpipe/imbalance` and `gpipe/other`, shares of the time of all devices that add up
    to 1, `gpipe/step_seconds`, and `gpipe/stage_0/busy` for each stage, the share of the step in which it computes.
    Without the package `tensorboard` there are no scalars, and a warning says so. Where steps are none that a timeline
    can show (see `GPipeStrategy.trace`), a warning says why, and the training goes on.

    All steps of the training take their times inside the graph, see `tracing.py`; only every n-th is read. That costs
    about 10 µs a task: 2 % of a step of 28 ms (8 Dense(256) layers, 2,048 rows, K = 4, M = 8), 28 % of one of 1.7 ms
    with nothing to compute (16 wide, 64 rows). Medians of 100 and more steps with and without, in turn, on two cores.

    Args:
        directory: where to write; made if it is missing.
        every: steps from one measured step to the next, at least 1. Step 1 is never measured, since it is start-up.

    Raises:
        ValueError: `every` is below 1; during `fit`, the model is not one of a `GPipeStrategy`'s scope, or runs
            eagerly.

    Example:
        >>> with tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2).scope():
        ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     callback = tf_gpipe.TimelineCallback(directory, every=2)
        ...     history = model.fit(np.ones([32, 4]), np.ones([32, 1]), batch_size=8, verbose=0, callbacks=[callback])
        ...     sorted(path.name for path in pathlib.Path(directory).glob("*.json"))
        ['step_000002.json', 'step_000004.json']
    """

    def __init__(self, directory: str | os.PathLike[str], every: int = 100) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ArgumentError(f"Expected `every` to be an int of at least 1. Received: every={every!r}.")
        self.directory = Path(directory)
        self.every = every
        self._step = 0
        self._strategy: GPipeStrategy | None = None
        self._tracer: tracing.Tracer | None = None
        self._writer: Any = None
        self._measured = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Lets the training step be traced anew, with times."""
        strategy = compat.strategy_of(self.model)
        if not isinstance(strategy, GPipeStrategy):
            raise ModelError(
                "Expected a model that was made under the scope of a `GPipeStrategy`, since only such a model runs in "
                f"a pipeline. Received: '{self.model.name}', which was not. Leave TimelineCallback out, or make and "
                "compile the model inside `strategy.scope()`."
            )
        tracing.check_traceable(strategy, self.model)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._measured = 0
        if importlib.util.find_spec("tensorboard"):
            self._writer = tf.summary.create_file_writer(os.fspath(self.directory))
        else:
            warnings.warn(
                "TimelineCallback writes no scalars, since TensorBoard is not installed (`pip install tensorboard`).",
                stacklevel=2,
            )
        self._strategy, self._tracer = strategy, tracing.start_tracing(strategy)
        self._function = self.model.train_function
        self.model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads the times of the step, if it is one to measure."""
        before, self._step = self._step, self._step + self.model.steps_per_execution
        if self._tracer is None:
            return
        try:
            self._tracer.check()
            if before and before // self.every != self._step // self.every:
                self._measured += 1
                self._write(self._tracer.timeline())
        except ScheduleError as error:  # the clock was set meanwhile
            warnings.warn(f"TimelineCallback: step {self._step} was left out. {error}", stacklevel=2)
        except ModelError as error:
            warnings.warn(f"TimelineCallback measures nothing in this training. {error}", stacklevel=2)
            self._stop()

    def on_train_end(self, logs: Any = None) -> None:
        """Goes back to a training step without times."""
        if self._strategy is not None:
            self.model.train_function = self._function
            if self._tracer is not None and not self._measured:
                warnings.warn(
                    f"TimelineCallback measured nothing: training took {self._step} steps, and one in {self.every} is "
                    "measured. Pass a smaller `every`.",
                    stacklevel=2,
                )
            self._stop()
            self._strategy = None

    def _stop(self) -> None:
        if self._strategy is not None and self._tracer is not None:
            tracing.stop_tracing(self._strategy, self._tracer)
        if self._writer is not None:
            self._writer.close()
        self._tracer = self._writer = None

    def _write(self, timeline: Timeline) -> None:
        timeline.save(self.directory / f"step_{self._step:06d}.json")
        if self._writer is None:
            return
        names = "compute", "recompute", "transfer", "bubble", "imbalance", "other"
        scalars = {name: getattr(timeline.shares, name) for name in names}
        scalars["step_seconds"] = timeline.duration
        for k, shares in enumerate(timeline.device_shares):
            scalars[f"stage_{k}/busy"] = shares.compute + shares.recompute
        with self._writer.as_default():
            for name, value in scalars.items():
                tf.summary.scalar(f"gpipe/{name}", value, step=self._step)
        self._writer.flush()
