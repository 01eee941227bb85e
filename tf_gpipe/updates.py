"""What a compiled stage does once for a mini-batch, as one program where TensorFlow would start an operation at a time.

Keras's optimizers update one variable after the other, with ten small operations or so for each. Where XLA compiles the
stages, a device that runs nothing else makes a program of each of these operations. So the updates that an optimizer
asks for are gathered, and those of one device become one program:

    optimizer.apply ──merge_call──▶ update, update, update, …      gathered by device
                                    device 0: one program          device 1: one program      …

A program can only use variables of its own device. What it reads elsewhere, such as the step counter and the learning
rate, which are on the host, is read outside and handed in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gpipe import compat

_gathering = threading.local()

Update = tuple[tf.Variable, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A variable, the function that updates it, and what that takes after the variable."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced program.

    Attributes:
        body: what was traced; it keeps alive what the program's key names by identity.
        function: the program; None if it cannot be compiled.
        elsewhere: variables of other devices, whose values it takes after its arguments.
    """

    body: Callable[..., Any]
    function: Any
    elsewhere: tuple[keras.Variable, ...]


class Programs:
    """What a device runs once for a mini-batch, each traced once for what it is made of.

    Args:
        device: full name of the device.
        compiled: whether XLA makes one program of each. One that cannot be compiled, since it assigns a variable of
            another device, say, runs operation by operation; so do all when executing eagerly.
    """

    def __init__(self, device: str, *, compiled: bool) -> None:
        self.device = device
        self._compiled = compiled
        self._known: dict[Hashable, _Program] = {}

    def run(self, key: Hashable, body: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> Any:
        """Runs a function of tensors.

        Args:
            key: what tells the function from others.
            body: the function; its name is that of the program.
            tensors: its arguments.
        """
        with tf.device(self.device):
            if not self._compiled or tf.executing_eagerly():
                return body(*tensors)
            specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
            if (key, specs) not in self._known:
                with contextlib.suppress(Exception):  # it comes again below, unless only the program was at fault
                    self._known[key, specs] = self._trace(body, specs)
            self._known.setdefault((key, specs), _Program(body, None, ()))
            program = self._known[key, specs]
            if program.function is None:
                return body(*tensors)
            elsewhere = [compat.raw_variable(variable).read_value() for variable in program.elsewhere]
            return program.function(*tensors, *elsewhere)

    def _trace(self, body: Callable[..., Any], specs: tuple[tf.TensorSpec, ...]) -> _Program:
        elsewhere: dict[int, keras.Variable] = {}

        def program(*flat: tf.Tensor) -> Any:
            values = zip(elsewhere.values(), flat[len(specs) :], strict=True)
            with compat.ElsewhereScope(self.device, list(values)) as scope:
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
                can_be_compiled = compat.uses_only(function, self.device)
                return _Program(body, function if can_be_compiled else None, tuple(elsewhere.values()))
            elsewhere.update(missing)


@contextlib.contextmanager
def gathered(programs: Mapping[str, Programs]) -> Iterator[None]:
    """Updates that are asked for in here become one program for each device, at the end.

    Args:
        programs: by device; what is updated elsewhere is updated at once.
    """
    before = getattr(_gathering, "updates", None)
    updates: dict[str, list[Update]] = {device: [] for device in programs}
    _gathering.updates = updates
    try:
        yield
    finally:
        _gathering.updates = before
    with compat.stop_recording():
        for device in programs:
            if updates[device]:
                _run_updates(programs[device], updates[device])


def put_off(update: Update) -> bool:
    """Whether an update was put off, to the end of `gathered`."""
    updates = getattr(_gathering, "updates", None)
    if not updates or update[0].device not in updates:
        return False
    updates[update[0].device].append(update)
    return True


def _run_updates(programs: Programs, updates: Sequence[Update]) -> None:
    tensors = [part for _, _, args, _ in updates for arg in args for part in _parts(arg)]

    def weight_updates(*flat: tf.Tensor) -> None:
        left = list(flat)
        for variable, fn, args, kwargs in updates:
            fn(variable, *[_whole(arg, left) for arg in args], **kwargs)

    programs.run(tuple(map(_key, updates)), weight_updates, tensors)


def _key(update: Update) -> Hashable:
    """What an update does: its variable, its code, and what else it takes and refers to."""
    variable, fn, args, kwargs = update
    given = [type(arg) if _parts(arg) else _identity(arg) for arg in (*args, *kwargs.values())]
    return (id(variable), _identity(fn), *given)


def _identity(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    """What a value is: for a function what it refers to, and for an optimizer its attributes, which may be set anew."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if id(value) in within:
        return id(value)
    inside = (*within, id(value))
    if isinstance(value, types.FunctionType):
        return value.__code__, *(_identity(cell.cell_contents, inside) for cell in value.__closure__ or ())
    if isinstance(value, keras.Optimizer):
        settings = {name: v for name, v in vars(value).items() if not name.startswith("_self_")}  # TensorFlow's own
        return id(value), *((name, _identity(v, inside)) for name, v in settings.items())
    return id(value)


def _parts(value: Any) -> list[tf.Tensor]:
    """The tensors of an argument; what is no tensor stays outside the program's arguments."""
    if isinstance(value, tf.IndexedSlices):
        return [value.values, value.indices, value.dense_shape]
    return [value] if isinstance(value, tf.Tensor) else []


def _whole(value: Any, left: list[tf.Tensor]) -> Any:
    """An argument again, of tensors from the front of `left`."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(left.pop(0), left.pop(0), left.pop(0))
    return left.pop(0) if isinstance(value, tf.Tensor) else value
