"""GPipe pipeline parallelism for TensorFlow 2 and Keras 3.

Names are loaded when they are first used, so that the parts without TensorFlow load in milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tf_gpipe.version import __version__

__all__ = [
    "Event",
    "GPipeError",
    "GPipeStrategy",
    "GPipeWarning",
    "Plan",
    "Schedule",
    "Task",
    "Timeline",
    "TimelineCallback",
    "__version__",
    "draw",
    "set_logical_cpus",
]

if TYPE_CHECKING:  # what checkers and editors read instead of `__getattr__`
    from tf_gpipe.callbacks import TimelineCallback
    from tf_gpipe.devices import set_logical_cpus
    from tf_gpipe.drawing import draw
    from tf_gpipe.errors import GPipeError, GPipeWarning
    from tf_gpipe.plan import Plan
    from tf_gpipe.schedule import Schedule, Task
    from tf_gpipe.strategy import GPipeStrategy
    from tf_gpipe.timeline import Event, Timeline
else:
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

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tf_gpipe' has no attribute '{name}'")
        try:
            return getattr(importlib.import_module(f"tf_gpipe.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            from tf_gpipe import installation

            missing = installation.missing(name, error)
            if missing is None:
                raise
        raise missing  # outside, so that no chain of errors is shown


def __dir__() -> list[str]:
    return sorted(__all__)
