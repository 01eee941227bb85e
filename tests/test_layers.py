"""Every layer of `keras.layers` alone in the middle stage of three: it trains as in plain Keras.

A layer stands between a stem, which scales its inputs by weights of its own, and a head; both are on other stages, so
that inputs, outputs and gradients of the layer all cross a cut. Several layers share one model as branches that never
meet, each with its own input, loss and name; should such a model fail as a whole, each of its layers is tried alone.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import train

import tf_gpipe

L = keras.layers
ROWS, STEPS = 7, 2  # 7 rows are 4 and 3
TOGETHER = 12  # layers in one model
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (4, 3), (8, 8, 3), (4, 4, 4, 2)
UNIT = {"value_range": (0.0, 1.0)}
WORDS = ["a", "b", "c", "d"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer in the middle.

    Attributes:
        make: makes the layer.
        shapes: shape of each of its inputs, without the batch.
        dtype: of the inputs; numbers that are not floats come from 0 to 3.
        unit: whether inputs are in [0, 1), as images are.
        call: how to call it on the list of its inputs; by default on the list, or on its one element.
        per_micro_batch: whether its result depends on M: batch norm, random layers.
        draws: whether it is random.
        flows: whether gradients pass it.
        chosen: whether Python draws for it while it is traced, so that each trace, plain Keras's too, makes a choice.
    """

    make: Callable[[], keras.Layer]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    unit: bool = False
    call: Callable[[keras.Layer, list[keras.KerasTensor]], Any] | None = None
    per_micro_batch: bool = False
    draws: bool = False
    flows: bool = True
    chosen: bool = False

    def on(self, layer: keras.Layer, inputs: list[keras.KerasTensor]) -> Any:
        """Calls the layer."""
        if self.call is not None:
            return self.call(layer, inputs)
        return layer(inputs[0] if len(inputs) == 1 else inputs)


def one(shape: tuple[int, ...], make: Callable[[], keras.Layer], **more: Any) -> Case:
    return Case(make, (shape,), **{"flows": more.get("dtype", "float32") == "float32", **more})


def several(shapes: Sequence[tuple[int, ...]], make: Callable[[], keras.Layer], call: Any = None, **more: Any) -> Case:
    return Case(make, tuple(shapes), call=call, **more)


def image(make: Callable[[], keras.Layer], shape: tuple[int, ...] = IMAGE, **more: Any) -> Case:
    return one(shape, make, unit=True, **more)


def random(shape: tuple[int, ...], make: Callable[[], keras.Layer], **more: Any) -> Case:
    return one(shape, make, per_micro_batch=True, draws=True, **more)


def random_image(make: Callable[[], keras.Layer], **more: Any) -> Case:
    return random(IMAGE, make, unit=True, **more)


def spread(layer: keras.Layer, inputs: list[keras.KerasTensor]) -> Any:
    return layer(*inputs)


def with_state(layer: keras.Layer, inputs: list[keras.KerasTensor]) -> Any:
    return layer(inputs[0], inputs[1:] if len(inputs) > 2 else inputs[1])


def images_and_labels(layer: keras.Layer, inputs: list[keras.KerasTensor]) -> Any:
    return layer({"images": inputs[0], "labels": inputs[1]})


TWO = (VECTOR, VECTOR)
THREE = (VECTOR, VECTOR, VECTOR)
PAIR = (SEQUENCE, SEQUENCE)


@keras.saving.register_keras_serializable("test_layers")
class Inside(L.Wrapper):
    """Calls the layer it was given."""

    def call(self, x: Any) -> Any:
        return self.layer(x)


@keras.saving.register_keras_serializable("test_layers")
class Bytes(Inside):
    """Calls a layer on numbers from 0 to 255, where what it rounds is not put on the edge of a bin by scaling."""

    def call(self, x: Any) -> Any:
        return self.layer(x * 255.0) / 255.0


@keras.saving.register_keras_serializable("test_layers")
class Averaged(Inside):
    """The mean over height and width of what a layer returns."""

    def call(self, x: Any) -> Any:
        return keras.ops.mean(self.layer(x), axis=(1, 2))


CASES: dict[str, Case] = {
    # core
    "Dense": one(VECTOR, lambda: L.Dense(5, "tanh")),
    "Dense, regularisers and constraints": one(
        VECTOR,
        lambda: L.Dense(
            5,
            kernel_regularizer="l1l2",
            kernel_constraint=keras.constraints.MaxNorm(0.7),
            bias_regularizer="l2",
            bias_constraint="non_neg",
            activity_regularizer="l2",
            bias_initializer="ones",
        ),
    ),
    "Dense, LoRA": one(VECTOR, lambda: L.Dense(5, lora_rank=2)),
    "EinsumDense": one(SEQUENCE, lambda: L.EinsumDense("abc,cd->abd", [4, 6], activation="tanh", bias_axes="d")),
    "EinsumDense, LoRA": one(SEQUENCE, lambda: L.EinsumDense("abc,cd->abd", [4, 6], lora_rank=2)),
    "Embedding": one((5,), lambda: L.Embedding(4, 3), dtype="int32"),
    "Embedding, mask": one((5,), lambda: L.Embedding(4, 3, mask_zero=True), dtype="int32"),
    "Embedding, LoRA": one((5,), lambda: L.Embedding(4, 3, lora_rank=2), dtype="int32"),
    "ReversibleEmbedding": one((5,), lambda: L.ReversibleEmbedding(4, 3), dtype="int32"),
    "ReversibleEmbedding, reversed": one(
        (5, 3),
        lambda: L.ReversibleEmbedding(4, 3, logit_soft_cap=2.0),
        call=lambda layer, x: layer(x[0], reverse=True),
    ),
    "Lambda": one(VECTOR, lambda: L.Lambda(lambda x: keras.ops.sin(x) * 2.0)),
    "Lambda, TensorFlow": one(VECTOR, lambda: L.Lambda(lambda x: tf.math.cumsum(tf.nn.softplus(x), axis=-1))),
    "Masking": one(SEQUENCE, lambda: L.Masking()),
    "Identity": one(VECTOR, lambda: L.Identity()),
    # activations
    "Activation": one(VECTOR, lambda: L.Activation("gelu")),
    "ELU": one(VECTOR, lambda: L.ELU(0.5)),
    "LeakyReLU": one(VECTOR, lambda: L.LeakyReLU(0.2)),
    "PReLU": one(VECTOR, lambda: L.PReLU(alpha_initializer="ones")),
    "PReLU, shared": one(IMAGE, lambda: L.PReLU(shared_axes=[1, 2])),
    "ReLU": one(VECTOR, lambda: L.ReLU(2.0, 0.1, 0.2)),
    "Softmax": one(VECTOR, lambda: L.Softmax()),
    # merging
    "Add": several(THREE, lambda: L.Add()),
    "Average": several(THREE, lambda: L.Average()),
    "Concatenate": several(THREE, lambda: L.Concatenate()),
    "Dot": several(PAIR, lambda: L.Dot(axes=2, normalize=True)),
    "Maximum": several(THREE, lambda: L.Maximum()),
    "Minimum": several(THREE, lambda: L.Minimum()),
    "Multiply": several(THREE, lambda: L.Multiply()),
    "Subtract": several(TWO, lambda: L.Subtract()),
    # reshaping
    "Cropping1D": one(SEQUENCE, lambda: L.Cropping1D()),
    "Cropping2D": one(IMAGE, lambda: L.Cropping2D(1)),
    "Cropping3D": one(VOLUME, lambda: L.Cropping3D()),
    "Flatten": one(IMAGE, lambda: L.Flatten()),
    "Permute": one(SEQUENCE, lambda: L.Permute((2, 1))),
    "RepeatVector": one(VECTOR, lambda: L.RepeatVector(3)),
    "Reshape": one(VECTOR, lambda: L.Reshape((2, -1))),
    "UpSampling1D": one(SEQUENCE, lambda: L.UpSampling1D()),
    "UpSampling2D": one(IMAGE, lambda: L.UpSampling2D(interpolation="bilinear")),
    "UpSampling3D": one(VOLUME, lambda: L.UpSampling3D()),
    "ZeroPadding1D": one(SEQUENCE, lambda: L.ZeroPadding1D()),
    "ZeroPadding2D": one(IMAGE, lambda: L.ZeroPadding2D()),
    "ZeroPadding3D": one(VOLUME, lambda: L.ZeroPadding3D()),
    # convolutions
    "Conv1D": one(SEQUENCE, lambda: L.Conv1D(3, 2, dilation_rate=2, padding="causal")),
    "Conv1D, LoRA": one(SEQUENCE, lambda: _with_lora(L.Conv1D(3, 2), SEQUENCE)),
    "Conv1DTranspose": one(SEQUENCE, lambda: L.Conv1DTranspose(3, 2, strides=2)),
    "Conv2D": one(IMAGE, lambda: L.Conv2D(4, 3, strides=2, padding="same", activation="tanh")),
    "Conv2DTranspose": one(IMAGE, lambda: L.Conv2DTranspose(2, 3, strides=2, padding="same")),
    "Conv3D": one(VOLUME, lambda: L.Conv3D(2, 2)),
    "Conv3DTranspose": one(VOLUME, lambda: L.Conv3DTranspose(2, 2)),
    "DepthwiseConv1D": one(SEQUENCE, lambda: L.DepthwiseConv1D(2, depth_multiplier=2)),
    "DepthwiseConv2D": one(IMAGE, lambda: L.DepthwiseConv2D(3)),
    "SeparableConv1D": one(SEQUENCE, lambda: L.SeparableConv1D(3, 2)),
    "SeparableConv2D": one(IMAGE, lambda: L.SeparableConv2D(3, 2, depth_multiplier=2)),
    # pooling
    **{
        f"{kind}Pooling{n}D": one(shape, functools.partial(getattr(L, f"{kind}Pooling{n}D"), 2))
        for kind in ("Average", "Max", "AdaptiveAverage", "AdaptiveMax")
        for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    **{
        f"Global{kind}Pooling{n}D": one(shape, getattr(L, f"Global{kind}Pooling{n}D"))
        for kind in ("Average", "Max")
        for n, shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME))
    },
    # normalisation
    "BatchNormalization": one(SEQUENCE, lambda: L.BatchNormalization(momentum=0.8), per_micro_batch=True),
    "BatchNormalization, no scale": one(
        IMAGE, lambda: L.BatchNormalization(axis=1, scale=False, center=False, epsilon=0.1), per_micro_batch=True
    ),
    "BatchNormalization, renorm": one(
        SEQUENCE, lambda: L.BatchNormalization(renorm=True, momentum=0.8), per_micro_batch=True
    ),
    "BatchNormalization, frozen": one(VECTOR, lambda: L.BatchNormalization(trainable=False)),
    "GroupNormalization": one(IMAGE, lambda: L.GroupNormalization(3)),
    "LayerNormalization": one(SEQUENCE, lambda: L.LayerNormalization(axis=[1, 2])),
    "RMSNormalization": one(SEQUENCE, lambda: L.RMSNormalization()),
    "SpectralNormalization": one(VECTOR, lambda: L.SpectralNormalization(L.Dense(5), power_iterations=2)),
    "SpectralNormalization, convolution": one(IMAGE, lambda: L.SpectralNormalization(L.Conv2D(2, 3))),
    "UnitNormalization": one(VECTOR, lambda: L.UnitNormalization()),
    "Normalization": one(VECTOR, lambda: L.Normalization(mean=[0.5] * 6, variance=[2.0] * 6)),
    "Normalization, adapted": one(VECTOR, lambda: _adapted(L.Normalization(), numbers("Normalization", VECTOR))),
    # regularisation
    "ActivityRegularization": one(VECTOR, lambda: L.ActivityRegularization(0.1, 0.1)),
    "AlphaDropout": random(VECTOR, lambda: L.AlphaDropout(0.4)),
    "Dropout": random(VECTOR, lambda: L.Dropout(0.4)),
    "Dropout, noise shape": random(SEQUENCE, lambda: L.Dropout(0.4, noise_shape=(None, 1, 3), seed=3)),
    "GaussianDropout": random(VECTOR, lambda: L.GaussianDropout(0.4)),
    "GaussianNoise": random(VECTOR, lambda: L.GaussianNoise(0.4)),
    "SpatialDropout1D": random(SEQUENCE, lambda: L.SpatialDropout1D(0.4)),
    "SpatialDropout2D": random(IMAGE, lambda: L.SpatialDropout2D(0.4)),
    "SpatialDropout3D": random(VOLUME, lambda: L.SpatialDropout3D(0.4)),
    # attention
    "Attention": several((*PAIR, SEQUENCE), lambda: L.Attention(use_scale=True, score_mode="concat")),
    "Attention, dropout": several(PAIR, lambda: L.Attention(dropout=0.3), per_micro_batch=True, draws=True),
    "AdditiveAttention": several(PAIR, lambda: L.AdditiveAttention()),
    "MultiHeadAttention": several(PAIR, lambda: L.MultiHeadAttention(2, 3), spread),
    "MultiHeadAttention, causal": several(
        (*PAIR, SEQUENCE),
        lambda: L.MultiHeadAttention(2, 3, value_dim=2, output_shape=5),
        lambda layer, x: layer(*x, use_causal_mask=True, return_attention_scores=True),
    ),
    "MultiHeadAttention, window": several(
        PAIR, lambda: L.MultiHeadAttention(2, 3, sliding_window=2), lambda layer, x: layer(*x, use_causal_mask=True)
    ),
    "GroupQueryAttention": several(
        PAIR, lambda: L.GroupQueryAttention(3, 4, 2), lambda layer, x: layer(*x, use_causal_mask=True)
    ),
    # recurrent
    "GRU": one(SEQUENCE, lambda: L.GRU(3, return_sequences=True, return_state=True)),
    "GRUCell": several((VECTOR, (3,)), lambda: L.GRUCell(3), with_state),
    "LSTM": one(SEQUENCE, lambda: L.LSTM(3, return_sequences=True, return_state=True)),
    "LSTM, given states": several(
        (SEQUENCE, (3,), (3,)), lambda: L.LSTM(3), lambda layer, x: layer(x[0], initial_state=x[1:])
    ),
    "LSTMCell": several((VECTOR, (3,), (3,)), lambda: L.LSTMCell(3), with_state),
    "SimpleRNN": one(SEQUENCE, lambda: L.SimpleRNN(3, return_sequences=True)),
    "SimpleRNNCell": several((VECTOR, (3,)), lambda: L.SimpleRNNCell(3), with_state),
    "RNN": one(SEQUENCE, lambda: L.RNN(L.GRUCell(3), return_state=True)),
    "StackedRNNCells": several(
        (VECTOR, (3,), (2,)), lambda: L.StackedRNNCells([L.GRUCell(3), L.SimpleRNNCell(2)]), with_state
    ),
    "Bidirectional": one(SEQUENCE, lambda: L.Bidirectional(L.LSTM(3, return_state=True))),
    "Bidirectional, other backward layer": one(
        SEQUENCE,
        lambda: L.Bidirectional(
            L.LSTM(3, return_sequences=True), "sum", backward_layer=L.GRU(3, return_sequences=True, go_backwards=True)
        ),
    ),
    "TimeDistributed": one(SEQUENCE, lambda: L.TimeDistributed(L.Dense(3))),
    "TimeDistributed, batch norm": one(
        SEQUENCE, lambda: L.TimeDistributed(L.BatchNormalization()), per_micro_batch=True
    ),
    "ConvLSTM1D": one((2, 5, 2), lambda: L.ConvLSTM1D(2, 2, return_sequences=True)),
    "ConvLSTM2D": one((2, 4, 4, 2), lambda: L.ConvLSTM2D(2, 2, return_state=True)),
    "ConvLSTM3D": one((2, 3, 3, 3, 2), lambda: L.ConvLSTM3D(2, 2)),
    # preprocessing
    "CategoryEncoding": one((3,), lambda: L.CategoryEncoding(4), dtype="int32"),
    "CategoryEncoding, count": one((3,), lambda: L.CategoryEncoding(4, output_mode="count"), dtype="int32"),
    "Discretization": one(VECTOR, lambda: L.Discretization([-0.5, 0.0, 0.5]), flows=False),
    "Discretization, one hot": one((1,), lambda: L.Discretization([0.0], output_mode="one_hot"), flows=False),
    "Hashing": one((3,), lambda: L.Hashing(5, salt=7), dtype="int32"),
    "Hashing, strings": one((3,), lambda: L.Hashing(5), dtype="string"),
    "HashedCrossing": several(((1,), (1,)), lambda: L.HashedCrossing(5), dtype="int32", flows=False),
    "IntegerLookup": one((3,), lambda: L.IntegerLookup(vocabulary=[3, 1, 2]), dtype="int64"),
    "StringLookup": one((3,), lambda: L.StringLookup(vocabulary=WORDS[:3]), dtype="string"),
    "StringLookup, counts": one(
        (3,), lambda: L.StringLookup(vocabulary=WORDS[:3], output_mode="count"), dtype="string"
    ),
    "TextVectorization": one(
        (1,), lambda: L.TextVectorization(vocabulary=WORDS[:3], output_sequence_length=4), dtype="string"
    ),
    "TextVectorization, tf-idf": one(
        (1,),
        lambda: L.TextVectorization(vocabulary=WORDS[:3], idf_weights=[1.0, 0.5, 0.2], output_mode="tf_idf", ngrams=1),
        dtype="string",
    ),
    "STFTSpectrogram": one(
        (40, 1), lambda: L.STFTSpectrogram("magnitude", frame_length=16, frame_step=8, fft_length=16)
    ),
    "MelSpectrogram": one(
        (64,), lambda: L.MelSpectrogram(fft_length=16, sequence_stride=8, sampling_rate=800, num_mel_bins=4)
    ),
    # images
    "AutoContrast": image(lambda: L.AutoContrast(**UNIT), flows=False),  # no scale changes it
    "CenterCrop": image(lambda: L.CenterCrop(4, 5)),
    "ContrastLimitedAdaptiveHistogramEqualization": image(
        lambda: L.ContrastLimitedAdaptiveHistogramEqualization(**UNIT, tile_grid_size=(2, 2)), flows=False
    ),
    # One histogram for all rows; and Keras cannot trace it symbolically, where it would return its own input.
    "Equalization": image(lambda: Inside(L.Equalization(**UNIT, bins=16)), flows=False, per_micro_batch=True),
    "MaxNumBoundingBoxes": image(lambda: L.MaxNumBoundingBoxes(3)),
    "Pipeline": image(lambda: L.Pipeline([L.Rescaling(2.0), L.Resizing(5, 5), L.CenterCrop(4, 4)])),
    "Pipeline, random": random_image(lambda: L.Pipeline([L.RandomFlip(), L.RandomRotation(0.2)])),
    "Rescaling": image(lambda: L.Rescaling(2.0, 0.1)),
    "Resizing": image(lambda: L.Resizing(5, 6, crop_to_aspect_ratio=True)),
    "Resizing, bicubic": image(lambda: L.Resizing(5, 6, "bicubic", antialias=True)),
    "Solarization": image(lambda: L.Solarization(0.1, 0.2, **UNIT), per_micro_batch=True, draws=True),
    "AugMix": random_image(
        lambda: Bytes(L.AugMix(num_chains=1, chain_depth=1, all_ops=False)), flows=False, chosen=True
    ),
    "CutMix": several(
        (IMAGE, (2,)), lambda: L.CutMix(), images_and_labels, unit=True, per_micro_batch=True, draws=True
    ),
    "MixUp": several((IMAGE, (2,)), lambda: L.MixUp(), images_and_labels, unit=True, per_micro_batch=True, draws=True),
    "RandAugment": random_image(lambda: Bytes(L.RandAugment(num_ops=1)), flows=False),
    "RandomBrightness": random_image(lambda: L.RandomBrightness(0.5, **UNIT)),
    "RandomColorDegeneration": random_image(lambda: L.RandomColorDegeneration(0.9, **UNIT)),
    "RandomColorJitter": random_image(lambda: L.RandomColorJitter(**UNIT, brightness_factor=0.3, contrast_factor=0.3)),
    "RandomContrast": random_image(lambda: L.RandomContrast(0.8, **UNIT)),
    # Keras's `RandomCrop` crops in training only: of another size than in evaluation.
    "RandomCrop": random_image(lambda: Averaged(L.RandomCrop(4, 4))),
    "RandomElasticTransform": random_image(lambda: L.RandomElasticTransform(**UNIT)),
    "RandomErasing": random_image(lambda: L.RandomErasing(**UNIT)),
    "RandomFlip": random_image(lambda: L.RandomFlip()),
    "RandomGaussianBlur": random_image(lambda: L.RandomGaussianBlur(**UNIT)),
    "RandomGrayscale": random_image(lambda: L.RandomGrayscale()),
    "RandomHue": random_image(lambda: L.RandomHue(0.8, **UNIT), flows=False),
    "RandomInvert": random_image(lambda: L.RandomInvert(**UNIT)),
    "RandomPerspective": random_image(lambda: L.RandomPerspective()),
    "RandomPosterization": random_image(lambda: L.RandomPosterization(3, **UNIT), flows=False),
    "RandomRotation": random_image(lambda: L.RandomRotation(0.3)),
    "RandomSaturation": random_image(lambda: L.RandomSaturation(0.9, **UNIT), flows=False),
    "RandomSharpness": random_image(lambda: L.RandomSharpness(0.9, **UNIT)),
    "RandomShear": random_image(lambda: L.RandomShear(0.5, 0.5)),
    "RandomTranslation": random_image(lambda: L.RandomTranslation(0.3, 0.3)),
    "RandomZoom": random_image(lambda: L.RandomZoom(0.5)),
}

OUTSIDE = {
    "InputLayer": "made by keras.Input; every model here has one",
    "InputSpec": "no layer: what a layer says of its inputs",
    "Layer": "the base class; layers of one's own are in test_models.py",
    "Wrapper": "a base class without a call",
    "TFSMLayer": "reads a file: test_a_saved_model_as_a_layer",
    "JaxLayer": "needs the package jax",
    "FlaxLayer": "needs the packages jax and flax",
    "TorchModuleWrapper": "needs the package torch, and Keras on it",
}


def _with_lora(layer: keras.Layer, shape: tuple[int, ...]) -> keras.Layer:
    layer.build((None, *shape))
    layer.enable_lora(2)
    return layer


def _adapted(layer: keras.Layer, data: np.ndarray) -> keras.Layer:
    layer.adapt(data)
    return layer


def test_every_layer_of_keras_is_tried_or_has_a_reason_not_to_be() -> None:
    public = {name: value for name, value in vars(L).items() if inspect.isclass(value)}
    named = {name.split(",")[0] for name in CASES} | set(OUTSIDE)
    assert named <= set(public)
    tried = {id(public[name]) for name in named}  # an alias, as MaxPool2D, is the same class
    assert sorted(name for name, value in public.items() if id(value) not in tried) == []
    for name, case in CASES.items():
        if not case.draws or name in ("AlphaDropout", "RandomFlip"):  # as a sample; making all of them costs seconds
            made = case.make()
            assert type(made.layer if isinstance(made, Inside) else made) is public[name.split(",")[0]], name


# --- branches --------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_layers")
class Stem(L.Layer):
    """Scales each of its inputs by weights of its own, within the range where they were."""

    def build(self, shapes: Any) -> None:
        shapes = shapes if isinstance(shapes, list) else [shapes]
        self.scales = [self.add_weight(shape=shape[-1:], initializer="ones", name="scale") for shape in shapes]

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, list):
            return inputs * self.scales[0]
        return [x * scale for x, scale in zip(inputs, self.scales, strict=True)]


def flat_shapes(shapes: Any) -> list[tuple[int | None, ...]]:
    """The shapes in a structure of shapes."""
    if isinstance(shapes, dict):
        return [shape for _, part in sorted(shapes.items()) for shape in flat_shapes(part)]
    if all(n is None or isinstance(n, int) for n in shapes):
        return [tuple(shapes)]
    return [shape for part in shapes for shape in flat_shapes(part)]


@keras.saving.register_keras_serializable("test_layers")
class Head(L.Layer):
    """Two numbers from all tensors that a layer returned."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shapes: Any) -> None:
        size = sum(int(np.prod(shape[1:])) for shape in flat_shapes(shapes))
        self.kernel = self.add_weight(shape=(size, 2), initializer="glorot_uniform", name="kernel")

    def call(self, inputs: Any) -> Any:
        parts = [keras.ops.cast(x, "float32") for x in keras.tree.flatten(inputs)]
        flat = [keras.ops.reshape(x, (keras.ops.shape(x)[0], int(np.prod(x.shape[1:])))) for x in parts]
        return keras.ops.matmul(keras.ops.concatenate(flat, axis=-1), self.kernel) / self.kernel.shape[0] ** 0.5

    def compute_output_shape(self, shapes: Any) -> tuple[int | None, ...]:
        return (None, 2)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        return None


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def numbers(name: str, shape: tuple[int, ...], dtype: str = "float32", unit: bool = False, index: int = 0) -> Any:
    rng = np.random.default_rng([index, *name.encode()])
    if dtype == "string":
        return tf.constant(rng.choice(WORDS, (ROWS, *shape)).astype(object), tf.string)
    if dtype != "float32":
        return rng.integers(0, 4, (ROWS, *shape)).astype(dtype)
    if unit:
        return rng.uniform(0.05, 0.95, (ROWS, *shape)).astype("float32")
    return rng.normal(size=(ROWS, *shape)).astype("float32")


def model_of(names: Sequence[str]) -> tuple[keras.Model, dict[int, str]]:
    """The model of all branches, and which branch has which weight (by identity)."""
    inputs, outputs, owners = [], [], {}
    for name in names:
        case = CASES[name]
        x = [keras.Input(shape, dtype=case.dtype, name=f"{slug(name)}_in_{i}") for i, shape in enumerate(case.shapes)]
        stem, head = (Stem if case.flows else L.Identity)(name=f"{slug(name)}_stem"), Head(name=f"{slug(name)}_head")
        middle = case.make()
        made = stem(x if len(x) > 1 else x[0])
        inputs += x
        outputs.append(head(case.on(middle, made if isinstance(made, list) else [made])))
        owners.update((id(weight), name) for layer in (stem, middle, head) for weight in layer.weights)
    return keras.Model(inputs, outputs), owners


def data_of(names: Sequence[str]) -> tuple[list[Any], list[Any]]:
    x = [
        numbers(name, shape, CASES[name].dtype, CASES[name].unit, i)
        for name in names
        for i, shape in enumerate(CASES[name].shapes)
    ]
    return x, [numbers(name, (2,), index=100) for name in names]


@dataclasses.dataclass
class Run:
    """What one training of a model of branches came to, for each branch.

    Attributes:
        before, after: its weights.
        names: their names.
        trainable: which of them are to be trained.
        losses: its loss at each step.
        predicted: what the trained model predicts; None where that was not asked.
    """

    before: dict[str, list[np.ndarray]]
    after: dict[str, list[np.ndarray]]
    names: dict[str, list[str]]
    trainable: dict[str, list[bool]]
    losses: dict[str, list[float]]
    predicted: dict[str, np.ndarray | None]


def run_together(
    names: Sequence[str], num_stages: int | None, num_micro_batches: int, remat: str = "except_last"
) -> Run:
    n = len(names)
    partition = [n, n, n] if num_stages == 3 else "flops"
    strategy = num_stages and tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, partition=partition, remat=remat)
    owners: dict[int, str] = {}
    before: list[np.ndarray] = []

    def make() -> keras.Model:
        model, found = model_of(names)
        owners.update(found)
        before.extend(model.get_weights())
        return model

    def compile() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.SGD(0.01, momentum=0.9), "loss": ["mse"] * n}

    x, y = data_of(names)
    model, history = train(make, (x, y), strategy or None, compile=compile, batch_size=ROWS, epochs=STEPS)
    if strategy:
        stages = strategy.plan(model).stages
        assert len(stages) == num_stages
        assert "_gpipe_pipelines" in vars(model)
        for stage in stages:
            assert {v.value.device for v in stage.variables} <= {stage.device}
        if num_stages == 3:
            assert [len(stage.operations) for stage in stages] == [n, n, n]
            assert all(name.endswith("_stem") for name in stages[0].operations)
            assert all(name.endswith("_head") for name in stages[2].operations)
    # What is predicted does not depend on M: it is compared for the other runs.
    depends = num_micro_batches > 1 and CASES[names[0]].per_micro_batch
    predicted = [None] * n if depends else keras.tree.flatten(model.predict(x, batch_size=ROWS, verbose=0))

    def of_branch(values: Sequence[Any]) -> dict[str, list[Any]]:
        return {
            name: [value for value, w in zip(values, model.weights, strict=True) if owners[id(w)] == name]
            for name in names
        }

    return Run(
        of_branch(before),
        of_branch(model.get_weights()),
        of_branch([w.name for w in model.weights]),
        of_branch([w.trainable for w in model.weights]),
        {name: history[f"{slug(name)}_head_loss" if n > 1 else "loss"] for name in names},
        dict(zip(names, predicted, strict=True)),
    )


def groups() -> dict[str, tuple[str, ...]]:
    """Which layers share a model with each layer."""
    found: dict[str, tuple[str, ...]] = {}
    for kind in (False, True):
        names = [name for name, case in CASES.items() if case.per_micro_batch is kind]
        for start in range(0, len(names), TOGETHER):
            part = tuple(names[start : start + TOGETHER])
            found.update(dict.fromkeys(part, part))
    return found


GROUPS = groups()


@functools.cache
def run_group(names: tuple[str, ...], *arguments: Any) -> Run | Exception:
    try:
        return run_together(names, *arguments)
    except Exception as error:
        return error


def run_of(name: str, *arguments: Any) -> Run:
    """The run of a layer's group; its own where that of the group failed."""
    run = run_group(GROUPS[name], *arguments)
    return run if isinstance(run, Run) else run_together((name,), *arguments)


def assert_same_branch(name: str, expected: Run, received: Run) -> None:
    assert received.names[name] == expected.names[name]
    for weight, a, b in zip(expected.names[name], expected.after[name], received.after[name], strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6, err_msg=weight)
    np.testing.assert_allclose(received.losses[name], expected.losses[name], rtol=2e-6, atol=1e-6)
    if expected.predicted[name] is not None:
        np.testing.assert_allclose(received.predicted[name], expected.predicted[name], rtol=2e-6, atol=1e-6)


def assert_trained(name: str, run: Run) -> None:
    """Every weight to be trained moved: of the stem, where gradients pass the layer, of the layer and of the head."""
    moved = [not np.array_equal(a, b) for a, b in zip(run.before[name], run.after[name], strict=True)]
    parts = zip(run.names[name], run.trainable[name], moved, strict=True)
    assert [weight for weight, trainable, moved in parts if trainable and not moved] == []
    assert len(set(run.losses[name])) > 1


@pytest.mark.filterwarnings("ignore:.*/renorm_.* in its `call`")
@pytest.mark.parametrize("name", CASES)
def test_a_layer_alone_on_the_middle_stage_trains_as_in_plain_keras(name: str) -> None:
    case = CASES[name]
    plain = run_of(name, None, 1)
    assert_trained(name, plain)
    if not case.per_micro_batch:
        assert_same_branch(name, plain, run_of(name, 3, 2))
        return
    if not case.chosen:
        assert_same_branch(name, plain, run_of(name, 3, 1))
    one_stage = run_of(name, 1, 2, "always")
    assert_same_branch(name, one_stage, run_of(name, 3, 2, "always"))
    assert one_stage.losses[name] != plain.losses[name]
