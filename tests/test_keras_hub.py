"""Transformers of Keras Hub, made from a configuration, train in stages as on one device.

The task models are used as they come: dictionaries of inputs, padding masks, custom layers, and for the language models
a token embedding that the first stage and the last one share.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from helpers import assert_same, train

import tf_gpipe

keras_hub = pytest.importorskip("keras_hub", reason='keras_hub is not installed: pip install ".[hub]"')

STAGES, MICRO_BATCHES, ROWS, LENGTH, VOCABULARY, CLASSES = 4, 2, 7, 6, 11, 3
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
PADDING = (np.arange(LENGTH) < RNG.integers(2, LENGTH + 1, (ROWS, 1))).astype("int32")
IMAGES = RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
LABELS = RNG.integers(0, CLASSES, ROWS)
TEXT = {"token_ids": TOKENS, "padding_mask": PADDING}
SIZES = {"num_layers": 4, "hidden_dim": 32}
TEXT_SIZES = {**SIZES, "vocabulary_size": VOCABULARY, "intermediate_dim": 48}


def bert(dropout: float) -> keras.Model:
    backbone = keras_hub.models.BertBackbone(**TEXT_SIZES, num_heads=2, max_sequence_length=LENGTH, dropout=dropout)
    return keras_hub.models.BertTextClassifier(backbone, CLASSES, preprocessor=None, dropout=dropout)


def gpt2(dropout: float) -> keras.Model:
    backbone = keras_hub.models.GPT2Backbone(**TEXT_SIZES, num_heads=2, max_sequence_length=LENGTH, dropout=dropout)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def llama(dropout: float) -> keras.Model:
    backbone = keras_hub.models.LlamaBackbone(**TEXT_SIZES, num_query_heads=4, num_key_value_heads=2, dropout=dropout)
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def vit(dropout: float) -> keras.Model:
    backbone = keras_hub.models.ViTBackbone(
        (8, 8, 3), patch_size=4, num_heads=2, mlp_dim=48, dropout_rate=dropout, attention_dropout=dropout, **SIZES
    )
    return keras_hub.models.ViTImageClassifier(backbone, CLASSES, preprocessor=None, dropout=dropout)


MODELS = {
    "bert": (bert, {**TEXT, "segment_ids": TOKENS % 2}, LABELS),
    "gpt2": (gpt2, TEXT, np.roll(TOKENS, -1, axis=1)),
    "llama": (llama, TEXT, np.roll(TOKENS, -1, axis=1)),
    "vit": (vit, IMAGES, LABELS),
}


def compiled() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": loss, "metrics": ["accuracy"]}


def assert_in_stages(strategy: tf_gpipe.GPipeStrategy, model: keras.Model) -> None:
    """Every stage has operations, and each variable is on a device of a stage that uses it."""
    assert model._gpipe_pipelines
    stages = strategy.plan(model).stages
    assert len({stage.device for stage in stages if stage.operations}) == STAGES
    used_on = {
        id(v): {stage.device for stage in stages if any(v is own for own in stage.variables)} for v in model.variables
    }
    assert all(v.value.device in used_on[id(v)] for v in model.variables)
    # The encoder of ViT is one layer, and a layer is not cut, so that one of its stages has no weights.
    expected = 3 if isinstance(model, keras_hub.models.ViTImageClassifier) else STAGES
    assert len({v.value.device for v in model.weights}) == expected


def trained(make: Callable[[float], keras.Model], data: tuple[Any, ...], dropout: float, strategy: Any) -> Any:
    initial: list[np.ndarray] = []

    def made() -> keras.Model:
        model = make(dropout)
        initial.extend(model.get_weights())
        return model

    model, history = train(made, data, strategy, compile=compiled, batch_size=ROWS)
    moved = [not np.array_equal(a, b) for a, b in zip(initial, model.get_weights(), strict=True)]
    assert all(moved)
    return model, history


@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_trains_as_in_plain_keras(name: str) -> None:
    make, x, y = MODELS[name]
    strategy = tf_gpipe.GPipeStrategy(STAGES, MICRO_BATCHES)
    plain, piped = (trained(make, (x, y), 0.0, s) for s in (None, strategy))
    assert_in_stages(strategy, piped[0])
    assert_same(plain, piped)
    np.testing.assert_allclose(piped[0].predict(x, verbose=0), plain[0].predict(x, verbose=0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_with_dropout_trains_as_in_one_stage(name: str) -> None:
    make, x, y = MODELS[name]
    strategy = tf_gpipe.GPipeStrategy(STAGES, MICRO_BATCHES)
    one = trained(make, (x, y), 0.1, tf_gpipe.GPipeStrategy(1, MICRO_BATCHES))
    piped = trained(make, (x, y), 0.1, strategy)
    assert_in_stages(strategy, piped[0])
    assert_same(one, piped)
    drawn = [v.numpy()[1] for v in piped[0].variables if v.name == "seed_generator_state"]
    assert max(drawn) > 0
