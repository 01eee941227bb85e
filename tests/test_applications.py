"""Models of `keras.applications`, as they come, train in four stages as on one device.

All of them: tests/compare_applications.py.
"""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from compare_applications import BAR, Data, by_fit, by_micro_batches, differences, run
from helpers import assert_same, soaked, train, use_floats
from keras.src.applications import convnext

import tf_gpipe

STAGES, ROWS, CLASSES = 4, 7, 10
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(0, 255, (ROWS, 32, 32, 3))
LABELS = RNG.integers(0, CLASSES, ROWS)
COMMON = {"weights": None, "input_shape": (32, 32, 3), "classes": CLASSES}


def mobile_net() -> keras.Model:
    """Batch normalisation, depthwise convolutions, dropout."""
    return keras.applications.MobileNet(alpha=0.25, **COMMON)


def mobile_net_v3() -> keras.Model:
    """Also squeeze-and-excitation, hard activations made of bare operations, residual connections."""
    return keras.applications.MobileNetV3Small(alpha=0.35, minimalistic=False, **COMMON)


def conv_next() -> keras.Model:
    """Layer normalisation, layers that Keras defines for this model alone, no dependence between rows."""
    return convnext.ConvNeXt([1, 1, 2, 1], [8, 12, 16, 24], **COMMON)


@pytest.fixture(autouse=True)
def float64() -> Any:
    """Through batch normalisation and ReLU, rounding in float32 grows too large to tell it from a fault."""
    use_floats("float64")
    yield
    use_floats("float32")


def trained(make: Any, strategy: tf_gpipe.GPipeStrategy | None) -> tuple[keras.Model, dict[str, list[float]]]:
    """One step of plain gradient descent whose size is 1 in all, so that a tolerance means something."""
    initial: list[np.ndarray] = []

    def made() -> keras.Model:
        model = make()
        initial.extend(model.get_weights())
        return model

    def compiled() -> dict[str, Any]:
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        return {"optimizer": optimizer, "loss": "sparse_categorical_crossentropy"}

    model, history = train(made, (IMAGES, LABELS), strategy, compile=compiled, batch_size=ROWS, epochs=1)
    pairs = zip(model.weights, initial, strict=True)
    assert all(not np.array_equal(v.numpy(), before) for v, before in pairs if v.trainable or "moving" in v.name)
    return model, history


def assert_in_stages(strategy: tf_gpipe.GPipeStrategy, model: keras.Model) -> None:
    """Every stage has operations and weights on its own device."""
    assert model._gpipe_pipelines
    stages = strategy.plan(model).stages
    assert len({stage.device for stage in stages}) == STAGES
    for stage in stages:
        assert stage.operations
        assert {v.value.device for v in stage.variables} == {stage.device}


@pytest.mark.parametrize("make", [mobile_net, soaked(mobile_net_v3), soaked(conv_next)])
def test_an_application_trains_as_in_plain_keras(make: Any) -> None:
    strategy = tf_gpipe.GPipeStrategy(STAGES, 2 if make is conv_next else 1)
    plain, piped = trained(make, None), trained(make, strategy)
    assert_in_stages(strategy, piped[0])
    assert_same(plain, piped, tolerance=1e-10)


def test_an_application_with_batch_norm_trains_as_in_one_stage() -> None:
    strategy = tf_gpipe.GPipeStrategy(STAGES, 2)
    one, four = trained(mobile_net, tf_gpipe.GPipeStrategy(1, 2)), trained(mobile_net, strategy)
    assert_in_stages(strategy, four[0])
    assert_same(one, four, tolerance=1e-10)


@pytest.mark.parametrize(("name", "alpha"), [("MobileNet", 0.25), soaked("MobileNetV2", 0.35)])
def test_a_step_in_float32_is_that_of_plain_micro_batches(name: str, alpha: float) -> None:
    """Without Grappler, which rounds in another way in every graph: see docs/keras_applications.md."""
    use_floats("float32")
    make = functools.partial(getattr(keras.applications, name), alpha=alpha)
    data = Data.of(4, 64, without_dropout=True)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        plain = run(make, data, by_micro_batches(data, 2))
        piped = run(make, data, by_fit(data), tf_gpipe.GPipeStrategy(STAGES, 2))
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert piped.facts["devices"] == STAGES
    assert plain.step > 1e-2
    assert max(differences(plain, piped)) <= BAR


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("activation", "loss"), [("softmax", "sparse_categorical_crossentropy"), ("sigmoid", "binary_crossentropy")]
)
def test_a_head_that_is_certain_and_wrong_trains_as_in_plain_keras(
    activation: str, loss: str, num_micro_batches: int
) -> None:
    """Untrained models are often so: the loss is of the logits, since the probabilities have been rounded to 0 or 1."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(8), keras.layers.Dense(3, activation)])

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.SGD(1e-4), "loss": loss}

    y = LABELS % 3 if activation == "softmax" else np.eye(3)[LABELS % 3]
    data = 100 * RNG.normal(size=(ROWS, 4)), y
    strategy = tf_gpipe.GPipeStrategy(2, num_micro_batches)
    plain, piped = (train(make, data, s, compile=compiled) for s in (None, strategy))
    assert len(strategy.plan(piped[0]).stages) == 2
    assert plain[1]["loss"][0] > -np.log(keras.config.epsilon())  # more than clipped probabilities could give
    assert_same(plain, piped, tolerance=1e-10)
