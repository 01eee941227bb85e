"""Benchmarks of what grows: the first step, memory, and time against the number of stages, micro-batches and layers."""

import functools
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from common import (
    MIB,
    NARROW,
    THREAD_PER_STAGE,
    TWO_CORES,
    Options,
    Report,
    Row,
    both_cores,
    interleaved,
    maker,
    settings,
)

# TensorFlow's own allocator keeps what was freed; with these, the resident size is what is in use.
HONEST_MEMORY = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}


def startup(options: Options) -> Report:
    """The first step of a deep Transformer, with all tracing, and what a second and a third size of batch trace."""
    sizes = settings("transformer", options.quick, **NARROW)
    counts = options.pick((8, 32, 128), (4,))
    stages = options.pick(8, 2)
    variants = {"plain Keras": {}}
    for remat in options.pick(("always", "except_last"), ("always",)):
        for m in counts:
            variants[f"K={stages} M={m} {remat}"] = {"stages": stages, "micro_batches": m, "remat": remat}
    best: dict[str, dict] = {}
    for _ in range(options.repeats):
        for name, more in variants.items():
            with maker(options, "transformer", both_cores(more), sizes=sizes, steps=1, **more)() as worker:
                seen = {**worker.first, "later": worker.measure()["seconds"]}
                if more.get("micro_batches", counts[0]) == counts[0]:  # each size is one more first step
                    for size in (2, 3):
                        seen[f"size {size}"] = worker.measure(rows=sizes["rows"] + 1 - size)["traces"]
                seen |= worker.measure(graph=True)
            if name not in best or seen["seconds"] < best[name]["seconds"]:
                best[name] = seen
    plain = best["plain Keras"]["seconds"]
    rows = []
    for name, seen in best.items():
        fewest = best.get(f"K={stages} M={counts[0]} {name.split()[-1]}", seen)["seconds"]
        values = {"first step, s": seen["seconds"], "CPU s": seen["cpu_seconds"], "× plain": seen["seconds"] / plain}
        values |= {"× fewest M": None if name == "plain Keras" else seen["seconds"] / fewest, "later, s": seen["later"]}
        values |= {"traces": seen["traces"], "2nd size": seen.get("size 2"), "3rd size": seen.get("size 3")}
        values |= {"nodes": seen["nodes"], "constants, B": seen["constant_bytes"]}
        row = Row(name, {**values, "largest, B": seen["largest_constant_bytes"]})
        if "M=32" in name:
            row.require("× plain", "≤", 3)
        if "M=128" in name:
            row.require("× fewest M", "≤", 2)
        rows.append(row)
    title = f"First step of a {sizes['layers']}-block Transformer; traces of a layer for each size of batch"
    return Report(title, rows, lower=("first step, s", "CPU s", "× plain", "× fewest M", "nodes", "constants, B"))


def memory(options: Options) -> Report:
    """Activation memory against the paper's formula, and its growth over many steps.

    The formula N + (L/K)·(N/M) counts rows that a device keeps: the inputs of its stage for all micro-batches, and what
    its layers keep for one micro-batch. All logical devices share one process, so that K times this is compared with
    the rise of the resident size during a step. What a layer keeps for a row is taken from plain Keras's rise, and what
    a stage keeps is the boundary tensor.
    """
    stages, count = 4, 16
    changes = {"layers": 48, "width": 512, "rows": 8192, "activation": "gelu"}
    sizes = settings("dense", options.quick, **changes)
    layers, width, rows = sizes["layers"], sizes["width"], sizes["rows"]
    common = {"sizes": sizes, "steps": 1, "environment": HONEST_MEMORY}
    peaks = {}
    for remat in ("plain Keras", *options.pick(("never", "except_last"), ()), "always"):
        more = {} if remat == "plain Keras" else {"stages": stages, "micro_batches": count, "remat": remat}
        with maker(options, "dense", TWO_CORES, **common, **more)() as worker:
            runs = [worker.measure() for _ in range(options.repeats)]
            peaks[remat] = min(run["peak_bytes"] - run["resting_bytes"] for run in runs)
    boundary = stages * rows * width * 4
    formula = boundary + peaks["plain Keras"] / count
    table = [Row(name, {"MiB": peak / MIB, "× plain": peak / peaks["plain Keras"]}) for name, peak in peaks.items()]
    table[-1].values |= {"K·(N + L/K·N/M), MiB": formula / MIB, "× formula": peaks["always"] / formula}
    table[-1].require("× formula", "≤", 1.2)

    steps = options.pick(200, 20)
    small = {"layers": 8, "width": 128, "rows": 512, "activation": "gelu"}
    more = {"sizes": small, "stages": stages, "micro_batches": count, "steps": steps, "environment": HONEST_MEMORY}
    for remat in options.pick(("always", "never"), ("always",)):
        with maker(options, "dense", TWO_CORES, remat=remat, **more)() as worker:
            before, after = (worker.measure(steps=n)["resting_bytes"] for n in (steps, 1))
        row = Row(f"growth over {steps} steps, {remat}", {"MiB": (after - before) / MIB})
        table.append(row.require("MiB", "≤", 2))
    title = f"Rise of the resident size in a step: {layers} Dense({width}, gelu), {rows:,} rows, K={stages}, M={count}"
    return Report(title, table, lower=("MiB", "× plain", "× formula"))


def fits(options: Options) -> Report:
    """How large a model trains within a given memory for each device.

    Memory is that of the weights, and how far the resident size rises in a step: gradients, activations, buffers. K
    logical devices share one process, which gets K budgets, so for K > 1 it is the average over devices.
    """
    budget = options.pick(192, 12) * MIB
    width, rows, count = options.pick((128, 8192, 16), (64, 1024, 4))
    variants = {"plain Keras": (1, {})}
    for stages in options.pick((1, 2), (1,)):
        more = {"stages": stages, "micro_batches": count, "remat": "always"}
        variants[f"K={stages} M={count} always"] = (stages, more)
    table = []
    for name, (devices, more) in variants.items():

        def used(layers: int, more=more) -> int:
            sizes = {"layers": layers, "width": width, "rows": rows, "activation": "gelu"}
            common = {"sizes": sizes, "steps": 1, "environment": HONEST_MEMORY}
            with maker(options, "dense", TWO_CORES, **common, **more)() as worker:
                result = worker.measure()
                return 4 * worker.first["parameters"] + result["peak_bytes"] - result["resting_bytes"]

        layers, needed = largest(used, devices * budget, least=8, share=options.pick(0.02, 0.5))
        parameters = layers * width * (width + 1) / 1e6
        table.append(Row(name, {"layers": layers, "parameters, M": parameters, "MiB a device": needed / devices / MIB}))
    for row in table:
        row.values["× plain"] = row.values["parameters, M"] / table[0].values["parameters, M"]
    table[1].require("× plain", "≥", 3.9)
    title = f"Layers of Dense({width}, gelu) on {rows:,} rows that train within {budget // MIB} MiB a device"
    return Report(title, table, higher=("layers", "× plain"))


def largest(used: Callable[[int], int], limit: int, least: int, share: float) -> tuple[int, int]:
    """The largest n for which `used(n)` is within `limit`, to a `share` of n, and what it uses.

    A bisection that divides the interval where a straight line through the two nearest measurements crosses the limit.

    Raises:
        ValueError: not even `least` fits.
    """
    excess = {n: used(n) - limit for n in (least, 2 * least)}
    while True:
        low = max((n for n in excess if excess[n] <= 0), default=0)
        high = min((n for n in excess if excess[n] > 0), default=None)
        if not low:
            raise ValueError(f"Expected {least} layers to fit. Received: {excess[least]:,} bytes too many.")
        step = max(1, round(low * share / 2))  # so far, at least, from where it is known
        if high is not None and high - low <= max(1, low * share):
            return low, excess[low] + limit
        first, second = sorted(excess, key=lambda n: abs(excess[n]))[:2]
        slope = (excess[first] - excess[second]) / (first - second)
        guess = round(first - excess[first] / slope) if slope > 0 else 2 * low
        guess = min(max(guess, low + step), 4 * low if high is None else max(high - step, low + 1))
        excess[guess] = used(guess) - limit


def growth(options: Options) -> Report:
    """Time of a step, of the first one, and peak memory against K, M and the number of layers.

    `exponent` is p where the step's time grows as the p-th power, over the upper half of the range: 1 is linear.
    """
    base = options.pick(
        {"stages": 4, "micro_batches": 16, "layers": 32}, {"stages": 1, "micro_batches": 1, "layers": 4}
    )
    ranges = {
        "stages": options.pick([1, 2, 4, 8, 16, 32], [1, 2]),
        "micro_batches": options.pick([1, 4, 16, 64, 128, 256], [1, 2]),
        "layers": options.pick([8, 32, 128, 256, 512], [4, 8]),
    }

    @functools.cache
    def measured(stages: int, micro_batches: int, layers: int) -> dict:
        sizes = {"layers": layers, "width": 128, "rows": 512, "activation": "gelu"}
        more = {"sizes": sizes, "remat": "always", "environment": HONEST_MEMORY}
        make = maker(options, "dense", THREAD_PER_STAGE, stages=stages, micro_batches=micro_batches, **more)
        return interleaved({"": make}, options.repeats)[""]

    table = []
    for kind, values in ranges.items():
        points = []
        for value in values:
            best = measured(**{**base, kind: value})
            peak = (best["peak_bytes"] - best["first"]["bare_bytes"]) / MIB
            points.append((value, best["seconds"], best["first"]["seconds"], peak))
            figures = {"step, ms": 1e3 * best["seconds"], "first step, s": best["first"]["seconds"], "peak, MiB": peak}
            table.append(Row(f"{kind} = {value}", figures))
        upper = points[(len(points) - 1) // 2 :]
        table[-1].values["exponent"] = exponent([(value, seconds) for value, seconds, *_ in upper])
        table[-1].require("exponent", "≤", 1.1)
        if options.pictures:
            draw(options.pictures / f"benchmarks_{kind}.png", kind, points)
    fixed = ", ".join(f"{name} = {value}" for name, value in base.items())
    title = f"Growth from {fixed}: Dense(128, gelu) on 512 rows, always"
    return Report(title, table, lower=("step, ms", "peak, MiB", "first step, s"))


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of the straight line through the points, on logarithmic axes."""
    return statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


def draw(file: Path, kind: str, points: list[tuple[float, float, float, float]]) -> None:
    """Writes a picture of the points (value, seconds of a step, of the first, MiB) of `kind`, on logarithmic axes."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    x, *panels = zip(*points, strict=True)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, title, y in zip(axes, ("a step, s", "first step, s", "peak memory, MiB"), panels, strict=True):
        axis.loglog(x, y, "o-", color="tab:blue", label="measured")
        axis.loglog(x, [max(y) * value / max(x) for value in x], ":", color="grey", label="linear")
        axis.set(title=title, xlabel=f"{kind.replace('_', ' ')} (log)", ylim=(min(y) / 2, max(y) * 2))
        axis.grid(alpha=0.3)
    axes[0].legend()
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)
