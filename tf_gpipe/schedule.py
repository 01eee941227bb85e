"""Schedules as values: which task each device runs, and in which order.

A schedule is plain data, and the only truth about the order of a run: the engine emits its tasks, the simulator times
them, the drawing shows them and a test compares them, all from the same value. Two things were rejected: loops
written into the engine, since a picture beside them can lie, and schedules that need live stages to be made, since
they cannot be checked without TensorFlow. Nothing here imports it.

Indices: k stage (of K), m micro-batch (of M), t tick. A task's text is `kFm` or `kBm`. GPipe for K=3, M=3, with a
forward task of one tick and a backward task of two:

    tick      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    stage 0  F0 F1 F2  .  .  .  .  .  . B2 B2 B1 B1 B0 B0
    stage 1   . F0 F1 F2  .  .  . B2 B2 B1 B1 B0 B0  .  .
    stage 2   .  . F0 F1 F2 B2 B2 B1 B1 B0 B0  .  .  .  .
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tf_gpipe.errors import ScheduleError
from tf_gpipe.tasks import LETTERS, Remat, Rows, Task, check_complete, check_remat, recomputes, start_ticks, table

__all__ = ["Schedule", "Simulation", "Task"]


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """Which tasks each device runs, in which order.

    Building one checks only the types; `validate` checks that it can run.

    Args:
        name: a word for tables and errors, such as `"gpipe"`.
        num_stages: K ≥ 1.
        num_micro_batches: M ≥ 1.
        tasks: one row a device, each the tasks of that device in order. Where there are as many rows as stages, row k
            belongs to stage k; fewer rows mean that devices hold several stages.

    Raises:
        ScheduleError: `num_stages` or `num_micro_batches` is not a whole number of at least 1.

    Example:
        >>> print(Schedule.gpipe(num_stages=2, num_micro_batches=2))
        gpipe: 2 stages, 2 micro-batches, 9 ticks, bubble 33.3 %
        tick      0  1  2  3  4  5  6  7  8
        stage 0  F0 F1  .  .  . B1 B1 B0 B0
        stage 1   . F0 F1 B1 B1 B0 B0  .  .
    """

    name: str
    num_stages: int
    num_micro_batches: int
    tasks: Rows

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_stages", _count("num_stages", self.num_stages))
        object.__setattr__(self, "num_micro_batches", _count("num_micro_batches", self.num_micro_batches))
        object.__setattr__(self, "tasks", tuple(tuple(Task(*task) for task in row) for row in self.tasks))

    @classmethod
    def gpipe(cls, num_stages: int, num_micro_batches: int) -> Schedule:
        """GPipe's schedule: every forward task, then every backward task, the last micro-batch first.

        Going backward in reverse order, the last stage turns round without waiting, and the micro-batch whose
        activations are still held is the one that is needed next.

        Args:
            num_stages: K ≥ 1.
            num_micro_batches: M ≥ 1.

        Returns:
            A valid schedule with one device a stage and a bubble of (K−1)/(M+K−1).

        Raises:
            ScheduleError: an argument is not a whole number of at least 1.

        Example:
            >>> print(Schedule.gpipe(1, 2).to_text())
            # gpipe
            0F0,0F1,0B1,0B0

        Reference: Huang et al. 2019, GPipe, section 2 (arXiv:1811.06965).
        """
        order = range(_count("num_micro_batches", num_micro_batches))
        rows = tuple(
            (*(Task("forward", k, m) for m in order), *(Task("backward", k, m) for m in reversed(order)))
            for k in range(_count("num_stages", num_stages))
        )
        return cls("gpipe", num_stages, num_micro_batches, rows)

    @property
    def num_devices(self) -> int:
        """Number of rows: K, or fewer where devices hold several stages."""
        return len(self.tasks)

    @property
    def row_word(self) -> str:
        """What a row of a table or picture is: `"stage"`, or `"device"` where devices hold several stages."""
        return "stage" if self.num_devices == self.num_stages else "device"

    @property
    def heading(self) -> str:
        """Name and size in one line."""
        stages = _plural(self.num_stages, "stage")
        return f"{self.name}: {stages}, {_plural(self.num_micro_batches, 'micro-batch', 'es')}"

    def validate(self) -> None:
        """Checks that every task runs exactly once, on its stage's device, and that no device waits for ever.

        Raises:
            ScheduleError: the schedule cannot run. The message names the place and shows it in the grid of tasks.

        Example:
            >>> Schedule.gpipe(4, 8).validate()
        """
        check_complete(self.tasks, self.num_stages, self.num_micro_batches)
        start_ticks(self.tasks, self.num_stages, lambda task: 1)

    def simulate(
        self,
        forward_ticks: int | Sequence[int] = 1,
        backward_ticks: int | Sequence[int] = 2,
        *,
        remat: Remat = "never",
    ) -> Simulation:
        """Times the schedule: each device runs its row in order, each task as soon as what it needs is there.

        Transfers take no time, and nothing but its own row and its needs holds a task up.

        Args:
            forward_ticks: length of a forward task in ticks, one whole number ≥ 1 or one a stage.
            backward_ticks: likewise of a backward task without its recomputation. A backward pass costs about two
                forward passes, hence the default.
            remat: which micro-batches recompute their activations, as in the strategy: `"always"`, `"except_last"` or
                `"never"`. The recomputation comes first in the backward task, and takes as long as the forward task.

        Returns:
            The start of every task, and what follows from it.

        Raises:
            ScheduleError: the schedule is not valid, a length is not a whole number of at least 1, or `remat` is
                another word.

        Example:
            >>> simulation = Schedule.gpipe(2, 3).simulate()
            >>> simulation.num_ticks, simulation.bubble
            (12, 0.25)
            >>> print(Schedule.gpipe(2, 2).simulate(remat="except_last"))
            gpipe: 2 stages, 2 micro-batches, 11 ticks, bubble 36.4 %, remat except_last
            tick      0  1  2  3  4  5  6  7  8  9 10
            stage 0  F0 F1  .  .  . B1 B1  . R0 B0 B0
            stage 1   . F0 F1 B1 B1 R0 B0 B0  .  .  .
        """
        forward = _ticks("forward_ticks", forward_ticks, self.num_stages)
        backward = _ticks("backward_ticks", backward_ticks, self.num_stages)
        check_remat(remat)
        check_complete(self.tasks, self.num_stages, self.num_micro_batches)
        untimed = Simulation(self, forward, backward, (), remat)
        return replace(untimed, starts=start_ticks(self.tasks, self.num_stages, untimed.ticks))

    def order(self) -> tuple[Task, ...]:
        """All tasks in one sequence, sorted by start tick and then stage: the order in which the engine emits them.

        Returns:
            Every task once, each after all that it needs.

        Raises:
            ScheduleError: the schedule is not valid.

        Example:
            >>> " ".join(map(str, Schedule.gpipe(2, 2).order()))
            '0F0 0F1 1F0 1F1 1B1 0B1 1B0 0B0'
        """
        start = self.simulate().start()
        return tuple(sorted(start, key=lambda task: (start[task], task.stage)))

    def to_text(self) -> str:
        """Writes the schedule as text: a line `# name`, then one row a device.

        Returns:
            Text that `from_text` reads back to an equal schedule.

        Example:
            >>> Schedule.gpipe(2, 1).to_text().splitlines()
            ['# gpipe', '0F0,0B0', '1F0,1B0']
        """
        return "\n".join([f"# {self.name}", *(",".join(map(str, row)) for row in self.tasks)])

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads a schedule from its text form and validates it.

        Args:
            text: one row a device, tasks separated by commas; empty lines are skipped, and a line that starts with
                `#` gives the name (default `"custom"`). K and M follow from the highest indices.

        Returns:
            The schedule.

        Raises:
            ScheduleError: a task cannot be read, there is none, or the schedule is not valid.

        Example:
            >>> Schedule.from_text("0F0, 0B0")
            Schedule('custom', num_stages=1, num_micro_batches=1)
        """
        name = "custom"
        rows = []
        for line in filter(None, map(str.strip, text.splitlines())):
            if line.startswith("#"):
                name = line[1:].strip()
            else:
                rows.append(tuple(map(Task.parse, line.split(","))))
        if not rows:
            raise ScheduleError(
                "The text of a schedule has one row of tasks a device; received no row. "
                "Write, for example, '0F0,0F1,0B1,0B0'."
            )
        every = [task for row in rows for task in row]
        num_stages = 1 + max(task.stage for task in every)
        num_micro_batches = 1 + max(task.micro_batch for task in every)
        schedule = cls(name, num_stages, num_micro_batches, tuple(rows))
        schedule.validate()
        return schedule

    def __str__(self) -> str:
        try:
            return str(self.simulate())
        except ScheduleError as error:  # A picture of a schedule that cannot run is the one that shows why.
            return str(error)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, num_stages={self.num_stages}, num_micro_batches={self.num_micro_batches})"


@dataclass(frozen=True, slots=True)
class Simulation:
    """A schedule with the start tick of each of its tasks; `Schedule.simulate` makes one.

    `str` draws it: devices down, ticks across, in each cell the task that runs then (repeated while it lasts), or `.`
    where the device is idle. `R` stands for the recomputation with which a backward task begins.

    Args:
        schedule: the schedule.
        forward_ticks: length of a forward task of each stage, in ticks.
        backward_ticks: likewise of a backward task without its recomputation.
        starts: start ticks, row by row as in `schedule.tasks`.
        remat: which micro-batches recompute their activations.

    Example:
        >>> Schedule.gpipe(4, 4).simulate().max_live
        (4, 4, 4, 4)
    """

    schedule: Schedule
    forward_ticks: tuple[int, ...]
    backward_ticks: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    remat: Remat = "never"

    def start(self) -> dict[Task, int]:
        """Maps each task to the tick in which it starts.

        Returns:
            A new dictionary, device by device in the order of the rows.

        Example:
            >>> Schedule.gpipe(2, 2).simulate().start()[Task("backward", 1, 1)]
            3
        """
        rows = zip(self.schedule.tasks, self.starts, strict=True)
        return {task: start for row, starts in rows for task, start in zip(row, starts, strict=True)}

    def ticks(self, task: Task) -> int:
        """Tells how many ticks a task takes.

        Args:
            task: a task of the schedule.

        Returns:
            Its length in ticks, with its recomputation.

        Example:
            >>> Schedule.gpipe(2, 2).simulate().ticks(Task("backward", 0, 0))
            2
        """
        own = (self.forward_ticks if task.kind == "forward" else self.backward_ticks)[task.stage]
        return own + self.recompute_ticks(task)

    def recompute_ticks(self, task: Task) -> int:
        """Tells how many ticks of a task, its first ones, recompute activations.

        Args:
            task: a task of the schedule.

        Returns:
            The forward ticks of its stage; 0 for a forward task, and where `remat` keeps the activations.

        Example:
            >>> simulation = Schedule.gpipe(2, 2).simulate(remat="except_last")
            >>> [simulation.recompute_ticks(Task("backward", 0, m)) for m in range(2)]
            [1, 0]
        """
        again = recomputes(task, self.remat, self.schedule.num_micro_batches)
        return self.forward_ticks[task.stage] if again else 0

    @property
    def num_ticks(self) -> int:
        """Length of the whole schedule: the tick after the last busy one."""
        return max(start + self.ticks(task) for task, start in self.start().items())

    @property
    def bubble(self) -> float:
        """Idle share of all devices' ticks, from 0 to below 1; (K−1)/(M+K−1) for GPipe with equal stages."""
        busy = sum(map(self.ticks, self.start()))
        return 1 - busy / (self.num_ticks * self.schedule.num_devices)

    @property
    def max_live(self) -> tuple[int, ...]:
        """For each stage, the most micro-batches that are forward but not yet backward at one time."""
        live = [0] * self.schedule.num_stages
        most = list(live)
        for row in self.schedule.tasks:
            for task in row:
                live[task.stage] += 1 if task.kind == "forward" else -1
                most[task.stage] = max(most[task.stage], live[task.stage])
        return tuple(most)

    @property
    def title(self) -> str:
        """Size, length and bubble in one line."""
        remat = "" if self.remat == "never" else f", remat {self.remat}"
        ticks = _plural(self.num_ticks, "tick")
        return f"{self.schedule.heading}, {ticks}, bubble {100 * self.bubble:.1f} %{remat}"

    def __str__(self) -> str:
        schedule, num_ticks = self.schedule, self.num_ticks
        one_stage_a_row = schedule.row_word == "stage"
        grid = [["."] * num_ticks for _ in schedule.tasks]
        for cells, row, starts in zip(grid, schedule.tasks, self.starts, strict=True):
            for task, start in zip(row, starts, strict=True):
                again = self.recompute_ticks(task)
                letters = "R" * again + LETTERS[task.kind] * (self.ticks(task) - again)
                stage = "" if one_stage_a_row else str(task.stage)
                cells[start : start + len(letters)] = [f"{stage}{letter}{task.micro_batch}" for letter in letters]
        return "\n".join([self.title, *table("tick", schedule.row_word, [list(map(str, range(num_ticks))), *grid])])


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{ending if count != 1 else ''}"


def _count(name: str, value: int) -> int:
    """Returns `value` as an int of at least 1, or raises a `ScheduleError` that names it."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ScheduleError(f"{name} must be a whole number of at least 1; received {value!r}. Pass, say, {name}=4.")
    return count


def _ticks(name: str, value: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Returns one length a stage from one for all of them or one for each."""
    if not isinstance(value, Sequence):
        return (_count(name, value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(
            f"{name} must be one whole number, or one for each of the {num_stages} stages; received {len(value)} "
            f"numbers, {list(value)}. Pass {num_stages} of them."
        )
    return tuple(_count(f"{name}[{k}]", ticks) for k, ticks in enumerate(value))
