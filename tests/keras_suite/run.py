"""Runs test files that come with the installed Keras plainly and under `GPipeStrategy`, and compares the outcomes.

    python tests/keras_suite/run.py trainers/trainer_test.py "optimizers/*_test.py" --stages 2 3 --micro-batches 1 2

A regression is a test that passes in plain Keras and does not pass under the strategy. Exit code: 1 where one of them
is not listed in `expected.py`, or where nothing could be compared; else 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, TextIO

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_STARTS = 6  # of pytest for one file: each test that hangs or crashes takes one

sys.path.insert(0, str(HERE))

from expected import EXPECTED, Difference  # noqa: E402

__all__ = ["EXPECTED", "Comparison", "Difference", "main"]

CUT_SHORT = "not run to the end"

Outcomes = dict[str, dict[str, Any]]
"""The name of a test, and what the plugin wrote about it."""


def keras_tests() -> pathlib.Path:
    """The folder of the installed Keras below which its tests are, found without importing it."""
    return pathlib.Path(importlib.util.find_spec("keras").submodule_search_locations[0]) / "src"


def outcomes_of(files: list[str], stages: int, micro_batches: int, args: argparse.Namespace, end: float) -> Outcomes:
    """Runs files in one process, and in another without what hung or crashed."""
    folder_of_tests = keras_tests()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "outcomes"
        command = [sys.executable, "-m", "pytest", *(str(folder_of_tests / file) for file in files)]
        command += ["-q", "-p", "plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-W", "ignore"]
        command += ["-c", os.devnull, "--rootdir", str(folder_of_tests), "--continue-on-collection-errors"]
        command += ["--outcomes", str(path), "--stages", str(stages), "--micro-batches", str(micro_batches)]
        command += ["--test-seconds", str(args.test_seconds), *(["-k", args.k] if args.k else [])]
        messages: dict[str, str] = {}
        for _ in range(MOST_STARTS):
            log, in_time = _start(command, folder, end)
            found, whole = _read(path)
            for name, test in found.items():
                if test["outcome"] == "start" and name not in messages:
                    stacks = path.with_suffix(".stacks").read_text() if path.with_suffix(".stacks").exists() else ""
                    stack = stacks.split("(most recent call first):")[-1][:1500]  # The main thread's is the last.
                    messages[name] = f"did not end: {stack or log[-1000:]}" if in_time else log
            if whole or not in_time:
                break
    for name, message in messages.items():
        found[name] = {"outcome": "fail", "message": message}
    if not whole:
        found[CUT_SHORT] = {"outcome": "fail", "message": f"{' '.join(files)}: {log[-1000:]}"}
    return found


def _start(command: list[str], folder: str, end: float) -> tuple[str, bool]:
    """What pytest printed, and whether it ended in time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(HERE), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, end - time.monotonic()),
        )
    except subprocess.TimeoutExpired as error:
        return f"stopped, since the time was up. {(error.stdout or b'').decode()[-500:]}", False
    return done.stdout + done.stderr, True


def _read(path: pathlib.Path) -> tuple[Outcomes, bool]:
    """The last thing written about each test, and whether pytest came to its end."""
    found: Outcomes = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        said = json.loads(line)
        found[said.pop("test")] = said
    return found, found.pop("", None) is not None


class Comparison:
    """What plain Keras and the strategy made of the same tests."""

    def __init__(self, plain: Outcomes, ours: Outcomes, stages: int) -> None:
        missing = {"outcome": "missing", "message": "the test was not run"}
        self.ours = {name: ours.get(name, missing) for name in plain}
        passed = [name for name, test in plain.items() if test["outcome"] == "pass"]
        worse = [name for name in passed if self.ours[name]["outcome"] != "pass"]
        self.expected = [n for n in worse if any(d.covers(n, self.ours[n]["message"]) for d in EXPECTED)]
        self.regressions = [name for name in worse if name not in self.expected]
        self.same = [name for name in passed if name not in worse]
        self.in_pipeline = [name for name in self.same if self.ours[name].get("stages", 0) > 0]
        self.in_all_stages = [name for name in self.in_pipeline if self.ours[name]["stages"] == stages]
        self.fail_too = [name for name, test in plain.items() if test["outcome"] not in ("pass", "skip")]

    def __str__(self) -> str:
        return (
            f"{len(self.same)} the same ({len(self.in_pipeline)} of them called a pipeline, {len(self.in_all_stages)} "
            f"one of all stages), {len(self.regressions)} regressions, {len(self.expected)} expected differences, "
            f"{len(self.fail_too)} fail in plain Keras too"
        )


def say(text: str, where: TextIO = sys.stdout) -> None:
    where.write(f"{text}\n")
    where.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="test files, or patterns, below keras/src")
    parser.add_argument("--stages", nargs="+", type=int, default=[2], help="values of K (2)")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2], help="values of M (2)")
    parser.add_argument("-k", default="", help="run only tests whose names match, as pytest's -k")
    parser.add_argument(
        "--one-process", action="store_true", help="run the files in one process, not one after another"
    )
    parser.add_argument("--test-seconds", type=float, default=120.0, help="after which a test counts as hanging (120)")
    parser.add_argument("--seconds", type=float, default=7200.0, help="for everything together (7200)")
    parser.add_argument("--json", type=pathlib.Path, help="file for all outcomes and messages")
    parser.add_argument(
        "--plain", type=pathlib.Path, help="file of --json from a run with the same -k: plain Keras is not run"
    )
    args = parser.parse_args()

    end = time.monotonic() + args.seconds
    tests = keras_tests()
    files = [str(path.relative_to(tests)) for pattern in args.files for path in sorted(tests.glob(pattern))]
    if not files:
        sys.exit(f"No file of {tests} is called {args.files}.")
    configurations = list(itertools.product(args.stages, args.micro_batches))
    everything: dict[str, Outcomes] = {}
    if args.plain:
        plain = json.loads(args.plain.read_text())["plain"]
        everything["plain"] = {name: test for name, test in plain.items() if name.split("::")[0] in files}
    else:
        configurations.insert(0, (0, 1))
    bad = 0
    for stages, micro_batches in configurations:
        name = f"K={stages} M={micro_batches}" if stages else "plain"
        ours = everything[name] = {}
        for group in [files] if args.one_process else [[file] for file in files]:
            start = time.monotonic()
            made = outcomes_of(group, stages, micro_batches, args, end)
            ours.update(made)
            which = group[0] + " ..." * (len(group) > 1)
            say(f"  {name} {which}: {len(made)} tests in {time.monotonic() - start:.0f} s", sys.stderr)
            if args.json:
                args.json.write_text(json.dumps(everything, indent=1))
        if not stages:
            continue
        comparison = Comparison(everything["plain"], ours, stages)
        for test in comparison.regressions:
            say(f"REGRESSION {name} {test}: {comparison.ours[test]['outcome']}: {comparison.ours[test]['message']}")
        say(f"{name}: {comparison}")
        cut_short = CUT_SHORT in everything["plain"] or CUT_SHORT in ours
        bad += len(comparison.regressions) + cut_short + (not comparison.same)
    for test, said in everything["plain"].items():
        if said["outcome"] not in ("pass", "skip"):
            say(f"fails in plain Keras too: {test}: {said['message'][:200]}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
