"""Weights that a program touches before they are on their stages' devices: what comes out is plain Keras's."""

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, normal, scope_of
from keras import layers, ops

import tf_gpipe
from tf_gpipe import preparation
from tf_gpipe.errors import ModelError

X, Z, Y = normal(8, 2), normal(8, 2, seed=1), normal(8, 2, seed=2)


def dense(*units: int, name: str | None = None) -> keras.Sequential:
    return keras.Sequential([keras.Input([2]), *(layers.Dense(n, "tanh") for n in units)], name=name)


def gpipe(num_stages: int = 2, num_micro_batches: int = 2) -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)


def both_ways(program: Callable[[Any], tuple[list[keras.Model], Any]]) -> tuple[list[keras.Model], list[keras.Model]]:
    """Runs a program plainly and with a strategy; its models' weights and what else it gives must be equal."""
    found = []
    for strategy in (None, gpipe()):
        keras.utils.set_random_seed(0)
        found.append(program(strategy))
    (plain, wanted), (piped, received) = found
    for a, b in zip(plain, piped, strict=True):
        assert largest_difference(a, b) <= 1e-6, a.name
    for a, b in zip(tf.nest.flatten(wanted), tf.nest.flatten(received), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-6)
    return plain, piped


def devices_of(model: keras.Model) -> set[str]:
    return {v.value.device[-5:] for v in model.weights}


def apply(tape: tf.GradientTape, loss: Any, model: keras.Model, optimizer: keras.Optimizer) -> None:
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Gan(keras.Model):
    """Clips its critic before it calls it."""

    def __init__(self, place: Callable[[keras.Model], Any] = lambda critic: critic) -> None:
        super().__init__()
        self.gen = dense(4, 2, name="gen")
        self.held = place(dense(4, 1, name="critic"))

    @property
    def critic(self) -> keras.Model:
        return next(part for part in _parts(self.held) if isinstance(part, keras.Model) and part.name == "critic")

    def call(self, z: Any) -> Any:
        return self.gen(z)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, z = data
        critic = self.critic
        for w in critic.trainable_variables:
            w.assign(tf.clip_by_value(w.value, -0.1, 0.1))
        with tf.GradientTape() as tape:
            loss = ops.mean(critic(self.gen(z))) - ops.mean(critic(x))
        weights = critic.trainable_variables  # the optimizer does not know them where Keras tracks no holder
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return {"loss": loss}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [part for inner in value for part in _parts(inner)]
    if isinstance(value, Holder):
        return _parts(value.model)
    return [value]


class Holder:
    def __init__(self, model: Any) -> None:
        self.model = model


class WithoutCall(Gan):
    """The same without a `call` of its own."""


WithoutCall.call = keras.Model.call


@pytest.mark.parametrize("kind", [Gan, WithoutCall])
@pytest.mark.parametrize(
    "place",
    [lambda c: c, lambda c: [{"deep": [c]}], lambda c: {"x": (c, 1)}, lambda c: Holder([c]), lambda c: (Holder(c),)],
    ids=["attribute", "list", "dict", "object", "tuple"],
)
def test_weights_clipped_before_the_call(kind: type[Gan], place: Callable[[keras.Model], Any]) -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = kind(place)
            model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(X, Z, batch_size=4, epochs=3, shuffle=False, verbose=0).history
        return [model.gen, model.critic], history["loss"]

    plain, piped = both_ways(program)
    assert max(float(np.abs(w).max()) for w in plain[1].get_weights()) <= 0.2, "the clip counts"
    assert devices_of(piped[1]) == {"CPU:0", "CPU:1"}


class Penalised(keras.Model):
    """Takes a penalty on weights before the call; `penalty` says which."""

    def __init__(self, penalty: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.penalty = dense(4, 2), penalty

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = 0.1 * tf.add_n([self.penalty(w) for w in self.inner.trainable_variables])
            loss += ops.mean(ops.square(self.inner(x, training=True) - y))
        apply(tape, loss, self.inner, self.optimizer)
        return {"loss": loss}


@pytest.mark.parametrize(
    "penalty", [lambda w: tf.nn.l2_loss(w.value), lambda w: ops.sum(ops.abs(w)) * (len(w.shape) == 1)]
)
def test_a_penalty_before_the_call(penalty: Callable[[Any], Any]) -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = Penalised(penalty)
            model.compile("sgd")
        return [model.inner], model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"]

    _, (inner,) = both_ways(program)
    assert devices_of(inner) == {"CPU:0", "CPU:1"}


class Net(keras.Model):
    """A subclassed network, whose operations are not known before it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.first, self.last = layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


class Averaged(keras.Model):
    """Moves the weights of a second network, which only `test_step` and `predict` call, as an average."""

    def __init__(self, make: Callable[[str], keras.Model]) -> None:
        super().__init__()
        self.network, self.average = make("network"), make("average")
        for part in (self.network, self.average):
            part(X[:1])
        self.average.set_weights(self.network.get_weights())

    def call(self, x: Any) -> Any:
        return self.average(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.network(x, training=True) - y))
        apply(tape, loss, self.network, self.optimizer)
        for w, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * w)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": ops.mean(ops.square(self.average(x, training=False) - y))}


class AveragedWithoutCall(Averaged):
    """The same without a `call`: not even its shapes tell who calls the average."""


AveragedWithoutCall.call = keras.Model.call


class CallsAtTheEnd(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.average.predict(X, verbose=0))


@pytest.mark.parametrize("make", [lambda name: dense(4, 2, name=name), Net], ids=["functional", "subclassed"])
@pytest.mark.parametrize("who", ["test_step", "callback", "predict"])
@pytest.mark.parametrize("has_call", [True, False])
@pytest.mark.filterwarnings("ignore:Variables of 'average' stay on")
def test_an_average_of_weights_that_training_does_not_call(
    make: Callable[[str], keras.Model], who: str, has_call: bool
) -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = (Averaged if has_call else AveragedWithoutCall)(make)
            model.compile("sgd")
        calls = CallsAtTheEnd()
        more = {"validation_data": (X, Y)} if who == "test_step" else {}
        more |= {"callbacks": [calls]} if who == "callback" else {}
        history = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, **more).history
        last = (model if has_call else model.average).predict(X, verbose=0)
        again = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return [model.network, model.average], [history["loss"], history.get("val_loss", []), calls.seen, last, again]

    _, (network, average) = both_ways(program)
    assert devices_of(network) == {"CPU:0", "CPU:1"}
    one_operation = has_call and make is Net  # in the model's own plan
    assert devices_of(average) == ({"CPU:0"} if one_operation else {"CPU:0", "CPU:1"})


def test_a_function_traced_before_the_first_fit_is_traced_again() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
            model.compile("sgd", "mse")

        @tf.function
        def loop(x: tf.Tensor) -> tf.Tensor:
            for _ in tf.range(3):
                x = model(x)
            return x

        @tf.function
        def total() -> tf.Tensor:
            return tf.add_n([tf.reduce_sum(w.value) for w in model.trainable_variables])

        @tf.function
        def clip() -> None:
            for w in model.trainable_variables:
                w.assign(tf.clip_by_value(w.value, -0.3, 0.3))

        given = [loop(tf.constant(X)), total(), clip()]
        for _ in range(2):
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
            given += [loop(tf.constant(X)), total(), clip(), total()]
        return [model], [part for part in given if part is not None]

    _, (model,) = both_ways(program)
    assert devices_of(model) == {"CPU:0", "CPU:1"}


def test_a_plain_model_that_shares_layers_and_was_used_before() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
            model.compile("sgd", "mse")
        plain = keras.Sequential([keras.Input([2]), *model.layers])
        plain.compile(loss="mse")
        given = [plain.predict(X, verbose=0), plain.evaluate(X, Y, verbose=0)]
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        return [model], [*given, plain.predict(X, verbose=0), plain.evaluate(X, Y, verbose=0)]

    both_ways(program)


def test_a_concrete_function_of_before_says_what_to_do() -> None:
    strategy = gpipe()
    with strategy.scope():
        model = dense(4, 2)
        model.compile("sgd", "mse")
    held = tf.function(lambda: tf.add_n([tf.reduce_sum(w.value) for w in model.weights])).get_concrete_function()
    assert np.isfinite(held())
    model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(
        ModelError, match=r"Expected a function that was traced after .*kernel.*strategy\.place\(model\)"
    ):
        held()


@pytest.mark.filterwarnings("error")
def test_a_subclassed_part_that_a_step_touches_first_stays_and_is_told_of_once() -> None:
    class Step(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net("net")
            self.net(X[:1])

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            for w in self.net.trainable_variables:
                w.assign(tf.clip_by_value(w.value, -0.2, 0.2))
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.net(x, training=True) - y))
            apply(tape, loss, self.net, self.optimizer)
            return {"loss": loss}

    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = Step()
            model.compile(keras.optimizers.SGD(0.3, momentum=0.9))
        fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        if strategy is None:
            history = model.fit(X, Y, **fit).history
        else:
            with pytest.warns(UserWarning, match=r"Variables of 'net' stay on .*CPU:0 .*'net/dense.*/kernel'") as seen:
                history = model.fit(X, Y, **fit).history
            assert len(seen) == 1
            assert devices_of(model.net) == {"CPU:0"}
        again = model.fit(X, Y, **fit).history
        return [model.net], [history["loss"], again["loss"], [v.numpy() for v in model.optimizer.variables]]

    _, (net,) = both_ways(program)
    assert devices_of(net) == {"CPU:0", "CPU:1"}, "the second fit has them in their stages"


def test_a_tape_that_has_read_a_weight_before_the_call() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
        run = strategy.run if strategy else (lambda fn, args: fn(*args))
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.nn.l2_loss(w.value) for w in model.trainable_variables])
            loss = penalty + run(lambda x: ops.mean(ops.square(model(x, training=True))), (tf.constant(X),))
        return [model], tape.gradient(loss, [w.value for w in model.trainable_variables])

    with pytest.warns(UserWarning, match="stay on"):
        both_ways(program)


def test_a_data_pipeline_that_calls_a_model_goes_on() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
            model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensor_slices(X).batch(4).map(lambda x: model(x))
        given = [list(data.as_numpy_iterator())]
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        return [model], [*given, list(data.as_numpy_iterator())]

    with pytest.warns(UserWarning, match="stay on"):
        both_ways(program)
    gc.collect()


@pytest.mark.filterwarnings("ignore:Variables of 'net' stay on")
def test_a_custom_loop_that_clips_before_it_calls(caplog: Any) -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = Net("net")
            model(X[:1])
            optimizer = keras.optimizers.Adam(0.1)

        def step(x: Any, y: Any) -> Any:
            for w in model.trainable_variables:
                w.assign(tf.clip_by_value(w.value, -0.2, 0.2))
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(x, training=True) - y))
            apply(tape, loss, model, optimizer)
            return loss

        @tf.function
        def train(x: Any, y: Any) -> Any:
            return strategy.run(step, (x, y)) if strategy else step(x, y)

        losses = [train(tf.constant(X), tf.constant(Y)) for _ in range(3)]
        if strategy:
            strategy.place(model)
            assert devices_of(model) == {"CPU:0", "CPU:1"}
        losses += [train(tf.constant(X), tf.constant(Y)) for _ in range(3)]
        return [model], losses

    both_ways(program)
    assert "AutoGraph" not in caplog.text


def test_functions_that_the_collector_was_told_to_leave_alone() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
            model.compile("sgd", "mse")
        total = tf.function(lambda: tf.add_n([tf.reduce_sum(w.value) for w in model.trainable_variables]))
        data = tf.data.Dataset.range(2).map(lambda _: tf.reduce_sum(model.weights[0].value))
        given = [total()]
        gc.freeze()
        try:
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
            assert gc.get_freeze_count() > 0
        finally:
            gc.unfreeze()
        return [model], [*given, total(), list(data.as_numpy_iterator())]

    both_ways(program)


@pytest.mark.filterwarnings("ignore:Variables of .* stay on")
def test_a_closed_tape_is_asked_after_the_model_was_placed() -> None:
    def program(strategy: Any) -> Any:
        with scope_of(strategy):
            model = dense(4, 2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant(X)) ** 2)
        if strategy:
            strategy.place(model)
        found = tape.gradient(loss, [w.value for w in model.trainable_variables])
        if strategy:
            strategy.place(model)
            assert devices_of(model) == {"CPU:0", "CPU:1"}
        return [model], found

    both_ways(program)


def test_one_batch_at_a_time_looks_for_models_once_after_each_compile(monkeypatch: Any) -> None:
    looked: list[str] = []
    plain = preparation.models_inside
    monkeypatch.setattr(preparation, "models_inside", lambda model: (looked.append(model.name), plain(model))[1])
    with gpipe().scope():
        model = dense(4, 2)
        model.compile("sgd", "mse")
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert looked == [model.name]
    model.compile("sgd", "mse")
    for _ in range(2):
        model.train_on_batch(X, Y)
    assert looked == [model.name] * 2
    model.fit(X, Y, verbose=0)
    model.fit(X, Y, verbose=0)
    assert looked == [model.name] * 4
