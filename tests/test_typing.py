"""What type checkers and editors know of the package as it is installed here, on right and wrong uses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf_gpipe

RIGHT = """\
from typing import Any
import tf_gpipe
from tf_gpipe import GPipeStrategy, Plan, Schedule

strategy = tf_gpipe.GPipeStrategy(2, num_micro_batches=8, partition=[3, 3], remat="never", jit_compile="auto")
other = GPipeStrategy(devices=["/CPU:0", "/CPU:1"], partition=["dense_3"], jit_compile=True)
devices: list[str] = tf_gpipe.set_logical_cpus(2)
num_stages: int = strategy.num_stages
text: str = tf_gpipe.__version__ + str(tf_gpipe.draw(Schedule.gpipe(2, 4)))
callback = tf_gpipe.TimelineCallback("logs", every=100)
try:
    def plan_of(model: Any) -> Plan: return strategy.plan(model)
except tf_gpipe.GPipeError as error:
    message = str(error)
"""
WRONG = """\
import tf_gpipe
from tf_gpipe import Strategy  # no such name
tf_gpipe.GPipeStratgy(2)  # no such name
tf_gpipe.GPipeStrategy(num_stages="two")
tf_gpipe.GPipeStrategy(2, micro_batches=4)  # no such argument
tf_gpipe.GPipeStrategy(2, 4, ["/CPU:0", "/CPU:1"])  # by name only
tf_gpipe.GPipeStrategy(2, remat="sometimes")
tf_gpipe.GPipeStrategy(2, partition=3)
tf_gpipe.GPipeStrategy(2, jit_compile="maybe")
tf_gpipe.set_logical_cpus("2")
tf_gpipe.TimelineCallback("logs", evry=100)  # no such argument
tf_gpipe.Schedule.gpipe(2, "4")
stages: str = tf_gpipe.GPipeStrategy(2).num_stages
"""
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull],
    "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_right_uses_pass_and_wrong_ones_fail(checker, tmp_path):
    """Beside a program of the user's, so that they find the package only where pip has put it."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [*CHECKERS[checker], "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    found = re.findall(r"(right|wrong)\.py:(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    wrong = {("wrong", str(number)) for number in range(2, len(WRONG.splitlines()) + 1)}
    assert set(found) == wrong, done.stdout + done.stderr


def test_completion_offers_the_public_names_alone():
    assert dir(tf_gpipe) == sorted(tf_gpipe.__all__)
    assert set(tf_gpipe.__all__) == {*tf_gpipe._HOME, "__version__"}


def test_what_checkers_read_is_what_is_loaded():
    source = Path(tf_gpipe.__file__).read_text()
    imports = re.findall(r"^    from tf_gpipe\.(\w+) import (.+)$", source, re.MULTILINE)
    assert {name: module for module, names in imports for name in names.split(", ")} == tf_gpipe._HOME
