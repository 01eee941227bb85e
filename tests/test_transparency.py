"""The promise: training under the strategy gives what plain Keras gives on one device.

Weights, optimizer state, history, `evaluate` and `predict` are compared for every K, M and remat mode, and for
whatever stands between a model's outputs and its weights: optimizers, losses, example weights, masks, metrics, dtypes.
Where a naive average over micro-batches would give another number, the test first makes sure that its data tell the
two apart.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, assert_same_optimizer, largest_difference, normal, pairs, scope_of, train

import tf_gpipe

L = keras.layers

REMAT_MODES = ["always", "except_last", "never"]


def small_model() -> keras.Model:
    return keras.Sequential([keras.Input([6]), L.Dense(5, "tanh"), L.Dense(4, "tanh"), L.Dense(3, "tanh"), L.Dense(2)])


@functools.cache
def regression(rows: int):
    return normal(rows, 6), normal(rows, 2, seed=1)


@functools.cache
def plain(rows: int, batch_size: int = 16, epochs: int = 2):
    """`small_model` trained without a strategy."""
    return train(small_model, regression(rows), batch_size=batch_size, epochs=epochs)


@pytest.mark.parametrize(("num_stages", "num_micro_batches", "remat"), pairs([1, 2, 3, 4], [1, 2, 5, 8], REMAT_MODES))
def test_every_k_m_and_remat_mode_trains_as_plain_keras(num_stages, num_micro_batches, remat):
    # 71 rows in batches of 16: the last has 7, fewer than M = 8, and 5 micro-batches are never equally long.
    strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, remat=remat)
    assert_same(plain(71, epochs=1), train(small_model, regression(71), strategy, epochs=1))


@pytest.mark.parametrize(
    ("rows", "batch_size", "remat"),
    [
        (64, 16, "always"),
        (64, 16, "except_last"),
        (64, 16, "never"),
        (65, 16, "always"),
        (65, 16, "except_last"),
        (65, 16, "never"),
        (7, 3, "except_last"),
        (33, 32, "except_last"),
    ],
)
def test_a_last_batch_of_any_size_counts_as_in_plain_keras(rows, batch_size, remat):
    # 64: the number of rows is known when the step is traced. 65, 7, 33: one row is left, for five micro-batches.
    strategy = tf_gpipe.GPipeStrategy(3, 5, remat=remat)
    assert_same(plain(rows, batch_size), train(small_model, regression(rows), strategy, batch_size=batch_size))


def test_m_alone_does_not_change_the_weights():
    models = [train(small_model, regression(64), tf_gpipe.GPipeStrategy(2, m))[0] for m in (1, 3, 20)]
    for model in models[1:]:
        assert largest_difference(models[0], model) <= 1e-6


def test_train_on_batch_of_changing_sizes_is_exact():
    def run(strategy):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = small_model()
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        losses = [float(model.train_on_batch(*regression(rows))) for rows in (16, 7, 3, 1, 16)]
        return model, {"loss": losses}

    assert_same(run(None), run(tf_gpipe.GPipeStrategy(2, 4)))


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.02),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_and_its_state_are_those_of_plain_keras(name):
    def run(strategy):
        return train(
            small_model, regression(71), strategy, compile=lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"}
        )

    expected, received = run(None), run(tf_gpipe.GPipeStrategy(2, 3))
    assert_same(expected, received)
    assert_same_optimizer(expected[0], received[0])
    steps = received[0].optimizer.gradient_accumulation_steps or 1
    assert int(received[0].optimizer.iterations) == 10 // steps  # once a batch, not once a micro-batch


@pytest.mark.parametrize("name", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_is_not_idle_in_these_tests(name):
    def compile_with():
        return {"optimizer": OPTIMIZERS[name](), "loss": "mse"}

    assert largest_difference(plain(71)[0], train(small_model, regression(71), compile=compile_with)[0]) > 1e-2


# --- losses ----------------------------------------------------------------------------------------------------------


def naive_loss(model, *batch):
    """The mean of the losses of two halves: what averaging over micro-batches would give."""
    half = len(batch[0]) // 2
    return np.mean([exact_loss(model, *(part[rows] for part in batch)) for rows in (slice(half), slice(half, None))])


def exact_loss(model, *batch):
    return np.ravel(model.test_on_batch(*batch))[0]


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    [
        ("sum", False),
        ("sum", True),
        ("sum_over_batch_size", True),
        ("mean_with_sample_weight", True),
    ],
)
def test_a_loss_reduction(reduction, weighted):
    weights = np.abs(normal(71, seed=2)) * (np.arange(71) % 16 < 8) + 0.1 if weighted else None

    def run(strategy):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        return train(
            small_model,
            regression(71),
            strategy,
            compile={"optimizer": keras.optimizers.SGD(0.01), "loss": loss, "weighted_metrics": ["mae"]},
            sample_weight=weights,
        )

    expected = run(None)
    assert_same(expected, run(tf_gpipe.GPipeStrategy(2, 5)))
    if weighted and reduction == "mean_with_sample_weight":
        batch = [part[:16] for part in (*regression(71), weights)]
        assert abs(naive_loss(expected[0], *batch) - exact_loss(expected[0], *batch)) > 1e-2


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input([6]), L.Dense(8, "relu"), L.Dense(6, "relu"), L.Dense(3, "softmax")])


def test_class_weight():
    x, labels = normal(71, 6), np.random.default_rng(3).integers(0, 3, 71)

    def run(strategy, weights):
        return train(
            classifier,
            (x, labels),
            strategy,
            compile={"optimizer": keras.optimizers.SGD(0.1), "loss": "sparse_categorical_crossentropy"},
            class_weight=weights,
        )

    weights = {0: 10.0, 1: 1.0, 2: 0.1}
    expected = run(None, weights)
    assert_same(expected, run(tf_gpipe.GPipeStrategy(3, 4), weights))
    assert largest_difference(expected[0], run(None, None)[0]) > 1e-2


def words(rows: int):
    """Sentences padded with 0 to 6 words: the first half of every 8 has one word only, and tags of its own."""
    rng = np.random.default_rng(4)
    short = np.arange(rows)[:, None] % 8 < 4
    x = np.where(np.arange(6) < np.where(short, 1, 6), rng.integers(1, 9, (rows, 6)), 0)
    return x, np.where(short, 2, rng.integers(0, 2, (rows, 6)))


def tagger() -> keras.Model:
    return keras.Sequential(
        [keras.Input([6], dtype="int32"), L.Embedding(9, 5, mask_zero=True), L.LSTM(4, return_sequences=True)]
        + [L.Dense(4, "tanh"), L.Dense(3, "softmax")]
    )


@functools.cache
def train_tagger(remat):
    return train(
        tagger,
        words(20),
        remat and tf_gpipe.GPipeStrategy(3, 2, remat=remat),
        compile={
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
        },
        batch_size=8,
        epochs=1,
    )


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_masked_loss_counts_valid_entries(remat):
    expected = train_tagger(None)
    assert_same(expected, train_tagger(remat))
    batch = [part[:8] for part in words(28)]
    assert abs(naive_loss(expected[0], *batch) - exact_loss(expected[0], *batch)) > 1e-3


def in_batch_negatives(_, pairs):
    """Every other row of the mini-batch is a negative example."""
    a, b = keras.ops.split(pairs, 2, axis=-1)
    logits = keras.ops.matmul(a, keras.ops.transpose(b))
    labels = keras.ops.arange(keras.ops.shape(logits)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


@functools.cache
def train_pairs(remat):
    return train(
        lambda: keras.Sequential([keras.Input([6]), L.Dense(7, "tanh"), L.Dense(5, "tanh"), L.Dense(8)]),
        regression(71),
        remat and tf_gpipe.GPipeStrategy(3, 4, remat=remat),
        compile={"optimizer": keras.optimizers.SGD(0.05), "loss": in_batch_negatives},
    )


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_loss_over_pairs_of_rows_sees_the_whole_mini_batch(remat):
    expected = train_pairs(None)
    assert_same(expected, train_pairs(remat))
    batch = [part[:16] for part in regression(71)]
    assert abs(naive_loss(expected[0], *batch) - exact_loss(expected[0], *batch)) > 0.1


@functools.cache
def train_regularized(remat):
    def make():
        l2 = keras.regularizers.L2(0.1)
        return keras.Sequential(
            [keras.Input([6]), L.Dense(5, "tanh", kernel_regularizer=l2, activity_regularizer=l2), L.Dense(4, "tanh")]
            + [L.Dense(3, "tanh", activity_regularizer=keras.regularizers.L1(0.2)), L.Dense(2, bias_regularizer=l2)]
        )

    return train(make, regression(71), remat and tf_gpipe.GPipeStrategy(3, 5, remat=remat))


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_regularizers_count_once_and_layer_losses_as_means(remat):
    expected = train_regularized(None)
    assert_same(expected, train_regularized(remat))
    assert largest_difference(expected[0], plain(71)[0]) > 1e-2


# --- metrics, evaluate, predict --------------------------------------------------------------------------------------


class RowCounter(keras.metrics.Metric):
    """Adds up the sizes of the batches it is shown."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")
        self.calls = self.add_variable((), "zeros", name="calls")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))
        self.calls.assign_add(1.0)

    def result(self):
        return self.rows + 0.0


def test_metrics_see_the_mini_batch_once():
    labels = np.random.default_rng(5).integers(0, 2, (71, 1)).astype("float32")

    def run(strategy):
        return train(
            lambda: keras.Sequential([keras.Input([6]), L.Dense(5, "tanh"), L.Dense(4, "tanh"), L.Dense(1, "sigmoid")]),
            (normal(71, 6), labels),
            strategy,
            compile=lambda: {
                "optimizer": keras.optimizers.SGD(0.5),
                "loss": "binary_crossentropy",
                "metrics": [keras.metrics.AUC(name="auc"), "mae", keras.metrics.F1Score(threshold=0.5), RowCounter()],
                "weighted_metrics": [keras.metrics.Precision(name="precision")],
            },
            validation_data=(normal(19, 6, seed=6), labels[:19]),
        )

    expected, received = run(None), run(tf_gpipe.GPipeStrategy(2, 4))
    assert_same(expected, received)
    assert received[1]["rows"] == [71.0, 71.0]
    assert received[1]["val_rows"] == [19.0, 19.0]
    counter = next(m for m in received[0].metrics[1].metrics if isinstance(m, RowCounter))
    assert float(counter.calls) == 2  # the last validation: 19 rows in batches of 16


@pytest.mark.parametrize(("batch_size", "num_micro_batches"), [(16, 1), (16, 4), (3, 8)])
def test_evaluate_and_predict_are_those_of_plain_keras(batch_size, num_micro_batches):
    x, y = regression(71)
    expected = plain(71)[0]
    with tf_gpipe.GPipeStrategy(3, num_micro_batches).scope():
        model = small_model()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    model.set_weights(expected.get_weights())
    before = model.get_weights()
    np.testing.assert_allclose(
        model.predict(x, batch_size=batch_size, verbose=0),
        expected.predict(x, batch_size=batch_size, verbose=0),
        rtol=0,
        atol=1e-6,
    )
    loss = expected.evaluate(x, y, batch_size=batch_size, verbose=0)
    received = model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)
    assert received["loss"] == pytest.approx(loss, rel=1e-6)
    assert received["mae"] == pytest.approx(np.mean(np.abs(expected.predict(x, verbose=0) - y)), rel=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(request):
    """Makes a dtype policy the global one; for "float64", which is a whole precision, floatx too."""
    before, floatx = keras.config.dtype_policy(), keras.config.floatx()
    if request.param == "float64":
        keras.config.set_floatx("float64")
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("policy", ["float64"], indirect=True)
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_float64_is_exact_to_its_own_precision(policy, remat):
    def make():
        l2 = keras.regularizers.L2(0.1)
        return keras.Sequential(
            [keras.Input([6]), L.Dense(5, "tanh", activity_regularizer=l2), L.Dense(4, "tanh"), L.Dense(2)]
        )

    data = [part.astype("float64") for part in regression(39)]
    expected = train(make, data)
    received = train(make, data, tf_gpipe.GPipeStrategy(3, 5, remat=remat))
    assert {w.dtype for w in received[0].weights} == {"float64"}
    assert largest_difference(expected[0], received[0]) <= 1e-10
    np.testing.assert_allclose(received[1]["loss"], expected[1]["loss"], rtol=1e-10)


@pytest.mark.parametrize(
    ("policy", "remat"),
    [("mixed_float16", "always"), ("mixed_float16", "never"), ("mixed_bfloat16", "except_last")],
    indirect=["policy"],
)
def test_mixed_precision_stays_within_that_of_its_activations(policy, remat):
    def run(strategy):
        return train(
            small_model,
            regression(71),
            strategy,
            compile=lambda: {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"},
        )

    expected, received = run(None), run(tf_gpipe.GPipeStrategy(2, 4, remat=remat))
    assert_same(expected, received, tolerance=1e-3)
    assert {w.dtype for w in received[0].trainable_variables} == {"float32"}
    scaled = isinstance(received[0].optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


@pytest.mark.parametrize("policy", ["bfloat16"], indirect=True)
def test_bfloat16_weights_get_sums_of_gradients_in_float32(policy):
    def run(strategy):
        return train(small_model, regression(64), strategy, epochs=1)

    expected, received = run(None), run(tf_gpipe.GPipeStrategy(2, 4))
    assert {w.dtype for w in received[0].trainable_variables} == {"bfloat16"}
    # Four steps, each rounding the weights to 8 bits: a unit in the last place of the largest weight.
    assert largest_difference(expected[0], received[0]) <= 2**-8


@pytest.mark.parametrize("policy", ["bfloat16"], indirect=True)
@pytest.mark.parametrize("remat", ["always", "never"])
def test_small_gradients_are_not_lost_beside_a_large_one(policy, remat):
    # One row of 256 and thirty of 1, a micro-batch each: in bfloat16, 256 + 1 is 256.
    x = np.array([[1.0]] * 15 + [[256.0], [0.0]] + [[1.0]] * 15)
    model, _ = train(
        lambda: keras.Sequential([keras.Input([1]), L.Dense(1, use_bias=False, kernel_initializer="zeros")]),
        (x, np.zeros([32, 1])),
        tf_gpipe.GPipeStrategy(1, 32, remat=remat),
        compile={"optimizer": keras.optimizers.SGD(1.0), "loss": lambda _, y: y},
        batch_size=32,
        epochs=1,
    )
    assert tf.cast(model.weights[0].value, "float32").numpy().item() == -286 / 32


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_an_infinite_gradient_skips_the_step_and_halves_the_loss_scale(policy):
    x, y = regression(16)

    def run(strategy):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = small_model()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        weights, scales = [], []
        for target in (y, y * 1e4, y):
            model.train_on_batch(x, target)
            weights.append(model.get_weights())
            scales.append(float(model.optimizer.dynamic_scale))
        return model, weights, scales

    expected, received = run(None), run(tf_gpipe.GPipeStrategy(2, 4))
    assert received[2] == expected[2] == [2.0**15, 2.0**14, 2.0**14]
    assert all(np.array_equal(a, b) for a, b in zip(received[1][0], received[1][1], strict=True))
    assert not np.array_equal(received[1][1][0], received[1][2][0])
    assert largest_difference(expected[0], received[0]) <= 1e-3
    assert all(np.isfinite(w).all() for w in received[0].get_weights())
