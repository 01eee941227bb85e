"""What `tf.recompute_grad` adds inside a backward function that runs the stage again anyway.

    python docs/decisions/measure_recompute_grad.py

Prints the operations, the time to trace and the time of a call of a stage's backward function (12 residual blocks of
width 256 on 512 rows), with a tape over the stage and with a tape over `tf.recompute_grad` of the stage.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import time
from collections.abc import Callable

import tensorflow as tf


def main() -> None:
    """Measures both ways, interleaved; the smallest of five."""
    weights = [tf.Variable(tf.random.normal([256, 256]) * 0.05) for _ in range(12)]

    def stage(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = x + tf.nn.gelu(tf.matmul(x, weight))
        return x

    def backward_of(body: Callable[[tf.Tensor], tf.Tensor]) -> tuple[tf.types.experimental.ConcreteFunction, float]:
        def backward(x: tf.Tensor, d_y: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = body(x)
            return tape.gradient(y, [x, *weights], output_gradients=d_y)

        spec = tf.TensorSpec([512, 256])
        start = time.perf_counter()
        function = tf.function(backward, autograph=False, input_signature=[spec, spec]).get_concrete_function()
        return function, time.perf_counter() - start

    x = tf.random.normal([512, 256])
    made = {"tape": backward_of(stage), "tape over tf.recompute_grad": backward_of(tf.recompute_grad(stage))}
    seconds = dict.fromkeys(made, float("inf"))
    for _ in range(5):
        for name, (function, _) in made.items():
            start = time.perf_counter()
            [gradient.numpy() for gradient in function(x, x)]
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    for name, (function, trace) in made.items():
        count = len(function.graph.get_operations())
        print(
            f"{name}: {count} operations, traced in {1000 * trace:.0f} ms, a call takes {1000 * seconds[name]:.1f} ms"
        )


if __name__ == "__main__":
    main()
