"""Preprocessing layers inside a model: strings, tables, adapted statistics, saved models as layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, scope_of, train
from layer_checks import ROWS, check, compare_predictions, floats, strings

import tf_gpipe

L = keras.layers

TEXT = strings(["a red hen"], ["red"], [""], ["the green hen, and a red one"], ["Hen!"], ["green green"], ["blue a"])
WORDS = ["red", "green", "hen"]


def of_strings(layer: Callable[[], keras.Layer], embed: bool = True, shape: tuple[int, ...] = (1,)) -> Any:
    """A model that starts with strings, which a layer on the second stage turns into numbers."""

    def make() -> keras.Model:
        x = keras.Input(shape, dtype="string")
        y = layer()(L.Identity(name="strings")(x))
        y = L.Flatten()(L.Embedding(8, 3)(y)) if embed else y
        return keras.Model(x, L.Dense(2)(L.Dense(4, "tanh")(y)))

    return make


VECTORISERS: dict[str, tuple[Callable[[], keras.Layer], bool]] = {
    "int": (lambda: L.TextVectorization(vocabulary=WORDS, output_sequence_length=4), True),
    "characters": (
        lambda: L.TextVectorization(
            vocabulary=list("rehd"), split="character", standardize="lower", output_sequence_length=5
        ),
        True,
    ),
    "multi_hot": (lambda: L.TextVectorization(vocabulary=WORDS, output_mode="multi_hot"), False),
    "count": (lambda: L.TextVectorization(vocabulary=WORDS, output_mode="count", ngrams=2), False),
    "tf_idf": (
        lambda: L.TextVectorization(vocabulary=WORDS, output_mode="tf_idf", idf_weights=[1.0, 0.5, 0.2]),
        False,
    ),
}


@pytest.mark.parametrize("mode", VECTORISERS)
def test_text_is_vectorised_inside_the_model(mode: str) -> None:
    layer, embed = VECTORISERS[mode]
    check(of_strings(layer, embed), (TEXT, floats(2)))


def test_text_vectorisation_adapted_before_and_a_dataset_of_strings() -> None:
    layer_data = tf.data.Dataset.from_tensor_slices(TEXT[:, 0]).batch(3)

    def adapted() -> keras.Layer:
        layer = L.TextVectorization(max_tokens=6, output_sequence_length=4)
        layer.adapt(layer_data)
        return layer

    make = of_strings(adapted)
    data = tf.data.Dataset.from_tensor_slices((TEXT, floats(2))).batch(4)
    strategy = tf_gpipe.GPipeStrategy(3, 3, partition=[1, 3, 2])
    plain, piped = (train(make, (data,), s, batch_size=None) for s in (None, strategy))
    assert_same(plain, piped)
    assert plain[1]["loss"][0] != plain[1]["loss"][-1]
    assert strategy.plan(piped[0]).stages[1].operations[0].startswith("text_vectorization")
    compare_predictions(plain[0], piped[0], TEXT)


LOOKUPS: dict[str, tuple[Callable[[], keras.Layer], bool]] = {
    "StringLookup": (lambda: L.StringLookup(vocabulary=WORDS, num_oov_indices=2), True),
    "StringLookup, mask": (lambda: L.StringLookup(vocabulary=WORDS, mask_token=""), True),
    "StringLookup, multi_hot": (lambda: L.StringLookup(vocabulary=WORDS, output_mode="multi_hot"), False),
    "Hashing": (lambda: L.Hashing(8, salt=[3, 5]), True),
    "Hashing, mask": (lambda: L.Hashing(8, mask_value="red"), True),
    "HashedCrossing": (lambda: Crossing(8), True),
}


@keras.saving.register_keras_serializable("test_preprocessing_layers")
class Crossing(L.Layer):
    """Crosses the first column of its input with the second."""

    def __init__(self, bins: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.crossing = L.HashedCrossing(bins)

    def call(self, x: Any) -> Any:
        return self.crossing((x[:, :1], x[:, 1:2]))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((None, 1), "int64")


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_table_of_strings_on_a_late_stage(name: str) -> None:
    layer, embed = LOOKUPS[name]
    words = np.random.default_rng(0).choice([*WORDS, "blue"], (ROWS, 3)).astype(object)
    check(of_strings(layer, embed, (3,)), (tf.constant(words, tf.string), floats(2)))


def test_integers_are_looked_up_and_back() -> None:
    def make() -> keras.Model:
        x = keras.Input([3], dtype="int64")
        y = L.IntegerLookup(vocabulary=[10, 20, 30], oov_token=-1)(x)
        back = L.IntegerLookup(vocabulary=[10, 20, 30], invert=True)(y)
        encoded = L.CategoryEncoding(40, "count")(L.Lambda(lambda v: keras.ops.maximum(v, 0))(back))
        return keras.Model(x, L.Dense(2)(L.Concatenate()([encoded, L.Flatten()(L.Embedding(5, 2)(y))])))

    check(make, (np.random.default_rng(0).choice([10, 20, 30, 39], (ROWS, 3)), floats(2)))


# --- sparse and ragged tensors inside --------------------------------------------------------------------------------


def not_dense(kind: str) -> Callable[[Any], Any]:
    """Words as a sparse tensor; or as a ragged one, whose embeddings are added up."""

    def call(x: Any) -> Any:
        if kind == "sparse":
            return L.TextVectorization(vocabulary=WORDS, output_mode="multi_hot", sparse=True, name="text")(x)
        y = L.TextVectorization(vocabulary=WORDS, ragged=True, name="text")(x)
        return L.Lambda(lambda v: tf.reduce_sum(v, axis=1), output_shape=(3,))(L.Embedding(8, 3)(y))

    return call


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_a_tensor_that_is_not_dense_crosses_a_cut(kind: str) -> None:
    def make() -> keras.Model:
        x = keras.Input([1], dtype="string")
        return keras.Model(x, L.Dense(2, name="head")(L.Dense(4, "tanh")(not_dense(kind)(x))))

    partition = {"sparse": [1, 1, 1], "ragged": [1, 3, 1]}[kind]
    _, plan = check(make, (TEXT, floats(2)), partition=partition)
    assert plan.stages[0].operations == ["text"]


def test_a_gradient_does_not_cross_a_cut_in_a_ragged_tensor() -> None:
    with tf_gpipe.GPipeStrategy(3, 2, partition=[1, 1, 3]).scope():
        x = keras.Input([1], dtype="string")
        model = keras.Model(x, L.Dense(2, name="head")(L.Dense(4)(not_dense("ragged")(x))))
        model.compile("sgd", "mse")
    with pytest.raises(tf_gpipe.GPipeError, match="dense tensors where gradients leave a stage.*embedding"):
        model.fit(TEXT, floats(2), verbose=0)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_a_tensor_that_is_not_dense_may_be_used_within_a_stage(kind: str) -> None:
    def make() -> keras.Model:
        x = keras.Input([1], dtype="string")
        return keras.Model(x, L.Dense(2, name="head")(L.Dense(4, "tanh")(not_dense(kind)(x))))

    _, plan = check(make, (TEXT, floats(2)), partition=[2 if kind == "sparse" else 4, 1])
    assert plan.stages[1].operations == ["head"]


# --- adapted statistics ----------------------------------------------------------------------------------------------


def normalised() -> keras.Model:
    x = keras.Input([4])
    y = L.Normalization(name="norm")(L.Identity()(x))
    return keras.Model(x, L.Dense(2)(L.Dense(5, "tanh")(y)))


def test_normalization_adapted_inside_the_model_between_trainings() -> None:
    data = floats(4) * 3 + 2, floats(2)
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(4, 3, partition=[1, 1, 1, 1])):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = normalised()
            model.get_layer("norm").adapt(data[0])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(*data, verbose=0).history["loss"]
        with scope_of(strategy):
            model.get_layer("norm").adapt(data[0] * 5 - 1)
            model.compile(keras.optimizers.SGD(0.1), "mse")  # So Keras asks for it: statistics are constants.
        losses += model.fit(*data, verbose=0).history["loss"]
        losses.append(model.evaluate(*data, verbose=0))
        found.append((model, {"loss": losses}))
    assert_same(*found)
    assert found[0][1]["loss"][0] != pytest.approx(found[0][1]["loss"][1], rel=1e-2)
    compare_predictions(found[0][0], found[1][0], data[0])


def test_tables_and_bins_adapted_again_between_trainings() -> None:
    def make() -> keras.Model:
        x = keras.Input([3])
        bins = L.Discretization(num_bins=3, name="bins")
        lookup = L.IntegerLookup(max_tokens=5, name="lookup")
        lookup.adapt(np.array([0, 1, 1, 2]))
        bins.adapt(floats(3))
        y = L.Embedding(6, 3)(lookup(bins(x)))
        return keras.Model(x, L.Dense(2)(L.Flatten()(y)))

    data = floats(3), floats(2)
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3, partition=[1, 1, 3])):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(*data, verbose=0).history["loss"]
        with scope_of(strategy):
            model.get_layer("bins").adapt(floats(3) * 2 - 1)
            model.get_layer("lookup").adapt(np.array([2, 2, 2, 0, 0]))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        losses += model.fit(*data, verbose=0).history["loss"]
        found.append((model, {"loss": losses}))
    assert_same(*found)
    compare_predictions(found[0][0], found[1][0], data[0])


# --- images ----------------------------------------------------------------------------------------------------------


def test_bytes_are_augmented_rescaled_and_resized_inside_the_model() -> None:
    def make() -> keras.Model:
        x = keras.Input([8, 8, 3], dtype="uint8")
        augment = L.Pipeline([L.RandomFlip(), L.RandomTranslation(0.2, 0.2), L.RandomContrast(0.3)])
        y = L.Resizing(6, 6)(L.Rescaling(1 / 255)(augment(x)))
        return keras.Model(x, L.Dense(2)(L.Flatten()(L.Conv2D(3, 3, activation="tanh")(y))))

    x = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 8, 3), np.uint8)
    check(make, (x, floats(2)), per_micro_batch=True)


# --- a saved model as a layer ----------------------------------------------------------------------------------------


def test_a_saved_model_as_a_layer(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    inner = keras.Sequential([keras.Input([4]), L.Dense(5, "tanh"), L.BatchNormalization(), L.Dense(3)])
    inner.export(str(tmp_path / "inner"), verbose=False)

    def make() -> keras.Model:
        x = keras.Input([4])
        y = L.TFSMLayer(str(tmp_path / "inner"), trainable=False, name="saved")(L.Dense(4, name="stem")(x))
        return keras.Model(x, L.Dense(2, name="head")(y))

    _, plan = check(make, (floats(4), floats(2)))
    assert [stage.operations for stage in plan.stages] == [["stem"], ["saved"], ["head"]]
    assert len(plan.stages[1].variables) == 8
