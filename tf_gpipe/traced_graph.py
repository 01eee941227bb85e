"""What tensors of a traced function are made of: the arguments that they follow from, and the way that leads there.

Each tensor is followed back through its graph, into branches, loops and functions.

Only inputs of operations count. TensorFlow also lets each result of a function wait for every operation with effects,
an assertion about the data, say, but nothing passes through such an edge except by a resource. Stages assign no
variable; whatever else keeps something between operations is `HIDDEN`, as if it were made of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tf_gpipe import compat

HIDDEN = -1
"""Stands among the positions of arguments for what a graph does not show."""

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}
# Operations that TensorFlow calls stateful, though their results follow from their inputs while no variable changes.
_READS = re.compile("ReadVariableOp|ResourceGather(Nd)?|VariableShape|StatelessRandom.*")


class TracedGraph:
    """Finds the arguments of a traced function, by position, that tensors in it follow from.

    Args:
        graph: the function's.
        outside: those of the functions that call it.

    Attributes:
        positions: those of the arguments, captured ones among them, by the names of their tensors.
        outputs: the function's results.
    """

    def __init__(self, graph: Any, *outside: Any) -> None:
        self._graphs = (graph, *outside)
        self.positions = {tensor.name: at for at, tensor in enumerate(graph.inputs)}
        self.outputs: list[tf.Tensor] = graph.outputs
        self._inside: dict[str, TracedGraph | None] = {}
        self._arguments: dict[str, frozenset[int]] = {}

    def arguments_of(self, tensor: tf.Tensor) -> frozenset[int]:
        """Positions of the arguments that a tensor follows from; perhaps `HIDDEN`."""
        if tensor.name not in self._arguments:
            self._arguments[tensor.name] = self._followed(tensor)
        return self._arguments[tensor.name]

    def _followed(self, tensor: tf.Tensor) -> frozenset[int]:
        found: set[int] = set()
        seen: set[str] = set()
        waiting = [tensor]
        while waiting:
            next_tensor = waiting.pop()
            name = next_tensor.name
            if name in seen:
                continue
            seen.add(name)
            if name in self.positions:
                found.add(self.positions[name])
                continue
            positions = self.inputs_of(next_tensor)
            if HIDDEN in positions:
                found.add(HIDDEN)
            waiting += [next_tensor.op.inputs[at] for at in positions if at != HIDDEN]
        return frozenset(found)

    def inputs_of(self, tensor: tf.Tensor) -> Iterable[int]:
        """Positions of the inputs of a tensor's operation that it follows from; perhaps `HIDDEN`."""
        op = tensor.op
        every = range(len(op.inputs))
        if op.type == "IdentityN":
            return [tensor.value_index]
        if op.type in _CALLS:
            return self._through(op.get_attr("f").name, tensor.value_index, every)
        if op.type in _BRANCHES:
            branches = (self._through(name, index, every[:-1]) for name, index in self.called_for(tensor))
            return {0}.union(*map(_shifted, branches))
        if op.type in _LOOPS:
            return self._through_loop(op, tensor.value_index, every)
        hidden = op.type == "Placeholder" or (op.op_def.is_stateful and not _READS.fullmatch(op.type))
        return [*every, HIDDEN] if hidden else every

    def called_for(self, tensor: tf.Tensor) -> list[tuple[str, int]]:
        """Names of functions that a tensor's operation calls, each with the position of a result it follows from."""
        op, index = tensor.op, tensor.value_index
        if op.type in _CALLS:
            return [(op.get_attr("f").name, index)]
        if op.type in _BRANCHES:
            names = ("then_branch", "else_branch") if op.type.endswith("If") else ("branches",)
            attributes = [op.get_attr(name) for name in names]
            return [(branch.name, index) for branch in (attributes[0] if names == ("branches",) else attributes)]
        if op.type in _LOOPS:
            turns = self._through_loop(op, index, range(len(op.inputs)))
            body = op.get_attr("body").name
            return [(op.get_attr("cond").name, 0), *((body, at) for at in sorted(turns) if at != HIDDEN)]
        return []

    def inside(self, name: str) -> TracedGraph | None:
        """The graph of a function that the graph's operations call; None where it is not known."""
        if name not in self._inside:
            # A function that a tape has made of a loop or branch does not know its functions: the graph outside does.
            graph = next(filter(None, (compat.function_graph(graph, name) for graph in self._graphs)), None)
            self._inside[name] = None if graph is None else TracedGraph(graph, *self._graphs)
        return self._inside[name]

    def _through(self, name: str, index: int, every: Iterable[int]) -> frozenset[int]:
        """Positions of a function's arguments, which are `every`, that one of its results follows from."""
        graph = self.inside(name)
        return frozenset({*every, HIDDEN}) if graph is None else graph.arguments_of(graph.outputs[index])

    def _through_loop(self, op: tf.Operation, index: int, every: Iterable[int]) -> set[int]:
        """Positions of what a loop begins with that one of its results follows from, after however many turns."""
        found = {index, *self._through(op.get_attr("cond").name, 0, every)}
        waiting = list(found)
        while waiting:
            at = waiting.pop()
            new = self._through(op.get_attr("body").name, at, every) - found if at != HIDDEN else frozenset()
            found |= new
            waiting += new
        return found


def _shifted(positions: Iterable[int]) -> set[int]:
    """Positions among a branch's arguments as those among the inputs of its operation, the first of which chooses."""
    return {at if at == HIDDEN else at + 1 for at in positions}


class Ways:
    """Numbers the ways in which tensors of a traced function are made.

    Two tensors have the same number if the same operations make them of the same constants and arguments. Calls of
    functions count as what they do: a tape puts the loops that it follows into functions.

    Args:
        graph: the function's.
        numbers: those that were given, which graphs to compare must share.
        arguments: the numbers of arguments that are known, by position.
    """

    def __init__(
        self, graph: TracedGraph, numbers: dict[Any, int], arguments: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self._graph = graph
        self._numbers = numbers
        self._known = {name: arguments.get(at, self._number("argument", at)) for name, at in graph.positions.items()}

    def of(self, tensor: tf.Tensor) -> int:
        """The number of a tensor."""
        waiting = [tensor]
        while waiting:
            made = waiting[-1]
            sources = {at: made.op.inputs[at] for at in sorted(self._graph.inputs_of(made)) if at != HIDDEN}
            missing = [source for source in sources.values() if source.name not in self._known]
            if missing and made.name not in self._known:
                waiting += missing
                continue
            waiting.pop()
            if made.name not in self._known:
                self._known[made.name] = self._made_of(made, {at: self._known[of.name] for at, of in sources.items()})
        return self._known[tensor.name]

    def _made_of(self, tensor: tf.Tensor, sources: dict[int, int]) -> int:
        """The number of a tensor, from those of what its operation makes it of."""
        op = tensor.op
        if op.type in ("Identity", "IdentityN"):
            return next(iter(sources.values()))
        called = [(self._graph.inside(name), index) for name, index in self._graph.called_for(tensor)]
        known = sources if op.type in _CALLS else {}
        inside = [
            HIDDEN if graph is None else Ways(graph, self._numbers, known).of(graph.outputs[index])
            for graph, index in called
        ]
        if op.type in _CALLS:
            return inside[0]
        constant = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
        return self._number(op.type, tensor.value_index, constant, *inside, *sources.values())

    def _number(self, *way: Any) -> int:
        return self._numbers.setdefault(way, len(self._numbers))
