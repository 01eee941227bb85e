"""Trains a model that is cut before every operation, and compares it with its reference."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from helpers import assert_same, train

import tf_gpipe

ROWS = 7  # three micro-batches get 3, 2 and 2


def floats(*shape: int, seed: int = 0, rows: int = ROWS) -> np.ndarray:
    """Float32 numbers from the standard normal distribution, for so many rows."""
    return np.random.default_rng([seed, *shape]).normal(size=(rows, *shape)).astype("float32")


def tokens(*shape: int, vocabulary: int = 6, seed: int = 0, padded: bool = False, rows: int = ROWS) -> np.ndarray:
    """Whole numbers from 1; with zeros at the end of the rows where `padded`, of which the first row has none."""
    rng = np.random.default_rng([seed, *shape])
    made = rng.integers(1, vocabulary, (rows, *shape))
    if padded:
        lengths = np.concatenate([[shape[0]], rng.integers(1, shape[0] + 1, rows - 1)])
        made[np.arange(shape[0])[None] >= lengths[:, None]] = 0
    return made.astype("int32")


def one_each(make: Callable[[], keras.Model]) -> list[int]:
    """A partition with cuts before every operation; into eight stages where there are more."""
    count = len(tf_gpipe.GPipeStrategy(1, 1).plan(make()).graph.steps)
    stages = min(count, 8)
    return [count // stages + (k < count % stages) for k in range(stages)]


def moved(model: keras.Model, before: Sequence[np.ndarray]) -> list[bool]:
    """Which of the weights to be trained are no longer what they were."""
    pairs = zip(model.weights, before, model.get_weights(), strict=True)
    changed = {weight.path: not np.array_equal(a, b) for weight, a, b in pairs}
    return [changed[weight.path] for weight in model.trainable_weights]


def check(
    make: Callable[[], keras.Model],
    data: tuple[Any, ...],
    num_micro_batches: int = 3,
    *,
    per_micro_batch: bool = False,
    partition: list[int] | None = None,
    **arguments: Any,
) -> tuple[keras.Model, tf_gpipe.plan.Plan]:
    """Trains a model that is cut before every operation; it equals its reference and every weight moved.

    Args:
        make: makes the model.
        data: what `fit` takes.
        num_micro_batches: M.
        per_micro_batch: whether the result depends on M: then one stage with the same M is the reference, and plain
            Keras that of M = 1, which is tried too.
        partition: other cuts than those before every operation.
        arguments: of `helpers.train`.
    """
    arguments = {"batch_size": ROWS, **arguments}
    if per_micro_batch and num_micro_batches > 1:
        check(make, data, 1, per_micro_batch=True, partition=partition, **arguments)
    before: list[np.ndarray] = []

    def noted() -> keras.Model:
        model = make()
        before[:] = model.get_weights()
        return model

    one_stage = tf_gpipe.GPipeStrategy(1, num_micro_batches, remat="always")
    reference = train(noted, data, one_stage if per_micro_batch and num_micro_batches > 1 else None, **arguments)
    still = zip([w.path for w in reference[0].trainable_weights], moved(reference[0], before), strict=True)
    assert [path for path, there in still if not there] == []
    partition = partition or one_each(make)
    strategy = tf_gpipe.GPipeStrategy(len(partition), num_micro_batches, partition=partition)
    piped = train(make, data, strategy, **arguments)
    assert_same(reference, piped)
    plan = strategy.plan(piped[0])
    assert [len(stage.operations) for stage in plan.stages] == partition
    assert len(partition) > 1
    for stage in plan.stages:
        assert {v.value.device for v in stage.variables} <= {s.device for s in plan.stages[: stage.index + 1]}
    x = data[0]
    compare_predictions(reference[0], piped[0], x)
    return piped[0], plan


def compare_predictions(reference: keras.Model, piped: keras.Model, x: Any) -> None:
    """Both predict the same."""
    predicted = [keras.tree.flatten(model.predict(x, batch_size=ROWS, verbose=0)) for model in (reference, piped)]
    for a, b in zip(*predicted, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-6)


def strings(*rows: Any) -> tf.Tensor:
    """A tensor of strings."""
    return tf.constant(rows, tf.string)
