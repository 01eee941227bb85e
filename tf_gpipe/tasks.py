"""Tasks, and rows of tasks: the checks, the start times and the grid that `schedule.py` builds on.

A row is what one device does, in order; everything here works on rows alone, so that an invalid schedule can be
checked, and its error can show it, before there is anything that could be drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from tf_gpipe.errors import ScheduleError

__all__ = [
    "LETTERS",
    "REMAT_MODES",
    "Kind",
    "Remat",
    "Rows",
    "Task",
    "check_complete",
    "check_remat",
    "recomputed_share",
    "recomputes",
    "start_ticks",
    "table",
]

Kind = Literal["forward", "backward"]
Remat = Literal["always", "except_last", "never"]

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B"}
REMAT_MODES: tuple[Remat, ...] = ("always", "except_last", "never")
_KINDS: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}
_TASK_TEXT = re.compile(r"\s*(\d+)([FB])(\d+)\s*", re.ASCII)
_PICTURE_MARGIN = 6  # Cells that an error shows on either side of the failing ones.


class Task(NamedTuple):
    """One stage working on one micro-batch, forward or backward.

    Args:
        kind: `"forward"` or `"backward"`.
        stage: index k of the stage, from 0.
        micro_batch: index m of the micro-batch, from 0.

    Example:
        >>> str(Task("forward", 2, 0))
        '2F0'
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Reads the text form of a task: the inverse of `str`.

        Args:
            text: stage, `F` or `B`, micro-batch; spaces around it are allowed.

        Returns:
            The task.

        Raises:
            ScheduleError: the text has another form.

        Example:
            >>> Task.parse("2B0")
            Task(kind='backward', stage=2, micro_batch=0)
        """
        match = _TASK_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"A task is written as stage, F or B, and micro-batch, such as '2F0' or '2B0'; received {text!r}. "
                "Separate tasks by single commas, one row a device."
            )
        stage, letter, micro_batch = match.groups()
        return cls(_KINDS[letter], int(stage), int(micro_batch))

    def needs(self, num_stages: int) -> tuple[Task, ...]:
        """Tells which tasks must have finished before this one can start.

        A forward task needs the stage before it; a backward task needs its own forward task, whose activations it
        reads, and the gradient of the stage after it.

        Args:
            num_stages: K.

        Returns:
            No, one or two tasks, all of the same micro-batch.

        Example:
            >>> [str(task) for task in Task("backward", 1, 0).needs(num_stages=3)]
            ['1F0', '2B0']
        """
        if self.kind == "forward":
            return (self._replace(stage=self.stage - 1),) if self.stage > 0 else ()
        own = self._replace(kind="forward")
        return (own, self._replace(stage=self.stage + 1)) if self.stage < num_stages - 1 else (own,)


Rows = tuple[tuple[Task, ...], ...]
"""The tasks of each device, in order."""


def recomputes(task: Task, remat: Remat, num_micro_batches: int) -> bool:
    """Tells whether a task recomputes activations before it goes backward."""
    if task.kind == "forward" or remat == "never":
        return False
    return remat == "always" or task.micro_batch < num_micro_batches - 1


def recomputed_share(remat: Remat, num_micro_batches: int) -> float:
    """The share of the micro-batches that recompute their activations."""
    tasks = [Task("backward", 0, m) for m in range(num_micro_batches)]
    return sum(recomputes(task, remat, num_micro_batches) for task in tasks) / num_micro_batches


def check_remat(remat: str) -> None:
    """Raises a `ScheduleError` unless the word is one of `REMAT_MODES`."""
    if remat not in REMAT_MODES:
        words = ", ".join(map(repr, REMAT_MODES))
        raise ScheduleError(f"remat must be one of {words}; received {remat!r}. Pass the one that the strategy has.")


def check_complete(rows: Rows, num_stages: int, num_micro_batches: int) -> None:
    """Raises a `ScheduleError` unless every task of K × M × {forward, backward} stands once, on its stage's device."""
    if len(rows) > num_stages:
        raise ScheduleError(
            f"The schedule cannot run: expected at most one row a stage, {num_stages}, received {len(rows)} rows. "
            "Take out those without a stage."
        )
    device_of = {k: k for k in range(num_stages)} if len(rows) == num_stages else {}
    seen: dict[Task, tuple[int, int]] = {}
    for d, row in enumerate(rows):
        for position, task in enumerate(row):
            here = (d, position)
            if not _known(task, num_stages, num_micro_batches):
                raise _invalid(
                    rows,
                    f"expected stages 0 to {num_stages - 1} and micro-batches 0 to {num_micro_batches - 1}, received "
                    f"{tuple(task)!r} on device {d}. Take it out, or raise num_stages or num_micro_batches.",
                    [here],
                )
            if task in seen:
                raise _invalid(
                    rows, f"expected {task} once, received it twice. Take one of them out.", [seen[task], here]
                )
            home = device_of.setdefault(task.stage, d)
            if home != d:
                raise _invalid(
                    rows,
                    f"expected {task} on device {home}, where stage {task.stage} lives, received it on device {d}. "
                    f"Move it to row {home}.",
                    [here],
                )
            seen[task] = here
    for task in _every_task(num_stages, num_micro_batches):
        if task not in seen:
            home = device_of.get(task.stage, 0)
            place = [(home, len(rows[home]))] if rows else []
            raise _invalid(rows, f"expected {task} once, received it nowhere. Add it to row {home}.", place)


def _known(task: Task, num_stages: int, num_micro_batches: int) -> bool:
    return task.kind in LETTERS and task.stage in range(num_stages) and task.micro_batch in range(num_micro_batches)


def _every_task(num_stages: int, num_micro_batches: int) -> Iterable[Task]:
    return (Task(kind, k, m) for k in range(num_stages) for kind in LETTERS for m in range(num_micro_batches))


def start_ticks(rows: Rows, num_stages: int, ticks: Callable[[Task], int]) -> tuple[tuple[int, ...], ...]:
    """Starts each task when its device is free and its needs have finished; raises a `ScheduleError` on a deadlock.

    `ticks` gives the length of a task.
    """
    end: dict[Task, int] = {}
    starts: list[list[int]] = [[] for _ in rows]
    free = [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for d, row in enumerate(rows):
            for task in row[len(starts[d]) :]:
                needs = task.needs(num_stages)
                if any(need not in end for need in needs):
                    break
                start = max([free[d], *(end[need] for need in needs)])
                starts[d].append(start)
                end[task] = free[d] = start + ticks(task)
                progress = True
    stuck = [(d, len(done)) for d, done in enumerate(starts) if len(done) < len(rows[d])]
    if stuck:
        waits = []
        for d, position in stuck:
            task = rows[d][position]
            missing = next(need for need in task.needs(num_stages) if need not in end)
            waits.append(f"device {d} at {task} for {missing}")
        raise _invalid(
            rows,
            "expected every device to reach the end of its row, received a deadlock: each waits for another task, "
            f"{', '.join(waits)}. Put what is waited for earlier in its row.",
            stuck,
        )
    return tuple(map(tuple, starts))


def _invalid(rows: Rows, text: str, failing: Sequence[tuple[int, int]]) -> ScheduleError:
    """Makes the error: what is wrong, then the grid of tasks around it, each failing (row, position) in brackets."""
    message = f"The schedule cannot run: {text}"
    if not failing:
        return ScheduleError(message)
    positions = [position for _, position in failing]
    first, last = max(0, min(positions) - _PICTURE_MARGIN), max(positions) + _PICTURE_MARGIN
    length = max([max(positions) + 1, *map(len, rows)])
    columns = range(first, min(last + 1, length))
    grid = [list(map(str, columns))]
    for d, row in enumerate(rows):
        cells = [_text(row[position]) if position < len(row) else "" for position in columns]
        for position in (position for row_index, position in failing if row_index == d):
            cells[position - first] = f"[{cells[position - first] or '?'}]"
        grid.append(cells)
    lines = table("place", "device", grid)
    marked = {d for d, _ in failing}
    lines = [f"{line}  <-- here" if d in marked else line.rstrip() for d, line in enumerate(lines, start=-1)]
    return ScheduleError("\n".join([message, *lines]))


def _text(task: Task) -> str:
    """Text of a task whose fields may be anything."""
    return f"{task.stage}{LETTERS.get(task.kind, '?')}{task.micro_batch}"


def table(corner: str, word: str, grid: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a right-aligned grid whose first row is the heading and whose other rows are numbered from 0."""
    labels = [corner, *(f"{word} {index}" for index in range(len(grid) - 1))]
    margin = max(map(len, labels))
    width = max(len(cell) for row in grid for cell in row)
    return [
        f"{label:<{margin}}  {' '.join(cell.rjust(width) for cell in row)}"
        for label, row in zip(labels, grid, strict=True)
    ]
