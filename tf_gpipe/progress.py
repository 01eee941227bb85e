"""Says which stage is being traced where the first step of a model takes long to begin.

Keras prints nothing until the first step is over, and a large model takes a minute to trace. Who has set up logging
finds the same lines in the logger "tf_gpipe", at level INFO, of every program.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

import keras

from tf_gpipe import compat

PATIENCE = 3.0
"""Seconds of a step after which it is told what is being traced."""

_log = logging.getLogger("tf_gpipe")
_thread = threading.local()


class _Line:
    """The line of one step on the screen: written over where that works, else one line for each stage."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._rewrites = (hasattr(sys.stdout, "isatty") and sys.stdout.isatty()) or "ipykernel" in sys.modules
        self._told: set[str] = set()
        self._width = 0

    def tell(self, text: str) -> None:
        """Shows a text, if Keras shows its own progress; where lines stay, only the first time."""
        again = text in self._told
        self._told.add(text)
        if not again:
            _log.info(text)
        if (self._rewrites or not again) and _keras_shows_progress():
            sys.stdout.write(f"\r{text.ljust(self._width)}" if self._rewrites else f"{text}\n")
            sys.stdout.flush()
            self._width = max(self._width, len(text))

    def clear(self) -> None:
        """Leaves an empty line to Keras's progress bar."""
        if self._rewrites and self._width:
            sys.stdout.write(f"\r{' ' * self._width}\r")
            sys.stdout.flush()


def _keras_shows_progress() -> bool:
    """Whether `fit`, `evaluate` or `predict` prints, and has not begun its bar, which another line would tear."""
    methods = compat.methods_under_way()
    if len(methods) != 1 or not keras.config.is_interactive_logging_enabled():
        return False
    arguments = methods[0]
    return bool(arguments.get("verbose", 0)) and not arguments.get("logs") and arguments.get("outputs") is None


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Around a step: what is traced inside is told when the step has taken long."""
    outer = getattr(_thread, "line", None)
    line = _thread.line = outer or _Line()
    try:
        yield
    finally:
        _thread.line = outer
        if outer is None:
            line.clear()


def tracing(stage: int, count: int) -> None:
    """Tells that a stage is about to be traced."""
    line: _Line | None = getattr(_thread, "line", None)
    if line is not None and time.monotonic() - line.began > PATIENCE:
        line.tell(f"tracing stage {stage + 1} of {count}")
