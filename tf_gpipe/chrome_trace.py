"""Timelines in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A trace has a slice for each task, in a row for each device, and one more row for the whole step. Viewers take times in
µs from the beginning of the step; the slices also hold the times as they were measured, and `otherData` the rest that a
timeline is made of, so that it can be read again without a loss. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_gpipe.errors import ArgumentError
from tf_gpipe.schedule import Schedule
from tf_gpipe.tasks import LETTERS, Task

if TYPE_CHECKING:
    from tf_gpipe.timeline import Timeline

_US = 1e-6  # seconds in the unit of a trace


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline; see `Timeline.to_chrome`."""
    schedule = timeline.schedule

    def slice_of(name: str, kind: str, row: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": (start - timeline.begin) / _US, "dur": (end - start) / _US}
        return {"ph": "X", "pid": 0, "tid": row, "name": name, "cat": kind, **times, "args": args}

    names = [f"{schedule.row_word} {d}" for d in range(schedule.num_devices)]
    trace: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "tf_gpipe"}}]
    for d, name in enumerate([*names, "step"]):
        trace.append({"ph": "M", "pid": 0, "tid": d, "name": "thread_name", "args": {"name": name}})
        trace.append({"ph": "M", "pid": 0, "tid": d, "name": "thread_sort_index", "args": {"sort_index": d}})
    trace.append(slice_of("step", "step", len(names), timeline.begin, timeline.end, {}))
    for d, row in enumerate(schedule.tasks):
        for kind, stage, m in row:
            task = Task(kind, stage, m)
            _, ready, start, end, part = timeline.event(task)
            args = {"task": str(task), "stage": stage, "micro_batch": m, "ready": ready, "start": start, "end": end}
            if part is not None:
                args["recomputed"] = part
            trace.append(slice_of(f"{LETTERS[kind]}{m}", kind, d, start, end, args))
            if again := timeline.recompute(task):
                trace.append(slice_of(f"R{m}", "recompute", d, start, start + again, {"stage": stage}))
    trace += [slice_of("W", "weights", d, start, end, {}) for d, (start, end) in enumerate(timeline.weights)]
    other = {"schedule": schedule.to_text(), "remat": timeline.remat, "begin": timeline.begin, "end": timeline.end}
    other["weights"] = timeline.weights
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": other}


def save(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes the trace of a timeline to a file; see `Timeline.save`."""
    if Path(path).suffix != ".json":
        raise ArgumentError(
            f"A timeline is saved as a Chrome trace: expected a path that ends with '.json'; received "
            f"{os.fspath(path)!r}. Use tf_gpipe.draw for a picture."
        )
    Path(path).write_text(json.dumps(trace_of(timeline)), encoding="utf-8")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of the timeline whose trace is in a file; its events are tuples. See `Timeline.load`."""
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
        other = trace["otherData"]
        found = [event["args"] for event in trace["traceEvents"] if "task" in event.get("args", {})]
        return {
            "schedule": Schedule.from_text(other["schedule"]),
            "events": tuple(
                (Task.parse(e["task"]), e["ready"], e["start"], e["end"], e.get("recomputed")) for e in found
            ),
            "begin": other["begin"],
            "end": other["end"],
            "remat": other["remat"],
            "weights": tuple((start, end) for start, end in other.get("weights", ())),
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(
            f"Expected a trace that Timeline.save has written; received {os.fspath(path)!r}, which is another "
            f"({error!r}). Save the timeline again."
        ) from error
