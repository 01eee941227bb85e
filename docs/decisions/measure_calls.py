"""How a graph calls the functions of its stages: `PartitionedCall` against `RemoteCall`.

    python docs/decisions/measure_calls.py [--micro-batches 8 32 128]

First: of twelve steps in which a function fails, in how many the failing operation is named in the exception. Then, for
8 stages of 8 residual blocks (width 64, 4 rows): time to trace, first and later steps.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable

import tensorflow as tf

import tf_gpipe
from tf_gpipe.placed_function import PlacedFunction

Call = Callable[..., list[tf.Tensor]]
ROWS, WIDTH, BLOCKS = 4, 64, 8


def traced(body: Callable[..., list[tf.Tensor]], specs: list[tf.TensorSpec], device: str, remote: bool) -> Call:
    """A function on a device, called in one of the two ways."""
    options = {"autograph": False, "experimental_attributes": {"_noinline": True}}
    function = tf.function(body, input_signature=specs, **options).get_concrete_function()
    return PlacedFunction(function, device) if remote else function


def errors_named(remote: bool) -> int:
    """In how many of twelve failing steps the reason arrives."""
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    with tf.device(devices[0]):
        table = tf.Variable(tf.ones([10, 4]))
    rows, values = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 4])
    first = traced(lambda i: [tf.gather(table, i)], [rows], devices[0], remote)
    second = traced(lambda x: [tf.tanh(x)], [values], devices[1], remote)
    back = traced(lambda x: [x + tf.reduce_sum(table)], [values], devices[0], remote)

    @tf.function(autograph=False)
    def step(indices: tf.Tensor) -> tf.Tensor:
        outputs = []
        for part in tf.split(indices, 4):
            with tf.device(devices[0]):
                (x,) = first(part)
            with tf.device(devices[1]):
                (x,) = second(x)
            with tf.device(devices[0]):
                outputs += back(x)
        return tf.concat(outputs, axis=0)

    named = 0
    for _ in range(12):
        try:
            step(tf.constant([0, 0, 0, 0, 0, 12, 0, 0]))
        except tf.errors.OpError as error:
            named += "12 is not in [0, 10)" in str(error)
    return named


def times(num_micro_batches: int, remote: bool) -> tuple[float, float, float]:
    """Seconds to trace, of the first step, and of the fastest of five later steps."""
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    spec = tf.TensorSpec([ROWS, WIDTH])
    forwards, backwards, held = [], [], []
    for device in devices:
        with tf.device(device):
            weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) * 0.1) for _ in range(BLOCKS)]

        held.append(weights)  # functions hold their variables weakly

        def forward(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
            for weight in weights:
                x = x + tf.nn.gelu(tf.matmul(x, weight))
            return x

        def backward(x: tf.Tensor, d: tf.Tensor, weights: list[tf.Variable]) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = forward(x, weights)
            d_x, *d_weights = tape.gradient(y, [x, *weights], output_gradients=d)
            return [d_x, tf.add_n([tf.reduce_sum(g) for g in d_weights])]

        forwards.append(traced(_bound(lambda x, weights: [forward(x, weights)], weights), [spec], device, remote))
        backwards.append(traced(_bound(backward, weights), [spec, spec], device, remote))

    def step(x: tf.Tensor) -> tf.Tensor:
        total = []
        for part in tf.split(x, num_micro_batches):
            given = []
            for device, forward in zip(devices, forwards, strict=True):
                given.append(part)
                with tf.device(device):
                    (part,) = forward(part)
            for device, backward, x_k in reversed(list(zip(devices, backwards, given, strict=True))):
                with tf.device(device):
                    part, norm = backward(x_k, part)
                total.append(norm)
        return tf.add_n(total)

    x = tf.random.normal([ROWS * num_micro_batches, WIDTH])
    function = tf.function(step, autograph=False)
    taken = []
    for run in (lambda: function.get_concrete_function(x), *[lambda: function(x).numpy()] * 6):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken[0], taken[1], min(taken[2:])


def _bound(body: Callable[..., list[tf.Tensor]], weights: list[tf.Variable]) -> Callable[..., list[tf.Tensor]]:
    return lambda *flat: body(*flat, weights)


def main() -> None:
    """Measures both ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32, 128])
    arguments = parser.parse_args()
    tf_gpipe.set_logical_cpus(8)
    ways = {"PartitionedCall": False, "RemoteCall": True}
    for name, remote in ways.items():
        print(f"{name}: the reason arrives in {errors_named(remote)} of 12 failing steps")
    print("call                 M   trace s   first s  later ms")
    for count in arguments.micro_batches:
        for name, remote in ways.items():
            trace, first, later = times(count, remote)
            print(f"{name:17} {count:4} {trace:9.1f} {first:9.1f} {1000 * later:9.0f}")


if __name__ == "__main__":
    main()
