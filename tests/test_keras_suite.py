"""Some of Keras's own tests, under the strategy: what passes in plain Keras passes in a pipeline."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "keras_suite"
FILES = ["trainers/trainer_test.py", "models/functional_test.py", "models/model_test.py"]
FILES += ["backend/tensorflow/distribute_test.py"]  # Last, since it starts TensorFlow's devices anew.
NAMES = """
    callbacks_can_update_state compute_loss constraints custom_t fit_flow_graph fit_flow_jit
    fit_sparse_tf_graph fit_with_data_adapter_py_dataset_cw fit_with_data_adapter_tf_dataset fit_with_val_split_graph
    internal_only loss_scaling_prevents loss_weights metric_tracking nested_inputs on_batch_methods_graph partial_loss
    predict_flow_struct_graph predict_preserve_order_50_non_jit recompile rng_updated_during
    steps_per_execution_steps_count_3_non stop_loop_fit trainer_with_raggeds_model training_arg

    deeply_nested dict_outputs_with_single get_state_tree list_outputs_dict_losses mismatched_inputs
    optional_inputs_generator pickling_single_list_output_1 reviving single_output_1 struct_losses0

    fit_and_regularizer strategy_run
"""
TESTS = " or ".join(NAMES.split())


@pytest.fixture(scope="module")
def suite():
    """The program, without the processes that it starts."""
    spec = importlib.util.spec_from_file_location("keras_suite_run", SUITE / "run.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_keras_own_tests_pass_under_the_strategy():
    command = [sys.executable, str(SUITE / "run.py"), *FILES, "-k", TESTS, "--one-process", "--seconds", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=660)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = re.search(r"K=2 M=2: (\d+) the same \((\d+) of them called a pipeline, (\d+) one of all", done.stdout)
    same, in_pipeline, in_all_stages = (int(number) for number in summary.groups())
    assert same >= 40
    assert in_pipeline >= 35
    assert in_all_stages >= 8


def test_a_test_that_only_plain_keras_passes_is_a_regression(suite, monkeypatch):
    passed, failed = {"outcome": "pass", "stages": 2}, {"outcome": "fail", "message": "refused, since"}
    plain = dict.fromkeys(("same", "worse", "lost", "listed"), passed) | {"broken": failed}
    ours = {"same": passed, "worse": failed, "listed": failed, "broken": failed}
    for says, expected in (("refused", ["listed"]), ("wrong", [])):
        monkeypatch.setattr(suite, "EXPECTED", [suite.Difference("list*", says, "the reason")])
        split = suite.Comparison(plain, ours, stages=2)
        assert split.expected == expected
        assert split.regressions == [name for name in ("worse", "lost", "listed") if name not in expected]
        assert (split.same, split.in_all_stages, split.fail_too) == (["same"], ["same"], ["broken"])


def test_the_documentation_lists_every_expected_difference(suite):
    page = (SUITE.parents[1] / "docs" / "keras_suite.md").read_text()
    section = page.split("## Expected differences")[1].split("##")[0]
    listed = re.findall(r"^\| `(.+)` \| (.+) \|$", section, re.MULTILINE)
    assert listed == [(difference.pattern, difference.reason) for difference in suite.EXPECTED]
