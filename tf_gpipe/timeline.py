"""A measured step as a value: when each task was ready, began and ended, and where the time of the devices went.

A timeline holds the schedule that ran and one event a task, and everything else follows from them: shares of the step
time in the manner of the GPipe paper's table of overheads, a comparison with the simulation of the same schedule, and
the file that a timeline is kept in (`chrome_trace.py`). Nothing here imports TensorFlow, so that a step measured on one
machine can be read on another.

Where the time of a device goes, in this order; the six shares add up to 1:

    compute      forward tasks, backward tasks without recomputation, and deferred gradients of weights
    recompute    the beginning of a backward task that makes its activations again
    bubble       idle in a simulation of the schedule with equal stages, of the mean measured lengths
    imbalance    what a simulation with each stage's own mean lengths is idle beyond that
    transfer     idle beyond the simulation, while the needed tensor is made but has not arrived
    other        the rest: loss, optimizer, waiting for other stages' transfers, overheads

A wait for a transfer in time that the device would be idle anyway costs nothing and counts as bubble or imbalance.
Gradients of weights that a stage makes at once for all micro-batches come after its last backward task, in the
simulations as in the step. No share is below 0: a device that idles less than in a simulation has a smaller bubble (or
imbalance) than that.

A stage of frozen layers with nothing trained before it has no backward tasks. They are there as tasks of no length, so
that every schedule is whole, and take no time in the simulations either.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from tf_gpipe import chrome_trace
from tf_gpipe.errors import ScheduleError
from tf_gpipe.schedule import Schedule, Simulation
from tf_gpipe.tasks import LETTERS, Remat, Task, check_remat, recomputes, start_ticks

__all__ = ["Event", "Shares", "Timeline"]

_NS = 1e-9  # seconds in a tick of the simulations


class Event(NamedTuple):
    """One task as it was measured. Times are in seconds, on any one clock.

    Args:
        task: the task.
        ready: when all its inputs had arrived on its device.
        start: when it began.
        end: when it ended.
        recomputed: the part of its stage's forward work that it did again, from 0 to 1, if that is known; None: all of
            it where the timeline's `remat` says so.
    """

    task: Task
    ready: float
    start: float
    end: float
    recomputed: float | None = None


class Shares(NamedTuple):
    """Where the time of a device, or of all, goes: shares of the step time that add up to 1."""

    compute: float
    recompute: float
    transfer: float
    bubble: float
    imbalance: float
    other: float


@dataclass(frozen=True)
class Timeline:
    """One training step as it was measured. `print(timeline)` shows it as a table.

    The recomputation inside a backward task is not measured apart. Where the task recomputes, its beginning is taken to
    be recomputation: as long as the forward tasks of the stage (their median), or the part of that which its event
    tells, and never longer than the backward task.

    Args:
        schedule: the schedule that ran.
        events: one for each task of the schedule, in any order; kept device by device, in the order of the rows.
        begin: when the step began, in seconds on the clock of the events.
        end: when it ended, with loss and optimizer.
        remat: which micro-batches recomputed their activations: `"always"`, `"except_last"` or `"never"`.
        weights: for each device, begin and end of the gradients of weights that were deferred to after its last task,
            in seconds; empty where no device had any.

    Raises:
        ScheduleError: the schedule cannot run; an event is missing, unknown or there twice; or times contradict each
            other: ready, start and end of an event, tasks of one device that overlap, events outside the step.

    Example:
        >>> timeline = Timeline.from_simulation(Schedule.gpipe(2, 3).simulate(remat="always"), tick=0.002)
        >>> timeline.shares.bubble, timeline.shares.recompute
        (0.25, 0.1875)
        >>> print(timeline)
        gpipe: 2 stages, 3 micro-batches, step 32.0 ms, remat always
        stage  compute  recompute  transfer  bubble  imbalance  other
            0   56.2 %     18.8 %     0.0 %  25.0 %      0.0 %  0.0 %
            1   56.2 %     18.8 %     0.0 %  25.0 %      0.0 %  0.0 %
          all   56.2 %     18.8 %     0.0 %  25.0 %      0.0 %  0.0 %
        <BLANKLINE>
        tasks took 32.0 ms, in a simulation with the mean lengths 32.0 ms (measured 1.00 times as long)
        ms, simulated in brackets, from the first start
        stage  forward  backward    first F      first B          end  largest difference
            0      2.0       6.0  0.0 (0.0)  14.0 (14.0)  32.0 (32.0)                 0.0
            1      2.0       6.0  2.0 (2.0)    8.0 (8.0)  26.0 (26.0)                 0.0
    """

    schedule: Schedule
    events: tuple[Event, ...]
    begin: float
    end: float
    remat: Remat
    weights: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        self.schedule.validate()
        check_remat(self.remat)
        given = [_event(*event) for event in self.events]
        of = {event.task: event for event in given}
        tasks = [task for row in self.schedule.tasks for task in row]
        if len(given) != len(tasks) or of.keys() != set(tasks):
            raise _wrong_tasks(tasks, [event.task for event in given])
        object.__setattr__(self, "events", tuple(of[task] for task in tasks))
        object.__setattr__(self, "begin", float(self.begin))
        object.__setattr__(self, "end", float(self.end))
        if not (self.begin < self.end and math.isfinite(self.end - self.begin)):
            raise ScheduleError(
                f"A step takes time: expected begin < end in seconds; received begin={self.begin}, end={self.end}. "
                "Pass the times of one clock."
            )
        for row in self.schedule.tasks:
            _check_row([of[task] for task in row], self.begin, self.end)
        spans = tuple((float(start), float(end)) for start, end in self.weights)
        object.__setattr__(self, "weights", spans if any(start < end for start, end in spans) else ())
        self._check_weights()

    @classmethod
    def from_simulation(cls, simulation: Simulation, tick: float) -> Timeline:
        """The step that runs exactly as simulated: to compare with, to draw, and to test.

        Args:
            simulation: the simulation.
            tick: length of a tick in seconds, > 0.

        Returns:
            A timeline from 0 to the last tick, without loss, optimizer and transfers.

        Example:
            >>> Timeline.from_simulation(Schedule.gpipe(1, 1).simulate(), tick=0.5).duration
            1.5
        """
        num_stages = simulation.schedule.num_stages
        starts = simulation.start()
        ends = {task: start + simulation.ticks(task) for task, start in starts.items()}
        events = []
        for task, start in starts.items():
            ready = max([0, *(ends[need] for need in task.needs(num_stages))])
            events.append(Event(task, ready * tick, start * tick, ends[task] * tick))
        return cls(simulation.schedule, tuple(events), 0.0, simulation.num_ticks * tick, simulation.remat)

    @property
    def duration(self) -> float:
        """Length of the whole step in seconds."""
        return self.end - self.begin

    @property
    def tasks_duration(self) -> float:
        """Seconds from the start of the first task to the end of the last."""
        return max(event.end for event in self.events) - self._first_start

    @property
    def simulated_duration(self) -> float:
        """Seconds that the tasks take in a simulation in which each stage has its own mean measured lengths."""
        return self._own_stages.num_ticks * _NS

    def event(self, task: Task) -> Event:
        """Tells when a task ran.

        Args:
            task: a task of the schedule.

        Returns:
            Its event.
        """
        return self._event_of[task]

    def recompute(self, task: Task) -> float:
        """Tells how long a task recomputes activations, from its start on.

        Args:
            task: a task of the schedule.

        Returns:
            Seconds, as the class describes; 0 for a forward task.
        """
        part = self.event(task).recomputed
        if task.kind == "forward":
            return 0.0
        if part is None:
            part = float(recomputes(task, self.remat, self.schedule.num_micro_batches))
        return min(self._length(task), part * self._median_forward[task.stage])

    @functools.cached_property
    def shares(self) -> Shares:
        """Shares of the time of all devices: K × step time, with one device a stage."""
        return Shares(*map(fmean, zip(*self.device_shares, strict=True)))

    @functools.cached_property
    def device_shares(self) -> tuple[Shares, ...]:
        """Shares of the step time for each device, in the order of the schedule's rows: with one a stage, by k."""
        shares = []
        for d, row in enumerate(self.schedule.tasks):
            recompute = sum(map(self.recompute, row))
            deferred = self._deferred_ticks
            busy = sum(map(self._length, row)) + deferred[d] * _NS
            idle = max(0.0, self.duration - busy)
            own = self._own_stages.idle_ticks(d, deferred) * _NS
            own = own if math.isclose(own, idle, rel_tol=1e-9) else min(idle, own)
            bubble = min(own, self._equal_stages.idle_ticks(d, [round(fmean(deferred))] * len(deferred)) * _NS)
            imbalance, rest = own - bubble, max(0.0, idle - own)
            transfer = max(0.0, min(self._transfer_wait(row), rest))
            seconds = (busy - recompute, recompute, transfer, bubble, imbalance, rest - transfer)
            shares.append(Shares(*(part / self.duration for part in seconds)))
        return tuple(shares)

    def start_differences(self) -> dict[Task, float]:
        """Compares the start of each task with the simulation that has each stage's own mean lengths.

        Returns:
            Seconds by task, both counted from the first start; above 0 where the task began later than simulated.
        """
        starts = self._own_stages.starts
        return {e.task: e.start - self._first_start - starts[e.task] * _NS for e in self.events}

    def to_chrome(self) -> dict[str, Any]:
        """Gives the timeline in Chrome's trace event format, which Perfetto reads.

        Returns:
            A dictionary for `json.dump`: one row a device, in it a slice for each task (`F0`, `B0`), with the
            recomputation (`R0`) inside the backward slice, one for deferred gradients of weights (`W`), and one row for
            the whole step. Times are in µs from the beginning of the step; `otherData` holds what `load` needs beside
            them.
        """
        return chrome_trace.trace_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the Chrome trace to a file.

        Args:
            path: a name that ends with `.json`.

        Raises:
            ArgumentError: the name ends otherwise.
        """
        chrome_trace.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Reads what `save` has written.

        Args:
            path: the file.

        Returns:
            An equal timeline.

        Raises:
            ArgumentError: the file holds something else.
        """
        return cls(**chrome_trace.load(path))

    def __str__(self) -> str:
        schedule, measured, simulated = self.schedule, self.tasks_duration, self.simulated_duration
        head = [schedule.row_word, *Shares.__annotations__]
        by_device = [(str(d), shares) for d, shares in enumerate(self.device_shares)]
        rows = [[label, *map(_percent, shares)] for label, shares in [*by_device, ("all", self.shares)]]
        return "\n".join(
            [
                self.title,
                *_table([head, *rows]),
                "",
                f"tasks took {self._ms(measured)} ms, in a simulation with the mean lengths {self._ms(simulated)} ms "
                f"(measured {measured / simulated:.2f} times as long)",
                "ms, simulated in brackets, from the first start",
                *_table(self._starts_table()),
            ]
        )

    def _ms(self, seconds: float) -> str:
        """Milliseconds, with as many decimals as tell something in a step of this length."""
        decimals = 1 if self.duration >= 1e-2 else 2 if self.duration >= 1e-3 else 3
        return f"{round(1000 * seconds, decimals) + 0.0:.{decimals}f}"

    @property
    def title(self) -> str:
        """The size of the schedule and the length of the step in one line."""
        return f"{self.schedule.heading}, step {self._ms(self.duration)} ms, remat {self.remat}"

    @functools.cached_property
    def _event_of(self) -> dict[Task, Event]:
        return {event.task: event for event in self.events}

    @functools.cached_property
    def _first_start(self) -> float:
        return min(event.start for event in self.events)

    def _check_weights(self) -> None:
        """Raises a `ScheduleError` unless deferred gradients come after the last task of their device."""
        rows = self.schedule.tasks
        lasts = [self.event(row[-1]).end for row in rows]
        in_order = all(last <= a <= b <= self.end for last, (a, b) in zip(lasts, self.weights, strict=False))
        if self.weights and not (len(self.weights) == len(rows) and in_order):
            raise ScheduleError(
                f"Deferred gradients of weights come after the last task of each of the {len(rows)} devices; received "
                f"weights={self.weights} with last tasks that end at {lasts}. Pass seconds of one clock."
            )

    @functools.cached_property
    def _deferred_ticks(self) -> list[int]:
        """For each device, how long it makes deferred gradients; a tick is a nanosecond."""
        return [round((end - start) / _NS) for start, end in self.weights] or [0] * self.schedule.num_devices

    @functools.cached_property
    def _median_forward(self) -> list[float]:
        """For each stage, the median length of its forward tasks; the first one is often slow."""
        order, stages = range(self.schedule.num_micro_batches), range(self.schedule.num_stages)
        return [median(self._length(Task("forward", k, m)) for m in order) for k in stages]

    def _length(self, task: Task) -> float:
        return self.event(task).end - self.event(task).start

    @functools.cached_property
    def _mean_parts(self) -> list[_Parts]:
        """For each stage, the mean lengths of its tasks' parts."""
        return [_Parts.mean(self._parts_of(k)) for k in range(self.schedule.num_stages)]

    def _parts_of(self, stage: int) -> list[tuple[float, float, float]]:
        """Lengths of the forward task, the recomputation and the rest of the backward task of each micro-batch."""
        found = []
        for m in range(self.schedule.num_micro_batches):
            forward, backward = (Task(kind, stage, m) for kind in LETTERS)
            again = self.recompute(backward)
            found.append((self._length(forward), again, self._length(backward) - again))
        return found

    @functools.cached_property
    def _own_stages(self) -> _Simulated:
        """The schedule simulated with each stage's own mean lengths; a tick is a nanosecond."""
        return self._simulated(self._mean_parts)

    @functools.cached_property
    def _equal_stages(self) -> _Simulated:
        """The schedule simulated with stages that all have the mean lengths; a tick is a nanosecond."""
        forward, backward = (
            fmean(getattr(part, name) for part in self._mean_parts) for name in ("forward", "backward")
        )
        again = tuple(map(fmean, zip(*(part.again for part in self._mean_parts), strict=True)))
        return self._simulated([_Parts(forward, again, backward)] * self.schedule.num_stages)

    def _simulated(self, parts: Sequence[_Parts]) -> _Simulated:
        tasks = [task for row in self.schedule.tasks for task in row]
        ticks = {task: parts[task.stage].ticks(task) for task in tasks}
        starts = start_ticks(self.schedule.tasks, self.schedule.num_stages, ticks.__getitem__)
        return _Simulated(self.schedule, ticks, dict(zip(tasks, itertools.chain(*starts), strict=True)))

    def _transfer_wait(self, row: Sequence[Task]) -> float:
        """Seconds that a device is idle while what its next task needs is made elsewhere but has not arrived."""
        here = {task.stage for task in row}
        wait, free = 0.0, self.begin
        for task in row:
            made = [self.event(n).end for n in task.needs(self.schedule.num_stages) if n.stage not in here]
            if made:
                wait += max(0.0, self.event(task).ready - max(free, *made))
            free = self.event(task).end
        return wait

    def _starts_table(self) -> list[list[str]]:
        """Measured and simulated times of each stage: mean lengths, first starts, the end, the largest difference."""
        simulated, differences = self._own_stages, self.start_differences()
        starts = simulated.starts

        def both(measured: float, ticks: int) -> str:
            return f"{self._ms(measured - self._first_start)} ({self._ms(ticks * _NS)})"

        rows = [["stage", "forward", "backward", "first F", "first B", "end", "largest difference"]]
        for k in range(self.schedule.num_stages):
            tasks = [event.task for event in self.events if event.task.stage == k]
            lengths = [fmean(self._length(task) for task in tasks if task.kind == kind) for kind in LETTERS]
            first = [next(task for task in tasks if task.kind == kind) for kind in LETTERS]
            end = both(self.event(tasks[-1]).end, starts[tasks[-1]] + simulated.ticks[tasks[-1]])
            largest = max((differences[task] for task in tasks), key=abs)
            cells = [*map(self._ms, lengths), *(both(self.event(task).start, starts[task]) for task in first), end]
            rows.append([str(k), *cells, self._ms(largest)])
        return rows


def _event(task: Task, ready: float, start: float, end: float, recomputed: float | None = None) -> Event:
    """The event with values of the right types."""
    if recomputed is not None and not 0 <= recomputed <= 1:
        raise ScheduleError(
            f"A task recomputes a part of its stage's forward work: expected a number from 0 to 1, or None; received "
            f"{recomputed} for {Task(*task)}. Leave it out where it is not known."
        )
    return Event(Task(*task), float(ready), float(start), float(end), recomputed)


class _Parts(NamedTuple):
    """Mean lengths in seconds of the parts of a stage's tasks; `again` is the recomputation, by micro-batch."""

    forward: float
    again: tuple[float, ...]
    backward: float

    @classmethod
    def mean(cls, lengths: Sequence[tuple[float, float, float]]) -> _Parts:
        """The mean over micro-batches; that of the recomputation is over those that recompute."""
        forward, again, backward = zip(*lengths, strict=True)
        usual = fmean([part for part in again if part] or [0.0])
        return cls(fmean(forward), tuple(usual if part else 0.0 for part in again), fmean(backward))

    def ticks(self, task: Task) -> int:
        """The length of a task; a tick is a nanosecond."""
        forward = task.kind == "forward"
        return round((self.forward if forward else self.again[task.micro_batch] + self.backward) / _NS)


@dataclass(frozen=True)
class _Simulated:
    """A schedule with the lengths and starts of its tasks in ticks; a task may take none."""

    schedule: Schedule
    ticks: dict[Task, int]
    starts: dict[Task, int]

    @property
    def num_ticks(self) -> int:
        return max(1, *(start + self.ticks[task] for task, start in self.starts.items()))

    def idle_ticks(self, device: int, deferred: Sequence[int]) -> int:
        """How long a device is idle if each device goes on after its last task, for `deferred` ticks."""
        lasts = [row[-1] for row in self.schedule.tasks]
        ends = [self.starts[task] + self.ticks[task] + more for task, more in zip(lasts, deferred, strict=True)]
        return max(ends) - sum(self.ticks[task] for task in self.schedule.tasks[device]) - deferred[device]


def _wrong_tasks(expected: Sequence[Task], received: Sequence[Task]) -> ScheduleError:
    """The error for events that are not one for each task: names the first wrong one."""
    count = Counter(received)
    twice = [f"{task} {count[task]} times" for task in received if count[task] > 1]
    unknown = [f"{task}, which the schedule does not have" for task in received if task not in set(expected)]
    missing = [f"no {task}" for task in expected if task not in count]
    return ScheduleError(
        f"A timeline has one event for each of the {len(expected)} tasks of its schedule; received {len(received)} "
        f"events, with {[*twice, *unknown, *missing][0]}. Measure one whole step."
    )


def _check_row(row: Sequence[Event], begin: float, end: float) -> None:
    """Raises a `ScheduleError` unless the events of a device are in order, apart, and inside the step."""
    free, before = begin, "the beginning of the step"
    for event in row:
        if not (math.isfinite(event.ready) and event.ready <= event.start <= event.end):
            problem = "expected ready <= start <= end"
        elif event.start < free:
            problem = f"expected it to start after {before}, {free}"
        elif event.end > end:
            problem = f"expected it to end before the end of the step, {end}"
        else:
            free, before = event.end, f"the end of {event.task}"
            continue
        raise ScheduleError(
            f"The times of {event.task} contradict others: {problem}; received ready={event.ready}, "
            f"start={event.start}, end={event.end}. Pass seconds of one clock, and the schedule that ran."
        )


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # 0.0 is added to make -0.0 positive


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
