"""Larger mini-batches by more micro-batches: table 5 of the GPipe paper, in small.

The paper (arXiv:1811.06965, section 5) translates better the larger the mini-batch: 260 thousand, 1 and 4 million
tokens. In a pipeline a mini-batch grows with the number of micro-batches M, while the rows of a micro-batch, and with
them the memory of a stage's activations, stay the same. Here M is 1, 4 and 16, with 16 rows of 24 tokens in each
micro-batch. Every training has the same number of steps, so that a larger mini-batch also sees more text, and the same
learning rates. The text is Django's messages in 20 languages.

    python examples/translation_batch_size.py          # three times 400 steps
    python examples/translation_batch_size.py --micro-batches 4 8 --steps 800
    python examples/translation_batch_size.py --quick  # a tiny model and a few steps, for the tests

The script prints a line of progress for each quarter of a training; then, for each M, the tokens of a mini-batch
(padding included), and the negative log likelihood of a token and BLEU on messages that were held out. The first steps
show the difference in the loss already; this is the end of a run with --steps 80 --test-pairs 100:

      M tokens/batch   loss   BLEU
      1          384   5.61    0.0
      4        1,536   5.47    0.0
     16        6,144   5.28    0.0
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import flags
from translation import comparison
from translation.model import most_stages

import tf_gpipe

SIZES = {"layers": 2, "hidden": 512, "heads": 4, "width": 128}
QUICK_SIZES = {"layers": 1, "hidden": 64, "heads": 2, "width": 32}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = comparison.make_parser("Trains a Transformer at several batch sizes, by micro-batches.")
    count = flags.whole(at_least=1)
    parser.add_argument("--micro-batches", type=count, nargs="+", default=[1, 4, 16], help="a training for each M")
    parser.add_argument("--rows", type=count, default=16, help="pairs in a micro-batch")
    arguments = comparison.parse(parser, argv)
    arguments.sizes = QUICK_SIZES if arguments.quick else SIZES
    if arguments.quick:
        warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)  # one layer on two stages
        arguments.micro_batches = [1, 2, 4]
    flags.check_stages(parser, arguments.stages, most_stages(arguments.sizes["layers"]))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    corpus = comparison.load_corpus(arguments)

    results, bleus = [], []
    for num_micro_batches in arguments.micro_batches:
        rows = num_micro_batches * arguments.rows
        print(f"{num_micro_batches} micro-batches of {arguments.rows} rows")
        model = comparison.train(arguments, corpus, arguments.sizes, num_micro_batches, rows)
        [(loss, bleu)] = comparison.scores(arguments, corpus, model, [corpus.held_out])
        bleus.append(bleu)
        results.append(f"{num_micro_batches:3} {rows * corpus.length:12,} {loss:6.2f} {bleu:6.1f}")

    print("  M tokens/batch   loss   BLEU")
    print(*results, sep="\n")
    comparison.tell_if_too_short(arguments, bleus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
