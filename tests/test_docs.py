"""What is shown is what runs: the README's code and pictures, docstring examples, the example scripts."""

import doctest
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gpipe

ROOT = pathlib.Path(__file__).parents[1]


def blocks(page: pathlib.Path) -> list[str]:
    """What stands between fences."""
    return [block.split("\n", 1)[1] for block in page.read_text().split("```")[1::2]]


README = (ROOT / "README.md").read_text()
BLOCKS = blocks(ROOT / "README.md")
MODULES = [f"tf_gpipe.{module.name}" for module in pkgutil.iter_modules(tf_gpipe.__path__)]


def run(command: list[str], timeout: float, folder: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, where nothing in the environment makes TensorFlow quiet."""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    keras.utils.clear_session()
    module = importlib.import_module(name)
    names = {"keras": keras, "np": np, "tf": tf, "tf_gpipe": tf_gpipe}
    failed, _ = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert failed == 0


def test_public_names_exist_and_have_examples():
    for name in tf_gpipe.__all__:
        public = getattr(tf_gpipe, name)
        assert name == "__version__" or public.__doc__, name
    for method in ("plan", "place"):
        assert getattr(tf_gpipe.GPipeStrategy, method).__doc__


def test_programs_of_the_readme_and_of_the_page_on_timelines(tmp_path):
    """One after another, as a reader would paste them; the first prints the plan that is shown."""
    page = blocks(ROOT / "docs" / "timelines.md")
    programs = [block for block in BLOCKS + page if "import tf_gpipe" in block or "timeline.save" in block]
    assert len(programs) == 3
    program = "\n".join(programs)
    printed = run([sys.executable, "-c", program], timeout=240, folder=tmp_path).stdout
    shown = next(block for block in BLOCKS if block.startswith("stage  device"))
    assert printed.startswith(shown)
    assert printed.count("stage  compute  recompute  transfer  bubble  imbalance") == 3
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert {"timeline.svg", "timeline.json", "logs/step_000100.json"} <= written


def test_readme_shows_the_schedule_that_runs():
    assert f"```\n{tf_gpipe.Schedule.gpipe(4, 4)}\n```" in README


def test_readme_names_every_argument():
    for argument in list(inspect.signature(tf_gpipe.GPipeStrategy).parameters):
        assert f"`{argument}" in README or argument == "schedule", argument


def test_changelog_names_the_version():
    assert tf_gpipe.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_tests_named_in_the_table_of_features_exist():
    rows = [line for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").split(" | ")[2] for row in rows if "test_" in row]
    assert len(cells) > 50
    for cell in cells:
        for file, names in (part.split(": ") for part in cell.split("; ")):
            source = (ROOT / "tests" / f"{file}.py").read_text()
            for name in names.split(", "):
                assert f"\ndef {name}(" in source, f"{file}: {name}"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_demo_runs():
    done = run([sys.executable, "examples/digits_amoebanet.py", "--quick"], timeout=240)
    assert "largest difference of any weight" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("--quick: too short to learn")
    assert done.stderr == ""


def test_make_env_says_what_it_does(tmp_path):
    """With an interpreter that does nothing, in a copy of the Makefile."""
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/true")
    # The tests may run under `make` themselves, which then says which folder it enters.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    printed = subprocess.run(
        ["make", "env", "PYTHON=true"], cwd=tmp_path, env=outside, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[0].startswith("Installing tf_gpipe[cpu,examples,dev] into .venv: ")
    assert printed[1:] == ["Done: .venv/bin/python has it"]
