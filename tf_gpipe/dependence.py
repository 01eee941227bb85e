"""What the results of a stage's function depend on, and so which state the data move.

Each result is followed back through the stage's graph, into branches, loops and functions, to the arguments that it is
made of. Results of all stages together tell which state follows from the model's inputs:

    inputs ──▶ stage 0 ──boundary tensors──▶ stage 1 ──▶ a running centre: moved by the data
    a counter, a decay ──▶ the same, later: not moved by the data

A row count that is known when a stage is traced is a constant in its graph. So where state seems to be independent, the
stage is traced once more for an unknown number of rows. Python may have looked at that number (`x.shape[0] or 0`): what
the two graphs make in different ways counts as made of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tf_gpipe.model_graph import Ref, TensorSpec
from tf_gpipe.stage_functions import Forward, Signature
from tf_gpipe.traced_graph import HIDDEN, TracedGraph, Ways
from tf_gpipe.values import Kind, components, kind_of_shape


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a result depends on.

    Attributes:
        refs: inputs of the stage: their values or masks.
        variables: identities of variables whose values the function takes.
        hidden: whether it may depend on something else, which the graph does not show.
    """

    refs: frozenset[Ref]
    variables: frozenset[int]
    hidden: bool = False


_UNKNOWN = Sources(frozenset(), frozenset(), hidden=True)


@dataclasses.dataclass(frozen=True)
class Dependence:
    """What the results of a stage's forward function depend on.

    Attributes:
        states: the sources of each new value of state, by the variable's identity.
        outputs: the sources of each output with its mask.
        reason: why nothing could be found out; empty where it could.
    """

    states: dict[int, Sources]
    outputs: dict[Ref, Sources]
    reason: str = ""

    @classmethod
    def of(cls, signature: Signature, forward: Forward) -> Dependence:
        """For a forward function that was traced for a kind of call."""
        arguments: list[Ref | int] = [
            ref
            for kinds in (signature.values, signature.masks)
            for ref, kind in zip(signature.inputs, kinds, strict=True)
            for _ in components([kind])
        ]
        arguments += [id(v) for v in forward.given.variables]
        graph = TracedGraph(forward.graph)
        results = list(forward.graph.outputs)

        def take(count: int) -> Sources:
            found = {at for _ in range(count) for at in graph.arguments_of(results.pop(0))}
            sources = [arguments[at] for at in found if 0 <= at < len(arguments)]  # what comes after was captured
            refs = frozenset(source for source in sources if isinstance(source, Ref))
            return Sources(refs, frozenset(s for s in sources if isinstance(s, int)), HIDDEN in found)

        values = [take(len(components([kind]))) for kind in forward.values]
        masks = [take(len(components([kind]))) for kind in forward.masks]
        both = [
            Sources(a.refs | b.refs, a.variables | b.variables, a.hidden or b.hidden)
            for a, b in zip(values, masks, strict=True)
        ]
        states = {id(v): take(1) for v in forward.given.states}
        return cls(states, dict(zip(forward.outputs, both, strict=True)))

    def where_alike(self, one: Forward, other: Forward) -> Dependence:
        """The same, where two traces of the function make a result alike; what they do not is of unknown sources."""
        numbers: dict[Any, int] = {}
        ways = []
        for forward in (one, other):
            kinds = [
                *zip(forward.outputs, forward.values, strict=True),
                *zip(forward.outputs, forward.masks, strict=True),
            ]
            names: list[Any] = [ref for ref, kind in kinds for _ in components([kind])]
            names += map(id, forward.given.states)
            graph = Ways(TracedGraph(forward.graph), numbers)
            ways.append({(name, at, graph.of(forward.graph.outputs[at])) for at, name in enumerate(names)})
        unknown = {name for name, _, _ in ways[0] ^ ways[1]}

        def checked(known: dict[Any, Sources]) -> dict[Any, Sources]:
            return {
                name: _UNKNOWN if name in unknown and not sources.refs else sources for name, sources in known.items()
            }

        return Dependence(checked(self.states), checked(self.outputs), self.reason)

    @classmethod
    def unknown(cls, forward: Forward, reason: str) -> Dependence:
        """For a forward function of which it cannot be told."""
        return cls(
            dict.fromkeys(map(id, forward.given.states), _UNKNOWN), dict.fromkeys(forward.outputs, _UNKNOWN), reason
        )


def moved_by_data(
    stages: Sequence[Dependence],
    inputs: Iterable[Ref],
    states: set[int],
    exact: Callable[[int], Dependence],
) -> tuple[set[int], list[str]]:
    """Which state follows from the data.

    Args:
        stages: what the results of each stage depend on, where numbers of rows may have become constants.
        inputs: the model's inputs.
        states: identities of the state in question.
        exact: what the results of a stage depend on for any number of rows; asked for only where that matters.

    Returns:
        Identities of the state that does, and why it could not be told of some.
    """
    known, asked = list(stages), set[int]()
    while True:
        moved = _reached(known, inputs)
        followed = _needed(known, states - moved)
        found = [k for k, stage in enumerate(known) if k not in asked and followed & {*stage.states, *stage.outputs}]
        if not found:
            return moved & states, list(dict.fromkeys(stage.reason for stage in known if stage.reason))
        for k in found:
            asked.add(k)
            known[k] = exact(k)


def _reached(stages: Sequence[Dependence], inputs: Iterable[Ref]) -> set[Any]:
    """Refs and identities of variables that follow from inputs; state may be read by a stage before it is assigned."""
    found: set[Any] = set(inputs)
    before = -1
    while len(found) != before:
        before = len(found)
        for stage in stages:
            for result, sources in [*stage.outputs.items(), *stage.states.items()]:
                if sources.hidden or sources.refs & found or sources.variables & found:
                    found.add(result)
    return found


def _needed(stages: Sequence[Dependence], states: set[int]) -> set[Any]:
    """State, and the refs and identities of variables that it follows from."""
    found: set[Any] = set(states)
    waiting: list[Any] = list(states)
    while waiting:
        result = waiting.pop()
        for stage in stages:
            sources = stage.outputs.get(result) if isinstance(result, Ref) else stage.states.get(result)
            new = (sources.refs | sources.variables) - found if sources is not None else frozenset()
            found |= new
            waiting += new
    return found


def of_any_rows(signature: Signature, specs: dict[Ref, TensorSpec]) -> Signature:
    """The same kind of call, of an unknown number of rows.

    Args:
        signature: the kind.
        specs: what is known of every ref before any data. A dimension that is unknown there, or another for as many
            rows as a micro-batch has, may be made of the number of rows; so may the first of all.
    """

    def loosened(ref: Ref, kind: Kind | None) -> Kind | None:
        if kind is None or kind.shape.rank is None:
            return kind
        known = specs[Ref(ref.index)].shape
        shape = [
            None if axis == 0 or (axis < len(known) and known[axis] != size) else size
            for axis, size in enumerate(kind.shape)
        ]
        return kind_of_shape(kind, shape)

    values, masks = (tuple(map(loosened, signature.inputs, kinds)) for kinds in (signature.values, signature.masks))
    return dataclasses.replace(signature, values=values, masks=masks)
