"""Unrolled against rolled: two ways to write the loop over micro-batches, with the same stage functions.

    python docs/decisions/measure_loop_form.py [--stages 8] [--micro-batches 8 32 128] [--blocks 8]

Unrolled, every task is a call operation of its own in the outer graph. Rolled, a `tf.while_loop` over ticks holds one
call operation for each stage and direction, which runs or skips. Prints time to trace, first and later steps for each.
Stages are `--blocks` residual blocks of width 64 on 4 rows: tasks so small that the loop is what is measured.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import tf_gpipe

ROWS, WIDTH = 4, 64


class Stage:
    """A stage's weights and functions on its device."""

    def __init__(self, device: str, blocks: int) -> None:
        self.device = device
        with tf.device(device):
            self.weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) * 0.1) for _ in range(blocks)]
        options = {"autograph": False, "experimental_attributes": {"_noinline": True}}
        self.forward = tf.function(self._body, **options)
        self.backward = tf.function(self._gradient, **options)

    def _body(self, x: tf.Tensor) -> tf.Tensor:
        for weight in self.weights:
            y = tf.nn.gelu(tf.matmul(x, weight))
            mean, variance = tf.nn.moments(y, [-1], keepdims=True)
            x = x + (y - mean) * tf.math.rsqrt(variance + 1e-3)
        return x

    def _gradient(self, x: tf.Tensor, d_y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self._body(x)
        return tape.gradient(y, [x, *self.weights], output_gradients=d_y)


def unrolled(stages: Sequence[Stage], x: tf.Tensor, num_micro_batches: int) -> list[list[tf.Tensor]]:
    """Sums of the weights' gradients; one call operation a task."""
    given: list[list[tf.Tensor]] = []
    outputs = []
    for part in tf.split(x, num_micro_batches):
        given.append([])
        for stage in stages:
            given[-1].append(part)
            with tf.device(stage.device):
                part = stage.forward(part)
        outputs.append(part)
    sums: list[list[tf.Tensor]] = [[] for _ in stages]
    for m in reversed(range(num_micro_batches)):
        d = outputs[m]
        for k in reversed(range(len(stages))):
            with tf.device(stages[k].device):
                d, *d_weights = stages[k].backward(given[m][k], d)
                sums[k] = [a + b for a, b in zip(sums[k], d_weights, strict=True)] if sums[k] else d_weights
    return sums


def rolled(stages: Sequence[Stage], x: tf.Tensor, num_micro_batches: int) -> list[list[tf.Tensor]]:
    """The same sums; one call operation for each stage and direction, in loops over ticks."""
    count, last = num_micro_batches, len(stages) - 1

    def array(k: int) -> tf.TensorArray:
        with tf.device(stages[k].device):
            return tf.TensorArray(tf.float32, count, element_shape=[ROWS, WIDTH], clear_after_read=False)

    inputs = [array(min(k, last)) for k in range(len(stages) + 1)]
    inputs[0] = inputs[0].unstack(tf.stack(tf.split(x, count)))

    def write(values: tf.TensorArray, m: tf.Tensor, value: tf.Tensor, active: tf.Tensor) -> tf.TensorArray:
        return tf.cond(active, lambda: values.write(m, value), lambda: values)

    def forward_tick(t: tf.Tensor, values: list[tf.TensorArray]) -> tuple[Any, ...]:
        new = list(values)
        for k, stage in enumerate(stages):
            active = tf.logical_and(t >= k, t - k < count)
            with tf.device(stage.device):
                y = tf.cond(
                    active, lambda k=k: stages[k].forward(values[k].read(t - k)), lambda: tf.zeros([ROWS, WIDTH])
                )
            with tf.device(stages[min(k + 1, last)].device):
                new[k + 1] = write(values[k + 1], t - k, y, active)
        return t + 1, new

    ticks = count + last
    _, inputs = tf.while_loop(lambda t, _: t < ticks, forward_tick, (tf.constant(0), inputs))
    gradients = [*(array(max(k - 1, 0)) for k in range(len(stages))), inputs[-1]]
    sums = []
    for stage in stages:
        with tf.device(stage.device):
            sums.append([tf.zeros_like(weight) for weight in stage.weights])

    def backward_tick(t: tf.Tensor, d: list[tf.TensorArray], sums: list[list[tf.Tensor]]) -> tuple[Any, ...]:
        new_d, new_sums = list(d), []
        for k, stage in enumerate(stages):
            m = count - 1 - t + last - k
            active = tf.logical_and(m >= 0, m < count)

            def run(k: int = k, m: tf.Tensor = m) -> list[tf.Tensor]:
                d_x, *d_weights = stages[k].backward(inputs[k].read(m), d[k + 1].read(m))
                return [d_x, *(a + b for a, b in zip(sums[k], d_weights, strict=True))]

            with tf.device(stage.device):
                d_x, *added = tf.cond(active, run, lambda k=k: [tf.zeros([ROWS, WIDTH]), *sums[k]])
            with tf.device(stages[max(k - 1, 0)].device):
                new_d[k] = write(d[k], m, d_x, active)
            new_sums.append(added)
        return t + 1, new_d, new_sums

    return tf.while_loop(lambda t, *_: t < ticks, backward_tick, (tf.constant(0), gradients, sums))[2]


def measure(form: Callable[..., Any], stages: Sequence[Stage], num_micro_batches: int) -> tuple[float, float, float]:
    """Seconds to trace, of the first step, and of the fastest of five later steps."""
    x = tf.random.normal([ROWS * num_micro_batches, WIDTH])

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        sums = form(stages, x, num_micro_batches)
        for stage, gradients in zip(stages, sums, strict=True):
            with tf.device(stage.device):
                for weight, gradient in zip(stage.weights, gradients, strict=True):
                    weight.assign_sub(1e-4 * gradient)
        return tf.constant(0)

    function = tf.function(step, autograph=False)
    times = []
    for run in (lambda: function.get_concrete_function(x), *[lambda: function(x).numpy()] * 6):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times[0], times[1], min(times[2:])


def main() -> None:
    """Measures both forms for each number of micro-batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--blocks", type=int, default=8)
    arguments = parser.parse_args()
    devices = tf_gpipe.set_logical_cpus(arguments.stages)
    print("form      M    trace s  first s  later ms  µs a task")
    for count in arguments.micro_batches:
        for form in (unrolled, rolled):
            stages = [Stage(device, arguments.blocks) for device in devices]
            trace, first, later = measure(form, stages, count)
            task = 1e6 * later / (2 * count * arguments.stages)
            print(f"{form.__name__:8} {count:4} {trace:9.1f} {first:8.1f} {1000 * later:9.0f} {task:9.0f}")


if __name__ == "__main__":
    main()
