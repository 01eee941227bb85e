"""Which devices the stages run on, and what differs between kinds of devices.

Stages go to all GPUs where there are enough, else to logical CPU devices; to TPU cores where that is asked for.
Logical devices can be made only before TensorFlow starts its devices: `set_logical_cpus` does it, and says how where it
is too late.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gpipe import installation
from tf_gpipe.errors import DeviceError, DeviceStartedError


def set_logical_cpus(num_devices: int) -> list[str]:
    """Makes logical CPU devices, so that a pipeline runs (and is tested) without accelerators.

    Call it at the beginning of the program, before TensorFlow has run anything. A second call with a number that
    is already there changes nothing.

    Where there is no more than one core for each device, operations of TensorFlow run on one thread each from now on:
    stages keep the cores busy, and dividing each operation among threads as well makes them wait for each other, for a
    tenth to more than twice the time of a step (docs/benchmarks.md, "Threads"). To decide yourself, call
    `tf.config.threading.set_intra_op_parallelism_threads` or set TF_NUM_INTRAOP_THREADS.

    Args:
        num_devices: how many, at least 1.

    Returns:
        Their names, `["/CPU:0", "/CPU:1", ...]`.

    Raises:
        ValueError: `num_devices` is not a positive int.
        RuntimeError: TensorFlow has already started with fewer logical CPU devices.

    Example:
        >>> tf_gpipe.set_logical_cpus(4)
        ['/CPU:0', '/CPU:1', '/CPU:2', '/CPU:3']
    """
    if not isinstance(num_devices, int) or isinstance(num_devices, bool) or num_devices < 1:
        raise DeviceError(f"Expected `num_devices` to be an int of at least 1. Received: {num_devices!r}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu)
    if configured is None or len(configured) < num_devices:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
        except RuntimeError as error:
            if len(tf.config.list_logical_devices("CPU")) >= num_devices:
                return [f"/CPU:{i}" for i in range(num_devices)]
            raise DeviceStartedError(
                f"Expected TensorFlow not to have started yet, since {num_devices} logical CPU devices can only be "
                f"made before. Received: TensorFlow runs with {len(tf.config.list_logical_devices('CPU'))}. "
                f"Call `tf_gpipe.set_logical_cpus({num_devices})` right after the imports, before any tensor, layer or "
                "model is made; in a notebook, restart the kernel first."
            ) from error
        _use_one_thread_an_operation(num_devices)
    return [f"/CPU:{i}" for i in range(num_devices)]


def _use_one_thread_an_operation(num_devices: int) -> None:
    """Has operations run undivided where the devices fill the cores, unless the user has said otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    decided = tf.config.threading.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in os.environ
    if num_devices >= cores and not decided:
        tf.config.threading.set_intra_op_parallelism_threads(1)


def stage_devices(devices: Sequence[str] | str | None, num_stages: int | None) -> list[str]:
    """Full names of the devices of the stages, one a stage.

    Args:
        devices: names in any form that `tf.device` takes; "cpu", "gpu" or "tpu" for devices of a kind; None for GPUs,
            where there are enough, else logical CPUs.
        num_stages: K; None for all devices there are.

    Returns:
        K names such as `/job:localhost/replica:0/task:0/device:CPU:1`.

    Raises:
        ValueError: too few devices, a name that no device has, or a wrong kind of argument.
    """
    if devices is None or isinstance(devices, str):
        return _devices_of_kind(devices, num_stages)
    names = _known_devices(devices)
    if num_stages is None:
        return names
    if len(names) != num_stages:
        raise DeviceError(
            f"Expected one device for each of the {num_stages} stages. Received: {len(names)} devices, {names}. "
            "Pass as many `devices` as `num_stages`; a device may be named twice."
        )
    return names


def must_compile(devices: Sequence[str]) -> bool:
    """Whether XLA has to compile the stages, since the devices run nothing else."""
    return any(tf.DeviceSpec.from_string(name).device_type == "TPU" for name in devices)


def is_cpu(device: str) -> bool:
    """Whether a device is a CPU: there an operation is over when TensorFlow says so, and remote calls were tried."""
    return bool(tf.DeviceSpec.from_string(device).device_type == "CPU")


def _devices_of_kind(kind: str | None, num_stages: int | None) -> list[str]:
    kinds = {None: ("GPU", "CPU"), "cpu": ("CPU",), "gpu": ("GPU",), "tpu": ("TPU",)}
    name = kind and kind.lower()
    if name not in kinds:
        raise DeviceError(
            "Expected `devices` to be a list of device names, one for each stage, such as ['/GPU:0', '/GPU:1'], or "
            f"'cpu', 'gpu' or 'tpu'. Received: devices={kind!r}."
        )
    there = {key: start_tpus() if key == "TPU" else _full_names(key) for key in kinds[name]}
    for names in there.values():
        if names and len(names) >= (num_stages or 1):
            return names[:num_stages]
    found = " and ".join(f"{len(names)} {_PLURAL[key]}" for key, names in there.items())
    wanted = num_stages or 1
    advice = f"call `tf_gpipe.set_logical_cpus({wanted})` at the beginning of the program to run on logical CPU devices"
    if "CPU" not in there:
        advice = f"leave `devices` out and {advice}"
    advice = f"Use fewer stages, or {advice}." if any(there.values()) else f"{advice[0].upper()}{advice[1:]}."
    raise DeviceError(
        f"Expected at least {wanted} device{'s' if wanted > 1 else ''} for num_stages={num_stages}. Received: {found}. "
        f"{advice}"
    )


_PLURAL = {"GPU": "GPUs", "CPU": "logical CPUs", "TPU": "TPU cores"}


@functools.cache
def start_tpus() -> list[str]:
    """Starts the TPUs of this machine, once in a process, since starting them again would discard their variables.

    Returns:
        Full names of their cores, in an order in which each is beside the next.

    Raises:
        ValueError: there are none, or this TensorFlow cannot use them.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:  # of many kinds, by what is missing
        reason = str(error).split("\n")[0].split(" used by {{node")[0]  # whose attributes follow, a line of them
        raise DeviceError(
            "Expected a machine with TPUs, and TensorFlow's wheel for them. Received: "
            f"{type(error).__name__}: {reason.rstrip('.')}. "
            f"On a TPU VM, in an environment without other wheels of TensorFlow: `{installation.command('tpu')}`; "
            "`python -m tf_gpipe doctor` tells what is there."
        ) from error
    return ring(topology)


def ring(topology: Any) -> list[str]:
    """Full names of the cores of a TPU topology (`tf.tpu.experimental.Topology`), each beside the next."""
    experimental = tf.tpu.experimental
    cores = int(np.prod(topology.mesh_shape))
    order = experimental.DeviceAssignment.build(
        topology,
        computation_shape=np.asarray(topology.mesh_shape),
        num_replicas=1,
        device_order_mode=experimental.DeviceOrderMode.RING,
    )
    return [_full_name(order.tpu_device(0, core, job="localhost")) for core in range(cores)]


def _known_devices(devices: Sequence[str]) -> list[str]:
    if not isinstance(devices, Sequence) or not devices or not all(isinstance(name, str) for name in devices):
        raise DeviceError(
            "Expected `devices` to be a list of device names, one for each stage, such as ['/GPU:0', '/GPU:1']. "
            f"Received: devices={devices!r}."
        )
    there = _full_names()
    known = []
    for name in devices:
        try:
            wanted = tf.DeviceSpec.from_string(name)
        except ValueError as error:
            raise DeviceError(f"Expected a device name such as '/GPU:0' or '/CPU:1'. Received: {name!r}.") from error
        matches = [full for full in there if _matches(tf.DeviceSpec.from_string(full), wanted)]
        if not matches or wanted.device_type is None:
            if wanted.device_type == "CPU":
                needed = max(len(devices), 1 + (wanted.device_index or 0))
                advice = f"Call `tf_gpipe.set_logical_cpus({needed})` at the beginning of the program to make logical "
                advice += "CPU devices."
            else:
                advice = "Leave `devices` out to take what there is; `python -m tf_gpipe doctor` looks for what is "
                advice += "missing."
            raise DeviceError(f"Expected a device that TensorFlow knows: {there}. Received: {name!r}. {advice}")
        known.append(matches[0])
    return known


def _full_names(device_type: str | None = None) -> list[str]:
    """Names of the devices there are, with the job and task that TensorFlow leaves out for those of this process."""
    return [_full_name(device.name) for device in tf.config.list_logical_devices(device_type)]


def _full_name(name: str) -> str:
    here = tf.DeviceSpec(job="localhost", replica=0, task=0)
    return str(here.make_merged_spec(tf.DeviceSpec.from_string(name)).to_string())


def _matches(device: tf.DeviceSpec, wanted: tf.DeviceSpec) -> bool:
    """Whether every field that `wanted` names is the one of `device`; a missing index is 0."""
    fields = ("job", "replica", "task", "device_type")
    if any(getattr(wanted, f) is not None and getattr(wanted, f) != getattr(device, f) for f in fields):
        return False
    return (wanted.device_index or 0) == device.device_index


def short_name(device: str) -> str:
    """`CPU:1` for a device of this process, else the name with its job and task."""
    spec = tf.DeviceSpec.from_string(device)
    local = f"{spec.device_type}:{spec.device_index}"
    return local if spec.job in (None, "localhost") else f"{spec.job}:{spec.task}/{local}"
