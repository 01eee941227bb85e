"""What is installed and which devices there are, as `python -m tf_gpipe doctor` finds it; `doctor_checks.py` judges it.

`gather` collects `Facts`. TensorFlow is imported in a process of its own: its log lines, a crash on import and the
devices that it starts stay there.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tf_gpipe import installation
from tf_gpipe.version import __version__

WHEELS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu")
"""Distributions that all install the package `tensorflow`."""

FLAGS = ("XLA_FLAGS", "TF_XLA_FLAGS")
"""Variables of which an unknown flag, or a bad value of one, ends the process inside TensorFlow."""

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
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    *FLAGS,
)

NVIDIA_FILES = "/dev/nvidia[0-9]*"  # one a GPU, made by the driver
TPU_FILES = "/dev/accel[0-9]*"
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
        flags_error: what TensorFlow said of the flags in `FLAGS` when they ended the process. The rest of these
            attributes is from another process, without the flags.
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
    flags_error: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that the checks go by.

    Attributes:
        python: its version.
        system: operating system and processor.
        packages: versions of what is installed, by distribution.
        installed: whether pip installed tf_gpipe; else it is a clone on the path.
        environment: variables that bear on devices, if they are set.
        nvidia_gpus: the GPUs that `nvidia-smi` lists, whether TensorFlow sees them or not.
        nvidia_error: what `nvidia-smi` said if it failed.
        nvidia_files: device files of GPUs.
        tpu_files: device files of TPUs.
        runtime: what TensorFlow says.
    """

    python: str
    system: str
    packages: dict[str, str]
    installed: bool
    environment: dict[str, str]
    nvidia_gpus: Sequence[Gpu]
    nvidia_error: str
    nvidia_files: Sequence[str]
    tpu_files: Sequence[str]
    runtime: Runtime

    @property
    def wheels(self) -> list[str]:
        """The distributions of TensorFlow that are installed."""
        return [name for name in WHEELS if name in self.packages]

    @property
    def num_gpus(self) -> int:
        """How many GPUs this machine has, by `nvidia-smi` or, where that is not installed, by their device files."""
        return len(self.nvidia_gpus or ([] if self.nvidia_error else self.nvidia_files))

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
        return "tpu" if self.tpu_signs else "gpu" if self.num_gpus else "cpu"

    def lines(self) -> list[tuple[str, str]]:
        """Name and value of each, as a person reads them."""
        runtime = self.runtime
        wheels = ", ".join(f"{name} {self.packages[name]}" for name in self.wheels)
        trial = "(the CPU divided into two, as a test: this works)"
        return [
            ("python", f"{self.python}, {self.system}"),
            ("tf_gpipe", self.packages["tf_gpipe"]),
            ("tensorflow", f"{runtime.tensorflow or 'cannot be imported'}, wheel: {wheels or 'none'}"),
            ("keras", f"{self.packages.get('keras', 'none')}, backend: {runtime.backend or 'unknown'}"),
            ("numpy", self.packages.get("numpy", "")),
            ("devices", ", ".join(runtime.physical_devices)),
            ("logical devices", f"{', '.join(runtime.logical_devices)} {trial}" if runtime.logical_devices else ""),
            *(("nvidia-smi", f"{g.name}, {g.memory}, {g.used} used, driver {g.driver}") for g in self.nvidia_gpus),
            *((name, f"{gpu}, memory growth {_on(runtime.memory_growth[name])}") for name, gpu in runtime.gpus.items()),
            *([("GPU files", ", ".join(self.nvidia_files))] if self.nvidia_files and not self.nvidia_gpus else []),
            ("TPU", ", ".join(self.tpu_signs)),
            *((name, " ".join(value.split()) or "(empty)") for name, value in self.environment.items()),
        ]


def gather() -> Facts:
    """Looks at this machine and this Python; takes as long as TensorFlow takes to start."""
    gpus, error = _nvidia_gpus()
    return Facts(
        python=platform.python_version(),
        system=platform.platform(),
        packages=_packages(),
        installed=installation.is_installed(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        nvidia_gpus=gpus,
        nvidia_error=error,
        nvidia_files=sorted(glob.glob(NVIDIA_FILES)),
        tpu_files=sorted(glob.glob(TPU_FILES)),
        runtime=_runtime(),
    )


# --- TensorFlow, in a process of its own ---


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
    if os.environ.get("XLA_FLAGS"):
        _read_flags()
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


def _read_flags() -> None:
    """Compiles something with XLA, which reads its flags only then, and ends the process if it does not know one."""
    import tensorflow as tf

    # Of any kind: tensorflow-tpu compiles nothing for CPUs, and only whether the process ends here is of interest.
    with contextlib.suppress(Exception), tf.device("CPU:0"):
        tf.function(lambda x: x + 1.0, jit_compile=True)(0.0)


def _runtime() -> Runtime:
    """What TensorFlow says in a new process; with faults of the environment, that and what it says without them."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    runtime, keras_error = _runtime_of_new_process(environment), ""
    if runtime.tensorflow_error and environment.get("KERAS_BACKEND") != "tensorflow":
        # TensorFlow imports Keras, which may fail on its backend.
        environment["KERAS_BACKEND"] = "tensorflow"
        again = _runtime_of_new_process(environment)
        if not again.tensorflow_error:
            runtime, keras_error = again, runtime.tensorflow_error
    if runtime.flags_error:
        without = {name: value for name, value in environment.items() if name not in FLAGS}
        runtime = dataclasses.replace(_runtime_of_new_process(without), flags_error=runtime.flags_error)
    if keras_error:
        runtime = dataclasses.replace(runtime, keras="", keras_error=keras_error, backend="")
    return runtime


def _runtime_of_new_process(environment: Mapping[str, str]) -> Runtime:
    command = [sys.executable, "-c", "from tf_gpipe import doctor_facts; doctor_facts.write_runtime()"]
    folder = Path(__file__).parents[1]  # from which tf_gpipe can be imported
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Runtime(tensorflow_error=f"it did not start within {START_SECONDS} seconds")
    if done.returncode == 0:
        return Runtime(**json.loads(done.stdout.splitlines()[-1]))
    if flags := re.search(r"parse_flags_from_env\.cc:\d+\] (.*(?:\nusage: .*)?)", done.stderr):
        return Runtime(flags_error=re.sub(r".*\nusage: ", "Cannot parse ", flags[1]))
    if done.returncode < 0:
        return Runtime(tensorflow_error=f"the process ended by {signal.Signals(-done.returncode).name}")
    return Runtime(tensorflow_error=(done.stderr.strip().splitlines() or ["the process ended without a word"])[-1])


def _short_name(device: str) -> str:
    """`GPU:0` for `/physical_device:GPU:0` and `/device:GPU:0`."""
    return ":".join(device.split(":")[-2:])


def _one_line(error: BaseException) -> str:
    causes = re.findall(r"^\w+Error: .*", str(error), re.MULTILINE)  # TensorFlow puts a whole traceback into a message
    return causes[-1] if causes else f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- the rest of the machine ---


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


def _on(value: bool) -> str:
    return "on" if value else "off"
