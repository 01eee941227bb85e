"""What the two comparisons share (deep or wide, and the batch size): flags, text, a training and its scores."""

import argparse
from collections.abc import Sequence

import flags
import keras

import tf_gpipe
from translation import data, decoding, training

PARTS = 4  # of a training; each prints a line of progress
BEAM = 4


def make_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that both comparisons have."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(usage=flags.USAGE, description=description, formatter_class=defaults)
    count = flags.whole(at_least=1)
    parser.add_argument("--stages", type=count, default=2, help="K, each on a logical CPU")
    parser.add_argument("--steps", type=flags.whole(at_least=PARTS), default=400, help="of each training")
    parser.add_argument("--test-pairs", type=count, default=200, help="most held-out messages to translate at a time")
    parser.add_argument("--seed", type=flags.whole(at_least=0, below=2**32), default=0, help="of weights and data")
    parser.add_argument("--quick", action="store_true", help="tiny models, three languages and a few steps")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments of a script; --quick stands above --steps and --test-pairs."""
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.steps, arguments.test_pairs = 8, 8
    return arguments


def load_corpus(arguments: argparse.Namespace) -> data.Corpus:
    """Returns the text to train and test on: messages in 20 languages; in three with --quick."""
    return data.load_corpus(data.QUICK_LANGUAGES, 500) if arguments.quick else data.load_corpus()


def train(
    arguments: argparse.Namespace, corpus: data.Corpus, sizes: dict[str, int], num_micro_batches: int, rows: int
) -> keras.Model:
    """Trains a model for --steps mini-batches, the same ones for the same --seed and `rows`.

    Args:
        arguments: of the script.
        corpus: what to train on.
        sizes: `layers`, `hidden`, `heads` and `width`, as `training.compiled_model` takes them.
        num_micro_batches: M.
        rows: pairs in a mini-batch.
    """
    strategy = tf_gpipe.GPipeStrategy(arguments.stages, num_micro_batches)
    model = training.compiled_model(strategy, corpus, **sizes, seed=arguments.seed)
    training.fit(model, corpus, rows=rows, steps=arguments.steps // PARTS, seed=arguments.seed, epochs=PARTS)
    return model


def scores(
    arguments: argparse.Namespace, corpus: data.Corpus, model: keras.Model, groups: Sequence[Sequence[data.Pair]]
) -> list[tuple[float, float]]:
    """Returns for each group of pairs the negative log likelihood of a token, and BLEU.

    Args:
        arguments: of the script; of each group --test-pairs are translated.
        corpus: what the model was trained on.
        model: the model.
        groups: held-out pairs.
    """
    translator = decoding.Translator(model, corpus.tokenizer)
    return [
        (
            training.held_out_loss(model, corpus, pairs),
            training.held_out_bleu(translator, data.every(pairs, arguments.test_pairs), beam_size=BEAM),
        )
        for pairs in groups
    ]


def tell_if_too_short(arguments: argparse.Namespace, bleus: Sequence[float]) -> None:
    """Says so where the trainings were too short to learn, so that nobody takes the figures for the models'."""
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")
    elif min(bleus) < decoding.LEAST_BLEU:
        print(f"BLEU below {decoding.LEAST_BLEU:.0f}: too short to learn to translate; give it more --steps")
