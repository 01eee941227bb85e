"""Which devices the stages run on.

Stages go to all GPUs where there are enough, else to logical CPU devices. Logical devices can be made only before
TensorFlow starts its devices: `set_logical_cpus` does it, and says how where it is too late.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gpipe.errors import DeviceError, DeviceStartedError


def set_logical_cpus(num_devices: int) -> list[str]:
    """Makes logical CPU devices, so that a pipeline runs (and is tested) without accelerators.

    Call it at the beginning of the program, before TensorFlow has run anything. A second call with a number that
    is already there changes nothing.

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
    return [f"/CPU:{i}" for i in range(num_devices)]


def stage_devices(devices: Sequence[str] | None, num_stages: int | None) -> list[str]:
    """Full names of the devices of the stages, one a stage.

    Args:
        devices: names in any form that `tf.device` takes; None for all GPUs, else the logical CPUs.
        num_stages: K; None for all devices there are.

    Returns:
        K names such as `/job:localhost/replica:0/task:0/device:CPU:1`.

    Raises:
        ValueError: too few devices, a name that no device has, or a wrong kind of argument.
    """
    if devices is None:
        names = _default_devices(num_stages)
    else:
        names = _known_devices(devices)
    if num_stages is None:
        return names
    if devices is not None and len(names) != num_stages:
        raise DeviceError(
            f"Expected one device for each of the {num_stages} stages. Received: {len(names)} devices, {names}. "
            "Pass as many `devices` as `num_stages`; a device may be named twice."
        )
    return names[:num_stages]


def _default_devices(num_stages: int | None) -> list[str]:
    gpus, cpus = _full_names("GPU"), _full_names("CPU")
    if num_stages is None:
        return gpus or cpus
    for names in (gpus, cpus):
        if len(names) >= num_stages:
            return names
    raise DeviceError(
        f"Expected at least {num_stages} devices for num_stages={num_stages}. Received: {len(gpus)} GPUs and "
        f"{len(cpus)} logical CPUs. Use fewer stages, or call `tf_gpipe.set_logical_cpus({num_stages})` at the "
        "beginning of the program to run the stages on logical CPU devices."
    )


def _known_devices(devices: Sequence[str]) -> list[str]:
    if isinstance(devices, str) or not all(isinstance(name, str) for name in devices) or not devices:
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
            kind = f" Call `tf_gpipe.set_logical_cpus({len(devices)})` at the beginning of the program to make logical "
            kind += "CPU devices."
            raise DeviceError(
                f"Expected a device that TensorFlow knows: {there}. Received: {name!r}."
                + (kind if wanted.device_type == "CPU" else "")
            )
        known.append(matches[0])
    return known


def _full_names(device_type: str | None = None) -> list[str]:
    """Names of the devices there are, with the job and task that TensorFlow leaves out for those of this process."""
    here = tf.DeviceSpec(job="localhost", replica=0, task=0)
    names = [device.name for device in tf.config.list_logical_devices(device_type)]
    return [here.make_merged_spec(tf.DeviceSpec.from_string(name)).to_string() for name in names]


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
