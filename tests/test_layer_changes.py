"""Layers that change between trainings, or change their own weights: LoRA, int8, freezing, spectral norm, sharing."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, scope_of, train, use_floats
from layer_checks import ROWS, check, compare_predictions, floats, moved, one_each, tokens

import tf_gpipe

L = keras.layers
Change = Callable[[keras.Model], None]


def recompile(model: keras.Model) -> None:
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")


def through(
    make: Callable[[], keras.Model], data: tuple[Any, Any], changes: Sequence[Change], strategy: Any
) -> tuple[list[list[np.ndarray]], list[list[float]], keras.Model]:
    """Makes a model, and for each change makes it and fits: the weights and losses after each."""
    weights, losses = [], []
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = make()
    for change in changes:
        with scope_of(strategy):
            change(model)
        weights.append(model.get_weights())
        losses.append(model.fit(*data, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history["loss"])
        losses[-1].append(model.evaluate(*data, batch_size=ROWS, verbose=0))
        if strategy:
            # Wherever a change put its new weights: after training each is with its stage.
            for stage in strategy.plan(model).stages:
                assert {v.value.device for v in stage.variables} <= {s.device for s in strategy.plan(model).stages}
            devices = {v.value.device for v in model.variables if "seed" not in v.path}
            assert len(devices) > 1 or strategy.num_stages == 1
        weights.append(model.get_weights())
    return weights, losses, model


def check_through(
    make: Callable[[], keras.Model],
    data: tuple[Any, Any],
    changes: Sequence[Change],
    num_micro_batches: int = 3,
    *,
    reference: tf_gpipe.GPipeStrategy | None = None,
) -> tuple[keras.Model, keras.Model]:
    """After each change the model trains as its reference does, cut before every operation."""
    partition = one_each(make)
    strategy = tf_gpipe.GPipeStrategy(len(partition), num_micro_batches, partition=partition)
    expected = through(make, data, changes, reference)
    received = through(make, data, changes, strategy)
    for at, (a, b) in enumerate(zip(expected[0], received[0], strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            np.testing.assert_allclose(
                y.astype("float64"), x.astype("float64"), rtol=1e-6, atol=1e-6, err_msg=f"change {at // 2}, weight {i}"
            )
    for before, after in zip(expected[0][::2], expected[0][1::2], strict=True):
        assert any(not np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    np.testing.assert_allclose(received[1], expected[1], rtol=2e-6)
    compare_predictions(expected[2], received[2], data[0])
    return expected[2], received[2]


# --- LoRA ------------------------------------------------------------------------------------------------------------


def language_model() -> keras.Model:
    x = keras.Input([5], dtype="int32")
    y = L.Embedding(6, 4, name="table")(x)
    y = L.Dense(4, "tanh", name="dense")(y)
    y = L.EinsumDense("abc,cd->abd", [5, 4], bias_axes="d", activation="tanh", name="einsum")(y)
    y = L.LayerNormalization(name="norm")(y)
    return keras.Model(x, L.Conv1D(2, 2, name="convolution")(y))


LORA_LAYERS = ("table", "dense", "einsum", "convolution")


def with_lora(*names: str) -> Change:
    def change(model: keras.Model) -> None:
        for name in names:
            model.get_layer(name).enable_lora(2, a_initializer="glorot_uniform")

    return change


def then_recompiled(change: Change) -> Change:
    def both(model: keras.Model) -> None:
        change(model)
        recompile(model)

    return both


TEXT = tokens(5), floats(4, 2)


def test_lora_before_the_first_fit() -> None:
    before: list[np.ndarray] = []

    def make() -> keras.Model:
        model = language_model()
        with_lora(*LORA_LAYERS)(model)
        before[:] = model.get_weights()
        return model

    use_floats("float64")  # the norm of four numbers enlarges rounding: 1.2e-6 in float32 on some processors
    try:
        model, _ = check(make, TEXT)
    finally:
        use_floats("float32")
    for name in LORA_LAYERS:
        layer = model.get_layer(name)
        assert [v.name for v in layer.trainable_variables][-2:] == [v.name for v in layer.variables if "lora" in v.name]
        assert largest_difference_of(before, model, "lora") > 0


def largest_difference_of(before: Sequence[np.ndarray], model: keras.Model, part: str) -> float:
    pairs = zip(model.weights, before, strict=True)
    return max(float(np.max(np.abs(w.numpy() - old))) for w, old in pairs if part in w.name)


def test_lora_after_a_fit_and_compiled_again() -> None:
    changes = [recompile, then_recompiled(with_lora("dense", "table")), then_recompiled(with_lora("einsum"))]
    plain, piped = check_through(language_model, TEXT, changes)
    frozen = [w.path for w in plain.non_trainable_weights]
    assert len(frozen) == 3
    assert [w.path.split("/")[-1] for w in piped.non_trainable_weights] == [path.split("/")[-1] for path in frozen]


def test_lora_after_a_fit_without_compiling_again_trains_on_as_plain_keras_does() -> None:
    def outcome(strategy: tf_gpipe.GPipeStrategy | None) -> Any:
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = language_model()
            recompile(model)
        model.fit(*TEXT, verbose=0)
        with scope_of(strategy):
            with_lora("dense")(model)
        losses = model.fit(*TEXT, verbose=0).history["loss"]
        return losses, model.get_weights()

    expected, received = outcome(None), outcome(tf_gpipe.GPipeStrategy(3, 3))
    np.testing.assert_allclose(received[0], expected[0], rtol=2e-6)
    for a, b in zip(expected[1], received[1], strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)


def test_a_saved_model_with_lora_is_that_of_plain_keras(tmp_path: Path) -> None:
    models = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        models.append(through(language_model, TEXT, [recompile, then_recompiled(with_lora("dense"))], strategy)[2])
        models[-1].save(tmp_path / f"{len(models)}.keras")
    loaded = [keras.models.load_model(tmp_path / f"{i}.keras") for i in (1, 2)]
    assert largest_difference(*loaded) <= 1e-6
    np.testing.assert_allclose(loaded[1].predict(TEXT[0], verbose=0), models[1].predict(TEXT[0], verbose=0), atol=1e-5)


# Keras warns of each layer that has nothing to quantise.
without_quantize = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")

# --- int8 ------------------------------------------------------------------------------------------------------------


def quantised(*lora: str) -> Change:
    def change(model: keras.Model) -> None:
        model.quantize("int8")
        with_lora(*lora)(model)
        recompile(model)

    return change


def small_model() -> keras.Model:
    x = keras.Input([6])
    y = L.LayerNormalization()(L.Dense(6, "tanh", name="dense")(x))
    y = L.Dense(5, "tanh", name="second")(y)
    return keras.Model(x, L.Dense(2, name="head")(y))


NUMBERS = floats(6), floats(2)


@without_quantize
@pytest.mark.parametrize("lora", [(), ("dense", "second")])
def test_int8_after_a_fit_then_what_is_left_is_trained(lora: tuple[str, ...]) -> None:
    plain, piped = check_through(small_model, NUMBERS, [recompile, quantised(*lora)])
    assert piped.get_layer("dense").quantization_mode == "int8"
    names = [w.name for w in piped.trainable_weights]
    assert [w.name for w in plain.trainable_weights] == names
    assert names.count("lora_kernel_a") == len(lora)
    assert "kernel" not in names


@without_quantize
def test_an_int8_model_is_evaluated_and_predicts_in_stages() -> None:
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(4, 3, partition=[1, 1, 1, 1])):
        model = through(small_model, NUMBERS, [recompile], strategy)[2]
        with scope_of(strategy):
            model.quantize("int8")
            recompile(model)
        found.append((model.evaluate(*NUMBERS, verbose=0), model.predict(NUMBERS[0], verbose=0), model))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-6)
    assert str(found[1][2].get_layer("dense")._kernel.dtype) == "int8"


@without_quantize
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_model_quantised_before_it_is_trained(mode: str) -> None:
    def make() -> keras.Model:
        model = language_model() if mode == "int8" else small_model()
        model.quantize(mode)
        return model

    check(make, TEXT if mode == "int8" else NUMBERS)


# --- frozen, thawed, changed -----------------------------------------------------------------------------------------


def normalised() -> keras.Model:
    x = keras.Input([6])
    y = L.BatchNormalization(momentum=0.7, name="norm")(L.Dense(5, name="stem")(x))
    return keras.Model(x, L.Dense(2, name="head")(L.Activation("tanh")(y)))


def trainable(name: str, value: bool) -> Change:
    def change(model: keras.Model) -> None:
        model.get_layer(name).trainable = value
        recompile(model)

    return change


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["norm", "stem"])
def test_a_layer_is_frozen_and_thawed(name: str, num_micro_batches: int) -> None:
    changes = [recompile, trainable(name, False), trainable(name, True)]
    reference = tf_gpipe.GPipeStrategy(1, num_micro_batches) if num_micro_batches > 1 else None
    check_through(normalised, NUMBERS, changes, num_micro_batches, reference=reference)


def test_batch_norm_of_one_row_is_that_of_plain_keras() -> None:
    data = floats(6)[:1], floats(2)[:1]
    strategy = tf_gpipe.GPipeStrategy(4, 3, partition=[1, 1, 1, 1])
    plain, piped = (train(normalised, data, s) for s in (None, strategy))
    assert_same(plain, piped)
    assert np.any(piped[0].get_layer("norm").moving_mean.numpy() != 0)


def changed(model: keras.Model) -> None:
    model.get_layer("drop").rate = 0.0
    model.get_layer("dense").activation = keras.activations.sigmoid
    model.get_layer("head").kernel.regularizer = keras.regularizers.L2(0.1)
    recompile(model)


def test_attributes_of_layers_are_changed_and_the_model_compiled_again() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        y = L.Dropout(0.5, name="drop")(L.Dense(5, "tanh", name="dense")(x))
        return keras.Model(x, L.Dense(2, name="head")(y))

    check_through(make, NUMBERS, [recompile, changed], 1)


# --- spectral norm ---------------------------------------------------------------------------------------------------


def spectral() -> keras.Model:
    x = keras.Input([4, 4, 2])
    y = L.SpectralNormalization(L.Conv2D(3, 2, activation="tanh"), power_iterations=2)(x)
    y = L.SpectralNormalization(L.Dense(4, "tanh"))(L.Flatten()(y))
    return keras.Model(x, L.Dense(2)(y))


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_spectral_norm_normalises_once_for_each_mini_batch(num_micro_batches: int, remat: str) -> None:
    data = floats(4, 4, 2, rows=12), floats(2, rows=12)
    strategy = tf_gpipe.GPipeStrategy(4, num_micro_batches, partition=[1, 1, 1, 1], remat=remat)
    plain, piped = (train(spectral, data, s, batch_size=5) for s in (None, strategy))
    assert_same(plain, piped)
    before = piped[0].get_weights()
    compare_predictions(plain[0], piped[0], data[0])
    assert all(np.array_equal(a, b) for a, b in zip(before, piped[0].get_weights(), strict=True))
    largest = np.linalg.svd(piped[0].layers[3].layer.kernel.numpy(), compute_uv=False)[0]
    assert largest == pytest.approx(1.0, abs=0.3)


def test_spectral_norm_of_a_layer_that_is_called_twice_is_refused() -> None:
    with tf_gpipe.GPipeStrategy(3, 3).scope():
        x = keras.Input([6])
        shared = L.SpectralNormalization(L.Dense(6, "tanh"), name="shared")
        model = keras.Model(x, L.Dense(2)(shared(L.Dense(6)(shared(x)))))
        recompile(model)
    with pytest.raises(tf_gpipe.GPipeError, match="SpectralNormalization to be called once.*'shared'"):
        model.fit(*NUMBERS, verbose=0)


def test_spectral_norm_frozen_and_thawed() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        y = L.SpectralNormalization(L.Dense(6, "tanh"), name="spectral")(x)
        return keras.Model(x, L.Dense(2)(y))

    check_through(make, NUMBERS, [recompile, trainable("spectral", False), trainable("spectral", True)])


# --- shared layers and their losses ----------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_layer_changes")
class Penalised(L.Layer):
    """A layer with a regularised and constrained weight that adds a loss in each call."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(
            shape=(shape[-1], shape[-1]),
            regularizer=keras.regularizers.L1L2(0.01, 0.02),
            constraint=keras.constraints.UnitNorm(),
            name="kernel",
        )

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = keras.ops.tanh(keras.ops.matmul(x, self.kernel))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(y)))
        if training:
            self.add_loss(0.05 * keras.ops.mean(keras.ops.square(x)))
        return y


def test_a_shared_layer_with_losses_a_regulariser_and_a_constraint() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        shared = Penalised(name="shared")
        y = shared(L.Dense(6, kernel_constraint="max_norm", kernel_regularizer="l2")(shared(x)))
        y = L.ActivityRegularization(l1=0.01, l2=0.02)(y)
        return keras.Model(x, L.Dense(2, activity_regularizer="l2")(shared(y)))

    model, plan = check(make, NUMBERS)
    assert sum(name.startswith("shared") for stage in plan.stages for name in stage.operations) == 3
    np.testing.assert_allclose(np.linalg.norm(model.get_layer("shared").kernel.numpy(), axis=0), 1.0, rtol=1e-5)


# --- no gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("stop", ["cast", "stop_gradient", "layer"])
def test_weights_in_front_of_a_layer_without_gradient_stay_as_they_are(stop: str) -> None:
    stops = {
        "cast": lambda x: keras.ops.cast(keras.ops.cast(x > 0.0, "int32"), "float32"),
        "stop_gradient": keras.ops.stop_gradient,
        "layer": L.Discretization([-0.5, 0.5]),
    }

    def make() -> keras.Model:
        x = keras.Input([6])
        y = L.Lambda(stops[stop], output_shape=(5,)) if stop != "layer" else L.Discretization([-0.5, 0.5])
        return keras.Model(x, L.Dense(2, name="head")(y(L.Dense(5, name="stem")(L.Dense(6, name="first")(x)))))

    def compile() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.5), "loss": "mse"}

    keras.utils.set_random_seed(0)
    before = make().get_weights()
    strategy = tf_gpipe.GPipeStrategy(4, 3, partition=[1, 1, 1, 1])
    plain, piped = (train(make, NUMBERS, s, compile=compile, batch_size=ROWS) for s in (None, strategy))
    assert_same(plain, piped)
    assert moved(piped[0], before) == [False] * 4 + [True] * 2


# --- choices made while a layer is traced ----------------------------------------------------------------------------


class Choice(L.Layer):
    """Multiplies by a number that Python draws when the layer is traced, as `AugMix` chooses its operations."""

    def call(self, x: Any) -> Any:
        return x * random.uniform(1.0, 2.0)


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_recomputation_makes_the_choices_that_python_made_in_the_forward_pass(num_stages: int, remat: str) -> None:
    strategy = tf_gpipe.GPipeStrategy(num_stages, 2, remat=remat)
    with strategy.scope():
        random.seed(0)
        model = keras.Sequential([keras.Input([3]), Choice(), Choice(), Choice()])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        return y, tape.gradient(y, x)

    y, gradient = tf.function(lambda x: strategy.run(step, (x,)))(tf.ones([4, 3]))
    assert np.all(y.numpy() > 1.0)
    np.testing.assert_allclose(gradient.numpy(), y.numpy(), rtol=1e-6)
