"""What a compiled stage does once for a mini-batch is one program, and comes to what single operations come to."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import normal
from keras import optimizers

import tf_gpipe
from tf_gpipe import compat, updates

L = keras.layers
ASSIGNS = re.compile("Assign.*VariableOp|ResourceScatter.*")


def compiled_model(
    optimizer, jit_compile=True, slices=True, batch_norm=False
) -> tuple[tf_gpipe.GPipeStrategy, keras.Model]:
    """Two stages, each with weights that share a buffer; the gradient of the embedding is slices."""
    strategy = tf_gpipe.GPipeStrategy(2, 4, devices=["/CPU:1", "/CPU:2"], jit_compile=jit_compile)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        x = inputs = keras.Input([5], dtype="int32")
        x = L.Flatten()(L.Embedding(9, 8)(x)) if slices else L.Rescaling(0.1)(x)
        x = L.Dense(8, "tanh")(x)
        x = L.BatchNormalization()(x) if batch_norm else L.Dense(8, "tanh")(x)
        model = keras.Model(inputs, L.Dense(2)(x))
        model.compile(optimizer(), "mse", jit_compile=False)
    return strategy, model


def data(rows=24):
    return np.random.default_rng(0).integers(9, size=[rows, 5]), normal(rows, 2)


def trained(optimizer, **more) -> tuple[list[np.ndarray], tf_gpipe.GPipeStrategy, keras.Model]:
    strategy, model = compiled_model(optimizer, **more)
    model.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]], strategy, model


def assert_close(found, wanted) -> None:
    """Equal but for what XLA rounds otherwise."""
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def step_graph(strategy, model, rows=16) -> tf.Graph:
    @tf.function
    def train(x, y):
        return strategy.run(model.train_step, ((x, y),))

    return train.get_concrete_function(tf.zeros([rows, 5], tf.int32), tf.zeros([rows, 2])).graph


def programs(graph: tf.Graph) -> list[tuple[str, str]]:
    """(device, name) of the programs, in order, but those of tasks."""
    calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
    named = [(op.device[-5:], re.search("(weight_\\w+?s|moving_averages)_\\d", op.get_attr("f").name)) for op in calls]
    return sorted((device, found[1]) for device, found in named if found)


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "accumulated": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averaged": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "scaled loss": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2
    ),
    "schedule and decay": lambda: optimizers.AdamW(
        optimizers.schedules.ExponentialDecay(1e-2, 2, 0.9), weight_decay=0.1, epsilon=1e-2
    ),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "adam": lambda: optimizers.Adam(1e-2, amsgrad=True, epsilon=1e-2),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "nadam": lambda: optimizers.Nadam(1e-2, epsilon=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_updates_the_weights_of_a_device(name):
    values, strategy, model = trained(OPTIMIZERS[name])
    assert_close(values, trained(OPTIMIZERS[name], jit_compile=False)[0])
    graph = step_graph(strategy, model)
    branches = [f.graph for at, f in graph._functions.items() if re.search("cond_(true|false)", at)]
    handles = {id(v.value.handle) for v in model.trainable_variables}
    single, found = [], []
    for part in [graph, *branches]:
        weights = {id(inside) for outside, inside in part.captures if id(outside) in handles}
        weights |= {id(inside) for outside, inside in part.captures if id(outside) in weights}
        assigns = [op for op in part.get_operations() if ASSIGNS.fullmatch(op.type)]
        single += [op.name for op in assigns if id(op.inputs[0]) in weights]
        found += [program for program in programs(part) if program[1] == "weight_updates"]
    assert bool(single) == (name == "averaged")  # averages are written over the weights, every now and then
    several = {"schedule and decay": 2, "accumulated": 2}.get(name, 1)  # and decays, and adds to what is accumulated
    assert sorted(found) == [("CPU:1", "weight_updates")] * several + [("CPU:2", "weight_updates")] * several


def test_what_is_one_program():
    strategy, model = compiled_model(lambda: optimizers.Adam(1e-3), batch_norm=True)
    assert programs(step_graph(strategy, model)) == [
        ("CPU:1", "weight_updates"),
        ("CPU:2", "moving_averages"),
        ("CPU:2", "weight_gradients"),
        ("CPU:2", "weight_updates"),
    ]
    strategy, model = compiled_model(lambda: optimizers.Adam(1e-3), jit_compile=False)
    assert programs(step_graph(strategy, model)) == []


@pytest.mark.parametrize("setting", ["momentum", "weight decay", "batch norm"])
def test_what_is_changed_takes_effect_where_plain_keras_traces_again(setting):
    def weights(jit_compile):
        batch_norm = setting == "batch norm"
        _, model = compiled_model(
            lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), jit_compile, batch_norm=batch_norm
        )
        model.fit(*data(), batch_size=24, verbose=0)
        if setting == "momentum":
            model.optimizer.momentum = 0.1
        elif setting == "weight decay":
            model.optimizer.weight_decay = 0.5
        else:
            next(layer for layer in model.layers if isinstance(layer, L.BatchNormalization)).momentum = 0.1
        model.make_train_function(force=True)
        model.fit(*data(), batch_size=24, epochs=2, verbose=0)
        return model.get_weights()

    assert_close(weights(True), weights(False))


class Own(optimizers.SGD):
    """Counts its updates in Python, prints, and assigns a variable of the host."""

    order: list[str]

    def build(self, variables):
        super().build(variables)
        self.updates = self.add_variable([], name="updates", initializer="zeros")

    def update_step(self, gradient, variable, learning_rate):
        self.order = [*getattr(self, "order", []), variable.name]
        super().update_step(gradient, variable, learning_rate)
        tf.print("updates", self.updates, output_stream="file:///dev/null")
        self.assign_add(self.updates, 1.0)


def test_an_optimizer_of_ones_own_updates_operation_by_operation():
    """Its code runs once for each weight, in their order, and may do what XLA cannot."""
    values, _, model = trained(lambda: Own(0.1))
    assert float(model.optimizer.updates.numpy()) == 6 * len(model.trainable_variables)
    names = [v.value.name for v in model.trainable_variables]
    assert model.optimizer.order[: len(names)] == names
    assert_close(values[: len(model.variables)], trained(lambda: optimizers.SGD(0.1))[0][: len(model.variables)])


def test_so_it_does_with_a_schedule_of_ones_own():
    class Printed(optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            tf.print("step", step, output_stream="file:///dev/null")
            return 0.1

    decayed = {"weight_decay": 0.1}
    values, *_ = trained(lambda: optimizers.SGD(Printed(), **decayed))
    wanted = trained(lambda: optimizers.SGD(0.1, **decayed))[0]
    for found, plain in zip(values[:5], wanted[:5], strict=True):
        np.testing.assert_allclose(found, plain, rtol=2e-5, atol=2e-6)


def test_slices_of_unknown_shape():
    """`tf.IndexedSlices` may come without its `dense_shape`."""

    def weights(jit_compile):
        strategy, model = compiled_model(lambda: optimizers.SGD(0.1), jit_compile)
        x, y = (tf.constant(part) for part in data(8))

        @tf.function
        def step():
            def replica():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                first, *rest = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply([tf.IndexedSlices(first.values, first.indices), *rest], model.trainable_variables)

            strategy.run(replica)

        strategy.place(model)
        step()
        return model.get_weights()

    assert_close(weights(True), weights(False))


def test_an_error_of_an_optimizer_is_its_own():
    class Broken(optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            raise RuntimeError("no step today")

    _, model = compiled_model(lambda: Broken(0.1))
    with pytest.raises(RuntimeError, match="no step today"):
        model.fit(*data(8), verbose=0)


def in_a_step(body, note=lambda _: None):
    """What `body` makes of 1.0 as a program, or operation by operation."""

    @tf.function(autograph=False)
    def step(x):
        return updates.run(tf.config.list_logical_devices("CPU")[1].name, body, [x], compiled=True, note=note)

    return float(step(tf.constant(1.0)))


def test_what_cannot_be_a_program_runs_operation_by_operation_and_says_why():
    there = tf.Variable(2.0)
    calls, notes = [], []

    def body(x):
        calls.append(1)
        return x + there

    assert in_a_step(body, notes.append) == 3
    assert len(calls) == 2
    assert notes == ["runs `body` operation by operation: a variable of another device is used in it"]


def test_an_error_of_the_function_is_raised_and_not_tried_again():
    calls = []

    def body(x):
        calls.append(1)
        raise TypeError("a fault of the function")

    with pytest.raises(TypeError, match="a fault of the function"):
        in_a_step(body)
    assert len(calls) == 1


def test_an_error_of_the_library_is_raised(monkeypatch):
    def fails(*_):
        raise TypeError("a fault of the library")

    monkeypatch.setattr(compat, "uses_only", fails)
    with pytest.raises(TypeError, match="a fault of the library"):
        in_a_step(lambda x: x + 1)


def test_the_plan_says_which_updates_are_no_program(monkeypatch):
    monkeypatch.setattr(compat, "uses_only", lambda *_: False)
    strategy, model = compiled_model(lambda: optimizers.SGD(0.1), batch_norm=True)
    model.fit(*data(8), batch_size=8, verbose=0)
    why = "operation by operation: a variable of another device is used in it"
    assert strategy.plan(model).note.splitlines() == [
        f"stage 0 runs `weight_updates` {why}",
        f"stage 1 runs `moving_averages` {why}",
        f"stage 1 runs `weight_updates` {why}",
    ]


def test_an_error_in_an_update_of_keras_is_raised(monkeypatch):
    def fails(*_):
        raise TypeError("a fault of an update")

    monkeypatch.setattr(optimizers.SGD, "update_step", fails)
    _, model = compiled_model(lambda: optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="a fault of an update"):
        model.fit(*data(8), verbose=0)


def test_slots_of_other_shapes_are_beside_their_weights():
    _, model = compiled_model(lambda: optimizers.Adafactor(0.01))
    model.fit(*data(8), verbose=0)
    for weight, *slots in zip(
        model.trainable_variables, *(getattr(model.optimizer, n) for n in ("_r", "_c", "_v")), strict=True
    ):
        assert {slot.value.device for slot in slots} == {weight.value.device}


def test_a_step_whose_slots_are_made_inside_it_is_lifted():
    """A custom loop builds its optimizer in the first trace; the slots' initial values must not wait for data."""
    strategy, model = compiled_model(lambda: optimizers.Adam(1e-3), jit_compile=False)
    optimizer = model.optimizer

    @tf.function
    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(replica, (x, y))

    strategy.place(model)
    x, y = data(8)
    concrete = step.get_concrete_function(tf.constant(x), tf.constant(y))
    before = model.get_weights()
    concrete(tf.constant(x), tf.constant(y))
    assert any(np.abs(a - b).max() > 0 for a, b in zip(before, model.get_weights(), strict=True))
