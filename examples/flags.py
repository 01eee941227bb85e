"""Numbers on the command line, within bounds: what is out of them ends in argparse's error, with exit status 2.

A parser with this `USAGE` says what is wrong in two lines, however many flags it has.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
from collections.abc import Callable, Iterator

USAGE = "%(prog)s [--help] [flags]"

CONDITIONS = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
    "a_multiple_of": lambda value, unit: value % unit == 0,
}


def whole(**conditions: int) -> Callable[[str], int]:
    """A type for `add_argument`: whole numbers for which all conditions hold, such as `whole(at_least=1)`."""
    return _type(int, "a whole number", conditions)


def number(**conditions: float) -> Callable[[str], float]:
    """A type for `add_argument`: numbers for which all conditions hold; infinity too, unless it is `below=math.inf`."""
    return _type(float, "a number", conditions)


def _type(kind: type, name: str, conditions: dict[str, float]) -> Callable[[str], int | float]:
    expected = " and ".join(f"{condition.replace('_', ' ')} {limit}" for condition, limit in conditions.items())

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")  # for which no condition holds
        if not all(CONDITIONS[condition](value, limit) for condition, limit in conditions.items()):
            raise argparse.ArgumentTypeError(f"Expected {name}, {expected}. Received: {text!r}.")
        return value

    return parse


def check_stages(parser: argparse.ArgumentParser, num_stages: int, most: int) -> None:
    """Ends the program with an error of --stages if there are more than a model has operations."""
    if num_stages > most:
        parser.error(f"argument --stages: Expected at most {most}, the model's operations. Received: '{num_stages}'.")


@contextlib.contextmanager
def errors_of_arguments(parser: argparse.ArgumentParser) -> Iterator[None]:
    """What is refused inside was named on the command line: its error ends the program as argparse's errors do.

    The list of flags is left out: the error may have many lines, and is of what a flag names.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
