"""Deeper or wider, with the same number of parameters: a comparison of the GPipe paper, in small.

In the paper (arXiv:1811.06965, section 5), T(24, 8192, 16) and T(12, 16384, 32) have 1.3 billion parameters each, and
the deeper one translates better from languages with little text. Here T(6, 256, 2) and T(3, 512, 4) have 1.4 million
each besides the vocabulary, and train on the same mini-batches of the same text: Django's messages in 20 languages,
with languages of little text drawn more often than they come (temperature 5).

    python examples/translation_deep_or_wide.py          # both for 400 steps
    python examples/translation_deep_or_wide.py --steps 1000 --seed 1
    python examples/translation_deep_or_wide.py --quick  # tiny models and a few steps, for the tests

The script prints a line of progress for each quarter of a training; then, for each model, its number of parameters,
and the negative log likelihood of a token and BLEU on messages that were held out, for the 15 languages with hundreds
of messages ("high") and for the 5 others ("low").
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import flags
from translation import comparison, data
from translation.model import most_stages

import tf_gpipe

MODELS = {
    "deep": {"layers": 6, "hidden": 256, "heads": 2, "width": 128},
    "wide": {"layers": 3, "hidden": 512, "heads": 4, "width": 128},
}
QUICK_MODELS = {
    "deep": {"layers": 2, "hidden": 32, "heads": 1, "width": 32},
    "wide": {"layers": 1, "hidden": 64, "heads": 2, "width": 32},
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison.make_parser("Compares a deep and a wide Transformer with equal parameters.")
    count = flags.whole(at_least=1)
    parser.add_argument("--micro-batches", type=count, default=4, help="M")
    parser.add_argument("--rows", type=count, default=64, help="pairs in a mini-batch")
    arguments = comparison.parse(parser, argv)
    arguments.models = QUICK_MODELS if arguments.quick else MODELS
    if arguments.quick:
        warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)  # one layer on two stages
        arguments.rows = 32
    flags.check_stages(parser, arguments.stages, most_stages(min(size["layers"] for size in arguments.models.values())))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    corpus = comparison.load_corpus(arguments)
    low = [pair for pair in corpus.held_out if pair.language in data.LOW_RESOURCE]
    high = [pair for pair in corpus.held_out if pair.language not in data.LOW_RESOURCE]

    results, bleus = [], []
    for name, sizes in arguments.models.items():
        print(f"{name}: T({sizes['layers']}, {sizes['hidden']}, {sizes['heads']})")
        model = comparison.train(arguments, corpus, sizes, arguments.micro_batches, arguments.rows)
        scores = comparison.scores(arguments, corpus, model, [high, low])
        bleus += [bleu for _, bleu in scores]
        columns = "".join(f" {loss:8.2f} {bleu:9.1f}" for loss, bleu in scores)
        results.append(f"{name} {model.count_params():12,}{columns}")

    print("model  parameters loss high BLEU high loss low  BLEU low")
    print(*results, sep="\n")
    comparison.tell_if_too_short(arguments, bleus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
