"""What the benchmarks share: processes to measure in, tables, and the figures that were committed last."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
SLOWER = 1.15  # what is this many times worse than the committed figure gets a mark
MIB = 2**20

# Sizes of the models that models.py makes; QUICK replaces some of them.
FULL = {
    "dense": {"layers": 8, "width": 1024, "rows": 512, "activation": "relu"},
    "transformer": {"layers": 6, "width": 256, "heads": 4, "sequence": 128, "vocabulary": 1000, "rows": 32},
    "amoebanet": {"layers": 3, "width": 64, "size": 64, "classes": 10, "rows": 128},
}
QUICK = {
    "dense": {"layers": 4, "width": 16, "rows": 32},
    "transformer": {"layers": 2, "width": 8, "heads": 2, "sequence": 8, "vocabulary": 16, "rows": 32},
    "amoebanet": {"layers": 3, "width": 8, "size": 32, "rows": 32},
}


NARROW = {"layers": 24, "width": 64, "heads": 2, "sequence": 32, "rows": 128}
"""A Transformer of many small operations, for `settings("transformer", …)`."""


def settings(name: str, quick: bool, **changes) -> dict:
    """The sizes of a model, with `changes` (left out in a quick run)."""
    return FULL[name] | (QUICK[name] if quick else changes)


@dataclasses.dataclass
class Options:
    """What the command line says.

    Attributes:
        quick: tiny models, to see that everything runs.
        repeats: how often each measurement is taken; the smallest counts.
        torch_python: an interpreter that has PyTorch.
        pictures: folder for figures, or None.
    """

    quick: bool = False
    repeats: int = 3
    torch_python: str = sys.executable
    pictures: Path | None = None

    @property
    def measure_seconds(self) -> float:
        """How long a measurement takes, about."""
        return 0.02 if self.quick else 2.0

    def pick(self, full, quick):
        """`quick` in a quick run, else `full`."""
        return quick if self.quick else full


@dataclasses.dataclass
class Row:
    """A line of a table: figures by column, and perhaps a bar: the column, what it must be, and whether it is."""

    name: str
    values: dict[str, float | None]
    bar: str = ""

    def require(self, column: str, relation: str, limit: float) -> "Row":
        """Adds a bar, such as `require("× plain", "≤", 1.1)`."""
        value = self.values[column]
        met = value is not None and (value <= limit if relation == "≤" else value >= limit)
        self.bar = f"{column} {relation} {limit:.3g}: {'met' if met else 'MISSED'}"
        if value is not None and number(value) == number(limit):
            self.bar += f" ({value:.4g})"  # rounded, it would say nothing
        return self


@dataclasses.dataclass
class Report:
    """The result of a benchmark: its table, and the names of the columns in which more is better or worse.

    Columns in neither are facts, such as a number of parameters, which are not compared.
    """

    title: str
    rows: list[Row]
    lower: tuple[str, ...] = ()
    higher: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(dict.fromkeys(column for row in self.rows for column in row.values))

    def worse(self, column: str, value: float, last: float) -> bool:
        """Whether a figure is worse than the last one by more than `SLOWER`."""
        if column in self.lower:
            return value > SLOWER * last
        return column in self.higher and value * SLOWER < last

    def table(self, last: dict[str, dict[str, float]] | None = None) -> str:
        """The table in Markdown; with `last`, committed figures stand in brackets, with a mark where they were better.

        Args:
            last: committed figures, by row and column.
        """
        bars = any(row.bar for row in self.rows)
        lines = [["", *self.columns, *(["bar"] if bars else [])]]
        for row in self.rows:
            before = (last or {}).get(row.name, {})
            cells = [self._cell(column, row.values.get(column), before.get(column)) for column in self.columns]
            lines.append([row.name, *cells, *([row.bar] if bars else [])])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        right = [0 < i <= len(self.columns) for i in range(len(widths))]
        lines.insert(1, ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)])
        aligned = (
            [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
            for line in lines
        )
        return "\n".join(f"| {' | '.join(line)} |" for line in aligned)

    def _cell(self, column: str, value: float | None, last: float | None) -> str:
        if value is None:
            return ""
        if last is None:
            return number(value)
        return f"{number(value)} ({number(last)}){' SLOWER' if self.worse(column, value, last) else ''}"


def number(value: float) -> str:
    """Three significant digits, and no exponent."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Worker:
    """A process that measures one configuration and waits in between.

    Args:
        config: as worker.py or torch_worker.py takes it.
        program: which of them.
        python: the interpreter.
        environment: more variables for it.

    Attributes:
        first: what it says of its first step.

    Raises:
        RuntimeError: the process ended; the message ends as its standard error does.
    """

    def __init__(self, config: dict, program="worker.py", python=sys.executable, environment: dict | None = None):
        self._open = contextlib.ExitStack()
        self._errors = self._open.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(HERE / program), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
        )
        try:
            self.first = self._answer()
        except BaseException:
            self.close()
            raise

    def measure(self, **request) -> dict:
        """Asks for a measurement and waits for it."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._errors.seek(0)
        raise RuntimeError(f"Expected an answer of a worker. Received: its end. {self._errors.read()[-3000:]}")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._open.close()


def interleaved(
    makers: dict[str, Callable[[], Worker]], repeats: int, missing: dict[str, str] | None = None
) -> dict[str, dict]:
    """The quickest of `repeats` measurements of each worker, taken in turns: A, B, A, B, …; `first` is of its start.

    Args:
        makers: what starts the workers, by name; all are there together, and wait in turn.
        repeats: measurements of each.
        missing: gets the reason why a worker does not start, by name, and the others go on; without it, that is an
            error.
    """
    best: dict[str, dict] = {}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, make in makers.items():
            try:
                running[name] = stack.enter_context(make())
            except (OSError, RuntimeError) as error:
                if missing is None:
                    raise
                missing[name] = str(error).strip().splitlines()[-1]
        for _ in range(repeats):
            for name, worker in running.items():
                result = worker.measure()
                if name not in best or result["seconds"] < best[name]["seconds"]:
                    best[name] = result
    return {name: {**result, "first": running[name].first} for name, result in best.items()}


ONE_CORE = {"cores": 1, "intra": 1, "inter": 1}
THREAD_PER_STAGE = {"cores": 2, "intra": 1, "inter": 2}
TWO_CORES = {"cores": 2, "intra": 2, "inter": 2}


def both_cores(variant: dict) -> dict:
    """Two cores for a configuration: a thread for each stage, or two in and between plain Keras's operations."""
    return THREAD_PER_STAGE if variant.get("stages") else TWO_CORES


def config(options: Options, model: str, threads: dict, sizes: dict | None = None, **more) -> dict:
    """A configuration for worker.py; without `stages` it is plain Keras."""
    sizes = sizes or settings(model, options.quick)
    return {"model": model, "sizes": sizes, "measure_seconds": options.measure_seconds, **threads, **more}


def maker(options: Options, model: str, threads: dict, **more) -> Callable[[], Worker]:
    """As `config`, for a worker to be started later."""
    environment = more.pop("environment", None)
    return lambda: Worker(config(options, model, threads, **more), environment=environment)
