"""Operations that stages on CPUs run in place of Keras's own, for many images and for few.

    python docs/decisions/measure_operations.py [--repeats 5]

Convolutions by 1x1 filters, as convolutions and as products of matrices; batch norm, as Keras's operations and as one,
and how far each is off. One core; each time is the smallest of the repeats, which take turns; an operation runs eight
times in a graph.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_gpipe import fused_batch_norm, pointwise

CONVOLUTIONS = ((32, 16, 16), (16, 64, 64), (8, 256, 128), (4, 512, 256))  # height and width, channels, filters
NORMS = ((32, 16), (16, 64), (8, 128), (4, 256))  # height and width, channels
VALUES = ((4096, 64), (131072, 64), (131072, 1))  # values of a channel, channels
IMAGES = (128, 16)
AXES = [0, 1, 2]  # that a channel's values are along
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


def normalised(layer: keras.layers.BatchNormalization, x: tf.Tensor, *, fused: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Outputs and variance of a training pass of batch norm, by one operation or by Keras's."""
    if fused:
        outputs, _, variance, _ = fused_batch_norm.normalise(layer, x)
        return outputs, variance
    mean, variance = keras.ops.moments(x, axes=AXES)
    gamma, beta = layer.gamma.value, layer.beta.value
    return keras.ops.batch_normalization(x, mean, variance, -1, beta, gamma, layer.epsilon), variance


def norms(channels: int, *, fused: bool) -> dict[str, Operation]:
    """A training pass of batch norm, alone and with its gradients."""
    layer = keras.layers.BatchNormalization()
    layer.build([None, None, None, channels])

    def forward(x: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
        return normalised(layer, x, fused=fused)[0]

    def both(x: tf.Tensor, d: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x, d)
        return tape.gradient(y, [x, layer.gamma.value, layer.beta.value], output_gradients=d)

    return {"forward": forward, "forward and gradients": both}


def errors(values: int, channels: int) -> str:
    """Cells of a table: largest relative error of the variance and of the gradient of beta, one way and the other."""
    size = [values // 64, 8, 8, channels]
    x, d = (tf.random.stateless_normal(size, seed=[1, seed], mean=mean) for seed, mean in ((1, 1.0), (2, 0.1)))
    exact = [tf.math.reduce_variance(tf.cast(x, tf.float64), AXES), tf.reduce_sum(tf.cast(d, tf.float64), AXES)]
    layer = keras.layers.BatchNormalization()
    layer.build(size)

    def of(fused: bool) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs, variance = normalised(layer, x, fused=fused)
        return [variance, tape.gradient(outputs, layer.beta.value, output_gradients=d)]

    found = [[tf.cast(part, tf.float64) for part in tf.function(of)(fused)] for fused in (False, True)]
    off = [[float(tf.reduce_max(tf.abs(part / e - 1))) for part, e in zip(way, exact, strict=True)] for way in found]
    return " | ".join(f"{one:.1e} → {other:.1e}" for one, other in zip(*off, strict=True))


def compare(ways: Sequence[dict[str, Operation]], shapes: Sequence[Sequence[int]], repeats: int) -> str:
    """Cells of a table: µs of each operation, one way and the other."""
    measures = [{name: timed(of, shapes) for name, of in way.items()} for way in ways]
    cells = []
    for name in ways[0]:
        turns = [[measure[name]() for measure in measures] for _ in range(repeats)]
        cells.append(" → ".join(f"{min(column):.0f}" for column in zip(*turns, strict=True)))
    return " | ".join(cells)


def main() -> None:
    """Prints the three tables."""
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
    print("\n| images | size | channels | forward, µs | forward and gradients, µs |")
    print("|---:|---:|---:|---:|---:|")
    for images in IMAGES:
        for size, channels in NORMS:
            ways = [norms(channels, fused=fused) for fused in (False, True)]
            cells = compare(ways, [[images, size, size, channels]] * 2, repeats)
            print(f"| {images} | {size} | {channels} | {cells} |")
    print("\n| values a channel | channels | variance off by | gradient of beta off by |")
    print("|---:|---:|---:|---:|")
    for values, channels in VALUES:
        print(f"| {values} | {channels} | {errors(values, channels)} |")


if __name__ == "__main__":
    main()
