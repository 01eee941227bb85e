"""The exceptions of tf_gpipe, each also the built-in that a user would think of catching.

    Exception
    └── GPipeError
        ├── ArgumentError        (ValueError)    an argument of the strategy
        ├── PartitionError       (ValueError)    operations cannot be divided into stages as asked
        ├── ScheduleError        (ValueError)    a schedule is incomplete or can never finish
        ├── DeviceError          (ValueError)    too few devices, or unknown ones
        ├── DeviceStartedError   (RuntimeError)  TensorFlow has started; its devices are fixed
        ├── InstallationError    (ImportError)   TensorFlow or Keras is not installed
        ├── ModelError           (ValueError)    a model that cannot be pipelined as it stands
        ├── MicroBatchError      (ValueError)    a mini-batch that cannot be split
        └── ScopeError           (RuntimeError)  scopes and runs of strategies inside each other

    UserWarning
    └── GPipeWarning                             a training that works, but not as well as it could

`except tf_gpipe.GPipeError` catches what this package raises and nothing else. Every message says what was expected,
what was received and what to do. One exception with many messages was rejected: tests and callers would have to read
the text to tell a wrong model from a wrong device.
"""

__all__ = [
    "ArgumentError",
    "DeviceError",
    "DeviceStartedError",
    "GPipeError",
    "GPipeWarning",
    "InstallationError",
    "MicroBatchError",
    "ModelError",
    "PartitionError",
    "ScheduleError",
    "ScopeError",
]


class GPipeError(Exception):
    """Base of every exception that tf_gpipe raises on purpose."""

    __init__ = Exception.__init__  # by which autograph sees that it can raise the same exception with a longer message


class ArgumentError(GPipeError, ValueError):
    """An argument of the strategy has a value outside its documented range."""


class PartitionError(GPipeError, ValueError):
    """The operations of a model cannot be divided into stages as asked."""


class ScheduleError(GPipeError, ValueError):
    """A schedule lacks a task, repeats one, puts one on the wrong device, or can never finish."""


class DeviceError(GPipeError, ValueError):
    """There are fewer devices than the pipeline needs, or a device name is unknown."""


class DeviceStartedError(GPipeError, RuntimeError):
    """TensorFlow has already started, so its devices can no longer be configured."""


class InstallationError(GPipeError, ImportError):
    """TensorFlow, or something else that this package needs, is not installed."""


class ModelError(GPipeError, ValueError):
    """A model cannot be pipelined as it stands."""


class MicroBatchError(GPipeError, ValueError):
    """A mini-batch cannot be split into micro-batches."""


class ScopeError(GPipeError, RuntimeError):
    """A scope or `run` of a strategy is entered where another strategy, or a `run`, is under way."""


class GPipeWarning(UserWarning):
    """A training works, but not as well as it could: what to change is in the message."""
