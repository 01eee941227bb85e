"""Inputs of every structure, dtype and kind: as in plain Keras, or refused with the input named."""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train
from keras import layers, ops, tree

import tf_gpipe

ROWS, BATCH = 11, 4  # two whole batches and one of three rows, for two micro-batches
A, B, C, Y = normal(ROWS, 4), normal(ROWS, 3, seed=1), normal(ROWS, 2, seed=2), normal(ROWS, 1, seed=3)
Pair = collections.namedtuple("Pair", "a b")

other_structure = pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match:UserWarning")
other_keys = pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict:UserWarning")
ran_out = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def gpipe(num_stages: int = 3, num_micro_batches: int = 2) -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)


def both(make: Callable[[], keras.Model], strategy: tf_gpipe.GPipeStrategy | None = None) -> list[keras.Model]:
    """The same model, plainly and in a pipeline."""
    models = []
    for one in (None, strategy or gpipe()):
        with scope_of(one):
            keras.utils.set_random_seed(0)
            models.append(make())
            models[-1].compile(keras.optimizers.SGD(0.05), "mse")
    return models


def assert_pipelined(model: keras.Model, num_stages: int = 3) -> None:
    """The model ran in as many stages, and its weights are on several devices."""
    pipelines = list(model._gpipe_pipelines[model.distribute_strategy].values())
    assert [len(pipeline.stages) for pipeline in pipelines] == [num_stages] * len(pipelines) != []
    assert len({v.value.device for v in model.weights}) > 1


def assert_same_values(expected: Any, received: Any) -> None:
    tree.assert_same_structure(expected, received)
    for a, b in zip(tree.flatten(expected), tree.flatten(received), strict=True):
        assert a.dtype == b.dtype
        if a.dtype == object:
            assert a.tolist() == b.tolist()
        else:
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)


def sgd() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"}


def check(make: Callable[[], keras.Model], x: Any, y: Any = Y, *, predict: bool = False) -> keras.Model:
    """Trains (and predicts, if asked to) plainly and in stages: all is equal. Returns the pipelined model."""
    data, batch_size = ((x,), None) if y is None else ((x, y), BATCH)
    plain, piped = (train(make, data, strategy, compile=sgd, batch_size=batch_size) for strategy in (None, gpipe()))
    assert_same(plain, piped)
    assert_pipelined(piped[0])
    start = both(make)[0]
    if start.weights:
        assert largest_difference(start, piped[0]) > 1e-3, "the weights have moved"
    losses = piped[1]["loss"]
    assert losses[0] != losses[1]
    if predict:
        batch = tree.map_structure(lambda part: part[:BATCH], x)
        assert_same_values(*(model.predict_on_batch(batch) for model in (plain[0], piped[0])))
    return piped[0]


def hidden(x: keras.KerasTensor) -> keras.KerasTensor:
    """Two layers, so that with a head there is one for each of three stages."""
    return layers.Dense(6, "tanh", name="second")(layers.Dense(6, "tanh", name="first")(x))


def two_inputs(structure: Callable[[Any, Any], Any] = lambda a, b: {"a": a, "b": b}, **optional: bool) -> keras.Model:
    """A model of `a`, and of `b` on the last stage."""
    a, b = keras.Input([4], name="a"), keras.Input([3], name="b", **optional)
    return keras.Model(structure(a, b), layers.Dense(1, name="head")(Adds()(hidden(a), b)), name="model")


class Adds(layers.Layer):
    """Adds the mean of a second input to every value of the first, where there is one."""

    def call(self, x, more=None):
        return x if more is None else x + ops.mean(more, axis=-1, keepdims=True)


# --- structures ---


@pytest.mark.parametrize(
    ("structure", "data"),
    [
        (lambda a, b: [a, b], [A, B]),
        (lambda a, b: (a, b), (A, B)),
        (lambda a, b: [a, b], (A, B)),
        (lambda a, b: {"a": a, "b": b}, {"b": B, "a": A}),
        (lambda a, b: [a, b], {"b": B, "a": A}),
        (Pair, Pair(A, B)),
        pytest.param(lambda a, b: {"z": a, "b": b}, {"z": A, "b": B}, marks=other_keys),
        pytest.param(lambda a, b: {"a": a, "b": b}, [A, B], marks=other_structure),
        pytest.param(lambda a, b: {"a": a, "b": b}, {"a": A, "b": B, "more": C}, marks=other_structure),
    ],
    ids=[
        "list",
        "tuple",
        "tuple for list",
        "dict",
        "dict for list",
        "named tuple",
        "other keys",
        "list for dict",
        "more",
    ],
)
def test_structures_of_two_inputs(structure, data):
    check(lambda: two_inputs(structure), data, predict=True)


@other_keys
def test_nested_inputs():
    def make():
        a, b, c = (keras.Input([n], name=name) for n, name in ((4, "a"), (3, "b"), (2, "c")))
        y = layers.Dense(1)(layers.Concatenate()([hidden(a), b, c]))
        return keras.Model({"one": a, "more": [b, {"c": c}]}, y)

    check(make, {"more": [B, {"c": C}], "one": A}, predict=True)


class Takes(keras.Model):
    """Picks `a` and `b` out of whatever it is called with."""

    def __init__(self, pick: Callable[[Any], tuple[Any, Any]]) -> None:
        super().__init__()
        self.pick = pick
        self.first, self.second, self.head = layers.Dense(6, "tanh"), layers.Dense(6, "tanh"), layers.Dense(1)

    def call(self, x):
        a, b = self.pick(x)
        y = self.second(self.first(a))
        return self.head(y if b is None else ops.concatenate([y, b], axis=-1))


@pytest.mark.parametrize(
    ("data", "pick"),
    [
        ([A, B], lambda x: x),
        ({"a": A, "b": B, "unused": C}, lambda x: (x["a"], x["b"])),
        ({"one": A, "more": [{"b": B}, C]}, lambda x: (x["one"], x["more"][0]["b"])),
        (Pair(A, B), lambda x: (x.a, x.b)),
    ],
    ids=["list", "dict", "nested", "named tuple"],
)
def test_structures_that_a_subclassed_model_takes(data, pick):
    check(lambda: Takes(pick), data, predict=True)


@pytest.mark.parametrize("there", [[None], [B], [None, B, None]], ids=["none", "given", "in turn"])
def test_none_among_the_inputs_of_a_subclassed_model(there):
    plain, ours = both(lambda: Takes(lambda x: (x["a"], x["b"])) if len(there) == 1 else AddsToo())
    for b in there:
        losses = [m.fit({"a": A, "b": b}, Y, batch_size=BATCH, shuffle=False, verbose=0) for m in (plain, ours)]
        np.testing.assert_allclose(losses[1].history["loss"], losses[0].history["loss"], rtol=2e-6)
        assert largest_difference(plain, ours) <= 1e-6
    assert_pipelined(ours)


class AddsToo(Takes):
    """Takes `b` or not with the same weights."""

    def __init__(self) -> None:
        super().__init__(lambda x: (x["a"], x["b"]))
        self.adds = Adds()

    def call(self, x):
        return self.head(self.adds(self.second(self.first(x["a"])), x["b"]))


def test_a_dataclass_is_refused_as_by_keras():
    @dataclasses.dataclass
    class Inputs:
        a: Any
        b: Any

    for model in both(two_inputs):
        with pytest.raises(ValueError, match="Unrecognized data type"):
            model.fit(Inputs(A, B), Y, verbose=0)


# --- optional inputs ---


def batches_with_none():
    for start in range(0, ROWS, BATCH):
        yield {"a": A[start : start + BATCH], "b": None}, Y[start : start + BATCH]


def dataset_with_none() -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((A, Y)).batch(BATCH)
    return data.map(lambda a, y: ({"a": a, "b": None}, y))


@ran_out
@pytest.mark.parametrize(
    ("structure", "data"),
    [
        (dict, lambda: ({"a": A, "b": None}, Y)),
        (list, lambda: ([A, None], Y)),
        (dict, lambda: (dataset_with_none(),)),
        (dict, lambda: (batches_with_none(),)),
    ],
    ids=["dict", "list", "tf.data", "generator"],
)
def test_an_optional_input_that_is_none(structure, data):
    models = both(lambda: two_inputs(lambda a, b: structure(a=a, b=b) if structure is dict else [a, b], optional=True))
    start = models[0].get_weights()
    arguments = {"batch_size": BATCH} if len(data()) == 2 else {}
    losses = [m.fit(*data(), shuffle=False, verbose=0, **arguments).history["loss"] for m in models]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    assert largest_difference(*models) <= 1e-6
    assert np.max(np.abs(models[1].get_weights()[0] - start[0])) > 1e-3
    assert_pipelined(models[1])
    x = {"a": A, "b": None} if structure is dict else [A, None]
    assert_same_values(*(m.predict(x, batch_size=BATCH, verbose=0) for m in models))


def test_an_optional_input_that_comes_and_goes():
    models = both(lambda: two_inputs(optional=True))
    for b in (None, B, None):
        losses = [m.fit({"a": A, "b": b}, Y, batch_size=BATCH, shuffle=False, verbose=0) for m in models]
        np.testing.assert_allclose(losses[1].history["loss"], losses[0].history["loss"], rtol=2e-6)
        assert largest_difference(*models) <= 1e-6
    assert_pipelined(models[1])


def test_none_for_an_input_that_is_not_optional():
    for model in both(two_inputs):
        with pytest.raises(ValueError, match="The input 'b' is not optional, but None was passed"):
            model.fit(dataset_with_none(), shuffle=False, verbose=0)


# --- dtypes ---

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool"]


@pytest.mark.parametrize("given", ["float64", "float16", "uint8", "bool"])
def test_every_dtype_is_cast_to_that_of_the_input(given):
    def make():
        inputs = {name: keras.Input([2], name=name, dtype=name) for name in DTYPES}
        y = hidden(layers.Concatenate()([ops.cast(x, "float32") for x in inputs.values()]))
        return keras.Model(inputs, layers.Dense(1)(y))

    rng = np.random.default_rng(0)
    data = {name: rng.uniform(0, 2.9, (ROWS, 2)).astype(given) for name in DTYPES}  # 2.9 is 2 as an integer
    check(make, data)


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "bool"])
def test_a_layer_casts_an_input_of_another_dtype_itself(dtype):
    def make():
        x = keras.Input([4], dtype=dtype)
        y = layers.Dense(6, "tanh")(x) if dtype.startswith("float") else layers.Rescaling(0.5)(x)
        return keras.Model(x, layers.Dense(1)(hidden(y)))

    check(make, (A > 0) if dtype == "bool" else np.abs(3 * A).astype(dtype))


# --- inputs that few stages or none use ---


@pytest.mark.parametrize("structure", [list, dict])
def test_an_input_that_nothing_uses(structure):
    def make():
        a, b = keras.Input([4], name="a"), keras.Input([3], name="b")
        return keras.Model([a, b] if structure is list else {"a": a, "b": b}, layers.Dense(1)(hidden(a)))

    check(make, [A, B * np.nan] if structure is list else {"a": A, "b": B * np.nan})


@pytest.mark.parametrize(
    ("which", "given"), [("a", A), ("b", B), ("y", None)], ids=["first input", "unused input", "the same output"]
)
def test_an_output_that_is_an_input_or_another_output(which, given):
    def make():
        a, b = keras.Input([4], name="a"), keras.Input([3], name="b")
        y = layers.Dense(1)(hidden(a))
        return keras.Model([a, b], {"y": y, "z": {"a": a, "b": b, "y": y}[which]})

    model = check(make, [A, B], {"y": Y, "z": -Y if given is None else given + 0.5})
    predicted = model.predict([A, B], batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(predicted["z"], predicted["y"] if given is None else given)


def test_gradients_go_through_an_output_that_is_an_input():
    def make():
        a = keras.Input([4], name="a")
        return keras.Model(a, [layers.Dense(4)(hidden(a)), a])

    plain, ours = both(make)
    x = tf.constant(A)

    def gradient(model: keras.Model) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, same = model(x, training=True)
            loss = ops.sum(ops.square(y)) + ops.sum(ops.sin(same))
        return tape.gradient(loss, [x, *model.trainable_variables])

    for expected, received in zip(gradient(plain), ours.distribute_strategy.run(gradient, (ours,)), strict=True):
        np.testing.assert_allclose(received, expected, rtol=2e-6, atol=1e-6)
    assert_pipelined(ours)


# --- scalars ---


@pytest.mark.parametrize(
    ("shape", "data", "target"),
    [([], (ROWS,), (ROWS,)), ([], (ROWS, 1), (ROWS, 1)), ([1], (ROWS,), (ROWS, 1)), ([1], (ROWS, 1), (ROWS,))],
)
def test_one_number_for_each_row(shape, data, target):
    def make():
        x = keras.Input(shape, name="x")
        return keras.Model(x, layers.Dense(1)(hidden(x if shape else ops.expand_dims(x, axis=-1))))

    check(make, normal(*data, seed=4), normal(*target, seed=5))


def test_a_number_for_each_row_goes_to_a_late_stage():
    def make():
        a, scale = keras.Input([4], name="a"), keras.Input([], name="scale")
        return keras.Model({"a": a, "scale": scale}, layers.Dense(1)(hidden(a)) * ops.expand_dims(scale, axis=-1))

    check(make, {"a": A, "scale": normal(ROWS, seed=4)})


# --- inputs that are wrong ---


def message_of(model: keras.Model, x: Any, y: Any) -> str:
    """What `fit` says is wrong, without the list of Keras's arguments."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model.fit(x, y, batch_size=BATCH, verbose=0)
    return re.sub(r"Tensor\(\S+", "Tensor", str(error.value).split("Arguments received")[0])


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ({"a": A}, 'Missing data for input "b"'),
        ({"a": A, "bb": B}, 'Missing data for input "b"'),
        ([A], r"\['a', 'b'\], but it received 1 input"),
        (A, r"\['a', 'b'\], but it received 1 input"),
        ([A, B, C], r"\['a', 'b'\], but it received 3 input"),
        ({"a": A, "b": C}, r"name 'b' .* expected shape=\(None, 3\), found shape=\(None, 2\)"),
        ({"a": A, "b": np.tile(B[:, :, None], 2)}, r"name 'b' .* incompatible shape \(None, 3, 2\)"),
        ({"a": A, "b": B[:5]}, "cardinality is ambiguous"),
    ],
    ids=["missing", "misnamed", "short list", "one tensor", "long list", "shape", "rank", "rows"],
)
def test_wrong_inputs_are_refused_as_by_keras(x, says):
    said = [message_of(model, x, Y) for model in both(two_inputs)]
    assert re.search(says, said[1])
    assert said[0] == said[1]


# --- rows that are none, or no numbers ---


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_batch_without_rows(num_micro_batches):
    models = both(two_inputs, gpipe(3, num_micro_batches))
    start = models[0].get_weights()
    nothing = {"a": A[:0], "b": B[:0]}
    losses = [[float(m.train_on_batch(nothing, Y[:0])), float(m.test_on_batch(nothing, Y[:0]))] for m in models]
    assert losses[0] == losses[1]
    assert_pipelined(models[1])
    assert_same_values(*(m.predict_on_batch(nothing) for m in models))
    assert all(np.array_equal(a, b) for a, b in zip(start, models[1].get_weights(), strict=True))
    assert int(models[1].optimizer.iterations) == int(models[0].optimizer.iterations) == 1


@ran_out
def test_a_batch_without_rows_among_others():
    def batches():
        for rows in (4, 0, 1, 3):
            yield {"a": A[:rows], "b": B[:rows]}, Y[:rows]

    kinds = {"a": tf.TensorSpec([None, 4]), "b": tf.TensorSpec([None, 3])}, tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=kinds)
    model = check(two_inputs, data, None)
    assert int(model.optimizer.iterations) == 8


def test_nan_stays_in_its_row():
    models = both(two_inputs)
    x = {
        "a": np.where(np.arange(ROWS)[:, None] == 2, np.nan, A),
        "b": np.where(np.arange(ROWS)[:, None] == 9, np.nan, B),
    }
    predicted = [m.predict(x, batch_size=ROWS, verbose=0) for m in models]
    assert_pipelined(models[1])
    assert np.flatnonzero(np.isnan(predicted[1])).tolist() == [2, 9]
    assert_same_values(*predicted)


def test_nan_reaches_the_weights_that_it_reaches_in_plain_keras():
    def make():
        a, b = keras.Input([4], name="a"), keras.Input([3], name="b")
        y = hidden(a)
        return keras.Model({"a": a, "b": b}, {"y": layers.Dense(1)(y), "z": layers.Dense(1)(layers.Dense(2)(b))})

    models = both(make)
    for m in models:
        history = m.fit({"a": A, "b": B * np.nan}, {"y": Y, "z": Y}, batch_size=BATCH, shuffle=False, verbose=0)
        assert np.isnan(history.history["loss"]).all()
    found = [[np.isnan(w).all() for w in m.get_weights()] for m in models]
    assert found[0] == found[1]
    assert 0 < sum(found[1]) < len(found[1])
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)
    assert_pipelined(models[1])


# --- sparse and ragged tensors ---


def one_input(**arguments: Any) -> keras.Model:
    x = keras.Input([4], name="counts", **arguments)
    return keras.Model(x, layers.Dense(1)(hidden(x)), name="model")


COUNTS = A * (A > 0)


@pytest.mark.parametrize("data", [tf.sparse.from_dense(COUNTS), scipy.sparse.csr_matrix(COUNTS)], ids=["tf", "scipy"])
def test_sparse_data_for_a_dense_input(data):
    _, ours = runs = both(one_input)
    histories = [m.fit(data, Y, batch_size=BATCH, shuffle=False, verbose=0).history for m in runs]
    assert_same(*zip(runs, histories, strict=True))
    np.testing.assert_allclose(
        ours.predict(data, batch_size=BATCH, verbose=0), ours.predict(COUNTS, verbose=0), rtol=0, atol=1e-6
    )
    assert_pipelined(ours)


def test_dense_data_for_a_sparse_input():
    check(lambda: one_input(sparse=True), COUNTS)


SENTENCES = tf.RaggedTensor.from_row_lengths(np.arange(32, dtype="int32") % 7, [1, 5] * 5 + [2])


@pytest.mark.parametrize("late", [False, True], ids=["first stage", "last stage"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_inputs(kind, late):
    def make():
        a = keras.Input([4], name="a")
        if kind == "ragged":
            words = keras.Input([None], dtype="int32", ragged=True, name="words")
            y = layers.GlobalAveragePooling1D()(layers.Embedding(7, 4)(words))
        else:
            words = keras.Input([4], sparse=True, name="words")
            y = layers.Dense(4)(words)
        y = layers.Concatenate()([hidden(a), y]) if late else hidden(layers.Add()([a, y]))
        return keras.Model({"a": a, "words": words}, layers.Dense(1)(y))

    words = SENTENCES if kind == "ragged" else tf.sparse.from_dense(COUNTS)
    models = both(make)
    start = models[0].get_weights()
    data = tf.data.Dataset.from_tensor_slices(({"a": A, "words": words}, Y)).batch(BATCH)
    histories = [m.fit(data, epochs=2, shuffle=False, verbose=0).history for m in models]
    assert_same(*zip(models, histories, strict=True))
    assert all(np.max(np.abs(a - b)) > 1e-4 for a, b in zip(start, models[1].get_weights(), strict=True))
    assert_pipelined(models[1])
    x = {"a": A, "words": words}
    assert_same_values(*(m.predict(x, batch_size=BATCH, verbose=0) for m in models))


# --- strings, and layers that turn data into numbers ---

WORDS = tf.constant([["red", "green"], ["blue", "red"], ["x", ""]] * 4)[:ROWS]


@pytest.mark.parametrize(
    ("lookup", "late"),
    [(lambda: layers.StringLookup(vocabulary=["red", "green", "blue"]), True), (lambda: layers.Hashing(7), False)],
    ids=["StringLookup on the last stage", "Hashing on the first"],
)
def test_words_are_looked_up_inside_the_model(lookup, late):
    def make():
        a, words = keras.Input([4], name="a"), keras.Input([2], dtype="string", name="words")
        y = layers.Flatten()(layers.Embedding(7, 3)(lookup()(words)))
        y = layers.Concatenate()([hidden(a), y]) if late else hidden(layers.Concatenate()([y, a]))
        return keras.Model({"a": a, "words": words}, layers.Dense(1)(y))

    check(make, {"a": A, "words": WORDS}, predict=late)


@pytest.mark.parametrize("shape", [(ROWS, 1), (ROWS,)])
def test_text_is_looked_up_inside_the_model(shape):
    def make():
        x = keras.Input([1], dtype="string")
        y = layers.TextVectorization(vocabulary=["red", "green", "blue"], output_sequence_length=3)(x)
        return keras.Model(x, layers.Dense(1)(hidden(layers.Flatten()(layers.Embedding(8, 3)(y)))))

    check(make, tf.reshape(tf.strings.reduce_join(WORDS, axis=-1, separator=" "), shape))


def test_strings_are_an_output():
    def make():
        a, words = keras.Input([4], name="a"), keras.Input([2], dtype="string", name="words")
        return keras.Model({"a": a, "words": words}, {"y": layers.Dense(1)(hidden(a)), "words": words})

    models = both(make)
    predicted = [m.predict({"a": A, "words": WORDS}, batch_size=BATCH, verbose=0) for m in models]
    assert_same_values(*predicted)
    assert predicted[1]["words"].tolist() == WORDS.numpy().tolist()
    assert_pipelined(models[1])


def test_layers_that_turn_data_into_numbers():
    def make():
        measured = layers.Normalization()
        measured.adapt(A)
        layer_of = {
            "measured": measured,
            "known": layers.Normalization(mean=[0.1] * 4, variance=[2.0] * 4),
            "bins": layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0], output_mode="multi_hot"),
            "categories": layers.CategoryEncoding(5, "multi_hot"),
            "ids": layers.IntegerLookup(vocabulary=[1, 3, 4], output_mode="multi_hot"),
        }
        whole = {"categories": "int32", "ids": "int64"}
        inputs = {name: keras.Input([4], name=name, dtype=whole.get(name, "float32")) for name in layer_of}
        y = [ops.cast(layer_of[name](x), "float32") for name, x in inputs.items()]
        return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([hidden(layers.Concatenate()(y[:3])), *y[3:]])))

    integers = np.random.default_rng(6).integers(0, 5, (ROWS, 4))
    check(make, {"measured": A, "known": -A, "bins": 2 * A, "categories": integers, "ids": integers})
