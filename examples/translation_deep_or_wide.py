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
import sys

from translation import data, decoding, training

import tf_gpipe

MODELS = {"deep": (6, 256, 2), "wide": (3, 512, 4)}  # L, H and A
QUICK_MODELS = {"deep": (2, 32, 1), "wide": (1, 64, 2)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares a deep and a wide Transformer with equal parameters.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=64, help="pairs in a mini-batch")
    parser.add_argument("--test-pairs", type=int, default=200, help="most pairs of either group to translate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny models, three languages and a few steps")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    models, languages, vocabulary, width = MODELS, data.LANGUAGES, 2000, 128
    if arguments.quick:
        models, languages, vocabulary, width = QUICK_MODELS, ("de", "lb", "nl"), 500, 32
        arguments.steps, arguments.rows, arguments.test_pairs = 8, 32, 8
    corpus = data.load_corpus(languages, vocabulary)
    low = [pair for pair in corpus.held_out if pair.language in data.LOW_RESOURCE]
    high = [pair for pair in corpus.held_out if pair.language not in data.LOW_RESOURCE]

    results = []
    for name, (layers, hidden, heads) in models.items():
        print(f"{name}: T({layers}, {hidden}, {heads})")
        model = training.compiled_model(
            tf_gpipe.GPipeStrategy(arguments.stages, arguments.micro_batches),
            corpus,
            layers=layers,
            hidden=hidden,
            heads=heads,
            width=width,
            seed=arguments.seed,
        )
        training.fit(model, corpus, rows=arguments.rows, steps=arguments.steps // 4, seed=arguments.seed, epochs=4)
        translator = decoding.Translator(model, corpus.tokenizer)
        scores = []
        for pairs in (high, low):
            loss = training.held_out_loss(model, corpus, pairs)
            bleu = training.held_out_bleu(translator, data.every(pairs, arguments.test_pairs), beam_size=4)
            scores.append(f"{loss:8.2f} {bleu:9.1f}")
        results.append(f"{name} {model.count_params():12,} {scores[0]} {scores[1]}")

    print("model  parameters loss high BLEU high loss low  BLEU low")
    print(*results, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
