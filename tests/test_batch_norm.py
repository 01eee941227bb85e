"""Batch norm against a reference written in plain TensorFlow, without Keras layers and without the library.

The reference normalises each micro-batch with its own moments, takes the loss on the concatenated outputs, so that
gradients come out weighted by rows, and moves the averages once, by the moments of the whole mini-batch: taken in
float64 over all values that entered the layer, not pooled.

Weights are trained with SGD throughout: a bias in front of batch norm has a gradient that is truly zero, whose rounding
Adam would blow up to steps of full length.
"""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, pairs, scope_of, train

import tf_gpipe

L = keras.layers

REMAT_MODES = ["always", "except_last", "never"]
EPSILON = 1e-3
RATE = 0.1


def parts_of(array, num_micro_batches):
    """As equal as possible, longer ones first: numpy's own rule."""
    return np.array_split(array, min(num_micro_batches, len(array)))


class Reference:
    """Trains by hand.

    Args:
        model: a plain Keras model, for its initial weights only.
        forward: takes the weights, a micro-batch and `norm(x, gamma, beta, at, mask=None, call=0)`; returns the output.
        averages: positions of the moving means in the weights; each variance follows its mean.
        momentum: of all batch-norm layers.
    """

    def __init__(self, model, forward, averages, momentum=0.9):
        self.forward, self.momentum = forward, momentum
        self.weights = [tf.Variable(w) for w in model.get_weights()]
        moving = {i for at in averages for i in (at, at + 1)}
        self.trained = [w for i, w in enumerate(self.weights) if i not in moving]

    def step(self, x, y, num_micro_batches, loss=lambda y, outputs: tf.reduce_mean(tf.square(outputs - y))):
        seen = collections.defaultdict(list)

        def norm(inputs, gamma, beta, at, mask=None, call=0):
            rows = np.ones(inputs.shape[:-1], bool) if mask is None else mask
            seen[at, call].append(inputs.numpy()[rows])
            count = max(int(rows.sum()), 1)
            chosen = tf.constant(rows[..., None], inputs.dtype)
            axes = list(range(len(inputs.shape) - 1))
            mean = tf.reduce_sum(inputs * chosen, axes) / count
            variance = tf.reduce_sum(tf.square(inputs - mean) * chosen, axes) / count
            return (inputs - mean) / tf.sqrt(variance + EPSILON) * gamma + beta

        with tf.GradientTape() as tape:
            outputs = tf.concat(
                [self.forward(self.weights, part, norm) for part in parts_of(x, num_micro_batches)], axis=0
            )
            value = loss(y, outputs)
        for weight, gradient in zip(self.trained, tape.gradient(value, self.trained), strict=True):
            weight.assign_sub(RATE * gradient)
        for (at, _), groups in seen.items():
            values = np.concatenate(groups).astype("float64")
            if len(values):
                self.move(at, values.mean(axis=0))
                self.move(at + 1, values.var(axis=0))

    def move(self, at, value):
        moving = self.weights[at].numpy().astype("float64")
        self.weights[at].assign((moving * self.momentum + value * (1 - self.momentum)).astype("float32"))

    def train(self, x, y, num_micro_batches, batch_size, epochs=1, **more):
        for _ in range(epochs):
            for at in range(0, len(x), batch_size):
                self.step(x[at : at + batch_size], y[at : at + batch_size], num_micro_batches, **more)
        return [w.numpy() for w in self.weights]


def assert_weights(model, expected, tolerance=1e-6):
    for received, wanted, variable in zip(model.get_weights(), expected, model.weights, strict=True):
        np.testing.assert_allclose(received, wanted, rtol=0, atol=tolerance, err_msg=variable.path)


def made(make):
    keras.utils.set_random_seed(0)
    return make()


# --- dense and convolutional models ----------------------------------------------------------------------------------


def dense_model():
    return keras.Sequential(
        [keras.Input([6]), L.Dense(5), L.BatchNormalization(momentum=0.9), L.ReLU(), L.Dense(4)]
        + [L.BatchNormalization(momentum=0.9), L.Dense(2)]
    )


def dense_forward(w, x, norm):
    h = tf.nn.relu(norm(x @ w[0] + w[1], w[2], w[3], 4))
    return norm(h @ w[6] + w[7], w[8], w[9], 10) @ w[12] + w[13]


def conv_model():
    return keras.Sequential(
        [keras.Input([5, 5, 2]), L.Conv2D(3, 3, padding="same"), L.BatchNormalization(momentum=0.9), L.ReLU()]
        + [L.Conv2D(4, 3), L.BatchNormalization(momentum=0.9), L.GlobalAveragePooling2D(), L.Dense(2)]
    )


def conv_forward(w, x, norm):
    h = tf.nn.relu(norm(tf.nn.conv2d(x, w[0], 1, "SAME") + w[1], w[2], w[3], 4))
    h = norm(tf.nn.conv2d(h, w[6], 1, "VALID") + w[7], w[8], w[9], 10)
    return tf.reduce_mean(h, [1, 2]) @ w[12] + w[13]


MODELS = {"dense": (dense_model, dense_forward, [6]), "conv": (conv_model, conv_forward, [5, 5, 2])}


@functools.cache
def data_for(name, rows):
    # Rows drift, so that micro-batches have moments of their own.
    shape = MODELS[name][2]
    drift = np.linspace(0, 2, rows, dtype="float32").reshape([rows] + [1] * len(shape))
    return normal(rows, *shape) + drift, normal(rows, 2, seed=1)


@functools.cache
def reference_weights(name, num_micro_batches, rows, batch_size):
    make, forward, _ = MODELS[name]
    reference = Reference(made(make), forward, averages=[4, 10])
    return reference.train(*data_for(name, rows), num_micro_batches, batch_size)


@functools.cache
def plain(name, rows):
    return train(MODELS[name][0], data_for(name, rows), batch_size=14)


def train_under(strategy, name, rows, batch_size):
    return train(MODELS[name][0], data_for(name, rows), strategy, batch_size=batch_size, epochs=1)[0]


@pytest.mark.parametrize(("name", "num_stages", "num_micro_batches"), pairs(MODELS, [1, 2, 3], [1, 2, 3, 5]))
def test_weights_and_averages_follow_the_reference(name, num_stages, num_micro_batches):
    # 14 rows: micro-batches of 5, 5, 4 and 3, 3, 3, 3, 2 rows.
    strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)
    model = train_under(strategy, name, rows=56, batch_size=14)
    assert_weights(model, reference_weights(name, num_micro_batches, 56, 14))


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "remat"),
    [
        ("dense", 1, "always"),
        ("dense", 3, "never"),
        ("dense", 5, "always"),
        ("conv", 3, "always"),
        ("conv", 5, "never"),
    ],
)
def test_remat_changes_nothing(name, num_micro_batches, remat):
    strategy = tf_gpipe.GPipeStrategy(2, num_micro_batches, remat=remat)
    model = train_under(strategy, name, rows=56, batch_size=14)
    assert_weights(model, reference_weights(name, num_micro_batches, 56, 14))


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("rows", [15, 17])
def test_a_last_batch_smaller_than_m_is_normalised_by_its_rows(rows, remat):
    # 15 = 14 + 1, 17 = 14 + 3: the number of rows is known only when the step runs, and is less than M.
    model = train_under(tf_gpipe.GPipeStrategy(2, 5, remat=remat), "dense", rows, batch_size=14)
    assert_weights(model, reference_weights("dense", 5, rows, 14))


def test_micro_batches_are_told_apart_by_these_tests():
    one, three = (reference_weights("dense", m, 56, 14) for m in (1, 3))
    assert max(np.abs(a - b).max() for a, b in zip(one, three, strict=True)) > 1e-2


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("name", MODELS)
def test_one_micro_batch_is_plain_keras(name, remat):
    # 43 = 3 · 14 + 1 rows. Not to the last bit: Grappler fuses other operations in a function than in Keras's step.
    assert_same(
        plain(name, 43),
        train(MODELS[name][0], data_for(name, 43), tf_gpipe.GPipeStrategy(3, 1, remat=remat), batch_size=14),
    )


# --- moving averages -------------------------------------------------------------------------------------------------


def only_norm(**arguments):
    """A model whose batch norm sees the data as they are."""
    return keras.Sequential([keras.Input([3]), L.BatchNormalization(**{"momentum": 0.0, **arguments}), L.Dense(1)])


def train_once(make, x, strategy, **fit):
    y = np.zeros([len(x), 1], "float32")
    return train(make, (x, y), strategy, batch_size=len(x), epochs=1, **fit)[0]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8, 11])
def test_moving_averages_are_those_of_the_whole_mini_batch(num_micro_batches):
    x = normal(11, 3) * [1, 5, 0.1] + np.linspace(-3, 3, 11)[:, None]
    model = train_once(only_norm, x.astype("float32"), tf_gpipe.GPipeStrategy(1, num_micro_batches))
    np.testing.assert_allclose(model.layers[0].moving_mean, x.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.var(axis=0), rtol=1e-6)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
def test_a_large_mean_does_not_cancel(num_micro_batches):
    x = (1e4 + normal(8, 3)).astype("float32")
    wanted = x.astype("float64").var(axis=0)
    naive = np.mean(np.square(x), axis=0) - np.square(np.mean(x, axis=0))
    assert np.abs(naive / wanted - 1).max() > 1  # E[x²] − E[x]² has no digit right
    model = train_once(only_norm, x, tf_gpipe.GPipeStrategy(2, num_micro_batches))
    np.testing.assert_allclose(model.layers[0].moving_variance, wanted, rtol=1e-3)
    np.testing.assert_allclose(model.layers[0].moving_mean, x.astype("float64").mean(axis=0), rtol=2e-7)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_float64_statistics_keep_their_precision(num_micro_batches):
    x = np.random.default_rng(0).normal(size=[10, 3])
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        model = train_once(only_norm, x, tf_gpipe.GPipeStrategy(1, num_micro_batches))
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
    np.testing.assert_allclose(model.layers[0].moving_mean, x.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.var(axis=0), rtol=1e-13)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_takes_statistics_in_float32(policy):
    x = (100 + normal(12, 3)).astype("float16").astype("float32")

    def make():
        norm = L.BatchNormalization(momentum=0.0, dtype=policy)
        return keras.Sequential([keras.Input([3]), norm, L.Dense(1, dtype=policy)])

    x = tf.cast(tf.cast(x, policy.removeprefix("mixed_")), tf.float32).numpy()
    model = train_once(make, x, tf_gpipe.GPipeStrategy(2, 4))
    np.testing.assert_allclose(model.layers[0].moving_mean, x.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(model.layers[0].moving_variance, x.var(axis=0), rtol=1e-4)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_evaluate_and_predict_use_the_averages_and_leave_them(num_micro_batches):
    x, y = data_for("conv", 19)
    strategy = tf_gpipe.GPipeStrategy(2, num_micro_batches)
    model = train_under(strategy, "conv", rows=28, batch_size=14)
    before = model.get_weights()
    plain = made(conv_model)
    plain.set_weights(before)
    plain.compile(loss="mse")
    loss = model.evaluate(x, y, batch_size=8, verbose=0)
    np.testing.assert_allclose(
        model.predict(x, batch_size=8, verbose=0), plain.predict(x, batch_size=8, verbose=0), atol=1e-6
    )
    assert loss == pytest.approx(plain.evaluate(x, y, batch_size=8, verbose=0), rel=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


# --- masks -----------------------------------------------------------------------------------------------------------


def masked_model():
    return keras.Sequential(
        [keras.Input([4, 3]), L.Masking(), L.Dense(5), L.BatchNormalization(momentum=0.9), L.ReLU(), L.Dense(2)]
    )


def masked_forward(w, x, norm):
    mask = np.any(x != 0, axis=-1)
    h = tf.reshape(x, [-1, 3]) @ w[0] + w[1]
    h = tf.nn.relu(norm(tf.reshape(h, [len(x), 4, 5]), w[2], w[3], 4, mask))
    return tf.reshape(tf.reshape(h, [-1, 5]) @ w[6] + w[7], [len(x), 4, 2])


def padded(lengths):
    """Rows of 4 positions, of which the first ones count."""
    x = normal(len(lengths), 4, 3) + 2
    return np.where((np.arange(4) < np.array(lengths)[:, None])[..., None], x, 0).astype("float32")


def masked_mse(x):
    mask = np.any(x != 0, axis=-1)
    return lambda y, outputs: (
        tf.reduce_sum(tf.boolean_mask(tf.reduce_mean(tf.square(outputs - y), axis=-1), mask)) / max(mask.sum(), 1)
    )


MASKS = {
    "uneven": [1, 1, 1, 1, 4, 4, 4, 3, 2, 4],
    "a micro-batch without valid values": [4, 3, 0, 0, 4, 4, 2, 4, 1, 4],
    "the first without": [0, 0, 2, 3, 4, 4, 2, 4, 1, 4],
    "the last without": [4, 3, 2, 3, 4, 4, 2, 4, 0, 0],
}


@pytest.mark.parametrize("num_micro_batches", [1, 5])
@pytest.mark.parametrize("name", MASKS)
def test_masked_values_do_not_count(name, num_micro_batches):
    x, y = padded(MASKS[name]), normal(10, 4, 2, seed=1)
    reference = Reference(made(masked_model), masked_forward, averages=[4])
    expected = reference.train(x, y, num_micro_batches, 10, epochs=3, loss=masked_mse(x))
    model, history = train(masked_model, (x, y), tf_gpipe.GPipeStrategy(2, num_micro_batches), batch_size=10, epochs=3)
    assert_weights(model, expected)
    assert np.isfinite(history["loss"]).all()


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_mini_batch_without_valid_values_moves_nothing(remat):
    x, y = padded([0] * 6), normal(6, 4, 2, seed=1)
    before = made(masked_model).get_weights()
    model, _ = train(masked_model, (x, y), tf_gpipe.GPipeStrategy(2, 3, remat=remat), batch_size=6)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


# --- frozen, shared, renorm, synchronized ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_frozen_layer_uses_its_averages_and_updates_nothing(num_micro_batches):
    def make():
        model = dense_model()
        norm = model.layers[1]
        norm.set_weights([normal(5, seed=2), normal(5, seed=3), normal(5, seed=4), np.abs(normal(5, seed=5)) + 0.5])
        norm.trainable = False
        model.layers[4].trainable = False
        return model

    expected = train(make, data_for("dense", 29), batch_size=14)
    received = train(make, data_for("dense", 29), tf_gpipe.GPipeStrategy(3, num_micro_batches), batch_size=14)
    assert_same(expected, received)
    before = made(make).layers[1].get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(before, received[0].layers[1].get_weights(), strict=True))
    assert largest_difference(made(make), received[0]) > 1e-2


def test_freezing_after_training_stops_the_averages():
    strategy = tf_gpipe.GPipeStrategy(2, 3)
    model = train_under(strategy, "dense", rows=28, batch_size=14)
    for layer in (model.layers[1], model.layers[4]):
        layer.trainable = False
    with strategy.scope():
        model.compile(keras.optimizers.SGD(RATE), "mse")
    frozen, kernel = model.layers[1].get_weights(), model.layers[0].get_weights()[0]
    model.fit(*data_for("dense", 28), batch_size=14, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(frozen, model.layers[1].get_weights(), strict=True))
    assert not np.array_equal(kernel, model.layers[0].get_weights()[0])


def twice_model():
    norm, x = L.BatchNormalization(momentum=0.9, name="norm"), keras.Input([4])
    h = norm(L.Dense(4, name="first")(x))
    return keras.Model(x, L.Dense(2, name="last")(norm(L.Dense(4, "tanh", name="second")(h))))


def twice_forward(w, x, norm):
    h = norm(x @ w[0] + w[1], w[2], w[3], 4)
    return norm(tf.tanh(h @ w[6] + w[7]), w[2], w[3], 4, call=1) @ w[8] + w[9]


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_layer_called_twice_moves_twice(num_stages, num_micro_batches):
    x, y = normal(42, 4) + 1, normal(42, 2, seed=1)
    plain = train(twice_model, (x, y), batch_size=14, epochs=1)[0]
    names = [w.path.rsplit("/", 2)[-2:] for w in plain.weights]
    assert names[2:6] == [["norm", n] for n in ("gamma", "beta", "moving_mean", "moving_variance")]
    expected = Reference(made(twice_model), twice_forward, averages=[4]).train(x, y, num_micro_batches, 14)
    model = train(twice_model, (x, y), tf_gpipe.GPipeStrategy(num_stages, num_micro_batches), batch_size=14, epochs=1)[
        0
    ]
    assert_weights(model, expected)
    if num_micro_batches == 1:
        assert largest_difference(plain, model) <= 1e-6


def renorm_model(**arguments):
    clipping = {"rmin": 0.5, "rmax": 2.0, "dmax": 1.0}
    norm = L.BatchNormalization(momentum=0.9, renorm=True, renorm_clipping=clipping, renorm_momentum=0.8, **arguments)
    return keras.Sequential([keras.Input([6]), L.Dense(5), norm, L.ReLU(), L.Dense(2)])


@pytest.mark.filterwarnings("ignore:.*/renorm_.* in its `call`")
@pytest.mark.parametrize(("num_micro_batches", "remat"), [(1, "always"), (3, "always"), (3, "never")])
def test_with_renorm_each_micro_batch_continues_from_the_one_before(num_micro_batches, remat):
    x, y = data_for("dense", 29)
    plain = made(renorm_model)
    for at in range(0, 29, 14):
        with tf.GradientTape() as tape:
            parts = parts_of(x[at : at + 14], num_micro_batches)
            outputs = tf.concat([plain(tf.constant(part), training=True) for part in parts], axis=0)
            loss = tf.reduce_mean(tf.square(outputs - y[at : at + 14]))
        weights = [v.value for v in plain.trainable_variables]
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
    strategy = tf_gpipe.GPipeStrategy(2, num_micro_batches, remat=remat)
    model = train(renorm_model, (x, y), strategy, batch_size=14, epochs=1)[0]
    assert_weights(model, plain.get_weights())


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_synchronized_means_nothing_more_in_one_pipeline(num_micro_batches):
    def make(synchronized):
        norm = L.BatchNormalization(momentum=0.9, synchronized=synchronized)
        return keras.Sequential([keras.Input([6]), L.Dense(5), norm, L.Dense(2)])

    models = [
        train(lambda s=s: make(s), data_for("dense", 29), tf_gpipe.GPipeStrategy(2, num_micro_batches), batch_size=14)
        for s in (False, True)
    ]
    assert largest_difference(models[0][0], models[1][0]) == 0
    assert models[1][0].layers[1].synchronized is True
    assert "synchronized" in vars(models[1][0].layers[1])


def test_nothing_of_the_library_is_left_on_a_layer():
    def attributes(model):
        return [set(vars(layer)) for layer in model.layers]

    plain = train(dense_model, data_for("dense", 28), batch_size=14, epochs=1)[0]
    model = train_under(tf_gpipe.GPipeStrategy(2, 2), "dense", rows=28, batch_size=14)
    assert attributes(plain) == attributes(model)


@pytest.mark.parametrize("size", [16, 4, 1])
def test_train_on_batch_of_any_size(size):
    x, y = data_for("dense", 16)
    with scope_of(tf_gpipe.GPipeStrategy(2, 5)):
        model = made(dense_model)
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.train_on_batch(x[:size], y[:size])
    reference = Reference(made(dense_model), dense_forward, averages=[4, 10])
    reference.step(x[:size], y[:size], 5)
    assert_weights(model, [w.numpy() for w in reference.weights])


# --- images, changed layers, second derivatives ----------------------------------------------------------------------


class Scaled(L.BatchNormalization):
    """A batch norm with a `call` of its own."""

    def call(self, inputs, training=None, mask=None, times=2.0):
        """Twice the outputs."""
        return times * super().call(inputs, training=training, mask=mask)


class Shifted(L.BatchNormalization):
    """A batch norm with statistics of its own."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean + 1.0, variance


def doubled(method):
    """A method that a decorator has changed, under its old name."""

    @functools.wraps(method)
    def run(*arguments, **named):
        return 2 * method(*arguments, **named)

    return run


class Decorated(L.BatchNormalization):
    """A batch norm whose `call` is decorated."""

    call = doubled(L.BatchNormalization.call)


def with_own_call(layer):
    """The layer with a `call` of its own."""
    layer.call = doubled(layer.call)
    return layer


def with_epsilon(layer):
    """The layer with an epsilon that is no number."""
    layer.epsilon = tf.constant(1e-2)
    return layer


def with_scale(layer):
    """The layer with a scale of another shape, which is no weight."""
    layer.build([None, None, None, 3])
    layer.gamma = tf.fill([1, 1, 1, 3], 2.0)
    return layer


CHANGED = {
    "plain": L.BatchNormalization,
    "axis": lambda: L.BatchNormalization(axis=1),
    "without scale and centre": lambda: L.BatchNormalization(axis=3, center=False, scale=False),
    "call": Scaled,
    "statistics": Shifted,
    "decorated": Decorated,
    "call of the instance": lambda: with_own_call(L.BatchNormalization()),
    "epsilon": lambda: with_epsilon(L.BatchNormalization()),
    "scale": lambda: with_scale(L.BatchNormalization(scale=False)),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_layer_that_was_changed_trains_as_it_is(kind):
    def make(of=CHANGED[kind]):
        return keras.Sequential([keras.Input([4, 4, 3]), L.Conv2D(3, 1), of(), L.ReLU(), L.Flatten(), L.Dense(2)])

    data = normal(16, 4, 4, 3), normal(16, 2, seed=1)
    trained = train(make, data, tf_gpipe.GPipeStrategy(2, 1), batch_size=8)
    assert_same(train(make, data, batch_size=8), trained)
    as_keras_has_it = train(functools.partial(make, L.BatchNormalization), data, batch_size=8)[1]["loss"]
    assert (abs(trained[1]["loss"][0] - as_keras_has_it[0]) > 1e-4) == (kind != "plain")


def test_a_method_that_was_patched_on_the_class_is_kept(monkeypatch):
    data = normal(16, 6), normal(16, 2, seed=1)
    before = train(dense_model, data)[1]["loss"]
    monkeypatch.setattr(L.BatchNormalization, "call", doubled(L.BatchNormalization.call))
    patched, piped = train(dense_model, data), train(dense_model, data, tf_gpipe.GPipeStrategy(2, 1))
    assert abs(patched[1]["loss"][0] - before[0]) > 1e-3
    assert_same(patched, piped)


def images():
    """Batch norm after a convolution, without scale, in a layer, called twice, and frozen."""
    twice, last = L.BatchNormalization(), L.BatchNormalization(trainable=False)
    inner = keras.Sequential([L.Conv2D(6, 3, use_bias=False), L.BatchNormalization(scale=False), L.ReLU()])
    x = inputs = keras.Input([8, 8, 3])
    x = L.ReLU()(L.BatchNormalization(momentum=0.8)(L.Conv2D(6, 3, use_bias=False)(x)))
    x = twice(last(L.DepthwiseConv2D(3, padding="same", use_bias=False)(twice(inner(x)))))
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling2D()(L.ReLU()(x))))


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_images_train_as_in_plain_keras(remat):
    data = normal(32, 8, 8, 3), normal(32, 2, seed=1)
    assert_same(train(images, data), train(images, data, tf_gpipe.GPipeStrategy(1, 1, remat=remat)))
    one, two = (tf_gpipe.GPipeStrategy(stages, 4, remat=remat) for stages in (1, 2))
    assert_same(train(images, data, one), train(images, data, two))


def test_a_single_value_of_a_channel_has_no_variance():
    def make():
        return keras.Sequential([keras.Input([1, 1, 3]), L.BatchNormalization(momentum=0.0), L.Flatten(), L.Dense(2)])

    data = normal(1, 1, 1, 3), normal(1, 2, seed=1)
    model, _ = train(make, data, tf_gpipe.GPipeStrategy(2, 2), epochs=1)
    np.testing.assert_array_equal(model.layers[0].moving_mean, data[0][0, 0, 0])
    np.testing.assert_array_equal(model.layers[0].moving_variance, np.zeros(3))
    assert_same(train(make, data, epochs=1), train(make, data, tf_gpipe.GPipeStrategy(2, 2), epochs=1))


PENALTIES = {
    "total": lambda gradients: tf.reduce_sum(tf.square(gradients)),
    "weighted": lambda gradients: tf.reduce_sum(gradients * normal(6, 4, 4, 3, seed=2)),
    "norms": lambda gradients: tf.reduce_sum(tf.sqrt(tf.reduce_sum(tf.square(gradients), [1, 2, 3]))),
}


@pytest.mark.parametrize("kind", PENALTIES)
def test_second_derivatives_are_those_of_keras(kind):
    """Keras's own, which hold the mean fixed inside the variance, so that they are not the true ones."""

    def gradients(strategy):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            norm = L.BatchNormalization(beta_initializer="normal")
            model = keras.Sequential([keras.Input([4, 4, 3]), L.Conv2D(5, 2), norm, L.Flatten(), L.Dense(2, "tanh")])

        def run(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(tf.sin(model(x, training=True)))
                penalty = PENALTIES[kind](inner.gradient(y, x)) + y
            return outer.gradient(penalty, [weight.value for weight in model.trainable_variables])

        return tf.function(run if strategy is None else lambda x: strategy.run(run, (x,)))(normal(6, 4, 4, 3))

    for made, wanted in zip(gradients(tf_gpipe.GPipeStrategy(2, 1)), gradients(None), strict=True):
        assert np.abs(wanted).max() > 1e-4
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
