"""How long the first step takes as calls are added, with and without hiding their functions from a pass of TensorFlow.

    python docs/decisions/measure_start_up.py [--blocks 24] [--micro-batches 8 128]

A Transformer of width 64 over 32 tokens, in 8 stages; each figure comes from a process of its own.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import subprocess
import sys
import time

import keras
import numpy as np

import tf_gpipe
from tf_gpipe import compat

STAGES, ROWS, TOKENS, WIDTH = 8, 128, 32, 64


def transformer(blocks: int) -> keras.Model:
    """A stack of blocks on vectors."""
    layers = keras.layers
    x = inputs = keras.Input([TOKENS, WIDTH])
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, WIDTH // 2)(y, y)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    return keras.Model(inputs, x)


def measure(blocks: int, micro_batches: int, hidden: bool) -> None:
    """Prints processor seconds of the first step; `micro_batches` 0 is plain Keras."""
    tf_gpipe.set_logical_cpus(STAGES)
    if not hidden:
        compat._hide_function = lambda call: None
    keras.utils.set_random_seed(0)
    x = np.random.rand(ROWS, TOKENS, WIDTH).astype("float32")
    if micro_batches:
        with tf_gpipe.GPipeStrategy(STAGES, micro_batches, remat="always").scope():
            model = transformer(blocks)
            model.compile("sgd", "mse")
    else:
        model = transformer(blocks)
        model.compile("sgd", "mse", jit_compile=False)
    start = time.process_time()
    model.fit(x, x, batch_size=ROWS, verbose=0)
    print(time.process_time() - start)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.one)
        return
    print("| | " + " | ".join(f"M = {m}" for m in arguments.micro_batches) + " |")
    print("|---|" + "---:|" * len(arguments.micro_batches))
    cases = [("plain Keras", [0], True)] + [
        (name, arguments.micro_batches, hidden) for name, hidden in (("functions searched", False), ("hidden", True))
    ]
    for name, counts, hidden in cases:
        row = []
        for count in counts:
            command = [sys.executable, __file__, "--one", str(arguments.blocks), str(count), str(int(hidden))]
            output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
            row.append(f"{float(output.split()[-1]):.1f}")
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
