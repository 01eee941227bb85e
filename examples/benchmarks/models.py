"""The models that are measured, compiled for SGD, and a mini-batch for each.

`dense` is the hardest for a pipeline, since its weights cost as much as its work; `transformer` is a causal language
model; `amoebanet` is the AmoebaNet-D of examples/digits_amoebanet.py with a strided stem, for larger images.
"""

import sys
from pathlib import Path

import keras
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

Batch = tuple[np.ndarray, np.ndarray]


class Positions(keras.layers.Layer):
    """Adds a vector for each position of the sequence, to be learnt."""

    def build(self, input_shape: tuple) -> None:
        """Makes the vectors."""
        self.vectors = self.add_weight(shape=input_shape[1:], name="vectors")

    def call(self, x):
        """Returns `(rows, sequence, width)`, as `x`."""
        return x + self.vectors


class Counted(keras.layers.Identity):
    """Counts how often its `call` runs in Python: each time is a trace of the function that it is in."""

    calls = 0

    def call(self, x):
        """Returns `x`."""
        Counted.calls += 1
        return x


def dense(layers: int, width: int, activation: str) -> tuple[keras.Model, str]:
    made = [keras.layers.Dense(width, activation=activation) for _ in range(layers)]
    return keras.Sequential([keras.Input([width]), *made]), "mse"


def transformer(layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> tuple[keras.Model, object]:
    tokens = keras.Input([sequence], dtype="int32")
    x = Counted()(Positions()(keras.layers.Embedding(vocabulary, width)(tokens)))
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(normed, normed, use_causal_mask=True)
        inner = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(inner)
    logits = keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x))
    return keras.Model(tokens, logits), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def amoebanet(layers: int, width: int, size: int, classes: int) -> tuple[keras.Model, object]:
    from digits_amoebanet import Cell

    images = keras.Input([size, size, 3])
    stem = keras.layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False)(images)
    stem = keras.layers.BatchNormalization()(stem)
    pair = (stem, stem)
    for filters in (width // 4, width // 2):
        pair = Cell(filters, reduction=True)(pair)
    for i in range(layers):
        if i in (layers // 3, 2 * layers // 3):
            width *= 2
            pair = Cell(width, reduction=True)(pair)
        pair = Cell(width)(pair)
    features = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(pair[0]))
    model = keras.Model(images, keras.layers.Dense(classes)(features))
    return model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make(name: str, sizes: dict, jit_compile: bool) -> keras.Model:
    """Returns the model, compiled."""
    keras.utils.set_random_seed(0)
    sizes = {key: value for key, value in sizes.items() if key != "rows"}
    model, loss = {"dense": dense, "transformer": transformer, "amoebanet": amoebanet}[name](**sizes)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=jit_compile)
    return model


def batch(name: str, sizes: dict, rows: int) -> Batch:
    """Returns random inputs and targets, with `rows` rows."""
    random = np.random.default_rng(0)
    if name == "dense":
        shape = (rows, sizes["width"])
        return random.normal(size=shape).astype("float32"), random.normal(size=shape).astype("float32")
    if name == "transformer":
        tokens = random.integers(sizes["vocabulary"], size=(rows, sizes["sequence"] + 1), dtype="int32")
        return tokens[:, :-1], tokens[:, 1:]
    images = random.normal(size=(rows, sizes["size"], sizes["size"], 3)).astype("float32")
    return images, random.integers(sizes["classes"], size=rows, dtype="int32")
