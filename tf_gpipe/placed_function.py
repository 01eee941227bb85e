"""Calls of traced functions on their devices, and their order with assignments of the variables that these read.

A call is given the handles of the variables that its function reads. Handed over one by one, they are most of what goes
into a task, and `tf.function` makes whatever assigns one of them later wait for every call that was given it: an edge
for each weight and task. So all calls of a pass get those of their function as one tensor. It is made before them and
waits for assignments before; an operation after them takes the same handles, and assignments after wait for that one
(page 0010 of docs/decisions):

    assignments before ──▶ handles, as one tensor ──▶ call, call, … ──▶ the same handles ──▶ assignments after
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.devices import is_cpu


class PlacedFunction:
    """A traced function of flat tensors that runs on one device.

    Two operations of TensorFlow call a function from a graph. `PartitionedCall` shares its caller's cancellation: when
    an operation of the function fails, it cancels what its caller still waits for before it reports, so that mostly
    "RecvAsync is cancelled" is all that reaches the user. `RemoteCall` has a cancellation of its own, and the error
    arrives with its operation, stage and micro-batch. It also costs half as much to start (passes over the caller's
    graph do not look into it) and 50 µs more a call. Its kernel for other devices than CPUs was never tried here, so
    that those get the plain call; so does a function that uses a variable of another device (tied weights), which a
    `RemoteCall` cannot be given.

    Args:
        function: the function.
        device: full name of the device.

    Attributes:
        traced: the function.
        graph: its graph.
        device: as given.
        read: handles that it captures and only reads.
        is_remote: whether it is called by a `RemoteCall`.
    """

    def __init__(self, function: Any, device: str) -> None:
        self.traced = function
        self.graph = function.graph
        self.device = device
        assigned = set(map(id, compat.assigned_inputs(function)))
        captured = function.captured_inputs
        self.read = [t for t in captured if t.dtype == tf.resource and id(t) not in assigned]
        self.is_remote = is_cpu(device) and compat.uses_only(function, device)
        self._remotes: dict[bool, Any] = {}

    def remote(self, *, packed: bool) -> Any:
        """The function of a `RemoteCall`; with `packed`, it takes the handles of `read` as one tensor, last."""
        if packed not in self._remotes:
            self._remotes[packed] = self._trace_remote(self.read if packed else [])
        return self._remotes[packed]

    def _trace_remote(self, packed: Sequence[tf.Tensor]) -> Any:
        function, read = self.traced, set(map(id, packed))
        given = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in given]
        handles = [tf.TensorSpec([len(read)], tf.resource)] if read else []

        def remote(*flat: tf.Tensor) -> list[tf.Tensor]:
            unpacked = iter(tf.unstack(flat[-1], len(read)) if read else ())
            captured = [next(unpacked) if id(t) in read else t for t in function.captured_inputs]
            return compat.call_with_captured(function, flat[: len(specs)], captured)

        with tf.init_scope():
            return tf.function(remote, autograph=False, input_signature=[*specs, *handles]).get_concrete_function()

    def __call__(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        """Calls it under whatever `tf.device` is open."""
        if not self.traced.outputs:
            return []  # no gradient passes through the stage, and it has no weights
        if not self.is_remote or tf.executing_eagerly():
            return list(self.traced(*flat))
        shared = _SHARED.get(tf.compat.v1.get_default_graph())
        if shared is None:
            with sharing_handles():
                return self(*flat)
        if self not in shared:
            shared[self] = _Shared.of(self)
        return shared[self].call(flat)


@contextlib.contextmanager
def sharing_handles() -> Iterator[None]:
    """Calls inside share the handles of their variables; assignments before and after keep their order with them."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph in _SHARED:
        yield
        return
    _SHARED[graph] = {}
    try:
        yield
    finally:
        shared = _SHARED.pop(graph)
    for calls in shared.values():
        calls.end()


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What the calls of a function in a graph have in common.

    Attributes:
        function: the function.
        remote: that of the call operation.
        target: name of its device.
        handles: of the variables that it reads, if they are handed over as one tensor.
        captured: that tensor, and what else goes into each call.
        reads: which of these are only read.
        calls: the calls so far.
    """

    function: PlacedFunction
    remote: Any
    target: tf.Tensor
    handles: list[tf.Tensor]
    captured: list[tf.Tensor]
    reads: list[int]
    calls: list[tf.Operation]

    @classmethod
    def of(cls, function: PlacedFunction) -> _Shared:
        """For a function that is called in the graph that is being built now.

        What a vectorised loop is made of is made anew for its result alone, and nothing would wait for the new calls.
        """
        graph = tf.compat.v1.get_default_graph()
        handles = [] if compat.in_vectorized_loop() else [graph.capture(tensor) for tensor in function.read]
        remote = function.remote(packed=bool(handles))
        others = [graph.capture(tensor) for tensor in remote.captured_inputs]
        with tf.control_dependencies(None), tf.device(function.device):
            target = tf.constant(function.device)
            packed = [tf.stack(handles)] if handles else []
        for tensor in packed:
            compat.note_reads(tensor.op, range(len(handles)))
        read = set(map(id, function.read))
        reads = [i for i, t in enumerate([*packed, *remote.captured_inputs]) if i < len(packed) or id(t) in read]
        return cls(function, remote, target, handles, [*packed, *others], reads, [])

    def call(self, flat: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
        """Calls the function."""
        types = [output.dtype for output in self.remote.outputs]
        outputs = tf.raw_ops.RemoteCall(target=self.target, args=[*flat, *self.captured], Tout=types, f=self.remote)
        op = outputs[0].op
        compat.note_reads(op, [1 + len(flat) + i for i in self.reads])
        compat.hide_function(op)
        if not any(tensor.dtype == tf.resource for tensor in op.inputs):
            compat.wait_for_inputs_only(op)  # otherwise such calls of all stages would wait for each other
        self.calls.append(op)
        for output, known in zip(outputs, self.remote.outputs, strict=True):
            output.set_shape(known.shape)
        return list(outputs)

    def end(self) -> None:
        """What is assigned from now on waits for all calls."""
        if self.handles:
            with tf.control_dependencies(self.calls), tf.device(self.function.device):
                done = tf.raw_ops.IdentityN(input=self.handles)
            compat.note_reads(done[0].op, range(len(self.handles)))


_SHARED: dict[tf.Graph, dict[PlacedFunction, _Shared]] = {}
"""What the calls in each graph share while one is inside `sharing_handles`."""
