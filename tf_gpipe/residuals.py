"""Keeping a stage's activations for its backward pass: the least of them, in functions that are not inlined.

TensorFlow's own gradient of a function returns every tensor that the unpruned backward graph mentions: for 48 dense
layers with GELU 5.5 GB where plain Keras keeps 3.2. Here the backward graph is traced inside the forward graph, pruned,
and only what is left of its captures becomes an output of the forward function:

    forward:  inputs …            →  outputs …, residuals …
    backward: residuals …, d …    →  gradients …

What depends on weights alone (a weight, its cast to 16 bits) is made again instead of kept. So is what a max pooling
gave, if its input is kept: that is cheap, and oneDNN's gradient, 30 times as fast as the other, needs the pooling in
the same graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Residuals:
    """A backward graph, cut out of the forward graph it was traced in.

    Attributes:
        kept: tensors of the forward graph that the backward pass needs, to be returned by the forward function.
        gradient_graph: the pruned backward graph.
        gradients: names of its outputs, in order.
        arguments: names of its placeholders for the gradients of the forward function's outputs.
        kept_names: names of its placeholders for `kept`.
        resources: placeholder names and the variables' handles that they stand for.
        remade_graph, remade: a graph of weights alone, and pairs (placeholder name, its tensor in that graph).
        remade_resources: as `resources`, for that graph.
        pooled: for each max pooling that is made again, placeholder names of its output and of its input, and the
            operation.
        traced: the function the backward graph was cut out of; when it is freed, the runtime forgets the functions
            inside, such as bodies of loops.
    """

    kept: tuple[tf.Tensor, ...]
    gradient_graph: Any
    gradients: tuple[str, ...]
    arguments: tuple[str, ...]
    kept_names: tuple[str, ...]
    resources: tuple[tuple[str, tf.Tensor], ...]
    remade_graph: Any
    remade: tuple[tuple[str, str], ...]
    remade_resources: tuple[tuple[str, tf.Tensor], ...]
    pooled: tuple[tuple[str, str, tf.Operation], ...]
    traced: Any

    def make_kept(self, forward: Any, arguments: Tensors) -> list[tf.Tensor]:
        """`kept`, made again in the graph that is being traced now.

        Args:
            forward: the traced forward function, in whose graph they are.
            arguments: what it takes.
        """
        needed = _ancestors(tensor.op for tensor in self.kept)
        given = dict(zip((placeholder.name for placeholder in forward.inputs), arguments, strict=False))
        given |= {inside.name: _capture(outside) for outside, inside in forward.graph.captures if inside.op in needed}
        cut_out = _cut_out(forward.graph, {op.name for op in needed})
        made = _import(cut_out, given, [tensor.name for tensor in self.kept])
        for tensor, known in zip(made, self.kept, strict=True):
            tensor.set_shape(known.shape)  # by Python code, perhaps, which the graph does not know of
        return made

    def run(self, kept: Tensors, d_outputs: Tensors) -> list[tf.Tensor]:
        """The gradients, in the graph that is being traced now."""
        given = dict(zip(self.kept_names, kept, strict=True)) | dict(zip(self.arguments, d_outputs, strict=True))
        if self.remade:
            handles = {name: _capture(handle) for name, handle in self.remade_resources}
            made = _import(self.remade_graph, handles, [source for _, source in self.remade])
            given |= {name: tensor for (name, _), tensor in zip(self.remade, made, strict=True)}
        given |= {name: _capture(handle) for name, handle in self.resources}
        given |= {output: _pool_again(given[source], op) for output, source, op in self.pooled}
        return _import(self.gradient_graph, given, self.gradients)


def trace(gradient: Callable[..., Tensors], specs: Sequence[tf.TensorSpec]) -> Residuals:
    """Traces a backward pass inside the graph of its forward pass, which is being traced now.

    Args:
        gradient: takes the gradients of the forward function's outputs and returns flat tensors.
        specs: kinds of the former.
    """
    forward = tf.compat.v1.get_default_graph()
    concrete = tf.function(gradient, input_signature=list(specs), autograph=False).get_concrete_function()
    graph = concrete.graph
    outputs = [output.name for output in concrete.outputs]
    needed = _ancestors(output.op for output in concrete.outputs)
    arguments = [placeholder.name for placeholder in concrete.inputs[: len(specs)]]
    kept, kept_names, resources, remade, pooled = [], [], [], [], []
    placeholders = {
        id(outside): placeholder.name for outside, placeholder in graph.captures if placeholder.op in needed
    }
    handles = {id(inside): outside for outside, inside in forward.captures}
    for outside, placeholder in graph.captures:
        if placeholder.op not in needed:
            continue
        if placeholder.dtype == tf.resource:
            resources.append((placeholder.name, handles.get(id(outside), outside)))
        elif _is_made_of_weights(outside, forward):
            remade.append((placeholder.name, outside))
        elif _is_pooled(outside) and id(outside.op.inputs[0]) in placeholders:
            pooled.append((placeholder.name, placeholders[id(outside.op.inputs[0])], outside.op))
        else:
            kept.append(outside)
            kept_names.append(placeholder.name)
    remade_ops = _ancestors(tensor.op for _, tensor in remade)
    return Residuals(
        tuple(kept),
        _cut_out(graph, {op.name for op in needed}),
        tuple(outputs),
        tuple(arguments),
        tuple(kept_names),
        tuple(resources),
        _cut_out(forward, {op.name for op in remade_ops}) if remade else None,
        tuple((name, tensor.name) for name, tensor in remade),
        tuple((inside.name, outside) for outside, inside in forward.captures if inside.op in remade_ops),
        tuple(pooled),
        concrete,
    )


def _ancestors(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """The operations and all that they need."""
    found: set[tf.Operation] = set()
    waiting = list(operations)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def part_of_work(needed: Iterable[tf.Tensor], whole: Iterable[tf.Tensor], among: Iterable[tf.Operation]) -> float:
    """How much of the work that makes some tensors of a graph also makes others, from 0 to 1.

    Args:
        needed: the others.
        whole: the tensors that are made by all of the work.
        among: the operations that count.
    """
    counted = set(among)
    every = _ancestors(tensor.op for tensor in whole) & counted
    again = _ancestors(tensor.op for tensor in needed) & every
    total = sum(map(_work, every))
    return sum(map(_work, again)) / total if total else 0.0


_FREE = {"Cast", "Const", "ExpandDims", "Identity", "IdentityN", "NoOp", "Pack", "Placeholder", "ReadVariableOp"}
_FREE |= {"Reshape", "Shape", "Squeeze", "StopGradient", "StridedSlice"}
"""Operations that pass on what is there."""


def _work(op: tf.Operation) -> int:
    """About how many multiply-adds an operation does, from known shapes; an unknown dimension counts as 1."""
    if op.type in _FREE or not op.outputs:
        return 0
    made = sum(math.prod(_sizes(tensor)) for tensor in op.outputs)
    if op.type == "MatMul" or op.type.startswith("BatchMatMul"):
        axis = -2 if op.type == "MatMul" and op.get_attr("transpose_a") else -1
        return made * (_sizes(op.inputs[0]) or [1])[axis]
    if op.type in ("Conv2D", "Conv3D"):
        return made * math.prod(_sizes(op.inputs[1])[:-1])
    if op.type == "DepthwiseConv2dNative":
        return made * math.prod(_sizes(op.inputs[1])[:2])
    if op.type == "Conv2DBackpropInput":  # a transposed convolution
        return math.prod(_sizes(op.inputs[2])) * math.prod(_sizes(op.inputs[1])[:-1])
    if op.type == "Einsum":
        labels = op.get_attr("equation").decode().partition("->")[0].split(",")
        pairs = (zip(axes, _sizes(tensor), strict=False) for axes, tensor in zip(labels, op.inputs, strict=True))
        return math.prod(dict(itertools.chain(*pairs)).values())
    return made


def _sizes(tensor: tf.Tensor) -> list[int]:
    return [size or 1 for size in tensor.shape.as_list()] if tensor.shape.rank is not None else []


_REPEATABLE = {"Cast", "Const", "Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze", "Mul", "Add", "AddV2"}


def _is_made_of_weights(tensor: tf.Tensor, graph: tf.Graph) -> bool:
    """Whether a tensor follows from variables and constants by a few cheap operations."""
    if not hasattr(tensor, "op"):
        return False
    handles = {inside.op for _, inside in graph.captures}
    waiting, seen = [tensor.op], 0
    reads = False
    while waiting:
        op = waiting.pop()
        seen += 1
        if op in handles:
            continue
        reads = reads or op.type == "ReadVariableOp"
        if seen > 16 or (op.type != "ReadVariableOp" and op.type not in _REPEATABLE) or op.control_inputs:
            return False
        waiting += [source.op for source in op.inputs]
    return reads


def _is_pooled(tensor: tf.Tensor) -> bool:
    return hasattr(tensor, "op") and tensor.op.type == "MaxPool" and not tensor.op.control_inputs


def _pool_again(tensor: tf.Tensor, op: tf.Operation) -> tf.Tensor:
    sizes = {name: list(op.get_attr(name)) for name in ("ksize", "strides", "explicit_paddings")}
    names = {name: op.get_attr(name).decode() for name in ("padding", "data_format")}
    return tf.raw_ops.MaxPool(input=tensor, **sizes, **names)


def _cut_out(graph: tf.Graph, names: set[str]) -> Any:
    """The part of a graph with the named operations, and the functions they call."""
    definition = graph.as_graph_def()
    # Placeholders are given when the part is put to use; left in, they would keep XLA from compiling it.
    nodes = [node for node in definition.node if node.name in names and node.op != "Placeholder"]
    there = {node.name for node in nodes}
    del definition.node[:]
    definition.node.extend(nodes)
    for node in definition.node:
        node.attr.pop("_class", None)  # colocation with operations that may be gone
        # Waiting for a placeholder (the gradient of SiLU does) means waiting for what is given in its place.
        kept = [name for name in node.input if not name.startswith("^") or name[1:] in there]
        del node.input[:]
        node.input.extend(kept)
    return definition


def _capture(handle: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.get_default_graph().capture(handle)


def _import(definition: Any, given: dict[str, tf.Tensor], wanted: Sequence[str]) -> list[tf.Tensor]:
    direct = {name: given[name] for name in wanted if name in given}
    rest = [name for name in wanted if name not in direct]
    used = {name.lstrip("^").partition(":")[0] for node in definition.node for name in node.input}
    given = {name: tensor for name, tensor in given.items() if name.partition(":")[0] in used}
    made = tf.graph_util.import_graph_def(definition, input_map=given, return_elements=rest, name="") if rest else []
    found = direct | dict(zip(rest, made, strict=True))
    return [found[name] for name in wanted]
