"""Every private name of TensorFlow and Keras that the library uses is there, and no other file uses one."""

import ast
import contextlib
import functools
import inspect
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.layers.layer import Layer
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import resource_variable_ops

import tf_gpipe
from tf_gpipe import compat
from tf_gpipe.errors import ModelError

PACKAGE = Path(tf_gpipe.__file__).parent
MODULES = sorted(PACKAGE.glob("*.py"))


def two_layers() -> keras.Sequential:
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last")])


def parameters_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# --- Keras graphs ---


def test_graph_of_sequential_and_functional():
    model = two_layers()
    assert compat.graph_of(model) is model._functional
    assert isinstance(model._functional, compat.Functional)
    x = keras.Input([4])
    functional = keras.Model(x, keras.layers.Dense(1)(x))
    assert compat.graph_of(functional) is functional


def test_graph_of_a_model_that_has_none_yet():
    assert compat.graph_of(keras.Sequential([keras.layers.Dense(1)])) is None


def test_graph_of_an_overridden_call_is_none():
    class OwnCall(keras.Model):
        def call(self, x):
            return x

    class OwnSequential(keras.Sequential):
        def call(self, x, training=None):
            return super().call(x) + 1.0

    class OwnFunctional(keras.Model):
        def __init__(self):
            x = keras.Input([4])
            super().__init__(x, keras.layers.Dense(1)(x))

        def call(self, x, training=None):
            return super().call(x) + 1.0

    functional = OwnFunctional()
    assert isinstance(functional, compat.Functional)
    for model in (OwnCall(), OwnSequential([keras.Input([4]), keras.layers.Dense(1)]), functional):
        assert compat.graph_of(model) is None
    assert compat.graph_of(keras.layers.Dense(1)) is None


def test_graph_of_a_subclass_that_keeps_the_call_is_its_graph():
    class Named(keras.Model):
        pass

    x = keras.Input([4])
    model = Named(x, keras.layers.Dense(1)(x))
    assert compat.graph_of(model) is model


def test_nodes_in_order():
    x = keras.Input([4])
    a = keras.layers.Dense(3, name="a")(x)
    y = keras.layers.Add(name="sum")([a, keras.layers.Dense(3, name="b")(a)]) * 2.0
    graph = keras.Model(x, y)
    assert sorted(graph._nodes_by_depth) == [0, 1, 2, 3, 4]
    nodes = list(compat.nodes_in_order(graph))
    assert all(isinstance(node, compat.Node) for node in nodes)
    assert [node.operation.name for node in nodes[:3]] == ["a", "b", "sum"]
    assert type(nodes[3].operation).__name__ == "Multiply"
    (first, second), kwargs = compat.node_arguments(nodes[3])
    assert isinstance(first, keras.KerasTensor)
    assert (second, kwargs) == (2.0, {})
    assert nodes[3].outputs == [y]


def test_structures_of_a_graph():
    inputs = {"p": keras.Input([2], name="p"), "q": keras.Input([2], name="q")}
    output = keras.layers.Add()([inputs["p"], inputs["q"]])
    graph = keras.Model(inputs, {"sum": output})
    assert compat.input_structure(graph).keys() == {"p", "q"}
    assert compat.output_structure(graph) == {"sum": output}
    p, q = compat.standardize_inputs(graph, {"q": np.ones([3, 2]), "p": np.zeros([3, 2], "int32")})
    assert (p.dtype, q.dtype) == (tf.float32, tf.float32)
    assert float(tf.reduce_sum(q - p)) == 6.0


def test_operation_fn_hands_on_the_training_flag():
    assert parameters_of(compat.operation_fn)[0] == "operation"
    drop = keras.layers.Dropout(0.9999)
    ones = tf.ones([64])
    assert float(tf.reduce_sum(compat.operation_fn(drop, training=False)(ones))) == 64.0
    assert float(tf.reduce_sum(compat.operation_fn(drop, training=True)(ones))) == 0.0


# --- attributes of layers ---


def test_seed_generators_of_a_layer():
    drop = keras.layers.Dropout(0.5, seed=1)
    assert [generator.state for generator in drop._seed_generators] == compat.own_seed_states(drop)
    assert compat.own_seed_states(drop)[0] is drop.seed_generator.state
    assert compat.own_seed_states(keras.layers.Dense(1)) == []
    assert isinstance(compat.global_seed_generator().state, keras.Variable)


def test_the_state_of_a_seed_generator_is_known_by_its_name():
    generators = [keras.random.SeedGenerator(1), keras.random.SeedGenerator(1, name="mine")]
    states = [g.state for g in generators] + [compat.global_seed_generator().state]
    states += compat.own_seed_states(keras.layers.Dropout(0.5, seed=1, name="drop"))
    assert [compat.is_seed_state(v) for v in states] == [True] * 4
    assert not compat.is_seed_state(keras.Variable([1, 2], dtype="int32", name="state"))


def test_layers_inside_a_layer():
    inner = keras.layers.LSTM(2)
    outer = keras.layers.Bidirectional(inner)
    assert [layer.name for layer in compat.flatten_layers(outer)][:1] == [outer.name]
    assert outer.forward_layer.cell in compat.flatten_layers(outer)
    x = keras.Input([2])
    operation = next(iter(compat.nodes_in_order(keras.Model(x, x * 2.0)))).operation
    assert compat.flatten_layers(operation) == []


def test_losses_of_a_layer_in_a_stateless_scope():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.ones([2, 2]))
    assert compat.losses_of(layer) == {id(loss) for loss in scope.losses}
    assert len(scope.losses) == 1


def test_a_recording_scope_knows_whose_losses_it_has():
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.ActivityRegularization(l2=1.0)

        def call(self, x):
            self.add_loss([keras.ops.sum(x), keras.ops.max(x)])
            return self.inner(x)

    layer = Outer()
    with compat.RecordingScope([]) as scope:
        layer(tf.ones([2, 2]))
        layer._clear_losses()  # as a call in another thread does, here for the scope as well
        layer(tf.ones([2, 2]))
    assert [scope.loss_owners[id(loss)] for loss in scope.losses] == [layer, layer, layer.inner]


def test_hand_back_loss_is_add_loss():
    model = two_layers()
    assert model._losses == []
    compat.hand_back_loss(model, tf.constant(2.0))
    compat.hand_back_loss(model.get_layer("first"), tf.constant(3.0))
    assert [float(loss) for loss in model.losses] == [2.0, 3.0]


def test_rematerialised_operations_are_known():
    assert not compat.is_rematerialised(keras.layers.Dense(1))
    with keras.RematScope(mode="full"):
        layer = keras.layers.Dense(1)
        nested = keras.Sequential([keras.layers.Dense(1)])
    assert hasattr(layer, "_remat_mode")
    assert compat.is_rematerialised(layer)
    assert compat.is_rematerialised(nested)


def test_moments_of_batch_normalization():
    assert parameters_of(getattr(keras.layers.BatchNormalization, compat.MOMENTS)) == ["self", "inputs", "mask"]
    layer = keras.layers.BatchNormalization(momentum=0.0)
    calls = []

    def moments(inputs, mask):
        calls.append((inputs.shape, mask))
        return tf.constant([5.0]), tf.constant([7.0])

    with compat.replaced(layer, compat.MOMENTS, moments):
        layer(tf.ones([3, 1]), training=True)
        layer(tf.ones([3, 1]), training=False)
    assert calls == [((3, 1), None)]
    assert [float(layer.moving_mean[0]), float(layer.moving_variance[0])] == [5.0, 7.0]


# --- contexts ---


class Spy(keras.layers.Layer):
    """Notes the training flag and the dtype that it computes in."""

    def call(self, x, training=None):
        self.seen = training, keras.ops.cast(x, self.compute_dtype).dtype
        return x


@pytest.mark.parametrize("training", [True, False, None])
def test_call_context_carries_the_training_flag(training):
    model = two_layers()
    spy = Spy()
    with compat.call_context(model, training):
        spy(tf.ones([1]))
        assert compat.global_state.get_global_attribute("current_call_ctx").entry_layer is model
    assert spy.seen[0] is training
    assert compat.global_state.get_global_attribute("current_call_ctx") is None


def test_call_context_computes_in_the_models_dtype():
    x = keras.Input([4])
    model = keras.Model(x, x)
    model.dtype_policy = "mixed_float16"
    assert (model.compute_dtype, model.variable_dtype) == ("float16", "float32")
    variable = keras.Variable(1.0)
    with compat.call_context(model, True):
        assert tf.convert_to_tensor(variable).dtype == tf.float16
        assert compat.raw_variable(variable).dtype == tf.float32
    assert tf.convert_to_tensor(variable).dtype == tf.float32


def test_call_context_ends_with_an_exception():
    with contextlib.suppress(KeyError), compat.call_context(two_layers(), True):
        raise KeyError
    assert compat.global_state.get_global_attribute("current_call_ctx") is None


def test_replaced_restores_what_was_there_and_what_was_not():
    layer = keras.layers.Dense(1)
    for _ in range(2):
        with (
            contextlib.suppress(KeyError),
            compat.replaced(layer, "call", lambda: 1),
            compat.replaced(layer, "call", lambda: 2),
        ):
            assert layer.call() == 2
            raise KeyError
        assert "call" not in vars(layer)
    own = layer.activation
    with compat.replaced(layer, "activation", lambda: 5):
        assert layer.activation() == 5
    assert layer.activation is own


def test_a_stand_in_has_other_attributes_and_the_same_variables():
    layer = keras.layers.Dense(1)
    layer.build([None, 2])
    stand_in = compat.seen_with(layer, units=5)
    assert (type(stand_in), stand_in.units, layer.units) == (keras.layers.Dense, 5, 1)
    assert stand_in.kernel is layer.kernel
    np.testing.assert_array_equal(stand_in.call(tf.ones([1, 2])), layer(tf.ones([1, 2])))


def test_recording_scope_tells_what_was_assigned():
    a, b = keras.Variable(1.0), keras.Variable(2.0)
    with compat.RecordingScope([(a, tf.constant(5.0))]) as scope:
        b.assign(a + 1.0)
    assert list(scope.assigned.values()) == [b]
    assert float(scope.get_current_value(b)) == 6.0
    assert [float(a), float(b)] == [1.0, 2.0]


def test_masks_are_attributes_of_tensors():
    x = tf.ones([2])
    assert compat.get_keras_mask(x) is None
    mask = tf.constant([True, False])
    compat.set_keras_mask(x, mask)
    assert compat.get_keras_mask(x) is x._keras_mask is mask


# --- models called inside `run` ---


def plain_call_everywhere() -> bool:
    return "__call__" not in vars(keras.Model) and keras.Model.__call__ is Layer.__call__


def test_keras_model_has_no_call_of_its_own():
    assert plain_call_everywhere()


def test_route_models_restores_after_an_exception():
    with contextlib.suppress(KeyError), compat.route_models(lambda *_: 1):
        assert not plain_call_everywhere()
        raise KeyError
    assert plain_call_everywhere()


def test_routes_nest_and_none_hides_the_outer_one():
    model, x = two_layers(), tf.ones([2, 4])
    with compat.route_models(lambda called, plain, args, kwargs: (called, args, kwargs)):
        assert model(x, training=False) == (model, (x,), {"training": False})
        with compat.route_models(None):
            assert model(x).shape == (2, 1)
        with contextlib.suppress(KeyError), compat.route_models(lambda *_: 2):
            assert model(x) == 2
            raise KeyError
        assert model(x)[0] is model
        assert keras.layers.Dense(1)(x).shape == (2, 1), "only models are routed"
    assert plain_call_everywhere()


def test_a_route_can_call_the_model_plainly():
    model, x = two_layers(), tf.ones([2, 4])
    expected = model(x)
    with compat.route_models(lambda _, plain, args, kwargs: plain(*args, **kwargs)):
        np.testing.assert_array_equal(model(x), expected)


def test_symbolic_calls_are_never_routed():
    model = two_layers()
    with compat.route_models(lambda *_: pytest.fail("routed")):
        assert model.compute_output_spec(keras.KerasTensor([5, 4])).shape == (5, 1)
        with keras.StatelessScope():
            assert model(tf.ones([5, 4])).shape == (5, 1)
    assert not compat.in_stateless_scope()
    with keras.StatelessScope():
        assert compat.in_stateless_scope()


def test_a_route_is_its_threads_own():
    model, x, seen = two_layers(), tf.ones([2, 4]), []
    with compat.route_models(lambda *_: "routed"):
        thread = threading.Thread(target=lambda: seen.append(model(x).shape))
        thread.start()
        thread.join()
        assert model(x) == "routed"
    assert seen == [(2, 1)]
    assert plain_call_everywhere()


def test_the_last_of_many_threads_restores_the_call():
    model, x, seen = two_layers(), tf.ones([2, 4]), []
    start = threading.Barrier(4)

    def work(name: int) -> None:
        start.wait()
        for _ in range(50):
            with compat.route_models(lambda *_: name):
                seen.append(model(x) == name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 200
    assert plain_call_everywhere()


def test_strategy_of_a_model():
    assert compat.strategy_of(two_layers()) is None
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategy.scope():
        model = two_layers()
    assert model._distribute_strategy is strategy
    assert compat.strategy_of(model) is strategy


def test_the_frame_of_maybe_symbolic_build():
    method = TensorFlowTrainer._maybe_symbolic_build
    assert parameters_of(method) == ["self", "iterator", "data_batch"]
    assert "maybe_distributed_data_batch" in method.__code__.co_varnames, "it draws a batch to learn shapes"
    assert compat.model_being_prepared() is None


def test_model_being_prepared_during_fit_only(monkeypatch):
    strategy = tf_gpipe.GPipeStrategy(num_stages=1, num_micro_batches=1)
    seen = []
    place = type(strategy)._place_prepared
    monkeypatch.setattr(type(strategy), "_place_prepared", lambda *args: (seen.append(args[1:]), place(*args)))
    with strategy.scope():
        model = two_layers()
        model.compile("sgd", "mse")
    assert seen == []
    data = np.ones([2, 4]), np.ones([2, 1])
    for call in (lambda: model.fit(*data, verbose=0), lambda: model.evaluate(*data, verbose=0)):
        call()
        (prepared, batch), seen = seen[-1], []
        assert prepared is model
        assert [tuple(part.shape) for part in batch] == [(None, 4), (None, 1)]
    model.train_on_batch(*data)
    assert [tuple(part.shape) for part in seen[-1][1][:2]] == [(2, 4), (2, 1)]
    assert compat.model_being_prepared() is None


def test_entered_by_names_the_method_that_enters_a_scope():
    found = []

    class Watching(tf.distribute.OneDeviceStrategy):
        def scope(self):
            found.append(compat.entered_by())
            return super().scope()

    strategy = Watching("/CPU:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert found.pop() is None, "the user does"
    x, y = np.ones([4, 4]), np.ones([4, 1])
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        found.clear()
        getattr(model, name)(*((x,) if "predict" in name else (x, y)))
        assert (name, model) in found
        assert {one[0] for one in found if one} <= {name, "run"}
    found.clear()
    strategy.run(lambda: strategy.scope())
    assert found[-1] is None, "the user does, inside `run`"
    assert set(found[:-1]) == {("run", strategy)}


def test_methods_under_way_tell_their_arguments():
    found = []

    class Watching(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(compat.methods_under_way())

        def on_test_begin(self, logs=None):
            found.append(compat.methods_under_way())

    assert compat.methods_under_way() == []
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones([4, 4]), np.ones([4, 1])
    model.fit(x, y, verbose=0, callbacks=[Watching()], validation_data=(x, y))
    (training,), (validating, around) = found
    assert (training["verbose"], around["verbose"], validating["verbose"]) == (0, 0, "auto")
    assert "logs" in training
    assert around["logs"]
    text = inspect.getsource(keras.Model.predict)
    assert "outputs = None" in text, "what `progress` looks at to know that nothing has run yet"
    assert "logs = {}" in inspect.getsource(keras.Model.fit)


def doubled(x, y):
    return x * 2, y


def batched(size):
    return tf.data.Dataset.from_tensor_slices((np.ones([20, 4]), np.ones([20, 1]))).shuffle(9).batch(size)


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ({"x": np.ones([20, 4]), "y": np.ones([20, 1]), "batch_size": 8}, 8),
        ({"x": np.ones([20, 4]), "y": np.ones([20, 1])}, 20),
        ({"x": np.ones([40, 4]), "y": np.ones([40, 1])}, 32),
        ({"x": batched(8)}, 8),
        ({"x": batched(8).map(doubled, num_parallel_calls=2).cache().repeat(2).prefetch(1)}, 8),
        ({"x": batched(8).unbatch().batch(5, drop_remainder=True)}, 5),
        ({"x": ((np.ones([8, 4]), np.ones([8, 1])) for _ in range(3))}, 8),
    ],
    ids=["arrays", "few rows", "default", "dataset", "dataset with more", "batched again", "generator"],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_rows_of_the_first_batch_of_fit(data, rows):
    found = []

    class Watching(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            found.append((compat.rows_of_first_batch(self.model), compat.rows_of_first_batch(two_layers())))

    model = two_layers()
    model.compile("sgd", "mse")
    assert compat.rows_of_first_batch(model) is None
    model.fit(**data, shuffle=False, verbose=0, callbacks=[Watching()])
    assert found[0] == (rows, None)


def test_a_watched_reset_is_told_of_in_its_thread_only():
    graph, seen = tf.compat.v1.get_default_graph(), []
    end = compat.watch_resets(lambda reset: (seen.append("here"), reset()))
    other = threading.Thread(target=keras.backend.clear_session)
    other.start()
    other.join()
    assert seen == []
    keras.backend.clear_session()
    assert seen == ["here"]
    assert tf.compat.v1.get_default_graph() is not graph
    end()
    keras.backend.clear_session()
    assert seen == ["here"]


def test_a_scope_that_is_set_for_good_is_known():
    strategy, scopes = tf.distribute.OneDeviceStrategy("/CPU:0"), []
    make = strategy.scope
    strategy.scope = lambda: scopes.append(make()) or scopes[-1]
    tf.distribute.experimental_set_strategy(strategy)
    assert compat.is_set_for_good(scopes[0])
    tf.distribute.experimental_set_strategy(None)
    assert not compat.is_set_for_good(scopes[0])


def test_in_xla_function():
    found = []

    def f(x):
        found.append(compat.in_xla_function())
        return x + 1

    inner = tf.function(lambda x: f(x), autograph=False)
    for function in (f, inner, tf.function(f, jit_compile=True), tf.function(lambda x: inner(x), jit_compile=True)):
        function(tf.constant([1.0, 2.0]) if function is not inner else tf.constant(1.0))
    assert found == [False, False, True, True]


def test_the_error_of_strategies_inside_each_other():
    a, b = (tf.distribute.OneDeviceStrategy("/CPU:0") for _ in range(2))
    with pytest.raises(RuntimeError) as caught, a.scope(), b.scope():
        pass
    assert compat.says_that_strategies_mix(caught.value)
    assert compat.optimizer_in(caught.value) is None
    assert not compat.says_that_strategies_mix(RuntimeError("another"))
    assert not compat.says_that_strategies_mix(None)
    outside = keras.optimizers.Adam()
    with a.scope():
        variable = keras.Variable(1.0)
        with pytest.raises(RuntimeError) as caught:
            outside.build([variable])
    assert compat.says_that_strategies_mix(caught.value)
    assert compat.optimizer_in(caught.value) is outside


def test_an_optimizer_is_adopted_unless_it_has_slots():
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    variables = [keras.Variable(1.0)]
    inner = keras.optimizers.Adam()
    new, built = keras.optimizers.LossScaleOptimizer(inner), keras.optimizers.Adam()
    built.build(variables)
    for optimizer in (new, built):
        compat.adopt_optimizer(optimizer, strategy)
    assert new._distribution_strategy is inner._distribution_strategy is strategy
    assert built._distribution_strategy is not strategy
    assert compat.foreign_optimizer(new, strategy) is None
    assert compat.foreign_optimizer(built, strategy) is built
    with tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"]).scope():
        others = keras.optimizers.Adam()
    compat.adopt_optimizer(others, strategy)
    assert compat.foreign_optimizer(others, strategy) is others


def test_the_iterator_over_epochs_tells_its_data_through_an_attribute():
    class Told(keras.utils.PyDataset):
        begun = 0

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.ones([2, 4]), np.ones([2, 1])

        def on_epoch_begin(self):
            self.begun += 1

    data = Told()
    epochs = [
        TFEpochIterator(x=data, distribute_strategy=strategy)
        for strategy in (tf.distribute.OneDeviceStrategy("/CPU:0"), tf_gpipe.GPipeStrategy(1, 1))
    ]
    adapters = [made.data_adapter for made in epochs]
    assert [type(adapter) is compat._QuietAdapter for adapter in adapters] == [False, True]
    assert adapters[1].num_batches == adapters[0].num_batches == 1
    compat.spare_first_epoch()
    assert [made.data_adapter for made in epochs] == adapters, "only one that is being made"

    def _maybe_symbolic_build(self):
        next(iter(epochs[1]))

    _maybe_symbolic_build(None)
    assert data.begun == 0
    epochs[1].reset()
    next(iter(epochs[1]))
    assert data.begun == 1


def test_one_device_extended():
    strategy = tf.distribute.OneDeviceStrategy("/CPU:1")
    extended = strategy.extended
    assert isinstance(extended, compat.OneDeviceExtended)
    assert extended._device.endswith("CPU:1")
    with compat.updating("/CPU:2"):
        assert tf.zeros([]).device.endswith("CPU:2")
        assert distribute_lib.get_update_replica_id() == "/CPU:2"
    assert distribute_lib.get_update_replica_id() is None
    assert extended._container_strategy() is strategy
    for name, parameters in {
        "_create_variable": ["self", "next_creator", "kwargs"],
        "_call_for_each_replica": ["self", "fn", "args", "kwargs"],
        "_update": ["self", "var", "fn", "args", "kwargs", "group"],
        "_experimental_distribute_dataset": ["self", "dataset", "options"],
        "_distribute_datasets_from_function": ["self", "dataset_fn", "options"],
    }.items():
        assert parameters_of(getattr(compat.OneDeviceExtended, name)) == parameters, name


# --- gradients ---


def test_recording_functions():
    assert parameters_of(record.record_operation)[:4] == [
        "op_type",
        "output_tensors",
        "input_tensors",
        "backward_function",
    ]
    for name in ("TFE_Py_TapeSetIsStopped", "TFE_Py_TapeSetRestartOnThread", "TFE_Py_TapeSetStopOnThread"):
        assert callable(getattr(pywrap_tfe, name))
    assert callable(resource_variable_ops.variable_accessed)


def test_is_recording_and_is_watched():
    x, y = tf.constant(1.0), tf.constant(2.0)
    assert not compat.is_recording()
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert compat.is_recording()
        assert compat.is_watched([x])
        assert compat.is_watched([y, x])
        assert not compat.is_watched([y])
        with compat.stop_recording():
            assert not compat.is_watched([x])
            with compat.resume_recording(), tf.GradientTape() as inner:
                inner.watch(y)
                z = y * y
            assert float(inner.gradient(z, y)) == 4.0
            assert not compat.is_watched([x])
        assert compat.is_watched([x])


def test_resume_recording_restores_after_an_exception():
    with tf.GradientTape() as tape:
        x = tf.constant(1.0)
        tape.watch(x)
        with contextlib.suppress(KeyError), compat.resume_recording():
            raise KeyError
        assert compat.is_watched([x]), "it was not stopped before, so it is not stopped after"
        with compat.stop_recording():
            with contextlib.suppress(KeyError), compat.resume_recording():
                raise KeyError
            assert not compat.is_watched([x])


@pytest.mark.parametrize("decorate", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_record_operation_gives_a_gradient_for_inputs_and_weights(decorate):
    weight = tf.Variable(3.0)

    @decorate
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with compat.stop_recording():
                y = x * weight
            compat.record_operation("Test", [y], [x], [weight], lambda dy: [dy * 10.0, dy * 20.0])
            z = 2.0 * y
        return tape.gradient(z, [x, weight])

    assert [float(g) for g in gradients(tf.constant(1.0))] == [20.0, 40.0]


def test_record_operation_shows_weights_to_tapes_that_watch_by_themselves():
    weight = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        compat.record_operation("Test", [tf.constant(1.0)], [], [weight], lambda dy: [dy])
    assert tape.watched_variables() == (weight,)


def test_is_zeros():
    found = {}

    @tf.function
    def trace(x):
        found["zeros_like"] = compat.is_zeros(tf.zeros_like(x))
        found["zeros"] = compat.is_zeros(tf.zeros([2, 3]))
        found["fill"] = compat.is_zeros(tf.fill(tf.shape(x), 0.0))
        found["fill of ones"] = compat.is_zeros(tf.fill(tf.shape(x), 1.0))
        found["ones"] = compat.is_zeros(tf.ones([2]))
        found["input"] = compat.is_zeros(x)
        found["computed"] = compat.is_zeros(x * 0.0)
        return x

    trace.get_concrete_function(tf.TensorSpec([None]))
    assert [name for name, zeros in found.items() if zeros] == ["zeros_like", "zeros", "fill"]
    assert not compat.is_zeros(tf.zeros([2])), "an eager tensor is never looked into"


def test_the_gradient_of_an_unused_output_is_zeros():
    found = []

    @tf.custom_gradient
    def two(x):
        def gradient(da, db):
            found.extend([compat.is_zeros(da), compat.is_zeros(db)])
            return da

        return (tf.identity(x), tf.identity(x)), gradient

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = two(x)[0] * 2.0
        return tape.gradient(y, x)

    step(tf.constant([1.0]))
    assert found == [False, True]


def test_names_for_remote_calls():
    assert parameters_of(auto_control_deps_utils.get_read_only_resource_input_indices_graph) == ["func_graph"]
    assert isinstance(auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, str)
    assert parameters_of(ops.set_int_list_attr) == ["op", "attr_name", "ints"]
    function = tf.function(lambda: None, autograph=False).get_concrete_function()
    assert parameters_of(function._call_flat) == ["tensor_inputs", "captured_inputs"]


def test_assigned_inputs_are_what_a_function_writes():
    read, written = tf.Variable(1.0), tf.Variable(1.0)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    @tf.function(autograph=False)
    def body(x):
        written.assign_add(read + x)
        table.insert(tf.constant([1], tf.int64), [x])
        return x

    found = compat.assigned_inputs(body.get_concrete_function(tf.TensorSpec([])))
    assert {id(tensor) for tensor in found} == {id(written.handle), id(table.resource_handle)}


def test_a_vectorised_loop_is_known_from_its_body():
    found = []

    def body(x):
        found.append(compat.in_vectorized_loop())
        return x

    @tf.function(autograph=False)
    def step(x):
        body(x)
        with tf.name_scope("outer"):
            return tf.vectorized_map(body, x)

    step(tf.ones([2]))
    assert found == [False, True]


# --- variables ---


def test_a_variable_has_what_moving_needs():
    variable = tf.Variable(1.0)
    assert variable._handle is variable.handle
    assert variable._graph_key == tf.Variable(2.0)._graph_key
    assert variable._unique_id


def test_move_variable_keeps_identity_and_value():
    with tf.device("/CPU:0"):
        variable = tf.Variable([1.5, -2.0], name="mine")
    copy = variable
    unique, name, key = variable._unique_id, variable.name, variable.ref()
    compat.move_variable(variable, "/CPU:3")
    assert variable is copy
    assert variable.device.endswith("CPU:3")
    assert variable.handle.device.endswith("CPU:3")
    assert (variable._unique_id, variable.name) == (unique, name)
    assert {key: 1}[variable.ref()] == 1
    assert variable.numpy().tolist() == [1.5, -2.0]
    variable.assign_add([1.0, 1.0])
    assert variable.read_value().numpy().tolist() == [2.5, -1.0]
    assert variable.value().device.endswith("CPU:3")


@pytest.mark.parametrize("device", ["/CPU:3", "/device:CPU:3", "/job:localhost/replica:0/task:0/device:CPU:3"])
def test_a_variable_that_is_there_stays_untouched(device):
    with tf.device("/CPU:3"):
        variable = tf.Variable(1.0)
    handle = variable.handle
    compat.move_variable(variable, device)
    assert variable.handle is handle, "functions traced before hold this handle"


def test_move_variable_moves_out_of_a_graph():
    variable = tf.Variable(2.0)

    @tf.function
    def step():
        compat.move_variable(variable, "/CPU:2")
        return variable * 2.0

    assert float(step()) == 4.0
    assert variable.device.endswith("CPU:2")
    assert float(variable) == 2.0
    variable.assign(5.0)
    assert float(step()) == 10.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool"])
def test_move_variable_of_every_kind(dtype):
    with tf.device("/CPU:0"):
        variable = tf.Variable(tf.cast([0, 1], dtype), trainable=False)
    compat.move_variable(variable, "/CPU:1")
    assert variable.device.endswith("CPU:1")
    assert (variable.dtype, variable.trainable, variable.shape) == (tf.as_dtype(dtype), False, [2])
    assert tf.cast(variable, "int32").numpy().tolist() == [0, 1]


def test_users_of_handles_are_traced_again_or_keep_them():
    moved, read, seen = tf.Variable(2.0), tf.Variable(3.0), tf.Variable(5.0)
    traces = []

    @tf.function
    def double():
        traces.append(1)
        return moved * 2.0

    assert float(double()) == 4.0
    concrete = double.get_concrete_function()
    data = tf.data.Dataset.range(1).map(lambda _: read * 1.0)
    handles = [v.handle for v in (moved, read, seen)]
    with tf.GradientTape() as tape:
        loss = seen * 2.0
        users = compat.HandleUsers(handles)
    assert [users.must_stay(handle) for handle in handles] == [False, True, True]
    compat.move_variable(moved, "/CPU:3")
    users.trace_again([(handles[0], "mine")])
    assert float(double()) == 4.0
    assert len(traces) == 2
    with pytest.raises(ModelError, match="knows 'mine' where it was"):
        concrete()
    assert [float(value) for value in data] == [3.0]
    assert float(tape.gradient(loss, seen)) == 2.0


def test_a_trace_under_way_keeps_the_handles_that_it_has_captured():
    early, late = tf.Variable(1.0), tf.Variable(1.0)
    found = []

    @tf.function
    def outer():
        @tf.function
        def inner(x):
            users = compat.HandleUsers([early.handle, late.handle])
            found.append((users.must_stay(early.handle), users.must_stay(late.handle)))
            return x

        return inner(early + 1.0)

    outer()
    assert found == [(True, False)]


def test_the_optimizer_still_knows_a_moved_variable():
    def trained(move: bool) -> list[float]:
        variable = keras.Variable(1.0, name="weight")
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([variable])
        optimizer.apply([tf.constant(1.0)], [variable])
        if move:
            pairs = list(compat.slots_of(optimizer))
            assert [weight is variable for weight, _ in pairs] == [True, True]
            compat.move_variable(compat.raw_variable(variable), "/CPU:4")
            for weight, slot in pairs:
                compat.move_variable(compat.raw_variable(slot), compat.raw_variable(weight).device)
        optimizer.apply([tf.constant(0.5)], [variable])
        moved = [v for v in [variable, *optimizer.variables] if compat.raw_variable(v).device.endswith("CPU:4")]
        assert len(moved) == (3 if move else 0)
        return [float(v) for v in [variable, *optimizer.variables]]

    assert trained(move=True) == trained(move=False)


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (lambda: keras.optimizers.SGD(0.1), 0),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), 1),
        (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), 1),
        (lambda: keras.optimizers.Adam(0.1), 2),
        (lambda: keras.optimizers.Adam(0.1, amsgrad=True), 3),
        (lambda: keras.optimizers.AdamW(0.1, use_ema=True), 3),
        (lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.9), 3),
        (lambda: keras.optimizers.Ftrl(0.1), 2),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)), 2),
    ],
)
def test_slots_of_an_optimizer(optimizer, slots):
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0]])]
    made = optimizer()
    made.build(weights)
    found = list(compat.slots_of(made))
    assert len(found) == slots * len(weights)
    known = {id(v) for v in made.variables}
    assert all(weight.shape == slot.shape and id(slot) in known for weight, slot in found)
    assert sum(id(weight) == id(weights[0]) for weight, _ in found) == slots


def test_slots_of_an_optimizer_that_is_not_built():
    assert list(compat.slots_of(keras.optimizers.Adam())) == []
    assert list(compat.slots_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))) == []


def test_raw_variable_looks_through_scopes():
    variable = keras.Variable(1.0)
    assert compat.raw_variable(variable) is variable._value
    with keras.StatelessScope(state_mapping=[(variable, tf.constant(5.0))]):
        assert float(variable.value) == 5.0
        assert float(compat.raw_variable(variable)) == 1.0


def test_regularizer_of_a_weight_can_be_replaced():
    variable = keras.layers.Dense(1).add_weight(shape=[2], initializer="ones", regularizer="l2")
    assert variable._regularizer is variable.regularizer
    with compat.replaced(variable, "_regularizer", lambda value: "mine"):
        assert variable.regularizer(variable) == "mine"
    assert variable._regularizer is variable.regularizer is not None


def test_asks_for_xla():
    for jit_compile, asked in ((True, True), (False, False), ("auto", False)):
        model = two_layers()
        assert not compat.asks_for_xla(model)
        model.compile("sgd", "mse", jit_compile=jit_compile)
        assert compat.asks_for_xla(model) is asked


def test_placed_regularizers_keep_value_and_gradient():
    variable = keras.layers.Dense(1).add_weight(shape=[2], initializer="ones", regularizer=keras.regularizers.L2(0.5))
    regularizer = variable.regularizer
    with contextlib.suppress(KeyError), compat.placed_regularizers([variable]):
        assert variable.regularizer is not regularizer
        with tf.GradientTape() as tape:
            loss = 3.0 * variable.regularizer(variable)
        assert float(loss) == 3.0
        assert tape.gradient(loss, variable.value).numpy().tolist() == [3.0, 3.0]
        raise KeyError
    assert variable.regularizer is regularizer


def test_all_operations_looks_into_functions():
    inner = tf.function(lambda x: tf.math.sin(x), experimental_attributes={"_noinline": True})
    outer = tf.function(lambda x: inner(x) + 1.0).get_concrete_function(tf.TensorSpec([]))
    kinds = [op.type for op in compat.all_operations(outer.graph)]
    assert "Sin" in kinds
    assert "AddV2" in kinds
    assert "Sin" not in [op.type for op in outer.graph.get_operations()]


def test_the_graph_of_a_function_that_is_called():
    outer = tf.function(lambda x: tf.cond(x > 0, lambda: tf.math.sin(x), lambda: x))
    graph = outer.get_concrete_function(tf.TensorSpec([])).graph
    (call,) = (op for op in graph.get_operations() if "If" in op.type)
    branch = compat.function_graph(graph, call.get_attr("then_branch").name)
    assert "Sin" in [op.type for op in branch.get_operations()]
    assert len(branch.inputs) == len(call.inputs) - 1
    assert compat.function_graph(graph, "no_such_function") is None


def test_a_timestamp_waits_for_its_control_inputs_only():
    @tf.function(autograph=False)
    def times():
        first = compat.timestamp()
        second = compat.timestamp()
        with tf.control_dependencies([first]):
            third = compat.timestamp()
        return first, second, third

    graph = times.get_concrete_function().graph
    before = [[other.name for other in op.control_inputs] for op in graph.get_operations() if op.type == "Timestamp"]
    assert before == [[], [], ["Timestamp"]]
    first, _, third = times()
    assert 0 < float(first) <= float(third)


def test_a_free_variable_may_be_made_in_every_trace():
    made = []

    @tf.function(autograph=False)
    def keep(x):
        made.append(compat.free_variable(np.zeros([])))
        made[-1].assign(tf.reduce_sum(x))

    with tf_gpipe.GPipeStrategy(num_stages=1).scope():
        keep(tf.ones([2], tf.float64))
        keep(tf.ones([3], tf.float64))
    assert [float(variable) for variable in made] == [2.0, 3.0]
    assert not any(variable.trainable for variable in made)


# --- only compat.py uses private names ---


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def names_of_the_package() -> frozenset[str]:
    """Every private name that some class or module of the package defines itself."""
    found = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found)


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(tree: ast.Module, own: set[str]) -> list[str]:
    """`x._name`, `getattr(x, "_name")` and the like, where the package does not define `_name` and x is not self."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            name = node.attr if node.attr not in own else ""
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            name = node.args[1].value
        else:
            continue
        if name.startswith("_") and not name.endswith("__"):
            found.append(f"line {node.lineno}: {name}")
    return found


def private_imports(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [n for n in names if f"{n}.".startswith(("tensorflow.python.", "keras.src.", "tensorflow.core."))]
    return found


OTHERS = [path for path in MODULES if path.name != "compat.py"]


def test_the_source_tests_find_what_they_look_for():
    imports = "import keras.src\nfrom tensorflow.python.eager import record\n"
    tree = ast.parse(imports + "model._x\ngetattr(model, '_y')\nself._z\nstage._own")
    assert private_imports(tree) == ["keras.src", "tensorflow.python.eager.record"]
    assert private_uses(tree, {"_own", "_y"}) == ["line 3: _x", "line 4: _y"]
    assert private_imports(parsed(PACKAGE / "compat.py"))
    assert "_nodes_by_depth" in str(private_uses(parsed(PACKAGE / "compat.py"), names_of_the_package()))
    assert len(OTHERS) >= 15


@pytest.mark.parametrize("path", OTHERS, ids=[path.name for path in OTHERS])
def test_only_compat_imports_private_modules(path):
    assert private_imports(parsed(path)) == []
    text = path.read_text(encoding="utf-8")
    assert "tensorflow.python" not in text
    assert "keras.src" not in text
    assert "tf.__internal__" not in text


@pytest.mark.parametrize("path", OTHERS, ids=[path.name for path in OTHERS])
def test_only_compat_uses_private_attributes(path):
    assert private_uses(parsed(path), names_of_the_package()) == []


# Imported for names that the table has, or together with them.
PARTS_OF_OTHERS = {
    "Layer",
    "auto_control_deps_utils",
    "global_seed_generator",
    "ops",
    "pywrap_tfe",
    "record",
    "variable_accessed",
}


def test_compat_gives_a_reason_for_every_private_module_name():
    table = compat.__doc__
    for name in private_imports(parsed(PACKAGE / "compat.py")):
        last = name.rpartition(".")[2]
        if last not in PARTS_OF_OTHERS:
            assert f"`{last}`" in table, last


# --- weight updates ---


@pytest.mark.parametrize(
    ("optimizer", "gathered"),
    [
        (lambda: keras.optimizers.SGD(0.1, weight_decay=0.1), {"update": True, "decay": True}),
        (lambda: keras.optimizers.SGD(OwnSchedule(), weight_decay=0.1), {"update": True, "decay": False}),
        (lambda: OwnOptimizer(0.1, weight_decay=0.1), {"update": False, "decay": False}),
    ],
)
def test_only_updates_by_code_of_keras_are_gathered(monkeypatch, optimizer, gathered):
    handed = []
    interim = tf.__internal__.distribute.interim
    monkeypatch.setattr(interim, "maybe_merge_call", lambda fn, *_: handed.append(fn))
    made, variable = optimizer(), keras.Variable([1.0])
    made.build([variable])
    made.apply([tf.ones([1])], [variable])
    names = {"distributed_apply_weight_decay": "decay", "_distributed_tf_update_step": "update"}
    assert {names[fn.__name__]: compat.only_updates(fn) for fn in handed} == gathered
    assert not compat.only_updates(lambda strategy: None)


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class OwnOptimizer(keras.optimizers.SGD):
    pass
