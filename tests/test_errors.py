"""The exception tree, and the rule that the pure modules load without TensorFlow."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf_gpipe
from tf_gpipe import errors

ROOT = Path(__file__).parents[1]

TREE = {
    "ArgumentError": ValueError,
    "DeviceError": ValueError,
    "DeviceStartedError": RuntimeError,
    "InstallationError": ImportError,
    "MicroBatchError": ValueError,
    "ModelError": ValueError,
    "PartitionError": ValueError,
    "ScheduleError": ValueError,
    "ScopeError": RuntimeError,
}


def test_all_names_every_exception_of_the_module():
    found = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(errors.__all__) == found == {"GPipeError", "GPipeWarning", *TREE}
    assert list(errors.__all__) == sorted(errors.__all__)


@pytest.mark.parametrize(("name", "builtin"), TREE.items())
def test_an_exception_is_a_gpipe_error_and_the_builtin_a_user_would_catch(name, builtin):
    exception = getattr(errors, name)
    assert exception.__bases__ == (errors.GPipeError, builtin)
    assert exception.__doc__.endswith(".")
    with pytest.raises(builtin, match="^the message$"):
        raise exception("the message")


def test_the_base_is_no_builtin_of_its_own():
    assert errors.GPipeError.__bases__ == (Exception,)


def test_the_docstring_draws_the_whole_tree():
    for name, builtin in TREE.items():
        line = next(line for line in errors.__doc__.splitlines() if f" {name} " in line)
        assert f"({builtin.__name__})" in line


@pytest.mark.parametrize(
    "module",
    [
        "chrome_trace",
        "drawing",
        "drawing_writers",
        "errors",
        "installation",
        "partition",
        "schedule",
        "tasks",
        "timeline",
        "version",
    ],
)
def test_a_pure_module_loads_without_tensorflow(module):
    blocked = "tensorflow", "keras", "numpy"
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import tf_gpipe.{module}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", ["from tf_gpipe import GPipeStrategy", "import tf_gpipe; tf_gpipe.GPipeStrategy"])
@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_without_tensorflow_one_line_says_what_to_do(use, name):
    program = f"import sys; sys.modules[{name!r}] = None; {use}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    trace, last = done.stderr.rstrip().rsplit("\n", 1)
    what = {"tensorflow": "TensorFlow", "keras": "Keras"}[name]
    assert last.startswith(f"tf_gpipe.errors.InstallationError: Expected {what}, which tf_gpipe.GPipeStrategy needs. ")
    assert re.search(r"Do `pip install '(tf_gpipe|\.)\[cpu\]'.*\[gpu\] or \[tpu\].*`python -m tf_gpipe doctor`", last)
    assert trace.count("Traceback") == 1  # no chain of errors
    assert len(trace.splitlines()) <= 5


def test_another_missing_module_keeps_its_own_error(monkeypatch):
    monkeypatch.setattr(tf_gpipe, "_HOME", {"draw": "nonsense"})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'tf_gpipe.nonsense'$"):
        _ = tf_gpipe.draw


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"^module 'tf_gpipe' has no attribute 'GPipeStratgy'$"):
        _ = tf_gpipe.GPipeStratgy
