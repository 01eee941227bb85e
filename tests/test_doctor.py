"""`python -m tf_gpipe doctor`: every check on made-up facts, what is gathered, and the command itself."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tf_gpipe
from tf_gpipe import cli, doctor_checks, doctor_facts
from tf_gpipe.doctor_checks import Finding
from tf_gpipe.doctor_facts import Facts, Gpu, Runtime

ROOT = Path(__file__).parents[1]
A100 = Gpu("NVIDIA A100-SXM4-80GB", "81920 MiB", "5 MiB", "550.54.15")
ON_GPUS = Runtime(
    tensorflow="2.21.0",
    keras="3.15.1",
    backend="tensorflow",
    physical_devices=["CPU:0", "GPU:0", "GPU:1"],
    gpus={"GPU:0": A100.name, "GPU:1": A100.name},
    memory_growth={"GPU:0": False, "GPU:1": True},
    logical_devices=["CPU:0", "CPU:1", "GPU:0", "GPU:1"],
)
ON_CPU = dataclasses.replace(
    ON_GPUS, physical_devices=["CPU:0"], gpus={}, memory_growth={}, logical_devices=["CPU:0", "CPU:1"]
)
HEALTHY = Facts(
    python="3.12.4",
    system="Linux",
    packages={"tf_gpipe": "0.1.0", "keras": "3.15.1", "numpy": "2.1.0", "tensorflow": "2.21.0"},
    installed=False,
    environment={},
    nvidia_gpus=[A100, A100],
    nvidia_error="",
    nvidia_files=["/dev/nvidia0", "/dev/nvidia1"],
    tpu_files=[],
    runtime=ON_GPUS,
)
CPU_MACHINE = dataclasses.replace(HEALTHY, nvidia_gpus=[], nvidia_files=[], runtime=ON_CPU)
CLUSTER = '{"cluster": {"chief": ["10.0.0.1:1"], "worker": {"1": "10.0.0.2:1"}}}'


def machine(start: Facts = HEALTHY, wheels: dict[str, str] | None = None, **changes) -> Facts:
    """Facts with other wheels, other packages, or anything else of `Facts` and of its `Runtime` changed."""
    packages = changes.pop("packages", start.packages)
    if wheels is not None:
        packages = {name: version for name, version in packages.items() if name not in doctor_facts.WHEELS} | wheels
    of_runtime = {name: changes.pop(name) for name in [*changes] if name in Runtime.__dataclass_fields__}
    runtime = dataclasses.replace(start.runtime, **of_runtime)
    return dataclasses.replace(start, packages=packages, runtime=runtime, **changes)


def without(error: str, start: Facts = CPU_MACHINE, **changes) -> Facts:
    """A machine on which TensorFlow cannot be imported."""
    return machine(dataclasses.replace(start, runtime=Runtime(tensorflow_error=error)), **changes)


NO_MODULE = "ModuleNotFoundError: No module named 'tensorflow'"
TPU_VM = {"environment": {"PJRT_DEVICE": "TPU"}, "tpu_files": ["/dev/accel0"]}
FAULTS = {
    "nothing": (
        without(NO_MODULE, wheels={}),
        "TensorFlow is not installed",
        "pip install '.[cpu]'  # in a clone of tf_gpipe",
    ),
    "nothing, on a machine with GPUs": (
        without(NO_MODULE, HEALTHY, wheels={}),
        "TensorFlow is not installed",
        "pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "nothing, in a Python without wheels": (
        without(NO_MODULE, wheels={}, python="3.14.0"),
        "TensorFlow is not installed",
        "pip install '.[cpu]'  # in a clone of tf_gpipe, in an environment of Python 3.10 to 3.13, since",
    ),
    "two wheels": (
        machine(wheels={"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"}),
        "more than one TensorFlow: tensorflow 2.21.0 and tensorflow-cpu 2.20.0",
        "pip uninstall -y tensorflow tensorflow-cpu && pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "tensorflow-tpu beside TensorFlow 2.21": (
        machine(CPU_MACHINE, wheels={"tensorflow": "2.21.0", "tensorflow-tpu": "2.20.0"}, **TPU_VM),
        "tensorflow-tpu holds a whole TensorFlow, up to 2.20, and stands alone",
        "pip uninstall -y tensorflow tensorflow-tpu && pip install '.[tpu]'  # in a clone of tf_gpipe",
    ),
    "a broken installation": (
        without("ImportError: libcudart.so.12: cannot open shared object file"),
        "cannot be imported: ImportError: libcudart",
        "pip uninstall -y tensorflow && pip install '.[cpu]'  # in a clone of tf_gpipe",
    ),
    "an old processor": (without("the process ended by SIGILL"), "a processor with AVX", "pip install"),
    "too old": (
        machine(CPU_MACHINE, wheels={"tensorflow-cpu": "2.18.1"}, tensorflow="2.18.1"),
        "made for tensorflow-cpu 2.19 to 2.21. This is 2.18.1",
        "pip uninstall -y tensorflow-cpu && pip install '.[cpu]'  # in a clone of tf_gpipe",
    ),
    "too new, and cannot be imported": (
        without("ImportError: numpy", wheels={"tensorflow": "2.22.0rc1"}),
        "made for tensorflow 2.19 to 2.21. This is 2.22.0rc1",
        "pip install '.[cpu]'  # in a clone of tf_gpipe",
    ),
    "tensorflow-tpu 2.21": (
        machine(CPU_MACHINE, wheels={"tensorflow-tpu": "2.21.0"}, **TPU_VM),
        "made for tensorflow-tpu 2.19 to 2.20. This is 2.21.0",
        "pip install '.[tpu]'  # in a clone of tf_gpipe",
    ),
    "no Keras": (
        machine(packages={"tf_gpipe": "0.1.0", "tensorflow": "2.21.0"}, keras="", keras_error="ModuleNotFoundError"),
        "Keras is not installed",
        'pip install "keras>=3.12,<4"',
    ),
    "Keras 2": (machine(keras="2.15.0"), "This is 2.15.0", 'pip install "keras>=3.12,<4"'),
    "a broken Keras": (
        machine(keras="", backend="", keras_error="ModuleNotFoundError: No module named 'jax'"),
        "Keras cannot be imported: ModuleNotFoundError: No module named 'jax'",
        "KERAS_BACKEND=tensorflow python -c 'import keras'",
    ),
    "another backend": (
        machine(environment={"KERAS_BACKEND": "jax"}, keras="", backend="", keras_error="No module named 'jax'"),
        "Keras is to run on 'jax', by KERAS_BACKEND",
        "export KERAS_BACKEND=tensorflow  # or unset it, before Keras is imported",
    ),
    "another backend by the configuration file": (
        machine(backend="torch"),
        "Keras is to run on 'torch', by Keras's configuration file",
        "export KERAS_BACKEND=tensorflow  # before Keras is imported",
    ),
    "no driver": (
        machine(CPU_MACHINE, nvidia_error="NVIDIA-SMI has failed"),
        "no GPU will: NVIDIA-SMI has failed",
        "nvidia-smi",
    ),
    "GPUs with the wheel for CPUs": (
        machine(CPU_MACHINE, wheels={"tensorflow-cpu": "2.21.0"}, nvidia_gpus=[A100]),
        "sees 0 of 1 GPUs. tensorflow-cpu has no code for GPUs",
        "pip uninstall -y tensorflow-cpu && pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "GPUs without CUDA": (
        machine(CPU_MACHINE, nvidia_gpus=[A100, A100]),
        "sees 0 of 2 GPUs. Most often CUDA's libraries are missing",
        "pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "GPUs without CUDA, although all are visible": (
        machine(CPU_MACHINE, nvidia_gpus=[A100, A100], environment={"CUDA_VISIBLE_DEVICES": "0,1"}),
        "sees 0 of 2 GPUs. Most often CUDA's libraries are missing",
        "pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "GPUs without CUDA, where nvidia-smi is not installed": (
        machine(CPU_MACHINE, nvidia_files=["/dev/nvidia0"]),
        "sees 0 of 1 GPUs. Most often CUDA's libraries are missing",
        "pip install '.[gpu]'  # in a clone of tf_gpipe",
    ),
    "a flag that TensorFlow does not know": (
        machine(
            environment={"XLA_FLAGS": "--nonsense", "TF_XLA_FLAGS": "--tf_xla_auto_jit=1"},
            flags_error="Unknown flag in XLA_FLAGS: --nonsense",
        ),
        "cannot read XLA_FLAGS, and ends the process: Unknown flag in XLA_FLAGS: --nonsense",
        "unset XLA_FLAGS  #",
    ),
    "a value that TensorFlow cannot read, in one of two variables": (
        machine(
            environment={"XLA_FLAGS": "--xla_a=x", "TF_XLA_FLAGS": "--tf_xla_b=y"},
            flags_error="Cannot parse --xla_a=x",
        ),
        "cannot read XLA_FLAGS or TF_XLA_FLAGS, and ends the process: Cannot parse --xla_a=x",
        "unset XLA_FLAGS TF_XLA_FLAGS  #",
    ),
    "a TF_CONFIG that is not JSON": (
        machine(environment={"TF_CONFIG": "worker:0"}),
        "TF_CONFIG is not JSON, and strategies of tf.distribute that read it fail: Expecting value",
        "unset TF_CONFIG",
    ),
    "an empty TF_CONFIG": (
        machine(environment={"TF_CONFIG": ""}),
        "TF_CONFIG is not JSON",
        "unset TF_CONFIG",
    ),
    "TPUs with the stock wheel": (
        machine(CPU_MACHINE, **TPU_VM),
        "a machine with TPUs (PJRT_DEVICE=TPU, /dev/accel0), for which tensorflow has no code",
        "pip uninstall -y tensorflow && pip install '.[tpu]'  # in a clone of tf_gpipe",
    ),
    "a libtpu that TensorFlow cannot load": (
        without("the process ended by SIGABRT", wheels={"tensorflow-tpu": "2.20.0", "libtpu": "0.0.52"}, **TPU_VM),
        "libtpu 0.0.52 is too new for tensorflow-tpu",
        "pip install 'libtpu<0.0.15'",
    ),
    "devices that do not start": (
        machine(logical_devices=[], logical_error="InternalError: CUDA_ERROR_NOT_PERMITTED"),
        "devices do not start: InternalError: CUDA_ERROR_NOT_PERMITTED",
        "CUDA_VISIBLE_DEVICES= python -m tf_gpipe doctor",
    ),
}
NOTES = {
    "no GPU": (CPU_MACHINE, "sees no GPU", "tf_gpipe.set_logical_cpus(4)"),
    "one GPU": (
        machine(nvidia_gpus=[A100], gpus={"GPU:0": A100.name}),
        "There is one GPU, for one stage",
        "tf.config.set_logical_device_configuration",
    ),
    "hidden GPUs": (
        machine(environment={"CUDA_VISIBLE_DEVICES": "0"}, gpus={"GPU:0": A100.name}),
        "sees 1 of 2 GPUs. CUDA_VISIBLE_DEVICES=0 hides the others",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "GPUs that are all hidden": (
        machine(CPU_MACHINE, nvidia_gpus=[A100, A100], environment={"CUDA_VISIBLE_DEVICES": "-1"}),
        "sees 0 of 2 GPUs. CUDA_VISIBLE_DEVICES=-1 hides them all",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a hidden GPU, where nvidia-smi is not installed": (
        machine(CPU_MACHINE, nvidia_files=["/dev/nvidia0"], environment={"CUDA_VISIBLE_DEVICES": ""}),
        "sees 0 of 1 GPUs. CUDA_VISIBLE_DEVICES=(empty) hides it",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a cluster": (
        machine(environment={"TF_CONFIG": CLUSTER}),
        "names a cluster of 2 tasks (10.0.0.1:1, 10.0.0.2:1). A pipeline runs on one machine",
        "unset TF_CONFIG",
    ),
    "unlike GPUs": (
        machine(gpus={"GPU:0": A100.name, "GPU:1": "NVIDIA L4"}),
        "The GPUs differ: NVIDIA A100-SXM4-80GB, NVIDIA L4",
        "partition=[...]",
    ),
    "Keras 2 as tf.keras": (
        machine(environment={"TF_USE_LEGACY_KERAS": "1"}),
        "makes `tf.keras` Keras 2",
        "unset TF_USE_LEGACY_KERAS",
    ),
    "the wheel for TPUs on a CPU": (
        machine(CPU_MACHINE, wheels={"tensorflow-tpu": "2.20.0", "libtpu": "0.0.14"}, tensorflow="2.20.0"),
        "no sign of a TPU",
        "pip uninstall -y tensorflow-tpu libtpu && pip install '.[cpu]'  # in a clone of tf_gpipe",
    ),
    "the flag of JAX": (
        machine(environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        "JAX makes them, TensorFlow does not",
        "tf_gpipe.set_logical_cpus(4)",
    ),
}


def said(findings: list[Finding], message: str, remedy: str) -> list[Finding]:
    return [finding for finding in findings if message in finding.message and remedy in finding.remedy]


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case):
    facts, message, remedy = FAULTS[case]
    (finding,) = said(doctor_checks.diagnose(facts), message, remedy)
    assert finding.is_fault
    assert f"FAULT: {finding.message}\n    {finding.remedy}" in doctor_checks.report(
        facts, doctor_checks.diagnose(facts)
    )


@pytest.mark.parametrize("case", NOTES)
def test_notes(case):
    facts, message, remedy = NOTES[case]
    findings = doctor_checks.diagnose(facts)
    (finding,) = said(findings, message, remedy)
    assert not any(finding.is_fault for finding in findings)
    assert f"note: {finding.message}\n    {finding.remedy}" in doctor_checks.report(facts, findings)


@pytest.mark.parametrize("case", [case for case, (_, _, remedy) in {**FAULTS, **NOTES}.items() if "clone" in remedy])
def test_whoever_installed_a_wheel_is_not_told_of_a_clone(case):
    facts, _, _ = {**FAULTS, **NOTES}[case]
    there = [finding.remedy for finding in doctor_checks.diagnose(dataclasses.replace(facts, installed=True))]
    in_clone = [finding.remedy for finding in doctor_checks.diagnose(facts)]
    pattern = re.compile(r"'\.(\[\w+\])'  # in a clone of tf_gpipe(?:(, )|$)")
    changed = [pattern.sub(lambda found: f"'tf_gpipe{found[1]}'{'  # ' if found[2] else ''}", r) for r in in_clone]
    assert there == changed != in_clone


def test_each_check_finds_something_in_some_case():
    cases = [facts for facts, _, _ in [*FAULTS.values(), *NOTES.values()]]
    for check in doctor_checks.CHECKS:
        assert any(check(facts) for facts in cases), check.__name__


def test_nothing_is_found_on_a_machine_with_gpus_that_is_well():
    assert doctor_checks.diagnose(HEALTHY) == []
    report = doctor_checks.report(HEALTHY, [])
    assert report.endswith("\n\nNothing is wrong.")
    for line in (
        "tensorflow       2.21.0, wheel: tensorflow 2.21.0",
        "devices          CPU:0, GPU:0, GPU:1",
        "logical devices  CPU:0, CPU:1, GPU:0, GPU:1 (the CPU divided into two, as a test: this works)",
        "nvidia-smi       NVIDIA A100-SXM4-80GB, 81920 MiB, 5 MiB used, driver 550.54.15",
        "GPU:0            NVIDIA A100-SXM4-80GB, memory growth off",
        "GPU:1            NVIDIA A100-SXM4-80GB, memory growth on",
        "TPU              none",
    ):
        assert line in report.splitlines()


def test_nothing_is_found_on_a_tpu_vm_that_is_well():
    wheels = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.14"}
    assert doctor_checks.diagnose(machine(CPU_MACHINE, wheels=wheels, tensorflow="2.20.0", **TPU_VM)) == []


@pytest.mark.parametrize(
    "config", ["{}", "[]", "3", '{"cluster": {"chief": ["host:1"]}}', '{"cluster": []}', '{"task": {"index": 0}}']
)
def test_a_tf_config_that_names_no_other_machine(config):
    assert doctor_checks.diagnose(machine(environment={"TF_CONFIG": config})) == []


@pytest.mark.parametrize(
    ("visible", "seen", "hides"),
    [
        ("0", 1, True),
        ("1", 0, False),
        ("1,0", 1, False),
        ("0,-1,1", 1, True),
        ("7,0", 0, True),
        ("GPU-8932f937-d72c", 1, True),
        ("GPU-8932f937-d72c", 0, False),
        ("MIG-1, MIG-2, MIG-3", 2, False),
        ("NoDevFiles", 0, True),
    ],
)
def test_whether_hidden_gpus_are_all_that_tensorflow_lacks(visible, seen, hides):
    gpus = {f"GPU:{i}": A100.name for i in range(seen)}
    facts = machine(environment={"CUDA_VISIBLE_DEVICES": visible}, gpus=gpus, nvidia_gpus=[A100] * 3)
    (finding,) = [finding for finding in doctor_checks.diagnose(facts) if "of 3 GPUs" in finding.message]
    assert (f"CUDA_VISIBLE_DEVICES={visible} hides" in finding.message) == hides
    assert finding.is_fault != hides


def test_device_files_do_not_count_where_nvidia_smi_fails():
    facts = machine(CPU_MACHINE, nvidia_error="NVIDIA-SMI has failed", nvidia_files=["/dev/nvidia0"])
    assert [finding.message for finding in doctor_checks.diagnose(facts) if finding.is_fault] == [
        "nvidia-smi does not work, so that no GPU will: NVIDIA-SMI has failed"
    ]


def test_a_value_of_several_lines_is_one_line_of_the_report():
    facts = machine(environment={"TF_CONFIG": '{\n  "cluster": {}\n}'})
    assert 'TF_CONFIG        { "cluster": {} }' in doctor_checks.report(facts, []).splitlines()


def test_faults_come_first():
    facts = machine(environment={"TF_USE_LEGACY_KERAS": "1"}, logical_devices=[], logical_error="InternalError")
    assert [finding.is_fault for finding in doctor_checks.diagnose(facts)] == [True, False]


def test_supported_releases_are_those_of_setup():
    setup = (ROOT / "setup.py").read_text()
    assert len(doctor_checks.SUPPORTED) == 4
    for name, (first, end) in doctor_checks.SUPPORTED.items():
        name = "tensorflow[and-cuda]" if name == "tensorflow" else name
        upper = "4" if end == (4, 0) else f"{end[0]}.{end[1]}"
        assert f'"{name}>={first[0]}.{first[1]},<{upper}"' in setup
    assert f'"libtpu<{".".join(map(str, doctor_checks.LIBTPU_END))}"' in setup


# --- gathering ---


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Makes a program that stands first on the PATH."""

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.fixture
def replace_tensorflow(tmp_path, monkeypatch):
    """Puts a module before TensorFlow, for processes that are started from now on."""

    def replace(source: str) -> None:
        (tmp_path / "tensorflow.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return replace


def test_gpus_as_nvidia_smi_lists_them(on_path, replace_tensorflow):
    on_path(
        "nvidia-smi", "echo 'NVIDIA L4, 23034 MiB, 1 MiB, 550.54.15'\necho 'NVIDIA L4, 23034 MiB, 2 MiB, 550.54.15'"
    )
    replace_tensorflow("")
    l4 = Gpu("NVIDIA L4", "23034 MiB", "1 MiB", "550.54.15")
    assert doctor_facts.gather().nvidia_gpus == [l4, dataclasses.replace(l4, used="2 MiB")]


def test_a_driver_that_does_not_answer(on_path, replace_tensorflow):
    on_path("nvidia-smi", "echo 'could not communicate with the driver'; exit 9")
    replace_tensorflow("")
    facts = doctor_facts.gather()
    assert (facts.nvidia_gpus, facts.nvidia_error) == ([], "could not communicate with the driver")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('no libcudart')", "ImportError: no libcudart"),
        (
            "raise ImportError('Traceback:\\n  File 1\\nOSError: no libcudart\\n\\nFailed to load.')",
            "OSError: no libcudart",
        ),
        ("import os; os.abort()", "the process ended by SIGABRT"),
        ("import sys; sys.exit('no licence')", "no licence"),
    ],
)
def test_a_tensorflow_that_cannot_be_imported(replace_tensorflow, source, error):
    replace_tensorflow(source)
    facts = doctor_facts.gather()
    assert (facts.runtime.tensorflow, facts.runtime.tensorflow_error) == ("", error)
    assert any(finding.is_fault and error in finding.message for finding in doctor_checks.diagnose(facts))


def test_device_files_of_gpus(replace_tensorflow, tmp_path, monkeypatch):
    replace_tensorflow("")
    monkeypatch.setattr(doctor_facts, "NVIDIA_FILES", f"{tmp_path}/nvidia[0-9]*")
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    facts = dataclasses.replace(doctor_facts.gather(), nvidia_gpus=[], nvidia_error="")
    assert facts.nvidia_files == [f"{tmp_path}/nvidia0", f"{tmp_path}/nvidia1"]
    assert facts.extra == "gpu"
    assert f"{tmp_path}/nvidia0, {tmp_path}/nvidia1" in doctor_checks.report(facts, [])


def test_a_process_that_has_started_tensorflow_makes_no_more_logical_cpus():
    tf.config.list_logical_devices()
    here = doctor_facts.start()
    assert (here.tensorflow, here.keras, here.backend) == (tf.__version__, keras.__version__, "tensorflow")
    assert "cannot be modified after being initialized" in here.logical_error


# --- what of the environment ends TensorFlow, or keeps it from being imported ---


def findings_with(monkeypatch, **environment) -> tuple[Runtime, list[Finding]]:
    """What the real TensorFlow says, and what is found, in this environment; only faults."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    facts = doctor_facts.gather()
    return facts.runtime, [finding for finding in doctor_checks.diagnose(facts) if finding.is_fault]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("XLA_FLAGS", "--nonsense", "Unknown flag in XLA_FLAGS: --nonsense"),
        ("XLA_FLAGS", "nonsense", 'Could not open file "nonsense" to read flags for environment variable "XLA_FLAGS"'),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=high", "Cannot parse --xla_gpu_autotune_level=high"),
        ("TF_XLA_FLAGS", "--nonsense", "Unknown flag in TF_XLA_FLAGS: --nonsense"),
    ],
)
def test_flags_that_end_the_process(monkeypatch, name, value, reason):
    runtime, (fault,) = findings_with(monkeypatch, **{name: value})
    assert f"cannot read {name}, and ends the process: {reason}" in fault.message
    assert fault.remedy.startswith(f"unset {name}  #")
    assert (runtime.tensorflow, runtime.logical_devices[:2]) == (tf.__version__, ["CPU:0", "CPU:1"])


def test_flags_that_tensorflow_knows(monkeypatch):
    runtime, faults = findings_with(monkeypatch, XLA_FLAGS="--xla_gpu_autotune_level=1")
    assert (runtime.flags_error, faults) == ("", [])


def test_a_backend_that_does_not_exist_is_the_only_fault(monkeypatch):
    runtime, (fault,) = findings_with(monkeypatch, KERAS_BACKEND="nonsense")
    assert "Keras is to run on 'nonsense', by KERAS_BACKEND" in fault.message
    assert fault.remedy == "export KERAS_BACKEND=tensorflow  # or unset it, before Keras is imported"
    assert runtime.tensorflow == tf.__version__
    assert (runtime.keras, runtime.keras_error) == ("", "ValueError: Unable to import backend : nonsense")


def test_a_backend_that_does_not_exist_in_the_configuration_file(monkeypatch, tmp_path):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    (tmp_path / "keras.json").write_text('{"backend": "nonsense"}')
    _, (fault,) = findings_with(monkeypatch, KERAS_HOME=str(tmp_path))
    assert "Keras cannot be imported" in fault.message
    assert fault.remedy.startswith("KERAS_BACKEND=tensorflow python -c 'import keras'  # if this works, export")


def test_a_wrong_backend_and_a_wrong_flag_are_both_found(monkeypatch):
    _, faults = findings_with(monkeypatch, KERAS_BACKEND="nonsense", TF_XLA_FLAGS="--nonsense")
    assert [fault.remedy.split("  #")[0] for fault in faults] == [
        "export KERAS_BACKEND=tensorflow",
        "unset TF_XLA_FLAGS",
    ]


# --- the command ---


@pytest.mark.parametrize(("facts", "code"), [(HEALTHY, 0), (CPU_MACHINE, 0), (machine(backend="jax"), 1)])
def test_the_exit_code_says_whether_there_is_a_fault(monkeypatch, capsys, facts, code):
    monkeypatch.setattr(doctor_facts, "gather", lambda: facts)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out == doctor_checks.report(facts, doctor_checks.diagnose(facts)) + "\n"
    assert cli.main(["doctor", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["packages"] == facts.packages
    assert [finding["message"] for finding in printed["findings"]] == [f.message for f in doctor_checks.diagnose(facts)]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_gone_is_no_error(replace_tensorflow, options):
    replace_tensorflow("raise ImportError('no libcudart')")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tf_gpipe", "doctor", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")  # 1 for the fault


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([], prog="python -m tf_gpipe") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: python -m tf_gpipe [-h] [--version] command ...\n")
    assert "doctor" in printed.out
    assert printed.err == ""


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tf_gpipe {tf_gpipe.__version__}\n"


def test_a_command_that_there_is_not(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        cli.main(["docter"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: tf_gpipe [-h] [--version] command ..."
    assert error.startswith("tf_gpipe: error: argument command: invalid choice: 'docter'")


def test_both_ways_to_start_it():
    """The console script, which pip makes, and the package as a program."""
    [entry] = metadata.entry_points(group="console_scripts", name="tf_gpipe")
    assert entry.load() is cli.main
    for name, start in (
        ("tf_gpipe", [str(Path(sysconfig.get_path("scripts")) / "tf_gpipe")]),
        ("python -m tf_gpipe", [sys.executable, "-m", "tf_gpipe"]),
    ):
        done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: {name} [-h]")


def test_the_command_in_a_process_of_its_own():
    command = [sys.executable, "-m", "tf_gpipe", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = json.loads(done.stdout)
    facts = printed["facts"]
    assert facts["packages"]["tf_gpipe"] == tf_gpipe.__version__
    assert facts["runtime"]["tensorflow"] == tf.__version__
    assert {"CPU:0", "CPU:1"} <= set(facts["runtime"]["logical_devices"])
    assert done.returncode == any(finding["is_fault"] for finding in printed["findings"])
    assert done.stderr == ""


def test_the_command_line_does_not_import_tensorflow():
    program = "import sys, tf_gpipe.cli, tf_gpipe.__main__; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
