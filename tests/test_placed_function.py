"""Calls of stage functions: results, what goes into them, and their order with assignments."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe
from tf_gpipe import placed_function
from tf_gpipe.placed_function import PlacedFunction, sharing_handles

CPU_2 = "/job:localhost/replica:0/task:0/device:CPU:2"


def placed(body, *specs, device=CPU_2):
    """A function on a device, traced."""
    function = tf.function(body, autograph=False, input_signature=specs)
    return PlacedFunction(function.get_concrete_function(), device)


@pytest.mark.parametrize("device", [CPU_2, "/device:GPU:0"])
def test_a_placed_function_gives_what_the_function_gives(device):
    with tf.device("/CPU:2"):
        weights = [tf.Variable(3.0), tf.Variable(0.5)]
    mask = tf.constant([1.0, 0.0])
    function = placed(lambda x: [x * weights[0] + weights[1], x * mask], tf.TensorSpec([2]), device=device)
    assert function.graph.captures

    @tf.function
    def twice(x):
        return function(function(x)[0])

    for results in (twice(tf.constant([1.0, 2.0])), function(*function(tf.constant([1.0, 2.0]))[:1])):
        assert [r.numpy().tolist() for r in results] == [[11.0, 20.0], [3.5, 0.0]]


def test_calls_read_variables_as_they_are_at_that_place():
    with tf.device("/CPU:2"):
        weight = tf.Variable(1.0)
    function = placed(lambda: [tf.reduce_sum(tf.fill([200_000], weight))])  # long enough to be overtaken

    @tf.function
    def step():
        sums = []
        for _ in range(5):
            with sharing_handles():
                sums += [*function(), *function()]
            weight.assign_add(1.0)
        return sums

    for first in (1, 6, 11):
        assert [float(s) / 200_000 for s in step()] == [float(first + i // 2) for i in range(10)]


def test_what_a_function_assigns_keeps_its_order():
    with tf.device("/CPU:2"):
        weight, total = tf.Variable(2.0), tf.Variable(0.0)
    function = placed(lambda x: [total.assign_add(x * weight)], tf.TensorSpec([]))

    @tf.function
    def step():
        with sharing_handles():
            return [*function(1.0), total.read_value(), *function(2.0), total.read_value()]

    assert [float(value) for value in step()] == [2.0, 2.0, 6.0, 6.0]


def test_an_error_while_calls_are_made_leaves_nothing_behind():
    function = placed(lambda x: [x + 1.0], tf.TensorSpec([2]))

    @tf.function(autograph=False)
    def step(x):
        with contextlib.suppress(KeyError), sharing_handles():
            raise KeyError(function(x))
        return function(x)

    assert step(tf.constant([1.0, 2.0]))[0].numpy().tolist() == [2.0, 3.0]
    assert not placed_function._SHARED


def graph_of_a_step(layers, micro_batches, remat):
    """The graph of a training step of two stages of dense layers."""
    strategy = tf_gpipe.GPipeStrategy(2, micro_batches, remat=remat)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), *[keras.layers.Dense(4) for _ in range(layers)]])
        model.compile("sgd", "mse", jit_compile=False)
    strategy.place(model)
    x = tf.constant(np.ones([32, 4], "float32"))

    @tf.function
    def train(x):
        return strategy.run(model.train_step, ((x, x),))

    return train.get_concrete_function(x).graph


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_what_goes_into_a_task_does_not_grow_with_the_layers(remat):
    counts = []
    for layers in (4, 12):
        tasks = [op for op in graph_of_a_step(layers, 4, remat).get_operations() if op.type == "RemoteCall"]
        assert len(tasks) == 2 * 2 * 4
        handles = [[t for t in op.inputs if t.dtype == tf.resource] for op in tasks]
        assert [[t.op.type for t in found] for found in handles] == [["Pack"]] * len(tasks)
        counts.append(sorted(len(op.inputs) for op in tasks if "forward" in op.name))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_what_an_update_waits_for_does_not_grow_with_the_micro_batches(remat):
    waits = []
    for micro_batches in (4, 16):
        operations = graph_of_a_step(4, micro_batches, remat).get_operations()
        updates = [op for op in operations if op.type == "AssignSubVariableOp"]
        assert len(updates) == 2 * 4
        waits.append([len(op.control_inputs) for op in updates])
    assert waits[0] == waits[1]


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_assignments_in_a_step_come_before_and_after_all_tasks(remat):
    graph = graph_of_a_step(4, 4, remat)
    tasks = {op for op in graph.get_operations() if op.type == "RemoteCall"}
    for update in (op for op in graph.get_operations() if op.type == "AssignSubVariableOp"):
        before = ancestors(update)
        readers = {op for op in tasks if any(update.inputs[0] is t for t in op_handles(op))}
        assert len(readers) >= 4, "a bias is not read again where activations are kept"
        assert readers <= before


def op_handles(task):
    """The handles that a task gets as one tensor."""
    return next(t.op.inputs for t in task.inputs if t.dtype == tf.resource)


def ancestors(op):
    """All that an operation waits for."""
    found, waiting = set(), [op]
    while waiting:
        for before in (*(t.op for t in waiting[-1].inputs), *waiting.pop().control_inputs):
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


@pytest.mark.parametrize("kind", ["jacobian", "vectorized_map"])
def test_an_assignment_waits_for_the_calls_of_a_vectorised_loop(kind):
    """Such a loop is made anew from its body; what the result does not need is left behind."""
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), *[keras.layers.Dense(8) for _ in range(4)]])
        model.compile("sgd", "mse", jit_compile=False)
    strategy.place(model)

    def results(x):
        if kind == "vectorized_map":
            return tf.vectorized_map(lambda row: model(row[None], training=False), x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(model(x, training=True), 0)
        return tape.jacobian(total, x)

    @tf.function(autograph=False)
    def step(x):
        found = strategy.run(results, (x,))
        for variable in model.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        return found

    x = tf.constant(np.random.default_rng(0).normal(size=[4, 8]), tf.float32)
    operations = step.get_concrete_function(x).graph.get_operations()
    loops = {op for op in operations if "While" in op.type}
    assert len(loops) == {"jacobian": 2 * 2, "vectorized_map": 2}[kind]  # of one row each, which is not split
    found = set()
    for op in (op for op in operations if op.type == "AssignVariableOp"):
        reading = {loop for loop in loops if any(op.inputs[0] is t for t in loop.inputs)}
        assert reading <= ancestors(op)
        found |= reading
    assert found == loops
    expected = strategy.run(tf.function(results), (x,))
    np.testing.assert_allclose(step(x), expected, rtol=1e-5)
