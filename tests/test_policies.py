"""Dtype policies: what is computed in which precision, and a step that overflows, are those of plain Keras.

In sixteen bits a sum of gradients over micro-batches is rounded otherwise than one over the mini-batch. So each model
is trained in several ways: one micro-batch must give plain Keras's weights, the number of stages must not matter, and
several micro-batches must come as near to plain Keras as the precision lets them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import normal, scope_of
from keras import layers, ops

import tf_gpipe

ROWS = 8
X, Y = normal(ROWS, 4), normal(ROWS, 1, seed=1)

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@pytest.fixture(autouse=True)
def unfused() -> Iterator[None]:
    """Keeps TensorFlow from fusing a layer's operations, which leaves out roundings to 16 bits, in some graphs only."""
    tf.config.optimizer.set_experimental_options({"remapping": False})
    yield
    tf.config.optimizer.set_experimental_options({"remapping": True})


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    """The global dtype policy for a test."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def chain(*policies: Any) -> Callable[[], keras.Model]:
    """Makes a model with a layer of each policy and a head of the global one."""

    def make() -> keras.Model:
        middle = [layers.Dense(6, "tanh", dtype=policy, name=f"layer_{i}") for i, policy in enumerate(policies)]
        return keras.Sequential([keras.Input([4]), *middle, layers.Dense(1, name="head")])

    return make


def momentum() -> keras.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def trained(
    make: Callable[[], keras.Model],
    num_stages: int = 0,
    num_micro_batches: int = 1,
    optimizer: Callable[[], keras.Optimizer] = momentum,
    steps: int = 3,
    **strategy: Any,
) -> tuple[keras.Model, list[float]]:
    """A model trained on a batch a few times, plainly where there are no stages, with its losses."""
    with scope_of(tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, **strategy) if num_stages else None):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer(), "mse")
    start = model.get_weights()
    losses = [float(model.train_on_batch(X, Y)) for _ in range(steps)]
    moved = [np.max(np.abs(np.float64(a) - np.float64(b))) for a, b in zip(start, model.get_weights(), strict=True)]
    assert max(moved) > 1e-2
    if num_stages:
        assert len({v.value.device for v in model.weights}) == num_stages
    return model, losses


def values(model: keras.Model) -> list[np.ndarray]:
    """Everything that training changes: weights and the optimizer's variables."""
    return [np.asarray(ops.cast(v.value, "float64")) for v in (*model.weights, *model.optimizer.variables)]


def assert_near(a: tuple[keras.Model, list[float]], b: tuple[keras.Model, list[float]], tolerance: float) -> None:
    assert [v.dtype for v in a[0].weights] == [v.dtype for v in b[0].weights]
    for x, y in zip(values(a[0]), values(b[0]), strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=tolerance)
    np.testing.assert_allclose(b[1], a[1], rtol=max(tolerance, 2e-6))


def check(
    make: Callable[[], keras.Model],
    rounding: float = 0.0,
    num_stages: int = 3,
    optimizer: Callable[[], keras.Optimizer] = momentum,
) -> tuple[keras.Model, keras.Model]:
    """Trains plainly, in stages with one micro-batch, with two, and with two in one stage.

    Args:
        make: makes the model.
        rounding: unit of the last place of the coarsest dtype; nothing where two micro-batches are exact too.
        num_stages: K.
        optimizer: makes the optimizer.

    Returns:
        The model trained plainly, and the one in stages with two micro-batches.
    """
    plain = trained(make, optimizer=optimizer)
    assert_near(plain, trained(make, num_stages, 1, optimizer), 1e-6)
    staged, together = (trained(make, k, 2, optimizer) for k in (num_stages, 1))
    assert_near(together, staged, 1e-6)
    assert_near(plain, staged, max(1e-6, rounding))
    return plain[0], staged[0]


# --- policies ---


@pytest.mark.parametrize("where", ["global", "layers"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64", "mixed_float16", "mixed_bfloat16"])
def test_a_policy(name, where, request):
    before = keras.config.dtype_policy()
    request.addfinalizer(lambda: keras.config.set_dtype_policy(before))
    if where == "global":
        keras.config.set_dtype_policy(name)
    kind = name.removeprefix("mixed_")
    plain, ours = check(chain(*[None if where == "global" else name] * 2), EPSILON[kind])
    for layer in ours.layers[:2]:
        assert {w.dtype for w in layer.weights} == {"float32" if "mixed" in name else kind}
        assert layer.compute_dtype == kind
    predicted = [m.predict_on_batch(X) for m in (plain, ours)]
    assert predicted[0].dtype == predicted[1].dtype == (kind if where == "global" else "float32")
    np.testing.assert_allclose(
        *(np.asarray(p, "float64") for p in predicted), rtol=0, atol=max(1e-6, 4 * EPSILON[kind])
    )
    scaled = isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert (
        scaled
        == isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)
        == (where == "global" and name == "mixed_float16")
    )
    if scaled:
        assert float(ours.optimizer.dynamic_scale) == 2.0**15


def scaling() -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=256.0, dynamic_growth_steps=2)


@pytest.mark.parametrize("optimizer", [momentum, scaling], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    "policies", [("float32", "mixed_float16", "float64"), ("bfloat16", "float32", "float16")], ids="-".join
)
def test_a_policy_for_each_layer(policies, optimizer):
    rounding = max(EPSILON[policy.removeprefix("mixed_")] for policy in policies)
    plain, ours = check(chain(*policies), rounding, 4, optimizer)
    for layer, policy in zip(ours.layers, policies, strict=False):
        assert layer.compute_dtype == policy.removeprefix("mixed_")
        slots = [v for v in ours.optimizer.variables if f"{layer.name}_" in v.path]
        assert [v.value.device for v in slots] == [v.value.device for v in layer.weights]
    if optimizer is scaling:
        assert float(ours.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale) == 512.0


def test_a_map_of_policies():
    def make() -> keras.Model:
        policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
        policies[".*layer_0"] = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
        policies[".*layer_1"] = keras.dtype_policies.DTypePolicy("float64")
        return chain(policies, policies, policies)()

    _, ours = check(make, EPSILON["bfloat16"], 4)
    assert [layer.compute_dtype for layer in ours.layers] == ["bfloat16", "float64", "float32", "float32"]


class Sees(layers.Layer):
    """Notes the dtypes of its input, of a weight that is cast and of one that is not."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: set[tuple[str, ...]] = set()

    def build(self, shape: Any) -> None:
        self.cast = self.add_weight(shape=shape[-1:], initializer="ones", name="cast")
        self.kept = self.add_weight(shape=shape[-1:], initializer="ones", name="kept", autocast=False)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        parts = [x, ops.convert_to_tensor(self.cast), ops.convert_to_tensor(self.kept)]
        self.seen.add(tuple(keras.backend.standardize_dtype(part.dtype) for part in parts))
        x, cast, kept = (ops.cast(part, "float32") for part in parts)
        return x * cast * kept


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
def test_a_layer_that_casts_nothing(policy, autocast):
    def make() -> keras.Model:
        middle = [
            layers.Dense(6, "tanh", dtype="float32"),
            Sees(autocast=autocast, name="sees"),
            layers.Dense(6, "tanh"),
        ]
        model = keras.Sequential([keras.Input([4]), *middle, layers.Dense(1)])
        model.get_layer("sees").seen.clear()  # of what it saw while the model was built
        return model

    plain, ours = check(make, EPSILON["bfloat16"])
    seen = [model.get_layer("sees").seen for model in (plain, ours)]
    assert seen[0] == seen[1]
    assert len(seen[1]) == 1
    assert next(iter(seen[1]))[0] == ("bfloat16" if autocast else "float32")


# --- quantised layers ---


@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
def test_quantised_layers(mode):
    # Rounding to eight bits amplifies what other roundings differ by; in float64 these are too small to matter.
    quantised = keras.dtype_policies.get(f"{mode}_from_float64")
    assert isinstance(quantised, keras.dtype_policies.QuantizedDTypePolicy)
    _, ours = check(chain(quantised, quantised))
    assert [layer.quantization_mode for layer in ours.layers] == [mode, mode, None]
    if mode != "float8":
        assert ours.layers[0]._kernel.dtype == "int8"
        assert len(ours.layers[0].trainable_weights) == 1


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_model_that_is_quantised_after_training_goes_on(mode):
    def run(num_stages: int) -> tuple[keras.Model, list[float]]:
        model, losses = trained(chain(None, None), num_stages, 1)
        model.quantize(mode, filters=lambda layer: layer.name.startswith("layer"))
        with scope_of(model.distribute_strategy if num_stages else None):
            model.compile(momentum(), "mse")
        return model, [*losses, *(float(model.train_on_batch(X, Y)) for _ in range(2))]

    plain, ours = run(0), run(3)
    assert [layer.quantization_mode for layer in ours[0].layers] == [mode, mode, None]
    assert_near(plain, ours, 1e-6)
    assert ours[1][-1] < ours[1][-2]
    np.testing.assert_allclose(ours[0].predict_on_batch(X), plain[0].predict_on_batch(X), rtol=0, atol=1e-6)


# --- loss scaling ---


def overflowing() -> keras.Model:
    """A model whose layer `struck` alone gets an infinite gradient where a number of `spike` is large.

    Its kernel is zero and stays so while `spike` is zero, so that no other layer notices anything.
    """
    x, spike = keras.Input([4], name="x"), keras.Input([6], name="spike")
    y = layers.Dense(6, "tanh", name="before")(x)
    struck = layers.Dense(6, use_bias=False, kernel_initializer="zeros", name="struck")(spike)
    y = layers.Dense(6, "tanh", name="after")(layers.Add(name="add")([y, struck]))
    return keras.Model({"x": x, "spike": spike}, layers.Dense(1, name="head")(y))


def batch(row: int | None) -> dict[str, np.ndarray]:
    """A batch with a spike in one row, or in none."""
    spike = np.zeros([ROWS, 6], "float32")
    if row is not None:
        spike[row, 0] = 3e4
    return {"x": X, "spike": spike}


def adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.01)


def adam_scaled() -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**15)


def overflown(
    strategy: tf_gpipe.GPipeStrategy | None, optimizer: Callable[[], keras.Optimizer], row: int, run_eagerly: bool
) -> Any:
    """The model after a good, a bad and a good step, with everything that it held after each."""
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = overflowing()
        model.compile(optimizer(), "mse", run_eagerly=run_eagerly)
    steps, scales = [], []
    for at in (None, row, None):
        model.train_on_batch(batch(at), Y)
        steps.append([v.numpy() for v in (*model.weights, *model.optimizer.inner_optimizer.variables)])
        scales.append((float(model.optimizer.dynamic_scale), int(model.optimizer.step_counter)))
    return model, steps, scales


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_the_spike_strikes_one_layer_only(policy):
    keras.utils.set_random_seed(0)
    model = overflowing()
    with tf.GradientTape() as tape:
        loss = 2.0**15 * ops.mean(ops.square(Y - ops.cast(model(batch(2), training=True), "float32")))
    gradients = tape.gradient(loss, model.trainable_weights)
    struck = [w.path for w, g in zip(model.trainable_weights, gradients, strict=True) if not np.isfinite(g).all()]
    assert struck == ["struck/kernel"]


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.parametrize(
    ("optimizer", "row", "eagerly", "arguments"),
    [
        (adam, 0, False, {"num_micro_batches": 1}),
        (adam, 0, False, {"num_micro_batches": 3, "remat": "always"}),
        (adam, 7, False, {"num_micro_batches": 3}),
        (adam_scaled, 4, False, {"num_micro_batches": 4, "remat": "never"}),
        (adam, 0, True, {"num_micro_batches": 2}),
    ],
    ids=["whole", "first", "last", "explicit", "eager"],
)
def test_an_overflow_in_one_stage_skips_the_step_in_all(policy, optimizer, row, eagerly, arguments):
    strategy = tf_gpipe.GPipeStrategy(4, partition=["struck", "after", "head"], **arguments)
    plain, ours = (overflown(s, optimizer, row, eagerly) for s in (None, strategy))
    model = ours[0]
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    devices = {v.path: v.value.device[-5:] for v in model.weights if "kernel" in v.path}
    assert devices == {f"{name}/kernel": f"CPU:{k}" for k, name in enumerate(["before", "struck", "after", "head"])}
    first, second, third = ours[1]
    assert len(first) == 7 + 2 + 14, "weights, iterations and learning rate, two slots for each weight"
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)), "nothing moved, not even iterations"
    still = sum(np.array_equal(a, b) for a, b in zip(second, third, strict=True))
    assert still == 1 + 3, "the learning rate, and the struck layer's zeros"
    assert ours[2] == plain[2] == [(2.0**15, 1), (2.0**14, 0), (2.0**14, 1)]
    assert int(model.optimizer.iterations) == int(plain[0].optimizer.iterations) == 2
    tolerance = 1e-6 if strategy.num_micro_batches == 1 else 4 * EPSILON["float16"]
    for a, b in zip(plain[1][2], third, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_loss_scale_grows_and_shrinks_as_in_plain_keras(num_micro_batches):
    def run(strategy: tf_gpipe.GPipeStrategy | None) -> tuple[keras.Model, list[tuple[float, int]]]:
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = chain("mixed_float16", "mixed_float16")()
            optimizer = scaling()
            model.compile(optimizer, "mse")
        seen = []
        for target in [Y] * 5 + [Y * 1e6] + [Y] * 3:
            model.train_on_batch(X, target)
            seen.append((float(optimizer.dynamic_scale), int(optimizer.iterations)))
        return model, seen

    plain, ours = run(None), run(tf_gpipe.GPipeStrategy(3, num_micro_batches))
    assert ours[1] == plain[1]
    scales = [scale for scale, _ in ours[1]]
    steps = [b / a for a, b in zip(scales, scales[1:], strict=False)]
    assert {0.5, 1.0, 2.0} == set(steps)
    assert len({v.value.device for v in ours[0].weights}) == 3
    for a, b in zip(plain[0].get_weights(), ours[0].get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 if num_micro_batches == 1 else 4 * EPSILON["float16"])
