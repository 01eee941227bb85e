"""Data that notice how often they are opened give training the same under the strategy as in plain Keras.

Above all `keras.utils.PyDataset`: what its hooks are told, in which order, and what training sees of it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import scope_of

import tf_gpipe
from tf_gpipe.errors import ArgumentError
from tf_gpipe.input_dataset import InputDataset

BATCHES = 3
ran_out = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # how Keras finds the end of such data


def gpipe() -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)


class Told(keras.utils.PyDataset):
    """Writes down what it is told; its targets say how often that was, so that training sees it."""

    def __init__(self, workers: int, length: int = BATCHES, first: int = 0) -> None:
        super().__init__(workers=workers)
        self.length, self.first = length, first
        self.hooks: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        # Several workers fetch while `on_epoch_begin` runs, in plain Keras too.
        begun = self.hooks.count("begin") if self.workers < 2 else 0
        content = self.first + 100 * begun + 10 * self.hooks.count("end") + index
        return np.full([4, 2], index, "float32"), np.full([4, 1], content, "float32")

    def on_epoch_begin(self) -> None:
        self.hooks.append("begin")

    def on_epoch_end(self) -> None:
        self.hooks.append("end")


class TwoLayers(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


class KnowsItsShapes(TwoLayers):
    """Takes data whose shapes TensorFlow does not know."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step((tf.ensure_shape(data[0], [None, 2]), tf.ensure_shape(data[1], [None, 1])))


def sequential(*first: Any) -> keras.Model:
    return keras.Sequential([*first, keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "built": lambda: sequential(keras.Input([2])),
    "not built": sequential,
    "subclassed": TwoLayers,
}


def compiled(make: Callable[[], keras.Model], strategy: Any, **compile: Any) -> tuple[keras.Model, list[int]]:
    """A model, and the list of what its loss sees: the first target of each batch, and zeros between calls."""
    seen: list[int] = []

    def loss(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
        note = tf.py_function(lambda value: seen.append(int(value)), [y[0, 0]], [])
        with tf.control_dependencies([note] if note is not None else []):
            return tf.reduce_mean(tf.square(0.01 * y - prediction), axis=-1)

    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(keras.optimizers.SGD(0.1), loss, **compile)
    return model, seen


def assert_as_in_plain_keras(record: Callable[[Any], Any]) -> Any:
    """What is recorded of training is the same without a strategy and with one; returns it."""
    plain, ours = record(None), record(gpipe())
    assert ours == plain
    return plain


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_fit_sees_and_tells_the_same(workers, model):
    def record(strategy):
        fitted, seen = compiled(MODELS[model], strategy)
        data, validation = Told(workers), Told(workers, length=1, first=5000)
        records = []
        for epochs in (3, 1):
            losses = fitted.fit(data, validation_data=validation, epochs=epochs, verbose=0).history
            losses = {name: np.round(values, 5).tolist() for name, values in losses.items()}
            records.append((seen.copy(), data.hooks.copy(), validation.hooks.copy(), losses))
        return records

    (seen, told, _, _), _ = assert_as_in_plain_keras(record)
    assert told == ["end", *["begin", "end"] * 3]
    epochs = [sorted(value % 100 for value in seen if value < 5000)[i : i + BATCHES] for i in (0, 3, 6)]
    assert epochs == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_evaluate_sees_and_tells_the_same(workers):
    def record(strategy):
        fitted, seen = compiled(TwoLayers, strategy)
        data = Told(workers)
        losses = [round(fitted.evaluate(data, verbose=0), 5) for _ in range(2)]
        predicted = fitted.predict(data, verbose=0).shape
        return seen, data.hooks, losses, predicted

    seen, *_ = assert_as_in_plain_keras(record)
    assert [value % 100 for value in seen] == [10, 11, 12, 30, 31, 32]


@pytest.mark.parametrize(("workers", "steps"), [(0, 2), (1, 2), (2, 4)])
def test_steps_of_an_epoch_see_and_tell_the_same(workers, steps):
    """Where an epoch ends amid the data, batches may have been fetched ahead by then: only their order is certain."""

    def record(strategy):
        fitted, seen = compiled(MODELS["built"], strategy)
        data = Told(workers, length=4)
        for epochs in (4, 1):
            fitted.fit(data, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0)
        return [value % 10 for value in seen], data.hooks

    seen, told = assert_as_in_plain_keras(record)
    assert seen == [0, 1, 2, 3] * (2 if steps == 2 else 4) + list(range(steps))
    assert told.count("begin") == 5


def test_several_steps_at_once_see_and_tell_the_same():
    def record(strategy):
        fitted, seen = compiled(MODELS["built"], strategy, steps_per_execution=2)
        data = Told(2, length=4)
        fitted.fit(data, epochs=2, shuffle=False, verbose=0)
        return seen, data.hooks

    assert_as_in_plain_keras(record)


# --- other data that notice ---


class Opened:
    """Batches that say how often they were opened before, and which of all they are."""

    def __init__(self) -> None:
        self.opened = self.drawn = 0

    def __call__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self.opened += 1
        for _ in range(BATCHES):
            self.drawn += 1
            yield np.ones([4, 2], "float32"), np.full([4, 1], 100 * self.opened + self.drawn, "float32")


def described(batches: Opened) -> tf.data.Dataset:
    kinds = tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(batches, output_signature=kinds)


def of_unknown_rank(batches: Opened) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(batches, output_types=(tf.float32, tf.float32))


def shuffled(batches: Opened) -> tf.data.Dataset:
    return described(batches).shuffle(BATCHES, seed=3)


def endless(batches: Opened) -> Iterator[Any]:
    while True:
        yield from batches()


NOTICING = {
    "generator": (endless, TwoLayers, {}, {"steps_per_epoch": BATCHES}),
    "tf.data": (described, TwoLayers, {}, {}),
    "tf.data, shuffled": (shuffled, TwoLayers, {}, {}),
    "unknown rank, eagerly": (of_unknown_rank, TwoLayers, {"run_eagerly": True}, {}),
    "unknown rank, not built": (of_unknown_rank, sequential, {"run_eagerly": True}, {}),
    "unknown rank": (of_unknown_rank, KnowsItsShapes, {}, {}),
    "unknown rank, two steps": (of_unknown_rank, KnowsItsShapes, {"steps_per_execution": 2}, {}),
    "unknown rank, repeated": (lambda b: of_unknown_rank(b).repeat(), KnowsItsShapes, {}, {"steps_per_epoch": 2}),
}


@ran_out
@pytest.mark.parametrize("kind", NOTICING)
def test_other_data_are_opened_as_often(kind):
    make_data, make, compile, fit = NOTICING[kind]

    def record(strategy):
        fitted, seen = compiled(make, strategy, **compile)
        batches = Opened()
        data = make_data(batches)
        # What goes on from epoch to epoch is drawn ahead, nobody knows how far.
        goes_on = "steps_per_epoch" in fit
        for epochs in (2,) if goes_on else (2, 1):
            fitted.fit(data, epochs=epochs, shuffle=False, verbose=0, **fit)
        return seen, 0 if goes_on else batches.opened

    seen, _ = assert_as_in_plain_keras(record)
    assert len(seen) >= BATCHES


@ran_out
def test_evaluate_begins_with_the_batch_that_was_looked_at():
    def record(strategy):
        fitted, seen = compiled(TwoLayers, strategy, run_eagerly=True)
        batches = Opened()
        data = of_unknown_rank(batches)
        fitted.fit(data, validation_data=of_unknown_rank(batches), epochs=2, shuffle=False, verbose=0)
        fitted.evaluate(data, verbose=0)
        return seen, batches.opened

    seen, opened = assert_as_in_plain_keras(record)
    assert (len(seen), opened) == (5 * BATCHES, 5)


@ran_out
def test_a_distributed_dataset_is_opened_as_often():
    batches = [Opened(), Opened()]
    plain, expected = compiled(KnowsItsShapes, None)
    plain.fit(of_unknown_rank(batches[0]), epochs=2, shuffle=False, verbose=0)
    strategy = gpipe()
    ours, seen = compiled(KnowsItsShapes, strategy)
    data = strategy.experimental_distribute_dataset(of_unknown_rank(batches[1]))
    assert isinstance(data, InputDataset)
    ours.fit(data, epochs=2, shuffle=False, verbose=0)
    assert seen == expected == [101, 102, 103, 204, 205, 206]


def test_empty_data_of_unknown_rank_are_refused():
    fitted, _ = compiled(TwoLayers, gpipe(), run_eagerly=True)
    data = of_unknown_rank(Opened()).take(0)
    with pytest.raises(ArgumentError, match=r"at least one batch[\s\S]*Received: an empty dataset"):
        fitted.fit(data, shuffle=False, verbose=0)
