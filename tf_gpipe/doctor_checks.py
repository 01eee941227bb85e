"""The checks of `python -m tf_gpipe doctor`: what is wrong, and the command that mends it.

`diagnose` looks for faults in the facts that `doctor_facts.py` has gathered; `report` writes both down.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

from tf_gpipe import installation
from tf_gpipe.doctor_facts import FLAGS, Facts

# Releases from the first up to, but without, the second: those of setup.py.
SUPPORTED = {
    "tensorflow": ((2, 19), (2, 22)),
    "tensorflow-cpu": ((2, 19), (2, 22)),
    "tensorflow-tpu": ((2, 19), (2, 21)),
    "keras": ((3, 12), (4, 0)),
}
NEWEST_PYTHON = (3, 13)  # for which TensorFlow 2.21 has wheels
LIBTPU_END = (0, 0, 15)  # the first that ends the process when tensorflow-tpu is imported


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a check has found.

    Attributes:
        is_fault: whether it is wrong, or only worth knowing.
        message: what it is.
        remedy: the command, or line of code, that mends it.
    """

    is_fault: bool
    message: str
    remedy: str


# --- each check takes the facts and returns what is to be said, or None ---


def check_installed(facts: Facts) -> Finding | None:
    """TensorFlow is installed."""
    if facts.wheels or not facts.runtime.tensorflow_error:
        return None
    remark = ""
    if _release(facts.python) > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        remark = f"in an environment of Python 3.10 to {newest}, since TensorFlow has no wheels for {facts.python}"
    return Finding(True, "TensorFlow is not installed.", _install(facts, remark))


def check_one_wheel(facts: Facts) -> Finding | None:
    """Not two distributions of TensorFlow, which overwrite each other's files."""
    if len(facts.wheels) < 2:
        return None
    listed = " and ".join(f"{name} {facts.packages[name]}" for name in facts.wheels)
    message = f"There is more than one TensorFlow: {listed}. Each overwrites files of the other."
    if "tensorflow-tpu" in facts.wheels:
        message += " tensorflow-tpu holds a whole TensorFlow, up to 2.20, and stands alone."
    return Finding(True, message, _reinstall(facts))


def check_starts(facts: Facts) -> Finding | None:
    """The TensorFlow that is installed can be imported."""
    error = facts.runtime.tensorflow_error
    if not error or not facts.wheels:
        return None
    message = f"TensorFlow cannot be imported: {error.rstrip('.')}."
    if "SIGILL" in error:
        message += " Its wheels need a processor with AVX, which virtual machines and emulators may lack."
    return Finding(True, message, _reinstall(facts))


def check_tensorflow_version(facts: Facts) -> Finding | None:
    """TensorFlow is one of the supported releases."""
    wheel = facts.wheels[0] if len(facts.wheels) == 1 else "tensorflow"
    version = facts.runtime.tensorflow or facts.packages.get(wheel, "")
    first, end = SUPPORTED.get(wheel, SUPPORTED["tensorflow"])
    if not version or first <= _release(version) < end:
        return None
    message = f"tf_gpipe is made for {wheel} {first[0]}.{first[1]} to {end[0]}.{end[1] - 1}. This is {version}."
    return Finding(True, message, _reinstall(facts))


def check_keras(facts: Facts) -> Finding | None:
    """Keras can be imported and is one of the supported releases."""
    first, end = SUPPORTED["keras"]
    remedy = f'pip install "keras>={first[0]}.{first[1]},<{end[0]}"'
    version = facts.runtime.keras or facts.packages.get("keras", "")
    if not version:
        return Finding(True, "Keras is not installed.", remedy)
    if not first <= _release(version) < end:
        return Finding(True, f"tf_gpipe is made for Keras {first[0]}.{first[1]} or later. This is {version}.", remedy)
    if facts.runtime.keras_error and facts.environment.get("KERAS_BACKEND") in (None, "", "tensorflow"):
        message = f"Keras cannot be imported: {facts.runtime.keras_error}."
        look = "KERAS_BACKEND=tensorflow python -c 'import keras'  # if this works, export the variable; if not: "
        return Finding(True, message, f"{look}{remedy} --force-reinstall")
    return None


def check_backend(facts: Facts) -> Finding | None:
    """Keras runs on TensorFlow."""
    backend = facts.runtime.backend or facts.environment.get("KERAS_BACKEND") or "tensorflow"
    if backend == "tensorflow":
        return None
    where = "KERAS_BACKEND" if facts.environment.get("KERAS_BACKEND") else "Keras's configuration file"
    message = f"Keras is to run on '{backend}', by {where}. The pipeline is made of TensorFlow."
    instead = "or unset it, " if where == "KERAS_BACKEND" else ""
    return Finding(True, message, f"export KERAS_BACKEND=tensorflow  # {instead}before Keras is imported")


def check_legacy_keras(facts: Facts) -> Finding | None:
    """`tf.keras` is Keras 3."""
    if facts.environment.get("TF_USE_LEGACY_KERAS", "").lower() not in ("1", "true"):
        return None
    message = "TF_USE_LEGACY_KERAS makes `tf.keras` Keras 2, whose models tf_gpipe does not take."
    return Finding(False, message, "unset TF_USE_LEGACY_KERAS  # or use `import keras` instead of `tf.keras`")


def check_driver(facts: Facts) -> Finding | None:
    """The driver of the GPUs answers."""
    if not facts.nvidia_error:
        return None
    message = f"nvidia-smi does not work, so that no GPU will: {facts.nvidia_error}"
    return Finding(True, message, "nvidia-smi  # mend the driver until this lists the GPUs; a restart may do")


def check_gpus_seen(facts: Facts) -> Finding | None:
    """TensorFlow sees every GPU of the machine."""
    there, seen = facts.num_gpus, len(facts.runtime.gpus)
    if seen >= there or not facts.runtime.tensorflow:
        return None
    message = f"TensorFlow sees {seen} of {there} GPUs."
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and seen >= _num_visible(visible, there):
        hidden = "the others" if seen else "it" if there == 1 else "them all"
        message += f" CUDA_VISIBLE_DEVICES={visible or '(empty)'} hides {hidden}."
        return Finding(False, message, "unset CUDA_VISIBLE_DEVICES")
    if all(wheel.endswith("-cpu") for wheel in facts.wheels) and facts.wheels:
        return Finding(True, f"{message} {facts.wheels[0]} has no code for GPUs.", _reinstall(facts))
    look = "TF_CPP_MIN_LOG_LEVEL=0 python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\""
    message += (
        " Most often CUDA's libraries are missing, which the extra brings along, or the driver is too old for them."
    )
    return Finding(True, message, _install(facts, f"then, if it stays so, for the reason: {look}"))


def _num_visible(visible: str, there: int) -> int:
    """How many of so many GPUs CUDA_VISIBLE_DEVICES shows: those before the first that is none, such as -1."""
    names = [name.strip() for name in visible.split(",")]
    shown = [name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < there) for name in names]
    return [*shown, False].index(False)


def check_equal_gpus(facts: Facts) -> Finding | None:
    """Stages of equal work take equal time."""
    names = sorted(set(facts.runtime.gpus.values()))
    if len(names) < 2:
        return None
    message = f"The GPUs differ: {', '.join(names)}. Stages of equal work wait for the slowest."
    return Finding(False, message, "GPipeStrategy(..., partition=[...])  # fewer operations on slower GPUs")


def check_tpu_wheel(facts: Facts) -> Finding | None:
    """On a machine with TPUs, TensorFlow is the one that has code for them."""
    if not facts.tpu_signs or not facts.wheels or any(wheel.endswith("-tpu") for wheel in facts.wheels):
        return None
    message = (
        f"This looks like a machine with TPUs ({', '.join(facts.tpu_signs)}), for which {facts.wheels[0]} has no code."
    )
    return Finding(True, message, _reinstall(facts))


def check_libtpu(facts: Facts) -> Finding | None:
    """TensorFlow's wheel for TPUs can load the libtpu that is installed."""
    version = facts.packages.get("libtpu", "")
    if "tensorflow-tpu" not in facts.wheels or not version or _release(version, 3) < LIBTPU_END:
        return None
    message = f"libtpu {version} is too new for tensorflow-tpu: importing TensorFlow ends the process."
    return Finding(True, message, f"pip install 'libtpu<{'.'.join(map(str, LIBTPU_END))}'")


def check_tpu_missing(facts: Facts) -> Finding | None:
    """The TensorFlow for TPUs is not used for want of another: it compiles nothing for CPUs."""
    if facts.wheels != ["tensorflow-tpu"] or facts.tpu_signs:
        return None
    message = "tensorflow-tpu is installed, but there is no sign of a TPU. On CPUs it fails with jit_compile=True."
    remedy = f"pip uninstall -y tensorflow-tpu libtpu && {installation.command('cpu', facts.installed)}"
    return Finding(False, message, remedy)


def check_devices_start(facts: Facts) -> Finding | None:
    """Logical CPUs can be made in a new process, and all devices start."""
    if not facts.runtime.logical_error:
        return None
    message = f"TensorFlow's devices do not start: {facts.runtime.logical_error.rstrip('.')}."
    remedy = "CUDA_VISIBLE_DEVICES= python -m tf_gpipe doctor  # if this is well, the GPUs or their driver are at fault"
    return Finding(True, message, remedy)


def check_several_devices(facts: Facts) -> Finding | None:
    """There is a device for a second stage."""
    if not facts.runtime.logical_devices or len(facts.runtime.gpus) > 1 or facts.tpu_signs:
        return None
    if facts.runtime.gpus:
        split = 'tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], '
        split += "[tf.config.LogicalDeviceConfiguration(memory_limit=4096)] * 2)"
        return Finding(
            False, "There is one GPU, for one stage. To try a pipeline, divide it; it gains no speed.", split
        )
    message = "TensorFlow sees no GPU. Stages run on logical CPU devices, which a program makes before anything else."
    return Finding(False, message, "tf_gpipe.set_logical_cpus(4)  # right after the imports")


def check_flags(facts: Facts) -> Finding | None:
    """TensorFlow can read the flags that are set."""
    error = facts.runtime.flags_error
    if not error:
        return None
    present = [name for name in FLAGS if facts.environment.get(name)]
    named = [name for name in present if re.search(rf"\b{name}\b", error)] or present
    message = f"TensorFlow cannot read {' or '.join(named)}, and ends the process: {error.rstrip('.')}."
    return Finding(True, message, f"unset {' '.join(named)}  # or take out what TensorFlow cannot read")


def check_flag_of_jax(facts: Facts) -> Finding | None:
    """Logical CPUs are not asked for in the way of another framework."""
    if "xla_force_host_platform_device_count" not in facts.environment.get("XLA_FLAGS", ""):
        return None
    message = "XLA_FLAGS asks for several host devices. JAX makes them, TensorFlow does not."
    return Finding(False, message, "tf_gpipe.set_logical_cpus(4)  # right after the imports")


def check_cluster(facts: Facts) -> Finding | None:
    """TF_CONFIG, in which `tf.distribute` looks up the other machines, can be read and names none."""
    if "TF_CONFIG" not in facts.environment:
        return None
    remedy = "unset TF_CONFIG"
    try:
        config = json.loads(facts.environment["TF_CONFIG"])
    except json.JSONDecodeError as error:
        message = f"TF_CONFIG is not JSON, and strategies of tf.distribute that read it fail: {error}."
        return Finding(True, message, remedy)
    tasks = _tasks(config)
    if len(tasks) < 2:
        return None
    message = f"TF_CONFIG names a cluster of {len(tasks)} tasks ({', '.join(tasks)}). A pipeline runs on one machine: "
    message += "each of these processes would train a model of its own, on the devices that it sees."
    return Finding(False, message, f"{remedy}  # and start one process, on the machine that has the devices")


def _tasks(config: object) -> list[str]:
    """Addresses in a TF_CONFIG, whose cluster has for each kind of task a list or, by number, an object of them."""
    cluster = config.get("cluster") if isinstance(config, dict) else None
    kinds = cluster.values() if isinstance(cluster, dict) else ()
    found = [kind.values() if isinstance(kind, dict) else kind for kind in kinds if isinstance(kind, (dict, list))]
    return [str(address) for addresses in found for address in addresses]


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    check_installed,
    check_one_wheel,
    check_starts,
    check_tensorflow_version,
    check_keras,
    check_backend,
    check_legacy_keras,
    check_driver,
    check_gpus_seen,
    check_equal_gpus,
    check_tpu_wheel,
    check_libtpu,
    check_tpu_missing,
    check_devices_start,
    check_several_devices,
    check_flags,
    check_flag_of_jax,
    check_cluster,
)


def diagnose(facts: Facts) -> list[Finding]:
    """Runs all checks.

    Args:
        facts: from `gather`.

    Returns:
        What they found, faults first.
    """
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    return sorted(found, key=lambda finding: not finding.is_fault)


def report(facts: Facts, findings: Sequence[Finding]) -> str:
    """Facts and findings as text, to read or to paste into an issue.

    Args:
        facts: from `gather`.
        findings: from `diagnose`.
    """
    lines = facts.lines()
    width = max(len(name) for name, _ in lines)
    text = [f"{name.ljust(width)}  {value or 'none'}" for name, value in lines]
    for finding in findings:
        text += ["", f"{'FAULT' if finding.is_fault else 'note'}: {finding.message}", f"    {finding.remedy}"]
    if not any(finding.is_fault for finding in findings):
        text += ["", "Nothing is wrong."]
    return "\n".join(text)


def _install(facts: Facts, remark: str = "") -> str:
    """The command that installs the TensorFlow of this machine, with a comment where there is something to say."""
    command = installation.command(facts.extra, facts.installed)
    if not remark:
        return command
    return f"{command}{', ' if '  # ' in command else '  # '}{remark}"


def _reinstall(facts: Facts) -> str:
    return f"pip uninstall -y {' '.join(facts.wheels)} && {_install(facts)}" if facts.wheels else _install(facts)


def _release(version: str, fields: int = 2) -> tuple[int, ...]:
    """(2, 21) for "2.21.0rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:fields])
