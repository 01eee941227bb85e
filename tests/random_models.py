"""Random models as plain descriptions: how they are drawn, and how a model is made of one.

A `Recipe` says all that a training depends on. It is made of strings, numbers and tuples, and prints as the expression
that makes it again: `check(Recipe(...))` repeats a training that failed.

    inputs ─▶ values 0 … n−1 ─▶ node 0 gives value n, node 1 value n + 1, … ─▶ some values are the outputs

Shapes are worked out here, beside Keras, so that only models that Keras accepts are drawn; a shape is that of one row,
and begins with "tokens" for integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from keras import layers, ops

Shape = tuple[Any, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]

VOCABULARY = 7
INPUTS: dict[str, Shape] = {
    "vector": (4,),
    "sequence": (5, 3),
    "image": (4, 4, 2),
    "tokens": ("tokens", 5),
}
FLOATS = (1, 2, 3)  # ranks of a row: a vector, a sequence, an image
MAX_OUTPUTS = 3


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation, nested model or expression.

    Attributes:
        kind: which; a key of `KINDS`, or "nested", "again" (a layer called once more) or "tied" (a transposed weight).
        takes: the numbers of the values it is given.
        settings: arguments of the layer; "of" is the number of the node whose layer or weight is used.
        inside: the nodes of a nested model, whose value 0 is its input and whose last value is its output.
    """

    kind: str
    takes: tuple[int, ...]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    inside: tuple[Node, ...] = ()

    def __repr__(self) -> str:
        more = [self.settings, self.inside] if self.inside else [self.settings] if self.settings else []
        return f"Node({', '.join(map(repr, [self.kind, self.takes, *more]))})"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, how it is trained, and the pipeline.

    Attributes:
        inputs: kinds of inputs; keys of `INPUTS`.
        nodes: the operations.
        outputs: numbers of the values that are the model's outputs.
        structure: how inputs and outputs are passed: "list" or "dict".
        wrapped: whether the model is called by the `call` of another one.
        losses: (loss, weight) of each output; the loss is a key of `LOSSES` or `LOSSES_OF_HEADS`.
        reduction: of all losses.
        optimizer: the name and the arguments of the optimizer.
        rows, batch_size, epochs, weighted, validated: of `fit`; `weighted` says whether rows (and places in them) have
            weights.
        predicted: whether predictions are compared too.
        num_stages, num_micro_batches, remat: of the strategy.
        sizes: relative sizes of the stages, for a partition by counts; empty for one by work.
        seed: of weights and data.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    structure: str = "list"
    wrapped: bool = False
    losses: tuple[tuple[str, float], ...] = (("mse", 1.0),)
    reduction: str = "sum_over_batch_size"
    optimizer: tuple[str, dict[str, Any]] = ("SGD", {"learning_rate": 0.01})
    rows: int = 8
    batch_size: int = 8
    epochs: int = 1
    weighted: bool = False
    validated: bool = False
    predicted: bool = True
    num_stages: int = 2
    num_micro_batches: int = 2
    remat: str = "except_last"
    sizes: tuple[int, ...] = ()
    seed: int = 0

    @property
    def all_nodes(self) -> list[Node]:
        """The nodes, those of nested models included."""
        return flat_nodes(self.nodes)

    @property
    def depends_on_micro_batches(self) -> bool:
        """Whether results depend on M, as documented: batch normalisation and random layers."""
        return depends_on_micro_batches(self.nodes)


def depends_on_micro_batches(nodes: Sequence[Node]) -> bool:
    kinds = {node.kind for node in flat_nodes(nodes)}
    return any(KINDS[kind].depends_on_micro_batches for kind in kinds & KINDS.keys())


def flat_nodes(nodes: Sequence[Node]) -> list[Node]:
    return [node for outer in nodes for node in ([*flat_nodes(outer.inside)] if outer.inside else [outer])]


# --- layers of tests' own ---


class Penalty(layers.Layer):
    """Adds the mean square of its input to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * ops.mean(ops.square(x)))
        return x


class Transposed(layers.Layer):
    """Multiplies by the transposed kernel or table of another layer."""

    def __init__(self, source: keras.Layer) -> None:
        super().__init__()
        self.source = source

    @property
    def weight(self) -> keras.Variable:
        return self.source.embeddings if isinstance(self.source, layers.Embedding) else self.source.kernel

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.weight))

    def compute_output_shape(self, shape: Shape) -> Shape:
        return (*shape[:-1], self.weight.shape[0])


class Wrapper(keras.Model):
    """A model whose `call` is its own and uses another model."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.inner(inputs, training=training)


def kinked(x: Any) -> Any:
    return ops.where(x > 0.0, x, 0.3 * x)


EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "wave": lambda x: ops.sin(x) + 0.1 * x,
    "squash": lambda x: x / ops.sqrt(1.0 + x * x),
    "reverse": lambda x: x[..., ::-1],
    "roll": lambda x: ops.roll(x, 1, axis=-1),
    "kinked": kinked,
    "centred": lambda x: x - 0.5 * ops.mean(x, axis=-1, keepdims=True),
    "cumulative": lambda x: 0.5 * ops.cumsum(x, axis=-1),
    "affine": lambda x: (2.0 - x) / 3.0,
    "halves": lambda x: ops.concatenate([x[..., 1:], ops.tanh(x[..., :1])], axis=-1),
}


# --- kinds of nodes ---


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a node is drawn and made.

    Attributes:
        ranks: ranks of the rows it takes; 0 for tokens.
        make: settings in, a function of the values out.
        shape: the shape of its result, from its settings and the shapes it takes.
        choices: what each setting may be.
        takes: how many values.
        depends_on_micro_batches: whether its results depend on M, as documented.
        flat: whether the loss may not depend on a direction of the weights before it (a shift that is normalised away),
            so that their true gradient is exactly zero, and the computed one is rounding.
    """

    ranks: tuple[int, ...]
    make: Callable[..., Callable[..., Any]]
    shape: Callable[..., Shape] = lambda settings, shape, *_: shape
    choices: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    takes: int = 1
    depends_on_micro_batches: bool = False
    flat: bool = False


ACTIVATIONS = ["tanh", None, "sigmoid", "relu", "gelu", "softplus", "elu"]
REGULARISER = [None, None, None, "l2", "l1", "l1l2"]
TRAINED = [True, True, True, False]
WEIGHTS = {
    "activation": ACTIVATIONS,
    "use_bias": [True, True, False],
    "kernel_regularizer": REGULARISER,
    "bias_regularizer": [None, None, "l2"],
    "activity_regularizer": [None, None, None, "l2"],
    "kernel_constraint": [None, None, None, "max_norm"],
    "trainable": TRAINED,
}
CONV = {**WEIGHTS, "filters": [3, 2, 4], "kernel_size": [2, 1, 3], "strides": [1, 1, 2], "padding": ["same"]}
RECURRENT = {
    "units": [3, 2, 4],
    "return_sequences": [True, False],
    "go_backwards": [False, False, True],
    "recurrent_regularizer": [None, None, "l2"],
    "trainable": TRAINED,
}


def half(size: int, strides: int = 2) -> int:
    return -(-size // strides)


def last(units: str) -> Callable[..., Shape]:
    return lambda settings, shape, *_: (*shape[:-1], settings[units])


def conv(settings: dict[str, Any], shape: Shape) -> Shape:
    return (*(half(n, settings["strides"]) for n in shape[:-1]), settings["filters"])


def pooled(settings: dict[str, Any], shape: Shape) -> Shape:
    return (*(half(n) for n in shape[:-1]), shape[-1])


def recurrent(settings: dict[str, Any], shape: Shape) -> Shape:
    return (shape[0], settings["units"]) if settings["return_sequences"] else (settings["units"],)


def bidirectional(merge_mode: str, return_sequences: bool, units: int, **settings: Any) -> Callable[..., Any]:
    return layers.Bidirectional(layers.GRU(units, return_sequences=return_sequences, **settings), merge_mode=merge_mode)


def bidirectional_shape(settings: dict[str, Any], shape: Shape) -> Shape:
    *time, units = recurrent(settings, shape)
    return (*time, 2 * units if settings["merge_mode"] == "concat" else units)


def separable(activation: Any, padding: str) -> Callable[..., Any]:
    return layers.SeparableConv2D(3, 2, padding=padding, activation=activation)


def merge(layer: type[keras.Layer]) -> Kind:
    return Kind(FLOATS, lambda: lambda a, b: layer()([a, b]), takes=2)


def attention(**settings: Any) -> Callable[..., Any]:
    made = layers.MultiHeadAttention(key_dim=2, **settings)
    return lambda query, value: made(query, value)


PADDING = {"padding": ["same"]}
KINDS: dict[str, Kind] = {
    "dense": Kind(FLOATS, layers.Dense, last("units"), {"units": [3, 2, 4, 5], **WEIGHTS}),
    "activation": Kind(FLOATS, layers.Activation, choices={"activation": ["gelu", "tanh", "selu", "silu", "softsign"]}),
    "prelu": Kind(FLOATS, layers.PReLU, choices={"alpha_initializer": ["ones", "zeros"]}),
    "softmax": Kind(FLOATS, lambda: ops.softmax, flat=True),
    "expression": Kind(FLOATS, lambda name: EXPRESSIONS[name], choices={"name": list(EXPRESSIONS)}),
    "layer_norm": Kind(FLOATS, layers.LayerNormalization, choices={"epsilon": [1e-3, 1e-2]}, flat=True),
    "rms_norm": Kind(FLOATS, layers.RMSNormalization, choices={"epsilon": [1e-3, 1e-2]}, flat=True),
    "group_norm": Kind((2, 3), layers.GroupNormalization, choices={"groups": [1, -1], "epsilon": [1e-2]}, flat=True),
    "batch_norm": Kind(
        FLOATS,
        layers.BatchNormalization,
        choices={"momentum": [0.9, 0.5], "epsilon": [1e-2], "center": [True, False], "trainable": TRAINED},
        depends_on_micro_batches=True,
        flat=True,
    ),
    "dropout": Kind(FLOATS, layers.Dropout, choices={"rate": [0.3, 0.6]}, depends_on_micro_batches=True),
    "gaussian_noise": Kind(FLOATS, layers.GaussianNoise, choices={"stddev": [0.2]}, depends_on_micro_batches=True),
    "activity": Kind(FLOATS, layers.ActivityRegularization, choices={"l2": [0.05], "l1": [0.0, 0.01]}),
    "penalty": Kind(FLOATS, Penalty),
    # sequences
    "masking": Kind((2,), layers.Masking),
    "conv_1d": Kind((2,), layers.Conv1D, conv, {**CONV, "padding": ["same", "causal"]}),
    "max_pool_1d": Kind((2,), lambda **s: layers.MaxPooling1D(2, **s), pooled, PADDING),
    "average_pool_1d": Kind((2,), lambda **s: layers.AveragePooling1D(2, **s), pooled, PADDING),
    "lstm": Kind((2,), layers.LSTM, recurrent, RECURRENT),
    "gru": Kind((2,), layers.GRU, recurrent, {**RECURRENT, "reset_after": [True, False]}),
    "simple_rnn": Kind((2,), layers.SimpleRNN, recurrent, {**RECURRENT, "unroll": [False, True]}),
    "bidirectional": Kind(
        (2,),
        bidirectional,
        bidirectional_shape,
        {"units": [2, 3], "return_sequences": [True, False], "merge_mode": ["concat", "sum", "mul"]},
    ),
    "time_distributed": Kind(
        (2,), lambda units: layers.TimeDistributed(layers.Dense(units, "tanh")), last("units"), {"units": [3, 2]}
    ),
    "attention": Kind(
        (2,),
        attention,
        choices={"num_heads": [2, 1], "use_bias": [True, False], "trainable": TRAINED},
        takes=2,
        flat=True,
    ),
    "permute": Kind((2,), lambda: layers.Permute((2, 1)), lambda settings, shape: shape[::-1]),
    # images
    "conv_2d": Kind((3,), layers.Conv2D, conv, CONV),
    "depthwise": Kind(
        (3,), lambda **s: layers.DepthwiseConv2D(2, **s), choices={"activation": ACTIVATIONS, "padding": ["same"]}
    ),
    "separable": Kind(
        (3,), separable, lambda settings, shape: (*shape[:-1], 3), {"activation": ACTIVATIONS, "padding": ["same"]}
    ),
    "max_pool_2d": Kind((3,), lambda **s: layers.MaxPooling2D(2, **s), pooled, PADDING),
    "average_pool_2d": Kind((3,), lambda **s: layers.AveragePooling2D(2, **s), pooled, PADDING),
    "up": Kind((3,), layers.UpSampling2D, lambda settings, shape: (2 * shape[0], 2 * shape[1], shape[2])),
    # from rank to rank
    "flatten": Kind((2, 3), layers.Flatten, lambda settings, shape: (int(np.prod(shape)),)),
    "average_1d": Kind((2,), layers.GlobalAveragePooling1D, lambda settings, shape: shape[-1:]),
    "max_1d": Kind((2,), layers.GlobalMaxPooling1D, lambda settings, shape: shape[-1:]),
    "average_2d": Kind((3,), layers.GlobalAveragePooling2D, lambda settings, shape: shape[-1:]),
    "max_2d": Kind((3,), layers.GlobalMaxPooling2D, lambda settings, shape: shape[-1:]),
    "repeat": Kind((1,), layers.RepeatVector, lambda settings, shape: (settings["n"], *shape), {"n": [5, 2]}),
    "embedding": Kind(
        (0,),
        lambda **s: layers.Embedding(VOCABULARY, **s),
        lambda settings, shape: (shape[1], settings["output_dim"]),
        {
            "output_dim": [3, 4],
            "mask_zero": [True, False],
            "embeddings_regularizer": [None, None, "l2"],
            "trainable": TRAINED,
        },
    ),
    # merges
    "add": merge(layers.Add),
    "multiply": merge(layers.Multiply),
    "average": merge(layers.Average),
    "maximum": merge(layers.Maximum),
    "subtract": merge(layers.Subtract),
    "sum": Kind(FLOATS, lambda: lambda a, b: a + 0.5 * b, takes=2),
    "concatenate": Kind(
        FLOATS,
        lambda: lambda a, b: layers.Concatenate()([a, b]),
        lambda settings, a, b: (*a[:-1], a[-1] + b[-1]),
        takes=2,
    ),
}
NO_LAYER = {"softmax", "expression", "sum", "add", "multiply", "average", "maximum", "subtract", "concatenate"}
"""Kinds that `again` cannot call once more, having nothing to share."""

OFTEN = {"batch_norm", "conv_1d", "conv_2d", "depthwise", "gru", "lstm", "separable"}
"""Kinds that are offered three times as often as others, as merges are."""

LARGEST = {"up": 60, "repeat": 8}
"""How many numbers a row may have, for kinds that make it larger."""


# --- drawing ---


def rank(shape: Shape) -> int:
    return 0 if shape[0] == "tokens" else len(shape)


def size(shape: Shape) -> int:
    return int(np.prod(shape)) if rank(shape) else 0


def shape_after(node: Node, shapes: Sequence[Shape], nodes: Sequence[Node]) -> Shape:
    """The shape of a node's value, from those of the values before it and the nodes before it."""
    taken = [shapes[i] for i in node.takes]
    if node.kind == "nested":
        inside = taken
        for k, inner in enumerate(node.inside):
            inside = [*inside, shape_after(inner, inside, node.inside[:k])]
        return inside[-1]
    if node.kind in ("again", "tied"):
        of = nodes[node.settings["of"]]
        if node.kind == "again":
            return shape_after(dataclasses.replace(of, takes=node.takes), shapes, nodes)
        width = VOCABULARY if of.kind == "embedding" else shapes[of.takes[0]][-1]
        return (*taken[0][:-1], width)
    return KINDS[node.kind].shape(node.settings, *taken)


def draw_node(draw: Draw, shapes: Sequence[Shape], nodes: Sequence[Node], unused: set[int], depth: int) -> Node:
    """A node that takes some of the values there are."""
    newest = len(shapes) - 1
    if depth:
        first = newest
    else:
        waiting = [i for i in sorted(unused, reverse=True) if i != newest]
        first = draw(st.sampled_from([newest, newest, *waiting]))
    shape = shapes[first]

    def partners(kind: str) -> list[int]:
        if kind == "concatenate":
            fit = [i for i, other in enumerate(shapes) if rank(other) == rank(shape) and other[:-1] == shape[:-1]]
        elif kind == "attention":
            fit = [i for i, other in enumerate(shapes) if rank(other) == 2]
        else:
            fit = [i for i, other in enumerate(shapes) if other == shape]
        return [i for i in fit if i != first] or ([first] if kind == "attention" else [])

    offered: list[tuple[str, Any]] = []
    for name, kind in KINDS.items():
        if rank(shape) not in kind.ranks or size(shape) > LARGEST.get(name, 1000):
            continue
        others = partners(name) if kind.takes == 2 else [None]
        offered += [(name, others)] * (3 if kind.takes == 2 or name in OFTEN else 1) if others else []
    if depth < 2:
        offered += [("nested", None)] * 2
    counted = len(shapes) - len(nodes)
    for j, node in enumerate(nodes):
        out = shapes[counted + j]
        same = all(shapes[i] == shape for i in node.takes)
        if same and node.kind not in NO_LAYER | {"again", "tied"}:
            offered += [("again", j)] * 3
        if node.kind in ("dense", "embedding") and rank(shape) and shape[-1] == out[-1]:
            offered += [("tied", j)] * 3
    name, more = draw(st.sampled_from(offered))
    if name == "nested":
        inside: list[Node] = []
        inner = [shape]
        for _ in range(draw(st.integers(1, 3))):
            inside.append(draw_node(draw, inner, inside, set(), depth + 1))
            inner.append(shape_after(inside[-1], inner, inside[:-1]))
        return Node("nested", (first,), {"form": draw(st.sampled_from(["functional", "sequential"]))}, tuple(inside))
    if name == "again":
        return Node("again", (first,) * len(nodes[more].takes), {"of": more})
    if name == "tied":
        return Node("tied", (first,), {"of": more})
    settings = {setting: draw(st.sampled_from(choices)) for setting, choices in KINDS[name].choices.items()}
    takes = (first,) if more == [None] else (first, draw(st.sampled_from(more)))
    return Node(name, takes, settings)


def draw_nodes(draw: Draw, inputs: Sequence[str]) -> tuple[list[Node], tuple[int, ...]]:
    """The nodes of a model and its outputs: every value is used or is an output."""
    shapes = [INPUTS[kind] for kind in inputs]
    nodes: list[Node] = []
    unused = set(range(len(inputs)))

    def add(node: Node) -> int:
        shapes.append(shape_after(node, shapes, nodes))
        nodes.append(node)
        unused.difference_update(node.takes)
        unused.add(len(shapes) - 1)
        return len(shapes) - 1

    for _ in range(draw(st.integers(1, 5))):
        add(draw_node(draw, shapes, nodes, unused, 0))
    for i in sorted(unused & set(range(len(inputs)))):
        kind = "dense" if rank(shapes[i]) else "embedding"
        add(Node(kind, (i,), {setting: choices[0] for setting, choices in KINDS[kind].choices.items()}))
    while len(unused) > MAX_OUTPUTS:  # join two of them
        a, b = (add(Node("flatten", (i,))) if rank(shapes[i]) > 1 else i for i in sorted(unused)[:2])
        add(Node("concatenate", (a, b)))
    chosen = sorted(unused)
    head = add(Node("dense", (chosen.pop(),), {"units": 2, "activation": draw(st.sampled_from(HEADS))}))
    between = [i for i in range(len(inputs), len(shapes)) if i not in unused]
    if len(chosen) < MAX_OUTPUTS - 1 and between and draw(st.sampled_from([False, False, True])):
        chosen.append(draw(st.sampled_from(between)))
    return nodes, (*chosen, head)


HEADS = [None, None, None, "sigmoid", "softmax"]
OPTIMIZERS: dict[str, dict[str, Sequence[Any]]] = {
    "SGD": {"momentum": [0.0, 0.9], "nesterov": [False, True]},
    "Adam": {"amsgrad": [False, True]},
    "AdamW": {"weight_decay": [0.1]},
    "RMSprop": {"centered": [False, True], "momentum": [0.0, 0.5]},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Nadam": {},
    "Ftrl": {"l2_regularization_strength": [0.1]},
}
# These take the sign of a gradient, or divide it by its own size: rounding, where the true gradient is zero, would
# become steps of full length.
AMPLIFYING: dict[str, dict[str, Sequence[Any]]] = {"Lion": {}, "Adafactor": {}, "Lamb": {}, "Muon": {}}
CLIPPING = [{}, {}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01}]
MORE = [{}, {}, {}, {"use_ema": True, "ema_momentum": 0.9}, {"gradient_accumulation_steps": 2}]

LOSSES: dict[str, Callable[..., keras.Loss]] = {
    "mse": keras.losses.MeanSquaredError,
    "mae": keras.losses.MeanAbsoluteError,
    "huber": keras.losses.Huber,
    "log_cosh": keras.losses.LogCosh,
    "binary": lambda **s: keras.losses.BinaryCrossentropy(from_logits=True, **s),
    "cosine": keras.losses.CosineSimilarity,
}
# Of outputs that are probabilities; keys are activations of `HEADS`.
LOSSES_OF_HEADS: dict[str, Callable[..., keras.Loss]] = {
    "sigmoid": keras.losses.BinaryCrossentropy,
    "softmax": keras.losses.CategoricalCrossentropy,
}


@st.composite
def recipes(draw: Draw) -> Recipe:
    """All recipes whose pipeline differs from what it is compared with."""
    assume(draw(st.booleans()))  # refuses the simplest recipe, which Hypothesis tries first, whatever the seed
    inputs = draw(st.lists(st.sampled_from(list(INPUTS)), min_size=1, max_size=3))
    nodes, outputs = draw_nodes(draw, inputs)
    flat = nodes[-1].settings["activation"] == "softmax" or any(
        KINDS[node.kind].flat for node in flat_nodes(nodes) if node.kind in KINDS
    )
    choices = OPTIMIZERS if flat else {**OPTIMIZERS, **AMPLIFYING}
    name = draw(st.sampled_from(list(choices)))
    optimizer = {"learning_rate": 0.01} | {key: draw(st.sampled_from(values)) for key, values in choices[name].items()}
    optimizer |= draw(st.sampled_from(CLIPPING)) | draw(st.sampled_from(MORE))
    if optimizer.get("nesterov") and not optimizer["momentum"]:
        optimizer["momentum"] = 0.9
    if any(node.kind == "embedding" for node in flat_nodes(nodes)):
        optimizer.pop("centered", None)  # fails in plain Keras, which takes the indices of slices to differ
    losses = [draw(st.sampled_from(list(LOSSES))) for _ in outputs]
    if name in AMPLIFYING:
        # With as many rows above as below, the gradient of a bias is truly zero where a loss has slopes of 1 and -1.
        losses = ["mse" if loss in ("mae", "huber") else loss for loss in losses]
    losses[-1] = nodes[-1].settings["activation"] or losses[-1]  # the head
    batch_size = draw(st.integers(1, 20))
    count = len(flat_nodes(nodes))
    num_micro_batches = draw(st.integers(1, 6))
    # Where the reference is one stage with as many micro-batches, or plain Keras with one, there are to be two.
    fewest = 2 if num_micro_batches == 1 or depends_on_micro_batches(nodes) else 1
    assume(count >= fewest)
    num_stages = draw(st.integers(fewest, min(5, count)))
    return Recipe(
        tuple(inputs),
        tuple(nodes),
        outputs,
        draw(st.sampled_from(["list", "dict"])),
        draw(st.sampled_from([False, False, False, True])),
        tuple((loss, draw(st.sampled_from([1.0, 0.3]))) for loss in losses),
        draw(st.sampled_from(["sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight"])),
        (name, optimizer),
        draw(st.integers(1, 2)) * batch_size + draw(st.integers(0, batch_size - 1)),
        batch_size,
        2 if "gradient_accumulation_steps" in optimizer else draw(st.integers(1, 2)),
        draw(st.booleans()),
        draw(st.sampled_from([False, False, False, True])),
        draw(st.sampled_from([False, False, True])),
        num_stages,
        num_micro_batches,
        draw(st.sampled_from(["except_last", "always", "never"])),
        draw(st.sampled_from([(), tuple(draw(st.integers(1, 3)) for _ in range(num_stages))])),
        draw(st.integers(0, 9)),
    )


# --- making ---


def layer_of(node: Node, made: Sequence[Any], taken: Sequence[Any]) -> Callable[..., Any]:
    """The layer, model or function of a node."""
    if node.kind == "nested":
        return nested(node, taken[0])
    if node.kind == "again":
        return made[node.settings["of"]]
    if node.kind == "tied":
        return Transposed(made[node.settings["of"]])
    return KINDS[node.kind].make(**node.settings)


def values_after(nodes: Sequence[Node], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Applies nodes one by one; returns all values, and what each node is made of."""
    values, made = list(inputs), []
    for node in nodes:
        taken = [values[i] for i in node.takes]
        made.append(layer_of(node, made, taken))
        values.append(made[-1](*taken))
    return values, made


def nested(node: Node, value: Any) -> keras.Model:
    """A nested model; Sequential where it can be."""
    outside = keras.Input(value.shape[1:], dtype=value.dtype)
    values, made = values_after(node.inside, [outside])
    chain = all(inner.takes == (k,) and isinstance(made[k], keras.Layer) for k, inner in enumerate(node.inside))
    if node.settings["form"] == "sequential" and chain and len(set(map(id, made))) == len(made):
        return keras.Sequential([outside, *made])
    return keras.Model(outside, values[-1])


def make_model(recipe: Recipe) -> keras.Model:
    """The model of a recipe, not compiled."""
    inputs = {}
    for i, kind in enumerate(recipe.inputs):
        tokens = kind == "tokens"
        shape = INPUTS[kind]
        inputs[f"in_{i}"] = keras.Input(shape[tokens:], dtype="int32" if tokens else None, name=f"in_{i}")
    values, _ = values_after(recipe.nodes, list(inputs.values()))
    outputs = {f"out_{k}": values[i] for k, i in enumerate(recipe.outputs)}
    if recipe.structure == "dict":
        model = keras.Model(inputs, outputs)
    else:
        model = keras.Model(_single(list(inputs.values())), _single(list(outputs.values())))
    return Wrapper(model) if recipe.wrapped else model


def compile_arguments(recipe: Recipe) -> dict[str, Any]:
    """Loss, metrics and optimizer of a recipe, new ones at each call."""
    name, settings = recipe.optimizer
    losses = [{**LOSSES, **LOSSES_OF_HEADS}[loss](reduction=recipe.reduction) for loss, _ in recipe.losses]
    weights = [weight for _, weight in recipe.losses]
    return {
        "optimizer": getattr(keras.optimizers, name)(**settings),
        "loss": _structured(recipe, losses),
        "loss_weights": _structured(recipe, weights),
        "weighted_metrics": _structured(recipe, [["mae"] for _ in losses]) if recipe.weighted else None,
    }


def data_of(recipe: Recipe, model: keras.Model, rows: int) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of rows (or None) for a recipe's model."""
    rng = np.random.default_rng(recipe.seed)
    model = getattr(model, "inner", model)
    x = []
    for kind in recipe.inputs:
        shape = INPUTS[kind]
        if kind == "tokens":
            x.append(rng.integers(0, VOCABULARY, (rows, *shape[1:])).astype("int32"))
        else:
            x.append(rng.normal(size=(rows, *shape)))
        if kind == "sequence":
            x[-1][rng.random((rows, shape[0])) < 0.3] = 0.0  # for `Masking`
    y = []
    for tensor, (loss, _) in zip(model.outputs, recipe.losses, strict=True):
        target = rng.normal(size=(rows, *tensor.shape[1:]))
        if loss == "softmax":
            target = np.eye(target.shape[-1])[target.argmax(axis=-1)]
        y.append((target > 0.0).astype("float64") if loss in ("binary", "sigmoid") else target)
    weights = [rng.uniform(0.2, 2.0, target.shape[:-1]) for target in y] if recipe.weighted else None
    named = recipe.structure == "dict"
    return (
        {f"in_{i}": part for i, part in enumerate(x)} if named else _single(x),
        _structured(recipe, y),
        None if weights is None else _structured(recipe, weights),
    )


def counts_of(recipe: Recipe, operations: int) -> list[int]:
    """As many operations for each stage as the recipe's sizes ask for; at least one."""
    counts = [1] * recipe.num_stages
    for _ in range(operations - recipe.num_stages):
        smallest = min(range(recipe.num_stages), key=lambda k: counts[k] / recipe.sizes[k])
        counts[smallest] += 1
    return counts


def _structured(recipe: Recipe, values: list[Any]) -> Any:
    """Values for the outputs, as the recipe passes them."""
    if recipe.structure == "dict":
        return {f"out_{k}": value for k, value in enumerate(values)}
    return _single(values)


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
