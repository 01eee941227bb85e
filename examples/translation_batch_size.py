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
import sys

from translation import data, decoding, training

import tf_gpipe


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a Transformer at several batch sizes, by micro-batches.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rows", type=int, default=16, help="pairs in a micro-batch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--test-pairs", type=int, default=200, help="most held-out messages to translate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model, three languages and a few steps")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    languages, vocabulary, size = data.LANGUAGES, 2000, {"layers": 2, "hidden": 512, "heads": 4, "width": 128}
    if arguments.quick:
        languages, vocabulary, size = ("de", "lb", "nl"), 500, {"layers": 1, "hidden": 64, "heads": 2, "width": 32}
        arguments.micro_batches, arguments.steps, arguments.test_pairs = [1, 2, 4], 8, 8
    corpus = data.load_corpus(languages, vocabulary)

    results = []
    for num_micro_batches in arguments.micro_batches:
        rows = num_micro_batches * arguments.rows
        print(f"{num_micro_batches} micro-batches of {arguments.rows} rows")
        strategy = tf_gpipe.GPipeStrategy(arguments.stages, num_micro_batches)
        model = training.compiled_model(strategy, corpus, **size, seed=arguments.seed)
        training.fit(model, corpus, rows=rows, steps=arguments.steps // 4, seed=arguments.seed, epochs=4)
        translator = decoding.Translator(model, corpus.tokenizer)
        loss = training.held_out_loss(model, corpus, corpus.held_out)
        bleu = training.held_out_bleu(translator, data.every(corpus.held_out, arguments.test_pairs), beam_size=4)
        results.append(f"{num_micro_batches:3} {rows * corpus.length:12,} {loss:6.2f} {bleu:6.1f}")

    print("  M tokens/batch   loss   BLEU")
    print(*results, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
