"""Prints, as JSON, how far the resident size of this process rose during training steps, in bytes.

    MALLOC_MMAP_THRESHOLD_=262144 python tests/measure_memory.py {plain,always,except_last,never} [--layers 48]

48 Dense(512, gelu) layers on 8,192 rows, 4 stages, 16 micro-batches. A first step traces and allocates what stays; with
the variable above, freed tensors go back to the system at once.
"""

import argparse
import contextlib
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] = "1"  # TensorFlow's own on CPU keeps what was freed

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe


def memory(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def main() -> None:
    """Measures one mode."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["plain", "always", "except_last", "never"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    tf_gpipe.set_logical_cpus(4)
    strategy = None
    if arguments.mode != "plain":
        strategy = tf_gpipe.GPipeStrategy(num_stages=4, num_micro_batches=16, remat=arguments.mode)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.layers.Dense(arguments.width, activation="gelu") for _ in range(arguments.layers)]
        model = keras.Sequential([keras.Input([arguments.width]), *layers])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = y = np.zeros([arguments.rows, arguments.width], "float32")
    batches = tf.data.Dataset.from_tensors((x, y))
    model.fit(batches, verbose=0)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts again from here
    before = memory("VmRSS")
    model.fit(batches.repeat(arguments.steps), verbose=0)
    print(json.dumps({"mode": arguments.mode, "activation_bytes": memory("VmHWM") - before}))


if __name__ == "__main__":
    main()
