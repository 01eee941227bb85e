"""Rematerialisation is real: what is recomputed is counted, and the memory that it saves is measured."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import train

import tf_gpipe

RUNS: dict[str, int] = {}


class Counted(keras.layers.Layer):
    """Doubles its input, and counts how often it really runs."""

    def call(self, inputs):
        """Adds one to the count of this layer's name."""

        def count(x: np.ndarray) -> np.ndarray:
            RUNS[self.name] = RUNS.get(self.name, 0) + 1
            return x

        counted = tf.numpy_function(count, [tf.stop_gradient(inputs)], tf.float32)
        counted.set_shape(inputs.shape)
        return (2.0 + 0.0 * counted) * inputs  # so that the gradient needs it

    def compute_output_shape(self, input_shape):
        """As the input."""
        return input_shape


def counted_model() -> keras.Model:
    """Two stages with a counted layer each, and weights before and after it."""
    layers = [keras.layers.Dense(4), Counted(name="first"), keras.layers.Dense(4), Counted(name="second")]
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_number_of_recomputations(remat, micro_batches):
    """M, M - 1 and 0 for each stage, beside the M forward passes."""
    RUNS.clear()
    strategy = tf_gpipe.GPipeStrategy(2, micro_batches, remat=remat, partition=[2, 3])
    data = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    train(counted_model, data, strategy, batch_size=8, epochs=1)
    recomputed = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[remat]
    runs = micro_batches + recomputed
    assert {"first": runs, "second": runs} == RUNS


def test_the_last_micro_batch_is_the_actual_one():
    """Three rows make three micro-batches of eight: the third keeps its activations, not the eighth."""
    RUNS.clear()
    strategy = tf_gpipe.GPipeStrategy(2, 8, remat="except_last", partition=[2, 3])
    data = np.ones([3, 4], "float32"), np.ones([3, 1], "float32")
    train(counted_model, data, strategy, batch_size=3, epochs=1)
    assert RUNS == {"first": 3 + 2, "second": 3 + 2}


def test_evaluation_recomputes_nothing():
    RUNS.clear()
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat="always", partition=[2, 3])
    with strategy.scope():
        model = counted_model()
        model.compile("sgd", "mse")
    model.evaluate(np.ones([8, 4], "float32"), np.ones([8, 1], "float32"), batch_size=8, verbose=0)
    assert RUNS == {"first": 4, "second": 4}


WIDTH = 256


@functools.cache
def activation_bytes(mode: str) -> int:
    """Peak above what weights and code take, in a process of its own."""
    command = [sys.executable, pathlib.Path(__file__).with_name("measure_memory.py"), mode, "--width", str(WIDTH)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])["activation_bytes"]


def test_plain_keras_needs_six_times_the_activation_memory():
    assert activation_bytes("plain") >= 6 * activation_bytes("always")


@pytest.mark.soak
def test_keeping_the_last_micro_batch_costs_little():
    """One micro-batch's activations, where all sixteen would be plain Keras's."""
    assert activation_bytes("except_last") <= activation_bytes("always") + activation_bytes("plain") / 8


@pytest.mark.soak
def test_keeping_everything_needs_no_more_than_plain_keras_and_the_boundary():
    boundary = 4 * 8192 * WIDTH * 4
    assert activation_bytes("never") <= activation_bytes("plain") + boundary


class Traced(keras.layers.Dense):
    """A dense layer that counts how often its Python code runs."""

    calls = 0

    def call(self, inputs, training=None):
        """Counts."""
        Traced.calls += 1
        return super().call(inputs, training=training)


@pytest.mark.parametrize(("remat", "functions"), [("always", 2), ("except_last", 1), ("never", 1)])
def test_a_layer_is_traced_once_for_each_function_that_cannot_be_made_of_another(remat, functions):
    with tf_gpipe.GPipeStrategy(2, 4, remat=remat).scope():
        model = keras.Sequential([keras.Input([3]), Traced(4), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    Traced.calls = 0
    model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)
    assert Traced.calls == 1 + functions  # once for the plan
