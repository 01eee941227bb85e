"""How many bytes of weights leave their device when a differentiable call is made with `tf.custom_gradient`.

    python docs/decisions/measure_custom_gradient.py

Prints what one step sends between two logical CPU devices, with `tf.custom_gradient` and with an operation recorded on
the tape, with and without Grappler. The weight stands on CPU:1, the call is made on CPU:0.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context

import tf_gpipe
from tf_gpipe import compat


def sent(step: Callable[[], tf.Tensor]) -> list[str]:
    """Names of the tensors that the first run of a function sends from one device to another."""
    context.enable_run_metadata()
    tf.function(step, autograph=False)()
    graphs = [graph for part in context.export_run_metadata().function_graphs for graph in part.partition_graphs]
    context.disable_run_metadata()
    sends = [node for graph in graphs for node in graph.node if node.op == "_Send"]
    return [node.attr["tensor_name"].s.decode().split("_", 2)[-1] for node in sends]


def main() -> None:
    """Measures both ways."""
    tf_gpipe.set_logical_cpus(2)
    with tf.device("/CPU:1"):
        weight = tf.Variable(tf.ones([1000, 1000]))

    def forward(x: tf.Tensor) -> tf.Tensor:
        with tf.device("/CPU:1"):
            return tf.reduce_sum(weight) * x

    def backward(d: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("/CPU:1"):
            return [d * tf.reduce_sum(weight), d * x * tf.ones_like(weight)]

    @tf.custom_gradient
    def custom(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tuple]]:
        def gradient(d: tf.Tensor, variables: list[tf.Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            d_x, d_weight = backward(d, x)
            return d_x, [d_weight for _ in variables]

        return forward(x), gradient

    def recorded(x: tf.Tensor) -> tf.Tensor:
        with compat.stop_recording():
            y = tf.identity(forward(x))
        compat.record_operation("Recorded", [y], [x], [weight], lambda d: backward(d, x))
        return y

    def step_with(call: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[], tf.Tensor]:
        def step() -> tf.Tensor:
            with tf.device("/CPU:0"), tf.GradientTape() as tape:
                y = call(tf.constant(2.0))
            gradient = tape.gradient(y, weight)
            with tf.device("/CPU:1"):
                return tf.reduce_sum(gradient)

        return step

    for grappler in (True, False):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not grappler})
        for name, call in (("tf.custom_gradient", custom), ("recorded operation", recorded)):
            print(f"{name}, Grappler {'on' if grappler else 'off'}: sends {sent(step_with(call))}")


if __name__ == "__main__":
    main()
