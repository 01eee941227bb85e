"""Each benchmark runs in tiny sizes, and what it finds is printed, written into the page and compared the next time."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import soaked

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "examples" / "benchmarks" / "run.py"
PAGE = ROOT / "docs" / "benchmarks.md"
SHORT = "startup", "input_pipeline", "tasks"
NAMES = re.findall(r"<!-- (\w+) -->", PAGE.read_text())


def run(*arguments) -> str:
    """Runs benchmarks in tiny sizes and returns what they print."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Runs a benchmark when it is first asked for; returns the folder that it wrote into, and what it printed."""

    @functools.cache
    def of(name: str) -> tuple[Path, str]:
        docs = tmp_path_factory.mktemp(name)
        shutil.copy(PAGE, docs)
        return docs, run(name, "--quick", "--write", "--docs", docs)

    return of


@pytest.fixture
def common(monkeypatch):
    """The module that the benchmarks share."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    yield __import__("common")
    for name in ("common", "scale"):
        sys.modules.pop(name, None)


def figures(docs: Path, name: str) -> dict:
    """What a run wrote: columns by row."""
    return json.loads((docs / "benchmarks.json").read_text())[name]["rows"]


@pytest.mark.parametrize("name", [name if name in SHORT else soaked(name) for name in NAMES])
def test_runs_and_writes(name, written):
    if name == "growth":
        pytest.importorskip("matplotlib")
    docs, printed = written(name)
    rows = figures(docs, name)
    numbers = [value for values in rows.values() for value in values.values() if value is not None]
    assert all(isinstance(value, (int, float)) for value in numbers)
    assert any(value > 0 for value in numbers)
    page = (docs / "benchmarks.md").read_text()
    section = page.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    (title,) = re.findall(rf"^{name}: (.+)$", printed, re.MULTILINE)
    assert section.startswith(f"\n\n{title}.\n\n`python examples/benchmarks/run.py {name}`, ")
    for row in rows:
        assert f"| {row} " in printed
        assert f"| {row} " in section
    if name == "growth":
        assert (docs / "pictures" / "benchmarks_layers.png").stat().st_size > 1000


def test_a_second_size_traces_each_function_once_more_and_a_third_none(written):
    rows = figures(written("startup")[0], "startup")
    assert len(rows) == 2
    for values in rows.values():
        assert 1 <= values["2nd size"] <= values["traces"]
        assert values["3rd size"] == 0


def test_graphs_hold_no_data(written):
    for values in figures(written("startup")[0], "startup").values():
        assert values["largest, B"] < 1024  # a weight or a mini-batch of the benchmark has more


def test_figures_of_the_last_run_stand_beside_the_new_ones(written):
    docs, printed = written("input_pipeline")
    assert "(" not in next(line for line in printed.splitlines() if line.startswith("| K=2, prefetch")).split("|")[2]
    again = run("input_pipeline", "--quick", "--docs", docs)
    line = next(line for line in again.splitlines() if line.startswith("| K=2, prefetch"))
    last = figures(docs, "input_pipeline")["K=2, prefetch(2)"]["step, s"]
    assert f"({last:.3g})" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_section_says_what_was_measured(name):
    section = PAGE.read_text().split(f"<!-- {name} -->")[1]
    assert re.match(rf"\n\n[^\n]+\.\n\n`python examples/benchmarks/run\.py {name}`, [^\n]+:\n\n\|", section)


def test_every_benchmark_has_a_section_of_the_page():
    listed = re.search(r"NAME\s+(\w+(?:,\s+\w+)+)", run("--help"))[1]
    assert sorted(re.split(r",\s+", listed)) == sorted(NAMES)


def test_a_missing_interpreter_of_torch_is_told_and_the_rest_goes_on():
    printed = run("against_torch", "--quick", "--torch-python", sys.executable + "-none")
    assert "Left out: torchgpipe" in printed
    assert "| tf_gpipe, never" in printed


def test_figures_of_a_quick_run_are_not_committed():
    done = subprocess.run([sys.executable, str(PROGRAM), "tasks", "--quick", "--write"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "figures of a quick run say nothing" in done.stderr


def test_what_is_slower_than_the_last_figures_has_a_mark(common):
    report = common.Report("", [common.Row("a", {"s": 1.2, "gain": 0.8})], lower=("s",), higher=("gain",))
    assert report.table({"a": {"s": 1.1, "gain": 0.9}}).count("SLOWER") == 0
    assert "1.2 (1) SLOWER | 0.8 (1) SLOWER" in report.table({"a": {"s": 1.0, "gain": 1.0}})
    assert "1.2 (2) |" in report.table({"a": {"s": 2.0}})


def test_a_bar_is_told_as_met_or_missed(common):
    assert common.Row("a", {"x": 1.0}).require("x", "≤", 1.1).bar == "x ≤ 1.1: met"
    assert common.Row("a", {"x": 1.0}).require("x", "≥", 1.1).bar == "x ≥ 1.1: MISSED"


def test_the_largest_number_of_layers_that_fits_is_found(common):
    scale = __import__("scale")
    tried = []

    def used(layers):
        tried.append(layers)
        return 100 + 7 * layers + layers % 3

    layers, needed = scale.largest(used, limit=2000, least=8, share=0.02)
    assert 266 <= layers <= 271
    assert needed == used(layers) <= 2000
    assert len(tried) < 12
    with pytest.raises(ValueError, match="Expected 8 layers to fit"):
        scale.largest(used, limit=50, least=8, share=0.02)
