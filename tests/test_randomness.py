"""Random layers: what is drawn does not depend on stages or recomputation, and with one micro-batch is Keras's own.

Each micro-batch draws anew, from the state its predecessor left; the recomputation of a micro-batch draws what its
forward pass drew.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train

import tf_gpipe

L = keras.layers

REMAT_MODES = ["always", "except_last", "never"]


class CallNoise(keras.layers.Layer):
    """A user's layer that draws twice in each call."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x, training=None):
        if not training:
            return x
        scale = keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, seed=self.seed_generator)
        return x * scale + keras.random.normal(keras.ops.shape(x), 0.0, 0.1, seed=self.seed_generator)


class SelfAttention(keras.layers.Layer):
    """`MultiHeadAttention` of a sequence with itself."""

    def __init__(self, **arguments):
        super().__init__()
        self.attention = L.MultiHeadAttention(**arguments)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x, training=None):
        return self.attention(x, x, training=training)


def dense_model():
    return keras.Sequential(
        [keras.Input([6]), L.Dense(8, "tanh"), L.Dropout(0.4), L.Dense(8, "tanh"), L.GaussianNoise(0.3)]
        + [L.Dense(8, "tanh"), L.GaussianDropout(0.2), L.Dense(2)]
    )


def user_model():
    return keras.Sequential(
        [keras.Input([6]), L.Dense(8, "tanh"), CallNoise(), L.Dense(4), L.AlphaDropout(0.3), L.Dense(2)]
    )


def shared_model():
    # One layer, and so one seed, in two stages.
    x, dropout = keras.Input([6]), L.Dropout(0.4)
    h = dropout(L.Dense(8, "tanh")(x))
    return keras.Model(x, L.Dense(2)(dropout(L.Dense(8, "tanh")(h))))


def sequence_model():
    attention = {"num_heads": 2, "key_dim": 3, "dropout": 0.3}
    return keras.Sequential(
        [keras.Input([5, 4]), L.SpatialDropout1D(0.4), SelfAttention(**attention), L.LSTM(4, dropout=0.3, seed=1)]
        + [L.Dense(2)]
    )


def image_model():
    return keras.Sequential(
        [keras.Input([6, 6, 2]), L.RandomFlip(), L.RandomRotation(0.2), L.Conv2D(3, 3, activation="tanh")]
        + [L.SpatialDropout2D(0.3), L.RandomTranslation(0.2, 0.2), L.Flatten(), L.Dense(2)]
    )


MODELS = {
    "dense": (dense_model, [6]),
    "user": (user_model, [6]),
    "shared": (shared_model, [6]),
    "sequence": (sequence_model, [5, 4]),
    "image": (image_model, [6, 6, 2]),
}


@functools.cache
def data_for(name):
    return normal(29, *MODELS[name][1]), normal(29, 2, seed=1)  # 29 = 12 + 12 + 5


@functools.cache
def trained(name, num_stages, num_micro_batches, remat="except_last"):
    """A trained model with its history; plain Keras where `num_stages` is None."""
    strategy = num_stages and tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, remat=remat)
    return train(MODELS[name][0], data_for(name), strategy, batch_size=12, epochs=1)


@pytest.mark.parametrize(("num_stages", "remat"), [(1, "always"), (2, "except_last"), (3, "always"), (3, "never")])
@pytest.mark.parametrize("name", MODELS)
def test_draws_do_not_depend_on_stages_and_recomputation(name, num_stages, remat):
    assert_same(trained(name, 1, 4, "never"), trained(name, num_stages, 4, remat))


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("name", MODELS)
def test_one_micro_batch_draws_as_plain_keras(name, remat):
    assert_same(trained(name, None, 1), trained(name, 3, 1, remat))


@pytest.mark.parametrize("name", MODELS)
def test_these_models_do_draw(name):
    assert largest_difference(trained(name, None, 1)[0], trained(name, 1, 4, "never")[0]) > 1e-3


# --- masks seen from outside -----------------------------------------------------------------------------------------


class Scale(keras.layers.Layer):
    """Multiplies each column by a weight of its own, so that d weight shows the mask of what comes after."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=shape[1:], initializer="ones", name="kernel")

    def call(self, x):
        return x * self.kernel


def dropout_probe(strategy):
    """A function that calls a model with dropout; gives the output and the gradients of its sum."""
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([40]), Scale(), L.Dropout(0.5), L.Activation("linear")])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            total = tf.reduce_sum(y)
        return y, *tape.gradient(total, [x, model.trainable_variables[0].value])

    @tf.function
    def run(x):
        return strategy.run(step, (x,)) if strategy is not None else step(x)

    return model, lambda rows: [t.numpy() for t in run(tf.ones([rows, 40]))]


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_gradient_sees_the_mask_of_the_forward_pass(num_stages, remat):
    _, probe = dropout_probe(tf_gpipe.GPipeStrategy(num_stages, 4, remat=remat))
    for _ in range(2):
        y, dx, dw = probe(8)
        assert set(np.unique(y)) == {0.0, 2.0}
        np.testing.assert_array_equal(y, dx)
        np.testing.assert_array_equal(y.sum(axis=0), dw)


def test_every_micro_batch_and_every_step_draws_another_mask():
    _, probe = dropout_probe(tf_gpipe.GPipeStrategy(2, 4))
    masks = [part.tobytes() for _ in range(3) for part in np.split(probe(8)[0], 4)]
    assert len(set(masks)) == 12


def test_a_micro_batch_draws_what_plain_keras_draws_for_so_many_rows():
    # Micro-batch m of step t has the state of the (4 t + m)-th call of a plain model on its rows.
    _, plain = dropout_probe(None)
    _, probe = dropout_probe(tf_gpipe.GPipeStrategy(2, 4))
    for _ in range(2):
        np.testing.assert_array_equal(probe(8)[0], np.concatenate([plain(2)[0] for _ in range(4)]))


# --- seed states -----------------------------------------------------------------------------------------------------


def seed_states(model):
    return [v.numpy().tolist() for v in model.non_trainable_variables if "seed_generator_state" in v.path]


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_step_advances_a_seed_once_for_each_draw_of_each_micro_batch(num_stages, remat):
    with tf_gpipe.GPipeStrategy(num_stages, 4, remat=remat).scope():
        keras.utils.set_random_seed(0)
        model = user_model()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert [state for _, state in seed_states(model)] == [0, 0]
    seeds = [seed for seed, _ in seed_states(model)]
    x, y = data_for("user")
    for rows, draws in [(12, 4), (8, 8), (3, 11), (1, 12), (12, 16)]:  # fewer rows than M: as many micro-batches
        model.train_on_batch(x[:rows], y[:rows])
        assert seed_states(model) == [[seeds[0], 2 * draws], [seeds[1], draws]]


def test_rows_known_only_when_the_step_runs_advance_seeds_alike():
    with tf_gpipe.GPipeStrategy(2, 4).scope():
        model = user_model()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data_for("user")
    model.fit(x[:18], y[:18], batch_size=8, verbose=0)  # 8 + 8 + 2 rows
    assert [state for _, state in seed_states(model)] == [2 * 10, 10]


def test_evaluation_draws_nothing_and_leaves_seeds():
    model = trained("dense", 3, 4)[0]
    x, y = data_for("dense")
    before = seed_states(model)
    assert len(before) == 3
    first = model.predict(x, batch_size=12, verbose=0)
    model.evaluate(x, y, batch_size=12, verbose=0)
    np.testing.assert_array_equal(first, model.predict(x, batch_size=12, verbose=0))
    assert seed_states(model) == before
    plain = dense_model()
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(first, plain.predict(x, batch_size=12, verbose=0), atol=1e-6)


def test_training_twice_from_one_seed_gives_the_same_weights():
    trained.cache_clear()
    first = trained("dense", 2, 4)[0]
    trained.cache_clear()
    assert largest_difference(first, trained("dense", 2, 4)[0]) == 0


class Jitter(keras.layers.Layer):
    """Draws without a seed generator."""

    def call(self, x, training=None):
        return x + keras.random.normal(keras.ops.shape(x), stddev=0.3) if training else x


@functools.cache
def jittered(num_stages, num_micro_batches, remat="never"):
    def make():
        return keras.Sequential([keras.Input([6]), L.Dense(4), Jitter(), L.Dense(4), Jitter(), L.Dense(2)])

    strategy = num_stages and tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, remat=remat)
    return train(make, data_for("dense"), strategy, batch_size=12, epochs=1)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_draws_without_a_seed_generator_use_kerass_global_one(remat):
    assert_same(jittered(None, 1), jittered(2, 1, remat))
    assert_same(jittered(1, 4), jittered(3, 4, remat))


# --- refused ---------------------------------------------------------------------------------------------------------


class TensorFlowNoise(keras.layers.Layer):
    """Draws with an operation that cannot be repeated."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x):
        return x + self.draw(tf.shape(x))


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (tf.random.normal, "RandomStandardNormal"),
        (tf.random.uniform, "RandomUniform"),
        (tf.random.truncated_normal, "TruncatedNormal"),
        (lambda shape: tf.random.gamma(shape, 1.0), "RandomGamma"),
        (lambda shape: tf.random.shuffle(tf.ones(shape)), "RandomShuffle"),
    ],
    ids=["normal", "uniform", "truncated_normal", "gamma", "shuffle"],
)
def test_a_random_operation_of_tensorflow_is_refused(draw, name, remat):
    with tf_gpipe.GPipeStrategy(2, 2, remat=remat).scope():
        model = keras.Sequential([keras.Input([6]), L.Dense(4), TensorFlowNoise(draw), L.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(tf_gpipe.GPipeError, match=rf"Received: '{name}' of TensorFlow .*stage \d.*keras\.random"):
        model.fit(*data_for("dense"), verbose=0)


def test_a_random_operation_inside_a_function_of_the_layer_is_refused():
    inner = tf.function(lambda shape: tf.random.normal(shape))
    with tf_gpipe.GPipeStrategy(2, 2).scope():
        model = keras.Sequential([keras.Input([6]), L.Dense(4), TensorFlowNoise(inner), L.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(tf_gpipe.GPipeError, match="RandomStandardNormal"):
        model.fit(*data_for("dense"), verbose=0)


def refused_layer(layer, message):
    with tf_gpipe.GPipeStrategy(2, 2).scope():
        model = keras.Sequential([keras.Input([6]), L.Dense(4), layer, L.Dense(2)])
        model.compile("sgd", "mse")
    with pytest.raises(tf_gpipe.GPipeError, match=message):
        model.fit(*data_for("dense"), verbose=0)


def test_a_generator_of_tensorflow_is_refused():
    generator = tf.random.Generator.from_seed(1)
    refused_layer(TensorFlowNoise(generator.normal), "'RngReadAndSkip' of TensorFlow")


def test_a_loss_layer_that_samples_candidates_is_refused():
    def sample(shape):
        labels = tf.zeros([shape[0], 1], tf.int64)
        drawn = tf.random.uniform_candidate_sampler(labels, 1, num_sampled=2, unique=True, range_max=9)
        return tf.cast(drawn.sampled_candidates[0], tf.float32)

    refused_layer(TensorFlowNoise(sample), "'UniformCandidateSampler' of TensorFlow")


@pytest.mark.parametrize(
    "assign",
    [
        lambda v: v.assign(tf.ones([3])),
        lambda v: v.assign_add(tf.ones([3])),
        lambda v: v[0].assign(1.0),
        lambda v: v.scatter_add(tf.IndexedSlices([1.0], [0])),
    ],
    ids=["assign", "assign_add", "slice", "scatter"],
)
def test_an_assignment_to_a_variable_of_tensorflow_is_refused(assign):
    class Assign(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.state = tf.Variable([0.0, 0.0, 0.0], trainable=False)

        def call(self, x):
            assign(self.state)
            return x

    refused_layer(Assign(), r"assignment to a `tf\.Variable`.*add_weight\(trainable=False\)")


# --- other state -----------------------------------------------------------------------------------------------------


class Counter(keras.layers.Layer):
    """Counts its calls and the rows it sees; adds the count to its output, so that order matters."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows", dtype="int32")

    def call(self, x, training=None):
        if training:
            self.calls.assign_add(1.0)
            self.rows.assign_add(keras.ops.shape(x)[0])
        return x + 0.01 * self.calls


def counting_model():
    return keras.Sequential(
        [keras.Input([6]), L.Dense(4, "tanh"), Counter(), L.Dense(4, "tanh"), Counter(), L.Dense(2)]
    )


@pytest.mark.filterwarnings("ignore:.*/rows' in its `call`")
@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_counter_counts_steps_and_every_row_once(num_stages, remat):
    with tf_gpipe.GPipeStrategy(num_stages, 4, remat=remat).scope():
        keras.utils.set_random_seed(0)
        model = counting_model()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data_for("dense")
    counters = [layer for layer in model.layers if isinstance(layer, Counter)]
    for rows, calls, seen in [(12, 1, 12), (12, 2, 24), (3, 3, 27), (12, 4, 39)]:
        model.train_on_batch(x[:rows], y[:rows])
        assert [float(c.calls.numpy()) for c in counters] == [calls] * 2
        assert [int(c.rows.numpy()) for c in counters] == [seen] * 2
    model.evaluate(x, y, verbose=0)
    assert [float(c.calls.numpy()) for c in counters] == [4] * 2


@pytest.mark.filterwarnings("ignore:.*/rows' in its `call`")
@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_each_micro_batch_sees_the_count_of_plain_keras(num_micro_batches, remat):
    strategy = tf_gpipe.GPipeStrategy(3, num_micro_batches, remat=remat)
    plain, piped = (train(counting_model, data_for("dense"), s, batch_size=12, epochs=1) for s in (None, strategy))
    assert_same(plain, piped)


# --- XLA -------------------------------------------------------------------------------------------------------------


@functools.cache
def compiled(jit_compile):
    """An LSTM, which is a loop, and dropout; under the strategy where `jit_compile` names a remat mode."""

    def make():
        return keras.Sequential([keras.Input([3, 2]), L.LSTM(3), L.Dropout(0.4), L.Dense(2)])

    remat = jit_compile if isinstance(jit_compile, str) else None
    strategy = remat and tf_gpipe.GPipeStrategy(2, 1, remat=remat, jit_compile=True)
    arguments = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "jit_compile": "auto" if remat else jit_compile}
    return train(make, (normal(8, 3, 2), normal(8, 2, seed=1)), strategy, compile=arguments, batch_size=8)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_stages_compiled_by_xla_draw_as_keras_compiled_by_xla(remat):
    # XLA has a random generator of its own, in plain Keras too; and it cannot return the activations a loop keeps.
    assert_same(compiled(True), compiled(remat))
    assert largest_difference(compiled(True)[0], compiled(False)[0]) > 1e-3
