"""`examples/self_check.py`: what it prints, and that it finds what is wrong."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe
from tf_gpipe import doctor

ROOT = Path(__file__).parents[1]
DEVICES = ("CPU:0", "CPU:1")
FACTS = doctor.Facts("3.12.4", "Linux", {"tf_gpipe": tf_gpipe.__version__}, {}, [], "", [], doctor.Runtime())


@pytest.fixture(scope="module")
def self_check():
    """The script as a module; what it has trained is kept for the tests that follow."""
    spec = importlib.util.spec_from_file_location("self_check", ROOT / "examples" / "self_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(self_check, monkeypatch, capsys):
    """Runs the quick check on the two CPUs and returns the exit code, the rows of its table and all that it printed."""
    monkeypatch.setattr(doctor, "gather", lambda: FACTS)

    def run():
        code = self_check.main(["--quick"])
        printed = capsys.readouterr().out
        rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
        return code, [dict(zip(rows[0], row, strict=True)) for row in rows[2:]], printed

    return run


def test_every_pipeline_comes_to_the_weights_of_its_reference(run):
    code, rows, printed = run()
    assert code == 0
    assert [row["result"] for row in rows] == ["ok"] * 10
    pipelines = [row for row in rows if row["trained in"] == "K = 2, M = 8"]
    assert [(row["model"], row["XLA"], row["precision"]) for row in pipelines] == [
        ("dense", "no", "float32"),
        ("dense", "yes", "float32"),
        ("dense", "no", "mixed_float16"),
        ("convolutional", "no", "float32"),
        ("transformer", "no", "float32"),
    ]
    for row in pipelines:
        assert float(row["differ by"]) < (1e-4 if row["precision"] == "float32" else 1e-2)
        assert float(row["step, ms"]) > 0
    assert "0 failed checks" in printed
    assert printed.endswith(doctor.report(FACTS, doctor.diagnose(FACTS)) + "\n")


def test_weights_that_differ_fail(run, self_check, monkeypatch):
    monkeypatch.setattr(self_check, "TOLERANCE", {"float32": 0.0, "mixed_float16": 1.0})
    code, rows, printed = run()
    assert code == 1
    failed = {row["precision"] for row in rows if row["result"] == "FAILED: weights differ"}
    assert failed == {"float32"}
    assert "0 failed checks" not in printed


def test_a_case_that_raises_is_a_row(self_check, capsys):
    cells, _, wrong = self_check.check(self_check.Case("dense", 3, 8), self_check.QUICK, DEVICES)
    assert (cells[:4], wrong) == (["dense", "K = 3, M = 8", "no", "float32"], "DeviceError")
    assert "Expected one device for each of the 3 stages" in capsys.readouterr().err


def test_a_difference_is_a_share_of_what_training_changed(self_check):
    initial, reference = [np.zeros(3), np.ones(2)], [np.array([0.0, 0.5, 0.0]), np.ones(2)]
    weights = [reference[0], reference[1] + 0.125]
    assert self_check.find_difference(weights, reference, initial) == 0.25
    assert self_check.find_difference(reference, reference, initial) == 0.0


def test_weights_and_momenta_on_a_wrong_device_are_found(self_check):
    case = self_check.Case("dense", 2, 8)
    model, strategy = self_check.compiled_model(case, self_check.QUICK, DEVICES)
    model.train_on_batch(np.zeros([16, 16]), np.zeros(16, int))
    plan = strategy.plan(model)
    assert self_check.find_misplaced(model, plan) == []
    first, second = plan.stages
    moved = dataclasses.replace(plan, stages=(first, dataclasses.replace(second, device=first.device)))
    expected = {variable.path for variable in second.variables}
    assert expected
    misplaced = self_check.find_misplaced(model, moved)
    assert expected < set(misplaced)  # and their momenta
    assert len(misplaced) == 2 * len(expected)


def test_what_each_case_is_compared_with(self_check):
    cases = self_check.make_cases(range(1, 4), quick=False)
    assert len(cases) == 24
    for case in cases:
        reference = case.reference
        assert (reference.model, reference.xla, reference.precision) == (case.model, case.xla, case.precision)
        normed_in_parts = case.model == "convolutional" and case.num_stages > 1
        assert (reference.num_stages, reference.num_micro_batches) == ((1, 8) if normed_in_parts else (0, 0))


# --- with GPUs, as TensorFlow would list them ---


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that a machine has so many GPUs; returns what has been configured for each."""

    def set_up(count: int) -> dict[str, list]:
        physical = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(count)]
        done: dict[str, list] = {}

        def split(gpu, parts):
            done[gpu.name] = [part.memory_limit for part in parts]

        def grow(gpu, enable):
            done[gpu.name] = [enable]

        def logical(kind):
            sizes = [len(done[gpu.name]) for gpu in physical]
            return [tf.config.LogicalDevice(f"/device:{kind}:{i}", kind) for i in range(sum(sizes))]

        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: physical)
        monkeypatch.setattr(tf.config, "set_logical_device_configuration", split)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", grow)
        monkeypatch.setattr(tf.config, "list_logical_devices", logical)
        monkeypatch.setattr(tf.config.experimental, "enable_tensor_float_32_execution", lambda enabled: None)
        return done

    return set_up


def test_one_gpu_is_divided(self_check, gpus):
    done = gpus(1)
    assert self_check.make_devices(None) == ("GPU:0", "GPU:1")
    assert done == {"/physical_device:GPU:0": [2048, 2048]}


def test_all_gpus_are_used_or_as_many_as_asked_for(self_check, gpus):
    done = gpus(3)
    assert self_check.make_devices(None) == ("GPU:0", "GPU:1", "GPU:2")
    assert self_check.make_devices(2) == ("GPU:0", "GPU:1")
    assert done == {f"/physical_device:GPU:{i}": [True] for i in range(3)}
