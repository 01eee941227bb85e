"""Measures speed and memory, and compares with what was committed last.

    python examples/benchmarks/run.py NAME… | all [--write] [--quick] [--repeats 3] [--torch-python PYTHON]

Prints a table for each benchmark; committed figures stand in brackets, with SLOWER where the new ones are worse by
more than 15 %. With `--write` the tables go into docs/benchmarks.md and the figures into docs/benchmarks.json. What is
compared is measured in turns, A, B, A, B, …, each in a process of its own, and the smallest of the repeats counts. The
exit status is 0 also where a bar is missed.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path

import scale
import speed
from common import DOCS, Options, Report

BENCHMARKS = {
    name: getattr(module, name)
    for module, names in {
        speed: ("efficiency", "overhead", "against_torch", "tasks", "threads", "input_pipeline", "jit"),
        scale: ("startup", "memory", "fits", "growth"),
    }.items()
    for name in names
}


def environment() -> str:
    """Where the figures come from, in a line."""
    names = ("tensorflow-cpu", "tensorflow", "keras")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"{cores} cores ({platform.machine()}), Python {python}, {', '.join(found)}; load {load:.1f} at the start"


def section(name: str, report: Report, where: str) -> str:
    """What stands between the markers of a benchmark in docs/benchmarks.md."""
    notes = "".join(f"\n{note}\n" for note in report.notes)
    command = f"`python examples/benchmarks/run.py {name}`, {where}:"
    return f"\n{report.title}.\n\n{command}\n\n{report.table()}\n{notes}"


def write(docs: Path, name: str, report: Report, where: str, quick: bool) -> None:
    """Puts a table and its figures into the two files.

    Raises:
        ValueError: docs/benchmarks.md has no markers for it.
    """
    page, figures = docs / "benchmarks.md", docs / "benchmarks.json"
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    new, found = pattern.subn(lambda match: match[1] + section(name, report, where) + "\n" + match[2], text)
    if found != 1:
        raise ValueError(
            f"Expected one pair of markers <!-- {name} --> and <!-- /{name} -->. Received: {found}. {page}"
        )
    page.write_text(new, encoding="utf-8")
    known = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    rows = {row.name: row.values for row in report.rows}
    known[name] = {"environment": where, "quick": quick, "rows": rows}
    figures.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def last_figures(docs: Path, name: str, quick: bool) -> dict | None:
    """Committed figures of a benchmark by row and column; None if there are none of the same kind of run."""
    figures = docs / "benchmarks.json"
    known = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    return known[name]["rows"] if name in known and known[name]["quick"] == quick else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--help] [flags] NAME ...", description="Measures speed and memory."
    )
    parser.add_argument("names", nargs="+", choices=[*BENCHMARKS, "all"], metavar="NAME", help=", ".join(BENCHMARKS))
    quick = "tiny models, one repeat: to see that everything runs (default: full size)"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/ (default: only print them)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of benchmarks.md and .json (default: docs)")
    parser.add_argument("--repeats", type=int, help="of each, the smallest counts (default: 3; 1 with --quick)")
    torch = "an interpreter that has PyTorch (default: this one)"
    parser.add_argument("--torch-python", default=sys.executable, help=torch)
    arguments = parser.parse_args()
    if arguments.quick and arguments.write and arguments.docs.resolve() == DOCS.resolve():
        parser.error("figures of a quick run say nothing: leave out --quick, or give --docs another folder")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    pictures = arguments.docs / "pictures" if arguments.write else None
    options = Options(arguments.quick, repeats, arguments.torch_python, pictures)
    for name in BENCHMARKS if "all" in arguments.names else arguments.names:
        where = environment()
        report = BENCHMARKS[name](options)
        print(f"\n{name}: {report.title}\n{where}\n")
        print(report.table(last_figures(arguments.docs, name, arguments.quick)))
        print(*report.notes, sep="\n", flush=True)
        if arguments.write:
            write(arguments.docs, name, report, where, arguments.quick)


if __name__ == "__main__":
    main()
