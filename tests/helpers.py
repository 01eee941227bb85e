"""What several test modules share: training the same model plainly and under the strategy, and comparing."""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe


def scope_of(strategy: tf_gpipe.GPipeStrategy | None) -> Any:
    """The strategy's scope, or none for plain Keras."""
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def train(
    make: Callable[[], keras.Model],
    data: tuple[Any, ...],
    strategy: tf_gpipe.GPipeStrategy | None = None,
    *,
    compile: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
    seed: int = 0,
    **fit: Any,
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Makes, compiles and fits a model; returns it with its history. Same seed, same initial weights."""
    with scope_of(strategy):
        keras.utils.set_random_seed(seed)
        model = make()
        arguments = compile() if callable(compile) else compile
        model.compile(**(arguments or {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}))
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    return model, model.fit(*data, **fit).history


def largest_difference(a: keras.Model, b: keras.Model) -> float:
    """Largest absolute difference between the weights of two models, moving statistics included."""
    pairs = list(zip(a.get_weights(), b.get_weights(), strict=True))
    return max(float(np.max(np.abs(x.astype("float64") - y.astype("float64")))) for x, y in pairs if x.size)


def assert_same(a: tuple[keras.Model, dict], b: tuple[keras.Model, dict], tolerance: float = 1e-6) -> None:
    """Weights and history of two trainings are equal."""
    difference = largest_difference(a[0], b[0])
    assert difference <= tolerance, f"weights differ by {difference:.2e}"
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        np.testing.assert_allclose(b[1][name], a[1][name], rtol=2e-6, atol=tolerance, err_msg=name)


def assert_same_optimizer(a: keras.Model, b: keras.Model, tolerance: float = 1e-6) -> None:
    """Every variable of two models' optimizers is equal: iterations, slots, averages, accumulators, loss scale."""
    assert len(a.optimizer.variables) == len(b.optimizer.variables)
    for x, y in zip(a.optimizer.variables, b.optimizer.variables, strict=True):
        np.testing.assert_allclose(y.numpy(), x.numpy(), rtol=2e-6, atol=tolerance, err_msg=x.path)


def third_derivatives(call: Callable[[Any], Any], x: Any, sources: Any) -> Any:
    """Of a sum over a model's outputs: twice by its inputs, then by the sources."""
    with tf.GradientTape() as third:
        third.watch(x)
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                y = tf.reduce_sum(call(x) ** 3)
            one = tf.reduce_sum(first.gradient(y, x) ** 2)
        two = tf.reduce_sum(second.gradient(one, x) ** 2)
    return third.gradient(two, sources)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 numbers from the standard normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def use_floats(name: str) -> None:
    """Makes a dtype Keras's default, for layers too: it forms their policy of the default once, for the first layer."""
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def soaked(*case: Any) -> Any:
    """A case for `parametrize` that takes long: `make soak` runs it."""
    return pytest.param(*case, marks=pytest.mark.soak)


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """All combinations, for `parametrize`; enough of them to hold each pair of values are short, the others `soak`."""
    cases = list(itertools.product(*axes))
    of = {case: {*itertools.combinations(enumerate(case), 2)} for case in cases}
    missing, short = set().union(*of.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(of[case] & missing))
        missing -= of[best]
        short.add(best)
    return [case if case in short else soaked(*case) for case in cases]
