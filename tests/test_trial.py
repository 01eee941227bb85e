"""`jit_compile="auto"`: XLA is tried, and chosen where it is faster."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import scope_of

import tf_gpipe
from tf_gpipe import trial


class Digits(keras.layers.Layer):
    """XLA knows no strings."""

    def call(self, x):
        digits = tf.strings.length(tf.strings.as_string(tf.round(tf.stop_gradient(x))))
        return x + tf.cast(digits, x.dtype)


def train(strategy, *, rows=16, batch_size=16, layer=None):
    keras.utils.set_random_seed(2)
    with scope_of(strategy):
        inputs = keras.Input([6])
        x = keras.layers.Dense(8, activation="gelu")(inputs)
        x = layer(x) if layer else x
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LayerNormalization()(x)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=[rows, 6]), generator.normal(size=[rows, 1])
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model


def pipeline_of(model, strategy):
    (pipeline,) = vars(model)["_gpipe_pipelines"][strategy].values()
    return pipeline


@pytest.mark.parametrize(
    ("plain", "compiled", "chosen"), [(2e-3, 1e-3, True), (1e-3, 2e-3, False), (1e-3, 0.95e-3, False)]
)
@pytest.mark.parametrize("remat", ["except_last", "never"])
def test_what_is_faster_is_chosen_and_the_plan_says_why(monkeypatch, plain, compiled, chosen, remat):
    times = [plain, compiled]
    monkeypatch.setattr(trial, "_seconds", lambda *_: times.pop(0))
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto", remat=remat)
    model, wanted = train(strategy), train(None)
    assert not times
    assert pipeline_of(model, strategy).jit_compile is chosen
    assert all(stage.jit_compile is chosen for stage in pipeline_of(model, strategy).stages)
    last = str(strategy.plan(model)).splitlines()[-1]
    assert last.startswith("stages are compiled" if chosen else "stages are not compiled")
    assert f"{1e3 * compiled:.2f} ms forward and back through stage 1 with XLA and {1e3 * plain:.2f} without" in last
    for a, b in zip(model.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_both_are_timed_and_the_choice_is_made_once(monkeypatch):
    timed = []
    seconds = trial._seconds
    monkeypatch.setattr(trial, "_seconds", lambda *args: timed.append(seconds(*args)) or timed[-1])
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto")
    model = train(strategy)
    assert len(timed) == 2
    assert all(0 < s < 60 for s in timed)
    assert pipeline_of(model, strategy).jit_compile in (True, False)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_the_backward_pass_is_timed_too(monkeypatch, remat):
    """Whatever is faster forward may be slower back."""
    given = []
    monkeypatch.setattr(trial, "_seconds", lambda run: given.append(run()) or 1.0)
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto", remat=remat)
    model = train(strategy)
    _, layer, last = strategy.plan(model).stages[1].variables, *model.layers[-2:]
    weights = [*layer.trainable_variables, *last.trainable_variables]
    total = sum(int(np.prod(v.shape)) for v in weights)
    assert len(given) == 2
    for made in given:  # the sums of the gradients of all weights of the stage are in one buffer
        assert [total] in [tensor.shape.as_list() for tensor in made]


def test_a_stage_that_xla_cannot_compile_is_left_as_it_is():
    strategy = tf_gpipe.GPipeStrategy(2, 2, jit_compile="auto", partition=[3, 1])
    model, wanted = train(strategy, layer=Digits()), train(tf_gpipe.GPipeStrategy(1, 2), layer=Digits())
    assert pipeline_of(model, strategy).jit_compile is False
    assert "XLA cannot compile stage 0 (" in str(strategy.plan(model))
    for a, b in zip(model.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_stage_that_was_not_tried_and_cannot_be_compiled(monkeypatch):
    monkeypatch.setattr(trial, "GAIN", -1e9)  # XLA pays in the first stage, whatever it takes
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto", partition=[3, 2])
    with strategy.scope():
        layers = [*(keras.layers.Dense(6) for _ in range(3)), Digits(), keras.layers.Rescaling(2.0)]
        model = keras.Sequential([keras.Input([6]), *layers])
        model.compile("sgd", "mse")
    model.fit(np.ones([16, 6]), np.ones([16, 6]), batch_size=16, verbose=0)
    note = strategy.plan(model).note
    assert re.search(r"stages are not compiled: XLA cannot compile stage 1 \(ValueError: .*AsString", note)


@pytest.mark.parametrize("name", ["_passes", "_seconds"])
def test_an_error_in_the_trial_is_raised(monkeypatch, name):
    def fails(*_, **__):
        raise TypeError("a fault of the library")

    monkeypatch.setattr(trial, name, fails)
    with pytest.raises(TypeError, match="a fault of the library"):
        train(tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto"))


class NoZeros(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x / tf.reduce_sum(tf.abs(x)), "all zeros")

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_stage_that_takes_no_zeros_is_not_said_to_be_refused_by_xla():
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto", partition=[1, 4])
    with strategy.scope():
        layers = [keras.layers.Dense(6), NoZeros(), *(keras.layers.Dense(6) for _ in range(3))]
        model = keras.Sequential([keras.Input([6]), *layers])
        model.compile("sgd", "mse")
    model.fit(np.ones([16, 6]), np.ones([16, 6]), batch_size=16, verbose=0)
    note = strategy.plan(model).note
    assert note.startswith("stages are not compiled: XLA cannot be tried on zeros in stage 1 (InvalidArgumentError: ")


def test_strings_in_stages_that_are_to_be_compiled():
    strategy = tf_gpipe.GPipeStrategy(2, 2, jit_compile=True)
    with strategy.scope():
        text = keras.Input([1], dtype="string")
        ids = keras.layers.Hashing(5)(text)
        model = keras.Model(text, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(5, 2)(ids))))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Received: strings, as an input of stage 0 \(hashing.*Set jit_compile=False"):
        model.fit(tf.constant([["a"], ["b"]]), np.ones([2, 1]), verbose=0)


def test_unknown_shapes_are_not_tried(monkeypatch):
    monkeypatch.setattr(trial, "_seconds", lambda *_: pytest.fail("nothing is to be timed"))
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto")
    model = train(strategy, rows=15, batch_size=15)  # micro-batches of different sizes
    assert pipeline_of(model, strategy).jit_compile == "auto"
    assert "XLA can only be tried where all mini-batches are known to have the same number" in str(strategy.plan(model))


def test_what_is_only_predicted_decides_nothing():
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile="auto")
    with strategy.scope():
        model = keras.Sequential([keras.Input([16]), *(keras.layers.Dense(16) for _ in range(4))])
        model.compile("sgd", "mse")
    x = np.ones([16, 16], "float32")
    model.predict(x, batch_size=16, verbose=0)
    assert pipeline_of(model, strategy).jit_compile == "auto"
    model.fit(x, x, batch_size=16, verbose=0)
    assert pipeline_of(model, strategy).jit_compile != "auto"
    assert "forward and back" in str(strategy.plan(model))


PROGRAM = """
import keras, numpy as np, tf_gpipe
tf_gpipe.set_logical_cpus(2)
with tf_gpipe.GPipeStrategy(2, 4, remat="{remat}", jit_compile=True).scope():
    model = keras.Sequential([keras.Input([16]), *(keras.layers.Dense(16, "relu") for _ in range(4))])
    model.compile("sgd", "mse")
x = np.ones([32, 16], "float32")
model.fit(x, x, batch_size=32, epochs=2, verbose=0)
"""


@pytest.mark.parametrize(("remat", "functions"), [("always", 4), ("never", 4)])
def test_xla_compiles_each_function_of_a_stage_once(remat, functions):
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1", "TF_CPP_VMODULE": "device_compilation_profiler=1"}
    command = [sys.executable, "-c", PROGRAM.format(remat=remat)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **log}, check=True)
    compiled = re.findall(r"Compiled __inference_(stage_\d_\w+?)_\d+ (\d+) times", done.stderr)
    assert len({name for name, _ in compiled}) == functions
    assert {count for _, count in compiled} == {"1"}, compiled
