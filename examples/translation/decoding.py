"""From a trained model to sentences: beam search, and BLEU."""

import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
import sacrebleu
import sentencepiece
import tensorflow as tf

from translation.data import END, PAD, START, pad

LEAST_BLEU = 1.0  # a model with less has not begun to translate


def beam_search(
    next_log_probabilities: Callable[[np.ndarray], np.ndarray],
    num_rows: int,
    *,
    max_length: int,
    beam_size: int = 4,
    length_penalty: float = 0.6,
) -> tuple[np.ndarray, np.ndarray]:
    """Looks for the most probable continuation of each row, all rows at once.

    A hypothesis is scored by its log probability, divided by ((5 + its tokens) / 6) ** length_penalty. It is finished
    when it ends, and then leaves the beam; or when it has `max_length` tokens. A beam of 1 is greedy search.

    Args:
        next_log_probabilities: for prefixes, ints of shape (rows, beam, tokens so far), returns the log probabilities
            of the next token, (rows, beam, vocabulary).
        num_rows: how many rows to translate.
        max_length: most tokens of a hypothesis, its end included.
        beam_size: hypotheses that are kept.
        length_penalty: 0 for none; the higher, the longer the hypotheses.

    Returns:
        Tokens (rows, `max_length`), padded after the end; and their scores (rows,).
    """
    rows = np.arange(num_rows)
    prefixes = np.full((num_rows, beam_size, max_length + 1), PAD, dtype="int32")
    prefixes[:, :, 0] = START
    scores = np.full((num_rows, beam_size), -np.inf)
    scores[:, 0] = 0.0  # the prefixes are still the same: only one of them counts
    best, best_scores = prefixes[:, 0].copy(), np.full(num_rows, -np.inf)

    for length in range(1, max_length + 1):
        candidates = scores[:, :, None] + next_log_probabilities(prefixes[:, :, :length])
        vocabulary = candidates.shape[-1]
        candidates = candidates.reshape(num_rows, -1)
        chosen = np.argsort(-candidates, axis=1, kind="stable")[:, :beam_size]
        scores = np.take_along_axis(candidates, chosen, axis=1)
        parents, tokens = np.divmod(chosen, vocabulary)
        prefixes = prefixes[rows[:, None], parents]
        prefixes[:, :, length] = tokens

        finished = (tokens == END) | (length == max_length)
        final_scores = np.where(finished, scores / _penalty(length, length_penalty), -np.inf)
        first = np.argmax(final_scores, axis=1)
        better = final_scores[rows, first] > best_scores
        best[better] = prefixes[rows, first][better]
        best_scores[better] = final_scores[rows, first][better]

        scores = np.where(finished, -np.inf, scores)
        # A log probability only falls, and the longest hypothesis has the largest penalty to divide by.
        if np.all(scores.max(axis=1) / _penalty(max_length, length_penalty) <= best_scores):
            break
    return best[:, 1:], best_scores


def _penalty(length: int, exponent: float) -> float:
    return ((5 + length) / 6) ** exponent


class Translator:
    """Translates sentences with a model of `translation_transformer`.

    Args:
        model: the model, trained. The encoder runs once for each sentence, the decoder once for each token.
        tokenizer: the tokenizer of its training.
        rows: sentences to translate at once.
    """

    def __init__(self, model: keras.Model, tokenizer: sentencepiece.SentencePieceProcessor, rows: int = 64) -> None:
        source, target = model.inputs
        memory = model.get_layer("encoder_norm").output
        self.tokenizer = tokenizer
        self.rows = rows
        self.length = source.shape[1]
        self._encoder = tf.function(keras.Model(source, memory), reduce_retracing=True)
        self._decoder = tf.function(self._next_log_probabilities, reduce_retracing=True)
        self._decoder_model = keras.Model([source, memory, target], model.output)

    def _next_log_probabilities(self, source, memory, prefixes, length):
        logits = self._decoder_model([source, memory, prefixes], training=False)
        return tf.nn.log_softmax(logits[:, length - 1])

    def __call__(self, sentences: Sequence[str], beam_size: int = 4, length_penalty: float = 0.6) -> list[str]:
        """Returns the translations of sentences, in their order."""
        sources = pad(self.tokenizer.encode(list(sentences)), self.length, end=True)
        order = np.argsort((sources != PAD).sum(axis=1), kind="stable")  # sentences of like length end together
        translations = [""] * len(sentences)
        for part in np.array_split(order, math.ceil(len(order) / self.rows)):
            tokens = self._search(sources[part], beam_size, length_penalty)
            for index, row in zip(part, tokens, strict=True):
                translations[index] = self.tokenizer.decode([int(token) for token in row if token not in (PAD, END)])
        return translations

    def _search(self, sources: np.ndarray, beam_size: int, length_penalty: float) -> np.ndarray:
        source = np.repeat(sources, beam_size, axis=0)
        memory = tf.repeat(self._encoder(sources), beam_size, axis=0)

        def next_log_probabilities(prefixes: np.ndarray) -> np.ndarray:
            length = prefixes.shape[-1]
            flat = pad(prefixes.reshape(-1, length), self.length)
            return self._decoder(source, memory, flat, tf.constant(length)).numpy().reshape(*prefixes.shape[:2], -1)

        options = {"max_length": self.length, "beam_size": beam_size, "length_penalty": length_penalty}
        return beam_search(next_log_probabilities, len(sources), **options)[0]


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu, in per cent."""
    return sacrebleu.corpus_bleu(hypotheses, [references]).score
