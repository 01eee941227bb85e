"""What a compiled stage does once for a mini-batch, as one program where TensorFlow would start an operation at a time.

Keras's optimizers update one variable after the other, with ten small operations or so for each. Where XLA compiles the
stages, a device that runs nothing else makes a program of each of these operations. So the updates that an optimizer of
Keras asks for are gathered, and those of one device become one program:

    optimizer.apply ──merge_call──▶ update, update, update, …      gathered by device
                                    device 0: one program          device 1: one program      …

A program can only use variables of its own device. What it reads elsewhere, such as the step counter and the learning
rate, which are on the host, is read outside and handed in. To find out what that is, the code runs twice, and device by
device; so optimizers that users write, whose code may count on neither, update operation by operation.

Programs are made anew for each graph that uses them: what their code refers to may have been changed since.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat

_gathering = threading.local()

Update = tuple[tf.Variable, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A variable, the function that updates it, and what that takes after the variable."""


def run(
    device: str,
    body: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    *,
    compiled: bool,
    note: Callable[[str], None] = lambda _: None,
) -> Any:
    """Runs a function of tensors on a device.

    Args:
        device: full name of the device.
        body: the function; its name is that of the program.
        tensors: its arguments.
        compiled: whether XLA is to make one program of it. Where that cannot be, since it uses a variable of another
            device in a way of TensorFlow's own, or when executing eagerly, it runs operation by operation.
        note: is told where it cannot be, and why.
    """
    with tf.device(device), compat.stop_recording():
        if compiled and not tf.executing_eagerly():
            program = _trace(device, body, tensors)
            if program is not None:
                function, elsewhere = program
                return function(*tensors, *(compat.raw_variable(variable).read_value() for variable in elsewhere))
            note(f"runs `{body.__name__}` operation by operation: a variable of another device is used in it")
        return body(*tensors)


def _trace(
    device: str, body: Callable[..., Any], tensors: Sequence[tf.Tensor]
) -> tuple[Any, list[keras.Variable]] | None:
    """The program, and variables of other devices whose values it takes after its arguments.

    None where there can be none, since the function uses a variable of another device, past Keras.
    """
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    elsewhere: dict[int, keras.Variable] = {}

    def program(*flat: tf.Tensor) -> Any:
        values = zip(elsewhere.values(), flat[len(specs) :], strict=True)
        with compat.ElsewhereScope(device, list(values)) as scope:
            made = body(*flat[: len(specs)])
        missing.update(scope.missing)
        return made

    program.__name__ = body.__name__
    while True:
        missing: dict[int, keras.Variable] = {}
        more = [tf.TensorSpec(v.shape, v.dtype) for v in elsewhere.values()]
        traced = tf.function(program, input_signature=[*specs, *more], autograph=False, jit_compile=True)
        with tf.init_scope():
            function = traced.get_concrete_function()
        if not missing:
            return (function, list(elsewhere.values())) if compat.uses_only(function, device) else None
        elsewhere.update(missing)


@contextlib.contextmanager
def gathered(devices: Mapping[str, Callable[[str], None]]) -> Iterator[None]:
    """Updates of variables on the devices that are asked for in here become one program for each device, at the end.

    Args:
        devices: full names of the devices, with what is told where there can be no program, and why.
    """
    before = getattr(_gathering, "updates", None)
    updates: dict[str, list[Update]] = {device: [] for device in sorted(devices)}
    _gathering.updates = updates
    try:
        yield
    finally:
        _gathering.updates = before
    for device, waiting in updates.items():
        if waiting:
            _run_updates(device, waiting, devices[device])


def put_off(update: Update) -> bool:
    """Whether an update was put off, to the end of `gathered`."""
    updates = getattr(_gathering, "updates", None)
    if not updates or update[0].device not in updates:
        return False
    updates[update[0].device].append(update)
    return True


def _run_updates(device: str, updates: Sequence[Update], note: Callable[[str], None]) -> None:
    tensors = [part for _, _, args, _ in updates for arg in args for part in _parts(arg)]

    def weight_updates(*flat: tf.Tensor) -> None:
        left = list(flat)
        for variable, fn, args, kwargs in updates:
            fn(variable, *[_whole(arg, left) for arg in args], **kwargs)

    run(device, weight_updates, tensors, compiled=True, note=note)


def _parts(value: Any) -> list[tf.Tensor]:
    """The tensors of an argument; what is no tensor stays outside the program's arguments."""
    if isinstance(value, tf.IndexedSlices):
        return [part for part in (value.values, value.indices, value.dense_shape) if part is not None]
    return [value] if isinstance(value, tf.Tensor) else []


def _whole(value: Any, left: list[tf.Tensor]) -> Any:
    """An argument again, of tensors from the front of `left`."""
    parts = [left.pop(0) for _ in _parts(value)]
    return tf.IndexedSlices(*parts) if isinstance(value, tf.IndexedSlices) else parts[0] if parts else value
