"""Pieces of what the library tells its user: names in a text, and warnings at the right line."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable

LIBRARIES = "contextlib", "keras", "tensorflow", "tf_gpipe"
"""Modules whose frames lie between the user's program and the library's code."""


def listed(names: Iterable[str]) -> str:
    """The first three names, quoted, for a message; "…" stands for more."""
    first = [f"'{name}'" for name in itertools.islice(names, 4)]
    return ", ".join([*first[:3], "…"] if len(first) > 3 else first)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's program that led here, past the frames of libraries."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level + 1)
