"""The translation example: counts, masks, stability, data, loss, beam search, and the scripts."""

import argparse
import collections
import contextlib
import functools
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import sacrebleu
import tensorflow as tf
from helpers import assert_same, train

import tf_gpipe

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))
comparison, data, decoding, model, training = (
    importlib.import_module(f"translation.{name}") for name in ("comparison", "data", "decoding", "model", "training")
)
shapes = importlib.import_module("shapes")

SMALL = {"width": 16, "head_dim": 8, "vocabulary": 20, "length": 6}
SENTENCES = np.array([[5, 6, 7, 3, 0, 0], [8, 3, 0, 0, 0, 0], [9, 10, 11, 12, 13, 3], [14, 15, 3, 0, 0, 0]])
TARGETS = np.array([[2, 5, 6, 0, 0, 0], [2, 7, 8, 9, 10, 0], [2, 11, 0, 0, 0, 0], [2, 12, 13, 14, 15, 16]])


def small(layers: int = 2, **arguments) -> keras.Model:
    """A T(layers, 32, 2) with random weights, the same ones each time."""
    keras.utils.set_random_seed(0)
    return model.translation_transformer(layers, 32, 2, **{**SMALL, **arguments})


def logits(made: keras.Model, sources: np.ndarray = SENTENCES, targets: np.ndarray = TARGETS) -> np.ndarray:
    return made([sources, targets], training=False).numpy()


def count_parameters(layers: int, make: Callable[[int], keras.Model]) -> int:
    """The parameters of a deep model, from models of one and two layers."""
    with shapes.shapes_only():
        one, two = (make(n).count_params() for n in (1, 2))
    return one + (layers - 1) * (two - one)


@pytest.mark.parametrize(
    ("sizes", "millions"),
    [
        ((6, 8192, 16), ["342.4", "407.9", "473.4"]),
        ((24, 8192, 16), ["1172.8", "1238.4", "1303.9"]),
        ((12, 16384, 32), ["1172.8", "1238.4", "1303.9"]),
        ((32, 16384, 32), ["3018.3", "3083.9", "3149.4"]),
        ((64, 16384, 32), ["5971.1", "6036.7", "6102.2"]),
    ],
)
def test_counts_of_translation_models(sizes, millions):
    layers, hidden, heads = sizes
    for tables, expected in zip((1, 2, 3), millions, strict=True):
        count = count_parameters(layers, lambda n: model.translation_transformer(n, hidden, heads, tables=tables))  # noqa: B023
        assert f"{count / 1e6:.1f}" == expected


@pytest.mark.parametrize(
    ("layers", "parameters"),
    [(3, 282_182_912), (13, 785_765_632), (103, 5_318_010_112), (415, 21_029_790_976), (1663, 83_876_914_432)],
)
def test_counts_of_language_models(layers, parameters):
    assert count_parameters(layers, model.language_transformer) == parameters


def test_every_block_counts_alike():
    with shapes.shapes_only():
        assert model.language_transformer(13).count_params() == 785_765_632
        assert f"{model.translation_transformer(12, 16384, 32).count_params() / 1e6:.1f}" == "1303.9"


@pytest.mark.parametrize("fails", [False, True])
def test_shapes_only_leaves_nothing_behind(fails):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with contextlib.suppress(ZeroDivisionError), shapes.shapes_only():
            small()
            if fails:
                raise ZeroDivisionError
        after = keras.layers.Dense(2)
        after.build((None, 3))
        assert after.kernel.numpy().shape == (3, 2)
        assert after.compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("language_model", [False, True])
def test_as_many_stages_as_operations(language_model):
    make = model.language_transformer if language_model else functools.partial(model.translation_transformer, heads=2)
    with shapes.shapes_only():
        plan = tf_gpipe.GPipeStrategy(1).plan(make(3, hidden=32))
    assert len(plan.stages[0].operations) == model.most_stages(3, language_model=language_model)


@pytest.mark.parametrize("tables", [1, 2, 3])
def test_padding_of_a_source_changes_nothing(tables):
    made = small(tables=tables)
    longer = small(tables=tables, length=9)
    longer.set_weights(made.get_weights())
    pad = [(0, 0), (0, 3)]
    np.testing.assert_allclose(
        logits(longer, np.pad(SENTENCES, pad), np.pad(TARGETS, pad))[:, :6], logits(made), atol=1e-5
    )


def test_nothing_attends_to_padding():
    made = small()
    before = logits(made)
    table = made.get_layer("embed_source").embeddings
    table.assign(tf.tensor_scatter_nd_update(table, [[model.PAD]], 9 * tf.ones([1, 16])))
    np.testing.assert_allclose(logits(made), before, atol=1e-5)


def test_a_token_is_predicted_from_those_before():
    made = small()
    changed = TARGETS.copy()
    changed[:, 3] = 17
    before, after = logits(made), logits(made, targets=changed)
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    assert np.abs(after[:, 3:] - before[:, 3:]).max(axis=(1, 2)).min() > 1e-3


def test_a_saved_model_comes_back(tmp_path):
    made = small(tables=1, logit_clip=5.0)
    made.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(logits(loaded), logits(made))


def test_two_stages_come_to_the_weights_of_plain_keras():
    labels = np.roll(TARGETS, -1, axis=1) * (np.roll(TARGETS, -1, axis=1) != data.START)
    batch = [np.tile(part, (2, 1)) for part in (SENTENCES, TARGETS)], np.tile(labels, (2, 1))
    arguments = {
        "compile": lambda: {"optimizer": keras.optimizers.SGD(0.5), "loss": training.SmoothedCrossEntropy()},
        "batch_size": 8,
        "sample_weight": (batch[1] != data.PAD).astype("float32"),
    }

    def tied() -> keras.Model:
        return small(tables=1)

    # The second decoder block is on another stage than the first: states, encoder states and mask cross; both stages
    # use the table.
    strategy = tf_gpipe.GPipeStrategy(2, 4, partition=["decoder_1"])
    assert_same(train(tied, batch, strategy, **arguments), train(tied, batch, **arguments))


@pytest.fixture(scope="module")
def made_deep() -> keras.Model:
    return small(64, scale_feed_forward=False, logit_clip=4.0)


@pytest.fixture
def deep(made_deep):
    """64 blocks on either side, without scaled feed-forward layers, and with logits clipped at 4."""
    weights = made_deep.get_weights()
    yield made_deep
    made_deep.set_weights(weights)


def test_scaled_feed_forward_layers_keep_deep_states_small(deep):
    encoder = keras.Model(deep.inputs[0], deep.get_layer("encoder_63").output)
    blocks = [deep.get_layer(f"encoder_{i}") for i in range(64)]
    kernels = [(layer.kernel, layer.kernel.numpy()) for block in blocks for layer in (block.expand, block.contract)]

    def states(factor: float) -> np.ndarray:
        for kernel, initial in kernels:
            kernel.assign(factor * initial)
        return encoder(SENTENCES).numpy()

    unscaled, scaled, without = states(1), states(1 / 64), states(0)
    assert scaled.std() < 0.8 * unscaled.std()
    # What the feed-forward layers add:
    assert (scaled - without).std() < 0.05 * scaled.std()
    assert (unscaled - without).std() > 0.5 * unscaled.std()


def test_scaled_feed_forward_layers_have_smaller_weights():
    kernels = [small(5, scale_feed_forward=s).get_layer("decoder_0").expand.kernel.numpy() for s in (True, False)]
    np.testing.assert_allclose(5 * kernels[0], kernels[1], atol=1e-6)
    assert np.abs(kernels[1]).max() == pytest.approx(math.sqrt(6 / (16 + 32)), rel=0.05)  # as Glorot's


def test_clipped_logits_bound_the_loss(deep):
    kernel = deep.get_layer("logits").kernel
    kernel.assign(1000 * kernel)  # far too large logits
    model_with_both = keras.Model(deep.inputs, [deep.get_layer("logits").output, deep.output])
    loss = training.SmoothedCrossEntropy(reduction=None)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(kernel.value)
        free, clipped = (loss(SENTENCES, outputs) for outputs in model_with_both([SENTENCES, TARGETS]))
    assert float(tf.reduce_max(free)) > 100
    assert float(tf.reduce_max(clipped)) <= 2 * 4.0 + math.log(SMALL["vocabulary"])
    free_norm, clipped_norm = (float(tf.norm(tape.gradient(losses, kernel.value))) for losses in (free, clipped))
    assert clipped_norm < free_norm / 10


def test_tables_are_checked():
    with pytest.raises(ValueError, match=r"Expected 1, 2 or 3 tables of the vocabulary\. Received: tables=4\."):
        small(tables=4)


def smoothed(labels: np.ndarray, outputs: np.ndarray, smoothing: float) -> np.ndarray:
    """The loss of each token, by its definition."""
    probabilities = np.exp(outputs) / np.exp(outputs).sum(axis=-1, keepdims=True)
    vocabulary = outputs.shape[-1]
    shares = (1 - smoothing) * np.eye(vocabulary)[labels] + smoothing / vocabulary
    return -(shares * np.log(probabilities)).sum(axis=-1)


def test_loss_is_the_mean_over_the_tokens_of_the_mini_batch():
    with tf_gpipe.GPipeStrategy(2, 4).scope():
        made = small(1)
        made.compile(loss=training.SmoothedCrossEntropy(label_smoothing=0.2))
    weights = (TARGETS != 0).astype("float32")  # rows, and so micro-batches, have different numbers of tokens
    found = made.evaluate([SENTENCES, TARGETS], TARGETS, batch_size=4, sample_weight=weights, verbose=0)
    losses = smoothed(TARGETS, logits(made).astype("float64"), 0.2)
    assert found == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-5)


def test_learning_rate_rises_and_falls():
    rate = training.InverseSquareRoot(0.1, warmup_steps=4)
    np.testing.assert_allclose([rate(step) for step in (0, 1, 3, 15)], [0.025, 0.05, 0.1, 0.05], rtol=1e-6)


def test_training_stops_when_its_time_is_up():
    made = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    made.fit(np.ones([8, 1]), np.ones([8, 1]), batch_size=2, epochs=3, verbose=0, callbacks=[training.StopAfter(0)])
    assert made.optimizer.iterations.numpy() == 1


@pytest.fixture(scope="module")
def pairs() -> list:
    return data.read_pairs(("de", "lb", "udm"))


def test_pairs_are_real(pairs):
    texts = {(pair.language, pair.source): pair.english for pair in pairs}
    assert texts["de", "Dienstag"] == "Tuesday"
    assert texts["lb", "Dënschdeg"] == "Tuesday"
    assert texts["de", "%(count)s %(name)s wurden erfolgreich geändert."].startswith("%(count)s %(name)s were changed")
    assert len(data.languages()) > 80
    assert set(data.LANGUAGES) <= set(data.languages())


def test_unknown_languages_are_refused():
    with pytest.raises(ValueError, match="Expected a language that Django has, such as ar, .* Received: 'xx'"):
        data.read_pairs(["xx"])


def test_a_held_out_message_is_held_out_in_all_languages(pairs):
    parts = data.split(pairs)
    train_keys, held_out_keys = ({data.message_key(pair) for pair in part} for part in parts)
    assert not train_keys & held_out_keys
    assert not {pair.english.casefold() for pair in parts[0]} & {pair.english.casefold() for pair in parts[1]}
    assert 0.05 < len(parts[1]) / len(pairs) < 0.15
    assert {pair.language for pair in parts[1]} == {"de", "lb", "udm"}
    assert data.split(reversed(pairs))[1][::-1] == parts[1]  # whatever the order


def test_the_tokenizer_learns_from_the_training_part(pairs):
    corpus = data.load_corpus(("de", "lb", "udm"), 500, length=16)
    expected = data.train_tokenizer(data.split(pairs)[0], 500)
    assert corpus.tokenizer.serialized_model_proto() == expected.serialized_model_proto()
    assert corpus.tokenizer.get_piece_size() == 500
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("Bitte ein Passwort!")) == "Bitte ein Passwort!"
    tokens = data.tokenize(corpus.train, corpus.tokenizer, corpus.length)
    assert all((part == data.END).any(axis=1).all() for part in (tokens.source, tokens.labels))  # nothing is cut
    np.testing.assert_array_equal(tokens.target[:, 1:], np.where(tokens.target[:, 1:], tokens.labels[:, :-1], 0))
    np.testing.assert_array_equal(tokens.weights, tokens.labels != data.PAD)


def test_sampling_probabilities():
    counts = {"a": 900, "b": 90, "c": 10}
    assert data.language_probabilities(counts, 1) == pytest.approx({"a": 0.9, "b": 0.09, "c": 0.01})
    bert = np.array([0.9, 0.09, 0.01]) ** 0.7
    assert list(data.language_probabilities(counts, 1 / 0.7).values()) == pytest.approx(bert / bert.sum())
    later = np.array([0.9790, 0.6178, 0.3981])  # fifth roots
    assert list(data.language_probabilities(counts, 5).values()) == pytest.approx(later / later.sum(), abs=1e-4)


def test_batches_are_drawn_by_temperature_and_seed(pairs):
    tokenizer = data.train_tokenizer(pairs, 500)
    language_of = {
        tuple(row): p.language for row, p in zip(data.tokenize(pairs, tokenizer, 16).source, pairs, strict=True)
    }

    def first(temperature: float, seed: int, count: int) -> list:
        options = {"rows": 50, "length": 16, "temperature": temperature, "seed": seed}
        batches = data.training_batches(pairs, tokenizer, **options)
        return [[*x, y, weights] for x, y, weights in batches.take(count).as_numpy_iterator()]

    one, again, other = first(1, 0, 2), first(1, 0, 2), first(1, 1, 2)
    assert {part.shape for batch in one for part in batch} == {(50, 16)}
    np.testing.assert_array_equal(one, again)
    assert np.any(one[0][0] != other[0][0])
    counts = collections.Counter(pair.language for pair in pairs)
    for temperature in (1, 5):
        drawn = collections.Counter(language_of[tuple(row)] for batch in first(temperature, 0, 40) for row in batch[0])
        for name, probability in data.language_probabilities(counts, temperature).items():
            assert drawn[name] / 2000 == pytest.approx(probability, abs=0.05)


VOCABULARY = 6
"""Padding, unknown, start, end and two words."""


def random_tables(num_rows: int, max_length: int) -> np.ndarray:
    """Log probabilities of the next token by row, number of tokens so far, and last token."""
    scores = np.random.default_rng(0).normal(size=(num_rows, max_length, VOCABULARY, VOCABULARY)) * 2
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def search(tables: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    rows, max_length = tables.shape[:2]

    def next_log_probabilities(prefixes: np.ndarray) -> np.ndarray:
        return tables[np.arange(rows)[:, None], prefixes.shape[-1] - 1, prefixes[:, :, -1]]

    return decoding.beam_search(next_log_probabilities, rows, max_length=max_length, **options)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_of_all_hypotheses(length_penalty):
    tables = random_tables(num_rows=5, max_length=4)

    def best(table: np.ndarray) -> tuple[float, tuple[int, ...]]:
        scored = []
        for length in range(1, 5):
            for tokens in itertools.product(range(VOCABULARY), repeat=length):
                ends = tokens[-1] == data.END or length == 4
                if ends and data.END not in tokens[:-1]:
                    steps = zip(itertools.count(), (data.START, *tokens), tokens, strict=False)
                    total = sum(table[i, before, token] for i, before, token in steps)
                    scored.append((total / ((5 + length) / 6) ** length_penalty, tokens))
        return max(scored)

    tokens, scores = search(tables, beam_size=VOCABULARY**3, length_penalty=length_penalty)
    for row, score, (expected_score, expected) in zip(tokens, scores, map(best, tables), strict=True):
        assert score == pytest.approx(expected_score)
        assert tuple(row) == expected + (data.PAD,) * (4 - len(expected))


def test_a_beam_of_one_is_greedy_search():
    tables = random_tables(num_rows=20, max_length=5)
    tokens, scores = search(tables, beam_size=1)
    better = search(tables, beam_size=4)[1]
    for row, table in zip(tokens, tables, strict=True):
        expected, last = [], data.START
        while len(expected) < 5 and last != data.END:
            last = int(np.argmax(table[len(expected), last]))
            expected.append(last)
        assert list(row) == expected + [data.PAD] * (5 - len(expected))
    assert np.any(better > scores + 0.1)


def test_translator_follows_the_model(pairs):
    tokenizer = data.train_tokenizer(pairs, 500)
    made = small(vocabulary=500, length=8)
    sentences = ["Bitte ein Passwort", "Dienstag", "Wort"]
    found = decoding.Translator(made, tokenizer, rows=2)(sentences, beam_size=1)
    for sentence, translation in zip(sentences, found, strict=True):
        source = data.pad([tokenizer.encode(sentence)], 8, end=True)
        tokens = [data.START]
        while len(tokens) < 9 and tokens[-1] != data.END:
            target = data.pad([tokens], 8)
            tokens.append(int(np.argmax(logits(made, source, target)[0, len(tokens) - 1])))
        assert translation == tokenizer.decode([token for token in tokens[1:] if token not in (data.END, data.PAD)])


def test_bleu_is_that_of_sacrebleu():
    hypotheses, references = ["the cat sat on a mat", "it rains"], ["the cat sat on the mat", "it rains today"]
    assert decoding.bleu(references, references) == pytest.approx(100)
    assert decoding.bleu(hypotheses, references) == sacrebleu.corpus_bleu(hypotheses, [references]).score


TOO_SHORT = "--quick: too short to learn, it only shows that all of it runs"


@pytest.mark.parametrize(
    ("quick", "bleus", "said"),
    [
        (True, [30.0], f"{TOO_SHORT}\n"),
        (False, [12.0, 0.9], "BLEU below 1: too short to learn to translate; give it more --steps\n"),
        (False, [12.0, 1.0], ""),
    ],
)
def test_a_training_too_short_to_translate_says_so(quick, bleus, said, capsys):
    comparison.tell_if_too_short(argparse.Namespace(quick=quick), bleus)
    assert capsys.readouterr().out == said


def run(*arguments: str) -> str:
    """Runs a script and returns what it printed."""
    name, *rest = arguments
    command = [sys.executable, f"examples/translation_{name}.py", *rest]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == ""  # TensorFlow is quiet, though the environment does not ask for it
    return done.stdout


def test_transformer_script():
    printed = run("transformer", "--quick")
    assert "negative log likelihood of a held-out token" in printed
    assert "of the copied source" in printed
    assert printed.splitlines()[-1] == TOO_SHORT


def test_transformer_script_plans_a_model_of_the_paper():
    printed = run("transformer", "--plan")
    assert printed.splitlines()[-1] == "1,303,904,256 parameters"
    assert "of 't_24_8192_16'" in printed
    assert float(re.search(r"balance (\d\.\d+)", printed)[1]) > 0.9


def test_transformer_script_plans_the_sizes_that_are_given():
    sizes = "--layers 4 --hidden 64 --heads 2 --width 32 --vocabulary 500 --stages 3"
    printed = run("transformer", "--plan", *sizes.split())
    assert "of 't_4_64_2'" in printed
    # Blocks: 4 and 8 projections of 32 by 2 x 64, and 2 layers of 32 by 64; three tables.
    assert printed.splitlines()[-1] == f"{4 * (4 + 8) * 32 * 128 + 8 * 2 * 32 * 64 + 3 * 500 * 32:,} parameters"
    printed = run("transformer", "--plan", "--language-model", *sizes.split())
    assert "of 'transformer_4'" in printed


def test_deep_and_wide_have_equally_many_parameters():
    script = importlib.import_module("translation_deep_or_wide")
    with shapes.shapes_only():
        more = {"head_dim": 32, "tables": 2}
        counts = [shapes.count_parameters(model.translation_transformer(**s, **more)) for s in script.MODELS.values()]
    assert counts[0] == counts[1]


def test_deep_or_wide_script():
    rows = [line.split() for line in run("deep_or_wide", "--quick").splitlines()[-3:]]
    assert " ".join(rows.pop()) == TOO_SHORT
    assert [row[0] for row in rows] == ["deep", "wide"]
    assert all(len(row) == 6 for row in rows)


def test_batch_size_script():
    rows = [line.split() for line in run("batch_size", "--quick").splitlines()[-4:]]
    assert " ".join(rows.pop()) == TOO_SHORT
    assert [row[:2] for row in rows] == [["1", "384"], ["2", "768"], ["4", "1,536"]]


AT_LEAST_1 = "a whole number, at least 1"
SEED = "a whole number, at least 0 and below 4294967296"
OF_BOTH_COMPARISONS = [
    ("--stages", "0", AT_LEAST_1),
    ("--stages", "two", AT_LEAST_1),
    ("--rows", "0", AT_LEAST_1),
    ("--micro-batches", "-4", AT_LEAST_1),
    ("--steps", "3", "a whole number, at least 4"),
    ("--test-pairs", "0", AT_LEAST_1),
    ("--seed", "4294967296", SEED),
]
OF_TRANSFORMER = [
    ("--stages", "0", AT_LEAST_1),
    ("--stages", "2.5", AT_LEAST_1),
    ("--stages", "17", "at most 16, the model's operations"),
    ("--micro-batches", "0", AT_LEAST_1),
    ("--layers", "0", AT_LEAST_1),
    ("--hidden", "-512", AT_LEAST_1),
    ("--heads", "0", AT_LEAST_1),
    ("--width", "0", "a whole number, at least 2 and a multiple of 2"),
    ("--width", "33", "a whole number, at least 2 and a multiple of 2"),
    ("--vocabulary", "0", AT_LEAST_1),
    ("--temperature", "0", "a number, at least 1"),
    ("--temperature", "nan", "a number, at least 1"),
    ("--batch-tokens", "23", "a whole number, at least 24"),
    ("--epochs", "0", AT_LEAST_1),
    ("--minutes", "-1", "a number, at least 0"),
    ("--beam", "0", AT_LEAST_1),
    ("--test-pairs", "0", AT_LEAST_1),
    ("--seed", "-1", SEED),
]


def refusal(name: str, flags: list[str], monkeypatch, capsys) -> str:
    """What a script says of wrong flags, before it makes any device."""
    script = importlib.import_module(f"translation_{name}")
    monkeypatch.setattr(tf_gpipe, "set_logical_cpus", lambda count: pytest.fail(f"{flags} were not refused"))
    with pytest.raises(SystemExit) as ended:
        script.main(flags)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flag", "value", "expected"),
    [
        *[(name, *odd) for name in ("batch_size", "deep_or_wide") for odd in OF_BOTH_COMPARISONS],
        ("batch_size", "--stages", "13", "at most 12, the model's operations"),
        ("deep_or_wide", "--stages", "15", "at most 14, the model's operations"),
        *[("transformer", *odd) for odd in OF_TRANSFORMER],
    ],
)
def test_odd_flags_are_refused(name, flag, value, expected, monkeypatch, capsys):
    message = f"error: argument {flag}: Expected {expected}. Received: '{value}'.\n"
    assert refusal(name, [flag, value], monkeypatch, capsys).endswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--languages de xx", "argument --languages: Expected a language that Django has: af, ar, "),
        ("--language-model", "argument --language-model: Expected --plan with it"),
        ("--plan --language-model --heads 7", "argument --heads: Expected a number that divides the width, 2048. R"),
        ("--plan --layers 2 --stages 13", "argument --stages: Expected at most 12, the model's operations."),
        ("--plan --language-model --layers 2 --stages 7", "argument --stages: Expected at most 6, the model's "),
    ],
)
def test_odd_flags_of_the_transformer_script_are_refused(flags, message, monkeypatch, capsys):
    assert message in refusal("transformer", flags.split(), monkeypatch, capsys)


@pytest.mark.parametrize("vocabulary", ["10", "100000"])
def test_a_vocabulary_that_does_not_suit_the_text_is_refused(vocabulary, capsys):
    script = importlib.import_module("translation_transformer")
    with pytest.raises(SystemExit) as ended:
        script.main(["--languages", "lb", "--vocabulary", vocabulary])
    assert ended.value.code == 2
    message = f"Expected as many tokens as the text can be cut into. Received: vocabulary={vocabulary}."
    assert message in capsys.readouterr().err
