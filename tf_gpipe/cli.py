"""The command line: `tf_gpipe COMMAND`, or `python -m tf_gpipe COMMAND`.

A command is a subparser whose `run` takes the parsed options and returns the exit code. Nothing here imports
TensorFlow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tf_gpipe import doctor_checks, doctor_facts
from tf_gpipe.version import __version__


def main(arguments: Sequence[str] | None = None, prog: str = "tf_gpipe") -> int:
    """Runs a command; without one, prints the help.

    Args:
        arguments: words after the program's name; None for those of this process.
        prog: how the program was called, for its help.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog=prog, description="GPipe for TensorFlow 2 and Keras 3.")
    parser.add_argument("--version", action="version", version=f"tf_gpipe {__version__}")
    parser.set_defaults(run=lambda options: _write(parser.format_help().rstrip()))
    commands = parser.add_subparsers(title="commands", metavar="command")
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    return int(options.run(options) or 0)


def _add_doctor(commands: Any) -> None:
    summary = "what is installed, which devices there are, what is wrong and what mends it"
    command = commands.add_parser(
        "doctor", help=summary, description=f"Tells {summary}. Exit code 1 if there is a fault."
    )
    command.add_argument("--json", action="store_true", help="the same as one JSON object")
    command.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    facts = doctor_facts.gather()
    findings = doctor_checks.diagnose(facts)
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        _write(json.dumps({"facts": dataclasses.asdict(facts), "findings": found}, indent=2))
    else:
        _write(doctor_checks.report(facts, findings))
    return 1 if any(finding.is_fault for finding in findings) else 0


def _write(text: str) -> None:
    """Prints a text; a reader that has gone, as `head` goes after its lines, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again when it ends
