"""Every private name of TensorFlow and Keras that the library uses, each with its reason.

The rest of the package imports only public names and this file. `tests/test_compat.py` checks that every name
below exists in the installed versions, so that an upgrade that moves one fails there and nowhere else.

| what | why no public name serves |
|---|---|
| `Functional`, `Sequential._functional`, `Node` | a model's graph of operations has no public reader |
| `operation_fn` | how Keras hands `training` to the operations of a graph |
| `get_keras_mask`, `set_keras_mask` | masks are attributes of tensors, lost at every function boundary |
| `_keras_logits` | so are the logits of a softmax, from which a crossentropy is taken |
| `Layer._trainable_variables` | weights that are frozen now, apart from state |
| the name `seed_generator_state` | draws are for each micro-batch, whoever owns the seed generator |
| `compute_output_spec` | builds a model from shapes alone, as Keras does under strategies |
| `CallContext`, `global_state` | a stage's body may be traced after the model's call has returned |
| `BatchNormalization._moments` | a micro-batch's statistics are wanted before they are mixed into the averages |
| `Trainer._compile_config` | what a layer does may change with every `compile` |
| `EpochIterator`, the frame `_maybe_symbolic_build` | data are spared the epoch that Keras begins to learn shapes |
| `AutocastScope` | mixed precision inside a stage's body |
| `_keras_call_info_injected` | Keras replaces exceptions without it, and their notes are lost |
| `forwardprop_util` | whether forward-mode differentiation is under way |
| `TensorFlowTrainer` | which method of Keras enters a scope, or trains, and how much it is to print: no hook tells |
| `EpochIterator.data_adapter`, `Dataset._batch_size` | how many rows a batch has: the graph of a step may not know |
| `GeneratorDataAdapter` | the same, of batches of a generator that Keras has looked at |
| `_default_graph_stack` | `clear_session` resets the default graph, and with it forgets the scope that is open |
| `control_flow_util` | whether a `tf.function(jit_compile=True)` of the user's is being traced |
| `record_operation`, `stop_recording` | `tf.custom_gradient` reads every weight onto one device in graph mode |
| `READ_ONLY_RESOURCE_INPUTS_ATTR` | what `tf.function` tells the graph about its own calls, for a `RemoteCall` |
| `ConcreteFunction._call_flat` | a function is given the handles of its variables, which travel as one tensor |
| `get_read_write_resource_inputs` | whether an operation assigns a variable |
| `experimental_acd_manager` | timestamps, and calls without variables, would wait for each other on all stages |
| the name scope `loop_body` | a vectorised loop is made anew from its body, without what the result does not need |
| `Graph._functions` | what branches, loops and functions of a traced stage do, for its effects and its state |
| `compiler_ir` | whether XLA can take a function that is traced already |
| `attr_value_pb2` | the attribute that hides a call's function from a pass that searches it |
| `UpdateContext` | a variable is updated where it stands, not on the one device of the base class |
| the frame of `Layer.add_loss` | whose loss it is; the layer's own note is cleared by a call in another thread |
| `OneDeviceExtended` | tf.distribute has no public base for a strategy with one replica |
| `ResourceVariable` | `tf.Variable` asks the open strategy for a device |
| `Optimizer._distribution_strategy` | an optimizer of no or another scope fails with a riddle |
| `Variable._direct_assign` | an assignment inside a stateless scope that is to happen |
| `TFOptimizer` | which functions of Keras's optimizers only update variables, one after the other |
| `Variable._regularizer` | a weight's regulariser is taken where the weight is |
| handles of `tf.Variable` | a variable's device is fixed when it is made; moving keeps its identity |
| `Function` and its `_function_cache` | a function that knows a variable where it was is to be traced again |
| `ConcreteFunction` and its `_captured_inputs` | what knows it there; what cannot be traced again must say so |
| `GradientTape._tape` | whether a tape that is closed may still be asked for gradients |
| `StructuredFunctionWrapper` | a `tf.data` pipeline that knows a variable keeps it where it is |
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import AutocastScope, compute_output_spec, get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.layers.layer import CallContext, Layer
from keras.src.models.functional import Functional, operation_fn
from keras.src.ops.node import Node
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops.structured_function import StructuredFunctionWrapper
from tensorflow.python.distribute.distribute_lib import UpdateContext
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.eager.polymorphic_function import compiler_ir
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, variable_accessed

from tf_gpipe import threads
from tf_gpipe.errors import ModelError
from tf_gpipe.messages import LIBRARIES
from tf_gpipe.threads import replaced

__all__ = [
    "CallContext",
    "Functional",
    "Node",
    "OneDeviceExtended",
    "compute_output_spec",
    "get_keras_mask",
    "global_seed_generator",
    "operation_fn",
    "replaced",
    "set_keras_mask",
]

Structure = Any
"""A nest of lists, tuples and dicts."""


# --- Keras graphs ----------------------------------------------------------------------------------------------------


def graph_of(model: keras.Layer) -> Functional | None:
    """The Functional graph that `model.call` runs through, or None where `call` is the user's own."""
    call = type(model).call
    if isinstance(model, keras.Sequential):
        return model._functional if call is keras.Sequential.call else None
    if isinstance(model, Functional):
        return model if call is Functional.call else None
    return None


def nodes_in_order(graph: keras.Function) -> Iterator[Node]:
    """The nodes of a Keras graph in the order in which Keras runs them, without its inputs."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.operation is not None and not node.is_input:
                yield node


def nodes_between(inputs: Sequence[keras.KerasTensor], outputs: Sequence[keras.KerasTensor]) -> list[Node]:
    """The nodes that lead from inputs to outputs, in an order in which they can run.

    `keras.Function` would find them too, but refuses operations that share a name, as layers of a subclassed model may.
    """
    known = {id(tensor) for tensor in inputs}
    found: dict[int, Node] = {}  # in order; a node is here once all before it are
    waiting = [(tensor, False) for tensor in reversed(outputs)]
    while waiting:
        tensor, entered = waiting.pop()
        history = tensor._keras_history
        node = history.operation._inbound_nodes[history.node_index]
        if id(tensor) in known or id(node) in found:
            continue
        if node.is_input:
            raise ValueError(f"'{tensor.name}' does not follow from the inputs")
        if entered:
            found[id(node)] = node
        else:
            waiting.append((tensor, True))
            waiting += [(before, False) for before in reversed(node.input_tensors)]
    return list(found.values())


def node_arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a node; its inputs in them are KerasTensors."""
    return node.arguments.args, node.arguments.kwargs


def input_structure(graph: Functional) -> Structure:
    """The structure of KerasTensors that a graph was made with as its inputs."""
    return graph._inputs_struct


def output_structure(graph: keras.Function) -> Structure:
    """The structure of KerasTensors that a graph was made with as its outputs."""
    return graph._outputs_struct


def standardize_inputs(graph: Functional, inputs: Structure) -> list[tf.Tensor | None]:
    """Flat inputs in the order of `graph.inputs`, checked and converted as Keras itself does."""
    return graph._standardize_inputs(inputs)


def own_seed_states(layer: keras.Layer) -> list[keras.Variable]:
    """States of the seed generators that a layer itself owns."""
    return [generator.state for generator in layer._seed_generators]


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a seed generator, of whatever owner, or of none."""
    return variable.name == "seed_generator_state"


def flatten_layers(operation: keras.Operation) -> list[keras.Layer]:
    """A layer and all layers inside it; nothing for an operation that is no layer."""
    return list(operation._flatten_layers()) if isinstance(operation, Layer) else []


def layers_inside(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer holds itself, not those inside them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def made_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """Weights that a layer itself made to be trained, frozen ones among them."""
    return list(layer._trainable_variables)


def logits_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """What a softmax or sigmoid was taken of: Keras's crossentropies go back to it, past the rounding of probabilities.

    They find it at an attribute, or, in a graph, as the input of the operation.
    """
    if hasattr(tensor, "_keras_logits"):
        return tensor._keras_logits
    op = getattr(tensor, "op", None)
    return op.inputs[0] if op is not None and op.type in ("Softmax", "Sigmoid") else None


def set_logits(tensor: tf.Tensor, logits: tf.Tensor) -> None:
    """Attaches logits as Keras's softmax and sigmoid do."""
    tensor._keras_logits = logits


def losses_of(layer: keras.Layer) -> set[int]:
    """Identities of the losses that `layer.add_loss` gave to a stateless scope."""
    return layer._loss_ids


def hand_back_loss(layer: keras.Layer, loss: tf.Tensor) -> None:
    """What `layer.add_loss(loss)` does in plain Keras (a Functional model refuses the public call)."""
    layer._losses.append(loss)


def is_rematerialised(operation: keras.Operation) -> bool:
    """Whether an operation was made inside `keras.RematScope`."""
    return any(getattr(part, "_remat_mode", None) is not None for part in [operation, *flatten_layers(operation)])


MOMENTS = "_moments"
"""The method of `keras.layers.BatchNormalization` that takes the statistics of its input, given `(inputs, mask)`."""

_KERAS_METHODS = {
    kind: {name: getattr(kind, name) for name in names}
    for kind, names in {keras.layers.Conv2D: ("call", "convolution_op")}.items()
}


def runs_as_in_keras(layer: keras.Layer, kind: type[keras.Layer]) -> bool:
    """Whether no subclass, decorator or instance has changed what a layer of a kind does with its input."""
    return isinstance(layer, kind) and all(
        getattr(type(layer), name) is method and not threads.is_own(layer, name)
        for name, method in _KERAS_METHODS[kind].items()
    )


# --- contexts a stage's body needs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def call_context(model: keras.Model, training: bool | None) -> Iterator[None]:
    """Runs operations as if inside `model.__call__(..., training=training)`, wherever they are traced."""
    before = global_state.get_global_attribute("current_call_ctx")
    context = CallContext(entry_layer=model)
    # Keras before 3.12 stores `training` in a field of this name, later versions through `set_value`.
    context.training = training
    global_state.set_global_attribute("current_call_ctx", context)
    dtype = model.compute_dtype if model.compute_dtype != model.variable_dtype else None
    try:
        with AutocastScope(dtype) if dtype else contextlib.nullcontext():
            yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


def seen_with(layer: keras.Layer, /, **changed: Any) -> Any:
    """A stand-in for a layer: the same class and variables, but other values of some attributes."""
    stand_in = object.__new__(type(layer))
    vars(stand_in).update({**vars(layer), **changed})
    return stand_in


class RecordingScope(keras.StatelessScope):
    """A stateless scope that also remembers which variables were read and which assigned, in order.

    Attributes:
        assigned, read: these variables, by identity.
        loss_owners: the layer that added each loss, by the loss's identity.
    """

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(state_mapping=state_mapping, collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}
        self.read: dict[int, keras.Variable] = {}
        self.loss_owners: dict[int, keras.Layer] = {}

    def add_loss(self, loss: tf.Tensor) -> None:
        """Called by `layer.add_loss` inside the scope.

        The layer notes its losses too, but a call of it in another thread makes it forget them: the frame tells.
        """
        self.loss_owners[id(loss)] = sys._getframe(1).f_locals["self"]
        super().add_loss(loss)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by `variable.assign` inside the scope."""
        variable, value = update
        self.assigned[id(variable)] = variable
        # Who reads a variable gets no gradient from what was assigned to it.
        super().add_update((variable, tf.stop_gradient(value) if tf.is_tensor(value) else value))

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called by `variable.value` inside the scope."""
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


class ElsewhereScope(keras.StatelessScope):
    """A scope for a function of one device, which is given what it reads of Keras's variables of other devices.

    Args:
        device: full name of the device.
        given: such variables, with their values.

    Attributes:
        missing: further ones that were read, by identity.
    """

    def __init__(self, device: str, given: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__()
        self._device = device
        self._given = {id(variable): value for variable, value in given}
        self.missing: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by `variable.assign` inside the scope: it assigns, as without one."""
        variable, value = update
        variable._direct_assign(value)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Called by `variable.value` inside the scope; None for the variable itself."""
        if id(variable) in self._given:
            return self._given[id(variable)]
        if not is_on(raw_variable(variable).device, self._device):
            self.missing[id(variable)] = variable
        return None


# --- models called inside `strategy.run` -----------------------------------------------------------------------------

_routes = threading.local()
_routes_lock = threading.Lock()
_routes_open = 0
_router: _Router | None = None


class _Router:
    """What `keras.Model.__call__` is while a route is open in some thread.

    Once closed, it calls what was there before: someone who wrapped it may go on calling it.

    Attributes:
        before: the `__call__` of `keras.Model` itself, by another library, or None. Keras has none: it inherits the one
            of `keras.Layer`.
        call: ours.
        times_lost: how often it was taken off by someone else, and put there again.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.times_lost = 0
        self._open = True

        def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            plain = self._plain_of(model)
            route = getattr(_routes, "route", None) if self._open else None
            if route is None or in_stateless_scope():
                return plain(*args, **kwargs)
            return route(model, plain, args, kwargs)

        self.call = call
        vars(call)["router"] = self

    def _plain_of(self, model: keras.Model) -> Callable[..., Any]:
        if self.before is None:
            return super(keras.Model, model).__call__  # type: ignore[misc]
        return self.before.__get__(model, type(model)) if hasattr(self.before, "__get__") else self.before

    @classmethod
    def installed(cls, router: _Router | None) -> _Router:
        """The router that is open, or else a new one; put there, again where another library has taken it off."""
        if router is None:
            router = cls(_without_closed(_own_call()))
            keras.Model.__call__ = router.call
        elif router.is_lost:
            router.times_lost += 1
            router.before = _without_closed(_own_call())
            keras.Model.__call__ = router.call
        return router

    @property
    def is_lost(self) -> bool:
        """Whether models are called as before, or by an older router: this one was not wrapped but taken off."""
        now = _without_closed(_own_call())
        return now is None or now is self.before

    def close(self) -> None:
        """Takes it off again, unless another library has put something over it."""
        self._open = False
        if _own_call() is not self.call:
            return
        if self.before is None:
            del keras.Model.__call__
        else:
            keras.Model.__call__ = self.before


def _own_call() -> Any:
    return vars(keras.Model).get("__call__")


def _without_closed(call: Any) -> Any:
    """What a closed router that someone has put back stands for."""
    router = getattr(call, "router", None)
    while isinstance(router, _Router) and call is router.call and not router._open:
        call = router.before
        router = getattr(call, "router", None)
    return call


@contextlib.contextmanager
def route_models(route: Callable[..., Any] | None) -> Iterator[None]:
    """While open, `keras.Model.__call__` in this thread asks `route(model, call, args, kwargs)` first.

    `route` None hides an outer route: inside a stage's body a model is a plain Keras model. What another library has
    made of `keras.Model.__call__` is called as in plain Keras, and stays.

    Raises:
        ModelError: at the end, if someone has set `keras.Model.__call__` back to what it was before, so that models may
            have been called past the route.
    """
    global _routes_open, _router
    outer = getattr(_routes, "route", None)
    _routes.route = route
    with _routes_lock:
        _routes_open += 1
        _router = router = _Router.installed(_router)
        times_lost = router.times_lost
    try:
        yield
        if route is not None and (router.is_lost or router.times_lost != times_lost):
            raise ModelError(
                "Expected `keras.Model.__call__` to be left alone, or wrapped, while `strategy.run` runs. Received: it "
                "was set back to what it was before, so that models may have run without stages. Take a patch of it "
                "off before `run` begins or after it has ended."
            )
    finally:
        _routes.route = outer
        with _routes_lock:
            _routes_open -= 1
            if _routes_open == 0:
                router.close()
                _router = None


def in_stateless_scope() -> bool:
    """Whether Keras runs symbolically, for shapes only."""
    return global_state.get_global_attribute("stateless_scope") is not None


def strategy_of(value: keras.Model | tf.Variable) -> tf.distribute.Strategy | None:
    """The strategy under whose scope a model or variable was created."""
    return getattr(value, "_distribute_strategy", None)


def asks_for_xla(model: keras.Model) -> bool:
    """Whether a model was compiled with `jit_compile=True` (the public property decides where nobody has asked)."""
    return getattr(model, "_jit_compile", None) is True


def compilation_of(model: keras.Layer) -> Any:
    """A value that is another after each `compile`, with which Keras forgets what it has traced; None before any."""
    return getattr(model, "_compile_config", None)


def keep_alive(value: Any) -> None:
    """Lets a value live as long as the graph that is being traced, which calls functions of it."""
    graph = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly():
        graph._gpipe_kept = [*getattr(graph, "_gpipe_kept", ()), value]


def model_being_prepared() -> tuple[keras.Model, Structure] | None:
    """The model (and data batch) whose `fit`, `evaluate` or `train_on_batch` is preparing its variables right now.

    Keras draws a batch of the user's data to learn shapes wherever a model has a strategy, and throws the batch away.
    There is no hook: the frame of `_maybe_symbolic_build` up the stack tells.
    """
    for frame in itertools.islice(_frames_from(sys._getframe(1)), 8):
        if frame.f_code.co_name == "_maybe_symbolic_build" and "self" in frame.f_locals:
            return frame.f_locals["self"], frame.f_locals.get("data_batch")
    return None


def _frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame, and those up the stack from it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


_METHODS = {
    inspect.unwrap(getattr(owner, name)).__code__: name
    for owner, names in {
        TensorFlowTrainer: ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
        tf.distribute.Strategy: ("run",),
    }.items()
    for name in names
}


def entered_by() -> tuple[str, Any] | None:
    """The method of Keras, or `run`, that enters a scope right now, and its model or strategy; None if the user does.

    Only frames of libraries are between it and the function that asks.
    """
    found = None
    for frame in _frames_from(sys._getframe(2)):
        if frame.f_globals.get("__name__", "").split(".")[0] not in LIBRARIES:
            break
        if frame.f_code in _METHODS:
            found = _METHODS[frame.f_code], frame.f_locals.get("self")
    return found


def methods_under_way() -> list[dict[str, Any]]:
    """The arguments and other local names of Keras's `fit` and the like up the stack, the innermost first."""
    frames = _frames_from(sys._getframe(1))
    return [frame.f_locals for frame in frames if _METHODS.get(frame.f_code, "run") != "run"]


def rows_of_first_batch(model: keras.Model) -> int | None:
    """Rows of the first mini-batch that the `fit` up the stack gives a model; None where neither of them tells."""
    for names in methods_under_way()[:1]:
        if names.get("self") is model and "epoch_iterator" in names:
            adapter = names["epoch_iterator"].data_adapter
            adapter = adapter._adapter if isinstance(adapter, _QuietAdapter) else adapter
            if isinstance(adapter, GeneratorDataAdapter):
                shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(adapter._first_batches[0])]
                return next((int(s[0]) for s in shapes if s is not None and len(s) and s[0] is not None), None)
            with tf.init_scope(), contextlib.suppress(NotImplementedError):  # a step may be traced; of a generator's
                if adapter.has_partial_batch and adapter.num_batches == 1:
                    return adapter.partial_batch_size
                return adapter.batch_size or _batch_size_of(names.get("x"))
    return None


_KEEP_BATCHES = {"Cache", "Map", "Options", "ParallelMap", "Prefetch", "Repeat", "Shard", "Shuffle", "Skip", "Take"}


def _batch_size_of(dataset: Any) -> int | None:
    """Rows of a batch of a `tf.data.Dataset`, which its kind does not tell where the last may have fewer."""
    while isinstance(dataset, tf.data.Dataset):
        if hasattr(dataset, "_batch_size"):
            size = tf.get_static_value(dataset._batch_size)
            return None if size is None else int(size)
        kept = type(dataset).__name__.strip("_").removesuffix("Dataset") in _KEEP_BATCHES
        dataset = dataset._inputs()[0] if kept else None
    return None


def watch_resets(renew: Callable[[Callable[[], None]], None]) -> Callable[[], Any]:
    """Has `renew(reset)` called, in this thread, where the default graph is reset, as `clear_session` does.

    Returns a function that ends this.
    """
    stack = ops._default_graph_stack  # its attributes are of this thread alone
    watch = replaced(stack, "reset", functools.partial(renew, stack.reset))
    watch.__enter__()
    return functools.partial(watch.__exit__, None, None, None)


def is_set_for_good(scope: Any) -> bool:
    """Whether `tf.distribute.experimental_set_strategy` opened a scope: a reset makes TensorFlow forget it."""
    return ops.get_default_graph()._global_distribute_strategy_scope is scope


def in_xla_function() -> bool:
    """Whether a function that XLA compiles as a whole is being traced."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def says_that_strategies_mix(error: BaseException | None) -> bool:
    """Whether TensorFlow raised an exception for strategies inside each other, which only its text tells."""
    return isinstance(error, RuntimeError) and str(error).startswith("Mixing different tf.distribute.Strategy objects")


def optimizer_in(error: BaseException) -> keras.Optimizer | None:
    """The optimizer whose method raised an exception, if one did."""
    trace = error.__traceback__
    while trace is not None:
        if isinstance(trace.tb_frame.f_locals.get("self"), keras.Optimizer):
            return trace.tb_frame.f_locals["self"]
        trace = trace.tb_next
    return None


class _QuietAdapter:
    """A data adapter that is not told of the epoch that Keras begins only to look at a batch.

    A `PyDataset` with several workers would fetch its batches there, for which the first epoch would then mistake them;
    and its `on_epoch_begin` would be called once more than in plain Keras.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def on_epoch_begin(self) -> None:
        """Called by Keras wherever it begins to draw."""
        if model_being_prepared() is None:
            self._adapter.on_epoch_begin()


def spare_first_epoch() -> None:
    """Lets the iterator over epochs that Keras is making tell its data of those epochs only in which it trains.

    There is no hook: Keras has the strategy distribute the data while it makes the iterator, and the frame up the stack
    tells which one it is.
    """
    for frame in itertools.islice(_frames_from(sys._getframe(1)), 8):
        made = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(made, EpochIterator):
            made.data_adapter = _QuietAdapter(made.data_adapter)
            return


@contextlib.contextmanager
def follow_inputs(default: str) -> Iterator[None]:
    """Places each operation that names no device beside the largest of its inputs; `default` where none has a device.

    So the loss is taken where the outputs are, and what Keras does to a weight or its gradient (regularisers, clipping,
    averages) stays where the weight is. When executing eagerly everything runs on `default`.
    """
    if tf.executing_eagerly():
        with tf.device(default):
            yield
    else:
        with tf.compat.v1.device(lambda op: _device_of_inputs(op, default)):
            yield


def _device_of_inputs(op: tf.Operation, default: str) -> str:
    if op.device:
        return str(op.device)
    best, largest = default, 1
    for tensor in op.inputs:
        if tensor.dtype == tf.resource:
            return _device_of(tensor)
        size = 1
        for dimension in tensor.shape.as_list() if tensor.shape.rank is not None else [None]:
            size *= 1024 if dimension is None else dimension
        device = _device_of(tensor)
        # Of equal sizes, one on the default device may be a scalar that was spread out there, such as d loss / d loss.
        if device and (size > largest or (size == largest > 1 and best == default)):
            best, largest = device, size
    return best


@contextlib.contextmanager
def placed_regularizers(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """While open, a weight's regulariser and its gradient are taken where the weight is.

    The gradient of a sum starts as a scalar spread to the weight's shape, of which no operation knows the weight.
    """
    with contextlib.ExitStack() as stack:
        for variable in variables:
            regularizer = threads.attribute(variable, "_regularizer")
            if regularizer is not None:
                placed = _placed_regularizer(regularizer, variable._value.device)
                stack.enter_context(replaced(variable, "_regularizer", placed))
        yield


def _placed_regularizer(regularizer: Callable[[Any], tf.Tensor], device: str) -> Callable[[Any], tf.Tensor]:
    def loss_of(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(d_loss: tf.Tensor) -> tf.Tensor:
            with tf.device(device), tf.GradientTape() as tape:
                tape.watch(value)
                loss = regularizer(value)
            with tf.device(device):
                return tape.gradient(loss, value, output_gradients=d_loss)

        return regularizer(value), gradient

    def placed(variable: Any) -> tf.Tensor:
        with tf.device(device):
            return tf.custom_gradient(loss_of)(tf.convert_to_tensor(variable))

    return placed


def _device_of(tensor: tf.Tensor) -> str:
    """Where a tensor is made; "" where that is not known yet."""
    op = tensor.op
    if op.type == "ReadVariableOp":
        return _device_of(op.inputs[0])
    if tensor.dtype == tf.resource and op.type == "Placeholder":
        for outside, inside in getattr(op.graph, "captures", ()):
            if inside is tensor:
                return str(outside.device) if not hasattr(outside, "op") else _device_of(outside)
    return str(op.device)


# --- gradients -------------------------------------------------------------------------------------------------------


def is_recording() -> bool:
    """Whether any `tf.GradientTape` of this thread is recording."""
    return bool(record.could_possibly_record())


def is_watched(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape wants gradients with respect to one of the tensors."""
    return bool(record.should_record_backprop(list(tensors)))


stop_recording = record.stop_recording


@contextlib.contextmanager
def resume_recording() -> Iterator[None]:
    """Lets tapes record again inside `stop_recording`: for tapes of their own, in functions that are traced there."""
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def record_operation(
    name: str,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    gradient: Callable[..., list[Any]],
) -> None:
    """Tells every tape that `outputs` came from `inputs` and `variables`, and how to go back: `gradient(*d_outputs)`.

    Stands for `tf.custom_gradient`, which in graph mode passes the value of every variable through one `IdentityN`:
    each weight of the model would be sent to one device at each step.
    """
    for variable in variables:
        variable_accessed(variable)
    record.record_operation(name, list(outputs), [*inputs, *(v.handle for v in variables)], gradient)


def has_tangents(tensors: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of the tensors or variables."""
    return bool(forwardprop_util.pack_tangents([*tensors, *(v.handle for v in variables)]).tangents)


def _symbolic_gradient(op: tf.Operation, *_: tf.Tensor) -> None:
    raise ModelError(
        f"Expected gradients of a model in a pipeline to be taken by a tape in the function that calls it. Received: a "
        f"gradient of {op.name} taken from outside, as through a `tf.function` or `tf.cond` inside `strategy.run`, or "
        "by `tf.gradients`. Open the `tf.GradientTape` inside that function, or leave the function out: what is inside "
        "`run` is one graph already."
    )


tf.RegisterGradient("GPipeOutput")(_symbolic_gradient)


def identity_for_tapes(value: Any) -> Any:
    """`tf.identity` whose gradient only a tape that knows better can take."""
    if tf.executing_eagerly():
        return tf.identity(value)
    with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": "GPipeOutput"}):
        return tf.identity(value)


def is_zeros(tensor: tf.Tensor) -> bool:
    """Whether a tape made up this gradient for an output that nothing used (only seen in graph mode)."""
    if not hasattr(tensor, "op"):
        return False
    op = tensor.op
    if op.type == "Fill":
        op = op.inputs[1].op
    if op.type == "Const":
        value = tf.get_static_value(op.outputs[0])
        return value is not None and not value.any()
    return op.type == "ZerosLike"


def keep_exception(error: BaseException) -> None:
    """Keeps Keras from replacing an exception, and its notes, by one that lists the arguments of a layer's call."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an exception's text; in Python 3.10, which has no notes, to its message."""
    if note in getattr(error, "__notes__", ()):
        return
    keep_exception(error)
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def one_line(error: BaseException | None) -> str:
    """The kind of an exception, and the first line of its text."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- calling functions on their devices ---


def uses_only(function: Any, device: str) -> bool:
    """Whether all variables that a traced function uses are on a device."""
    return all(is_on(t.device, device) for t in function.captured_inputs if t.dtype == tf.resource)


def is_on(full_name: str, device: str) -> bool:
    """Whether a full name of a device is that of `device`, which may leave parts out."""
    here = tf.DeviceSpec.from_string(full_name)
    return bool(here.make_merged_spec(tf.DeviceSpec.from_string(device)) == here)


def assigned_inputs(function: Any) -> list[tf.Tensor]:
    """What a traced function captures and may assign, such as a table that it fills."""
    reads = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(function.graph))
    captured = list(enumerate(function.inputs))[len(function.inputs) - len(function.captured_inputs) :]
    pairs = zip(captured, function.captured_inputs, strict=True)
    return [outside for (at, inside), outside in pairs if inside.dtype == tf.resource and at not in reads]


def call_with_captured(function: Any, flat: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a traced function with other tensors than those it captured."""
    return list(function._call_flat(list(flat), list(captured)))


def note_reads(op: tf.Operation, indices: Sequence[int]) -> None:
    """Tells `tf.function` which inputs of an operation are variables that it only reads, else it counts as a writer."""
    ops.set_int_list_attr(op, auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, list(indices))


def refusal_of_xla(function: Any, device: str) -> str | None:
    """Why XLA cannot take a traced function, as far as can be told without compiling it; None if it can.

    TensorFlow says so by a ValueError where it cannot even ask XLA (shapes that are not known).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of devices, in favour of names of platforms, which TensorFlow does not tell
            compiler_ir.from_concrete_function(function)(stage="hlo", device_name=device)
    except (ValueError, tf.errors.OpError) as error:
        return one_line(error)
    return None


def in_vectorized_loop() -> bool:
    """Whether the body of a `tf.vectorized_map`, or of a `jacobian`, is being traced: only a name scope tells."""
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return re.search(r"(^|/)loop_body(_\d+)?(/|$)", scope) is not None


def hide_function(call: tf.Operation) -> None:
    """Keeps a pass of TensorFlow from looking into the function of a call, which costs 12 ms for each call.

    `EncapsulateSubgraphsPass` looks for operations that use reference variables (of TensorFlow 1), to note that on
    those that XLA compiles. For each call it makes the called function's graph anew, twice, only to find none. Where an
    operation's attributes name a function that has one, it does not look any further, neither there nor at what comes
    after. The note has no effect: calls are not compiled, only what is inside them.
    """
    function = _with_reference()
    function.add_to_graph(call.graph)
    attribute = attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=function.name))
    call._set_attr("_gpipe_not_searched", attribute)


@functools.cache
def _with_reference() -> Any:
    """A function with a reference variable in it, never called."""

    def unused() -> None:
        tf.raw_ops.VariableV2(shape=[], dtype=tf.float32)

    with tf.init_scope():
        return tf.function(unused, autograph=False).get_concrete_function()


# --- variables -------------------------------------------------------------------------------------------------------


def move_variable(variable: tf.Variable, device: str) -> None:
    """Moves a variable to another device in place.

    The Python object stays, and with it everything that knows it: optimizer slots, checkpoints, exports, the user's
    references. The old copy is left without a value, to free its memory; for those who know its handle, see
    `HandleUsers`.
    """
    if is_on(variable.device, device):
        return
    with tf.init_scope(), tf.device(device):
        # `tf.Variable` would ask the strategy where to put it.
        name = variable.name.partition(":")[0]  # for TensorFlow's errors
        copy = ResourceVariable(variable.read_value(), trainable=variable.trainable, dtype=variable.dtype, name=name)
    with tf.init_scope(), tf.device(variable.device):
        tf.raw_ops.AssignVariableOp(resource=variable._handle, value=tf.zeros([0], variable.dtype))
    variable._handle = copy._handle
    variable._graph_key = copy._graph_key


class HandleUsers:
    """What got hold of the handles of variables, as far as it lives: traced functions, pipelines of `tf.data`, tapes.

    The garbage collector knows all functions. No list of TensorFlow's has them, and only functions that began before a
    variable was moved matter, so that nothing has to be noted while they are traced.

    Args:
        handles: the handles.
    """

    def __init__(self, handles: Sequence[tf.Tensor]) -> None:
        wanted = {id(handle): handle for handle in handles}
        self._functions: list[Function] = []
        self._concrete: list[ConcreteFunction] = []
        self._kept: set[int] = set()
        for found in _objects_of(Function, ConcreteFunction, StructuredFunctionWrapper, tf.GradientTape):
            if isinstance(found, Function):
                self._functions.append(found)
            elif isinstance(found, ConcreteFunction):
                if wanted.keys() & _captured_by(found):
                    self._concrete.append(found)
            elif isinstance(found, tf.GradientTape):
                # One that is closed may still be asked for gradients of what it watched.
                watched = found.watched_variables() if found._tape is not None else ()
                self._kept |= wanted.keys() & {id(v.handle) for v in watched}
            else:
                self._kept |= wanted.keys() & _captured_by(vars(found).get("_function"))
        graph = tf.compat.v1.get_default_graph()
        while graph is not None:  # what is being traced, from the inside out
            self._kept |= wanted.keys() & set(map(id, getattr(graph, "external_captures", ())))
            graph = getattr(graph, "outer_graph", None)
        self._kept |= {key for key, handle in wanted.items() if is_watched([handle])}

    def must_stay(self, handle: tf.Tensor) -> bool:
        """Whether something goes on with a handle that cannot learn of another: a trace, a tape, a `tf.data` pipeline.

        Of two traces under way in different threads, only the caller's is known.
        """
        return id(handle) in self._kept

    def trace_again(self, retired: Sequence[tuple[tf.Tensor, str]]) -> None:
        """Has functions traced again that know retired handles, when they are next called.

        Args:
            retired: handles, each with the path of its variable.
        """
        paths = {id(handle): path for handle, path in retired}
        stale = {id(function) for function in self._concrete if paths.keys() & _captured_by(function)}
        for function in self._functions if stale else []:
            if any(id(traced) in stale for traced in function._function_cache.values()):
                function._function_cache.clear()  # without its lock: a thread that holds it may wait for this one
        for traced in self._concrete:
            captured = vars(traced)["_captured_inputs"]
            name = traced.name.decode() if isinstance(traced.name, bytes) else traced.name
            known = [_refuse_stale(name, paths[id(t)]) if id(t) in paths else t for t in captured]
            traced._captured_inputs = known


def _objects_of(*kinds: type) -> list[Any]:
    """All objects of some classes that the garbage collector knows; it tells of frozen ones only once they are not.

    There may be millions of others, so that no line of Python runs for each: asking an object for its class by
    `isinstance` could run a lazy module's code, too.
    """
    classes: dict[int, type] = {}  # by identity: a class may have an equality of its own
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        classes[id(kind)] = kind
        waiting += type.__subclasses__(kind)
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        every = gc.get_objects()
    finally:
        if frozen:
            gc.freeze()
    return list(itertools.compress(every, map(classes.__contains__, map(id, map(type, every)))))


def _captured_by(function: Any) -> set[int]:
    """Identities of the tensors that a concrete function captured."""
    return {id(tensor) for tensor in getattr(function, "_captured_inputs", ())}


def _refuse_stale(name: str, path: str) -> Callable[[], tf.Tensor]:
    """What stands for a captured handle in a concrete function, which asks for it when it is called."""

    def refuse() -> tf.Tensor:
        raise ModelError(
            f"Expected a function that was traced after its variables were placed. Received: the concrete function "
            f"'{name}', which knows '{path}' where it was before. Call `strategy.place(model)` first, and then "
            "`get_concrete_function`; a `tf.function` itself is traced again without that."
        )

    return refuse


def watch_assignments(variables: Sequence[tf.Variable]) -> Callable[[], list[tf.Variable]]:
    """Begins to watch variables; the function it returns tells which of them were assigned since, in this graph."""
    variables = list(variables)
    if tf.executing_eagerly():
        values = [v.read_value() for v in variables]

        def changed_value() -> list[tf.Variable]:
            if not tf.executing_eagerly():
                return []  # a Jacobian traces the gradient of an eager call, many times over
            pairs = zip(variables, values, strict=True)
            return [v for v, old in pairs if not np.array_equal(v.numpy(), old.numpy(), equal_nan=v.dtype.is_floating)]

        return changed_value
    graph = tf.compat.v1.get_default_graph()
    handles = {id(graph.capture(v.handle)): v for v in variables}
    done = len(graph.get_operations())

    def assigned() -> list[tf.Variable]:
        found = {}
        for op in graph.get_operations()[done:] if tf.compat.v1.get_default_graph() is graph else []:
            if any(id(tensor) in handles for tensor in op.inputs):
                _, written = auto_control_deps_utils.get_read_write_resource_inputs(op)
                found.update({id(tensor): handles[id(tensor)] for tensor in op.inputs if tensor in written})
        return list(found.values())

    return assigned


def only_updates(fn: Any) -> bool:
    """Whether a function that is handed to `merge_call` does nothing but update variables, by code of Keras alone.

    Keras has three such functions for TensorFlow: they update weights, decay them, or add to gradients that are
    accumulated over steps.
    """
    if getattr(fn, "__module__", None) != TFOptimizer.__module__:
        return False
    if isinstance(fn, types.MethodType):  # the update itself, which is given the learning rate
        return _is_kerass(fn.__self__)
    inside = [cell.cell_contents for cell in fn.__closure__ or ()]
    optimizers = [part for part in inside if isinstance(part, keras.Optimizer)]
    return all(_is_kerass(part) and _is_kerass(part._learning_rate) for part in optimizers)


def _is_kerass(value: Any) -> bool:
    return isinstance(value, float) or type(value).__module__.split(".")[0] == "keras"


def foreign_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> keras.Optimizer | None:
    """An optimizer, of this and those inside it, that was not made under a strategy's scope; None if all were."""
    if getattr(optimizer, "_distribution_strategy", strategy) is not strategy:
        return optimizer
    return next(filter(None, (foreign_optimizer(part, strategy) for part in _inner_optimizers(optimizer))), None)


def adopt_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Makes an optimizer, and those inside it, a strategy's where it was made elsewhere and has no slots yet.

    What it has already, counter and learning rate, moves to where variables of the strategy's scope are made.
    """
    for part in _inner_optimizers(optimizer):
        adopt_optimizer(part, strategy)
    other = getattr(optimizer, "_distribution_strategy", strategy)
    if other is not strategy and not optimizer.built:
        made = [raw_variable(v) for v in optimizer.variables]
        if all(strategy_of(v) is None or isinstance(strategy_of(v), type(strategy)) for v in made):
            for variable in made:
                move_variable(variable, "/CPU:0")
            optimizer._distribution_strategy = strategy


def _inner_optimizers(optimizer: Any) -> Sequence[keras.Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [inner] if inner is not None else getattr(optimizer, "optimizers", ())


def slots_of(optimizer: keras.Optimizer) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Pairs (weight, slot) of all slots that an optimizer has made beside its weights."""
    for part in _inner_optimizers(optimizer):
        yield from slots_of(part)
    weights = getattr(optimizer, "_trainable_variables", None)
    if not weights:
        return
    for value in list(vars(optimizer).values()):
        others = value is weights or value is optimizer._variables
        if isinstance(value, list) and len(value) == len(weights) and not others:
            for weight, slot in zip(weights, value, strict=True):
                if isinstance(slot, keras.Variable):
                    yield weight, slot


def raw_variable(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable itself, whatever cast or stateless scope is open."""
    return variable._value


def free_variable(value: np.ndarray[Any, Any]) -> tf.Variable:
    """A variable that no strategy places, and that may be made while a `tf.function` is traced, however often."""
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)


def timestamp() -> tf.Tensor:
    """`tf.timestamp` that waits for its control inputs only, and not for other operations that have effects."""
    time = tf.timestamp()
    wait_for_inputs_only(time.op)
    return time


def wait_for_inputs_only(op: tf.Operation) -> None:
    """Exempts an operation with effects from the order of such operations."""
    manager = getattr(op.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


def all_operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Operations of a graph and of the functions it calls."""
    yield from graph.get_operations()
    for name in graph._functions:
        inner = getattr(graph._functions[name], "graph", None)
        if inner is not None and inner is not graph:
            yield from all_operations(inner)


def function_graph(graph: tf.Graph, name: str) -> Any:
    """The graph of a function that an operation of a graph calls; None where there is none, as after loading."""
    return getattr(graph._functions.get(name), "graph", None)


def has_control_flow(graph: tf.Graph) -> bool:
    """Whether a graph, or a function that it calls, has a loop or a branch."""
    types = {"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"}
    return any(op.type in types for op in all_operations(graph))


@contextlib.contextmanager
def updating(device: str) -> Iterator[None]:
    """What a strategy opens around a function that updates a variable on a device."""
    with tf.device(device), UpdateContext(device):
        yield
