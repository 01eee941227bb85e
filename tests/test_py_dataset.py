"""Data whose content depends on when it is asked: each is asked as often, and in the same order, as by plain Keras."""

import random
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, scope_of
from keras import layers

import tf_gpipe

ROWS = 4
ran_out = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def batch(epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch that tells of which epoch it is, and its index."""
    x = np.linspace(-1, 1, ROWS * 3, dtype="float32").reshape(ROWS, 3)
    x[:, 0] = epoch
    return x, np.full([ROWS, 1], index, "float32")


class Changing(keras.utils.PyDataset):
    """Its content changes at the end of each epoch; it notes every call."""

    def __init__(self, length: int | None = 3, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.length, self.epoch = length, 0
        self.calls: list[int | str] = []

    @property
    def num_batches(self) -> int | None:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        made = batch(self.epoch, index)
        self.calls.append(index)
        return made

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.epoch += 1

    @property
    def hooks(self) -> list[str]:
        return [call for call in self.calls if isinstance(call, str)]

    @property
    def known_calls(self) -> list[Any]:
        """The calls, but for what threads do in any order: several workers fetch at once, and before `begin`."""
        if self.workers < 2:
            return self.calls
        parts: list[list[int | str]] = [[]]
        for call in self.calls:
            parts[-1].append(call)
            if call == "end":
                parts.append([])
        return [sorted(part, key=str) for part in parts]


class Sees:
    """Notes the epoch and the index of each batch that it trains on or is tested on."""

    def train_step(self, data):
        self.note("train", data)
        return super().train_step(data)

    def test_step(self, data):
        self.note("test", data)
        return super().test_step(data)

    def note(self, kind, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        seen = self.__dict__.setdefault("seen", [])
        tf.py_function(lambda a, b: seen.append((kind, int(a), int(b))), [x[0, 0], y[0, 0]], [])


class SeeingModel(Sees, keras.Model):
    pass


class SeeingSequential(Sees, keras.Sequential):
    pass


class Subclassed(Sees, keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))


def functional() -> keras.Model:
    x = keras.Input([3])
    return SeeingModel(x, layers.Dense(1)(layers.Dense(4, "tanh")(x)))


def unbuilt() -> keras.Model:
    return SeeingSequential([layers.Dense(4, "tanh"), layers.Dense(1)])


MODELS = {"functional": functional, "unbuilt": unbuilt, "subclassed": Subclassed}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def both(make=functional, **compile: Any) -> list[keras.Model]:
    """The same model, plainly and in a pipeline."""
    models = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 2)):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            models.append(make())
            models[-1].compile(keras.optimizers.SGD(0.01), "mse", **compile)
    return models


def epoch_of(kind: str, epoch: int, length: int = 3) -> list[tuple[str, int, int]]:
    return [(kind, epoch, index) for index in range(length)]


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        *((make, {"workers": count}) for make in MODELS.values() for count in (0, 2)),
        (functional, {"workers": 1}),
        (functional, {"workers": 2, "max_queue_size": 1}),
    ],
)
def test_a_py_dataset_is_asked_as_by_plain_keras(make, workers):
    runs, asked = [], []
    for model in both(make):
        data, more, tested = Changing(**workers), Changing(2, **workers), Changing(2, **workers)
        history = model.fit(data, epochs=3, shuffle=False, verbose=0, validation_data=more).history
        expected = [part for e in (1, 2, 3) for part in (*epoch_of("train", e), *epoch_of("test", 2 * e - 1, 2))]
        assert model.seen == expected
        assert data.hooks == ["end"] + ["begin", "end"] * 3
        again = model.fit(data, shuffle=False, verbose=0).history
        assert model.seen[len(expected) :] == epoch_of("train", 5)
        model.evaluate(tested, verbose=0)
        assert model.seen[-2:] == epoch_of("test", 1, 2)
        assert tested.hooks == ["end", "begin", "end"]
        predicted = model.predict(tested, verbose=0)
        runs.append((model, {**history, "again": again["loss"], "predicted": predicted}))
        asked.append([d.known_calls for d in (data, more, tested)])
    assert asked[1] == asked[0]
    assert_same(*runs)
    assert largest_difference(runs[1][0], both(functional)[0]) > 1e-3, "the weights have moved"
    assert len({v.value.device for v in runs[1][0].weights}) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_of_a_shuffled_py_dataset_is_plain_kerass(workers):
    seen = []
    for model in both(unbuilt):
        random.seed(3)
        model.fit(Changing(5, workers=workers), epochs=3, verbose=0)
        seen.append(model.seen)
    assert seen[1] == seen[0]
    assert sorted(seen[1]) == [part for epoch in (1, 2, 3) for part in epoch_of("train", epoch, 5)] != seen[1]


class WaitsForWorkers(keras.callbacks.Callback):
    """Goes on when the workers have fetched all they may, so that chance decides nothing."""

    def __init__(self, data: Changing, count: int) -> None:
        super().__init__()
        self.data, self.count = data, count

    def on_train_batch_end(self, batch, logs=None):
        until = time.monotonic() + 60
        while self.data.workers == 2 and len(self.data.calls) - len(self.data.hooks) < self.count:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("make", "length"), [(functional, 4), (unbuilt, None)], ids=["finite", "endless"])
def test_a_py_dataset_with_steps_per_epoch(make, workers, length):
    indices, hooks = [], []
    for model in both(make):
        data = Changing(length, workers=workers)
        wait = WaitsForWorkers(data, 2 + 4)
        fit = {"epochs": 2, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
        model.fit(data, callbacks=[wait], **fit)
        indices.append([index for _, _, index in model.seen])
        hooks.append(data.hooks)
    assert indices == [[0, 1, 2, 3]] * 2
    assert hooks == [["end", "begin", "end", "begin", "end"]] * 2


# --- data that are another each time they are opened ---


class Opened:
    """A dataset of a generator, whose batches tell how often it has been opened."""

    def __init__(self, **signature: Any) -> None:
        self.count = 0
        self.data = tf.data.Dataset.from_generator(self.batches, **signature)

    def batches(self):
        self.count += 1
        for index in range(2):
            yield batch(self.count, index)


DESCRIBED = {"output_signature": (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))}
UNDESCRIBED = {
    "output_types": (tf.float32, tf.float32)
}  # of no known rank, so that a batch is drawn to build the model


@ran_out
@each_model
@pytest.mark.parametrize("signature", [DESCRIBED, UNDESCRIBED], ids=["described", "of unknown rank"])
def test_a_dataset_is_opened_as_often_as_by_plain_keras(make, signature):
    runs, counts = [], []
    for model in both(make, run_eagerly=signature is UNDESCRIBED):  # in a graph Keras refuses targets of unknown rank
        data, more = Opened(**signature), Opened(**signature)
        fit = {"epochs": 2, "shuffle": False, "verbose": 0}
        losses = model.fit(data.data, validation_data=more.data, **fit).history
        evaluated = model.evaluate(more.data, verbose=0)
        again = model.fit(data.data, **fit).history["loss"]
        runs.append((model, {**losses, "evaluated": evaluated, "again": again}))
        counts.append((data.count, more.count))
    assert counts[1] == counts[0]
    assert runs[1][0].seen == runs[0][0].seen
    assert runs[1][0].seen[:4] == [*epoch_of("train", 1, 2), *epoch_of("test", 1, 2)]
    assert_same(*runs)


@ran_out
@pytest.mark.parametrize("signature", [DESCRIBED, UNDESCRIBED], ids=["described", "of unknown rank"])
def test_a_dataset_that_the_strategy_was_given_first_is_opened_as_often(signature):
    _, model = both(run_eagerly=signature is UNDESCRIBED)
    opened = Opened(**signature)
    data = model.distribute_strategy.experimental_distribute_dataset(opened.data)
    model.fit(data, epochs=3, shuffle=False, verbose=0)
    assert model.seen == [part for count in (1, 2, 3) for part in epoch_of("train", count, 2)]
    assert opened.count == 3


@pytest.mark.parametrize("signature", [DESCRIBED, UNDESCRIBED], ids=["described", "of unknown rank"])
def test_an_endless_dataset_loses_no_batch(signature):
    def endless():
        yield from (batch(7, index) for index in range(100))

    seen = []
    for model in both(unbuilt, run_eagerly=signature is UNDESCRIBED):
        data = tf.data.Dataset.from_generator(endless, **signature)
        model.fit(data, epochs=2, steps_per_epoch=3, shuffle=False, verbose=0)
        seen.append(model.seen)
    assert seen == [epoch_of("train", 7, 6)] * 2
