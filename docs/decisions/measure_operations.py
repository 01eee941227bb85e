"""Products that stages on CPUs run in place of Keras's convolutions by 1x1 filters, for many images and for few.

    python docs/decisions/measure_operations.py [--repeats 5]

One core; each time is the smallest of the repeats, which take turns; an operation runs eight times in a graph.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_gpipe import pointwise

CONVOLUTIONS = ((32, 16, 16), (16, 64, 64), (8, 256, 128), (4, 512, 256))  # height and width, channels, filters
IMAGES = (128, 16)
RUNS = 8

Operation = Callable[..., tf.Tensor]


def convolution(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """What Keras's layer does."""
    return keras.ops.conv(x, kernel, strides=1, padding="valid", data_format="channels_last")


def timed(of: Operation, shapes: Sequence[Sequence[int]]) -> Callable[[], float]:
    """A function that gives µs of one run of `of`, made once and run for the first time here.

    Runs have inputs of their own, or TensorFlow would merge them.
    """
    given = [[tf.random.normal(shape) for shape in shapes] for _ in range(RUNS)]

    @tf.function
    def runs(given: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        return [of(*arguments) for arguments in given]

    runs(given)

    def measure() -> float:
        start = time.perf_counter()
        runs(given)
        return 1e6 * (time.perf_counter() - start) / RUNS

    return measure


def passes(of: Operation) -> dict[str, Operation]:
    """The forward pass and the gradients of both arguments."""

    def gradient(position: int) -> Operation:
        def run(x: tf.Tensor, kernel: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch((x, kernel)[position])
                y = of(x, kernel)
            return tape.gradient(y, (x, kernel)[position], output_gradients=d)

        return run

    return {"forward": lambda x, kernel, d: of(x, kernel), "d inputs": gradient(0), "d filters": gradient(1)}


def compare(ways: Sequence[dict[str, Operation]], shapes: Sequence[Sequence[int]], repeats: int) -> str:
    """Cells of a table: µs of each operation, one way and the other."""
    measures = [{name: timed(of, shapes) for name, of in way.items()} for way in ways]
    cells = []
    for name in ways[0]:
        turns = [[measure[name]() for measure in measures] for _ in range(repeats)]
        cells.append(" → ".join(f"{min(column):.0f}" for column in zip(*turns, strict=True)))
    return " | ".join(cells)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.sched_setaffinity(0, [0])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print("| images | size | channels | filters | forward, µs | d inputs, µs | d filters, µs |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for images in IMAGES:
        for size, channels, filters in CONVOLUTIONS:
            shapes = ([images, size, size, channels], [1, 1, channels, filters], [images, size, size, filters])
            cells = compare([passes(convolution), passes(pointwise.product)], shapes, repeats)
            print(f"| {images} | {size} | {channels} | {filters} | {cells} |")


if __name__ == "__main__":
    main()
