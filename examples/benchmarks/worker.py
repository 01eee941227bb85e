"""One configuration of TensorFlow in a process of its own; `common.Worker` starts it and asks.

The configuration is a JSON object, the only argument. A line of JSON on the standard output tells of the first step;
then each line of JSON on the standard input asks for a measurement, and a line answers it.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import sys
import time

CONFIG = json.loads(sys.argv[1])
CORES = sorted(os.sched_getaffinity(0))[: CONFIG["cores"]]
os.sched_setaffinity(0, CORES)  # before TensorFlow makes its threads

import models  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tf_gpipe  # noqa: E402

# The thread that tunes a `tf.data` pipeline sleeps 10, 20, 40, … ms, and the end of `fit` often waits until it wakes:
# whatever takes 1.3 seconds or more is then measured as 2.55.
NOT_TUNED = tf.data.Options()
NOT_TUNED.autotune.enabled = False


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def restart_peak() -> int:
    """Gives freed memory back, starts the peak again from here; returns the resident size in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return memory("VmRSS")


class Training:
    """The model of the configuration, and the times and memory of its steps."""

    def __init__(self) -> None:
        self.name, self.sizes = CONFIG["model"], CONFIG["sizes"]
        self.jit = CONFIG.get("jit", False)
        self.strategy = None
        if CONFIG.get("stages"):
            options = {"remat": CONFIG.get("remat", "except_last"), "jit_compile": self.jit}
            self.strategy = tf_gpipe.GPipeStrategy(CONFIG["stages"], CONFIG["micro_batches"], **options)
        with self.scope():
            self.model = models.make(self.name, self.sizes, jit_compile=self.jit and not self.strategy)

    def scope(self) -> contextlib.AbstractContextManager:
        """Where a model is made."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def fit(self, steps: int, rows: int | None = None, input_seconds: float = 0, prefetch: int = 0) -> dict:
        """Runs `fit` over one mini-batch again and again, of which each takes `input_seconds` to come."""
        batch = models.batch(self.name, self.sizes, rows or self.sizes["rows"])
        batches = tf.data.Dataset.from_tensors(batch).repeat(steps)
        if input_seconds:
            batches = batches.map(slowly(input_seconds, batches.element_spec))
        if prefetch:
            batches = batches.prefetch(prefetch)
        batches = batches.with_options(NOT_TUNED)
        resting, traces, cpu, start = restart_peak(), models.Counted.calls, time.process_time(), time.perf_counter()
        self.model.fit(batches, verbose=0)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {
            "seconds": seconds / steps,
            "cpu_seconds": cpu / steps,
            "resting_bytes": resting,
            "peak_bytes": memory("VmHWM"),
            "traces": models.Counted.calls - traces,
        }

    def graph(self) -> dict:
        """Constants in the graph of a training step and in all functions that it calls."""
        data = [tf.constant(part) for part in models.batch(self.name, self.sizes, self.sizes["rows"])]

        @tf.function
        def step(x, y):
            if self.strategy:
                return self.strategy.run(self.model.train_step, ((x, y),))
            return self.model.train_step((x, y))

        graph = step.get_concrete_function(*data).graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        constants = [tf.make_ndarray(node.attr["value"].tensor).nbytes for node in nodes if node.op == "Const"]
        return {"nodes": len(nodes), "largest_constant_bytes": max(constants), "constant_bytes": sum(constants)}


class Parts(Training):
    """What the micro-batches' own operations take: no pipeline, no sums, no optimizer.

    `parts` of a mini-batch go through plain Keras one after the other, forward, and back if `gradients` says so; the
    gradients are thrown away.
    """

    def fit(self, steps: int) -> dict:
        """Runs that over one mini-batch again and again."""
        batch = [tf.constant(part) for part in models.batch(self.name, self.sizes, self.sizes["rows"])]
        pairs = list(zip(*(tf.split(tensor, CONFIG["parts"]) for tensor in batch), strict=True))
        self.part(*pairs[0])
        start = time.perf_counter()
        for pair in pairs * steps:
            self.part(*pair)
        return {"seconds": (time.perf_counter() - start) / steps}

    @functools.cached_property
    def part(self):
        """One part of a mini-batch, as a function."""

        def run(x, y):
            with tf.GradientTape() as tape:
                loss = self.model.compute_loss(x, y, self.model(x, training=True))
            return tape.gradient(loss, self.model.trainable_weights) if CONFIG["gradients"] else loss

        return tf.function(run, autograph=False)


def slowly(seconds: float, spec: tuple):
    """Returns a function for `map` that hands a mini-batch on after `seconds` of sleep, as if it were read."""

    def wait(x, y):
        time.sleep(seconds)
        return x, y

    def read(x, y):
        parts = tf.numpy_function(wait, [x, y], [part.dtype for part in spec])
        return tuple(tf.ensure_shape(part, s.shape) for part, s in zip(parts, spec, strict=True))

    return read


def reply(**values) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    sys.setrecursionlimit(20_000)  # Keras follows a chain of layers by recursion
    tf.config.threading.set_intra_op_parallelism_threads(CONFIG["intra"])
    tf.config.threading.set_inter_op_parallelism_threads(CONFIG["inter"])
    if CONFIG.get("stages"):
        tf_gpipe.set_logical_cpus(CONFIG["stages"])
    np.asarray(tf.zeros([1]))  # starts TensorFlow
    bare = memory("VmRSS")
    training = Parts() if CONFIG.get("parts") else Training()
    first = training.fit(1)
    steps = CONFIG.get("steps") or max(2, round(CONFIG["measure_seconds"] / training.fit(1)["seconds"]))
    parameters = training.model.count_params()
    balance = None
    if training.strategy:
        balance = float(re.search(r"balance (\S+)", str(training.strategy.plan(training.model)))[1])
    reply(**first, bare_bytes=bare, steps=steps, parameters=parameters, balance=balance)
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("graph", False):
            reply(**training.graph())
        else:
            reply(**training.fit(**{"steps": steps, **request}))


if __name__ == "__main__":
    main()
