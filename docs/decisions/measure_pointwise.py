"""Convolutions by 1x1 filters: as convolutions, and as products of matrices, for many images and for few.

    python docs/decisions/measure_pointwise.py [--repeats 5]

One core; each figure is the smallest of the repeats, which take turns; an operation runs eight times in a graph.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_gpipe import pointwise

SHAPES = ((32, 16, 16), (16, 64, 64), (8, 256, 128), (4, 512, 256))  # height and width, channels, filters
IMAGES = (128, 16)
RUNS = 8


def convolution(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """What Keras's layer does."""
    return keras.ops.conv(x, kernel, strides=1, padding="valid", data_format="channels_last")


def timed(of: Callable[..., tf.Tensor], shapes: Sequence[Sequence[int]]) -> Callable[[], float]:
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


def passes(of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> dict[str, Callable[..., tf.Tensor]]:
    """The forward pass and both gradients."""

    def gradient(position: int) -> Callable[..., tf.Tensor]:
        def run(x: tf.Tensor, kernel: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch((x, kernel)[position])
                y = of(x, kernel)
            return tape.gradient(y, (x, kernel)[position], output_gradients=d)

        return run

    return {"forward": lambda x, kernel, d: of(x, kernel), "d inputs": gradient(0), "d filters": gradient(1)}


def main() -> None:
    """Prints the table: µs of the convolution and of the product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.sched_setaffinity(0, [0])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print("| images | size | channels | filters | forward, µs | d inputs, µs | d filters, µs |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for images in IMAGES:
        for size, channels, filters in SHAPES:
            shapes = ([images, size, size, channels], [1, 1, channels, filters], [images, size, size, filters])
            ways = [
                {name: timed(run, shapes) for name, run in passes(of).items()}
                for of in (convolution, pointwise.product)
            ]
            cells = []
            for name in ways[0]:
                turns = [[way[name]() for way in ways] for _ in range(repeats)]
                cells.append(" → ".join(f"{min(column):.0f}" for column in zip(*turns, strict=True)))
            print(f"| {images} | {size} | {channels} | {filters} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
