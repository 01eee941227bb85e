"""The multilingual translation model of the GPipe paper, small, on real text: 20 languages into English.

T(L, H, A) is a Transformer with L encoder and L decoder blocks, H wide feed-forward layers and A attention heads (the
GPipe paper, arXiv:1811.06965, section 5). The text is that of Django's message catalogues, with twenty to eight hundred
messages in each of 20 languages, so that nothing is downloaded. One English message in ten is held out, in all
languages.

    python examples/translation_transformer.py          # 4 stages, 4 micro-batches
    python examples/translation_transformer.py --stages 2 --micro-batches 8 --minutes 3
    python examples/translation_transformer.py --languages all --vocabulary 8000 --minutes 60
    python examples/translation_transformer.py --quick  # a tiny model and a few steps, for the tests
    python examples/translation_transformer.py --plan --layers 64 --hidden 16384 --heads 32 --stages 16
    python examples/translation_transformer.py --plan --language-model --layers 103 --stages 8

The stages run on logical CPU devices of this machine. The script prints the plan (which blocks each stage holds),
Keras's own lines of progress, and how well held-out messages are translated: the negative log likelihood of a token,
BLEU, and the BLEU of a source that is merely copied; then a few translations, each with its source before it and the
right one behind it. After 5.2 minutes of training (--minutes 5.2, in the fifth epoch), on two cores that other programs
used at the same time:

    negative log likelihood of a held-out token 3.49
    BLEU 23.7, of the copied source 25.0

The copy owes its score to format strings and markup, which nobody has to translate: it has 51.7 on messages that
contain some, and 1.7 on the others. The model sees only 728 different English sentences, and soon knows them by heart
(0.97 for a token of the training part).

With `--plan` the script only shows how a model of the paper is cut, T(L, H, A) of width 1,024 with 64,000 tokens or the
language model Transformer-L; no memory is allocated for it. The first of the two above has 6,102,188,032 parameters.
"""

import argparse
import sys

from translation import data, decoding, training
from translation.model import language_transformer, shapes_only, translation_transformer

import tf_gpipe

SAMPLES = 6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a translation Transformer, in a pipeline on logical CPUs.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4, help="L: encoder blocks, and as many decoder blocks")
    parser.add_argument("--hidden", type=int, default=512, help="H: width of the feed-forward layers")
    parser.add_argument("--heads", type=int, default=4, help="A: attention heads")
    parser.add_argument("--width", type=int, default=128, help="of the model, not with --plan")
    parser.add_argument("--vocabulary", type=int, default=2000, help="number of tokens, not with --plan")
    parser.add_argument("--languages", nargs="+", default=data.LANGUAGES, help="such as de nl; or all")
    parser.add_argument("--temperature", type=float, default=5.0, help="of the sampling of languages; 1: as they are")
    parser.add_argument("--batch-tokens", type=int, default=1536, help="padding included")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0, help="most time to train")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--test-pairs", type=int, default=400, help="most held-out messages to translate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="store_true", help="only show how a model of the paper is cut")
    parser.add_argument("--language-model", action="store_true", help="with --plan: of the language model")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three languages and a few steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.languages, arguments.layers, arguments.vocabulary = ("de", "lb", "nl"), 1, 500
        arguments.width, arguments.hidden, arguments.heads, arguments.stages = 32, 64, 2, 2
        arguments.batch_tokens, arguments.epochs, arguments.test_pairs, arguments.beam = 1536, 1, 8, 2
    return arguments


def show_plan(arguments: argparse.Namespace, strategy: tf_gpipe.GPipeStrategy) -> None:
    with shapes_only():
        with strategy.scope():
            if arguments.language_model:
                model = language_transformer(arguments.layers)
            else:
                model = translation_transformer(arguments.layers, arguments.hidden, arguments.heads)
        print(strategy.plan(model))
        print(f"{model.count_params():,} parameters")


def main() -> int:
    arguments = parse_arguments()
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    strategy = tf_gpipe.GPipeStrategy(arguments.stages, arguments.micro_batches)
    if arguments.plan:
        show_plan(arguments, strategy)
        return 0

    languages = data.languages() if arguments.languages == ["all"] else arguments.languages
    corpus = data.load_corpus(languages, arguments.vocabulary)
    rows = arguments.batch_tokens // corpus.length
    print(f"{len(corpus.train):,} pairs of {len(languages)} languages, {len(corpus.held_out):,} held out")
    model = training.compiled_model(
        strategy,
        corpus,
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        width=arguments.width,
        seed=arguments.seed,
    )
    print(strategy.plan(model))
    training.fit(
        model,
        corpus,
        rows=rows,
        steps=len(corpus.train) // rows,
        seed=arguments.seed,
        temperature=arguments.temperature,
        epochs=arguments.epochs,
        callbacks=[training.StopAfter(arguments.minutes)],
    )

    loss = training.held_out_loss(model, corpus, corpus.held_out)
    print(f"negative log likelihood of a held-out token {loss:.2f}")
    pairs = data.every(corpus.held_out, arguments.test_pairs)
    sources, references = [pair.source for pair in pairs], [pair.english for pair in pairs]
    translations = decoding.Translator(model, corpus.tokenizer)(sources, arguments.beam)
    copied = decoding.bleu(sources, references)
    print(f"BLEU {decoding.bleu(translations, references):.1f}, of the copied source {copied:.1f}")
    for pair, translation in data.every(list(zip(pairs, translations, strict=True)), SAMPLES):
        print(f"{pair.language}: {pair.source} -> {translation} ({pair.english})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
