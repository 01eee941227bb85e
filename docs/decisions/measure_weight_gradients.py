"""How gradients of weights are summed over micro-batches: running sums, shared buffers, and deferred gradients.

    python docs/decisions/measure_weight_gradients.py [--repeats 3]

Each figure comes from a process of its own on one core; the smallest of the repeats, which take turns.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe
from tf_gpipe import gradients

MICRO_BATCHES = 8
WAYS = {
    "plain Keras": None,
    "a running sum for each weight": {"SMALL": 0, "defer": False},
    "shared buffers for small weights": {"defer": False},
    "and deferred gradients": {},
}


def dense() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Eight wide layers: weights cost as much as work."""
    model = keras.Sequential([keras.Input([1024]), *(keras.layers.Dense(1024, activation="relu") for _ in range(8))])
    return model, np.random.rand(512, 1024), np.random.rand(512, 1024)


def blocks() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Many narrow layers: 192 weights."""
    layers = keras.layers
    x = inputs = keras.Input([64])
    for _ in range(48):
        y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, y])
    return keras.Model(inputs, x), np.random.rand(256, 64), np.random.rand(256, 64)


def measure(name: str, way: str, remat: str) -> None:
    """Prints milliseconds of the first and of later steps."""
    os.sched_setaffinity(0, [0])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    settings = WAYS[way]
    strategy: tf.distribute.Strategy = tf.distribute.get_strategy()
    if settings is not None:
        gradients.SMALL = settings.get("SMALL", gradients.SMALL)
        if not settings.get("defer", True):
            gradients.GradientLayout._may_defer = lambda *_: False
        strategy = tf_gpipe.GPipeStrategy(1, MICRO_BATCHES, remat=remat)
    with strategy.scope():
        model, x, y = {"dense": dense, "blocks": blocks}[name]()
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    batch = next(iter(tf.data.Dataset.from_tensors((x.astype("float32"), y.astype("float32")))))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        model.train_on_batch(*batch)
        times.append(1e3 * (time.perf_counter() - start))
    print(times[0], min(times[2:]))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.one)
        return
    cases = [(name, remat, way) for name in ("dense", "blocks") for remat in ("never", "always") for way in WAYS]
    found: dict[tuple[str, str, str], list[list[float]]] = {case: [] for case in cases}
    for _ in range(arguments.repeats):
        for name, remat, way in cases:
            command = [sys.executable, __file__, "--one", name, way, remat]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
            found[name, remat, way].append([float(part) for part in output.split()])
    print("| model | remat | gradients of weights | first step, ms | later steps, ms |\n|---|---|---|---:|---:|")
    for (name, remat, way), times in found.items():
        first, later = (min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {remat} | {way} | {first:,.0f} | {later:,.1f} |")


if __name__ == "__main__":
    main()
