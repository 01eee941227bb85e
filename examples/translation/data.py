"""Sentences to translate into English, without a download: the message catalogues inside Django's wheel.

Django comes with its messages in about a hundred languages, from a few dozen to more than eight hundred in each. A
message that is held out is held out in all languages, with its plural, and whatever its case and punctuation; so a
model that has merely seen the English side through another language cannot know it. All targets are English, so that
no tag has to name a language.
"""

import collections
import importlib.util
import io
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import tensorflow as tf
from babel.messages.mofile import read_mo

from translation.model import PAD

HIGH_RESOURCE = ("ar", "cs", "da", "de", "el", "es", "fr", "id", "it", "nl", "pl", "pt", "ru", "sv", "tr")
LOW_RESOURCE = ("ast", "br", "fy", "lb", "udm")  # Asturian, Breton, Frisian, Luxembourgish, Udmurt
LANGUAGES = (*HIGH_RESOURCE, *LOW_RESOURCE)
QUICK_LANGUAGES = ("de", "lb", "nl")
HELD_OUT = 10  # one message in so many
LENGTH = 24  # tokens in a row, padding included

UNKNOWN, START, END = 1, 2, 3  # tokens, after padding


class Pair(NamedTuple):
    """A sentence and its translation; `message` is the English message in singular, as it stands in the program."""

    language: str
    source: str
    english: str
    message: str


def languages() -> list[str]:
    """Returns all languages but variants of English, in the names of Django's folders."""
    folders = (path.parent.parent.name for path in _root().glob("conf/locale/*/LC_MESSAGES/django.mo"))
    return sorted(name for name in folders if not name.startswith("en"))


def read_pairs(names: Iterable[str] = LANGUAGES) -> list[Pair]:
    """Returns every translated message of some languages once, in a fixed order."""
    pairs: dict[Pair, None] = {}
    for name in names:
        files = sorted(_root().glob(f"**/locale/{name}/LC_MESSAGES/*.mo"))
        if not files:
            raise ValueError(
                f"Expected a language that Django has, such as {', '.join(LANGUAGES)}. Received: {name!r}."
            )
        for file in files:
            with file.open("rb") as opened:
                messages = list(read_mo(opened))
            for message in messages:
                if message.pluralizable:
                    forms = [(message.id[0], message.string[0]), (message.id[1], message.string[-1])]
                else:
                    forms = [(message.id, message.string)]
                singular = _plain(forms[0][0])
                for english, source in forms:
                    if english and source:
                        pairs[Pair(name, _plain(source), _plain(english), singular)] = None
    return list(pairs)


def _root() -> Path:
    """The folder of Django, which need not be imported."""
    return Path(importlib.util.find_spec("django").submodule_search_locations[0])


def _plain(text: str) -> str:
    """A sentence in one line."""
    return " ".join(text.split())


def split(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs to train on and those of the held-out messages, about one in ten."""
    parts: tuple[list[Pair], list[Pair]] = [], []
    for pair in pairs:
        parts[zlib.crc32(message_key(pair).encode()) % HELD_OUT == 0].append(pair)
    return parts


def message_key(pair: Pair) -> str:
    """What is the same for all forms of a message: its letters and digits, in lower case."""
    return re.sub(r"\W+", "", pair.message.casefold()) or pair.message


def train_tokenizer(pairs: Iterable[Pair], vocabulary: int) -> sentencepiece.SentencePieceProcessor:
    """Returns subwords of both sides of the pairs, shared by all languages.

    Args:
        pairs: what to learn from; the training part only.
        vocabulary: number of tokens; padding, unknown, start and end among them.

    Raises:
        ValueError: the text has too few or too many different characters and words for so many tokens.
    """
    pairs = list(pairs)
    sentences = [pair.source for pair in pairs] + sorted({pair.english for pair in pairs})
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=trained,
            vocab_size=vocabulary,
            model_type="bpe",
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=START,
            eos_id=END,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"Expected as many tokens as the text can be cut into. Received: vocabulary={vocabulary}. SentencePiece "
            f"says: {error}"
        ) from error
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


class Tokens(NamedTuple):
    """Pairs as tokens, (rows, length) each: the decoder is given `target` and shall say `labels`.

    `weights` is 1 for a label and 0 for padding.
    """

    source: np.ndarray
    target: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    @property
    def keras(self) -> tuple:
        """`(x, y, sample_weight)`, as Keras takes them."""
        return (self.source, self.target), self.labels, self.weights


def tokenize(pairs: Sequence[Pair], tokenizer: sentencepiece.SentencePieceProcessor, length: int) -> Tokens:
    """Returns pairs as tokens, padded to `length`; longer ones are cut."""
    source = pad(tokenizer.encode([pair.source for pair in pairs]), length, end=True)
    english = tokenizer.encode([pair.english for pair in pairs])
    labels = pad(english, length, end=True)
    target = pad([[START, *tokens] for tokens in english], length)
    return Tokens(source, target, labels, (labels != PAD).astype("float32"))


def pad(rows: Sequence[Sequence[int]], length: int, end: bool = False) -> np.ndarray:
    """Returns rows of tokens as an array (rows, length), cut or filled with padding; with `end` each has its end."""
    padded = np.full((len(rows), length), PAD, dtype="int32")
    for row, tokens in zip(padded, rows, strict=True):
        kept = [*tokens[: length - 1], END] if end else tokens[:length]
        row[: len(kept)] = kept
    return padded


def language_probabilities(counts: dict[str, int], temperature: float) -> dict[str, float]:
    """How often to draw each language: p^(1/T) of its share p, made to add up to 1.

    With T=1 languages come as often as there are pairs; the higher T, the more alike. Multilingual BERT's exponent 0.7
    is T=1/0.7, and T=5 is what the paper's authors used later (arXiv:1907.05019).
    """
    total = sum(counts.values())
    powers = {name: (count / total) ** (1 / temperature) for name, count in counts.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def training_batches(
    pairs: Iterable[Pair],
    tokenizer: sentencepiece.SentencePieceProcessor,
    *,
    rows: int,
    length: int,
    temperature: float,
    seed: int,
) -> tf.data.Dataset:
    """Returns endless mini-batches of `rows` times `length` tokens on each side, the same ones for the same seed.

    Args:
        pairs: what to draw from. The languages are drawn as `language_probabilities` says, the pairs of a language in
            turn, in a new order each time round.
        tokenizer: makes the tokens.
        rows: pairs in a mini-batch.
        length: tokens in a row, padding included.
        temperature: T, at least 1.
        seed: of the draws.
    """
    by_language = collections.defaultdict(list)
    for pair in pairs:
        by_language[pair.language].append(pair)
    probabilities = language_probabilities({name: len(part) for name, part in by_language.items()}, temperature)
    parts = [
        tf.data.Dataset.from_tensor_slices(tokenize(part, tokenizer, length).keras)
        .shuffle(len(part), seed=seed)
        .repeat()
        for part in by_language.values()
    ]
    drawn = tf.data.Dataset.sample_from_datasets(parts, [probabilities[name] for name in by_language], seed=seed)
    return drawn.batch(rows, drop_remainder=True).prefetch(2)


class Corpus(NamedTuple):
    """What a model is trained and tested on: pairs of at most `length` tokens on both sides, and their tokenizer."""

    train: list[Pair]
    held_out: list[Pair]
    tokenizer: sentencepiece.SentencePieceProcessor
    length: int


def load_corpus(names: Iterable[str] = LANGUAGES, vocabulary: int = 2000, length: int = LENGTH) -> Corpus:
    """Returns the pairs of some languages, in two parts, and the tokenizer that was trained on the first part.

    Args:
        names: of the languages.
        vocabulary: number of tokens.
        length: longer pairs, in tokens with their end, are left out.

    Raises:
        ValueError: a language is not known, or the vocabulary does not suit the text.
    """
    train, held_out = split(read_pairs(names))
    tokenizer = train_tokenizer(train, vocabulary)

    def fits(pair: Pair) -> bool:
        return max(map(len, tokenizer.encode([pair.source, pair.english]))) < length

    return Corpus(list(filter(fits, train)), list(filter(fits, held_out)), tokenizer, length)


def every(items: Sequence, count: int) -> list:
    """Returns at most `count` items, evenly from all over a sequence."""
    return list(items[:: max(1, math.ceil(len(items) / count))])
