"""A Keras model as a chain of operations: where it may be cut, and what crosses a cut.

A Functional or Sequential model already holds its graph. Models nested in it are opened, so that they can be cut
inside. A subclassed model is followed once per training flag, by running its `call` on symbolic inputs. The result is a
`ModelGraph`: operations in an order in which they can run, and named references instead of tensors, so that any
contiguous part of it can run anywhere.

       x ──▶ dense ──r1──▶ relu ──r2──▶ ┬ dense_1 ──r3──▶ add ──▶ y        steps      dense relu dense_1 add
                                        └────────r2──────▶┘                cut before "add": r2 and r3 cross

A nested model's own name stays in the names of its operations (`encoder/dense_1`).
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tf_gpipe import compat
from tf_gpipe.errors import ModelError
from tf_gpipe.messages import listed
from tf_gpipe.values import is_differentiable


@dataclasses.dataclass(frozen=True)
class Ref:
    """The name of a tensor between operations; or of the logits that a softmax or sigmoid made it from."""

    index: int
    is_logits: bool = False

    @property
    def logits(self) -> Ref:
        """The logits of this tensor."""
        return Ref(self.index, is_logits=True)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before any data: shape with None for the batch, dtype, name.

    `is_dense` is False where it is sparse, or may be ragged: made from a ragged one, of unknown length.
    """

    shape: tuple[int | None, ...]
    dtype: str
    name: str
    is_dense: bool = True

    @property
    def is_float(self) -> bool:
        """Whether gradients flow through it."""
        return is_differentiable(tf.as_dtype(self.dtype))

    def of_any_batch(self) -> TensorSpec:
        """The same without a batch size: a Sequential model that was built from data notes the size of that batch."""
        return dataclasses.replace(self, shape=(None, *self.shape[1:]))

    @property
    def bytes_per_row(self) -> int:
        """Bytes for one row of the batch; an unknown dimension counts as 1."""
        size = tf.as_dtype(self.dtype).size
        for dimension in self.shape[1:]:
            size *= dimension or 1
        return size


class ConvertInput(keras.Operation):
    """What a nested model does to an input on entry: the dtype and rank that its `keras.Input` was made with.

    A mask that the model was called with is attached to its input, as Keras does.
    """

    def __init__(self, graph: keras.Model, index: int, name: str) -> None:
        super().__init__(name=name)
        self.spec = graph.inputs[index]

    def call(self, x: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Casts, then adds or drops a last axis of length 1, as Keras does; a mask stays."""
        mask = compat.get_keras_mask(x) if mask is None else mask
        if len(x.shape) == len(self.spec.shape) + 1:
            x = keras.ops.squeeze(x, axis=-1)
        elif len(x.shape) == len(self.spec.shape) - 1:
            x = keras.ops.expand_dims(x, axis=-1)
        x = keras.ops.cast(x, self.spec.dtype)
        if mask is not None:
            compat.set_keras_mask(x, mask)
        return x

    def compute_output_spec(self, x: keras.KerasTensor, mask: keras.KerasTensor | None = None) -> keras.KerasTensor:
        """Shape and dtype of the nested model's input."""
        return keras.KerasTensor(self.spec.shape, self.spec.dtype)


class AddLoss(keras.Operation):
    """`self.add_loss(loss)` in the `call` of a subclassed model."""

    def __init__(self, owner: keras.Model) -> None:
        super().__init__(name="add_loss")
        self.owner = owner

    def call(self, loss: tf.Tensor) -> tf.Tensor:
        """Adds the loss to the model's."""
        self.owner.add_loss(loss)
        return loss

    def compute_output_spec(self, loss: keras.KerasTensor) -> keras.KerasTensor:
        """Shape and dtype of the loss."""
        return keras.KerasTensor(loss.shape, loss.dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of one operation.

    Attributes:
        name: the operation's name, after those of the models around it: `encoder/dense_1`.
        operation: the Keras layer or operation.
        args, kwargs: its arguments, with a `Ref` for each tensor.
        inputs: the refs in them.
        outputs: refs of its outputs, flat.
        training: the flag that a nested model around it was called with; counts where the whole call has none.
    """

    name: str
    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    training: bool | None = None

    def run(self, values: dict[Ref, Any], training: bool | None) -> None:
        """Reads the inputs from `values`, runs the operation and adds its outputs to them."""

        def value(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, Ref) else leaf

        args = tree.map_structure(value, self.args)
        kwargs = tree.map_structure(value, self.kwargs)
        flag = self.training if training is None else training
        results = compat.operation_fn(self.operation, training=flag)(*args, **kwargs)
        values.update(zip(self.outputs, tree.flatten(results), strict=False))

    @property
    def layers(self) -> list[keras.Layer]:
        """The layer and all layers inside it; none for a bare operation such as `x + y`."""
        return compat.flatten_layers(self.operation)

    @property
    def loss_owners(self) -> list[keras.Layer]:
        """Layers (or the model) that may add losses."""
        return [self.operation.owner] if isinstance(self.operation, AddLoss) else self.layers

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables it uses: weights, state, seeds, and variables passed as arguments."""
        passed = [leaf for leaf in tree.flatten((self.args, self.kwargs)) if isinstance(leaf, keras.Variable)]
        own = self.operation.variables if isinstance(self.operation, keras.Layer) else []
        return list({id(v): v for v in [*own, *passed]}.values())


@dataclasses.dataclass(frozen=True)
class ModelGraph:
    """A model as a chain of steps.

    Attributes:
        model: the Keras model.
        steps: its operations, in an order in which they can run.
        inputs: refs of the model's inputs, in Keras's flat order.
        outputs: structure of refs that the model returns.
        specs: what is known of every ref.
    """

    model: keras.Model
    steps: tuple[Step, ...]
    inputs: tuple[Ref, ...]
    outputs: Any
    specs: dict[Ref, TensorSpec]

    @property
    def flat_outputs(self) -> tuple[Ref, ...]:
        """Refs of the model's outputs, flat."""
        return tuple(tree.flatten(self.outputs))

    @property
    def names(self) -> list[str]:
        """Names of the steps: where a partition may cut before."""
        return [step.name for step in self.steps]

    def crossing(self, start: int, end: int) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """What steps `start` to `end` − 1 take from outside, and what others (or the caller) take from them."""
        part = self.steps[start:end]
        made = {ref for step in part for ref in step.outputs}
        taken = dict.fromkeys(ref for step in part for ref in step.inputs if ref not in made)
        used = {ref for step in self.steps[end:] for ref in step.inputs} | set(self.flat_outputs)
        given = dict.fromkeys(ref for step in part for ref in step.outputs if ref in used)
        return tuple(taken), tuple(given)


class _Builder:
    """Collects steps while graphs are opened."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.specs: dict[Ref, TensorSpec] = {}
        self.names: dict[str, int] = {}

    def new_ref(self, tensor: keras.KerasTensor, made_from: Iterable[Ref] = ()) -> Ref:
        ref = Ref(len(self.specs))
        shape = tuple(tensor.shape)
        is_dense = not (tensor.sparse or getattr(tensor, "ragged", False))
        # Keras notes that an input is ragged, and forgets it with the first operation.
        is_dense &= None not in shape[1:] or all(self.specs[before].is_dense for before in made_from)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        self.specs[ref] = TensorSpec(shape, dtype, tensor.name, is_dense)
        return ref

    def unique(self, name: str) -> str:
        """A layer that is called again gets `name:1`, so that a cut has one place."""
        count = self.names.get(name, 0)
        self.names[name] = count + 1
        return f"{name}:{count}" if count else name

    def open(
        self, nodes: Iterable[compat.Node], refs: dict[int, Ref], prefix: str = "", training: bool | None = None
    ) -> dict[int, Ref]:
        """Adds the steps of nodes in their order. Takes and returns the refs of tensors by identity."""
        for node in nodes:
            args, kwargs = (
                tree.map_structure(lambda leaf: refs[id(leaf)] if isinstance(leaf, keras.KerasTensor) else leaf, part)
                for part in compat.node_arguments(node)
            )
            inner = _graph_to_open(node.operation, args, kwargs)
            if inner is not None:
                path = self.unique(f"{prefix}{node.operation.name}")
                flag = kwargs.get("training") if training is None else training
                entered = self.enter(inner, args[0], kwargs.get("mask"), path)
                known = {id(tensor): ref for tensor, ref in zip(inner.inputs, entered, strict=True)}
                found = self.open(compat.nodes_in_order(inner), known, f"{path}/", flag)
                outputs = [found[id(tensor)] for tensor in inner.outputs]
                for ref in outputs if isinstance(node.operation, keras.Sequential) else []:
                    self.specs[ref] = self.specs[ref].of_any_batch()
            else:
                taken = [leaf for leaf in tree.flatten((args, kwargs)) if isinstance(leaf, Ref)]
                outputs = [self.new_ref(tensor, taken) for tensor in node.outputs]
                name = self.unique(f"{prefix}{node.operation.name}")
                inputs_of_step = tuple(dict.fromkeys(taken))
                self.steps.append(Step(name, node.operation, args, kwargs, inputs_of_step, tuple(outputs), training))
            refs.update((id(tensor), ref) for tensor, ref in zip(node.outputs, outputs, strict=True))
        return refs

    def enter(self, graph: keras.Model, inputs: Any, mask: Any, path: str) -> list[Ref]:
        """Refs of a nested model's inputs: the caller's, converted where the model was made for another dtype."""
        refs = []
        flat = _flat_inputs(graph, inputs) or []
        masks = [None] * len(flat) if mask is None else tree.flatten(mask)
        for index, (ref, mask, tensor) in enumerate(zip(flat, masks, graph.inputs, strict=True)):
            spec = self.specs[ref]
            kind = len(tensor.shape), keras.backend.standardize_dtype(tensor.dtype)
            if mask is not None or (len(spec.shape), spec.dtype) != kind:
                operation = ConvertInput(graph, index, name=f"convert_{tensor.name}".replace("/", "_"))
                converted = self.new_ref(tensor)
                name = self.unique(f"{path}/{operation.name}")
                given, taken = ({}, (ref,)) if mask is None else ({"mask": mask}, (ref, mask))
                self.steps.append(Step(name, operation, (ref,), given, taken, (converted,)))
                ref = converted
            refs.append(ref)
        return refs


def _flat_inputs(graph: keras.Model, inputs: Any) -> list[Ref] | None:
    """The refs passed to a nested model in the order of `graph.inputs`; None where only Keras can sort them out."""
    structure = compat.input_structure(graph)
    if isinstance(inputs, Ref):
        return [inputs] if len(graph.inputs) == 1 else None
    try:
        tree.assert_same_structure(tree.lists_to_tuples(inputs), tree.lists_to_tuples(structure))
    except (ValueError, TypeError):
        return None
    flat = tree.flatten(inputs)
    return flat if all(isinstance(leaf, Ref) for leaf in flat) else None


def _graph_to_open(operation: keras.Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> keras.Model | None:
    """The graph inside a nested model, where running its operations one by one is the same as calling the model."""
    if not isinstance(operation, keras.Model) or type(operation).__call__ is not keras.Model.__call__:
        return None
    graph = compat.graph_of(operation)
    given = {name for name, value in kwargs.items() if value is not None}  # Keras itself notes mask=None
    plain = graph is not None and len(args) == 1 and not given - {"training", "mask"}
    if not plain or operation.activity_regularizer is not None or operation.quantization_mode is not None:
        return None
    inputs, masks = _flat_inputs(graph, args[0]), tree.flatten(kwargs.get("mask"))
    can_enter = inputs is not None and ("mask" not in given or len(masks) == len(inputs))
    return graph if can_enter and all(mask is None or isinstance(mask, Ref) for mask in masks) else None


def build(model: keras.Model, inputs: Any = None, training: bool | None = None) -> ModelGraph:
    """The chain of operations of a model.

    Args:
        model: a built Keras model: Sequential, Functional or subclassed.
        inputs: for a subclassed model, a structure of tensors (or anything with `shape` and `dtype`) as its `call`
            takes it.
        training: for a subclassed model, the flag to follow `call` with.

    Returns:
        The chain.

    Raises:
        ValueError: a subclassed model's `call` cannot be followed.
    """
    graph = compat.graph_of(model)
    nodes: Iterable[compat.Node]
    if graph is not None:
        tensors, nodes, structure = graph.inputs, compat.nodes_in_order(graph), compat.output_structure(graph)
    else:
        tensors, nodes, structure = _follow(model, inputs, training)
    builder = _Builder()
    inputs_refs = tuple(builder.new_ref(tensor) for tensor in tensors)
    refs = builder.open(nodes, {id(tensor): ref for tensor, ref in zip(tensors, inputs_refs, strict=True)})
    outputs = tree.map_structure(lambda tensor: refs[id(tensor)], structure)
    if compat.graph_of(model) is not None and isinstance(outputs, list | tuple) and len(outputs) == 1:
        outputs = outputs[0]  # as Keras does
    if isinstance(model, keras.Sequential):
        for ref in (*inputs_refs, *tree.flatten(outputs)):
            builder.specs[ref] = builder.specs[ref].of_any_batch()
    for step in builder.steps:
        _refuse(model, step)
    return ModelGraph(model, tuple(builder.steps), inputs_refs, outputs, builder.specs)


def _refuse(model: keras.Model, step: Step) -> None:
    """Raises for operations that cannot be part of a pipeline."""
    if compat.is_rematerialised(step.operation):
        raise ModelError(
            f"Expected layers made outside `keras.RematScope`, which does not work in graph mode on TensorFlow. "
            f"Received: '{step.name}' of '{model.name}' was made inside one. Make the model without it: "
            "GPipeStrategy rematerialises by itself, see its argument `remat`."
        )


def check_splittable(graph: ModelGraph, num_micro_batches: int) -> None:
    """Raises where a model was made for one batch size only, which micro-batches do not have.

    Raises:
        ValueError: with more than one micro-batch, an input with a fixed batch size, a stateful recurrent layer, or a
            weight that is overwritten by its gradient (those of float8 layers apart, for which the rule is known).
    """
    if num_micro_batches == 1:
        return
    for ref in graph.inputs:
        spec = graph.specs[ref]
        if spec.shape and spec.shape[0] is not None:
            raise ModelError(
                f"Expected inputs without a fixed batch size, since each of {num_micro_batches} micro-batches has "
                f"fewer rows. Received: input '{spec.name}' of '{graph.model.name}' with batch size {spec.shape[0]}. "
                "Make the input with `keras.Input(shape=...)` alone, or set num_micro_batches=1."
            )
    for step in graph.steps:
        for layer in step.layers:
            if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
                raise ModelError(
                    f"Expected recurrent layers without state between batches. Received: '{step.name}' of "
                    f"'{graph.model.name}' with stateful=True, whose state belongs to the rows of a whole mini-batch. "
                    "Set stateful=False, or num_micro_batches=1."
                )
            for v in layer.trainable_weights:
                if v.overwrite_with_gradient and layer.quantization_mode != "float8":
                    raise ModelError(
                        f"Expected gradients that can be added over micro-batches. Received: '{v.path}' of "
                        f"'{graph.model.name}' with overwrite_with_gradient=True, whose gradient is its new value. Use "
                        "a variable that is not trained and assign it in the layer, or set num_micro_batches=1."
                    )


def _line_of(call: Callable[..., Any], error: BaseException) -> str:
    """Where in a `call` an exception came from: ` at line 12, `x = tf.nn.relu(x)`,`; nothing where that is unknown."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name == "call" and f.line]
    here = [f for f in frames if f.filename == inspect.unwrap(call).__code__.co_filename]
    return f" at line {here[-1].lineno}, `{here[-1].line}`," if here else ""


def symbolic_input(tensor: Any) -> keras.KerasTensor | None:
    """A symbolic input for a tensor or its spec, of any batch size; None for an optional one that is not there."""
    if tensor is None:
        return None
    return keras.Input(
        batch_shape=(None, *tensor.shape[1:]),
        dtype=keras.backend.standardize_dtype(tensor.dtype),
        sparse=isinstance(tensor, tf.SparseTensor | tf.SparseTensorSpec),
        ragged=isinstance(tensor, tf.RaggedTensor | tf.RaggedTensorSpec),
    )


def _follow(
    model: keras.Model, inputs: Any, training: bool | None
) -> tuple[list[keras.KerasTensor], list[compat.Node], Any]:
    """Runs the `call` of a subclassed model on symbolic inputs: these, flat, the nodes, and the outputs' structure."""
    if inputs is None:
        raise ModelError(
            f"Expected the inputs of '{model.name}' to be known, since it is a subclassed model whose `call` must be "
            "followed. Received: none. Call it once on data first: `model.fit`, or `strategy.run(model, (x,))`."
        )
    symbolic = tree.map_structure(symbolic_input, inputs)
    call = type(model).call.__get__(model)  # not `model.call`, which the strategy replaces while the model is called
    takes_training = "training" in inspect.signature(call).parameters
    known = {"training": training} if takes_training and training is not None else {}
    losses: list[keras.KerasTensor] = []

    def add_loss(loss: Any) -> None:
        if not all(isinstance(tensor, keras.KerasTensor) for tensor in tree.flatten(loss)):
            raise TypeError(f"a loss that does not follow from the inputs was added: {loss!r}")
        losses.extend(AddLoss(model)(tensor) for tensor in tree.flatten(loss))

    try:
        # A tape would take the variables that shapes are found with for used.
        with (
            compat.stop_recording(),
            compat.call_context(model, training),
            compat.replaced(model, "add_loss", add_loss),
            compat.RecordingScope([]) as scope,
        ):
            outputs = call(symbolic, **known)
        flat = tree.flatten(outputs)
        if not flat or not all(isinstance(tensor, keras.KerasTensor) for tensor in flat):
            raise TypeError(f"`call` returned {outputs!r}")
        known_tensors = [tensor for tensor in tree.flatten(symbolic) if tensor is not None]
        nodes = compat.nodes_between(known_tensors, [*flat, *losses])
    except Exception as error:
        raise ModelError(
            f"Expected a model whose operations can be followed, to cut it into stages: a Sequential or Functional "
            f"model, or a subclassed one whose `call` uses only layers and `keras.ops`. Received: '{model.name}' "
            f"({type(model).__name__}), whose `call` failed on symbolic inputs{_line_of(call, error)} with "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''} … "
            "Replace operations of TensorFlow by those of `keras.ops`, put what cannot be replaced into a "
            "layer of its own, or build the model with the functional API: `keras.Model(inputs, outputs)`."
        ) from error
    _refuse_values(model, call, {**scope.assigned, **scope.read})
    return known_tensors, nodes, outputs


def _refuse_values(model: keras.Model, call: Callable[..., Any], used: dict[int, keras.Variable]) -> None:
    """Raises where a `call` took or assigned the value of a variable, which would be a constant in every step.

    Layers that are called with symbolic inputs take theirs in scopes of their own.
    """
    if used:
        paths = listed(v.path for v in used.values())
        raise ModelError(
            f"Expected the `call` of a subclassed model to use variables through layers, or together with tensors that "
            f"follow from its inputs, since it is followed once. Received: '{model.name}' ({type(model).__name__}), "
            f"whose `call` takes the value of {paths}, or assigns it, by itself: each step would see one constant. "
            "Put that into a layer of its own, which is called with a tensor that follows from the inputs."
        )
