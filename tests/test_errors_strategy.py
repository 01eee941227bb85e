"""What a user reads when something is wrong: what was expected, what was received, what to do; what still works."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, assert_same_optimizer, normal, scope_of, third_derivatives
from keras import layers, ops

import tf_gpipe
from tf_gpipe import compat
from tf_gpipe.errors import ArgumentError, DeviceError, MicroBatchError, ModelError, PartitionError, ScopeError

ROOT = Path(__file__).parents[1]
ROWS = 8
X, Y = normal(ROWS, 6, seed=1), normal(ROWS, 2, seed=2)


def says(*parts):
    """A regular expression for a message with all parts, in order."""
    return "(?s)" + ".*".join(map(re.escape, parts))


def model_of(*middle, strategy=None, inputs=None, **compile):
    """A compiled model of a few layers around `middle`, made under a strategy of 2 stages and 4 micro-batches."""
    strategy = strategy or tf_gpipe.GPipeStrategy(2, 4)
    with strategy.scope():
        x = keras.Input([6]) if inputs is None else inputs
        y = x
        for layer in (*middle, layers.Dense(4, name="hidden"), layers.Dense(2, name="head")):
            y = layer(y)
        model = keras.Model(x, y, name="model")
        model.compile(**{"optimizer": "sgd", "loss": "mse", **compile})
    return model


def fit(model, x=X, y=Y):
    return model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]


# --- arguments ---


@pytest.mark.parametrize("name", ["num_stages", "num_micro_batches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_counts(name, value):
    message = says(f"Expected `{name}` to be an int of at least 1. Received: {name}={value!r}.")
    with pytest.raises(ArgumentError, match=message):
        tf_gpipe.GPipeStrategy(**{"num_stages": 2, name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("remat", "sometimes", '`remat` to be "always" or "except_last" or "never"'),
        ("remat", None, '`remat` to be "always" or "except_last" or "never"'),
        ("schedule", "1f1b", '`schedule` to be "gpipe"'),
        (
            "partition",
            "evenly",
            '`partition` to be "flops", or K numbers of operations, or K - 1 operation names',
        ),
        ("jit_compile", "yes", '`jit_compile` to be True, False or "auto"'),
        ("num_replicas", 2, "num_replicas=1, since replicas are not available yet"),
    ],
)
def test_choices(name, value, expected):
    with pytest.raises(ArgumentError, match=says(f"Expected {expected}", "Received: ", repr(value))):
        tf_gpipe.GPipeStrategy(2, 2, **{name: value})


@pytest.mark.parametrize(
    ("devices", "num_stages", "parts"),
    [
        ("/CPU:0", None, ["Expected `devices` to be a list of device names, one for each stage", "devices='/CPU:0'"]),
        ([], None, ["Expected `devices` to be a list of device names", "devices=[]"]),
        ([0, 1], None, ["Expected `devices` to be a list of device names", "devices=[0, 1]"]),
        (["/CPU:0", "/GPU:7"], None, ["Expected a device that TensorFlow knows", "'/GPU:7'"]),
        (
            ["/CPU:0", "/CPU:20"],
            None,
            ["Expected a device that TensorFlow knows", "Received: '/CPU:20'", "`tf_gpipe.set_logical_cpus(21)`"],
        ),
        (["/CPU:0", "nonsense"], None, ["Expected a device name such as '/GPU:0'", "Received: 'nonsense'"]),
        (
            ["/CPU:0"],
            2,
            ["Expected one device for each of the 2 stages", "Received: 1 device", "as many `devices` as `num_stages`"],
        ),
    ],
)
def test_devices(devices, num_stages, parts):
    with pytest.raises(DeviceError, match=says(*parts)):
        tf_gpipe.GPipeStrategy(num_stages, 2, devices=devices)


def test_too_few_devices():
    message = says("Expected at least 9 devices", "Received: ", "8 logical CPUs", "`tf_gpipe.set_logical_cpus(9)`")
    with pytest.raises(DeviceError, match=message):
        tf_gpipe.GPipeStrategy(9)


def test_another_backend_of_keras(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    message = says("Expected Keras to run on TensorFlow", "Received: backend 'jax'", "KERAS_BACKEND=tensorflow")
    with pytest.raises(ArgumentError, match=message):
        tf_gpipe.GPipeStrategy(1)


# --- partitions ---


@pytest.mark.parametrize(
    ("partition", "parts"),
    [
        ([1, 1, 1], ["A partition into 2 stages has 2 operation counts", "received 3", "Write 2 whole numbers"]),
        ([2, 0], ["Every stage holds at least 1 operation", "received the operation counts [2, 0]"]),
        (["hidden", "head"], ["1 operation names to cut before", "received 2", "num_stages=3"]),
        ([1.5, 0.5], ["received [1.5, 0.5]", "Write 2 whole numbers"]),
        ([1, "head"], ["received [1, 'head']", "Write 2 whole numbers"]),
    ],
)
def test_partitions_that_fit_no_model(partition, parts):
    with pytest.raises(PartitionError, match=says(*parts)):
        tf_gpipe.GPipeStrategy(2, 2, partition=partition)


@pytest.mark.parametrize(
    ("partition", "parts"),
    [
        ([1, 2], ["add up to the model's 2 operations", "received [1, 2], which add up to 3", "[1, 1]"]),
        (["heads"], ["no operation 'heads' to cut before", "Did you mean 'head'?"]),
        (["hidden"], ["cannot cut before 'hidden', the model's first operation"]),
    ],
)
def test_explicit_partitions(partition, parts):
    strategy = tf_gpipe.GPipeStrategy(2, 2, partition=partition)
    model = model_of(strategy=strategy)
    with pytest.raises(PartitionError, match=says(*parts)):
        strategy.plan(model)
    with pytest.raises(ValueError, match=says(*parts)):
        fit(model)


# --- models ---


def test_something_that_is_no_model():
    with pytest.raises(ModelError, match=says("Expected a model of Keras 3", "Received: builtins.object", "Keras 2")):
        tf_gpipe.GPipeStrategy(2).plan(object())


def test_a_model_that_is_not_built():
    model = keras.Sequential([layers.Dense(2)], name="lazy")
    with pytest.raises(ModelError, match=says("Expected a built model", "Received: 'lazy'", "`keras.Input`")):
        tf_gpipe.GPipeStrategy(1).plan(model)


def test_jit_compile_in_compile():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = model_of(strategy=strategy, jit_compile=True)
    message = says("Expected a model compiled without XLA", "Received: 'model'", "GPipeStrategy(..., jit_compile=True)")
    with pytest.raises(ArgumentError, match=message):
        strategy.plan(model)
    for method in (model.fit, model.evaluate, model.train_on_batch):
        with pytest.raises(ValueError, match=message):
            method(X, Y)


def test_a_remat_scope():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with keras.RematScope("full"):
        model = model_of(strategy=strategy)
    message = says("outside `keras.RematScope`", "Received: 'hidden' of 'model'", "argument `remat`")
    with pytest.raises(ModelError, match=message):
        strategy.plan(model)
    with pytest.raises(ValueError, match=message):
        fit(model)


def test_a_fixed_batch_size():
    model = model_of(inputs=keras.Input([6], batch_size=ROWS, name="fixed"))
    message = says(
        "inputs without a fixed batch size, since each of 4 micro-batches",
        "Received: input 'fixed' of 'model' with batch size 8",
        "set num_micro_batches=1",
    )
    with pytest.raises(ValueError, match=message):
        fit(model)
    model = model_of(inputs=keras.Input([6], batch_size=ROWS), strategy=tf_gpipe.GPipeStrategy(2, 1))
    assert np.isfinite(fit(model)).all()


def test_a_stateful_recurrent_layer():
    def make(strategy):
        x = keras.Input([3, 2], batch_size=ROWS if strategy.num_micro_batches == 1 else None)
        lstm = layers.LSTM(4, stateful=True, name="lstm")
        with pytest.raises(ValueError, match="batch size") if x.shape[0] is None else open(os.devnull):
            return model_of(lstm, inputs=x, strategy=strategy)

    # Keras itself asks a stateful layer for a batch size, so that this error comes first.
    make(tf_gpipe.GPipeStrategy(2, 4))
    model = make(tf_gpipe.GPipeStrategy(2, 1))
    assert np.isfinite(fit(model, normal(ROWS, 3, 2))).all()


class LossOfRows(layers.Layer):
    """Adds a loss for each row, of which plain Keras takes the sum."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x), axis=1))
        return x


def test_a_loss_that_is_no_scalar():
    model = model_of(LossOfRows(name="by_row"))
    with pytest.raises(ModelError, match=says("scalar losses", "from 'by_row' of 'model'", "`keras.ops.mean`")):
        fit(model)
    whole = model_of(LossOfRows(), strategy=tf_gpipe.GPipeStrategy(2, 1))
    assert np.isfinite(fit(whole)).all()


class Counting(layers.Layer):
    """Counts its calls in a variable of TensorFlow."""

    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Clipping(layers.Layer):
    """Assigns its own trainable weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        self.scale.assign(ops.clip(self.scale, 0.0, 1.0))
        return x * self.scale


class Noise(layers.Layer):
    """Draws with TensorFlow's own generator."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        (Counting(), ["state is in `keras.Variable`s", "an assignment to a `tf.Variable`", "in stage 0", "add_weight"]),
        (Clipping(name="clip"), ["leave their trainable weights alone", "'clip/scale' in stage 0", "non-trainable"]),
        (Noise(name="noise"), ["can be repeated", "'RandomStandardNormal'", "in stage 0 ('noise'", "SeedGenerator"]),
    ],
    ids=["tf.Variable", "weight", "random"],
)
def test_layers_with_side_effects(layer, parts):
    with pytest.raises(ValueError, match=says(*parts)):
        fit(model_of(layer, strategy=tf_gpipe.GPipeStrategy(2, 4, partition=[2, 1])))


def test_an_output_without_a_batch_axis():
    class Mean(layers.Layer):
        def call(self, x):
            return ops.mean(x)

    strategy = tf_gpipe.GPipeStrategy(2, 4)
    with strategy.scope():
        x = keras.Input([6])
        model = keras.Model(x, Mean(name="mean")(layers.Dense(4)(x)), name="model")
    message = says("one row for each row of the inputs", "of 'model' with shape ()", "num_micro_batches=1")
    with pytest.raises(ModelError, match=message):
        strategy.run(model, args=(tf.constant(X),))


def test_further_arguments_of_a_model():
    class Takes(keras.Model):
        def __init__(self):
            super().__init__(name="takes")
            self.a, self.b = layers.Dense(4), layers.Dense(2)

        def call(self, x, factor=None):
            return self.b(self.a(x))

    strategy = tf_gpipe.GPipeStrategy(2, 4)
    with strategy.scope():
        model = Takes()
    x = tf.constant(X)
    model(x)
    message = says("'takes' to be called with its inputs, `training` and `mask` only", "Received: ['factor']", "inputs")
    with pytest.raises(ModelError, match=message):
        strategy.run(lambda: model(x, factor=tf.constant(2.0)))


# --- data ---


def test_data_of_the_wrong_shape():
    model = model_of()
    for train in (model.fit, model.train_on_batch, model.evaluate):
        with pytest.raises(ValueError, match=says("incompatible", "expected shape=(None, 6), found shape=", "5)")):
            train(X[:, :5], Y)
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize("known", [True, False])
def test_inputs_of_unequal_length(known):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    with strategy.scope():
        a, b = keras.Input([3], name="a"), keras.Input([3], name="b")
        model = keras.Model([a, b], layers.Dense(2)(layers.Add()([layers.Dense(3)(a), layers.Dense(3)(b)])))
    x = [tf.constant(X[:, :3]), tf.constant(X[:7, 3:])]
    if known:
        message = says("the same number of rows", "Received: {'a': 8, 'b': 7}", "batch axis")
        with pytest.raises(MicroBatchError, match=message):
            strategy.run(model, args=(x,))
    else:
        kinds = [[tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])]]
        message = says("the same number of rows", "Received: input b differs from input a.")
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            tf.function(lambda x: strategy.run(model, args=(x,)), input_signature=kinds)(x)


# --- exceptions of the user's own layers ---


def text_of(error):
    """What Python prints of an exception, notes included."""
    return "".join(traceback.format_exception(error))


class Raises(layers.Layer):
    """Raises when it is called on a micro-batch, not while Keras infers shapes."""

    armed = True

    def call(self, x):
        if self.armed and x.shape[0] == ROWS // 4:
            raise LookupError("no such thing")
        return x


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_an_exception_while_a_layer_is_traced_names_layer_and_stage(eagerly):
    layer = Raises(name="broken")
    strategy = tf_gpipe.GPipeStrategy(2, 4, partition=[1, 3])
    model = model_of(layers.Dense(3, name="stem"), layer, strategy=strategy, run_eagerly=eagerly)
    with pytest.raises(Exception, match="no such thing") as caught:
        fit(model)
    # A stage is traced once for all its micro-batches, so that there is none to be named.
    assert "in operation 'broken' of stage 1 of 'model'" in text_of(caught.value)
    layer.armed = False
    assert np.isfinite(fit(model)).all()


class Explodes(layers.Layer):
    """Fails in its backward pass while it is traced."""

    armed = False

    def call(self, x):
        @tf.custom_gradient
        def identity(x):
            def gradient(d):
                if self.armed:
                    raise LookupError("no gradient here")
                return d

            return tf.identity(x), gradient

        return identity(x)


def test_an_exception_in_a_backward_pass_names_stage_and_micro_batch():
    layer = Explodes(name="explodes")
    model = model_of(layers.Dense(3, name="stem"), layer, strategy=tf_gpipe.GPipeStrategy(2, 4, partition=[1, 3]))
    layer.armed = True
    with pytest.raises(Exception, match="no gradient here") as caught:
        fit(model)
    text = text_of(caught.value)
    assert "stage 1" in text
    assert "micro-batch" in text
    layer.armed = False
    assert np.isfinite(fit(model)).all()


# --- failures while a step runs ---


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_failure_at_run_time_names_layer_stage_and_micro_batch(where):
    strategy = tf_gpipe.GPipeStrategy(3, 4, partition=[1, 1, 4])
    with strategy.scope():
        ids = keras.Input([3], dtype="int32", name="ids")
        first, last = layers.Embedding(10, 4, name="first_table"), layers.Embedding(5, 4, name="last_table")
        y = layers.Dense(4, "tanh", name="dense")(first(ids))
        y = layers.Add(name="add")([y, last(ids)])
        model = keras.Model(ids, layers.Dense(2, name="head")(layers.Flatten(name="flat")(y)))
        model.compile("sgd", "mse")
    good = np.arange(ROWS * 3, dtype="int32").reshape(ROWS, 3) % 5
    bad = good.copy()
    bad[5, 1] = 12 if where == "first" else 7  # 7 is a row of the first table, not of the last
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        fit(model, bad)
    text = str(caught.value)
    assert f"{where}_table" in text
    assert f"stage_{0 if where == 'first' else 2}/micro_batch_2/forward" in text
    assert f"= {bad[5, 1]} is not in [0, " in text
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.isfinite(fit(model, good)).all()


def test_a_failure_in_an_eager_step_names_layer_stage_and_micro_batch():
    strategy = tf_gpipe.GPipeStrategy(2, 4, partition=[1, 2])
    with strategy.scope():
        ids = keras.Input([3], dtype="int32")
        y = layers.Flatten(name="flat")(layers.Embedding(10, 4, name="table")(ids))
        model = keras.Model(ids, layers.Dense(2, name="head")(y))
        model.compile("sgd", "mse", run_eagerly=True)
    good = np.zeros([ROWS, 3], "int32")
    bad = good.copy()
    bad[5, 1] = 12
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        fit(model, bad)
    text = text_of(caught.value)
    assert "indices[1,1] = 12 is not in [0, 10)" in text
    assert "table" in text
    assert "in the forward pass of micro-batch 2 on stage 0" in text
    assert np.isfinite(fit(model, good)).all()


# --- what can only be tried in a program of its own ---


def run_program(program, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    head = "import keras, tensorflow as tf, tf_gpipe\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    return done.stdout + done.stderr


def test_tensorflow_has_started():
    text = run_program("tf.constant(1)\ntf_gpipe.set_logical_cpus(2)")
    assert "DeviceStartedError: Expected TensorFlow not to have started yet, since 2 logical CPU devices" in text
    assert "Received: TensorFlow runs with 1." in text
    assert "Call `tf_gpipe.set_logical_cpus(2)` right after the imports" in text


def test_a_model_made_outside_the_scope_is_not_placed():
    """It would train on one device, as plain Keras, without a word."""
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), keras.layers.Dense(1)])
    with pytest.raises(
        ValueError, match=r"Expected a model that was made under this strategy's scope.*Make and compile"
    ):
        tf_gpipe.GPipeStrategy(2, 2).place(model)


def test_a_model_made_outside_the_scope_says_so_when_it_is_trained():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)], name="outside")
    data = np.ones([4, 4]), np.ones([4, 1])
    with tf_gpipe.GPipeStrategy(2, 2).scope():
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match=r"'outside' was made outside the scope.* make it inside `strategy.scope"):
            model.fit(*data, verbose=0)
        model.fit(*data, verbose=0)  # says it once
    with tf_gpipe.GPipeStrategy(1, 2).scope():  # one device is one stage: nothing to warn of
        model.compile("sgd", "mse")
        model.fit(*data, verbose=0)


@pytest.mark.parametrize("partition", [3, None])
def test_a_partition_that_is_no_list(partition):
    with pytest.raises(ValueError, match=r"Expected `partition` to be \"flops\", or K numbers.*Received: partition="):
        tf_gpipe.GPipeStrategy(2, 2, partition=partition)


def test_a_partition_that_is_a_name():
    with pytest.raises(ArgumentError, match=r"Received: partition='dense_3'. Write \['dense_3'\] to cut before"):
        tf_gpipe.GPipeStrategy(2, 2, partition="dense_3")


def test_a_partition_may_be_an_array():
    strategy = tf_gpipe.GPipeStrategy(2, 2, partition=np.array([1, 2]))
    model = keras.Sequential([keras.Input([4]), *(keras.layers.Dense(4) for _ in range(3))])
    assert [len(stage.operations) for stage in strategy.plan(model).stages] == [1, 2]


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "the one inside it"])
def test_an_optimizer_of_another_kind_of_strategy_is_refused(method, inside):
    with mirrored().scope():
        outside = keras.optimizers.Adam()
    with tf_gpipe.GPipeStrategy(2, 4).scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3), keras.layers.Dense(2)])
        model.compile(keras.optimizers.LossScaleOptimizer(outside) if inside else outside, "mse")
    received = (
        r"Received: 'adam\w*' \(Adam\) of 'sequential\w*', which was made outside.*Make it, and call `compile`, inside"
    )
    with pytest.raises(ModelError, match=f"optimizer that was made under the scope of its model's.*{received}"):
        getattr(model, method)(X, Y)


# --- optimizers made outside the scope, and not built yet: they are adopted ---


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


OPTIMIZERS = {
    "string": lambda: "adam",
    "object": keras.optimizers.Adam,
    "inside another": lambda: keras.optimizers.LossScaleOptimizer(
        momentum(), initial_scale=8.0, dynamic_growth_steps=3
    ),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "averages": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("compiled", ["inside", "outside"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_made_outside_the_scope_trains_as_in_plain_keras(make, compiled):
    def trained(strategy):
        optimizer = make()
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh"), layers.Dense(2)])
            if compiled == "inside":
                model.compile(optimizer, "mse", metrics=["mae"])
        if compiled == "outside":
            model.compile(optimizer, "mse", metrics=["mae"])
        return model, model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0).history

    plain, piped = trained(None), trained(tf_gpipe.GPipeStrategy(2, 2))
    assert_same(plain, piped)
    assert_same_optimizer(plain[0], piped[0])
    slots = {v.value.device[-5:] for v in piped[0].optimizer.variables if "dense" in v.path or len(v.shape)}
    assert slots == {"CPU:0", "CPU:1"}, "slots stand beside their weights"


def test_an_optimizer_built_outside_the_scope_for_the_model_itself():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh"), layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        return model, model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    plain, piped = trained(None), trained(tf_gpipe.GPipeStrategy(2, 2))
    assert_same(plain, piped)
    assert_same_optimizer(plain[0], piped[0])


def test_a_model_compiled_again_outside_the_scope_after_unfreezing():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            base = keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh"), layers.Dense(4)], name="base")
            base.trainable = False
            model = keras.Sequential([keras.Input([6]), base, layers.Dense(2)])
            model.compile("adam", "mse")
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        base.trainable = True
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model, model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    assert_same(trained(None), trained(tf_gpipe.GPipeStrategy(2, 2)))


class TwoOptimizers(keras.Model):
    """Trains two parts, each with its optimizer: one an attribute, one in a dict."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.Input([6]), layers.Dense(3), layers.Dense(2)]) for _ in range(2)]

    def compile(self, first, second):
        super().compile()
        self.first, self.further = first, {"second": second}

    def train_step(self, data):
        x, y = data
        for part, optimizer in zip(self.parts, [self.first, self.further["second"]], strict=True):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(part(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def test_several_optimizers_made_outside_the_scope():
    def trained(strategy):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = TwoOptimizers()
        model.compile(keras.optimizers.Adam(), momentum())
        return model, model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    assert_same(trained(None), trained(tf_gpipe.GPipeStrategy(2, 2)))


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
def test_an_optimizer_made_outside_the_scope_in_a_loop_of_ones_own(wrap):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model, optimizer = model_of(strategy=strategy), keras.optimizers.Adam(name="outside")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    with pytest.raises(ModelError, match=says("under the scope of its model's strategy", "Received: 'outside' (Adam)")):
        wrap(lambda x, y: strategy.run(step, args=(x, y)))(tf.constant(X), tf.constant(Y))


# --- scopes and runs inside each other ---


def mirrored():
    return tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])


def nothing_is_left():
    """No strategy is current, no method of Keras or TensorFlow is another."""
    kept = vars(compat.ops._default_graph_stack)
    return not tf.distribute.has_strategy() and "__call__" not in vars(keras.Model) and "reset" not in kept


@pytest.mark.parametrize(
    ("outer", "inner", "parts"),
    [
        ("ours", "ours", ["Received: `scope` of a GPipeStrategy inside the scope of another GPipeStrategy", "Leave"]),
        (mirrored, "ours", ["Received: `scope` of a GPipeStrategy inside the scope of a MirroredStrategy", "Leave"]),
        ("ours", mirrored, ["the scope or `run` of another strategy", "inside the scope of a GPipeStrategy", "Leave"]),
    ],
    ids=["ours in ours", "ours in another kind", "another kind in ours"],
)
def test_the_scope_of_one_strategy_inside_that_of_another(outer, inner, parts):
    outer, inner = (tf_gpipe.GPipeStrategy(2, 2) if kind == "ours" else kind() for kind in (outer, inner))
    message = says("Expected one strategy at a time.", *parts)
    with pytest.raises(ScopeError, match=message), outer.scope(), inner.scope():
        pass
    assert nothing_is_left()
    with inner.scope():
        assert tf.distribute.get_strategy() is inner


@pytest.mark.parametrize("kind", ["ours", "another kind"])
def test_a_model_trained_inside_the_scope_of_another_strategy(kind):
    model = model_of()
    other = mirrored() if kind == "another kind" else tf_gpipe.GPipeStrategy(2, 2)
    article = "a" if kind == "another kind" else "another"
    message = says(f"Received: `fit` of 'model' inside the scope of {article} {type(other).__name__}. Leave that scope")
    with pytest.raises(ScopeError, match=message), other.scope():
        fit(model)
    assert nothing_is_left()
    assert np.isfinite(fit(model)).all()


def test_a_model_of_another_kind_of_strategy_trained_inside_the_scope():
    with mirrored().scope():
        model = keras.Sequential([keras.Input([6]), layers.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(ScopeError, match="what was made under its scope"), tf_gpipe.GPipeStrategy(2, 2).scope():
        fit(model)
    assert nothing_is_left()
    assert np.isfinite(fit(model)).all()


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("outer", "inner", "part"),
    [
        (
            "ours",
            "ours",
            "`run` of a GPipeStrategy inside `run` of another GPipeStrategy. Inside `run`, call the model",
        ),
        ("ours", "itself", "`run` of a GPipeStrategy inside `run` of the same GPipeStrategy. Inside `run`, call the"),
        (
            "mirrored",
            "ours",
            "`run` of a GPipeStrategy inside `run` of a MirroredStrategy. Inside `run`, call the model",
        ),
        ("ours", "mirrored", "the scope or `run` of another strategy"),
    ],
)
def test_run_inside_run(outer, inner, part, wrap):
    outer = tf_gpipe.GPipeStrategy(2, 2) if outer == "ours" else mirrored()
    inner = {"ours": lambda: tf_gpipe.GPipeStrategy(2, 2), "itself": lambda: outer, "mirrored": mirrored}[inner]()
    with pytest.raises(ScopeError, match=says("Received: ", part)):
        wrap(lambda: outer.run(lambda: inner.run(lambda: tf.constant(1.0))))()
    assert nothing_is_left()


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
)
def test_methods_of_keras_inside_run(method, wrap):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    model = model_of(strategy=strategy)
    data = (X,) if "predict" in method else (X, Y)
    message = says(
        f"Expected `{method}` to be called outside `run`",
        f"Received: `{method}` of 'model' inside `run` of the same GPipeStrategy",
        "call the model itself, `model(x, training=True)`",
    )
    with pytest.raises(ScopeError, match=message):
        wrap(lambda: strategy.run(lambda: getattr(model, method)(*data) and None))()
    assert nothing_is_left()
    assert np.isfinite(getattr(model, method)(*data) if "batch" in method else fit(model)).all()


def test_a_model_of_another_pipeline_says_that_it_has_no_stages():
    model = model_of()
    with pytest.warns(UserWarning, match="'model' was made outside the scope of the GPipeStrategy that it runs under"):
        result = tf_gpipe.GPipeStrategy(2, 2).run(model, args=(tf.constant(X),))
    np.testing.assert_allclose(result, model(X), atol=1e-6)


# --- XLA around a pipeline ---


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("inside", [False, True], ids=["around run", "inside run"])
def test_a_function_of_ones_own_that_xla_compiles(trained, inside):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    model = model_of(strategy=strategy)
    if trained:
        fit(model)
    compiled = functools.partial(tf.function, jit_compile=True, autograph=False)
    if inside:
        function = tf.function(lambda x: strategy.run(compiled(model), args=(x,)), autograph=False)
    else:
        function = compiled(lambda x: strategy.run(model, args=(x,)))
    message = says("outside functions that XLA compiles as a whole", "tf.function(jit_compile=True)", "on the strategy")
    with pytest.raises(ArgumentError, match=message):
        function(tf.constant(X))
    assert nothing_is_left()
    np.testing.assert_allclose(strategy.run(model, args=(tf.constant(X),)), model(X), atol=1e-6)


# --- the model outside the pipeline, inside `run` ---


def nested_model(strategy):
    with strategy.scope():
        inner = keras.Sequential([keras.Input([6]), layers.Dense(5, "tanh"), layers.BatchNormalization()], name="inner")
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, "tanh", name="last")(inner(x)), name="model")


def plainly(model, x):
    """As the errors tell."""
    return model.stateless_call(model.trainable_variables, model.non_trainable_variables, x)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: tf.function(f, autograph=False)], ids=["eager", "graph"])
def test_a_third_derivative_is_taken_as_the_error_says(wrap):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model, x = nested_model(strategy), tf.constant(X)
    weight = model.trainable_variables[0].value

    def run(call):
        return wrap(lambda x: strategy.run(third_derivatives, args=(call, x, [x, weight])))(x)

    with pytest.raises(ModelError, match=says("Received: a third derivative of 'model'", "`model.stateless_call(")):
        run(model)
    for found, expected in zip(run(lambda x: plainly(model, x)), third_derivatives(model, x, [x, weight]), strict=True):
        assert float(tf.reduce_max(tf.abs(expected))) > 1e-3
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_forward_mode_and_class_activations_are_taken_as_the_error_says():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model, x = nested_model(strategy), tf.constant(X)
    both = keras.Model(model.inputs, [model.get_layer("inner").output, model.output])

    def tangents(call):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = call(x)
        return accumulator.jvp(y)

    def activations(call):
        with tf.GradientTape() as tape:
            features, y = call(x)
            best = tf.reduce_max(y, axis=1)
        return tape.gradient(best, features)

    with pytest.raises(ModelError, match=says("ForwardAccumulator", "`model.stateless_call(")):
        strategy.run(tangents, args=(model,))
    for of, called in ((tangents, model), (activations, both)):
        found = strategy.run(of, args=(lambda x, called=called: plainly(called, x),))
        np.testing.assert_allclose(found, of(called), atol=1e-6)


# --- the default graph is reset inside a scope ---

RESETS = {
    "keras.backend": keras.backend.clear_session,
    "keras.utils": keras.utils.clear_session,
    "tf.keras": tf.keras.backend.clear_session,
    "tf.compat.v1": tf.compat.v1.reset_default_graph,
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "entered again"])
@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_session_cleared_inside_the_scope_leaves_it_open(reset, again):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    with strategy.scope(), strategy.scope() if again else contextlib.nullcontext():
        before = model_of(strategy=strategy)
        reset()
        assert tf.distribute.get_strategy() is strategy
        reset()
        after = keras.Sequential([keras.Input([6]), layers.Dense(3), layers.Dense(2)])
        after.compile("sgd", "mse")
        assert np.isfinite(fit(before)).all()
    assert nothing_is_left()
    assert np.isfinite(fit(after)).all()
    assert [v.value.device[-5:] for v in after.weights] == ["CPU:0"] * 2 + ["CPU:1"] * 2
    reset()
    assert tf.Variable(1.0)._distribute_strategy is None


def test_a_session_cleared_inside_run_is_refused():
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    with pytest.raises(ScopeError, match=says("clear_session", "outside `strategy.run`", "between steps")):
        strategy.run(keras.backend.clear_session)
    assert nothing_is_left()


def test_a_session_cleared_ends_a_strategy_that_was_set_for_good():
    tf.distribute.experimental_set_strategy(tf_gpipe.GPipeStrategy(2, 4))
    keras.backend.clear_session()
    assert nothing_is_left()
    tf.distribute.experimental_set_strategy(None)  # nothing is left to end
    assert nothing_is_left()


class UsesVariables(keras.Model):
    """A subclassed model that uses variables by themselves in `call`, as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.dense, self.out = keras.layers.Dense(4), keras.layers.Dense(2)
        self.table = keras.layers.Embedding(4, 4) if how == "embeddings" else None
        self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        x = self.dense(x)
        if self.how == "together":
            return self.out(x * self.gain)
        if self.how == "assigned":
            self.count.assign(self.count * 0.5 + 1.0)
            return self.out(x)
        made = {
            "gain": lambda: keras.ops.exp(self.gain),
            "count": lambda: keras.ops.cast(self.count, "float32") + 1.0,
            "embeddings": lambda: self.table(keras.ops.array([1])),
            "seed": lambda: keras.random.uniform((4,), seed=self.seeds),
        }
        return self.out(x * made[self.how]())


@pytest.mark.parametrize(
    ("how", "path"),
    [("gain", "gain"), ("count", "count"), ("assigned", "count"), ("embeddings", "embeddings"), ("seed", "seed")],
)
def test_a_call_that_would_make_a_constant_of_a_variable_is_refused(how, path):
    with tf_gpipe.GPipeStrategy(2, 2).scope():
        model = UsesVariables(how)
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=rf"takes the value of '[^ ]*{path}.*Put that into a layer of its own"):
        model.fit(np.ones([4, 3], "float32"), np.ones([4, 2], "float32"), verbose=0)


def test_a_variable_beside_a_tensor_that_follows_from_the_inputs_is_trained():
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 2)):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = UsesVariables("together")
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")
            model.fit(np.ones([4, 3], "float32"), np.ones([4, 2], "float32"), epochs=2, verbose=0)
        found.append(model.gain.numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    assert np.all(np.abs(found[0] - 1) > 1e-3)


def test_a_recurrent_cell_that_counts_is_refused_in_a_loop():
    class Counting(keras.layers.SimpleRNNCell):
        def build(self, shape):
            super().build(shape)
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

        def call(self, inputs, states, training=False):
            self.steps.assign_add(1.0)
            return super().call(inputs, states, training)

    with tf_gpipe.GPipeStrategy(2, 2).scope():
        layers = [keras.Input([3, 2]), keras.layers.RNN(Counting(4)), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"outside loops and branches. Received: '[^ ]*steps'.*`unroll=True`"):
        model.fit(np.ones([4, 3, 2], "float32"), np.ones([4, 2], "float32"), verbose=0)
