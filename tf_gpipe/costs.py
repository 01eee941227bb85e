"""What each operation of a model costs: floating-point operations and bytes, for one row of the batch.

FLOPs are counted from shapes, without running anything: two for each multiply-add of a kernel at each position where
it is applied, plus one for each element of the output. A layer made of layers costs what these do, each for the shapes
that it was built for. An unknown dimension counts as 1, so that a model over sequences of any length is balanced as for
length 1; pass explicit layer counts where that is not what you want.

In a training step, an operation does its forward FLOPs once for each of these:

    forward                      always
    forward again                in a stage that goes back, for the micro-batches that recompute their activations
    gradients of its inputs      where something before it is trained
    gradients of its weights     where it is trained

An operation without weights has no other gradient than that of its inputs; it counts twice there, as what is around it
does where all is trained. In a model without frozen layers everything counts three times, the first operations too,
although nothing asks for the gradients of their inputs: its plan follows from forward FLOPs alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.model_graph import ModelGraph, Ref, Step, TensorSpec
from tf_gpipe.values import is_differentiable


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one operation.

    Attributes:
        flops: floating-point operations of the forward pass for one row.
        parameters: number of trainable and other weights, seeds and metrics apart.
        output_bytes: bytes of its outputs for one row.
    """

    flops: float
    parameters: int
    output_bytes: int


def costs(graph: ModelGraph) -> list[Cost]:
    """Costs of all operations of a model, in order.

    A weight that several operations share counts as a parameter of the first.
    """
    seen: set[int] = set()
    result = []
    for step in graph.steps:
        outputs = [graph.specs[ref] for ref in step.outputs]
        inputs = [graph.specs[ref] for ref in step.inputs]
        weights = _weights(step)
        parameters = sum(math.prod(w.shape) for w in weights if id(w) not in seen)
        seen.update(id(w) for w in weights)
        result.append(Cost(_flops(step, inputs, outputs), parameters, sum(spec.bytes_per_row for spec in outputs)))
    return result


def is_trained(step: Step) -> bool:
    """Whether an operation has weights that get gradients now."""
    return any(v.trainable for v in _floats(step))


def _is_frozen(step: Step) -> bool:
    """Whether an operation has weights that could be trained, and none that is; moving averages are no such weights."""
    weights = _floats(step)
    could_be = any(len(v.shape) > 1 for v in weights) or not all(layer.trainable for layer in step.layers)
    return bool(weights) and could_be and not is_trained(step)


def _floats(step: Step) -> list[keras.Variable]:
    return [v for v in step.variables if is_differentiable(tf.as_dtype(v.dtype))]


def going_back(graph: ModelGraph, stages: Iterable[Sequence[int]]) -> tuple[list[int], list[bool]]:
    """What the backward pass does, with what is frozen now.

    Args:
        graph: the model.
        stages: indices of the operations of each stage. All that leaves a stage in which something is trained has a
            gradient (`Call`).

    Returns:
        How many times each operation's forward FLOPs its backward work is, and whether each stage has a backward task.
    """
    if not any(map(_is_frozen, graph.steps)):
        return [2] * len(graph.steps), [len(stage) > 0 for stage in stages]
    has_gradient: set[Ref] = set()
    counts, back = [], []
    for stage in stages:
        given = set(has_gradient)
        made: set[Ref] = set()
        goes_back = False
        for step in graph.steps[stage[0] : stage[-1] + 1] if stage else ():
            of_inputs, of_weights = bool(has_gradient.intersection(step.inputs)), is_trained(step)
            counts.append(of_weights + of_inputs * (1 if of_weights or _is_frozen(step) else 2))
            made.update(ref for ref in step.outputs if graph.specs[ref].is_float)
            if of_inputs or of_weights:
                has_gradient.update(made.intersection(step.outputs))
            goes_back = goes_back or of_weights or bool(given.intersection(step.inputs))
        if goes_back:
            has_gradient |= made
        back.append(goes_back)
    return counts, back


def boundary_bytes(graph: ModelGraph) -> list[int]:
    """Bytes for one row that cross a cut before each operation; the model's own inputs do not count."""
    return [sum(graph.specs[ref].bytes_per_row for ref in refs) for refs in _crossing(graph)]


def pieces(graph: ModelGraph) -> list[int]:
    """Numbers of operations that belong together, since a ragged or sparse tensor with a gradient is between them."""
    counts: list[int] = []
    for refs in _crossing(graph):
        if counts and any(graph.specs[ref].is_float and not graph.specs[ref].is_dense for ref in refs):
            counts[-1] += 1
        else:
            counts.append(1)
    return counts


def _crossing(graph: ModelGraph) -> list[list[Ref]]:
    """For a cut before each operation, what was made before it and is used after it."""
    made_at = {ref: position for position, step in enumerate(graph.steps) for ref in step.outputs}
    last_use = {ref: position for position, step in enumerate(graph.steps) for ref in step.inputs}
    crossing: list[list[Ref]] = [[] for _ in graph.steps]
    for ref, start in made_at.items():
        for position in range(start + 1, last_use.get(ref, start) + 1):
            crossing[position].append(ref)
    return crossing


def _weights(step: Step) -> list[keras.Variable]:
    own = {id(w) for layer in step.layers[:1] for w in layer.weights}
    return [v for v in step.variables if id(v) in own or not isinstance(step.operation, keras.Layer)]


Shape = Sequence[int | None]


def _positions(shape: Shape) -> int:
    """Number of places between the batch and the channels: pixels, tokens."""
    return math.prod(dimension or 1 for dimension in tuple(shape)[1:-1])


def _most_positions(shapes: Iterable[Shape]) -> int:
    return max(map(_positions, shapes), default=1)


def _elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(dimension or 1 for dimension in tuple(shape)[1:]) for shape in shapes)


_APPLIED_AT_OUTPUTS = {"Conv1D", "Conv2D", "Conv3D", "Dense", "EinsumDense"}
_APPLIED_AT_OUTPUTS |= {"DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D"}
"""Layers whose kernel is applied once at each position of their output."""

_WHOLE = (
    keras.layers.GroupQueryAttention,
    keras.layers.MultiHeadAttention,
    keras.layers.RNN,
    keras.layers.Wrapper,
)
"""Layers made of layers that are used in another way than by calling them once for their own shapes."""


def _flops(step: Step, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> float:
    """FLOPs of one operation for one row."""
    operation = step.operation
    before, after = [spec.shape for spec in inputs], [spec.shape for spec in outputs]
    if isinstance(operation, keras.layers.Embedding):
        reverse = step.kwargs.get("reverse", step.args[1] if len(step.args) > 1 else False)  # logits from its table
        if reverse is True:
            return 2.0 * _elements(after) * (inputs[0].shape[-1] or 1)
    if isinstance(operation, keras.Layer):
        return _layer_flops(operation, before, after, set())
    return _kernel_flops(operation, _weights(step), before, after)


def _layer_flops(layer: keras.Layer, before: Sequence[Shape], after: Sequence[Shape], counted: set[int]) -> float:
    """FLOPs of a layer and of those inside it that are not `counted` yet, for one row.

    Args:
        layer: the layer.
        before: shapes of its inputs.
        after: those of its outputs.
        counted: identities of layers; those that are counted now are added.
    """
    if isinstance(layer, keras.layers.Embedding):
        return float(_elements(after))
    inside = compat.layers_inside(layer)
    of_keras = type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)
    if not inside or isinstance(layer, _WHOLE) or of_keras:
        return _kernel_flops(layer, layer.weights, before, after)
    theirs = {id(w) for inner in inside for w in inner.weights}
    own = [w for w in layer.weights if id(w) not in theirs]
    total = 0.0 if isinstance(layer, keras.Model) and not own else _kernel_flops(layer, own, before, after)
    for inner in inside:
        called = inner.built and not isinstance(inner, keras.layers.InputLayer)
        if called and id(inner) not in counted:
            counted.add(id(inner))
            total += _layer_flops(inner, *(_shapes_of(inner) or (before, after)), counted)
    return total


def _shapes_of(layer: keras.Layer) -> tuple[list[Shape], list[Shape]] | None:
    """Shapes of the inputs that a layer was built for, and of what it makes of them; None if it does not tell."""
    before: list[Shape] = []
    after: list[Shape] = []
    try:
        config = layer.get_build_config() or {}
        built_for = list(config.get("shapes_dict", {"": config.get("input_shape")}).values())
        if None in built_for:
            return None
        keras.tree.map_shape_structure(before.append, built_for)
        keras.tree.map_shape_structure(after.append, layer.compute_output_shape(*built_for))
    except Exception:  # of any kind: a layer's own code, which Keras may never call, and this is only an estimate
        return None
    return before, after


def _kernel_flops(
    operation: keras.Operation, weights: Sequence[keras.Variable], before: Sequence[Shape], after: Sequence[Shape]
) -> float:
    """FLOPs of an operation that applies weights, from shapes of its inputs and outputs."""
    elements = float(_elements(after))
    # The biases of attention and of GRU have two axes.
    kernels = sum(math.prod(w.shape) for w in weights if len(w.shape) > 1 and "bias" not in w.name)
    here, there = _most_positions(after), _most_positions(before)
    if "Transpose" in type(operation).__name__:
        here = there  # a transposed convolution applies its kernel at each position of its input
    elif type(operation).__name__ not in _APPLIED_AT_OUTPUTS:
        here = max(here, there)  # recurrent layers see each position of their input
    attention = 0.0
    if isinstance(operation, keras.layers.MultiHeadAttention):
        attention = 4.0 * here * there * operation.num_heads * operation.key_dim
    elif isinstance(operation, keras.layers.GroupQueryAttention):
        attention = 4.0 * here * there * operation.num_query_heads * operation.head_dim
    if not kernels and type(operation).__name__ == "Matmul":
        return 2.0 * elements * (before[0][-1] or 1)
    if not kernels and type(operation).__name__ in ("Dot", "Einsum"):
        return 2.0 * elements * max((shape[-1] or 1 for shape in before), default=1)
    return 2.0 * kernels * here + attention + elements
