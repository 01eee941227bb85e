"""Callbacks of Keras do in a pipeline what they do plainly, and are told the same."""

import keras
import numpy as np
import pytest
from helpers import assert_same, assert_same_optimizer, normal, train

import tf_gpipe

ROWS, BATCH = 22, 4  # five whole batches and one of two rows, fewer than there are micro-batches
NUM_BATCHES = 6
X, Y = normal(ROWS, 4), normal(ROWS, 1, seed=1)
VALIDATION = normal(5, 4, seed=2), normal(5, 1, seed=3)


def two_layers() -> keras.Sequential:
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])


def sgd() -> dict:
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}


def adam() -> dict:
    return {"optimizer": keras.optimizers.Adam(0.05), "loss": "mse"}


def fit_both(callbacks, *, compile=sgd, **fit):
    """Trains plainly and in a pipeline, asserts that all is equal, and returns both models and histories."""
    runs = [
        train(two_layers, (X, Y), strategy, compile=compile, callbacks=callbacks(), **{"batch_size": BATCH, **fit})
        for strategy in (None, tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=3))
    ]
    assert_same(*runs)
    return runs


def test_early_stopping_restores_the_best_weights():
    def callbacks():
        return [keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)]

    def compile():
        return {"optimizer": keras.optimizers.SGD(0.2), "loss": "mse"}

    (_, _), (model, history) = fit_both(callbacks, compile=compile, validation_data=VALIDATION, epochs=12)
    assert 2 <= len(history["loss"]) < 12
    assert float(model.evaluate(*VALIDATION, verbose=0)) == pytest.approx(min(history["val_loss"]), abs=1e-6)


def test_learning_rate_scheduler():
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    (_, _), (model, history) = fit_both(callbacks, epochs=3, compile=adam)
    assert history["learning_rate"] == pytest.approx([0.025, 0.0125, 0.00625])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.00625)


def test_reduce_learning_rate_on_plateau():
    def callbacks():
        return [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.1, min_delta=10.0)]

    (_, _), (_, history) = fit_both(callbacks, epochs=4)
    assert history["learning_rate"] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_learning_rate_schedule():
    def compile():
        return {"optimizer": keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)), "loss": "mse"}

    fit_both(list, compile=compile)


def test_csv_logger(tmp_path):
    files = iter([tmp_path / "plain.csv", tmp_path / "ours.csv"])
    fit_both(lambda: [keras.callbacks.CSVLogger(next(files))], validation_data=VALIDATION)
    plain, ours = (
        [line.split(",") for line in (tmp_path / f"{name}.csv").read_text().splitlines()] for name in ("plain", "ours")
    )
    assert plain[0] == ours[0] == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    np.testing.assert_allclose(np.float64(ours[1:]), np.float64(plain[1:]), rtol=0, atol=1e-6)


def test_terminate_on_nan():
    def compile():
        return {"optimizer": keras.optimizers.SGD(1e30), "loss": "mse"}

    stopped = []
    for strategy in (None, tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=3)):
        seen = []
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(batch))
        stop = keras.callbacks.TerminateOnNaN()
        train(two_layers, (X, Y), strategy, compile=compile, batch_size=BATCH, epochs=1, callbacks=[watch, stop])
        stopped.append(seen)
    assert stopped[0] == stopped[1]
    assert len(stopped[1]) < NUM_BATCHES


def test_swap_ema_weights():
    def compile():
        return {"optimizer": keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7), "loss": "mse"}

    def callbacks():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    (plain, _), (ours, _) = fit_both(callbacks, compile=compile, validation_data=VALIDATION)
    assert_same_optimizer(plain, ours)


def test_moving_average_overwrites_weights_at_the_end():
    def compile():
        return {"optimizer": keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=4), "loss": "mse"}

    (plain, _), (ours, _) = fit_both(list, compile=compile, epochs=2)
    assert_same_optimizer(plain, ours)


def test_tensorboard(tmp_path):
    folders = iter([tmp_path / "plain", tmp_path / "ours"])

    def callbacks():
        return [keras.callbacks.TensorBoard(str(next(folders)), histogram_freq=1, update_freq=2)]

    fit_both(callbacks, validation_data=VALIDATION)
    for part in ("train", "validation"):
        assert list((tmp_path / "ours" / part).glob("events*"))


def test_what_callbacks_are_told():
    told = []

    class Tell(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            told.append([dict(self.params)])

        def on_epoch_end(self, epoch, logs=None):
            told[-1].append((epoch, sorted(logs)))

        def on_train_batch_begin(self, batch, logs=None):
            told[-1].append(batch)

        def on_train_batch_end(self, batch, logs=None):
            told[-1].append((batch, sorted(logs)))
            assert float(logs["loss"]) >= 0.0

        def on_test_batch_end(self, batch, logs=None):
            told[-1].append(("test", batch))

    fit_both(lambda: [Tell()], validation_data=VALIDATION)
    assert told[0] == told[1]
    assert told[1][0]["steps"] == NUM_BATCHES
    assert told[1][0]["epochs"] == 2


def test_the_optimizer_is_the_users_object():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2)
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.05)
        model = two_layers()
        model.compile(optimizer, "mse")
    model.fit(X, Y, verbose=0)
    assert model.optimizer is optimizer
    model.optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5
