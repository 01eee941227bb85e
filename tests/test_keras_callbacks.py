"""Callbacks that write, stop, change or use a model while it is trained: files, steps and weights are plain Keras's."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from helpers import assert_same, assert_same_optimizer, largest_difference, normal, train
from keras import callbacks, layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import tf_gpipe

ROWS, BATCH = 22, 4  # five whole batches and one of two rows, fewer than there are micro-batches
NUM_BATCHES = 6
X, Y = normal(ROWS, 4), normal(ROWS, 1, seed=1)
VALIDATION = normal(5, 4, seed=2), normal(5, 1, seed=3)
RUNS = ("plain", "ours")


def chain() -> keras.Model:
    middle = [layers.Dense(6, "tanh", name=name) for name in ("one", "two")]
    return keras.Sequential([keras.Input([4]), *middle, layers.Dense(1, name="head")], name="chain")


def momentum() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse", "metrics": ["mae"]}


Run = tuple[keras.Model, dict[str, list[float]]]


def fit_both(make: Callable[[str], list[callbacks.Callback]], *, compile: Any = momentum, **fit: Any) -> list[Run]:
    """Trains plainly and in a pipeline with the callbacks that `make` makes for each run; all is equal."""
    strategies = (None, tf_gpipe.GPipeStrategy(num_stages=3, num_micro_batches=3))
    fit = {"batch_size": BATCH, "validation_data": VALIDATION, **fit}
    runs = [
        train(chain, (X, Y), strategy, compile=compile, callbacks=make(name), **fit)
        for name, strategy in zip(RUNS, strategies, strict=True)
    ]
    assert_same(*runs)
    assert_same_optimizer(runs[0][0], runs[1][0])
    assert len({v.value.device for v in runs[1][0].weights}) == 3
    keras.utils.set_random_seed(0)
    assert largest_difference(chain(), runs[1][0]) > 1e-3, "the weights have moved"
    return runs


# --- TensorBoard ---


def written(folder: Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Steps and values of everything in a folder of event files, by tag."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert len({tag for tag in found if tag.startswith("keras")}) <= 1
    return found


def test_tensorboard_writes_the_scalars_and_histograms_of_plain_keras(tmp_path):
    def make(name: str) -> list[callbacks.Callback]:
        return [
            callbacks.TensorBoard(
                tmp_path / name, histogram_freq=1, write_graph=True, write_images=True, update_freq="batch"
            )
        ]

    fit_both(make)
    for part in ("train", "validation"):
        plain, ours = (written(tmp_path / name / part) for name in RUNS)
        assert set(plain) == set(ours)
        scalars = {"epoch_loss", "epoch_mae"} | (
            {"batch_loss", "batch_mae", "epoch_learning_rate"} if part == "train" else set()
        )
        assert scalars <= set(ours)
        for tag in sorted(set(ours) - {"keras"}):
            assert [step for step, _ in ours[tag]] == [step for step, _ in plain[tag]], tag
            for (_, a), (_, b) in zip(plain[tag], ours[tag], strict=True):
                if a.dtype == object or a.dtype.kind in "SU":
                    assert a.shape == b.shape  # a picture or the graph
                elif tag.endswith("/histogram"):
                    np.testing.assert_allclose(b[:, :2], a[:, :2], rtol=0, atol=1e-6)  # edges; a number may be on one
                    assert b[:, 2].sum() == a[:, 2].sum() > 0
                else:
                    np.testing.assert_allclose(b, a, rtol=0, atol=1e-6, err_msg=tag)
        if part == "train":
            assert len(ours["batch_loss"]) == 2 * NUM_BATCHES
            assert sum(tag.endswith("/histogram") for tag in ours) == 6
            assert any(tag.endswith("/image") for tag in ours)


# --- what is printed ---


def test_the_progress_that_is_printed_is_that_of_plain_keras():
    printed = iter([io.StringIO(), io.StringIO()])
    texts = []

    class Catch(callbacks.Callback):
        """Catches what is printed from the beginning of training to its end."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.text = next(printed)
            self.catching = contextlib.redirect_stdout(self.text)
            self.catching.__enter__()

        def on_train_end(self, logs: Any = None) -> None:
            self.catching.__exit__(None, None, None)
            texts.append(re.sub(r"\d+m?s(/step)?|\d+us/step", "", self.text.getvalue()))

    fit_both(lambda name: [Catch()], verbose=2)
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+(?:e-\d+)?", text)] for text in texts]
    assert len(numbers[1]) == 8
    np.testing.assert_allclose(numbers[1], numbers[0], atol=2e-4)
    assert re.sub(r"\d+\.\d+\S*", "", texts[0]) == re.sub(r"\d+\.\d+\S*", "", texts[1])


# --- callbacks together ---


def test_callbacks_that_stop_and_slow_down_work_together(tmp_path):
    def make(name: str) -> list[callbacks.Callback]:
        return [
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * (1.0 if epoch < 2 else 0.9)),
            callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1, min_delta=0.02),
            callbacks.ModelCheckpoint(
                tmp_path / f"{name}.weights.h5", monitor="val_loss", save_best_only=True, save_weights_only=True
            ),
            callbacks.CSVLogger(tmp_path / f"{name}.csv"),
            callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
            callbacks.TerminateOnNaN(),
        ]

    (plain, _), (ours, history) = fit_both(make, epochs=20)
    assert 3 < len(history["loss"]) < 20
    assert len(set(history["learning_rate"])) > 2
    rows = [(tmp_path / f"{name}.csv").read_text().splitlines() for name in RUNS]
    assert rows[0][0] == rows[1][0]
    for a, b in zip(rows[0][1:], rows[1][1:], strict=True):
        np.testing.assert_allclose(np.float64(b.split(",")), np.float64(a.split(",")), rtol=0, atol=2e-6)
    assert largest_difference(plain, ours) <= 1e-6
    best = min(history["val_loss"])
    assert ours.evaluate(*VALIDATION, verbose=0)[0] == pytest.approx(best, abs=1e-6)
    plain.load_weights(tmp_path / "ours.weights.h5")
    assert plain.evaluate(*VALIDATION, verbose=0)[0] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("every", ["batch", "epoch"])
def test_averages_are_swapped_in_and_saved(tmp_path, every):
    def compile() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.6), "loss": "mse"}

    def make(name: str) -> list[callbacks.Callback]:
        return [
            callbacks.SwapEMAWeights(swap_on_epoch=every == "epoch"),
            callbacks.ModelCheckpoint(tmp_path / (name + "-{epoch}.weights.h5"), save_weights_only=True),
        ]

    fit_both(make, compile=compile)
    for epoch in (1, 2):
        models = []
        for name in RUNS:
            model = chain()
            model.compile(**compile())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(tmp_path / f"{name}-{epoch}.weights.h5")
            models.append(model)
        assert largest_difference(*models) <= 1e-6


def interrupted(at: int) -> type[callbacks.Callback]:
    class Crash(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == at:
                raise RuntimeError("interrupted")

    return Crash


@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_training_goes_on_after_a_crash_as_in_plain_keras(tmp_path, save_freq):
    def backup(name: str) -> callbacks.Callback:
        return callbacks.BackupAndRestore(tmp_path / name, save_freq=save_freq)

    for name, strategy in zip(RUNS, (None, tf_gpipe.GPipeStrategy(3, 3)), strict=True):
        with pytest.raises(RuntimeError, match="interrupted"):
            train(
                chain, (X, Y), strategy, compile=momentum, batch_size=BATCH, callbacks=[backup(name), interrupted(9)()]
            )
    (_, _), (ours, _) = fit_both(lambda name: [backup(name)])
    assert int(ours.optimizer.iterations) == {"epoch": 2 * NUM_BATCHES, 2: 8 + NUM_BATCHES}[save_freq]


# --- callbacks that act on the model ---


class EveryHook(callbacks.Callback):
    """Notes every call with its number and the names of its logs."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told = told

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            told = object.__getattribute__(self, "told")
            return lambda *at, logs=None: told.append(
                (name, [a if isinstance(a, int) else sorted(a or {}) for a in at], sorted(logs or {}))
            )
        return object.__getattribute__(self, name)


def test_every_hook_of_fit_evaluate_and_predict_is_called_as_in_plain_keras():
    told: dict[str, list[Any]] = {name: [] for name in RUNS}
    runs = fit_both(lambda name: [EveryHook(told[name])])
    for name, (model, _) in zip(RUNS, runs, strict=True):
        model.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[EveryHook(told[name])])
        model.predict(X, batch_size=BATCH, verbose=0, callbacks=[EveryHook(told[name])])
        model.fit(
            X,
            Y,
            batch_size=BATCH,
            verbose=0,
            callbacks=[
                callbacks.LambdaCallback(
                    on_train_begin=lambda logs, name=name: told[name].append("begin"),
                    on_epoch_end=lambda epoch, logs, name=name: told[name].append(("end", epoch)),
                    on_train_batch_end=lambda batch, logs, name=name: told[name].append(("batch", batch)),
                )
            ],
        )
    assert told["plain"] == told["ours"]
    hooks = {entry[0] for entry in told["ours"]}
    assert {"on_train_batch_begin", "on_test_batch_end", "on_predict_batch_end", "batch", "end"} <= hooks


class ChangesTheRate(callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.2 / (1 + batch)


class StopsSoon(callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            self.model.stop_training = True


class ShrinksWeights(callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.set_weights([0.9 * w for w in self.model.get_weights()])
        self.model.get_layer("two").kernel.assign(self.model.get_layer("two").kernel * 1.1)


class UsesTheModel(callbacks.Callback):
    """Predicts, evaluates and trains on a batch more in the middle of training."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.seen = self.model.predict_on_batch(X), self.model(X[:3]).numpy()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        logs["again"] = float(self.model.evaluate(X, Y, verbose=0)[0])
        logs["mean"] = float(np.mean(self.model.predict(X, verbose=0)))
        # Values by themselves: the rounding of each adds up in a sum, whose terms cancel.
        seen = np.concatenate(self.seen)
        logs.update({f"seen {row}": float(value) for row, value in enumerate(seen[:, 0])})


class FreezesALayer(callbacks.Callback):
    """Freezes a layer between two epochs; what is trained was decided when the model was compiled."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.get_layer("one").trainable = False

    def on_train_end(self, logs: Any = None) -> None:
        self.model.get_layer("one").trainable = True


@pytest.mark.parametrize("kind", [ChangesTheRate, StopsSoon, ShrinksWeights, UsesTheModel, FreezesALayer])
def test_a_callback_that_acts_on_the_model(kind):
    (_, _), (ours, history) = fit_both(lambda name: [kind()])
    if kind is StopsSoon:
        assert int(ours.optimizer.iterations) == 4
    if kind is UsesTheModel:
        assert {"again", "mean", "seen 0", f"seen {ROWS + 2}"} <= set(history)
