"""Gets a model ready for its pipelines: built before Keras builds it, and traced anew after each `compile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tf_gpipe import compat, model_graph


def renew_if_compiled(model: keras.Model) -> None:
    """Lets the pipelines of a model, and of models inside it, be traced anew after each `compile`, as Keras does."""
    compilation = compat.compilation_of(model)
    if model.__dict__.setdefault("_gpipe_compilation", compilation) is compilation:
        return
    model.__dict__["_gpipe_compilation"] = compilation
    for layer in compat.flatten_layers(model):
        for known in list(layer.__dict__.get("_gpipe_pipelines", {}).values()):
            # Operations stay where they are; a `call` of the user's may have become another and is followed again.
            renewed = {key: p.renewed() for key, p in known.items() if isinstance(key, keras.Model)}
            known.clear()
            known.update(renewed)


def is_built(model: keras.Model) -> bool:
    """Whether a model's operations are known; layers that no call has used yet may still be without weights."""
    if compat.graph_of(model) is not None:
        return True
    is_open = isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call
    return bool(model.built) and not is_open


def models_inside(model: keras.Model) -> list[keras.Model]:
    """Models that a model holds, at any depth of attributes, lists and dicts; those that hold others of them first."""
    found: dict[int, keras.Model] = {}
    seen = {id(model)}
    waiting = _held_by(model)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.Model):
            found[id(value)] = value
        waiting += _held_by(value)
    inside = {key: {id(layer) for layer in compat.flatten_layers(part)} for key, part in found.items()}
    return sorted(found.values(), key=lambda part: sum(id(part) in layers for layers in inside.values()))


_OPAQUE = ("tensorflow", "numpy", "tf_gpipe", "weakref", "threading", "builtins")
"""Libraries whose objects hold no model of the user's that a step could call."""


def _held_by(value: Any) -> list[Any]:
    """What a value holds: the parts of a container, the attributes of an object; nothing for tensors and graphs."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    leaf = isinstance(value, type | keras.Variable | keras.KerasTensor | compat.Node | keras.Optimizer)
    if leaf or type(value).__module__.split(".")[0] in _OPAQUE:
        return []
    return [part for name, part in getattr(value, "__dict__", {}).items() if not name.startswith("_gpipe")]


@contextlib.contextmanager
def prebuilt(model: keras.Model, batch: Any) -> Iterator[None]:
    """Spares a model what Keras asks of it under strategies only: to be built by a call without `training`.

    A layer that only a training call uses is built too; a model without `call` (a GAN, whose `train_step` calls its
    parts) counts as built. What cannot be built here is left for Keras to try, and to explain.
    """
    if type(model).call is keras.Model.call:
        before, model.built = model.built, True
        try:
            yield
        finally:
            model.built = before
        return
    if batch is not None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        # Of any kind: this runs code of the user's that plain Keras may never run, as the training branch of a model
        # that is only evaluated. The call that needs it raises the same again.
        with contextlib.suppress(Exception):
            build_if_needed(model, (x,), {"training": True})
    yield


def build_if_needed(model: keras.Model, args: Any, kwargs: Any) -> None:
    """Builds a model that is called for the first time, with symbolic inputs and without a batch size."""
    if all(layer.built for layer in compat.flatten_layers(model)) and is_built(model):
        return
    specs = tree.map_structure(model_graph.symbolic_input, args[0])
    # Of a model that was called before, a layer may be left that this kind of call builds, or none does. Its code, and
    # the error, are the user's; the call itself comes next and raises it again.
    unless_needed = contextlib.suppress(Exception) if is_built(model) else contextlib.nullcontext()
    with tf.init_scope(), unless_needed:
        compat.compute_output_spec(model, specs, **{k: v for k, v in kwargs.items() if k == "training"})


def adopt_optimizers(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Makes the optimizers of a model a strategy's that were made outside its scope and have no slots yet.

    A model's own `train_step` may keep several, as attributes and in lists or dicts.
    """
    for part in compat.flatten_layers(model):
        if isinstance(part, keras.Model):
            values = _held_by(part)
            inside = [one for value in values if isinstance(value, dict | list | tuple) for one in _held_by(value)]
            for value in (*values, *inside):
                if isinstance(value, keras.Optimizer):
                    compat.adopt_optimizer(value, strategy)
