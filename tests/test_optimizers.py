"""Every optimizer of Keras, with every option, and every loss: weights and state are those of plain training.

Weights are given gradients of a fair size and the layers have no bias, so that an optimizer that divides a gradient by
its own size does not divide rounding by rounding.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, assert_same_optimizer, largest_difference, normal, scope_of
from keras import layers, optimizers

import tf_gpipe

ROWS = 9
X = normal(ROWS, 4)
WORDS = np.random.default_rng(2).integers(0, 20, (ROWS, 3))
TARGET = normal(ROWS, 3, seed=1)

OPTIMIZERS = {
    name: made
    for name, made in vars(optimizers).items()
    if inspect.isclass(made)
    and issubclass(made, optimizers.Optimizer)
    and made not in (optimizers.Optimizer, optimizers.LossScaleOptimizer)
    and name not in ("LossScaleOptimizer", "MultiOptimizer")
}
"""By name; `LossScaleOptimizer` and `MultiOptimizer`, which hold others, have tests of their own."""


def chain() -> keras.Model:
    middle = [layers.Dense(6, "tanh", use_bias=False, name=name) for name in ("one", "two")]
    return keras.Sequential([keras.Input([4]), *middle, layers.Dense(3, use_bias=False, name="head")])


def with_embedding() -> keras.Model:
    """The gradient of an embedding is slices; not every row gets one, and some get several."""
    table = layers.Embedding(20, 4, embeddings_initializer="normal", name="table")
    hidden, head = layers.Dense(6, "tanh", use_bias=False, name="hidden"), layers.Dense(3, use_bias=False, name="head")
    return keras.Sequential([keras.Input([3], dtype="int32"), table, layers.Flatten(), hidden, head])


def trained(
    optimizer: Callable[[], keras.Optimizer],
    strategy: tf_gpipe.GPipeStrategy | None,
    make: Callable[[], keras.Model] = chain,
    loss: Any = "mse",
    data: tuple[Any, Any] = (X, TARGET),
    steps: int = 3,
    **compile: Any,
) -> tuple[keras.Model, dict[str, list[float]]]:
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer(), loss, **compile)
        # In a traced step (as plain Keras builds it) ScheduleFreeAdamW would lose the values that its slots begin with.
        model.optimizer.build(model.trainable_variables)
    start = [value.copy() for value in model.get_weights()]
    losses = [float(np.ravel(model.train_on_batch(*data))[0]) for _ in range(steps)]
    assert max(np.max(np.abs(a - b)) for a, b in zip(start, model.get_weights(), strict=True)) > 1e-4
    if strategy is not None:
        assert len({v.value.device for v in model.weights}) == strategy.num_stages
    return model, {"loss": losses}


def check(
    optimizer: Callable[[], keras.Optimizer],
    make: Callable[[], keras.Model] = chain,
    tolerance: float = 1e-6,
    **arguments: Any,
) -> tuple[keras.Model, keras.Model]:
    """Trains plainly and in three stages; weights, losses and every variable of the optimizer are equal."""
    strategy = tf_gpipe.GPipeStrategy(3, 2)
    plain, ours = (trained(optimizer, s, make, **arguments) for s in (None, strategy))
    assert_same(plain, ours, tolerance)
    assert_same_optimizer(plain[0], ours[0], tolerance)
    return plain[0], ours[0]


def assert_slots_are_beside_weights(model: keras.Model) -> None:
    """Each slot of the shape of a weight, named after it, is on its device."""
    found = 0
    for weight in model.trainable_variables:
        name = weight.path.replace("/", "_")
        for slot in model.optimizer.variables:
            if name in slot.path and slot.shape == weight.shape:
                assert slot.value.device == weight.value.device, slot.path
                found += 1
    assert found >= len(model.trainable_variables)


# --- optimizers ---


def test_all_optimizers_are_here():
    assert {"Adam", "AdamW", "Adamax", "Nadam", "SGD", "RMSprop", "Adagrad", "Adadelta"} <= set(OPTIMIZERS)
    assert {"Adafactor", "Ftrl", "Lion", "Lamb", "Muon"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name):
    _, ours = check(lambda: OPTIMIZERS[name](learning_rate=0.02), with_embedding, data=(WORDS, TARGET))
    assert int(ours.optimizer.iterations) == 3
    if name not in ("SGD", "Adafactor"):  # without momentum there are no slots; these are of other shapes
        assert_slots_are_beside_weights(ours)


VARIANTS: dict[str, Callable[[], keras.Optimizer]] = {
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda: optimizers.Adam(0.02, amsgrad=True),
    "centered": lambda: optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "excluded from decay": lambda: without_decay(optimizers.AdamW(0.02, weight_decay=0.3)),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.05, 0.01])),
    "muon and adam": lambda: optimizers.Muon(0.02, exclude_layers=["two"]),
}


def without_decay(optimizer: keras.Optimizer) -> keras.Optimizer:
    optimizer.exclude_from_weight_decay(var_names=["two"])
    return optimizer


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_an_optimizer(variant):
    _, ours = check(VARIANTS[variant])
    assert_slots_are_beside_weights(ours)


OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05, "weight_decay": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.05, "loss_scale_factor": 8.0},
    "clipvalue": {"clipvalue": 0.01, "gradient_accumulation_steps": 2},
    "all": {
        "global_clipnorm": 0.5,
        "weight_decay": 0.1,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
        "gradient_accumulation_steps": 2,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_an_optimizer_together(option):
    def make(**options: Any) -> keras.Optimizer:
        return optimizers.SGD(0.1, momentum=0.9, **options)

    _, ours = check(lambda: make(**OPTIONS[option]), steps=4)
    assert_slots_are_beside_weights(ours)
    for name in OPTIONS[option]:
        if name not in ("loss_scale_factor", "ema_momentum", "ema_overwrite_frequency"):
            fewer = {key: value for key, value in OPTIONS[option].items() if key != name}
            without, _ = trained(lambda fewer=fewer: make(**fewer), None, steps=4)
            assert largest_difference(without, ours) > 1e-5, f"{name} does something"


@pytest.mark.skipif(not hasattr(optimizers, "MultiOptimizer"), reason="this version of Keras has no MultiOptimizer")
def test_an_optimizer_for_each_layer():
    def make() -> keras.Optimizer:
        choice = optimizers.OptimizerMap(optimizers.SGD(0.05, momentum=0.9))
        choice[".*two.*"] = optimizers.Adam(0.02)
        choice[".*head.*"] = optimizers.Lion(0.02)
        return optimizers.MultiOptimizer(choice)

    _, ours = check(make)
    assert_slots_are_beside_weights(ours)


def test_an_optimizer_of_the_users_own():
    class Signs(optimizers.Optimizer):
        """Steps by the sign of a running sum of gradients, and counts its steps in a slot."""

        def build(self, variables: list[keras.Variable]) -> None:
            if self.built:
                return
            super().build(variables)
            self.sums = [self.add_variable_from_reference(v, "sum") for v in variables]

        def update_step(self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
            total = self.sums[self._get_variable_index(variable)]
            self.assign_add(total, gradient)
            self.assign_sub(variable, learning_rate * keras.ops.tanh(total))

    _, ours = check(lambda: Signs(learning_rate=0.1))
    assert_slots_are_beside_weights(ours)


# --- losses ---

LOSSES = {
    name: made
    for name, made in vars(keras.losses).items()
    if inspect.isclass(made) and issubclass(made, keras.losses.Loss) and made is not keras.losses.Loss
}
LABELS = np.arange(ROWS) % 3
ONE_HOT = np.eye(3, dtype="float32")[LABELS]


def classifier(last: str = "softmax") -> keras.Model:
    made = chain()
    made.add(layers.UnitNormalization() if last == "unit" else layers.Activation(last))
    return made


def test_all_losses_are_here():
    assert len(LOSSES) >= 22
    assert {"CTC", "Circle", "Dice", "Tversky", "MeanSquaredError", "SparseCategoricalCrossentropy"} <= set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name):
    sequences = np.tile(X[:, None], [1, 5, 1])
    make, data = {
        "SparseCategoricalCrossentropy": (classifier, (X, LABELS)),
        "CategoricalGeneralizedCrossEntropy": (classifier, (X, LABELS)),
        "MeanAbsolutePercentageError": (classifier, (X, 1.0 + ONE_HOT)),  # of a target 0 it is nearly infinite
        "Circle": (lambda: classifier("unit"), (X, LABELS)),  # of all pairs of rows
        "CTC": (per_step, (sequences, np.stack([1 + LABELS, 3 - LABELS], axis=1))),
    }.get(name, (classifier, (X, ONE_HOT)))
    arguments = {"gamma": 4.0} if name == "Circle" else {}  # by default it is an exponential of 80 times a rounding
    check(lambda: optimizers.SGD(0.1), make, loss=LOSSES[name](**arguments), data=data, steps=2)


def per_step() -> keras.Model:
    middle = [layers.Dense(6, "tanh", use_bias=False, name=name) for name in ("one", "two")]
    return keras.Sequential([keras.Input([5, 4]), *middle, layers.Dense(5, use_bias=False, name="head")])


# --- options of `compile` ---


@pytest.mark.parametrize("scaled", [True, False])
def test_the_scale_of_a_loss_is_set_by_hand_or_by_itself(scaled):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        strategy = tf_gpipe.GPipeStrategy(3, 1)
        plain, ours = (
            trained(lambda: optimizers.SGD(0.1, momentum=0.9), s, auto_scale_loss=scaled) for s in (None, strategy)
        )
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(ours[0].optimizer, optimizers.LossScaleOptimizer) is scaled
    assert_same(plain, ours)
    assert_same_optimizer(plain[0], ours[0])
