"""`examples/self_check.py`: what it prints, and that it finds what is wrong."""

import dataclasses
import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe
from tf_gpipe import doctor_checks, doctor_facts

ROOT = Path(__file__).parents[1]
DEVICES = ("CPU:0", "CPU:1")
FACTS = doctor_facts.Facts(
    python="3.12.4",
    system="Linux",
    packages={"tf_gpipe": tf_gpipe.__version__},
    installed=True,
    environment={},
    nvidia_gpus=[],
    nvidia_error="",
    nvidia_files=[],
    tpu_files=[],
    runtime=doctor_facts.Runtime(),
)


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
    monkeypatch.setattr(doctor_facts, "gather", lambda: FACTS)

    def run():
        code = self_check.main(["--quick"])
        printed = capsys.readouterr().out
        rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
        return code, [dict(zip(rows[0], row, strict=True)) for row in rows[2:]], printed

    return run


def test_every_pipeline_comes_to_the_weights_of_its_reference(run):
    code, rows, printed = run()
    assert code == 0
    assert len(rows) == 10
    assert [row["result"] for row in rows if row["trained in"] == "plain Keras"] == ["reference"] * 5
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
        assert row["result"] == "ok"
    title, load, columns, table, *_ = printed.split("\n\n")
    assert title == f"Self-check of tf_gpipe {tf_gpipe.__version__} on CPU:0, CPU:1"
    assert load.startswith("Load of the machine at the start")
    assert len(columns.splitlines()) == 2
    assert set(re.findall('"(.+?)"', columns)) < {*rows[0], "peak", "reference"}
    assert table.startswith("| model | ")
    assert "|\n\n10 cases, 0 failed; largest difference of any weight " in printed
    assert printed.endswith(f"\n\n```\n{doctor_checks.report(FACTS, doctor_checks.diagnose(FACTS))}\n```\n")
    assert printed.count("```") == 2


def test_weights_that_differ_fail(run, self_check, monkeypatch):
    monkeypatch.setattr(self_check, "TOLERANCE", {"float32": 0.0, "mixed_float16": 1.0})
    code, rows, printed = run()
    assert code == 1
    failed = {row["precision"] for row in rows if row["result"] == "FAILED: weights differ"}
    assert failed == {"float32"}
    assert f"10 cases, {sum('FAILED' in row['result'] for row in rows)} failed" in printed


def test_a_case_that_raises_is_a_row_and_its_error_is_in_the_report_once(run, self_check, monkeypatch):
    case = self_check.Case("dense", 3, 8)
    outcome = self_check.check(case, self_check.QUICK, DEVICES)
    assert outcome.cells == ["dense", "K = 3, M = 8", "no", "float32", "", "", "", "", "FAILED: DeviceError"]
    monkeypatch.setattr(self_check, "make_cases", lambda counts, quick: [case, case.plain, case])
    code, rows, printed = run()
    assert code == 1
    assert [row["result"] for row in rows] == ["FAILED: DeviceError", "reference", "FAILED: DeviceError"]
    assert "3 cases, 2 failed; largest difference of any weight 0.0e+00 in float32" in printed
    _, error, between, facts, _ = printed.split("```")
    assert error.startswith("\nTraceback (most recent call last):\n")
    assert "Expected one device for each of the 3 stages" in error.splitlines()[-1]
    assert (between, facts) == ("\n\n", f"\n{doctor_checks.report(FACTS, doctor_checks.diagnose(FACTS))}\n")


def test_progress_and_faults_of_the_machine_are_told_beside_the_report(self_check, monkeypatch, capsys):
    wrong = dataclasses.replace(FACTS, nvidia_error="no driver")
    monkeypatch.setattr(doctor_facts, "gather", lambda: wrong)
    monkeypatch.setattr(self_check, "make_cases", lambda counts, quick: [self_check.Case("dense", xla=True)])
    self_check.main(["--quick"])
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert "FAULT: nvidia-smi does not work, so that no GPU will: no driver" in told
    assert told[-1] == "1 of 1: dense, plain Keras, XLA, float32"
    assert "1 of 1" not in printed.out


def test_the_load_of_the_machine_is_told_where_it_is_known(self_check, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.14, 2.0, 0.5), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    told = "Load of the machine at the start, over 1, 5 and 15 minutes: 3.1, 2.0, 0.5, on 2 cores"
    assert self_check.load_of_machine() == told
    monkeypatch.delattr(os, "getloadavg")
    assert self_check.load_of_machine() == "Load of the machine at the start: unknown here"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--stages", "0"], "argument --stages: invalid choice: 0"),
        (["--stages", "10"], "argument --stages: invalid choice: 10"),
        (["--stages", "two"], "argument --stages: invalid int value: 'two'"),
        (["--stages", "2", "--quick"], "not allowed with argument"),
    ],
)
def test_options_that_are_refused(self_check, capsys, options, expected):
    with pytest.raises(SystemExit, match="2"):
        self_check.main(options)
    assert expected in capsys.readouterr().err


def test_more_stages_than_gpus_are_refused(self_check, gpus, monkeypatch, capsys):
    gpus(2)
    monkeypatch.setattr(doctor_facts, "gather", lambda: FACTS)
    with pytest.raises(SystemExit, match="2"):
        self_check.main(["--stages", "3"])
    assert "--stages: Expected at most 2, for GPU:0 and GPU:1. Received: '3'." in capsys.readouterr().err


def test_one_device(self_check):
    cases = self_check.make_cases(range(1, 2), quick=False)
    assert [case.num_stages for case in cases] == [0, 1] * 9


def test_the_most_stages_have_an_operation_each(self_check):
    strategy = tf_gpipe.GPipeStrategy(self_check.MOST_STAGES, 1, devices=["CPU:0"] * self_check.MOST_STAGES)
    with strategy.scope():
        model = self_check.make_model("dense", self_check.FULL)
    assert [len(stage.operations) for stage in strategy.plan(model).stages] == [1] * self_check.MOST_STAGES


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
