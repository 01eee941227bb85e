"""How long the first step takes as calls are added, with and without what makes it shorter.

    python docs/decisions/measure_start_up.py [--blocks 24] [--micro-batches 8 128] [--repeats 3]

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
from tf_gpipe.stage import Stage
from tf_gpipe.stage_functions import Backward, BackwardKind

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


def traced_backward(stage: Stage, kind: BackwardKind) -> Backward:
    """The backward function, traced once from the code of the layers, whatever was recorded."""
    if kind not in stage._backwards:
        stage._backwards[kind] = stage._trace_backward(kind)
    return stage._backwards[kind]


def leave_out(what: str) -> None:
    """Takes one thing away that makes the first step shorter."""
    if what == "searched":
        compat.hide_function = lambda call: None
    if what == "shared":
        compat.in_vectorized_loop = lambda: True  # where each call is given each handle for itself
    if what == "traced":
        Stage.backward = traced_backward


CASES = {
    "plain Keras": ("", ""),
    "always": ("always", ""),
    "always, functions searched": ("always", "searched"),
    "always, handles one by one": ("always", "shared"),
    "except_last": ("except_last", ""),
    "except_last, layers traced again": ("except_last", "traced"),
}


def measure(blocks: int, micro_batches: int, case: str) -> None:
    """Prints processor seconds of the first step."""
    remat, without = CASES[case]
    tf_gpipe.set_logical_cpus(STAGES)
    leave_out(without)
    keras.utils.set_random_seed(0)
    x = np.random.rand(ROWS, TOKENS, WIDTH).astype("float32")
    if remat:
        with tf_gpipe.GPipeStrategy(STAGES, micro_batches, remat=remat).scope():
            model = transformer(blocks)
            model.compile("sgd", "mse")
    else:
        model = transformer(blocks)
        model.compile("sgd", "mse", jit_compile=False)
    start = time.process_time()
    model.fit(x, x, batch_size=ROWS, verbose=0)
    print(time.process_time() - start)


def main() -> None:
    """Prints the table: the least of the repeats, which take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        count, case = arguments.one
        measure(arguments.blocks, int(count), case)
        return
    least: dict[tuple[str, int], float] = {}
    for _ in range(arguments.repeats):
        for case, (remat, _) in CASES.items():
            for count in arguments.micro_batches if remat else arguments.micro_batches[:1]:
                command = [sys.executable, __file__, "--blocks", str(arguments.blocks), "--one", str(count), case]
                output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
                least[case, count] = min(least.get((case, count), float("inf")), float(output.split()[-1]))
    print("| | " + " | ".join(f"M = {m}" for m in arguments.micro_batches) + " |")
    print("|---|" + "---:|" * len(arguments.micro_batches))
    for case in CASES:
        row = [f"{least[case, m]:.1f}" if (case, m) in least else "" for m in arguments.micro_batches]
        print(f"| {case} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
