"""What a user reads when something is wrong: what was expected, what was received, what to do; what still works."""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import normal
from keras import layers, ops

import tf_gpipe
from tf_gpipe.errors import ArgumentError, DeviceError, MicroBatchError, ModelError, PartitionError

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
def test_an_optimizer_made_outside_the_scope(method, inside):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    outside = keras.optimizers.Adam()
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(2)])
        model.compile(keras.optimizers.LossScaleOptimizer(outside) if inside else outside, "mse")
    received = r"Received: 'adam\w*' \(Adam\).*Make it, and call `compile`, inside"
    with pytest.raises(ValueError, match=f"optimizer that was made under the scope of its model's.*{received}"):
        getattr(model, method)(np.zeros([8, 4]), np.zeros([8, 2]))
