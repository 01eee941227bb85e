"""Measured timelines: that they tell what ran, and that measuring changes nothing."""

import collections
import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same_optimizer, normal
from tensorflow.python.summary.summary_iterator import summary_iterator
from test_placement import Executed

import tf_gpipe
from tf_gpipe import Event, Schedule, Task, Timeline, tracing

L = keras.layers

STRATEGY_NOT_OURS = "made under this strategy's scope"


def dense_model(widths=(8, 9, 10, 11), **compile) -> tuple[tf_gpipe.GPipeStrategy, keras.Model]:
    """A compiled chain of Dense layers in four stages, with four micro-batches."""
    return made(lambda: keras.Sequential([keras.Input([6]), *(L.Dense(w, "tanh") for w in widths)]), **compile)


def made(make, stages=4, micro_batches=4, optimizer="adam", remat="except_last", partition="flops", **compile):
    strategy = tf_gpipe.GPipeStrategy(stages, micro_batches, remat=remat, partition=partition)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        optimizer = optimizer() if callable(optimizer) else optimizer
        model.compile(optimizer, compile.pop("loss", "mse"), **compile)
    return strategy, model


def model_with_state() -> keras.Model:
    """Dropout, batch norm, a mask and integers between the stages."""
    ids = keras.Input([5], dtype="int32")
    x = L.Embedding(7, 6, mask_zero=True)(ids)
    x = L.Dropout(0.3)(L.Dense(6, "tanh")(x))
    x = L.GlobalAveragePooling1D()(x)
    x = L.BatchNormalization()(x)
    return keras.Model(ids, L.Dense(3, activity_regularizer="l2")(x))


def state_data(rows: int):
    return np.random.default_rng(0).integers(0, 7, [rows, 5]), normal(rows, 3)


def all_values(model: keras.Model) -> list[np.ndarray]:
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables, *metrics]]


def op_types(model: keras.Model, rows: int = 8) -> collections.Counter:
    """Operations of the training step of a `dense_model`, traced anew, by type."""
    model.train_function = None
    model.make_train_function()
    graphs = []
    train_step = model.train_step

    def step(data):
        graphs.append(tf.compat.v1.get_default_graph())
        return train_step(data)

    model.__dict__["train_step"] = step
    model.make_train_function(force=True)
    model.train_on_batch(normal(rows, 6), normal(rows, 11))
    del model.__dict__["train_step"]
    return collections.Counter(op.type for op in graphs[-1].get_operations())


# --- what a timeline tells ---


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_a_trace_has_every_task_in_an_order_that_the_schedule_allows(remat):
    strategy, model = made(lambda: keras.Sequential([keras.Input([6]), *(L.Dense(8) for _ in range(4))]), remat=remat)
    before = time.time()
    timeline = strategy.trace(model, (normal(16, 6), normal(16, 8)))
    assert (timeline.schedule, timeline.remat) == (Schedule.gpipe(4, 4), remat)
    assert before < timeline.begin < timeline.end < time.time()
    for event in timeline.events:
        assert event.start < event.end
        for need in event.task.needs(4):
            assert timeline.event(need).start < event.start, (event.task, need)
    assert sum(timeline.shares) == pytest.approx(1)


FROZEN = {"first half": range(4), "all but the last": range(7), "middle": range(2, 6), "third quarter": (4, 5)}


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize(("stages", "frozen"), [*zip([2, 4, 3, 4], FROZEN.values(), strict=True)], ids=FROZEN)
def test_a_timeline_of_frozen_layers_shows_what_ran(stages, frozen, remat):
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input([64]), *(L.Dense(64, "tanh") for _ in range(8))])
        for i in frozen:
            model.layers[i].trainable = False
        return model

    counts = {2: [4, 4], 3: [3, 3, 2], 4: [2, 2, 2, 2]}[stages]
    strategy, model = made(make, stages=stages, remat=remat, optimizer="sgd", partition=counts)
    plan = strategy.plan(model)
    timeline = strategy.trace(model, (normal(2048, 64), normal(2048, 64)))
    for k, shares in enumerate(timeline.device_shares):
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        first_trained = min(set(range(8)) - set(frozen))
        goes_back = plan.stages[k].end > first_trained
        assert plan.stages[k].goes_back == goes_back
        for m in range(4):
            event = timeline.event(Task("backward", k, m))
            assert (event.end > event.start) == goes_back
            again = goes_back and (remat == "always" or (remat == "except_last" and m < 3))
            assert (timeline.recompute(event.task) > 0) == again
            assert timeline.recompute(event.task) <= event.end - event.start
        assert (shares.recompute > 0) == (goes_back and remat != "never")
    assert timeline.simulated_duration < 3 * timeline.tasks_duration


def test_what_is_recomputed_is_what_the_gradient_needs():
    """The gradient of a linear layer's weights needs its input; that of a frozen linear layer's input needs nothing."""

    def make() -> keras.Model:
        frozen = [L.Dense(32, "relu", use_bias=False, trainable=False) for _ in range(3)]
        linear = [L.Dense(32, use_bias=False, trainable=False) for _ in range(2)]
        head = L.Dense(32, use_bias=False)
        return keras.Sequential([keras.Input([32]), *frozen, head, *linear])

    strategy, model = made(make, stages=2, micro_batches=2, remat="always", optimizer="sgd", partition=[4, 2])
    timeline = strategy.trace(model, (normal(8, 32), normal(8, 32)))
    parts = [timeline.event(Task("backward", k, 0)).recomputed for k in range(2)]
    relu = 4 * 32 * 3
    assert parts == [pytest.approx((3 * 4 * 32 * 32 + relu) / (4 * 4 * 32 * 32 + relu)), 0]
    assert timeline.device_shares[1].recompute == 0


def test_a_frozen_branch_goes_back_where_the_plan_says_so():
    def make() -> keras.Model:
        x = keras.Input([16])
        left = L.Dense(16, trainable=False)(L.Dense(16, trainable=False)(x))
        return keras.Model(x, L.Dense(16)(L.Add()([L.Dense(16)(x), left])))

    for counts in ([1, 1, 1, 1, 1], [2, 1, 2]):
        strategy, model = made(make, stages=len(counts), micro_batches=2, optimizer="sgd", partition=counts)
        goes_back = [stage.goes_back for stage in strategy.plan(model).stages]
        assert goes_back == ([False, True, False, True, True] if len(counts) == 5 else [True] * 3)
        timeline = strategy.trace(model, (normal(4, 16), normal(4, 16)))
        events = [timeline.event(Task("backward", k, 0)) for k in range(len(counts))]
        assert [event.end > event.start for event in events] == goes_back


def test_fewer_rows_than_micro_batches_and_sample_weights():
    strategy, model = dense_model()
    timeline = strategy.trace(model, (normal(3, 6), normal(3, 11), np.array([1.0, 0.0, 2.0])))
    assert timeline.schedule == Schedule.gpipe(4, 3)


def test_a_task_waits_for_its_inputs_while_its_stage_is_idle():
    """A slow first stage: the second is idle until its input is there."""
    strategy, model = made(sleeping_model, stages=2)
    timeline = strategy.trace(model, (normal(8, 3), normal(8, 3)))
    first, second = timeline.event(Task("forward", 0, 0)), timeline.event(Task("forward", 1, 0))
    assert first.start + SLEEP <= second.ready <= second.start


SLEEP = 0.03


class Sleep(keras.layers.Layer):
    """Passes its input on after a while, as a device that works for itself would."""

    def call(self, x):
        def sleep(value):
            time.sleep(SLEEP)
            return np.float32(1)

        waited = tf.numpy_function(sleep, [x], tf.float32, stateful=False)
        return x * tf.reshape(waited, [])  # the gradient needs it, so that the recomputation waits too


def sleeping_model() -> keras.Model:
    return keras.Sequential([keras.Input([3]), L.Dense(3), Sleep(), L.Dense(3), Sleep()])


def test_stages_overlap_while_they_are_measured():
    strategy, model = made(sleeping_model, stages=2, remat="always")
    timeline = strategy.trace(model, (normal(8, 3), normal(8, 3)))
    lengths = [event.end - event.start for event in timeline.events]
    assert min(lengths) > 0.9 * SLEEP
    assert timeline.event(Task("forward", 1, 0)).start < timeline.event(Task("forward", 0, 1)).end
    assert timeline.event(Task("backward", 0, 3)).start < timeline.event(Task("backward", 1, 2)).end
    assert timeline.tasks_duration < 0.85 * sum(lengths)


def test_a_stage_without_gradient_has_backward_tasks_that_take_no_time():
    def make():
        model = keras.Sequential([keras.Input([6]), *(L.Dense(8, "tanh") for _ in range(4))])
        model.layers[0].trainable = False
        return model

    strategy, model = made(make)
    timeline = strategy.trace(model, (normal(8, 6), normal(8, 8)))
    lengths = {e.task: e.end - e.start for e in timeline.events if e.task.kind == "backward"}
    assert {task.stage for task, length in lengths.items() if length == 0} == {0}
    assert all(length > 0 for task, length in lengths.items() if task.stage > 0)


def test_deferred_gradients_of_weights_come_after_the_last_backward_task():
    def make():
        return keras.Sequential([keras.Input([300]), *(L.Dense(300, "tanh", use_bias=False) for _ in range(2))])

    strategy, model = made(make, stages=2, micro_batches=2)
    timeline = strategy.trace(model, (normal(8, 300), normal(8, 300)))
    assert len(timeline.weights) == 2
    for k, (start, end) in enumerate(timeline.weights):
        assert timeline.event(Task("backward", k, 0)).end <= start < end
    assert sum(timeline.shares) == pytest.approx(1)


def test_deferred_gradients_are_compute_in_the_simulations_too(tmp_path):
    # One stage idles for 1 s of 8 at the beginning; the other makes gradients of weights while that one goes backward.
    ends = {"0F0": (0, 0, 1), "1F0": (1, 1, 2), "1B0": (2, 2, 4), "0B0": (4, 4, 6)}
    events = tuple(Event(Task.parse(text), *times) for text, times in ends.items())
    timeline = Timeline(Schedule.gpipe(2, 1), events, 0, 8, "never", ((6, 8), (4, 6)))
    busy = [shares.compute for shares in timeline.device_shares]
    assert busy == [5 / 8, 5 / 8]
    assert timeline.shares.bubble == pytest.approx(3 / 8)
    assert timeline.shares.other == pytest.approx(0)
    timeline.save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == timeline
    slices = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["name"] == "W"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in slices] == [(0, 6e6, 2e6), (1, 4e6, 2e6)]
    tf_gpipe.draw(timeline, tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text().count("stage 1: weights, 4000 to 6000 ms") == 1
    with pytest.raises(tf_gpipe.GPipeError, match="after the last task"):
        Timeline(Schedule.gpipe(2, 1), events, 0, 8, "never", ((5, 8), (4, 6)))


# --- measuring changes nothing ---


def test_a_trace_leaves_the_model_as_it_was():
    strategy, model = made(model_with_state, metrics=["mae"], optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    _, untraced = made(model_with_state, metrics=["mae"], optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    for each in (model, untraced):
        each.train_on_batch(*state_data(16))
    function, before = model.train_function, all_values(model)
    timeline = strategy.trace(model, state_data(16))
    assert len(timeline.events) == 2 * 4 * 4
    assert model.train_function is function
    for old, new in zip(before, all_values(model), strict=True):
        np.testing.assert_array_equal(new, old)
    for each in (model, untraced):
        each.train_on_batch(*state_data(16))
    for one, other in zip(all_values(model), all_values(untraced), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_trace_before_any_training_leaves_weights_and_optimizer_new():
    strategy, model = dense_model()
    weights = model.get_weights()
    strategy.trace(model, (normal(8, 6), normal(8, 11)))
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations) == 0
    assert "Timestamp" not in op_types(model)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_train_step_gets_what_fit_gives_it(weighted):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y, *weight = data
            seen.append(len(weight))
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), *weight)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    seen = []
    strategy, model = made(lambda: Own([keras.Input([6]), keras.layers.Dense(5), keras.layers.Dense(2)]))
    batch = (normal(8, 6), normal(8, 2), *([np.ones([8])] if weighted else []))
    model.fit(*batch[:2], sample_weight=batch[2] if weighted else None, verbose=0)
    history, wanted = model.history, set(seen)
    strategy.trace(model, batch)
    assert set(seen) == wanted == {int(weighted)}
    assert model.history is history


@pytest.mark.parametrize(("rows", "remat"), [(64, "never"), (35, "except_last")])
def test_weights_are_equal_with_and_without_the_callback(tmp_path, rows, remat):
    """35 rows in batches of 16: the last has 3, for four micro-batches, in a step whose number of rows is unknown."""
    results = []
    for callbacks in ([], [tf_gpipe.TimelineCallback(tmp_path, every=1)]):
        _, model = made(model_with_state, remat=remat, metrics=["mae"])
        data = state_data(rows)
        fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": data}
        history = model.fit(*data, callbacks=callbacks, **fit).history
        results.append((model, history))
    (plain, expected), (traced, received) = results
    assert expected == received
    for a, b in zip(plain.get_weights(), traced.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same_optimizer(plain, traced, tolerance=0)
    steps = 2 * -(-rows // 16)
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert names == [f"step_{n:06d}.json" for n in range(2, steps + 1)]
    durations = [Timeline.load(tmp_path / name).begin for name in names]
    assert durations == sorted(set(durations)), "each file is of its own step"


def test_without_tracing_the_graph_is_as_before_and_with_it_only_times_are_added():
    strategy, model = dense_model()
    plain = op_types(model)
    tracer = tracing.start_tracing(strategy)
    traced = op_types(model)
    tracing.stop_tracing(strategy, tracer)
    assert op_types(model) == plain
    assert plain["Timestamp"] == 0
    assert plain["RemoteCall"] == 2 * 4 * 4
    # A handle, an assignment with its packing; then ready, start and end of each task, begin and end of the step. No
    # weights are deferred here, but each stage takes the times ready and start in case some are.
    added = traced - plain
    assert added == {"Placeholder": 1, "Pack": 1, "AssignVariableOp": 1, "Timestamp": 3 * 32 + 2 + 2 * 4}
    assert plain - traced == {}


# --- the callback ---


def test_the_callback_writes_files_and_scalars_and_goes(tmp_path):
    strategy, model = dense_model()
    callback = tf_gpipe.TimelineCallback(tmp_path / "new", every=3)
    model.fit(normal(64, 6), normal(64, 11), batch_size=8, verbose=0, callbacks=[callback])
    assert sorted(path.name for path in (tmp_path / "new").glob("*.json")) == ["step_000003.json", "step_000006.json"]
    scalars = collections.defaultdict(dict)
    for path in (tmp_path / "new").glob("events*"):
        for event in summary_iterator(str(path)):
            for value in event.summary.value:
                scalars[event.step][value.tag] = float(tf.make_ndarray(value.tensor))
    timeline = Timeline.load(tmp_path / "new" / "step_000006.json")
    assert scalars.keys() == {3, 6}
    for name, share in timeline.shares._asdict().items():
        assert scalars[6][f"gpipe/{name}"] == pytest.approx(share, abs=1e-6)
    assert 0 < scalars[6]["gpipe/stage_3/busy"] < 1
    assert scalars[6]["gpipe/step_seconds"] == pytest.approx(timeline.duration)
    assert "Timestamp" not in op_types(model)


def test_without_tensorboard_the_callback_writes_files_and_warns(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, model = dense_model()
    with pytest.warns(UserWarning, match="no scalars, since TensorBoard is not installed"):
        model.fit(normal(32, 6), normal(32, 11), 8, verbose=0, callbacks=[tf_gpipe.TimelineCallback(tmp_path, every=2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002.json", "step_000004.json"]


def test_a_training_too_short_to_be_measured_says_so(tmp_path):
    _, model = dense_model()
    with pytest.warns(UserWarning, match="measured nothing: training took 4 steps, and one in 100"):
        model.fit(normal(32, 6), normal(32, 11), 8, verbose=0, callbacks=[tf_gpipe.TimelineCallback(tmp_path)])


def test_a_step_during_which_the_clock_was_set_back_is_left_out(tmp_path, monkeypatch):
    _, model = dense_model()
    latest = tracing.Recorder.latest
    monkeypatch.setattr(tracing.Recorder, "latest", lambda self: [*latest(self)[:-1], 1.0])
    callback = tf_gpipe.TimelineCallback(tmp_path, every=2)
    with pytest.warns(UserWarning, match="step 2 was left out"):
        model.fit(normal(16, 6), normal(16, 11), batch_size=8, verbose=0, callbacks=[callback])
    assert list(tmp_path.glob("*.json")) == []


def test_the_callback_counts_steps_over_several_in_one_execution(tmp_path):
    _, model = dense_model(steps_per_execution=2)
    callback = tf_gpipe.TimelineCallback(tmp_path, every=4)
    model.fit(normal(64, 6), normal(64, 11), batch_size=8, verbose=0, callbacks=[callback])
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["step_000004.json", "step_000008.json"]


# --- errors ---


class TwoCalls(keras.Model):
    """Calls its layer stack twice in a step."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.inner(x, training=True) * self.inner(-x, training=True))
        weights = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Penalised(TwoCalls):
    """Takes a gradient of a gradient."""

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = self.inner(x, training=True)
            loss = tf.reduce_mean(y) + tf.reduce_mean(tf.square(inner.gradient(y, x)))
        weights = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class InAFunction(TwoCalls):
    """Calls its layers in a graph of its own."""

    def train_step(self, data):
        weights = self.inner.trainable_variables

        @tf.function
        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.inner(x, training=True))
            return tape.gradient(loss, weights)

        self.optimizer.apply_gradients(zip(gradients(data[0]), weights, strict=True))
        return {"rows": tf.shape(data[0])[0]}


class Unused(TwoCalls):
    """Calls its layers on a tape, and takes no gradient."""

    def train_step(self, data):
        with tf.GradientTape():
            return {"loss": tf.reduce_mean(self.inner(data[0], training=True))}


class Empty(TwoCalls):
    """Calls no model."""

    def train_step(self, data):
        return {"loss": tf.reduce_mean(data[0])}


REFUSED = {
    TwoCalls: "several calls",
    Penalised: "gradients of gradients",
    InAFunction: "a function of its own",
    Unused: "no gradient",
    Empty: "one that calls none",
}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items(), ids=[kind.__name__ for kind in REFUSED])
def test_a_step_that_is_no_row_of_tasks(kind, message, tmp_path):
    """`trace` refuses it; the callback says so once, and training goes on."""

    def make():
        return kind(keras.Sequential([keras.Input([6]), L.Dense(5, "tanh"), L.Dense(4, "tanh")]))

    strategy, model = made(make, stages=2, loss=None)
    data = normal(8, 6), normal(8, 4)
    with pytest.raises(tf_gpipe.GPipeError, match=message):
        strategy.trace(model, data)
    callback = tf_gpipe.TimelineCallback(tmp_path, every=1)
    with pytest.warns(UserWarning, match=rf"TimelineCallback measures nothing in this training.*{message}") as told:
        history = model.fit(*data, batch_size=2, verbose=0, callbacks=[callback]).history
    assert sum("TimelineCallback" in str(warning.message) for warning in told) == 1
    assert all(np.isfinite(values).all() for values in history.values())
    assert not list(tmp_path.glob("*.json"))


def test_models_that_cannot_be_traced(monkeypatch, tmp_path):
    strategy, model = dense_model()
    data = normal(8, 6), normal(8, 11)
    plain = keras.Sequential([keras.Input([6]), L.Dense(11)])
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match=STRATEGY_NOT_OURS):
        strategy.trace(plain, data)
    with pytest.raises(ValueError, match=r"scope of a `GPipeStrategy`.*make and compile"):
        plain.fit(*data, verbose=0, callbacks=[tf_gpipe.TimelineCallback(tmp_path)])
    with pytest.raises(ValueError, match=r"tuple `\(x, y\)`.*Received: dict"):
        strategy.trace(model, {"x": data[0]})
    assert strategy.trace(model, list(data)).events
    with pytest.raises(ValueError, match="Received: tuple of length 4"):
        strategy.trace(model, (*data, None, None))
    for x, received in ((np.ones([0, 6]), r"shape \(0, 6\)"), (3.0, "float"), ({}, "nothing")):
        with pytest.raises(ValueError, match=rf"at least one row. Received: {received}. Pass"):
            strategy.trace(model, (x, x))
    with pytest.raises(ValueError, match="at least 1. Received: every=0"):
        tf_gpipe.TimelineCallback(tmp_path, every=0)
    with strategy.scope():
        loose = keras.Sequential([keras.Input([6]), L.Dense(11)])
    with pytest.raises(ValueError, match="Expected a compiled model"):
        strategy.trace(loose, data)
    with strategy.scope():
        loose.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="which runs eagerly"):
        strategy.trace(loose, data)


# --- accelerators ---


@pytest.fixture
def accelerators(monkeypatch):
    """The way times are taken on devices whose operations are done for TensorFlow when they are in a queue."""
    monkeypatch.setattr(tracing, "is_cpu", lambda device: False)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_timeline_of_accelerators(accelerators, jit_compile):
    strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile=jit_compile)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_with_state()
        model.compile("adam", "mse", jit_compile=False)
    before = all_values(model)
    timeline = strategy.trace(model, state_data(8))
    assert len(timeline.events) == 2 * 2 * 4
    assert sum(timeline.shares) == pytest.approx(1.0)
    for now, then in zip(all_values(model), before, strict=False):
        np.testing.assert_array_equal(now, then)


def test_times_of_an_accelerator_wait_for_numbers_from_it(accelerators, monkeypatch):
    """A control dependency would only wait for the queue."""
    recorders = []
    monkeypatch.setattr(tracing.Recorder, "finish", lambda recorder: recorders.append(recorder))
    strategy, model = made(
        lambda: keras.Sequential([keras.Input([6]), L.Dense(8), L.Dense(11)]), stages=2, remat="always"
    )
    strategy.place(model)

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, ((x, y),))

    tracer = tracing.start_tracing(strategy)
    step.get_concrete_function(tf.zeros([8, 6]), tf.zeros([8, 11]))
    tracing.stop_tracing(strategy, tracer)
    recorder = recorders[-1]  # of two traces, since the first makes the slots
    times = {key: times for key, times in recorder._times.items() if len(times) == 3}  # no gradient is deferred
    assert len(times) == 2 * 2 * 4
    for (kind, stage, m), (ready, _, end) in times.items():
        assert ready.device.endswith("CPU:0")
        assert end.device.endswith("CPU:0")
        (copy,) = end.op.control_inputs
        assert (copy.type, copy.device[-5:]) == ("Identity", "CPU:0")
        number = copy.inputs[0].op
        assert (number.type, number.device) == ("StridedSlice", strategy.devices[stage])
        assert f"stage_{stage}/micro_batch_{m}/{kind}/" in number.inputs[0].op.inputs[0].name  # of what the task made
    arrived = [op for op in times["forward", 1, 0][0].op.control_inputs if op.type == "Identity"]
    assert [op.inputs[0].device for op in arrived] == [strategy.devices[1]]  # there, and not where it was made


# --- what is sent ---


def test_bytes_between_stages_are_those_of_the_plan():
    """Boundary tensors forward, their gradients backward where they are floats, labels, and single numbers."""
    rows = 8
    executed = Executed()

    def make():
        ids = keras.Input([5], dtype="int32")
        shifted = keras.ops.minimum(ids + 1, 6)
        x = L.Dense(4, "tanh")(L.Embedding(7, 6)(shifted))
        skip = x
        x = L.Dense(9, "tanh")(x)
        x = L.Dense(4, "tanh")(x) + skip
        again = keras.ops.cast(keras.ops.expand_dims(shifted, -1), "float32")
        return keras.Model(ids, L.Dense(3)(L.Flatten()(x * again)))

    strategy, model = made(make, 3, 2, "sgd", loss=executed.trace_loss)
    with executed:
        model.fit(np.ones([rows, 5], "int32"), normal(rows, 3), batch_size=rows, verbose=0)
    plan = strategy.plan(model)
    planned = sum(stage.received_bytes for stage in plan.stages) * rows
    received = {ref for stage in plan.stages for ref in stage.inputs} - set(plan.graph.inputs)
    whole_numbers = {ref for ref in received if not tf.as_dtype(plan.graph.specs[ref].dtype).is_floating}
    assert whole_numbers, "the model sends integers too"
    backward = rows * sum(
        plan.graph.specs[ref].bytes_per_row
        for stage in plan.stages
        for ref in stage.inputs
        if ref in received - whole_numbers
    )
    sent = collections.Counter()
    for s in executed.sent:
        kind = next((kind for kind in ("forward", "backward") if f"/{kind}/RemoteCall" in s.name), None)
        if kind is None:
            assert s.name.startswith("IteratorGetNext") or executed.elements(s) in (0, 1), s
        else:
            output = executed.step.get_operation_by_name(s.name).outputs[s.output]
            sent[kind] += output.shape.num_elements() * output.dtype.size
    assert sent == {"forward": planned, "backward": backward}
