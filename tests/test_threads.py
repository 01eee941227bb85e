"""Threads that train or call models at the same time, and libraries that patch Keras meanwhile: docs/threads.md."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, normal, scope_of

import tf_gpipe
from tf_gpipe import compat, threads

LONG = 120.0
"""Seconds for what must happen; a test that waits as long has failed."""


def start(work: Callable[[], Any]) -> Callable[[], Any]:
    """Runs a function in a thread of its own; returns what waits for its result, or raises its error."""
    made: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(LONG)
        assert not thread.is_alive(), "the thread does not end"
        if errors:
            raise errors[0]
        return made[0]

    return result


def wait(event: threading.Event) -> None:
    assert event.wait(LONG), "the other thread does not come so far"


def attributes(*models: keras.Model) -> dict[tuple[int, str], Any]:
    """Every attribute of every layer and variable, and the class's own; methods and flags with their identity."""
    owners = [layer for model in models for layer in compat.flatten_layers(model)]
    owners += [variable for model in models for variable in model.variables]
    found = {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}
    found[0, "__call__"] = vars(keras.Model).get("__call__")
    return {key: value if callable(value) or isinstance(value, bool) else None for key, value in found.items()}


def assert_nothing_is_left(before: dict[tuple[int, str], Any], *models: keras.Model) -> None:
    """Attributes are what they were, but for the pipelines that a model keeps."""
    after = attributes(*models)
    assert {name for _, name in after.keys() ^ before.keys() if not name.startswith("_gpipe")} == set()
    assert {name for (owner, name), value in before.items() if after[owner, name] is not value} == set()


# --- an attribute that is another in one thread ---


class Greeter:
    def greet(self, name: str) -> str:
        return f"hello {name}"


@contextlib.contextmanager
def held_in_a_thread(target: Any, name: str, value: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """An attribute is replaced in another thread while this is open; gives what reads it there."""
    there, leave, ask, answered = (threading.Event() for _ in range(4))
    answers: list[Any] = []

    def work() -> None:
        with threads.replaced(target, name, value):
            there.set()
            wait(ask)
            answers.append(getattr(target, name)("you"))
            answered.set()
            wait(leave)

    result = start(work)

    def answer() -> Any:
        ask.set()
        wait(answered)
        return answers[0]

    wait(there)
    try:
        yield answer
    finally:
        ask.set()
        leave.set()
        result()


@pytest.mark.parametrize("first", ["this thread", "the other thread"])
def test_threads_leave_in_any_order(first):
    greeter = Greeter()
    with contextlib.ExitStack() as this, contextlib.ExitStack() as other:
        answer = other.enter_context(held_in_a_thread(greeter, "greet", lambda name: f"other {name}"))
        assert greeter.greet("you") == "hello you"
        this.enter_context(threads.replaced(greeter, "greet", lambda name: f"this {name}"))
        assert (greeter.greet("you"), answer()) == ("this you", "other you")
        (this if first == "this thread" else other).close()
        assert greeter.greet("you") == ("hello you" if first == "this thread" else "this you")
    assert vars(greeter) == {}


def test_what_an_instance_had_itself_comes_back():
    greeter = Greeter()
    own = greeter.greet = lambda name: f"own {name}"
    with (
        held_in_a_thread(greeter, "greet", lambda name: f"other {name}") as answer,
        threads.replaced(greeter, "greet", lambda name: f"outer {name}"),
    ):
        with threads.replaced(greeter, "greet", lambda name: f"inner {name}"):
            assert greeter.greet("you") == "inner you"
        assert (greeter.greet("you"), answer()) == ("outer you", "other you")
    assert greeter.greet is own


def test_what_someone_else_puts_there_stays_and_works():
    greeter = Greeter()
    with held_in_a_thread(greeter, "greet", lambda name: f"other {name}"):
        ours = greeter.greet
        foreign = greeter.greet = lambda name: ours(name).upper()
        with threads.replaced(greeter, "greet", lambda name: f"this {name}"):
            assert greeter.greet("you") == "this you"
        assert greeter.greet is foreign
    assert greeter.greet is foreign
    assert greeter.greet("you") == "HELLO YOU"
    with threads.replaced(greeter, "greet", lambda name: f"this {name}"):
        assert greeter.greet("you") == "this you"
    assert greeter.greet is foreign


def test_what_a_thread_sees():
    greeter = Greeter()
    with held_in_a_thread(greeter, "greet", lambda name: f"other {name}"):
        assert threads.attribute(greeter, "greet") == greeter.__class__.greet.__get__(greeter)
        assert not threads.is_own(greeter, "greet")
        mine = lambda name: f"this {name}"  # noqa: E731
        with threads.replaced(greeter, "greet", mine):
            assert threads.attribute(greeter, "greet") is mine
            assert threads.is_own(greeter, "greet")
    assert threads.attribute(greeter, "greet")("you") == "hello you"
    assert not threads.is_own(greeter, "greet")


def test_many_threads_come_and_go():
    greeter, barrier = Greeter(), threading.Barrier(4)

    def work(own: int) -> int:
        barrier.wait(LONG)
        right = 0
        for _ in range(300):
            with threads.replaced(greeter, "greet", lambda name: own):
                right += greeter.greet("you") == own
            right += greeter.greet("you") == "hello you"
        return right

    results = [start(lambda own=own: work(own)) for own in range(4)]
    assert [result() for result in results] == [600] * 4
    assert vars(greeter) == {}


def test_only_what_is_called_can_be_replaced():
    with pytest.raises(TypeError, match="only what is called"), threads.replaced(Greeter(), "greet", 5):
        pass


# --- training and calling ---

X, Y = normal(8, 4, 4, 3), normal(8, 2, seed=1)


def make_model(seed: int = 1, rate: float = 0.5) -> keras.Model:
    keras.utils.set_random_seed(seed)
    x = keras.Input([4, 4, 3])
    y = keras.layers.Conv2D(4, 1, kernel_regularizer="l2", name="pointwise")(x)
    y = keras.layers.BatchNormalization(name="norm")(y)
    y = keras.layers.Dropout(rate, name="dropout")(y)
    y = keras.layers.Conv2D(4, 3, kernel_regularizer="l1", activation="relu", name="conv")(y)
    y = keras.layers.Flatten()(y)
    return keras.Model(x, keras.layers.Dense(2, kernel_regularizer="l2", name="last")(y))


def made(strategy: tf_gpipe.GPipeStrategy, **settings: Any) -> keras.Model:
    """A model that was made under a strategy, and whose variables are all there."""
    with strategy.scope():
        model = make_model(**settings)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    model(X)  # plainly: Keras notes that its layers have been called
    strategy.place(model)
    return model


def make_step(
    strategy: tf_gpipe.GPipeStrategy, model: keras.Model, called: Callable[[], None] = lambda: None
) -> Callable[[], float]:
    """A training step in a graph of its own; while it is traced, `called` runs when the model has been called."""

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            called()
            loss += tf.add_n(model.losses)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    function = tf.function(lambda x, y: strategy.run(step, (x, y)), autograph=False)
    return lambda: float(function(tf.constant(X), tf.constant(Y)))


def assert_finite(*models: keras.Model) -> None:
    assert all(np.isfinite(weight).all() for model in models for weight in model.get_weights())


def test_two_threads_train_one_model():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    before, weights = attributes(model), model.get_weights()
    barrier = threading.Barrier(2)

    def work() -> list[float]:
        step = make_step(strategy, model)
        barrier.wait(LONG)
        return [step() for _ in range(3)]

    results = [start(work), start(work)]
    losses = [result() for result in results]
    assert np.isfinite(losses).all()
    assert_finite(model)
    assert any((a != b).any() for a, b in zip(model.get_weights(), weights, strict=True))
    assert_nothing_is_left(before, model)


def test_steps_that_overlap_leave_no_regulariser_behind():
    """One step leaves `run` while the other is still in it: exits that are not nested."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    before = attributes(model)
    first_called, second_called, first_left = (threading.Event() for _ in range(3))

    def first_waits() -> None:
        first_called.set()
        wait(second_called)

    def second_waits() -> None:
        second_called.set()
        wait(first_left)

    def first() -> float:
        loss = make_step(strategy, model, first_waits)()
        first_left.set()
        return loss

    def second() -> float:
        wait(first_called)
        return make_step(strategy, model, second_waits)()

    regularisers = [variable.regularizer for variable in model.trainable_variables]
    results = [start(first), start(second)]
    assert np.isfinite([result() for result in results]).all()
    assert [variable.regularizer for variable in model.trainable_variables] == regularisers
    assert_nothing_is_left(before, model)
    assert_finite(model)


def test_losses_of_layers_are_those_of_their_own_step():
    """Keras keeps them in the layers: a second step waits until the first has left `run`."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    with strategy.scope():
        keras.utils.set_random_seed(4)
        layers = [keras.layers.Flatten(), keras.layers.Dense(3), keras.layers.ActivityRegularization(l2=1.0)]
        model = keras.Sequential([keras.Input([4, 4, 3]), *layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.optimizer.build(model.trainable_variables)
    expected = make_step(strategy, model)()
    first_called, second_called = threading.Event(), threading.Event()

    def first_waits() -> None:
        first_called.set()
        assert not second_called.wait(1.0)

    result = start(make_step(strategy, model, first_waits))
    wait(first_called)
    losses = [make_step(strategy, model, second_called.set)(), result()]
    np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-6)
    assert second_called.is_set()


@pytest.mark.parametrize("eagerly", [False, True])
def test_two_threads_predict_as_one(eagerly):
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model, batches = made(strategy), [normal(8, 4, 4, 3, seed=seed) for seed in range(4)]
    expected = [model(batch, training=False).numpy() for batch in batches]
    barrier = threading.Barrier(4)

    def work(batch: np.ndarray) -> np.ndarray:
        def call(x: tf.Tensor) -> tf.Tensor:
            return strategy.run(lambda x: model(x, training=False), (x,))

        function = call if eagerly else tf.function(call, autograph=False)
        barrier.wait(LONG)
        return [function(tf.constant(batch)).numpy() for _ in range(3)]

    results = [start(lambda batch=batch: work(batch)) for batch in batches]
    for result, right in zip(results, expected, strict=True):
        for outputs in result():
            np.testing.assert_allclose(outputs, right, rtol=1e-5, atol=1e-6)


def test_two_threads_train_models_of_their_own_as_one_after_the_other():
    """Under one strategy; weights are those of training them one after the other."""

    def train(model: keras.Model) -> None:
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)

    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    apart, together = ([made(strategy, seed=seed) for seed in (1, 2)] for _ in range(2))
    for model in apart:
        train(model)
    for result in [start(lambda model=model: train(model)) for model in together]:
        result()
    for a, b in zip(apart, together, strict=True):
        assert largest_difference(a, b) <= 1e-6


def test_two_strategies_train_models_that_share_layers():
    strategies = [tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=m) for m in (2, 4)]
    with strategies[0].scope():
        first = made(strategies[0])
    with strategies[1].scope():
        x = keras.Input([4, 4, 3])
        y = x
        for layer in first.layers[1:-1]:
            y = layer(y)
        second = keras.Model(x, keras.layers.Dense(2, kernel_regularizer="l2")(y))
        second.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        second.optimizer.build(second.trainable_variables)
    second(X)
    before, barrier = attributes(first, second), threading.Barrier(2)

    def work(strategy: tf_gpipe.GPipeStrategy, model: keras.Model) -> list[float]:
        step = make_step(strategy, model)
        barrier.wait(LONG)
        return [step() for _ in range(3)]

    results = [
        start(lambda s=strategy, m=model: work(s, m))
        for strategy, model in zip(strategies, (first, second), strict=True)
    ]
    assert np.isfinite([result() for result in results]).all()
    assert_finite(first, second)
    assert_nothing_is_left(before, first, second)


def test_updates_of_two_threads_take_place_where_their_variables_are():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    variables = []
    for device in strategy.devices:
        with tf.device(device):
            variables.append(tf.Variable([0.0, 0.0]))
    barrier = threading.Barrier(2)

    def update(variable: tf.Variable) -> str:
        def fn(variable: tf.Variable) -> str:
            barrier.wait(LONG)  # both are inside
            device = tf.constant(0.0).device
            barrier.wait(LONG)
            return device

        with strategy.scope():
            return strategy.extended.update(variable, fn, group=True)

    results = [start(lambda v=variable: update(v)) for variable in variables]
    assert [result() for result in results] == strategy.devices == [v.device for v in variables]


# --- plain calls while a stage is traced ---


class Pause(keras.layers.Layer):
    """Stops in its n-th call on tensors in the thread that asks for it, until it may go on."""

    def __init__(self, at: int = 1) -> None:
        super().__init__()
        self.state = {"left": at, "thread": None}
        self.here, self.go_on = threading.Event(), threading.Event()

    def call(self, x):
        if tf.is_tensor(x) and self.state["thread"] == threading.get_ident():
            self.state["left"] -= 1
            if self.state["left"] == 0:
                self.here.set()
                wait(self.go_on)
        return x

    @contextlib.contextmanager
    def during(self, work: Callable[[], Any]) -> Iterator[None]:
        """Runs a function in a thread; while it is stopped, what is inside runs here."""

        def marked() -> Any:
            self.state["thread"] = threading.get_ident()
            return work()

        result = start(marked)
        try:
            wait(self.here)
            yield
        finally:
            self.go_on.set()
            result()


def paused_model(strategy: tf_gpipe.GPipeStrategy | None, at: int = 1) -> tuple[keras.Model, Pause]:
    pause = Pause(at)
    with scope_of(strategy):
        keras.utils.set_random_seed(3)
        x = keras.Input([4, 4, 3])
        y = keras.layers.Conv2D(4, 1, name="pointwise")(x)
        y = keras.layers.BatchNormalization(name="norm", synchronized=True)(y)
        y = keras.layers.SpectralNormalization(keras.layers.Conv2D(4, 1), name="spectral")(y)
        y = keras.layers.ActivityRegularization(l2=0.1, name="activity")(y)
        y = pause(y)
        y = keras.layers.Dense(2, name="last")(keras.layers.Flatten()(y))
        model = keras.Model(x, y)
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.optimizer.build(model.trainable_variables)
    model(X)  # plainly: Keras notes that its layers have been called
    return model, pause


CALLS: dict[str, Callable[[keras.Model], Any]] = {
    "batch norm": lambda model: model.get_layer("norm")(normal(2, 4, 4, 4), training=True),
    "pointwise convolution": lambda model: model.get_layer("pointwise")(normal(2, 4, 4, 3)),
    "spectral normalisation": lambda model: model.get_layer("spectral")(normal(2, 4, 4, 4), training=True),
    "its inner layer": lambda model: model.get_layer("spectral").layer(normal(2, 4, 4, 4)),
    "a layer that adds a loss": lambda model: model.get_layer("activity")(normal(2, 4, 4, 4)),
    "the loss it added": lambda model: [model.get_layer("activity")(normal(2, 4, 4, 4)), model.losses][1],
    "the model": lambda model: model(normal(2, 4, 4, 3), training=False),
    "the model in training": lambda model: model(normal(2, 4, 4, 3), training=True),
    "a flag": lambda model: float(model.get_layer("norm").synchronized),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_call_while_the_stage_is_traced_is_plain_keras(name):
    reference, _ = paused_model(None)
    expected = CALLS[name](reference)
    strategy = tf_gpipe.GPipeStrategy(num_stages=1, num_micro_batches=2, remat="always")  # traced once for each way
    model, pause = paused_model(strategy)
    strategy.place(model)
    before = attributes(model)
    with pause.during(make_step(strategy, model)):
        assert attributes(model) != before, "something is replaced now"
        for part, right in zip(tf.nest.flatten(CALLS[name](model)), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(part, right, rtol=1e-5, atol=1e-6)
    assert_nothing_is_left(before, model)


def test_a_thread_that_dies_leaves_nothing_behind():
    strategy = tf_gpipe.GPipeStrategy(num_stages=1, num_micro_batches=2)
    model, pause = paused_model(strategy)
    strategy.place(model)
    before = attributes(model)

    class Death(BaseException):
        pass

    def die() -> None:
        pause.go_on.wait = lambda timeout: (_ for _ in ()).throw(Death())
        make_step(strategy, model)()

    with pytest.raises(Death), pause.during(die):
        pass
    assert_nothing_is_left(before, model)
    pause.state["thread"] = None
    assert np.isfinite(start(make_step(strategy, model))()), "and the lock is free"


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_random_numbers_drawn_while_a_stage_is_traced(at, draw):
    """In the first trace of a stage, and in the second: they are those of the generator's sequence, once each."""

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)

    seed()
    expected = [draw() for _ in range(3)]
    strategy = tf_gpipe.GPipeStrategy(num_stages=1, num_micro_batches=2, remat="always")
    model, pause = paused_model(strategy, at)
    strategy.place(model)
    seed()
    found = [draw()]
    with pause.during(make_step(strategy, model)):
        found.append(draw())
    found.append(draw())
    assert found == expected


# --- taking turns ---


def calls_that_wait(strategy: tf_gpipe.GPipeStrategy, model: keras.Model) -> dict[str, Callable[[], Any]]:
    return {
        "plan": lambda: strategy.plan(model),
        "place": lambda: strategy.place(model),
        "call": lambda: strategy.run(model, (tf.constant(X),)),
        "fit": lambda: model.fit(X, Y, verbose=0),
    }


def assert_waits(turn: threading.Event, work: Callable[[], Any]) -> None:
    """A function that sets `turn` has not come so far while this thread holds the lock; it does so afterwards."""
    with threads.turn:
        result = start(work)
        assert not turn.wait(1.0)
    result()
    assert turn.is_set()


@pytest.mark.parametrize("name", ["plan", "place", "call", "fit"])
def test_one_thread_at_a_time(name, monkeypatch):
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model, turn = made(strategy), threading.Event()
    work = calls_that_wait(strategy, model)[name]
    if name == "fit":  # which takes long anyway
        place = strategy._place_prepared
        monkeypatch.setattr(strategy, "_place_prepared", lambda *args: (turn.set(), place(*args)))
        assert_waits(turn, work)
    else:
        assert_waits(turn, lambda: (work(), turn.set()))


def test_gradients_take_their_turn():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model, turn, called, held = made(strategy), *(threading.Event() for _ in range(3))

    def between() -> None:
        called.set()
        wait(held)

    step = make_step(strategy, model, between)
    result = start(lambda: (step(), turn.set()))
    wait(called)
    with threads.turn:
        held.set()
        assert not turn.wait(3.0)
    result()
    assert turn.is_set()


def test_a_trace_measures_the_steps_of_its_own_thread():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    measured, other = made(strategy), made(strategy, seed=2)
    train = measured.make_train_function
    trained = []

    def train_the_other_first(force: bool = False) -> None:
        start(lambda: trained.append(other.fit(X, Y, verbose=0, batch_size=4)))()
        train(force)

    with threads.replaced(measured, "make_train_function", train_the_other_first):
        timeline = strategy.trace(measured, (X, Y))
    assert len(trained) == 2
    assert sorted(event.task.kind for event in timeline.events) == ["backward"] * 4 + ["forward"] * 4


# --- another library's patch of `keras.Model.__call__` ---


class Patch:
    """Counts the calls of models, as a profiler or an experiment tracker does."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self) -> None:
        self.own = vars(keras.Model).get("__call__")
        inner = keras.Model.__call__

        def counted(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return inner(model, *args, **kwargs)

        self.function = keras.Model.__call__ = counted

    def take_off(self) -> None:
        if self.own is None:
            del keras.Model.__call__
        else:
            keras.Model.__call__ = self.own

    @property
    def is_there(self) -> bool:
        return vars(keras.Model).get("__call__") is self.function


@pytest.fixture
def patch() -> Iterator[Patch]:
    yield Patch()
    if "__call__" in vars(keras.Model):
        del keras.Model.__call__


def run_in_stages(strategy: tf_gpipe.GPipeStrategy, model: keras.Model, before: Callable[[], None]) -> str:
    """Runs a model and returns names of operations of its graph, which tell of stages."""

    def step(x: tf.Tensor) -> tf.Tensor:
        before()
        return model(x, training=False)

    function = tf.function(lambda x: strategy.run(step, (x,)), autograph=False)
    operations = function.get_concrete_function(tf.constant(X)).graph.get_operations()
    return " ".join(op.name for op in operations)


def nothing() -> None:
    pass


def test_a_patch_that_was_there_before_is_called_and_stays(patch):
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    patch.put()
    for count in (1, 2):
        assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, nothing)
        assert patch.calls == count
        assert patch.is_there
    model(X)
    assert patch.calls == 3
    patch.take_off()
    model(X)
    assert patch.calls == 3
    assert "__call__" not in vars(keras.Model)


def test_a_patch_that_is_put_there_during_a_run_is_called_and_stays(patch):
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, patch.put)
    assert patch.calls == 1
    assert patch.is_there
    model(X)
    assert patch.calls == 2
    assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, nothing)
    assert patch.calls == 3
    assert patch.is_there
    patch.take_off()  # which puts back what it found, our function of a run that has ended
    np.testing.assert_array_equal(model(X), model(X))
    assert patch.calls == 3
    assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, nothing)
    assert "__call__" not in vars(keras.Model)


def test_a_patch_that_comes_and_goes_within_a_run(patch):
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)

    def call_it_once() -> None:
        patch.put()
        model(X)
        patch.take_off()

    assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, call_it_once)
    assert patch.calls == 1
    assert "__call__" not in vars(keras.Model)


@pytest.mark.parametrize("again", [False, True], ids=["", "and another run begins"])
def test_a_patch_that_is_taken_off_under_a_run_is_refused(patch, again):
    """What it puts back is what was there before the run: models would run without stages, and nobody would know."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    patch.put()

    def take_off() -> None:
        patch.take_off()
        if again:
            start(lambda: run_in_stages(strategy, model, nothing))()

    with pytest.raises(tf_gpipe.errors.ModelError, match="`keras.Model.__call__` to be left alone, or wrapped"):
        run_in_stages(strategy, model, take_off)
    assert patch.calls == 0
    assert "__call__" not in vars(keras.Model)
    assert "stage_1/micro_batch_1" in run_in_stages(strategy, model, nothing)


def test_a_patch_while_other_threads_run(patch):
    """It is put there while two runs are open, and taken off after one of them has ended."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=2)
    model = made(strategy)
    both, patched, first_left, unpatched = threading.Barrier(3), *(threading.Event() for _ in range(3))

    def first() -> None:
        both.wait(LONG)
        wait(patched)

    def second() -> None:
        both.wait(LONG)
        wait(unpatched)

    def run_first() -> str:
        names = run_in_stages(strategy, model, first)
        first_left.set()
        return names

    results = [start(run_first), start(lambda: run_in_stages(strategy, model, second))]
    both.wait(LONG)
    patch.put()
    patched.set()
    wait(first_left)
    assert patch.calls == 1
    assert patch.is_there
    patch.take_off()
    unpatched.set()
    assert all("stage_1/micro_batch_1" in result() for result in results)
    assert patch.calls == 1
    assert "__call__" not in vars(keras.Model)
