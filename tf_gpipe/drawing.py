"""Pictures of schedules, plans and measured steps: as text, SVG or PNG.

Stages down and time across. Every number in a picture comes from the value that is drawn: boxes from a simulation or a
timeline, bars from a plan. The layout here makes one list of shapes, which `drawing_writers.py` writes as SVG or PNG.
Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tf_gpipe.drawing_writers import Box, Line, Picture, Text, text_width, to_png, to_svg
from tf_gpipe.errors import ArgumentError
from tf_gpipe.schedule import Schedule, Simulation
from tf_gpipe.tasks import Task
from tf_gpipe.timeline import Timeline

if TYPE_CHECKING:
    from tf_gpipe.plan import Plan

__all__ = ["draw"]

# From the palette of Okabe and Ito, told apart with any colour vision; in grey, dark, middle and light.
_FILL = {"forward": "#0072b2", "recompute": "#b3ddf2", "backward": "#e69f00", "weights": "#8a6d00"}
_INK = {"forward": "#ffffff", "recompute": "#222222", "backward": "#222222", "weights": "#ffffff"}
_FAINT = "#cccccc"

_MARGIN = 14.0
_TITLE_SIZE, _TEXT_SIZE, _AXIS_SIZE = 14.0, 12.0, 11.0
_NUMBER_SIZES = (11.0, 10.0, 9.0)
_ROW, _GAP = 24.0, 4.0  # height of a row, and between two
_UP = 0.36  # how far below the middle of a line of text its baseline is, as a part of the font size
_MIN_WIDTH, _MAX_WIDTH = 1000.0, 2400.0  # of the time axis; within them, numbers fit their boxes
_WIDE = 40.0  # the most that a forward task takes where everything fits easily
_BAR_WIDTH, _LINE = 300.0, 20.0  # of the widest bar of a plan, and the height of one with its gap
_MAX_NAME = 32  # characters of an operation's name


def draw(
    what: Schedule | Simulation | Timeline | Plan, path: str | os.PathLike[str] | None = None, *, title: str = ""
) -> str:
    """Draws a schedule, a plan or a measured step.

    Args:
        what: a `Schedule` (drawn with forward tasks of one tick and backward tasks of two), a `Simulation` of one, with
            other lengths or recomputation, a `Plan`, or a `Timeline`.
        path: where to write the picture. The ending says in which form: `.svg`, `.png` (with Matplotlib, the extra
            `draw`), or `.txt`. Without a path, nothing is written.
        title: what stands over the SVG or PNG, instead of a line that gives the size and the bubble. A long one is
            broken into lines.

    Returns:
        The text form, which is `str(what)`.

    Raises:
        ArgumentError: `what` is something else, the path has another ending or its directory does not exist, the title
            is no string, or Matplotlib is missing for a PNG.
        ScheduleError: the schedule cannot run.

    Example:
        >>> print(draw(Schedule.gpipe(2, 2).simulate(remat="always")))
        gpipe: 2 stages, 2 micro-batches, 12 ticks, bubble 33.3 %, remat always
        tick      0  1  2  3  4  5  6  7  8  9 10 11
        stage 0  F0 F1  .  .  .  . R1 B1 B1 R0 B0 B0
        stage 1   . F0 F1 R1 B1 B1 R0 B0 B0  .  .  .
    """
    shown = what.simulate() if isinstance(what, Schedule) else what
    if not isinstance(shown, (Simulation, Timeline)) and not hasattr(shown, "stages"):
        raise ArgumentError(
            f"Expected a Schedule, Simulation, Plan or Timeline to draw; received {type(what).__name__}. Pass, for "
            "example, Schedule.gpipe(4, 8) or strategy.plan(model)."
        )
    if not isinstance(title, str):
        raise ArgumentError(f"Expected `title` to be a string; received {title!r}. Write, for example, title='Step 9'.")
    text = str(shown)
    if path is None:
        return text
    ending = _ending(path)
    if ending == ".txt":
        Path(path).write_text(text + "\n", encoding="utf-8")
        return text
    title = " ".join(title.split())
    if isinstance(shown, (Simulation, Timeline)):
        picture = _grid_picture(_grid(shown), title)
    else:
        picture = _plan_picture(shown, title)
    if ending == ".svg":
        Path(path).write_text(to_svg(picture) + "\n", encoding="utf-8")
    else:
        to_png(picture, path)
    return text


def _ending(path: str | os.PathLike[str]) -> str:
    """The form in which to write, once the path is found to be one that can be written to."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"Expected `path` to be a string or a path object; received {path!r}. Write, for example, 'pipeline.svg'."
        )
    name = os.fspath(path)
    ending = next((ending for ending in (".svg", ".png", ".txt") if name.lower().endswith(ending)), "")
    if not ending:
        raise ArgumentError(
            f"Expected a path that ends with '.svg', '.png' or '.txt'; received {name!r}. Write, for example, "
            "'pipeline.svg'."
        )
    folder = Path(path).parent
    if not folder.is_dir():
        raise ArgumentError(
            f"Expected a path in a directory that exists; received {name!r}. Make it first: "
            f"os.makedirs({str(folder)!r}, exist_ok=True)."
        )
    return ending


class _Bar(NamedTuple):
    """A part of a row: a whole task, or the recomputation or the rest of one."""

    row: int
    kind: str
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class _Grid:
    """Rows of bars over a time axis: what a simulation and a timeline have in common."""

    title: str
    row_word: str
    num_rows: int
    bars: list[_Bar]
    end: float
    unit: str


def _grid(shown: Simulation | Timeline) -> _Grid:
    bars: list[_Bar] = []
    times: dict[Task, tuple[float, float, float]]  # start, recomputation, whole length
    if isinstance(shown, Simulation):
        starts = shown.start()
        times = {task: (start, shown.recompute_ticks(task), shown.ticks(task)) for task, start in starts.items()}
        title, end, unit = shown.title, float(shown.num_ticks), "ticks"
    else:
        tasks = [event.task for event in shown.events]
        times = {task: _milliseconds(shown, task) for task in tasks}
        title, end, unit = f"{shown.title}, bubble {100 * shown.shares.bubble:.1f} %", 1e3 * shown.duration, "ms"
    for d, row in enumerate(shown.schedule.tasks):
        for task in row:
            start, again, length = times[task]
            if again:
                bars.append(_Bar(d, "recompute", task, start, start + again))
            if length > again:
                bars.append(_Bar(d, task.kind, task, start + again, start + length))
        if isinstance(shown, Timeline) and shown.weights:
            bars.append(_Bar(d, "weights", row[-1], *(1e3 * (time - shown.begin) for time in shown.weights[d])))
    return _Grid(title, shown.schedule.row_word, shown.schedule.num_devices, bars, end, unit)


def _milliseconds(timeline: Timeline, task: Task) -> tuple[float, float, float]:
    """Start from the beginning of the step, recomputation and whole length of a task, in ms."""
    event = timeline.event(task)
    return 1e3 * (event.start - timeline.begin), 1e3 * timeline.recompute(task), 1e3 * (event.end - event.start)


def _grid_picture(grid: _Grid, title: str) -> Picture:
    title = title or grid.title
    names = [f"{grid.row_word} {d}" for d in range(grid.num_rows)]
    numbers = {bar.task: str(bar.task.micro_batch if grid.row_word == "stage" else bar.task) for bar in grid.bars}
    pixels, size = _scale(grid, max(map(len, numbers.values())))
    left = _MARGIN + max(text_width(name, _TEXT_SIZE) for name in names)
    heading = _heading(title, left + grid.end * pixels)
    top = heading[-1].y + _TITLE_SIZE + 20
    shapes: list[Box | Text | Line] = [*heading, *_legend(grid, heading)]
    for d, name in enumerate(names):
        y = top + d * (_ROW + _GAP)
        shapes.append(Text(left - 6, y + _ROW / 2 + _UP * _TEXT_SIZE, name, _TEXT_SIZE, "end"))
        shapes.append(Box(left, y, grid.end * pixels, _ROW, "#ffffff", _FAINT, "row"))
    for bar in grid.bars:
        x, y, width = left + bar.start * pixels, top + bar.row * (_ROW + _GAP), (bar.end - bar.start) * pixels
        edge = "#ffffff" if width > 4 else ""  # a white edge would cover a narrow box
        shapes.append(Box(x, y, width, _ROW, _FILL[bar.kind], edge, bar.kind, _label(bar, grid.unit)))
        if bar.kind != "weights" and text_width(numbers[bar.task], size) < width:
            place = x + width / 2, y + _ROW / 2 + _UP * size
            shapes.append(Text(*place, numbers[bar.task], size, "middle", _INK[bar.kind]))
    bottom = top + grid.num_rows * (_ROW + _GAP)
    shapes += _axis(grid, left, bottom, pixels)
    width = max(left + grid.end * pixels + 2 * _MARGIN, *map(_right, shapes)) + _MARGIN
    description = (
        f"{grid.row_word.capitalize()}s from top to bottom, time in {grid.unit} from left to right. Boxes are tasks, "
        f"numbered by micro-batch: {', '.join(_kinds(grid))}. A {grid.row_word} is idle where it is blank."
    )
    return Picture(math.ceil(width), math.ceil(bottom + 22 + _MARGIN), title, description, tuple(shapes))


def _scale(grid: _Grid, characters: int) -> tuple[float, float]:
    """Pixels in a unit of time, and the font size of the numbers, so that these fit a usual forward task."""
    lengths = sorted(bar.end - bar.start for bar in grid.bars if bar.kind == "forward")
    usual = lengths[len(lengths) // 2] or grid.end
    widths = [text_width("0" * characters, size) + 3.5 for size in _NUMBER_SIZES]
    wanted = max(widths[-1] * grid.end / usual, min(_MIN_WIDTH, _WIDE * grid.end / usual))
    pixels = min(wanted, _MAX_WIDTH) / grid.end
    fitting = [size for size, width in zip(_NUMBER_SIZES, widths, strict=True) if width <= usual * pixels]
    return pixels, max(fitting, default=_NUMBER_SIZES[-1])


def _kinds(grid: _Grid) -> list[str]:
    present = {bar.kind for bar in grid.bars}
    return [kind for kind in _FILL if kind in present]


def _label(bar: _Bar, unit: str) -> str:
    times = f"{bar.start:.6g} to {bar.end:.6g} {unit}"
    which = "" if bar.kind == "weights" else f", micro-batch {bar.task.micro_batch}"
    return f"stage {bar.task.stage}{which}: {bar.kind}, {times}"


def _heading(title: str, width: float) -> list[Text]:
    """The title, in lines that are not much wider than the rest of the picture, or than what is easily read."""
    average = text_width(title, _TITLE_SIZE, bold=True) / len(title)
    lines = textwrap.wrap(title, int(max(width, _MIN_WIDTH) / average))
    first, height = _MARGIN + _TITLE_SIZE, _TITLE_SIZE + 4
    return [Text(_MARGIN, first + i * height, line, _TITLE_SIZE, bold=True) for i, line in enumerate(lines)]


def _legend(grid: _Grid, heading: Sequence[Text]) -> list[Box | Text | Line]:
    return _swatches([*((kind, _FILL[kind]) for kind in _kinds(grid)), ("idle", "#ffffff")], heading)


def _swatches(entries: Sequence[tuple[str, str]], heading: Sequence[Text]) -> list[Box | Text | Line]:
    """The legend: a coloured square and a word for each entry, in one line under the title."""
    shapes: list[Box | Text | Line] = []
    x, baseline = _MARGIN, heading[-1].y + _TITLE_SIZE + 8
    for word, fill in entries:
        shapes.append(Box(x, baseline - 10, 12, 12, fill, "#888888", "legend"))
        shapes.append(Text(x + 18, baseline, word, _TEXT_SIZE))
        x += 18 + text_width(word, _TEXT_SIZE) + 16
    return shapes


def _axis(grid: _Grid, left: float, y: float, pixels: float) -> list[Box | Text | Line]:
    """The time axis: a line with round numbers, far enough apart to be read."""
    longest = text_width(f"{grid.end:.0f}.00", _AXIS_SIZE)
    step = _round_up(1.3 * longest / pixels)
    step = max(1.0, step) if grid.unit == "ticks" else step
    decimals = max(0, -math.floor(math.log10(step)))
    baseline = y + 6 + _AXIS_SIZE
    shapes: list[Box | Text | Line] = [Line(left, y, left + grid.end * pixels, y)]
    beside = left - 6 - text_width(f"{0:.{decimals}f}", _AXIS_SIZE) / 2
    shapes.append(Text(beside, baseline, grid.unit, _AXIS_SIZE, "end"))
    for index in range(math.floor(grid.end / step) + 1):
        x = left + index * step * pixels
        shapes.append(Line(x, y, x, y + 4))
        shapes.append(Text(x, baseline, f"{index * step:.{decimals}f}", _AXIS_SIZE, "middle"))
    return shapes


def _round_up(value: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _right(shape: Box | Text | Line) -> float:
    """Where a shape ends on the right; for a text that is anchored there or in its middle, its anchor."""
    if isinstance(shape, Box):
        return shape.x + shape.width
    if isinstance(shape, Line):
        return max(shape.x1, shape.x2)
    return shape.x + (text_width(shape.text, shape.size, shape.bold) if shape.anchor == "start" else 0)


def _plan_picture(plan: Plan, title: str) -> Picture:
    stages = plan.stages
    flops = [stage.work for stage in stages]
    parameters = [float(stage.parameters) for stage in stages]
    title = title or f"{len(plan.graph.steps)} operations of '{plan.graph.model.name}', balance {plan.balance:.2f}"
    devices = [_device(stage.device) for stage in stages]
    left = _MARGIN + max(text_width(text, _TEXT_SIZE) for text in ["stage 00", *devices])
    kinds = (("share of FLOPs", _FILL["forward"], flops), ("share of parameters", _FILL["backward"], parameters))
    pixels = _BAR_WIDTH / max(0.01, *(number / (sum(of) or 1.0) for _, _, of in kinds for number in of))
    right = left + _BAR_WIDTH + text_width("100.0 % of parameters", _TEXT_SIZE) + 30
    heading = _heading(title, right)
    top = heading[-1].y + _TITLE_SIZE + 24
    legend = _swatches([(name, fill) for name, fill, _ in kinds], heading)
    shapes: list[Box | Text | Line] = [*heading, *legend]
    for k, stage in enumerate(stages):
        y = top + k * (2 * _LINE + 12)
        words = ((f"stage {k}", _operations(stage.operations)), (devices[k], _received(k, stage.received_bytes)))
        for line, ((name, fill, of), (place, text)) in enumerate(zip(kinds, words, strict=True)):
            share, upper = of[k] / (sum(of) or 1.0), y + line * _LINE
            baseline = upper + (_LINE - 2) / 2 + _UP * _TEXT_SIZE
            percent = f"{100 * share:.1f} % {name.removeprefix('share ')}"
            shapes.append(
                Box(left, upper, share * pixels, _LINE - 2, fill, "", name.split()[-1].lower(), f"stage {k}: {percent}")
            )
            shapes.append(Text(left - 8, baseline, place, _TEXT_SIZE, "end", bold=not line))
            shapes.append(Text(right - 24, baseline, percent, _TEXT_SIZE, "end"))
            shapes.append(Text(right, baseline, text, _TEXT_SIZE))
    bottom = top + len(stages) * (2 * _LINE + 12)
    equal = left + pixels / len(stages)
    shapes.append(Line(equal, top - 4, equal, bottom - 6, "#888888"))
    shapes.append(Text(equal, bottom + 8, "equal shares", _AXIS_SIZE, "middle"))
    description = (
        "For each stage of the plan, its shares of FLOPs and parameters, its operations, and what it receives."
    )
    return Picture(
        math.ceil(max(map(_right, shapes)) + _MARGIN),
        math.ceil(bottom + 8 + _MARGIN),
        title,
        description,
        tuple(shapes),
    )


def _device(name: str) -> str:
    """The last part of a device's name: `CPU:1`."""
    return re.sub(r".*[/:](\w+:\d+)$", r"\1", name)


def _operations(names: Sequence[str]) -> str:
    count = f"{len(names)} operation{'s' if len(names) != 1 else ''}"
    ends = " to ".join(map(_clipped, dict.fromkeys([*names[:1], *names[-1:]])))
    return f"{count}: {ends}" if names else count


def _clipped(name: str) -> str:
    """A long name without its middle."""
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME // 2]}…{name[-_MAX_NAME // 2 :]}"


def _received(stage: int, count: float) -> str:
    if stage == 0:
        return "receives the mini-batch"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"receives {count:.3g} {unit} a row"
        count /= 1000
    return f"receives {count:.3g} GB a row"
