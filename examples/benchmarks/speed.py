"""The time of a step: against one core, plain Keras and PyTorch; of a task; with a slow input; with XLA."""

import itertools

from common import (
    NARROW,
    ONE_CORE,
    THREAD_PER_STAGE,
    TWO_CORES,
    Options,
    Report,
    Row,
    Worker,
    both_cores,
    interleaved,
    maker,
    settings,
)

MODELS = ("dense", "transformer", "amoebanet")
QUICK_MODELS = ("dense",)


def efficiency(options: Options) -> Report:
    """K = 2 on two cores against the same micro-batches, one stage, on one core.

    The bound of the speed-up is 2·M / (M + 1): two devices, without the bubble. `× CPU` is how much more processor time
    the same tasks take when two cores work at once.
    """
    rows = []
    for model in options.pick(MODELS, QUICK_MODELS):
        for remat in options.pick(("always", "never"), ("always",)):
            for count in options.pick((8, 32), (4,)):
                more = {"micro_batches": count, "remat": remat}
                makers = {
                    "one": maker(options, model, ONE_CORE, stages=1, **more),
                    "two": maker(options, model, THREAD_PER_STAGE, stages=2, **more),
                }
                best = interleaved(makers, options.repeats)
                one, two = best["one"]["seconds"], best["two"]["seconds"]
                share = one / two / (2 * count / (count + 1))
                values = {"K=1, s": one, "K=2, s": two, "speed-up": one / two, "share of bound": share}
                values["× CPU"] = best["two"]["cpu_seconds"] / best["one"]["cpu_seconds"]
                values["balance"] = best["two"]["first"]["balance"]
                rows.append(Row(f"{model} {remat} M={count}", values).require("share of bound", "≥", 0.95))
    title = "Two stages on two cores against one stage on one core, the same micro-batches"
    return Report(title, rows, lower=("K=1, s", "K=2, s"), higher=("speed-up", "share of bound"))


def overhead(options: Options) -> Report:
    """What splitting a mini-batch costs without a second device, and what a pipeline gains over plain Keras's threads.

    `always` takes a second forward pass, a third of a step more in theory. *Parts* is what the operations of the
    micro-batches take by themselves: plain Keras's gradients of one after the other on one core, thrown away, and for
    `always` their forward passes once more; for two stages half of that, and the bubble.
    """
    rows = []

    def add(name: str, plain: float, pipeline: float, parts: float, limit: float | None) -> None:
        values = {"plain, s": plain, "parts, s": parts, "pipeline, s": pipeline}
        values |= {"× parts": pipeline / parts, "× plain": pipeline / plain}
        row = Row(name, values)
        rows.append(row if limit is None else row.require("× plain", "≤", limit))

    def parts(model: str, count: int, gradients: bool):
        return maker(options, model, ONE_CORE, parts=count, gradients=gradients)

    for model in options.pick(MODELS, QUICK_MODELS):
        makers = {"plain": maker(options, model, ONE_CORE), "parts": parts(model, 8, True)}
        makers["forward"] = parts(model, 8, False)
        limits = options.pick({"never": 1.10, "always": 1.10 * 4 / 3}, {"never": 1.10})
        for remat in limits:
            makers[remat] = maker(options, model, ONE_CORE, stages=1, micro_batches=8, remat=remat)
        best = {name: result["seconds"] for name, result in interleaved(makers, options.repeats).items()}
        for remat, limit in limits.items():
            bare = best["parts"] + (best["forward"] if remat == "always" else 0)
            add(f"{model}, one core, K=1 M=8 {remat}", best["plain"], best[remat], bare, limit)
    for model, (count, limit) in itertools.product(
        options.pick(MODELS, QUICK_MODELS), options.pick(((8, None), (32, 1 / 0.95)), ((4, 1 / 0.95),))
    ):
        makers = {"plain": maker(options, model, TWO_CORES), "parts": parts(model, count, True)}
        makers["pipeline"] = maker(options, model, THREAD_PER_STAGE, stages=2, micro_batches=count, remat="never")
        best = {name: result["seconds"] for name, result in interleaved(makers, options.repeats).items()}
        bare = best["parts"] * (count + 1) / (2 * count)
        add(f"{model}, two cores, K=2 M={count} never", best["plain"], best["pipeline"], bare, limit)
    title = "Time of a step against plain Keras on the same cores"
    return Report(title, rows, lower=("plain, s", "parts, s", "pipeline, s", "× parts", "× plain"))


def against_torch(options: Options) -> Report:
    """The dense model in tf_gpipe, `torch.distributed.pipelining` and torchgpipe: K = 2, M = 8, a thread a stage."""
    count = 8
    sizes = settings("dense", options.quick)

    def torch(engine: str, remat: str, threads: dict = THREAD_PER_STAGE):
        more = {"engine": engine, "remat": remat, "stages": 2, "micro_batches": count, "sizes": sizes}
        torch_config = {"measure_seconds": options.measure_seconds, **threads, **more}
        return lambda: Worker(torch_config, "torch_worker.py", options.torch_python)

    rows, notes = [], []
    plain: dict[str, float] = {}
    for remat in options.pick(("never", "always"), ("never",)):
        makers = {"tf_gpipe": maker(options, "dense", THREAD_PER_STAGE, stages=2, micro_batches=count, remat=remat)}
        for engine in ("gpipe", "1f1b"):
            makers[f"torch.distributed.pipelining {engine}"] = torch(engine, remat)
        makers["torchgpipe"] = torch("torchgpipe", remat)
        if remat == "never":
            makers["plain Keras, one core"] = maker(options, "dense", ONE_CORE)
            makers["plain Keras, two cores"] = maker(options, "dense", TWO_CORES)
            makers["plain PyTorch, one core"] = torch("plain", remat, ONE_CORE)
        missing: dict[str, str] = {}
        best = interleaved(makers, options.repeats, missing)
        notes += [f"Left out: {name}, {remat}: {reason}." for name, reason in missing.items()]
        ours = best["tf_gpipe"]["seconds"]
        plain |= {name: result["seconds"] for name, result in best.items() if name.startswith("plain")}
        for name, result in best.items():
            label = name if name in plain else f"{name}, {remat}"
            own = plain.get("plain PyTorch, one core" if "orch" in name else "plain Keras, one core", float("nan"))
            values = {"seconds": result["seconds"], "× tf_gpipe": result["seconds"] / ours}
            row = Row(label, {**values, "× its plain step": result["seconds"] / own})
            if "torch" in name:
                limit = 2.0 if name == "torchgpipe" else {"never": 1.2, "always": 1.3}[remat]
                row.require("× tf_gpipe", "≥", limit)
            rows.append(row)
        notes += [f"PyTorch {r['first']['version']}." for r in best.values() if "version" in r["first"]][:1]
    title = "Eight dense layers, two stages, eight micro-batches: tf_gpipe and PyTorch's pipelines"
    return Report(title, rows, lower=("seconds",), higher=("× tf_gpipe",), notes=tuple(dict.fromkeys(notes)))


def tasks(options: Options) -> Report:
    """What a task costs when it has nothing to do: 2·K·M tasks of Dense(8).

    The step without them (loss, optimizer, `fit`) counts too; the last row leaves it out, by the difference of two M.
    """
    stages, few, many = options.pick((8, 16, 64), (4, 4, 8))
    sizes = {"layers": stages, "width": 8, "rows": 2 * many, "activation": None}
    rows = []
    for remat in options.pick(("always", "never"), ("always",)):
        for name, cores in options.pick(
            (("one core", ONE_CORE), ("two cores", THREAD_PER_STAGE)), (("one core", ONE_CORE),)
        ):
            more = {"sizes": sizes, "stages": stages, "remat": remat}
            makers = {m: maker(options, "dense", cores, micro_batches=m, **more) for m in (few, many)}
            best = {m: result["seconds"] for m, result in interleaved(makers, options.repeats).items()}
            between = 1e6 * (best[many] - best[few]) / (2 * stages * (many - few))
            values = {"step, ms": 1e3 * best[many], "µs a task": 1e6 * best[many] / (2 * stages * many)}
            values["µs for one more"] = between
            rows.append(Row(f"{remat}, {name}", values).require("µs a task", "≤", 150))
    title = f"The cost of a task: K={stages}, M={many}, stages of Dense(8)"
    return Report(title, rows, lower=("step, ms", "µs a task"))


def input_pipeline(options: Options) -> Report:
    """An input that sleeps as long as a step takes, with `prefetch`: the two overlap.

    `fit` waits for the first mini-batch; there are enough steps for that not to count.
    """
    rows, steps = [], options.pick(25, 2)
    kinds = {"plain Keras": {}, "K=2": {"stages": 2, "micro_batches": 8}}
    for name, more in kinds.items():
        with maker(options, "transformer", both_cores(more), **more)() as worker:
            step = min(worker.measure()["seconds"] for _ in range(options.repeats))
            for prefetch in (2, 0):
                slow = {"steps": steps, "input_seconds": step, "prefetch": prefetch}
                runs = [worker.measure(**slow) for _ in range(options.repeats)]
                both = min(run["seconds"] for run in runs)
                values = {"step, s": step, "input, s": step, "both, s": both, "× longer": both / step}
                row = Row(f"{name}, {f'prefetch({prefetch})' if prefetch else 'no prefetch'}", values)
                rows.append(row.require("× longer", "≤", 1.25) if prefetch else row)
    title = "An input that takes as long as a step"
    return Report(title, rows, lower=("step, s", "both, s", "× longer"))


def threads(options: Options) -> Report:
    """A thread for each operation, as `set_logical_cpus` has it, against operations divided among all cores."""
    rows = []
    measured = [("dense", {}, 2, 8), ("transformer", {}, 2, 8), ("amoebanet", {}, 2, 8), ("transformer", NARROW, 8, 32)]
    for model, more_sizes, stages, count in options.pick(measured, measured[:1]):
        sizes = settings(model, options.quick, **more_sizes)
        more = {"sizes": sizes, "stages": stages, "micro_batches": count}
        makers = {n: maker(options, model, t, **more) for n, t in ((2, TWO_CORES), (1, THREAD_PER_STAGE))}
        best = {n: result["seconds"] for n, result in interleaved(makers, options.repeats).items()}
        name = f"{'narrow ' if more_sizes else ''}{model}, K={stages} M={count}"
        rows.append(Row(name, {"two, s": best[2], "one, s": best[1], "times as fast": best[2] / best[1]}))
    title = "One thread for each operation against two, on two cores"
    return Report(title, rows, lower=("one, s",), higher=("times as fast",))


def jit(options: Options) -> Report:
    """XLA for each stage (`jit_compile=True`) against none, beside plain Keras with and without.

    The narrow Transformer, of many small operations, is the one whose first step `startup` measures.
    """
    rows = []
    measured = [("dense", {}, 2), ("transformer", {}, 2), ("transformer", NARROW, 8)]
    for model, more_sizes, stages in options.pick(measured, measured[1:2]):
        sizes = settings(model, options.quick, **more_sizes)
        label = f"{'narrow ' if more_sizes else ''}{model} of {sizes['layers']}"
        variants = {f"{label}, plain Keras": {}}
        for remat in options.pick(("always", "never"), ("always",)):
            for count in options.pick((8, 32), (4,)):
                key = f"{label}, K={stages} M={count} {remat}"
                variants[key] = {"stages": stages, "micro_batches": count, "remat": remat}
        for name, more in variants.items():
            more = {"sizes": sizes, **more}
            makers = {jit: maker(options, model, both_cores(more), jit=jit, **more) for jit in (False, True)}
            best = interleaved(makers, options.repeats)
            without, compiled = best[False]["seconds"], best[True]["seconds"]
            values = {"without, s": without, "XLA, s": compiled, "times as fast": without / compiled}
            values |= {"first, s": best[False]["first"]["seconds"], "first with XLA, s": best[True]["first"]["seconds"]}
            rows.append(Row(name, values))
    return Report("Stages compiled by XLA, and not", rows, lower=("without, s", "XLA, s"), higher=("times as fast",))
