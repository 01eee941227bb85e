"""The short examples: what each prints with --quick, in a process of its own, and the sizes of the networks in them."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

import tf_gpipe

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)"


def run_quickly(name: str) -> str:
    """What an example prints, where nothing in the environment makes TensorFlow quiet."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == ""
    assert re.search(r"^--quick: .*too short to ", done.stdout, re.MULTILINE)
    return done.stdout


def figures(printed: str, before: str) -> list[float]:
    """Every number that follows a text."""
    found = [float(number) for number in re.findall(re.escape(before) + r"\s*" + NUMBER, printed)]
    assert found, f"no figure after '{before}' in:\n{printed}"
    return found


def figure(printed: str, before: str) -> float:
    """The only number that follows a text."""
    [number] = figures(printed, before)
    return number


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the scripts ---


def test_quickstart():
    printed = run_quickly("quickstart")
    assert figures(printed, "of 'digits', balance") == [0.91, 0.93]
    assert re.findall(r"^ +(\d) +CPU:\1 ", printed, re.MULTILINE) == ["0", "1", "2", "3", "0", "1"]
    assert figure(printed, "test accuracy ") > 75
    assert figure(printed, "largest difference of any logit") < 1e-5
    assert figure(printed, "after another epoch") > 80


def test_custom_loop():
    printed = run_quickly("custom_loop")
    first, second = (figure(printed, f"epoch {epoch}: loss") for epoch in (1, 2))
    assert second < first - 0.5
    homes = re.findall(r"^(\S+) on (CPU:\d), its momentum on (CPU:\d)$", printed, re.MULTILINE)
    assert {path: home for path, home, _ in homes if path.endswith("kernel")} == {
        **{f"digits/hidden_{i}/kernel": f"CPU:{i}" for i in range(3)},
        "digits/logits/kernel": "CPU:3",
    }
    assert all(weight == momentum for _, weight, momentum in homes)
    assert figure(printed, "largest difference of any weight") < 1e-5


def test_own_partition():
    printed = run_quickly("own_partition")
    assert figures(printed, "of 'chain', balance") == [1.0, 1.0, 0.57]
    assert re.findall(r"^partition=(.*)$", printed, re.MULTILINE) == ["'flops'", "['dense_4']", "[7, 1]"]
    operations = [int(row[0]) for row in re.findall(r"^ +\d +CPU:\d +(\d)( +dense_\d){2} ", printed, re.MULTILINE)]
    assert operations == [4, 4, 4, 4, 7, 1]
    steps = figures(printed, "gpipe: 2 stages, 8 micro-batches, step")
    assert len(steps) == 3
    assert "a step takes" not in printed  # of so short a one nothing can be said
    assert figure(printed, "largest difference of any weight") < 1e-6


def test_unet():
    printed = run_quickly("unet")
    skips = re.findall(r"^skip (\d): from stage (\d) to stage (\d)$", printed, re.MULTILINE)
    assert skips == [("0", "0", "3"), ("1", "0", "2"), ("2", "0", "1")]
    assert figure(printed, "largest difference of any weight") < 1e-6
    assert figure(printed, "denoised") > figure(printed, "noisy") + 1


def test_resnet():
    printed = run_quickly("resnet")
    assert figure(printed, "largest difference of any weight") < 1e-9
    assert figure(printed, "a micro-batch at a time:") < 1e-9
    assert figure(printed, "the mini-batch at once:") > 0.01
    assert figure(printed, "a moving mean moved once, by the mini-batch:") < 1e-9
    assert figure(printed, "test accuracy") > 50


def test_tied_embeddings():
    printed = run_quickly("tied_embeddings")
    assert "the table is used on stages [0, 2] and kept on CPU:0" in printed
    [norms] = re.findall(f"own table {NUMBER} and {NUMBER}", printed)
    assert min(map(float, norms)) > 0.1, "both uses count"
    assert figure(printed, "largest difference from their sum") < 1e-5
    assert figure(printed, "largest difference of any weight") < 1e-5
    assert figure(printed, "test text:") < 6, "of 7 bits without any training"


def test_mixed_precision():
    printed = run_quickly("mixed_precision")
    row = rf"^(\w+) +(\w+) +(\w+) +(\d+) B +(\d+) +(\d+) +{NUMBER} +{NUMBER} %$"
    rows = {found[0]: found[1:] for found in re.findall(row, printed, re.MULTILINE)}
    assert {policy: values[:3] for policy, values in rows.items()} == {
        "float32": ("float32", "float32", "1536"),
        "mixed_bfloat16": ("float32", "bfloat16", "768"),
        "mixed_float16": ("float32", "float16", "768"),
    }
    steps = {policy: int(values[3]) for policy, values in rows.items()}
    scales = {policy: int(values[4]) for policy, values in rows.items()}
    assert steps["float32"] == steps["mixed_bfloat16"] == 80
    assert steps["mixed_float16"] < 80, "some steps overflowed"
    assert scales["mixed_float16"] == 2 ** (24 - (80 - steps["mixed_float16"])), "each of them halved the scale"
    assert min(float(values[-1]) for values in rows.values()) > 85


PROGRAMS = [path.stem for path in EXAMPLES.glob("*.py") if "add_argument(" in path.read_text() and path.stem != "flags"]


@pytest.fixture
def said(monkeypatch, capsys):
    """What a program says of words on its command line, and its exit status; it has to end there."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        monkeypatch.setattr(tf_gpipe, "set_logical_cpus", lambda count: pytest.fail("it has begun to work"))
        with pytest.raises(SystemExit) as ended:
            load(name).main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", [*PROGRAMS, "benchmarks/run"])
def test_help_shows_the_default_of_every_flag(name, said):
    code, printed, _ = said(name, "--help")
    assert code == 0
    flags = re.split(r"^  (?=-)", printed, flags=re.MULTILINE)[1:]
    assert flags[0].startswith("-h, --help")
    assert len(flags) > 1
    for flag in flags[1:]:
        assert "(default: " in " ".join(flag.split()), flag


@pytest.mark.parametrize("name", [*PROGRAMS, "benchmarks/run"])
def test_a_wrong_flag_takes_two_lines(name, said):
    code, printed, error = said(name, "--nonsense")
    assert (code, printed) == (2, "")
    usage, message = error.splitlines()
    assert usage.startswith("usage: ")
    assert ": error: " in message


def test_every_example_has_a_line_in_the_readme():
    readme = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", readme, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


# --- the networks ---


@pytest.mark.parametrize(
    ("num_blocks", "channels", "count"),
    [
        (5, 64, 232_687_328),
        (6, 72, 362_157_516),
        (11, 128, 2_213_834_176),
        (24, 128, 4_993_859_008),
        (24, 160, 7_802_903_600),
    ],
)
def test_unet_has_the_parameters_of_torchgpipes(num_blocks, channels, count):
    with load("shapes").shapes_only():
        assert load("unet").unet(num_blocks, channels).count_params() == count


@pytest.mark.parametrize(
    ("groups", "count"), [((3, 4, 6, 3), 25_557_032), ((3, 4, 23, 3), 44_549_160), ((3, 8, 36, 3), 60_192_808)]
)
def test_resnet_has_the_parameters_of_torchvisions(groups, count):
    with load("shapes").shapes_only():
        model = load("resnet").resnet(groups)
    assert sum(int(np.prod(weight.shape)) for weight in model.trainable_weights) == count
