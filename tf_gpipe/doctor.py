"""What is installed, which devices there are, what is wrong and what mends it: `python -m tf_gpipe doctor`.

`gather` collects `Facts`, `diagnose` finds faults in them, `report` writes both down. TensorFlow is imported in a
process of its own: its log lines, a crash on import and the devices that it starts stay there.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from tf_gpipe.version import __version__

# Releases from the first up to, but without, the second: those of setup.py.
SUPPORTED = {
    "tensorflow": ((2, 19), (2, 22)),
    "tensorflow-cpu": ((2, 19), (2, 22)),
    "tensorflow-tpu": ((2, 19), (2, 21)),
    "keras": ((3, 12), (4, 0)),
}
NEWEST_PYTHON = (3, 13)  # for which TensorFlow 2.21 has wheels
LIBTPU_END = (0, 0, 15)  # the first that ends the process when tensorflow-tpu is imported

WHEELS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu")
"""Distributions that all install the package `tensorflow`."""

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "KERAS_BACKEND",
    "NEXT_PLUGGABLE_DEVICE_USE_C_API",
    "PJRT_DEVICE",
    "TF_CONFIG",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_ALLOCATOR",
    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH",
    "TF_USE_LEGACY_KERAS",
    "TF_XLA_FLAGS",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "XLA_FLAGS",
)

START_SECONDS = 300  # after which TensorFlow is said not to start


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as `nvidia-smi` describes it, with units.

    Attributes:
        name: the product.
        memory: all of its memory.
        used: how much of it is in use, by any process.
        driver: version of the driver.
    """

    name: str
    memory: str
    used: str
    driver: str


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What TensorFlow and Keras say when they are started in a process.

    Attributes:
        tensorflow: version that was imported; empty if it could not be.
        tensorflow_error: why not.
        keras: version that was imported; empty if it could not be.
        keras_error: why not.
        backend: that of Keras.
        physical_devices: such as "GPU:0".
        gpus: names of TensorFlow's GPUs by device.
        memory_growth: by GPU, whether TensorFlow takes its memory as it needs it, and not all at the start.
        logical_devices: of which two CPUs have been made for this.
        logical_error: why no logical CPUs could be made, or devices not started.
    """

    tensorflow: str = ""
    tensorflow_error: str = ""
    keras: str = ""
    keras_error: str = ""
    backend: str = ""
    physical_devices: Sequence[str] = ()
    gpus: dict[str, str] = dataclasses.field(default_factory=dict)
    memory_growth: dict[str, bool] = dataclasses.field(default_factory=dict)
    logical_devices: Sequence[str] = ()
    logical_error: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that the checks go by.

    Attributes:
        python: its version.
        system: operating system and processor.
        packages: versions of what is installed, by distribution.
        environment: variables that bear on devices, if they are set.
        nvidia_gpus: the GPUs of this machine, whether TensorFlow sees them or not.
        nvidia_error: what `nvidia-smi` said if it failed.
        tpu_files: device files of TPUs.
        runtime: what TensorFlow says.
    """

    python: str
    system: str
    packages: dict[str, str]
    environment: dict[str, str]
    nvidia_gpus: Sequence[Gpu]
    nvidia_error: str
    tpu_files: Sequence[str]
    runtime: Runtime

    @property
    def wheels(self) -> list[str]:
        """The distributions of TensorFlow that are installed."""
        return [name for name in WHEELS if name in self.packages]

    @property
    def tpu_signs(self) -> list[str]:
        """What makes this look like a machine with TPUs."""
        names = ("TPU_ACCELERATOR_TYPE", "TPU_NAME")
        signs = [f"{name}={self.environment[name]}" for name in names if name in self.environment]
        if self.environment.get("PJRT_DEVICE") == "TPU":
            signs.append("PJRT_DEVICE=TPU")
        if "libtpu" in self.packages and "tensorflow-tpu" not in self.packages:  # which brings it along
            signs.append(f"libtpu {self.packages['libtpu']}")
        return [*signs, *self.tpu_files]

    @property
    def extra(self) -> str:
        """The extra of tf_gpipe that fits this machine."""
        return "tpu" if self.tpu_signs else "gpu" if self.nvidia_gpus else "cpu"


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


# --- gathering ---


def gather() -> Facts:
    """Looks at this machine and this Python; takes as long as TensorFlow takes to start."""
    gpus, error = _nvidia_gpus()
    return Facts(
        python=platform.python_version(),
        system=platform.platform(),
        packages=_packages(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        nvidia_gpus=gpus,
        nvidia_error=error,
        tpu_files=sorted(glob.glob("/dev/accel[0-9]*")),
        runtime=_runtime_of_new_process(),
    )


def start() -> Runtime:
    """Imports TensorFlow and Keras, and starts TensorFlow's devices, in this process."""
    try:
        import tensorflow as tf
    except Exception as error:  # a broken installation may raise anything
        return Runtime(tensorflow_error=_one_line(error))
    keras_version = backend = keras_error = ""
    try:
        import keras

        keras_version, backend = keras.__version__, keras.config.backend()
    except Exception as error:  # from a missing backend, for one
        keras_error = _one_line(error)

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    names = [_short_name(gpu.name) for gpu in gpus]
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    growth = [forced or bool(tf.config.experimental.get_memory_growth(gpu)) for gpu in gpus]
    logical: list[str] = []
    logical_error = ""
    try:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        logical = [_short_name(device.name) for device in tf.config.list_logical_devices()]
    except Exception as error:  # of many kinds, by what the driver lacks
        logical_error = _one_line(error)
    return Runtime(
        tensorflow=tf.__version__,
        keras=keras_version,
        keras_error=keras_error,
        backend=backend,
        physical_devices=[_short_name(device.name) for device in tf.config.list_physical_devices()],
        gpus={name: detail.get("device_name", "unknown") for name, detail in zip(names, details, strict=True)},
        memory_growth=dict(zip(names, growth, strict=True)),
        logical_devices=logical,
        logical_error=logical_error,
    )


def write_runtime() -> None:
    """What the new process does: writes what `start` returns as the last line of its output."""
    sys.stdout.write("\n" + json.dumps(dataclasses.asdict(start())))


def _runtime_of_new_process() -> Runtime:
    command = [sys.executable, "-c", "from tf_gpipe import doctor; doctor.write_runtime()"]
    folder = Path(__file__).parents[1]  # from which tf_gpipe can be imported
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Runtime(tensorflow_error=f"it did not start within {START_SECONDS} seconds")
    if done.returncode < 0:
        return Runtime(tensorflow_error=f"the process ended by {signal.Signals(-done.returncode).name}")
    if done.returncode > 0:
        return Runtime(tensorflow_error=(done.stderr.strip().splitlines() or ["the process ended without a word"])[-1])
    return Runtime(**json.loads(done.stdout.splitlines()[-1]))


def _packages() -> dict[str, str]:
    found = {"tf_gpipe": __version__}
    for name in ("keras", "numpy", *WHEELS, "libtpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _nvidia_gpus() -> tuple[list[Gpu], str]:
    """The GPUs that `nvidia-smi` lists, and what it says if it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], ""
    query = [command, "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], _one_line(error)
    if done.returncode:
        return [], " ".join((done.stdout + done.stderr).split())
    return [Gpu(*(field.strip() for field in line.split(","))) for line in done.stdout.splitlines() if line.strip()], ""


def _short_name(device: str) -> str:
    """`GPU:0` for `/physical_device:GPU:0` and `/device:GPU:0`."""
    return ":".join(device.split(":")[-2:])


def _one_line(error: BaseException) -> str:
    causes = re.findall(r"^\w+Error: .*", str(error), re.MULTILINE)  # TensorFlow puts a whole traceback into a message
    return causes[-1] if causes else f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- checks: each takes the facts and returns what is to be said, or None ---


def check_installed(facts: Facts) -> Finding | None:
    """TensorFlow is installed."""
    if facts.wheels or not facts.runtime.tensorflow_error:
        return None
    remedy = _install(facts)
    if _release(facts.python) > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        remedy += f"  # in an environment of Python 3.10 to {newest}, since TensorFlow has no wheels for {facts.python}"
    return Finding(True, "TensorFlow is not installed.", remedy)


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
    message = f"Keras runs on '{backend}', by {where}. The pipeline is made of TensorFlow."
    return Finding(True, message, "export KERAS_BACKEND=tensorflow  # before Keras is imported")


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
    there, seen = len(facts.nvidia_gpus), len(facts.runtime.gpus)
    if seen >= there or not facts.runtime.tensorflow:
        return None
    message = f"TensorFlow sees {seen} of {there} GPUs."
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if all(wheel.endswith("-cpu") for wheel in facts.wheels) and facts.wheels:
        return Finding(True, f"{message} {facts.wheels[0]} has no code for GPUs.", _reinstall(facts))
    if visible is not None:
        message += f" CUDA_VISIBLE_DEVICES={visible} hides the others."
        return Finding(False, message, "unset CUDA_VISIBLE_DEVICES")
    look = "TF_CPP_MIN_LOG_LEVEL=0 python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\""
    message += (
        " Most often CUDA's libraries are missing, which the extra brings along, or the driver is too old for them."
    )
    return Finding(True, message, f"{_install(facts)}  # then, if it stays so, for the reason: {look}")


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
    return Finding(False, message, "pip uninstall -y tensorflow-tpu libtpu && pip install 'tf_gpipe[cpu]'")


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


def check_flag_of_jax(facts: Facts) -> Finding | None:
    """Logical CPUs are not asked for in the way of another framework."""
    if "xla_force_host_platform_device_count" not in facts.environment.get("XLA_FLAGS", ""):
        return None
    message = "XLA_FLAGS asks for several host devices. JAX makes them, TensorFlow does not."
    return Finding(False, message, "tf_gpipe.set_logical_cpus(4)  # right after the imports")


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
    check_flag_of_jax,
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


def _install(facts: Facts) -> str:
    return f"pip install 'tf_gpipe[{facts.extra}]'"


def _reinstall(facts: Facts) -> str:
    return f"pip uninstall -y {' '.join(facts.wheels)} && {_install(facts)}" if facts.wheels else _install(facts)


def _release(version: str, fields: int = 2) -> tuple[int, ...]:
    """(2, 21) for "2.21.0rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:fields])


# --- writing it down ---


def report(facts: Facts, findings: Sequence[Finding]) -> str:
    """Facts and findings as text, to read or to paste into an issue.

    Args:
        facts: from `gather`.
        findings: from `diagnose`.
    """
    runtime = facts.runtime
    wheels = ", ".join(f"{name} {facts.packages[name]}" for name in facts.wheels)
    logical = (
        f"{', '.join(runtime.logical_devices)} in a trial: a process that has not started TensorFlow can make CPUs"
    )
    unknown = "cannot be imported"
    lines = [
        ("python", f"{facts.python}, {facts.system}"),
        ("tf_gpipe", facts.packages["tf_gpipe"]),
        ("tensorflow", f"{runtime.tensorflow or unknown}, wheel: {wheels or 'none'}"),
        ("keras", f"{facts.packages.get('keras', 'none')}, backend: {runtime.backend or 'unknown'}"),
        ("numpy", facts.packages.get("numpy", "")),
        ("devices", ", ".join(runtime.physical_devices)),
        ("logical devices", logical if runtime.logical_devices else ""),
        *(("nvidia-smi", f"{g.name}, {g.memory}, {g.used} used, driver {g.driver}") for g in facts.nvidia_gpus),
        *((name, f"{gpu}, memory growth {_on(runtime.memory_growth[name])}") for name, gpu in runtime.gpus.items()),
        ("TPU", ", ".join(facts.tpu_signs)),
        *((name, value or "(empty)") for name, value in facts.environment.items()),
    ]
    width = max(len(name) for name, _ in lines)
    text = [f"{name.ljust(width)}  {value or 'none'}" for name, value in lines]
    for finding in findings:
        text += ["", f"{'FAULT' if finding.is_fault else 'note'}: {finding.message}", f"    {finding.remedy}"]
    if not any(finding.is_fault for finding in findings):
        text += ["", "Nothing is wrong."]
    return "\n".join(text)


def _on(value: bool) -> str:
    return "on" if value else "off"
