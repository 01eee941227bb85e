"""Logical CPU devices, and which devices the stages get."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tensorflow as tf

import tf_gpipe
from tf_gpipe import devices
from tf_gpipe.errors import DeviceError, DeviceStartedError

ROOT = Path(__file__).parents[1]
HERE = "/job:localhost/replica:0/task:0"


def cpu(*indices: int) -> list[str]:
    return [f"{HERE}/device:CPU:{i}" for i in indices]


def run_program(program: str) -> list[str]:
    """Lines that a program in a fresh process prints."""
    head = "import tensorflow as tf\nfrom tf_gpipe import set_logical_cpus\nfrom tf_gpipe.errors import *\n"
    done = subprocess.run([sys.executable, "-c", head + program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- set_logical_cpus ---


def test_logical_cpus_that_are_already_there_change_nothing():
    before = tf.config.list_logical_devices("CPU")
    assert tf_gpipe.set_logical_cpus(8) == [f"/CPU:{i}" for i in range(8)]
    assert tf_gpipe.set_logical_cpus(8) == [f"/CPU:{i}" for i in range(8)]
    assert tf_gpipe.set_logical_cpus(3) == ["/CPU:0", "/CPU:1", "/CPU:2"]
    assert tf.config.list_logical_devices("CPU") == before


def test_more_logical_cpus_than_there_are_come_too_late():
    assert len(tf.config.list_logical_devices("CPU")) == 8
    with pytest.raises(
        DeviceStartedError, match=r"TensorFlow runs with 8\. Call `tf_gpipe\.set_logical_cpus\(9\)` right"
    ):
        tf_gpipe.set_logical_cpus(9)
    with pytest.raises(RuntimeError, match="in a notebook, restart the kernel first"):
        tf_gpipe.set_logical_cpus(100)


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None, True])
def test_a_count_that_is_no_positive_int_is_refused(count):
    with pytest.raises(DeviceError, match=rf"Expected `num_devices` to be an int of at least 1\. Received: {count!r}"):
        tf_gpipe.set_logical_cpus(count)
    with pytest.raises(ValueError, match="Expected `num_devices`"):
        tf_gpipe.set_logical_cpus(count)


@pytest.mark.parametrize(
    ("before", "threads"),
    [
        ("cores(2)", 1),
        ("cores(4)", 1),
        ("cores(5)", 0),  # TensorFlow's choice: all cores
        ("cores(2); tf.config.threading.set_intra_op_parallelism_threads(3)", 3),
        ("cores(2); os.environ['TF_NUM_INTRAOP_THREADS'] = '2'", 0),
        ("cores(2); tf.config.set_logical_device_configuration(cpu, [configuration] * 4)", 0),
    ],
)
def test_operations_run_on_one_thread_where_devices_fill_the_cores(before, threads):
    head = (
        "import os\n"
        "def cores(n): os.sched_getaffinity = lambda process: set(range(n))\n"
        "cpu, configuration = tf.config.list_physical_devices('CPU')[0], tf.config.LogicalDeviceConfiguration()\n"
    )
    asked = "set_logical_cpus(4); print(tf.config.threading.get_intra_op_parallelism_threads())"
    assert run_program(f"{head}{before}\n{asked}") == [str(threads)]


def test_before_tensorflow_starts_the_larger_count_holds():
    assert run_program(
        "set_logical_cpus(2); print(set_logical_cpus(4)); print(set_logical_cpus(3))\n"
        "print(len(tf.config.list_logical_devices('CPU')))\n"
        "print(set_logical_cpus(4)[-1])\n"
        "with tf.device('/CPU:3'): print(tf.identity(1.0).device[-5:])\n"
    ) == ["['/CPU:0', '/CPU:1', '/CPU:2', '/CPU:3']", "['/CPU:0', '/CPU:1', '/CPU:2']", "4", "/CPU:3", "CPU:3"]


def test_after_tensorflow_started_only_what_is_there_can_be_had():
    assert run_program(
        "tf.constant(1)\n"
        "print(set_logical_cpus(1))\n"
        "try: set_logical_cpus(2)\n"
        "except DeviceStartedError as e: print(type(e.__cause__).__name__, 'since 2 logical CPU' in str(e))\n"
    ) == ["['/CPU:0']", "RuntimeError True"]


# --- devices of stages ---


def test_stages_stand_on_the_first_logical_cpus():
    assert devices.stage_devices(None, 3) == cpu(0, 1, 2)
    assert devices.stage_devices(None, 1) == cpu(0)


def test_without_a_count_there_is_a_stage_for_each_device():
    assert devices.stage_devices(None, None) == cpu(*range(8))
    assert devices.stage_devices(["/CPU:5", "/CPU:2"], None) == cpu(5, 2)


@pytest.mark.parametrize(
    "name",
    [
        "/CPU:3",
        "CPU:3",
        "/cpu:3",
        "cpu:3",
        "/device:CPU:3",
        "/task:0/device:CPU:3",
        "/job:localhost/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:3",
    ],
)
def test_a_device_may_be_named_in_every_form_that_tensorflow_takes(name):
    assert devices.stage_devices([name], 1) == cpu(3)
    with tf.device(name):
        assert tf.identity(1.0).device == cpu(3)[0]


def test_a_name_without_index_means_the_first_device():
    assert devices.stage_devices(["/CPU"], 1) == devices.stage_devices(["/device:CPU:*"], 1) == cpu(0)


def test_order_and_repetition_are_the_users():
    assert devices.stage_devices(["/CPU:3", "/CPU:0", "/CPU:3"], 3) == cpu(3, 0, 3)


def test_names_are_those_of_tensors_and_variables():
    for name in devices.stage_devices(None, 8):
        with tf.device(name):
            assert tf.Variable(1.0).device == tf.identity(1.0).device == name


def test_too_few_devices():
    with pytest.raises(
        DeviceError, match=r"at least 9 devices for num_stages=9\. Received: 0 GPUs and 8 logical CPUs\."
    ):
        devices.stage_devices(None, 9)
    with pytest.raises(ValueError, match=r"call `tf_gpipe\.set_logical_cpus\(9\)` at the beginning"):
        tf_gpipe.GPipeStrategy(num_stages=9)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_names_as_stages(count):
    with pytest.raises(DeviceError, match=rf"one device for each of the {count} stages\. Received: 2 devices"):
        devices.stage_devices(["/CPU:0", "/CPU:1"], count)


@pytest.mark.parametrize("names", ["/CPU:0", "", [], (), [0, 1], [None], ["/CPU:0", 1]])
def test_devices_that_are_no_list_of_names(names):
    with pytest.raises(DeviceError, match="Expected `devices` to be a list of device names, one for each stage"):
        devices.stage_devices(names, None)


@pytest.mark.parametrize(
    "name", ["/CPU:8", "/GPU:0", "/job:worker/task:1/device:CPU:0", "/task:1/CPU:0", "/job:localhost"]
)
def test_a_device_that_is_not_there(name):
    with pytest.raises(DeviceError, match=rf"Expected a device that TensorFlow knows: .* Received: '{name}'") as caught:
        devices.stage_devices([name], 1)
    assert ("set_logical_cpus" in str(caught.value)) == ("CPU" in name)


@pytest.mark.parametrize("name", ["the fast one", "/CPU:0:1", "/device:CPU:x"])
def test_what_is_no_device_name(name):
    with pytest.raises(DeviceError, match=rf"Expected a device name such as '/GPU:0' or '/CPU:1'\. Received: '{name}'"):
        devices.stage_devices([name], 1)


# --- with GPUs, as TensorFlow would list them ---


class LogicalDevice(NamedTuple):
    name: str
    device_type: str


@pytest.fixture
def machine(monkeypatch):
    """Pretends that a machine has so many GPUs and logical CPUs, and perhaps a second worker."""

    def set_up(gpus: int, cpus: int, prefixes: tuple[str, ...] = ("",)) -> None:
        there = [
            LogicalDevice(f"{prefix}/device:{kind}:{i}", kind)
            for prefix in prefixes
            for kind, count in (("CPU", cpus), ("GPU", gpus))
            for i in range(count)
        ]
        monkeypatch.setattr(
            tf.config, "list_logical_devices", lambda kind=None: [d for d in there if kind in (None, d.device_type)]
        )

    return set_up


def gpu(*indices: int) -> list[str]:
    return [f"{HERE}/device:GPU:{i}" for i in indices]


def test_gpus_come_first(machine):
    machine(gpus=4, cpus=8)
    assert devices.stage_devices(None, 2) == gpu(0, 1)
    assert devices.stage_devices(None, 4) == gpu(0, 1, 2, 3)
    assert devices.stage_devices(None, None) == gpu(0, 1, 2, 3)


def test_stages_go_to_cpus_where_gpus_are_too_few(machine):
    machine(gpus=2, cpus=4)
    assert devices.stage_devices(None, 3) == cpu(0, 1, 2)
    with pytest.raises(DeviceError, match="Received: 2 GPUs and 4 logical CPUs"):
        devices.stage_devices(None, 5)


def test_devices_of_a_kind(machine):
    machine(gpus=2, cpus=4)
    assert devices.stage_devices("gpu", None) == gpu(0, 1)
    assert devices.stage_devices("cpu", None) == cpu(0, 1, 2, 3)
    assert devices.stage_devices("cpu", 2) == cpu(0, 1)
    with pytest.raises(DeviceError, match="at least 3 devices for num_stages=3. Received: 2 GPUs. Use fewer"):
        devices.stage_devices("gpu", 3)


def test_gpus_and_cpus_may_be_mixed_by_name(machine):
    machine(gpus=2, cpus=1)
    assert devices.stage_devices(["/GPU:1", "/CPU:0", "gpu:0"], 3) == [*gpu(1), *cpu(0), *gpu(0)]
    with pytest.raises(DeviceError, match="Received: '/GPU:2'") as caught:
        devices.stage_devices(["/GPU:2"], 1)
    assert "set_logical_cpus" not in str(caught.value)


def test_devices_of_other_workers_are_named_in_full(machine):
    workers = tuple(f"/job:worker/replica:0/task:{task}" for task in range(2))
    machine(gpus=1, cpus=1, prefixes=workers)
    assert devices.stage_devices(["/task:1/GPU:0", "/job:worker/task:0/device:GPU:0"], 2) == [
        "/job:worker/replica:0/task:1/device:GPU:0",
        "/job:worker/replica:0/task:0/device:GPU:0",
    ]
    assert devices.stage_devices(None, 2) == [f"{worker}/device:GPU:0" for worker in workers]


# --- names for people ---


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (f"{HERE}/device:CPU:1", "CPU:1"),
        ("/GPU:0", "GPU:0"),
        ("/job:worker/replica:0/task:3/device:GPU:2", "worker:3/GPU:2"),
    ],
)
def test_short_name(name, short):
    assert devices.short_name(name) == short


def test_the_strategy_says_where_its_stages_are():
    strategy = tf_gpipe.GPipeStrategy(devices=["/CPU:6", "/CPU:1"])
    assert strategy.num_stages == 2
    assert strategy.devices == cpu(6, 1)
    strategy.devices.append("more")
    assert strategy.devices == cpu(6, 1)
