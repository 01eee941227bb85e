"""GPipe pipeline parallelism for TensorFlow 2 and Keras 3.

Names are loaded when they are first used, so that the parts without TensorFlow load in milliseconds.
"""

import importlib
from typing import Any

from tf_gpipe.version import __version__

_HOME = {
    "Event": "timeline",
    "GPipeError": "errors",
    "GPipeStrategy": "strategy",
    "GPipeWarning": "errors",
    "Plan": "plan",
    "Schedule": "schedule",
    "Task": "schedule",
    "Timeline": "timeline",
    "TimelineCallback": "callbacks",
    "draw": "drawing",
    "set_logical_cpus": "devices",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tf_gpipe' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tf_gpipe.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
