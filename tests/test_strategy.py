"""The strategy as a `tf.distribute.Strategy`: what TensorFlow's own one-device strategy does, it does."""

import gc
import re
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, normal

import tf_gpipe
from tf_gpipe import compat
from tf_gpipe.errors import GPipeError, ModelError

X, Y = normal(8, 4), normal(8, 1, seed=1)


def gpipe(**arguments) -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(**{"num_stages": 2, "num_micro_batches": 2, **arguments})


@pytest.fixture(params=["gpipe", "one_device"])
def strategy(request):
    """Ours, and TensorFlow's that behaves as ours should."""
    return gpipe() if request.param == "gpipe" else tf.distribute.OneDeviceStrategy("/CPU:0")


def two_layers(seed: int = 0) -> keras.Sequential:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])


def compiled(strategy: tf.distribute.Strategy, seed: int = 0) -> keras.Sequential:
    with strategy.scope():
        model = two_layers(seed)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def trained_plainly(steps: int = 1, seed: int = 0) -> keras.Sequential:
    model = two_layers(seed)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=8, epochs=steps, verbose=0)
    return model


def no_route_is_open() -> bool:
    return "__call__" not in vars(keras.Model)


# --- what it is ---


def test_it_is_a_strategy_with_one_replica(strategy):
    assert isinstance(strategy, tf.distribute.Strategy)
    assert strategy.num_replicas_in_sync == 1
    assert isinstance(strategy.extended, tf.distribute.StrategyExtended)
    assert strategy.cluster_resolver is None
    assert strategy.extended.experimental_require_static_shapes is False
    assert strategy.extended.should_checkpoint
    assert len(strategy.extended.worker_devices) == len(strategy.extended.parameter_devices) == 1


def test_values_are_on_the_last_stage():
    strategy = gpipe(devices=["/CPU:3", "/CPU:5"])
    assert strategy.extended.worker_devices == (strategy.devices[-1],)
    assert strategy.run(lambda: tf.ones([2]) + 1.0).device == strategy.devices[-1]


def test_properties():
    strategy = gpipe(num_stages=3, num_micro_batches=5, remat="always")
    assert (strategy.num_stages, strategy.num_micro_batches, strategy.remat) == (3, 5, "always")
    assert [device[-5:] for device in strategy.devices] == ["CPU:0", "CPU:1", "CPU:2"]
    assert gpipe(num_micro_batches=None).num_micro_batches == 8
    assert tf_gpipe.GPipeStrategy().num_stages == 8


def test_repr_can_be_evaluated_to_the_same_strategy():
    made = gpipe(num_micro_batches=3, remat="never", partition=[1, 1], devices=["/CPU:4", "/CPU:2"])
    text = repr(made)
    assert text.startswith("GPipeStrategy(num_stages=2, num_micro_batches=3, devices=['/job:localhost/")
    assert "CPU:4', " in text
    assert "partition=[1, 1], remat='never', jit_compile=False" in text
    again = eval(text, {"GPipeStrategy": tf_gpipe.GPipeStrategy})
    assert repr(again) == text


# --- scope ---


def test_inside_scope_it_is_the_strategy(strategy):
    assert not tf.distribute.has_strategy()
    with strategy.scope() as entered:
        assert entered is strategy
        assert tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_replica_context() is None
    assert not tf.distribute.has_strategy()
    assert tf.distribute.get_strategy() is not strategy
    assert not tf.distribute.in_cross_replica_context()


def test_scope_is_nested_and_entered_again(strategy):
    with strategy.scope():
        with strategy.scope() as inner:
            assert inner is strategy
        assert tf.distribute.get_strategy() is strategy, "leaving the inner scope leaves the outer one open"
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
    assert not tf.distribute.has_strategy()


def test_the_scope_of_another_strategy_is_refused(strategy):
    other = gpipe()
    with strategy.scope():
        with pytest.raises(RuntimeError, match=r"Expected one strategy at a time"), other.scope():
            pass
        assert tf.distribute.get_strategy() is strategy
    with other.scope():
        assert tf.distribute.get_strategy() is other


def test_scope_is_left_by_an_exception(strategy):
    with pytest.raises(KeyError, match="mine"), strategy.scope():
        raise KeyError("mine")
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy


def test_experimental_set_strategy(strategy):
    tf.distribute.experimental_set_strategy(strategy)
    try:
        assert tf.distribute.get_strategy() is strategy
        with strategy.scope():
            assert tf.distribute.get_strategy() is strategy
        model = two_layers()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=8, verbose=0)
    finally:
        tf.distribute.experimental_set_strategy(None)
    assert not tf.distribute.has_strategy()
    assert largest_difference(model, trained_plainly()) <= 1e-6


def test_a_model_belongs_to_the_strategy_of_its_scope(strategy):
    model = compiled(strategy)
    assert model.distribute_strategy is strategy
    assert two_layers().distribute_strategy is not strategy
    assert model.jit_compile is False


# --- variables ---


def test_a_variable_made_in_scope_is_a_plain_variable(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], name="mine")
    assert type(variable) is type(tf.Variable(0.0))
    assert variable.name == "mine:0"
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert variable.device.endswith("CPU:0")
    assert strategy.run(lambda: variable.assign_add([1.0, 1.0])).numpy().tolist() == [2.0, 3.0]


def test_a_variable_is_colocated_with_another(strategy):
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        of_another = tf.Variable(1.0)
    with strategy.scope():
        first = tf.Variable(1.0)
        if isinstance(strategy, tf_gpipe.GPipeStrategy):
            compat.move_variable(first, "/CPU:3")
        with strategy.extended.colocate_vars_with(first):
            assert tf.Variable(2.0).device == first.device
        for stranger in ("not a variable", of_another):
            with pytest.raises(ValueError, match="must only be passed a variable created in this"):
                strategy.extended.colocate_vars_with(stranger).__enter__()
        assert tf.Variable(3.0).device.endswith("CPU:0")


def test_a_variable_is_colocated_with_one_of_no_strategy():
    outside = tf.Variable(1.0)
    compat.move_variable(outside, "/CPU:3")
    with tf_gpipe.GPipeStrategy(2).scope() as strategy, strategy.extended.colocate_vars_with(outside):
        assert tf.Variable(2.0).device == outside.device


def test_variables_are_created_in_scope(strategy):
    with strategy.scope():
        inside = tf.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(inside)


def test_update_runs_where_the_variable_is():
    strategy = gpipe()
    with tf.device("/CPU:3"):
        variable = tf.Variable(1.0)

    def add(to, amount, times=1.0):
        return to.assign_add(amount * times), tf.identity(2.0) + 1.0

    result, where = strategy.extended.update(variable, add, args=(2.0,), kwargs={"times": 3.0})
    assert float(variable) == float(result) == 7.0
    assert where.device.endswith("CPU:3")
    assert strategy.extended.worker_devices == (strategy.devices[-1],), "and afterwards as before"
    with pytest.raises(KeyError):
        strategy.extended.update(variable, lambda _: {}["x"])
    assert strategy.extended.worker_devices == (strategy.devices[-1],)


def test_update_returns_what_the_function_returns(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
        grouped = strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(2.0,))
        each = strategy.extended.update(variable, lambda v: v.read_value(), group=False)
    assert float(grouped) == 3.0
    assert [float(value) for value in each] == [3.0]
    assert isinstance(each, tuple)


# --- run ---


def test_run_hands_on_arguments_and_structures(strategy):
    def double(x, *more, scale=1.0):
        return {"x": tf.nest.map_structure(lambda t: t * scale, x), "more": [more, "text", None]}

    given = {"a": (tf.constant(1.0), [tf.constant(2.0)]), "b": tf.constant([3.0])}
    result = strategy.run(double, (given, 4, tf.constant(5)), {"scale": tf.constant(2.0)})
    assert tf.nest.map_structure(lambda t: t.numpy().tolist(), result["x"]) == {"a": (2.0, [4.0]), "b": [6.0]}
    assert result["more"][0][0] == 4
    assert int(result["more"][0][1]) == 5
    assert result["more"][1:] == ["text", None]
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda x: x, kwargs={"x": 3}) == 3


def test_inside_run_there_is_a_replica_context(strategy):
    def look():
        context = tf.distribute.get_replica_context()
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.has_strategy()
        assert not tf.distribute.in_cross_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == 1
        assert int(context.replica_id_in_sync_group) == 0
        return context

    context = strategy.run(look)
    assert isinstance(context, tf.distribute.ReplicaContext)
    assert context.devices == strategy.extended.worker_devices
    assert not tf.distribute.has_strategy()
    with strategy.scope():
        strategy.run(look)
        assert tf.distribute.in_cross_replica_context()


def test_all_reduce_of_one_replica_is_the_value(strategy):
    def reduce_all(x):
        context = tf.distribute.get_replica_context()
        nested = context.all_reduce(tf.distribute.ReduceOp.MEAN, {"a": x, "b": [x + 1.0]})
        return context.all_reduce("SUM", x), context.all_reduce("MEAN", x), nested

    total, mean, nested = strategy.run(reduce_all, (tf.constant([1.0, 2.0]),))
    assert total.numpy().tolist() == mean.numpy().tolist() == nested["a"].numpy().tolist() == [1.0, 2.0]
    assert nested["b"][0].numpy().tolist() == [2.0, 3.0]


def test_all_gather_of_one_replica_is_the_value(strategy):
    def gather_all(x):
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    assert tf.function(lambda: strategy.run(gather_all, (tf.constant([[1.0], [2.0]]),)))().shape == (2, 1)


def test_gradients_go_through_all_reduce(strategy):
    @tf.function
    def step(x):
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.distribute.get_replica_context().all_reduce("SUM", x * x)
            return tape.gradient(y, x)

        return strategy.run(gradient, (x,))

    assert float(step(tf.constant(3.0))) == 6.0


def test_merge_call_enters_the_cross_replica_context(strategy):
    def merged(given, x, offset):
        assert given is strategy
        assert tf.distribute.in_cross_replica_context()
        return x + offset

    def replica(x):
        return tf.distribute.get_replica_context().merge_call(merged, args=(x,), kwargs={"offset": 2.0})

    assert float(strategy.run(replica, (tf.constant(1.0),))) == 3.0


def test_run_inside_a_function_is_traced_once(strategy):
    traces = []

    @tf.function
    def step(x):
        traces.append(1)
        return strategy.run(lambda x: x + 1.0, (x,))

    assert [float(step(tf.constant(x))) for x in (1.0, 2.0)] == [2.0, 3.0]
    assert len(traces) == 1


def test_run_inside_run_is_refused_as_by_tensorflow(strategy):
    with pytest.raises(RuntimeError, match="cross-replica context|Received: `run` of a GPipeStrategy inside `run`"):
        strategy.run(lambda: strategy.run(lambda: 1))
    assert no_route_is_open()
    assert not tf.distribute.has_strategy()


def test_an_exception_in_run_leaves_everything_as_it_was(strategy):
    model = compiled(strategy)

    def fail(x):
        model(x)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            strategy.run(fail, (X,))
        assert no_route_is_open()
        assert "call" not in vars(model)
        assert not tf.distribute.has_strategy()
    np.testing.assert_allclose(strategy.run(model, (X,)), model(X), rtol=0, atol=1e-6)


# --- reduce, gather, local results ---


def test_reduce(strategy):
    value = tf.constant([[1.0, 2.0], [3.0, 6.0]])
    for total in ("SUM", "sum", tf.distribute.ReduceOp.SUM):
        assert strategy.reduce(total, value, axis=None).numpy().tolist() == value.numpy().tolist()
        assert strategy.reduce(total, value, axis=0).numpy().tolist() == [4.0, 8.0]
        assert strategy.reduce(total, value, axis=1).numpy().tolist() == [3.0, 9.0]
    for mean in ("MEAN", tf.distribute.ReduceOp.MEAN):
        assert strategy.reduce(mean, value, axis=None).numpy().tolist() == value.numpy().tolist()
        assert strategy.reduce(mean, value, axis=0).numpy().tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        strategy.reduce("MAX", value, axis=None)


def test_reduce_of_what_run_returns(strategy):
    losses = strategy.run(lambda x: tf.reduce_sum(x, axis=1), (tf.ones([4, 3]),))
    assert float(strategy.reduce("MEAN", losses, axis=0)) == 3.0
    in_graph = tf.function(lambda x: strategy.reduce("SUM", strategy.run(tf.square, (x,)), axis=0))
    assert float(in_graph(tf.constant([1.0, 2.0]))) == 5.0


def test_gather(strategy):
    value = tf.constant([[1.0, 2.0]])
    assert strategy.gather(value, axis=0).numpy().tolist() == [[1.0, 2.0]]
    assert strategy.gather(strategy.run(lambda: value), axis=1).numpy().tolist() == [[1.0, 2.0]]


def test_local_results(strategy):
    value = tf.constant(1.0)
    results = strategy.experimental_local_results(value)
    assert isinstance(results, tuple)
    assert results[0] is value
    assert len(results) == 1


def test_distribute_values_from_function(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([context.replica_id_in_sync_group, context.num_replicas_in_sync])
    )
    assert strategy.experimental_local_results(value)[0].numpy().tolist() == [0, 1]


# --- datasets ---


def numbers(count: int = 10, batch: int = 4) -> tf.data.Dataset:
    return tf.data.Dataset.range(count).batch(batch)


def test_distribute_dataset_changes_nothing(strategy):
    data = strategy.experimental_distribute_dataset(numbers())
    assert isinstance(data, tf.distribute.DistributedDataset)
    assert data.element_spec == numbers().element_spec
    assert [batch.numpy().tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.shape[0] for batch in data] == [4, 4, 2], "a second pass begins anew"
    iterator = iter(data)
    assert next(iterator).numpy().tolist() == [0, 1, 2, 3]
    assert iterator.get_next().numpy().tolist() == [4, 5, 6, 7]


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
def test_a_distributed_dataset_is_iterated_inside_a_function(strategy):
    data = strategy.experimental_distribute_dataset(numbers())

    @tf.function
    def loop():
        total = tf.constant(0, tf.int64)
        for batch in data:
            total += tf.reduce_sum(strategy.run(lambda x: x + 1, (batch,)))
        return total

    @tf.function
    def one(iterator):
        return strategy.run(tf.reduce_sum, (next(iterator),))

    assert int(loop()) == 45 + 10
    iterator = iter(data)
    assert [int(one(iterator)) for _ in range(3)] == [6, 22, 17]
    with pytest.raises(tf.errors.OutOfRangeError):
        one(iterator)


def test_distribute_datasets_from_function(strategy):
    contexts = []

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append(context)
        data = tf.data.Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(4))

    data = strategy.distribute_datasets_from_function(make)
    assert isinstance(data, tf.distribute.DistributedDataset)
    assert [batch.numpy().tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in contexts] == [(1, 0, 1)]


def test_a_custom_loop_over_a_distributed_dataset_equals_plain_training():
    strategy = gpipe()
    with strategy.scope():
        model = two_layers()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    strategy.place(model)

    @tf.function
    def step(batch):
        def train(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("MEAN", strategy.run(train, batch), axis=None)

    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(dataset())]
    plain = two_layers()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    expected = [plain.train_on_batch(*batch) for batch in dataset()]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert largest_difference(model, plain) <= 1e-6


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)


def test_fit_takes_a_dataset_that_is_already_distributed(strategy):
    model = compiled(strategy)
    model.fit(strategy.experimental_distribute_dataset(dataset()), epochs=2, shuffle=False, verbose=0)
    plain = two_layers()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.fit(dataset(), epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == 6
    assert largest_difference(model, plain) <= 1e-6


# --- several models, several strategies ---


def test_two_models_under_one_strategy_do_not_meet():
    strategy = gpipe()
    first, second = compiled(strategy, seed=1), compiled(strategy, seed=2)
    for _ in range(2):
        first.fit(X, Y, batch_size=8, verbose=0)
        second.fit(X, Y, batch_size=8, verbose=0)
    assert largest_difference(first, trained_plainly(2, seed=1)) <= 1e-6
    assert largest_difference(second, trained_plainly(2, seed=2)) <= 1e-6
    assert largest_difference(first, second) > 0.1


def test_two_strategies_in_one_process():
    first = compiled(gpipe(devices=["/CPU:1", "/CPU:2"]), seed=1)
    second = compiled(gpipe(devices=["/CPU:4", "/CPU:3"], num_micro_batches=3), seed=2)
    for _ in range(2):
        first.fit(X, Y, batch_size=8, verbose=0)
        second.fit(X, Y, batch_size=8, verbose=0)
    assert [v.value.device[-5:] for v in first.weights[::2]] == ["CPU:1", "CPU:2"]
    assert [v.value.device[-5:] for v in second.weights[::2]] == ["CPU:4", "CPU:3"]
    assert largest_difference(first, trained_plainly(2, seed=1)) <= 1e-6
    assert largest_difference(second, trained_plainly(2, seed=2)) <= 1e-6


def test_a_model_of_another_strategy_is_a_plain_model_inside_run():
    mine, other, plain = compiled(gpipe()), compiled(gpipe()), two_layers()
    expected = plain(X).numpy()
    strategy = mine.distribute_strategy
    with pytest.warns(UserWarning, match="was made outside the scope") as told:
        outputs = [strategy.run(model, (X,)) for model in (mine, other, plain)]
    assert len(told) == 1, "of the compiled one"
    for output in outputs:
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)
    assert [v.value.device[-5:] for v in mine.weights[::2]] == ["CPU:0", "CPU:1"]
    assert [v.value.device[-5:] for v in other.weights[::2]] == ["CPU:0", "CPU:0"]


def test_outside_run_a_model_is_a_plain_model():
    model = compiled(gpipe())
    model(X)
    assert [v.value.device[-5:] for v in model.weights[::2]] == ["CPU:0", "CPU:0"]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X) - Y))
    assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))


# --- threads ---


def in_threads(*works) -> None:
    """Runs the works at once and raises what one of them raised."""
    start, errors = threading.Barrier(len(works)), []

    def run(work):
        try:
            start.wait(timeout=30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_two_threads_run_different_models_at_once():
    strategy = gpipe()
    models = [compiled(strategy, seed) for seed in (1, 2)]
    expected = [model(X).numpy() for model in models]

    def work(model, wanted):
        def run():
            for _ in range(10):
                np.testing.assert_allclose(strategy.run(model, (X,)), wanted, rtol=0, atol=1e-6)

        return run

    in_threads(*(work(model, wanted) for model, wanted in zip(models, expected, strict=True)))
    assert no_route_is_open()
    assert not tf.distribute.has_strategy()
    assert all("call" not in vars(model) for model in models)


def test_two_threads_run_the_same_model_at_once():
    strategy = gpipe()
    model = compiled(strategy)
    expected = model(X).numpy()

    def run():
        for _ in range(20):
            np.testing.assert_allclose(strategy.run(model, (X,)), expected, rtol=0, atol=1e-6)

    in_threads(run, run, run)
    assert no_route_is_open()
    assert "call" not in vars(model), "afterwards it is a plain model again"
    np.testing.assert_array_equal(model(X), expected)


def test_two_threads_train_different_models_at_once():
    strategies = [gpipe(), gpipe(devices=["/CPU:2", "/CPU:3"])]
    models = [compiled(strategy, seed) for seed, strategy in enumerate(strategies)]
    in_threads(*(lambda m=model: m.fit(X, Y, batch_size=8, epochs=3, verbose=0) for model in models))
    assert no_route_is_open()
    for seed, model in enumerate(models):
        assert largest_difference(model, trained_plainly(3, seed)) <= 1e-6


def test_an_exception_in_one_thread_does_not_disturb_another():
    strategy = gpipe()
    model = compiled(strategy)
    expected = model(X).numpy()

    def fail():
        for _ in range(20):
            with pytest.raises(KeyError):
                strategy.run(lambda: {}["x"])

    def run():
        for _ in range(20):
            np.testing.assert_allclose(strategy.run(model, (X,)), expected, rtol=0, atol=1e-6)

    in_threads(fail, run)
    assert no_route_is_open()


# --- life and death ---


def pipelines_of(model: keras.Model) -> list[weakref.ref]:
    """The pipelines of a model, found as the objects they are."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o).__name__ == "Pipeline" and o.plan.graph.model is model]
    return [weakref.ref(pipeline) for pipeline in found]


def test_a_model_that_is_gone_frees_its_pipelines():
    strategy = gpipe()
    model = compiled(strategy)
    model.fit(X, Y, batch_size=8, verbose=0)
    stays = compiled(strategy)
    stays.fit(X, Y, batch_size=8, verbose=0)
    pipelines, dies = pipelines_of(model), weakref.ref(model)
    weight = weakref.ref(model.weights[0].value)
    assert len(pipelines) == 1
    del model
    keras.backend.clear_session()
    gc.collect()
    assert dies() is None
    assert pipelines[0]() is None
    assert weight() is None
    assert len(pipelines_of(stays)) == 1


def test_a_strategy_without_models_is_freed():
    strategy = gpipe()
    model = compiled(strategy)
    model.fit(X, Y, batch_size=8, verbose=0)
    dies = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert dies() is not None, "its model needs it"
    model.fit(X, Y, batch_size=8, verbose=0)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert dies() is None


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


def test_a_keyboard_interrupt_leaves_the_model_usable():
    model = compiled(gpipe())
    plain = two_layers()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    for m in (model, plain):
        with pytest.raises(KeyboardInterrupt):
            m.fit(X, Y, batch_size=2, shuffle=False, callbacks=[Interrupt()], verbose=0)
        assert int(m.optimizer.iterations) == 2
    assert no_route_is_open()
    assert not tf.distribute.has_strategy()
    assert "call" not in vars(model)
    assert largest_difference(model, plain) <= 1e-6
    for m in (model, plain):
        m.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    assert largest_difference(model, plain) <= 1e-6


# --- plan and place ---


def test_place_moves_weights_and_slots_and_returns_the_plan():
    strategy = gpipe(devices=["/CPU:6", "/CPU:2"])
    with strategy.scope():
        model = two_layers()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    plan = strategy.place(model)
    assert [stage.device for stage in plan.stages] == strategy.devices
    assert str(strategy.plan(model)) == str(plan)
    assert [v.value.device[-5:] for v in model.weights] == ["CPU:6", "CPU:6", "CPU:2", "CPU:2"]
    slots = [v for v in model.optimizer.variables if "dense" in v.path]
    assert sorted(v.value.device[-5:] for v in slots) == ["CPU:2"] * 4 + ["CPU:6"] * 4
    handles = [v.value.handle for v in model.weights]
    strategy.place(model)
    strategy.run(model, (X,))
    assert all(v.value.handle is handle for v, handle in zip(model.weights, handles, strict=True)), "placed once"


def test_planning_moves_nothing():
    strategy = gpipe()
    model = compiled(strategy)
    plan = strategy.plan(model)
    assert [stage.operations for stage in plan.stages] == [[layer.name] for layer in model.layers]
    assert [v.value.device[-5:] for v in model.weights] == ["CPU:0"] * 4


@pytest.mark.parametrize("what", [None, 3, "model", keras.layers.Dense(1), keras.losses.MeanSquaredError()])
def test_plan_takes_models_of_keras_only(what):
    with pytest.raises(ModelError, match=r"Expected a model of Keras 3 \(keras\.Model\)\. Received: "):
        gpipe().plan(what)


def test_an_unbuilt_model_has_no_plan():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    with pytest.raises(ModelError, match="Expected a built model"):
        gpipe().plan(model)


def test_a_new_subclassed_model_has_a_plan_for_its_inputs():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(4, "relu"), keras.layers.Dense(2)

        def call(self, x):
            return self.last(self.first(x))

    x, y = np.ones([8, 3], "float32"), np.ones([8, 2], "float32")
    strategy = gpipe()
    with strategy.scope():
        model = Two()
        model.compile("sgd", "mse")
    plan = strategy.plan(model, x)
    assert sum(len(stage.operations) for stage in plan.stages) == 2
    assert "made outside" not in str(plan)
    model.fit(x, y, verbose=0)
    assert [stage.operations for stage in strategy.plan(model).stages] == [stage.operations for stage in plan.stages]


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "`num_stages` to be an int of at least 1. Received: num_stages=0"),
        ({"num_stages": 2.0}, "`num_stages` to be an int"),
        ({"num_stages": True}, "`num_stages` to be an int"),
        ({"num_micro_batches": 0}, "`num_micro_batches` to be an int of at least 1"),
        ({"num_micro_batches": "4"}, "Received: num_micro_batches='4'"),
        ({"remat": "sometimes"}, '`remat` to be "always" or "except_last" or "never". Received: remat='),
        ({"remat": None}, "`remat` to be"),
        ({"schedule": "2f2b"}, "`schedule` to be"),
        ({"partition": "parameters"}, "`partition` to be"),
        ({"jit_compile": 1}, '`jit_compile` to be True, False or "auto". Received: 1'),
        ({"num_replicas": 0}, "num_replicas"),
        ({"devices": "/CPU:0"}, "`devices` to be a list of device names"),
    ],
)
def test_an_argument_that_is_wrong_is_refused_at_once(arguments, message):
    with pytest.raises(GPipeError, match=re.escape(message)):
        gpipe(**arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        gpipe(**arguments)


def test_xla_for_the_whole_model_is_refused():
    strategy = gpipe()
    with strategy.scope():
        model = two_layers()
        model.compile("sgd", "mse", jit_compile=True)
    for call in (lambda: model.fit(X, Y, verbose=0), lambda: strategy.plan(model), lambda: model.evaluate(X, Y)):
        with pytest.raises(ValueError, match="Expected a model compiled without XLA"):
            call()
