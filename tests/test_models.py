"""Models of every shape train as in plain Keras, wherever they are cut."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, scope_of, train
from keras import layers, ops

import tf_gpipe

RNG = np.random.default_rng(0)
ROWS = 10  # Of which 3 micro-batches get 4, 3 and 3.


def floats(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


def tokens(length, vocabulary=7):
    return RNG.integers(0, vocabulary, (ROWS, length)).astype("int32")


def check(make, data, num_stages=3, num_micro_batches=3, *, partition="flops", **arguments):
    """Trains a model plainly and in stages; the results are equal and the loss moved. Returns model and plan."""
    arguments = {"batch_size": ROWS, **arguments}
    plain = train(make, data, **arguments)
    strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, partition=partition)
    piped = train(make, data, strategy, **arguments)
    assert_same(plain, piped)
    losses = next(iter(plain[1].values()))
    assert losses[0] != losses[-1]
    return piped[0], strategy.plan(piped[0])


def operations(plan):
    return [stage.operations for stage in plan.stages]


def adam():
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}


# --- chains and graphs ---


def test_sequential():
    def make():
        return keras.Sequential(
            [keras.Input([6]), *(layers.Dense(n, "tanh", name=f"dense_{i}") for i, n in enumerate([8, 8, 4, 2]))]
        )

    _, plan = check(make, (floats(6), floats(2)), num_stages=4)
    assert operations(plan) == [["dense_0"], ["dense_1"], ["dense_2"], ["dense_3"]]


@pytest.mark.parametrize("called", [False, True])
def test_a_sequential_model_without_an_input_is_built_from_the_data(called):
    def make():
        model = keras.Sequential([layers.Dense(8, "tanh", name="a"), layers.Dense(8, "tanh"), layers.Dense(2)])
        if called:
            model(floats(6))  # Keras notes its 10 rows as if they were fixed.
        return model

    model, plan = check(make, (floats(6), floats(2)))
    assert len(plan.stages) == 3
    assert model.layers[0].kernel.shape == (6, 8)


def test_functional_with_branches_and_bare_operations():
    def make():
        x = keras.Input([6])
        left, right = layers.Dense(8, "tanh")(x), layers.Dense(8, "sigmoid")(x)
        y = ops.sqrt(left * left + 1.0) + right[:, ::-1]
        return keras.Model(x, layers.Dense(2)(ops.reshape(y, [-1, 2, 4])))

    check(make, (floats(6), floats(2, 2)), num_stages=4)


def test_unknown_dimensions_and_sequences_of_several_lengths():
    def make():
        x = keras.Input([None, 3])
        y = layers.Conv1D(4, 3, padding="same", activation="tanh")(x)
        return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.GRU(4, return_sequences=True)(y))))

    batches = [(floats(5, 3), floats(1)), (floats(9, 3), floats(1)), (floats(5, 3), floats(1))]
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        found.append((model, [float(model.train_on_batch(*batch)) for batch in batches]))
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=2e-6)
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6


def test_stages_without_weights():
    def make():
        x = keras.Input([6])
        y = layers.Activation("tanh", name="first")(x)
        y = layers.Dense(4)(y)
        y = layers.Activation("sigmoid", name="middle")(y)
        y = layers.Dense(2)(y)
        return keras.Model(x, layers.Activation("tanh", name="last")(y))

    _, plan = check(make, (floats(6), floats(2)), num_stages=5, partition=[1, 1, 1, 1, 1])
    assert [stage.parameters for stage in plan.stages] == [0, 28, 0, 10, 0]


# --- nested models ---


def encoder(name="encoder", dtype=None, **kwargs):
    x = keras.Input([6], dtype=dtype)
    y = layers.Dense(8, "tanh", name="first", **kwargs)(x)
    return keras.Model(x, layers.Dense(5, "tanh", name="second")(y), name=name)


def test_a_nested_functional_model_is_cut_inside():
    def make():
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, name="head")(encoder(activity_regularizer="l2")(x)))

    _, plan = check(make, (floats(6), floats(2)), partition=["encoder/second", "head"])
    assert operations(plan) == [["encoder/first"], ["encoder/second"], ["head"]]


def test_nested_sequential_models_are_cut_at_every_depth():
    def make():
        inner = keras.Sequential([layers.Dense(7, "tanh", name="a"), layers.Dense(6, "tanh", name="b")], name="inner")
        outer = keras.Sequential([inner, layers.Dense(5, "tanh", name="c")], name="outer")
        return keras.Sequential([keras.Input([6]), outer, layers.Dense(2, name="head")])

    _, plan = check(make, (floats(6), floats(2)), 4, partition=[1, 1, 1, 1])
    assert operations(plan) == [["outer/inner/a"], ["outer/inner/b"], ["outer/c"], ["head"]]


def test_a_nested_model_called_twice_is_cut_in_both_calls():
    def make():
        a, b = keras.Input([6], name="left"), keras.Input([6], name="right")
        shared = encoder()
        return keras.Model([a, b], layers.Dense(2, name="head")(ops.abs(shared(a) - shared(b))))

    _, plan = check(make, ([floats(6), floats(6)], floats(2)), 4, partition=[1, 2, 1, 3])
    names = [name for stage in operations(plan) for name in stage]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("encoder") for name in names) == 4
    assert any("encoder" in name for name in operations(plan)[2])


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_a_nested_model_called_with_another_dtype_converts_its_input(dtype):
    def make():
        x = keras.Input([6], dtype=dtype)
        return keras.Model(x, layers.Dense(2, name="head")(encoder(dtype="float32")(x)))

    x = RNG.integers(-2, 3, (ROWS, 6)).astype(dtype)
    check(make, (x, floats(2)), partition=["encoder/second", "head"])


def test_a_nested_model_called_with_another_rank_converts_its_input():
    def make():
        inner = keras.Input([], dtype="int32")
        base = keras.Model(inner, layers.Embedding(7, 4, name="table")(inner), name="base")
        x = keras.Input([1], dtype="int32")
        return keras.Model(x, layers.Dense(2, name="head")(base(x)))

    _, plan = check(make, (tokens(1), floats(2)), partition=["base/table", "head"])
    assert operations(plan)[0][0].startswith("base/convert")


def test_a_nested_model_called_with_a_training_flag():
    def make():
        inner = keras.Input([6])
        y = layers.Dense(8, "tanh")(inner)
        base = keras.Model(inner, layers.Dropout(0.5, seed=3)(y), name="base")
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, name="head")(base(x, training=False)))

    check(make, (floats(6), floats(2)), num_micro_batches=1, partition=[1, 1, 1])


@pytest.mark.parametrize("flag", [None, True, False])
def test_a_nested_models_own_training_flag_counts_where_the_call_has_none(flag):
    def make():
        inner = keras.Input([6])
        base = keras.Model(inner, layers.Dropout(0.5, seed=3)(layers.Dense(8)(inner)), name="base")
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, name="head")(base(x, training=True)))

    x = tf.constant(floats(6))
    strategy = tf_gpipe.GPipeStrategy(2, 1)
    keras.utils.set_random_seed(0)
    plain = make()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        piped = make()
    expected = plain(x, training=flag)
    received = strategy.run(lambda: piped(x, training=flag))
    np.testing.assert_allclose(received, expected, rtol=1e-6, atol=1e-7)


def test_a_nested_model_with_dicts_is_cut_inside():
    def make():
        a, b = keras.Input([6], name="a"), keras.Input([6], name="b")
        h = layers.Dense(4, "tanh", name="h")(layers.Subtract(name="subtract")([a, b]))
        out = {"u": layers.Dense(3, name="u")(h), "v": layers.Dense(3, name="v")(h)}
        inner = keras.Model({"b": b, "a": a}, out, name="inner")
        x = keras.Input([6])
        made = inner({"a": x, "b": layers.Dense(6, "tanh", name="stem")(x)})
        return keras.Model(x, layers.Dense(2, name="head")(made["u"] - 2.0 * made["v"]))

    _, plan = check(make, (floats(6), floats(2)), 4, partition=["inner/subtract", "inner/h", "head"])
    assert operations(plan)[:2] == [["stem"], ["inner/subtract"]]


class OwnBlock(keras.Model):
    """A nested model whose call is its own: one operation, in which TensorFlow may be used."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4)

    def call(self, x):
        return tf.nn.softplus(self.dense(x))


def test_a_nested_subclassed_model_is_one_operation():
    def make():
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, name="head")(OwnBlock(name="block")(layers.Dense(3, name="stem")(x))))

    _, plan = check(make, (floats(6), floats(2)))
    assert operations(plan) == [["stem"], ["block"], ["head"]]


# --- masks ---


@keras.saving.register_keras_serializable("test_models")
class Probe(layers.Layer):
    """Passes its input on and remembers whether a mask came with it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.seen = []

    def call(self, x, mask=None):
        self.seen.append(mask is not None)
        return x


@pytest.mark.filterwarnings("ignore:Layer 'nested'")  # Keras: its symbolic output has no mask; real ones do
def test_masks_cross_cuts_and_reach_the_loss():
    def make():
        nested = keras.Sequential([layers.Dense(5, "tanh", name="wide"), Probe(name="probe_1")], name="nested")
        x = keras.Input([6], dtype="int32")
        y = Probe(name="probe_0")(layers.Embedding(7, 4, mask_zero=True)(x))
        y = Probe(name="probe_2")(nested(y))
        y = Probe(name="probe_3")(layers.LSTM(4, return_sequences=True)(y))
        return keras.Model(x, layers.Dense(2, name="head")(y))

    x = tokens(6)
    x[:5, 1:] = 0  # Rows of one valid token and rows of many: unequal micro-batches.
    cuts = ["probe_0", "probe_1", "probe_2", "probe_3", "head"]
    model, _ = check(make, (x, floats(6, 2)), 6, partition=cuts)
    probes = [layer for layer in model._flatten_layers() if isinstance(layer, Probe)]
    assert len(probes) == 4
    for probe in probes:
        probe.seen.clear()  # of what it saw while the model was built
    model.evaluate(x, floats(6, 2), verbose=0)
    for probe in probes:
        assert probe.seen, probe.name
        assert all(probe.seen), probe.name


def test_a_mask_that_only_the_loss_uses():
    def make():
        x = keras.Input([4, 3])
        y = layers.Masking()(x)
        return keras.Model(x, layers.Dense(2)(layers.Dense(5, "tanh")(y)))

    x = floats(4, 3)
    x[:5, 1:] = 0
    check(make, (x, floats(4, 2)), validation_data=(x[3:], floats(4, 2)[3:]))


# --- losses of layers ---


class Penalty(layers.Layer):
    """Adds the mean size of its input to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def test_losses_of_layers_count_once():
    def make():
        x = keras.Input([6])
        y = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))(x)
        y = layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.1))(Penalty()(y))
        return keras.Model(x, layers.Dense(2, bias_regularizer=keras.regularizers.L1(0.1))(Penalty()(y)))

    x, y = floats(6), floats(2)
    model, _ = check(make, (x, y), 3, 3, validation_data=(x[:7], y[:7]))
    assert model.losses  # Left for the caller, as in plain Keras.


def test_losses_of_one_layer_that_is_called_on_two_stages():
    def make():
        penalty = Penalty()
        x = keras.Input([6])
        y = penalty(layers.Dense(8, "tanh")(x))
        return keras.Model(x, penalty(layers.Dense(2)(y)))

    check(make, (floats(6), floats(2)), 2, partition=[2, 2])


# --- tied weights ---


class Projection(layers.Layer):
    """Scores every token by the weights of an embedding."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_embedding_is_the_output_projection_too(optimizer):
    def make():
        embedding = layers.Embedding(7, 4, name="embedding")
        x = keras.Input([5], dtype="int32")
        y = layers.Dense(4, "tanh")(layers.Dense(4, "tanh")(embedding(x)))
        return keras.Model(x, Projection(embedding)(y))

    compile = {"optimizer": optimizer, "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model, plan = check(make, (tokens(5), tokens(5)), 4, partition=[1, 1, 1, 1], compile=compile)
    assert len(model.trainable_variables) == 5
    assert [stage.parameters for stage in plan.stages] == [28, 20, 20, 0]


def test_keras_own_reversible_embedding():
    def make():
        embedding = layers.ReversibleEmbedding(7, 4)
        x = keras.Input([5], dtype="int32")
        return keras.Model(x, embedding(layers.Dense(4, "tanh")(embedding(x)), reverse=True))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    check(make, (tokens(5), tokens(5)), partition=[1, 1, 1], compile={"optimizer": "adam", "loss": loss})


def test_a_dense_layer_called_on_two_stages():
    def make():
        shared = layers.Dense(6, "tanh", name="shared")
        x = keras.Input([6])
        return keras.Model(x, layers.Dense(2, name="head")(shared(layers.Dense(6, name="middle")(shared(x)))))

    model, plan = check(make, (floats(6), floats(2)), 4, partition=[1, 1, 1, 1])
    assert operations(plan) == [["shared"], ["middle"], ["shared:1"], ["head"]]
    shared = model.get_layer("shared").kernel.value
    assert shared.device == plan.stages[0].device


def test_a_weight_passed_to_an_operation_as_an_argument():
    def make():
        x = keras.Input([5])
        dense = layers.Dense(5, "tanh", name="dense")
        y = layers.Dense(5, "tanh")(dense(x))
        return keras.Model(x, ops.matmul(y, dense.kernel))

    check(make, (floats(5), floats(5)), partition=[1, 1, 1])


# --- skip connections ---


def test_skip_connections_pass_no_stage_in_between():
    def conv(filters, name, **kwargs):
        return layers.Conv2D(filters, 3, padding="same", activation="tanh", name=name, **kwargs)

    def make():
        x = keras.Input([4, 4, 2])
        high = conv(3, "high")(x)
        low = conv(4, "low", strides=2)(high)
        bottom = conv(5, "bottom", strides=2)(low)
        y = layers.Concatenate(name="join_low")([layers.UpSampling2D(name="up_low")(bottom), low])
        y = conv(4, "merge_low")(y)
        y = layers.Concatenate(name="join_high")([layers.UpSampling2D(name="up_high")(y), high])
        return keras.Model(x, conv(1, "merge_high")(y))

    cuts = ["low", "bottom", "join_low", "join_high"]
    _, plan = check(make, (floats(4, 4, 2), floats(4, 4, 1)), 5, partition=cuts)
    made_by = {name: step.outputs[0] for step in plan.graph.steps for name in [step.name]}
    users = {name: [k for k, stage in enumerate(plan.stages) if made_by[name] in stage.inputs] for name in made_by}
    assert users["high"] == [1, 4]
    assert users["low"] == [2, 3]
    for name in ("high", "low"):
        assert [k for k, stage in enumerate(plan.stages) if made_by[name] in stage.outputs] == [
            0 if name == "high" else 1
        ]


def test_an_input_goes_straight_to_a_late_stage():
    def make():
        a, b = keras.Input([6], name="a"), keras.Input([3], name="b")
        y = layers.Dense(5, "tanh")(layers.Dense(5, "tanh")(a))
        return keras.Model([a, b], layers.Dense(2)(layers.Concatenate()([y, b])))

    _, plan = check(make, ([floats(6), floats(3)], floats(2)), partition=[1, 1, 2])
    late = plan.graph.inputs[1]
    assert [late in stage.inputs for stage in plan.stages] == [False, False, True]
    assert plan.stages[2].received_bytes == 5 * 4


# --- inputs and outputs ---


def two_by_two(inputs, outputs):
    def make():
        a, b = keras.Input([6], name="a"), keras.Input([3], name="b")
        y = layers.Dense(5, "tanh", name="hidden")(a)
        early = layers.Dense(2, name="early")(y)
        late = layers.Dense(1, name="late")(layers.Concatenate()([layers.Dense(4, "tanh")(y), b]))
        return keras.Model(
            [a, b] if inputs is list else {"b": b, "a": a},
            [early, late] if outputs is list else {"y": late, "x": early},
        )

    return make


@pytest.mark.parametrize("inputs", [list, dict])
@pytest.mark.parametrize("outputs", [list, dict])
def test_several_inputs_and_outputs(inputs, outputs):
    a, b, early, late = floats(6), floats(3), floats(2), floats(1)
    x = [a, b] if inputs is list else {"a": a, "b": b}
    if outputs is list:
        y, losses = [early, late], {"loss": ["mse", "mae"], "loss_weights": [0.3, 2.0], "metrics": [["mae"], ["mse"]]}
    else:
        y = {"x": early, "y": late}
        losses = {"loss": {"x": "mse", "y": "mae"}, "loss_weights": {"x": 0.3, "y": 2.0}, "metrics": {"y": ["mse"]}}
    model, _ = check(
        two_by_two(inputs, outputs), (x, y), compile=lambda: {"optimizer": keras.optimizers.SGD(0.1), **losses}
    )
    predicted = model.predict(x, batch_size=4, verbose=0)
    assert isinstance(predicted, outputs)
    shapes = [part.shape for part in (predicted if outputs is list else [predicted["x"], predicted["y"]])]
    assert shapes == [(ROWS, 2), (ROWS, 1)]


def test_nested_outputs():
    def make():
        x = keras.Input([6])
        y = layers.Dense(5, "tanh")(x)
        boxes = [layers.Dense(2, name="centre")(y), layers.Dense(3, name="size")(y)]
        return keras.Model(x, {"boxes": boxes, "score": layers.Dense(1, name="score")(layers.Dense(4)(y))})

    y = {"boxes": [floats(2), floats(3)], "score": floats(1)}
    losses = {"boxes": ["mse", "mae"], "score": "mse"}
    model, _ = check(make, (floats(6), y), compile=lambda: {"optimizer": "sgd", "loss": losses})
    predicted = model.predict(floats(6), verbose=0)
    assert [part.shape[1] for part in (*predicted["boxes"], predicted["score"])] == [2, 3, 1]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_head_of_an_output_without_loss_stays_as_it_was():
    def make():
        x = keras.Input([6])
        y = layers.Dense(5, "tanh")(x)
        idle = layers.Dense(2, name="idle_2")(layers.Dense(4, name="idle_1")(y))
        return keras.Model(x, {"used": layers.Dense(1)(layers.Dense(4)(y)), "idle": idle})

    def compile():
        return {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.5), "loss": {"used": "mse", "idle": None}}

    keras.utils.set_random_seed(0)
    before = make()
    after, _ = check(make, (floats(6), {"used": floats(1), "idle": floats(2)}), compile=compile)
    for name in ("idle_1", "idle_2"):
        for old, new in zip(before.get_layer(name).get_weights(), after.get_layer(name).get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)


class Scaled(layers.Layer):
    """Adds an optional second input, twice."""

    def call(self, x, more=None):
        return x if more is None else x + 2.0 * more


@pytest.mark.parametrize("there", [True, False])
def test_an_optional_input(there):
    def make():
        a, b = keras.Input([6], name="a"), keras.Input([4], name="b", optional=True)
        y = layers.Dense(4, "tanh")(a)
        return keras.Model({"a": a, "b": b}, layers.Dense(2)(Scaled()(y, b)))

    x = {"a": tf.constant(floats(6)), "b": tf.constant(floats(4)) if there else None}
    y = tf.constant(floats(2))
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = make()
            optimizer = keras.optimizers.SGD(0.1)

        def step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(x, training=True) - y))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True)
            )
            return loss

        losses = [float(strategy.run(step) if strategy else step()) for _ in range(2)]
        found.append((model, losses))
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=2e-6)
    assert found[0][1][0] != found[0][1][1]
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6


# --- layers that pass structures ---


class PairCell(layers.Layer):
    """Takes two tensors, returns two."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units, "tanh")

    def call(self, pair):
        a, b = pair
        return b, self.dense(ops.concatenate([a, b], axis=-1))


class NamedCell(layers.Layer):
    """Takes and returns a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, "tanh")

    def call(self, state):
        return {"h": self.dense(state["h"]) + state["c"], "c": ops.tanh(state["c"])}


def test_layers_that_pass_pairs_to_each_other():
    def make():
        x = keras.Input([4])
        pair = (x, layers.Dense(4)(x))
        for _ in range(3):
            pair = PairCell(4)(pair)
        return keras.Model(x, layers.Dense(2)(ops.concatenate(pair, axis=-1)))

    _, plan = check(make, (floats(4), floats(2)), 4)
    assert [len(stage.inputs) for stage in plan.stages][1:] == [2, 2, 2]


def test_layers_that_pass_dicts_to_each_other():
    def make():
        x = keras.Input([4])
        state = {"h": layers.Dense(4)(x), "c": x}
        for _ in range(2):
            state = NamedCell()(state)
        return keras.Model(x, layers.Dense(2)(state["h"]))

    check(make, (floats(4), floats(2)))


def test_recurrent_state_crosses_a_cut():
    def make():
        x = keras.Input([5, 3])
        _, h, c = layers.LSTM(4, return_state=True)(x)
        return keras.Model(x, layers.Dense(1)(layers.LSTM(4)(x, initial_state=[h, c])))

    check(make, (floats(5, 3), floats(1)), partition=[1, 1, 1])


# --- integers and sparse gradients ---


def test_integers_cross_cuts():
    def make():
        x = keras.Input([4])
        y = layers.Dense(4, "tanh")(x)
        positive = ops.cast(x > 0.0, "int32")
        z = layers.Embedding(2, 4)(positive)
        return keras.Model(x, layers.Dense(2)(ops.sum(z, axis=1) + y))

    _, plan = check(make, (floats(4), floats(2)), 3, partition=[2, 1, 4])
    crossing = [plan.graph.specs[ref].dtype for stage in plan.stages[1:] for ref in stage.inputs]
    assert {"bool", "float32"} == set(crossing) or {"int32", "float32"} == set(crossing)


class ShowsGradients(keras.Model):
    """A functional model that keeps the kinds of its gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.kinds = [type(gradient).__name__ for gradient in gradients]
        self.slices = [tuple(gradient.values.shape) for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"value": loss}


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_embeddings_stay_slices(twice):
    def make():
        x = keras.Input([3], dtype="int32")
        embedding = layers.Embedding(50, 4)
        y = layers.Dense(4, "tanh")(layers.Flatten()(embedding(x)))
        if twice:
            y = layers.Concatenate()([y, layers.Flatten()(embedding(x))])
        return ShowsGradients(x, layers.Dense(2)(y))

    data = (tokens(3, 50), floats(2))
    model, _ = check(make, data, num_micro_batches=5, partition=[2, 1, 1 + 3 * twice], compile=adam, epochs=3)
    assert model.kinds[0] == "IndexedSlices"
    assert "IndexedSlices" not in model.kinds[1:]
    assert model.slices == [(ROWS * 3 * (1 + twice), 4)]
