"""Moves variables to the devices of their stages, without a trace that knows them elsewhere.

A variable is made on the host and moves once, when its model is first placed; its Python object stays, and its old
place is left empty. Whoever knew it there must not go on with what is left:

    functions traced before         are traced again when they are next called
    a trace that is under way       cannot begin anew: the variable stays, and moves when `fit` is next called
    a tape, or a `tf.data` pipeline  knows the old place for as long as it lives: the variable stays
    concrete functions              are what they are, and raise an error that says what to do
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.messages import listed, warn
from tf_gpipe.plan import Plan

placed: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
"""Variables that a plan, of any strategy, has put where they are, by identity. They stay there."""


@dataclasses.dataclass(frozen=True)
class Move:
    """A variable, and the full name of the device that it belongs on."""

    variable: keras.Variable
    device: str


def place(plan: Plan, model: keras.Model) -> list[keras.Variable]:
    """Moves each variable to the device of the first stage that uses it, and its optimizer slots with it.

    One that was placed before stays: functions that were traced since know it where it is. So do the functions of a
    saved model, whose variables stay where they were loaded.

    Returns:
        The variables that could not be moved now.
    """
    moves: dict[int, Move] = {}
    for stage in plan.stages:
        saved = [layer for step in stage.steps for layer in step.layers if isinstance(layer, keras.layers.TFSMLayer)]
        loaded = {id(v) for layer in saved for v in layer.variables}
        for variable in stage.variables:
            raw = compat.raw_variable(variable)
            if id(raw) not in placed and id(variable) not in loaded:
                moves.setdefault(id(raw), Move(variable, stage.device))
    left = _move(moves.values())
    waiting = {id(variable) for variable in left}
    for move in moves.values():
        if id(move.variable) not in waiting:
            raw = compat.raw_variable(move.variable)
            placed[id(raw)] = raw
    place_slots(model)
    return left


def place_slots(model: keras.Model) -> None:
    """Moves the slots that a model's optimizer has made to the devices of their weights."""
    optimizer = getattr(model, "optimizer", None)
    pairs = compat.slots_of(optimizer) if optimizer is not None else ()
    _move(Move(slot, compat.raw_variable(weight).device) for weight, slot in pairs)


def is_placed(model: keras.Model) -> bool:
    """Whether all weights of a model have been put where they are."""
    return all(id(compat.raw_variable(v)) in placed for v in model.weights)


def tell_of_waiting(model: keras.Model, waiting: Sequence[keras.Variable]) -> None:
    """Warns that variables of a model are not where their stages are."""
    names = listed(v.path for v in waiting)
    warn(
        f"Variables of '{model.name}' stay on {compat.raw_variable(waiting[0]).device} for now, since a step, a tape "
        f"or a `tf.data` pipeline used them before they were placed: {names}. Results are the same, but stages fetch "
        f"them at each step. To have them on their stages' devices, call `strategy.place` with '{model.name}', and "
        "with inputs if it is a subclassed model, before anything uses it."
    )


def _move(moves: Iterable[Move]) -> list[keras.Variable]:
    """Moves variables; returns those that must stay where they are, since something cannot learn of the new place."""
    away = [move for move in moves if not compat.is_on(compat.raw_variable(move.variable).device, move.device)]
    if not away:
        return []
    raws = [compat.raw_variable(move.variable) for move in away]
    users = compat.HandleUsers([raw.handle for raw in raws])
    left, retired = [], []
    for move, raw in zip(away, raws, strict=True):
        if users.must_stay(raw.handle):
            left.append(move.variable)
        else:
            retired.append((raw.handle, move.variable.path))
            compat.move_variable(raw, move.device)
    users.trace_again(retired)
    return left
