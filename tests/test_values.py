"""Ragged and sparse tensors as inputs, between stages and as outputs: as in plain Keras, or refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train
from keras import layers, ops

import tf_gpipe
from tf_gpipe import values
from tf_gpipe.errors import ModelError

ROWS = 11
DENSE = np.where(np.random.default_rng(0).random([ROWS, 6]) < 0.4, normal(ROWS, 6), 0).astype("float32")
SPARSE = tf.sparse.from_dense(DENSE)
RAGGED = tf.ragged.constant([[1, 2, 3], [4], [], [5, 6], [7, 8, 1, 2], [3], [2, 2], [5], [6, 1], [1], [4, 4, 4]])


# --- the functions ---


@pytest.mark.parametrize("value", [tf.constant(DENSE), SPARSE, RAGGED], ids=["dense", "sparse", "ragged"])
def test_values_are_taken_apart_and_put_together(value):
    parts = [values.rows_of(value, 0, 4), values.rows_of(value, tf.constant(4), tf.constant(7))]
    assert [int(values.num_rows(part)) for part in parts] == [4, 7]
    kinds = [values.kind_of(part) for part in parts]
    flat = values.components([parts[0], None, parts[1]])
    assert len(values.components(kinds)) == len(flat)
    again = [values.take_value(kind, flat) for kind in (kinds[0], None, kinds[1])]
    assert flat == []
    assert again[1] is None
    whole = values.concatenated([again[0], again[2]])
    assert type(whole) is type(value)
    for a, b in zip(values.components([whole]), values.components([value]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_flow_through_dense_floats_alone():
    kinds = [values.kind_of(value) for value in (tf.constant(DENSE), SPARSE, tf.constant([1]), None)]
    assert [values.has_gradient(kind) for kind in kinds] == [True, False, False, False]


# --- models ---


def of_sparse():
    x = keras.Input([6], sparse=True, name="counts")
    y = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(x))
    return keras.Model(x, layers.Dense(2)(y))


def of_ragged():
    x = keras.Input([None], ragged=True, dtype="int32", name="words")
    y = layers.Embedding(9, 4, name="embedding")(x)
    y = layers.Lambda(lambda t: tf.reduce_mean(t, axis=1), output_shape=(4,), name="mean")(y)
    y = layers.Lambda(lambda t: tf.where(tf.math.is_nan(t), tf.zeros_like(t), t), output_shape=(4,))(y)
    return keras.Model(x, layers.Dense(2)(layers.Dense(8, "tanh")(y)))


class OfSparse(keras.Model):
    """A subclassed model of a dictionary with a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = layers.Dense(8, "tanh"), layers.Dense(8, "tanh"), layers.Dense(2)

    def call(self, inputs):
        return self.c(self.b(self.a(inputs["counts"])) + inputs["offset"])


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("kind", ["sparse", "ragged", "subclassed"])
def test_a_model_of_sparse_or_ragged_tensors(kind, remat):
    make = {"sparse": of_sparse, "ragged": of_ragged, "subclassed": OfSparse}[kind]
    x = {"sparse": SPARSE, "ragged": RAGGED, "subclassed": {"counts": SPARSE, "offset": normal(ROWS, 8)}}[kind]
    data = tf.data.Dataset.from_tensor_slices((x, normal(ROWS, 2))).batch(4)
    partition = [3, 2] if kind == "ragged" else "flops"
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat=remat, partition=partition)
    found = []
    for scope in (None, strategy):
        keras.utils.set_random_seed(0)
        with scope_of(scope):
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        found.append((model, history))
    assert_same(*found)
    assert found[0][1]["loss"][0] != found[0][1]["loss"][1]
    assert len({weight.value.device for weight in found[1][0].weights}) == 2
    np.testing.assert_allclose(found[1][0].predict(x, verbose=0), found[0][0].predict(x, verbose=0), atol=1e-6)


def test_a_sparse_tensor_without_a_gradient_crosses_a_cut():
    def make():
        x = keras.Input([3], dtype="string")
        y = layers.StringLookup(vocabulary=["red", "green"], output_mode="multi_hot", sparse=True)(x)
        return keras.Model(x, layers.Dense(2)(layers.Dense(4, "tanh")(y)))

    words = tf.constant(np.random.default_rng(1).choice(["red", "green", "blue"], [ROWS, 3]).astype(object))
    data = words, tf.constant(normal(ROWS, 2))
    plain = train(make, data)
    piped = train(make, data, tf_gpipe.GPipeStrategy(3, 2, partition=[1, 1, 1]))
    assert_same(plain, piped)
    assert plain[1]["loss"][0] != plain[1]["loss"][1]


def test_a_ragged_output_is_predicted():
    def make():
        x = keras.Input([None], ragged=True, dtype="int32")
        y = layers.Lambda(lambda t: t * 2, output_shape=(None,))(x)
        return keras.Model(x, layers.Lambda(lambda t: t + 1, output_shape=(None,))(y))

    with tf_gpipe.GPipeStrategy(2, 3).scope():
        model = make()
    found = model.predict(RAGGED, batch_size=4, verbose=0)
    assert isinstance(found, tf.RaggedTensor)
    assert found.to_list() == [[2 * n + 1 for n in row] for row in RAGGED.to_list()]


def test_a_gradient_through_a_ragged_tensor_between_stages_is_refused():
    strategy = tf_gpipe.GPipeStrategy(2, 2, partition=[1, 4])
    with strategy.scope():
        model = of_ragged()
        model.compile("sgd", "mse")
    message = "(?s)Expected dense tensors where gradients leave a stage.*made by 'embedding'.*`partition`"
    with pytest.raises(ModelError, match=message):
        model.fit(RAGGED, normal(ROWS, 2), verbose=0)


# --- models of fewer operations than there are stages ---


class OnlyInference(keras.Model):
    """Does nothing while it is trained."""

    def call(self, x, training=False):
        return x if training else x * 2


def test_a_model_without_operations_gives_its_inputs():
    with tf_gpipe.GPipeStrategy(3, 2).scope():
        model = OnlyInference()
        model.compile("sgd", "mae")
    x, zeros = np.ones([5, 1]), np.zeros([5, 1])
    with pytest.warns(UserWarning, match="model does not have any trainable weights"):
        assert model.fit(x, zeros, verbose=0).history["loss"] == [1.0]
    assert model.evaluate(x, zeros, verbose=0) == 2.0


def test_a_model_that_is_smaller_than_the_pipeline_leaves_the_last_devices_without_work():
    def make():
        return keras.Sequential([keras.Input([6]), layers.Dense(4, "tanh", name="a"), layers.Dense(2, name="b")])

    strategy = tf_gpipe.GPipeStrategy(4, 3)
    data = normal(ROWS, 6), normal(ROWS, 2)
    plain, piped = train(make, data), train(make, data, strategy)
    assert_same(plain, piped)
    assert [stage.operations for stage in strategy.plan(piped[0]).stages] == [["a"], ["b"], [], []]
    assert largest_difference(plain[0], piped[0]) <= 1e-6


def test_an_output_that_is_an_input():
    def make():
        x = keras.Input([6], name="x")
        return keras.Model(x, [x, layers.Dense(2, name="last")(layers.Dense(6, "tanh")(x))])

    x, y = normal(ROWS, 6), normal(ROWS, 2)
    compile = {"optimizer": "sgd", "loss": ["mse", "mse"]}
    plain, piped = (
        train(make, (x, [ops.zeros_like(x), y]), s, compile=compile) for s in (None, tf_gpipe.GPipeStrategy(2, 3))
    )
    assert_same(plain, piped)
