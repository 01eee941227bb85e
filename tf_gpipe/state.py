"""What a stage takes and gives beside tensors: seeds and other variables that its layers assign.

A stage is pure. Its layers run in a `keras.StatelessScope`: a variable they assign is an input of the stage's function
and its new value an output, assigned once, after the last micro-batch. How far it is handed on depends on what moves it
(`dependence.py`):

- a counter, a decay, an annealing coefficient, which no data move: from stage to stage of one micro-batch. Each
  micro-batch begins with the value from before the step, so that it moves once a mini-batch, as in plain Keras.
- a running centre, a metric, a count of rows, which the data move: from micro-batch to micro-batch. It moves once a
  micro-batch; a warning says so, once for each layer.
- seeds: from micro-batch to micro-batch, since random layers draw for each.

The recomputation of a micro-batch gets the same state as its forward pass, so that dropout draws the same mask. Seeds
belong to layers, so that results do not depend on the number of stages, and one micro-batch draws plain Keras's masks.

Batch normalisation is the exception (`moments.py`). Spectral normalisation is another: a layer that assigns its kernel
does so before the first micro-batch, so that all of them see the same.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tf_gpipe import compat
from tf_gpipe.errors import ModelError
from tf_gpipe.messages import listed, warn
from tf_gpipe.micro_batch import Rows


class StateValues:
    """The newest value of each variable while a mini-batch goes through the stages.

    Args:
        once: identities of variables that move once for the mini-batch. Each micro-batch moves them from where they
            were; the first one's value is kept. All others are handed from micro-batch to micro-batch.
    """

    def __init__(self, once: Collection[int]) -> None:
        self._once = frozenset(once)
        self._before: dict[int, tf.Tensor] = {}
        self._newest: dict[tuple[int, int], tf.Tensor] = {}
        self._written: dict[int, keras.Variable] = {}

    def _key(self, variable: keras.Variable, m: int) -> tuple[int, int]:
        """Under which the newest value is kept: one for each micro-batch, or one for all, that of the first."""
        return id(variable), m if id(variable) in self._once else 0

    def read(self, variables: Sequence[keras.Variable], m: int) -> list[tf.Tensor]:
        """Values of variables for micro-batch `m`; those that nothing was written for are read now."""
        for v in variables:
            if id(v) not in self._before:
                self._before[id(v)] = compat.raw_variable(v).read_value()
        return [self._newest.get(self._key(v, m), self._before[id(v)]) for v in variables]

    def write(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], rows: Rows, m: int) -> None:
        """Keeps what micro-batch `m` gave; if it turns out to have no rows, the data have moved nothing."""
        for v, before, value in zip(variables, self.read(variables, m), values, strict=True):
            if not rows.is_static and id(v) not in self._once:
                value = tf.where(tf.equal(rows.sizes[m], 0), before, value)
            self._newest[self._key(v, m)] = value
            self._written[id(v)] = v

    def assign(self) -> None:
        """Assigns what was written."""
        for variable in self._written.values():
            raw = compat.raw_variable(variable)
            with tf.device(raw.device):
                raw.assign(self._newest[self._key(variable, 0)])


def warn_of_state_moved_by_data(
    owner: keras.Layer, variables: Sequence[keras.Variable], num_micro_batches: int, reasons: Sequence[str]
) -> None:
    """Warns of a layer whose state moves otherwise than in plain Keras.

    Args:
        owner: the layer.
        variables: its state.
        num_micro_batches: M.
        reasons: why it could not be told whether state depends on the data, where that is so.
    """
    names, known = listed(v.path for v in variables), "follows from the data"
    if reasons:
        known += f", or cannot be told not to ({'; '.join(reasons)})"
    warn(
        f"Layer '{owner.name}' moves {names} in its `call`, to a value that {known}. So it moves once for each of the "
        f"{num_micro_batches} micro-batches, in order. Sums and counts over rows come out as in plain Keras; running "
        "averages, and whatever counts calls, see micro-batches. Set num_micro_batches=1 for plain Keras's values, or "
        "move the update into `train_step` or a callback."
    )


@contextlib.contextmanager
def kernels_left_alone(layers: Sequence[keras.Layer]) -> Iterator[list[keras.layers.SpectralNormalization]]:
    """Keeps layers from normalising their kernels while a stage is traced; collects those that a training call would.

    Raises:
        ValueError: a layer is called twice, and plain Keras would give each call a kernel of its own.
    """
    found: list[keras.layers.SpectralNormalization] = []

    def call_of(layer: keras.layers.SpectralNormalization) -> Any:
        def call(inputs: tf.Tensor, training: bool | None = False) -> tf.Tensor:
            if training:
                refuse_repeated_normalisation(layer, found)
                found.append(layer)
            return type(layer).call(layer, inputs, training=False)

        return call

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, keras.layers.SpectralNormalization):
                stack.enter_context(compat.replaced(layer, "call", call_of(layer)))
        yield found


def refuse_repeated_normalisation(
    layer: keras.layers.SpectralNormalization, before: Sequence[keras.layers.SpectralNormalization]
) -> None:
    """Raises where a kernel would be normalised twice in one step."""
    if any(layer is other for other in before):
        raise ModelError(
            f"Expected a SpectralNormalization to be called once in a step, since its kernel is normalised once for "
            f"all micro-batches. Received: '{layer.name}', which is called again. Use a second layer, or train without "
            "it."
        )


def normalise_kernel(layer: keras.layers.SpectralNormalization) -> None:
    """Does to a layer's kernel what its training call does, once for a mini-batch."""
    with compat.call_context(layer, training=True):
        type(layer).call(compat.seen_with(layer, layer=tf.identity), tf.zeros([]), training=True)


def refuse_functions_with_state(layers: Sequence[keras.Layer], stage: int) -> None:
    """Raises where a layer's own `tf.function` would hide that its state changes.

    TensorFlow traces it once, and no code of the layer runs in later traces of its stage, which would learn nothing of
    averages, seeds and counters.
    """
    for layer in layers:
        if isinstance(layer.call, tf.types.experimental.PolymorphicFunction) and layer.non_trainable_variables:
            names = ", ".join(f"'{v.path}'" for v in layer.non_trainable_variables[:3])
            raise ModelError(
                f"Expected layers that have state, such as batch norm or dropout, to have a `call` in plain Python. "
                f"Received: '{layer.name}' in stage {stage}, whose `call` is a `tf.function`, with {names}. Take "
                "`tf.function` off: Keras makes one of the whole training step."
            )


class Choices:
    """What layers draw with Python's `random` and with numpy while they are traced, the same in every trace of a kind.

    Plain Keras bakes such choices into its one trace of a step; a stage is traced once for its forward function and
    again for each backward function.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def of(self, kind: Hashable) -> Iterator[None]:
        """Traces in here draw on from where the program is the first time, and what they drew then every other time.

        All threads share the generators, which are only set back where something was drawn.
        """
        now = random.getstate(), np.random.get_state()
        if kind in self._before:
            _set_generators(self._before[kind])
        try:
            yield
        finally:
            if kind in self._before:
                _set_generators(now)
            elif _have_moved(now):
                self._before[kind] = now


def _have_moved(before: tuple[Any, Any]) -> bool:
    """Whether somebody has drawn since the generators were in these states."""
    pairs = zip(tree.flatten(before[1]), tree.flatten(np.random.get_state()), strict=True)
    return random.getstate() != before[0] or not all(np.array_equal(old, new) for old, new in pairs)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


# Of `tf.random`, of `tf.random.Generator`, and of losses and image operations that draw.
_STATEFUL_RANDOM = re.compile(
    "Multinomial|NonDeterministicInts|Parameterized.*Normal|Random(Crop|Gamma|Poisson|Shuffle|StandardNormal|Uniform).*"
    "|Rng.*Skip|SampleDistorted.*|Stateful.*(Binomial|Normal|Uniform).*|TruncatedNormal|.*CandidateSampler"
)
_ASSIGNMENT = re.compile("Assign.*VariableOp|ResourceScatter.*|ResourceStridedSliceAssign")


def needs_its_own_run(graph: tf.Graph) -> bool:
    """Whether a gradient must be taken where the forward pass has just run, of the same micro-batch.

    `tf.py_function` leaves a tape for its gradient, under one name for all calls, and the gradient takes it away.
    """
    return any(op.type == "EagerPyFunc" for op in compat.all_operations(graph))


def refuse_impure(graph: tf.Graph, stage: int, operations: Sequence[str]) -> None:
    """Raises where a stage would not do the same when it is run again for the backward pass.

    Args:
        graph: the graph of the stage's forward function.
        stage: the stage's index, for the message.
        operations: the names of the stage's operations, for the message.

    Raises:
        ValueError: an operation draws random numbers or assigns a variable behind Keras's back.
    """
    names = ", ".join(f"'{name}'" for name in operations)
    for op in compat.all_operations(graph):
        if _STATEFUL_RANDOM.fullmatch(op.type):
            raise ModelError(
                f"Expected random operations that can be repeated when activations are recomputed. Received: "
                f"'{op.type}' of TensorFlow ({op.name}) in stage {stage} ({names}). Draw with `keras.random` and "
                "a `keras.random.SeedGenerator` that the layer keeps as an attribute."
            )
        if _ASSIGNMENT.fullmatch(op.type):
            raise ModelError(
                f"Expected layers whose state is in `keras.Variable`s, which can be handed from micro-batch to "
                f"micro-batch. Received: an assignment to a `tf.Variable` ({op.name}) in stage {stage} ({names}). "
                "Make the variable with `self.add_weight(trainable=False)` or `keras.Variable`."
            )
