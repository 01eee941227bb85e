"""TPU cores: everything up to the chip, on stages that XLA compiles for logical CPU devices."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import scope_of

import tf_gpipe
from tf_gpipe import devices, installation, placed_function
from tf_gpipe.errors import DeviceError

HERE = "/job:localhost/replica:0/task:0"
L = keras.layers


def topology(*mesh: int) -> tf.tpu.experimental.Topology:
    """As `initialize_tpu_system` returns it: cores numbered along the first axis, two of a chip one after the other."""
    x, y, z, cores = mesh
    places = [(i, j, k, core) for k in range(z) for j in range(y) for i in range(x) for core in range(cores)]
    return tf.tpu.experimental.Topology(mesh_shape=mesh, device_coordinates=np.array([places], np.int32))


# --- devices ---


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1, 1), (1, 1, 1, 2), (2, 2, 1, 1), (2, 2, 1, 2), (2, 4, 1, 1), (2, 2, 2, 1), (4, 4, 1, 1)]
)
def test_each_core_is_beside_the_next_and_the_last_beside_the_first(mesh):
    there = topology(*mesh)
    names = devices.ring(there)
    numbers = [int(name.removeprefix(f"{HERE}/device:TPU:")) for name in names]
    assert sorted(numbers) == list(range(np.prod(mesh)))
    chips = there.device_coordinates[0][numbers][:, :3]
    steps = np.abs(chips - np.roll(chips, -1, axis=0)).sum(axis=1)
    assert steps.max() <= 1


def test_stages_take_the_first_cores_of_the_ring_and_are_compiled(monkeypatch):
    monkeypatch.setattr(devices, "start_tpus", lambda: devices.ring(topology(2, 2, 1, 1)))
    names = devices.stage_devices("tpu", 3)
    assert names == [f"{HERE}/device:TPU:{core}" for core in (0, 1, 3)]
    assert devices.must_compile(names)
    assert "jit_compile=True" in repr(tf_gpipe.GPipeStrategy(3, 4, devices="tpu"))
    with pytest.raises(DeviceError, match="at least 5 devices for num_stages=5. Received: 4 TPU cores"):
        devices.stage_devices("tpu", 5)


def test_a_machine_without_tpus():
    with pytest.raises(DeviceError, match="Expected a machine with TPUs") as raised:
        tf_gpipe.GPipeStrategy(2, 4, devices="tpu")
    message = str(raised.value)
    assert (
        f"On a TPU VM, in an environment without other wheels of TensorFlow: `{installation.command('tpu')}`" in message
    )
    assert len(message) < 450
    assert "attr" not in message  # TensorFlow's own is a page


def test_kinds_of_devices_differ_in_one_module_only():
    package = pathlib.Path(tf_gpipe.__file__).parent
    kinds = re.compile(r"""device_type|["'](CPU|GPU|TPU)["']""")
    named = {file.name for file in package.glob("*.py") if kinds.search(file.read_text(encoding="utf-8"))}
    assert named - {"doctor_checks.py", "doctor_facts.py"} == {"devices.py"}  # which report what there is
    users = {
        name: {file.name for file in package.glob("*.py") if f"{name}(" in file.read_text(encoding="utf-8")}
        for name in ("must_compile", "is_cpu")
    }
    assert users["must_compile"] == {"devices.py", "strategy.py"}
    # Remote calls, times of their own, and convolutions as products.
    assert users["is_cpu"] == {"devices.py", "placed_function.py", "tracing.py", "body.py"}


# --- the same path on CPUs ---

PROGRAM = """
import keras, numpy as np, tensorflow as tf, tf_gpipe
tf_gpipe.set_logical_cpus(2)
tf.config.set_soft_device_placement(False)
L = keras.layers

def weights(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else tf.init_scope():
        model = keras.Sequential([
            keras.Input([8, 8, 3]), L.Conv2D(4, 3, activation="relu"), L.BatchNormalization(), L.MaxPooling2D(2),
            L.Flatten(), L.Dense(8, "gelu"), L.LayerNormalization(), L.Dropout(0.5), L.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    x = np.random.default_rng(0).normal(size=[71, 8, 8, 3]).astype("float32")
    model.fit(x, np.arange(71) % 3, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

one = weights(tf_gpipe.GPipeStrategy(1, 4, jit_compile=True))
two = weights(tf_gpipe.GPipeStrategy(2, 4, jit_compile=True))
print(max(np.abs(a - b).max() for a, b in zip(one, two)))
"""


def test_compiled_stages_without_soft_placement():
    """Every operation runs where it was put, or fails; 71 rows in batches of 16, and none is lost."""
    log = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **log},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 1e-5


def model_of(strategy, policy="float32") -> keras.Model:
    keras.utils.set_random_seed(0)
    with scope_of(strategy):
        x = inputs = keras.Input([6])
        for _ in range(3):
            x = L.LayerNormalization(dtype=policy)(L.Dense(16, "gelu", dtype=policy)(x))
        model = keras.Model(inputs, L.Dense(2, dtype="float32")(x))
        optimizer = keras.optimizers.SGD(0.1)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, "mse", jit_compile=False)
    return model


def trained(strategy, policy="float32", rows=71):
    model = model_of(strategy, policy)
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=[rows, 6]).astype("float32"), generator.normal(size=[rows, 2]).astype("float32")
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_last_batch_of_another_size_trains_as_plain_keras(remat):
    wanted = trained(None)
    found = trained(tf_gpipe.GPipeStrategy(2, 4, remat=remat, jit_compile=True))
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("policy", "unit"), [("mixed_bfloat16", 2.0**-8), ("mixed_float16", 2.0**-11)])
def test_mixed_precision_with_and_without_xla(policy, unit):
    """XLA keeps values of 16 bits in float32 where it joins operations, so that a result differs by their rounding."""
    plain = trained(tf_gpipe.GPipeStrategy(2, 4), policy)
    compiled = trained(tf_gpipe.GPipeStrategy(2, 4, jit_compile=True), policy)
    for a, b in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(b, a, rtol=4 * unit, atol=4 * unit)


# --- the graph ---


@pytest.fixture(scope="module")
def step():
    """The graph of a training step as it is made for devices that are no CPUs, and the devices of its stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed_function, "is_cpu", lambda device: False)
        strategy = tf_gpipe.GPipeStrategy(2, 4, jit_compile=True)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            x = inputs = keras.Input([5], dtype="int32")
            x = L.Dropout(0.2)(L.Embedding(9, 8)(x))
            x = L.BatchNormalization()(L.Dense(8, "gelu")(L.LSTM(8)(x)))
            model = keras.Model(inputs, L.Dense(2)(x))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        strategy.place(model)

        @tf.function
        def train(x, y):
            return strategy.run(model.train_step, ((x, y),))

        concrete = train.get_concrete_function(tf.zeros([16, 5], tf.int32), tf.zeros([16, 2]))
        yield concrete.graph, strategy.devices


def test_what_would_go_to_a_core_is_compiled_and_has_static_shapes(step):
    graph, stages = step
    calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
    tasks = [op for op in calls if re.search(r"stage_\d/micro_batch_\d/(forward|backward|weights)/", op.name)]
    assert len(tasks) >= 2 * 2 * 4
    for op in tasks:
        stage = int(re.search(r"stage_(\d)", op.name)[1])
        assert op.device == stages[stage]
        name = op.get_attr("f").name
        function = graph._functions[name]
        assert function.cached_definition.attr["_XlaMustCompile"].b
        for tensor in op.inputs:
            assert tensor.dtype in (tf.resource,) or tensor.shape.is_fully_defined(), (op.name, tensor)
            assert tensor.dtype not in (tf.string, tf.variant)
        for tensor in op.outputs:
            assert tensor.dtype not in (tf.string, tf.variant)
    assert not any(op.type == "RemoteCall" for op in graph.get_operations())


def test_nothing_in_a_stage_is_beyond_xla(step):
    graph, _ = step
    stages = [f for name, f in graph._functions.items() if re.search(r"stage_\d_(forward|backward)", name)]
    assert stages
    types = {node.op for function in stages for node in function.cached_definition.node_def}
    beyond = {
        t for t in types if re.search("PyFunc|String|Summary|Print|Assert|Iterator|RandomUniform$|AssignVariable", t)
    }
    assert not beyond


def test_counters_stay_on_the_host(step):
    graph, stages = step
    on_stages = [op for op in graph.get_operations() if op.device in stages[1:] and op.type == "AssignAddVariableOp"]
    assert not [op for op in on_stages if op.inputs[1].dtype in (tf.int32, tf.int64)]


# --- compile ---


def test_a_model_compiled_in_the_scope_is_not_compiled_as_one_program_by_default(monkeypatch):
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    accelerator = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [accelerator])
    made = []
    for scope in (scope_of(strategy), scope_of(None)):
        with scope:
            made.append(keras.Sequential([keras.Input([2]), L.Dense(2), L.Dense(2)]))
            made[-1].compile("sgd", "mse")
    assert [model.jit_compile for model in made] == [False, True]
