"""The multilingual translation model of the GPipe paper, small, on real text: 20 languages into English.

T(L, H, A) is a Transformer with L encoder and L decoder blocks, H wide feed-forward layers and A attention heads (the
GPipe paper, arXiv:1811.06965, section 5). The text is that of Django's message catalogues, with twenty to eight hundred
messages in each of 20 languages, so that nothing is downloaded. One English message in ten is held out, in all
languages.

    python examples/translation_transformer.py          # 4 stages, 4 micro-batches
    python examples/translation_transformer.py --stages 2 --micro-batches 8 --minutes 3
    python examples/translation_transformer.py --languages all --vocabulary 8000 --minutes 60
    python examples/translation_transformer.py --quick  # a tiny model and a few steps, for the tests
    python examples/translation_transformer.py --plan   # how the paper's T(24, 8192, 16) is cut
    python examples/translation_transformer.py --plan --layers 64 --hidden 16384 --heads 32 --stages 16
    python examples/translation_transformer.py --plan --language-model --stages 8

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

With `--plan` the script only shows how a model is cut; no memory is allocated for it. Sizes that are not given are then
the paper's: T(24, 8192, 16) of width 1,024 with 64,000 tokens, or the language model Transformer-103. The second plan
above has 6,102,188,032 parameters.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import flags
import keras
from shapes import count_parameters, shapes_only
from translation import data, decoding, training
from translation.model import language_transformer, most_stages, translation_transformer

import tf_gpipe

SAMPLES = 6

SIZES = {
    "layers": "L: encoder blocks, and as many decoder blocks",
    "hidden": "H: width of the feed-forward layers",
    "heads": "A: attention heads",
    "width": "of the states between blocks",
    "vocabulary": "number of tokens",
}
SMALL = {"layers": 4, "hidden": 512, "heads": 4, "width": 128, "vocabulary": 2000}
QUICK = {"layers": 1, "hidden": 64, "heads": 2, "width": 32, "vocabulary": 500}
PAPER = {"layers": 24, "hidden": 8192, "heads": 16, "width": 1024, "vocabulary": 64_000}
LANGUAGE_MODEL = {"layers": 103, "hidden": 8192, "heads": 16, "width": 2048, "vocabulary": 32_000}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=flags.USAGE,
        description="Trains a translation Transformer, in a pipeline on logical CPUs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = flags.whole(at_least=1)
    parser.add_argument("--stages", type=count, default=4, help="K, each on a logical CPU")
    parser.add_argument("--micro-batches", type=count, default=4, help="M")
    for name, meaning in SIZES.items():
        kind = flags.whole(at_least=2, a_multiple_of=2) if name == "width" else count
        defaults = f"{SMALL[name]}; with --plan {PAPER[name]}, or {LANGUAGE_MODEL[name]} of the language model"
        meaning = f"{meaning} (default: {defaults})"
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=meaning)
    parser.add_argument("--languages", type=language, nargs="+", default=data.LANGUAGES, help="names, or all")
    temperature = "of the sampling of languages; 1: as they are"
    parser.add_argument("--temperature", type=flags.number(at_least=1), default=5.0, help=temperature)
    tokens = flags.whole(at_least=data.LENGTH)
    parser.add_argument("--batch-tokens", type=tokens, default=1536, help="padding included")
    parser.add_argument("--epochs", type=count, default=8, help="passes over the text")
    parser.add_argument("--minutes", type=flags.number(at_least=0), default=10.0, help="most time to train")
    parser.add_argument("--beam", type=count, default=4, help="translations kept in the search")
    parser.add_argument("--test-pairs", type=count, default=400, help="most held-out messages to translate")
    parser.add_argument("--seed", type=flags.whole(at_least=0, below=2**32), default=0, help="of weights and data")
    parser.add_argument("--plan", action="store_true", help="only show how a model of the paper is cut")
    parser.add_argument("--language-model", action="store_true", help="with --plan: of the language model")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three languages and a few steps")
    return parser


def language(text: str) -> str:
    """The type of --languages."""
    if text != "all" and text not in data.languages():
        known = ", ".join(data.languages())
        raise argparse.ArgumentTypeError(f"Expected a language that Django has: {known}; or all. Received: {text!r}.")
    return text


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    arguments.languages = data.languages() if "all" in arguments.languages else list(dict.fromkeys(arguments.languages))
    if arguments.quick:
        warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)  # one layer on two stages
        arguments.languages, arguments.stages = data.QUICK_LANGUAGES, 2
        arguments.batch_tokens, arguments.epochs, arguments.test_pairs, arguments.beam = 1536, 1, 8, 2
    if arguments.language_model and not arguments.plan:
        parser.error("argument --language-model: Expected --plan with it, since only translation is trained.")
    arguments.sizes = sizes(arguments)
    heads, width = arguments.sizes["heads"], arguments.sizes["width"]
    if arguments.language_model and width % heads:
        parser.error(f"argument --heads: Expected a number that divides the width, {width}. Received: '{heads}'.")
    most = most_stages(arguments.sizes["layers"], language_model=arguments.language_model)
    flags.check_stages(parser, arguments.stages, most)
    return arguments


def sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """The sizes of the model: those that are given, and for the others those of a small model or of the paper's."""
    if arguments.quick:
        return dict(QUICK)
    defaults = LANGUAGE_MODEL if arguments.language_model else PAPER if arguments.plan else SMALL
    return {**defaults, **{name: value for name, value in vars(arguments).items() if name in SIZES}}


def show_plan(arguments: argparse.Namespace, strategy: tf_gpipe.GPipeStrategy) -> None:
    make = language_transformer if arguments.language_model else translation_transformer
    with shapes_only():
        with strategy.scope():
            model = make(**arguments.sizes)
        print(strategy.plan(model))
        print(f"{count_parameters(model):,} parameters")


def train(arguments: argparse.Namespace, strategy: tf_gpipe.GPipeStrategy, corpus: data.Corpus) -> keras.Model:
    size = {name: arguments.sizes[name] for name in ("layers", "hidden", "heads", "width")}
    model = training.compiled_model(strategy, corpus, **size, seed=arguments.seed)
    print(strategy.plan(model))
    rows = arguments.batch_tokens // corpus.length
    training.fit(
        model,
        corpus,
        rows=rows,
        steps=max(1, len(corpus.train) // rows),
        seed=arguments.seed,
        temperature=arguments.temperature,
        epochs=arguments.epochs,
        callbacks=[training.StopAfter(arguments.minutes)],
    )
    return model


def print_scores(arguments: argparse.Namespace, model: keras.Model, corpus: data.Corpus) -> None:
    loss = training.held_out_loss(model, corpus, corpus.held_out)
    print(f"negative log likelihood of a held-out token {loss:.2f}")
    pairs = data.every(corpus.held_out, arguments.test_pairs)
    sources, references = [pair.source for pair in pairs], [pair.english for pair in pairs]
    translations = decoding.Translator(model, corpus.tokenizer)(sources, arguments.beam)
    copied = decoding.bleu(sources, references)
    bleu = decoding.bleu(translations, references)
    print(f"BLEU {bleu:.1f}, of the copied source {copied:.1f}")
    for pair, translation in data.every(list(zip(pairs, translations, strict=True)), SAMPLES):
        print(f"{pair.language}: {pair.source} -> {translation} ({pair.english})")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")
    elif bleu < decoding.LEAST_BLEU:
        print(f"BLEU below {decoding.LEAST_BLEU:.0f}: too short to learn to translate; raise --epochs, --minutes")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parse_arguments(parser, argv)
    tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    strategy = tf_gpipe.GPipeStrategy(arguments.stages, arguments.micro_batches)
    if arguments.plan:
        show_plan(arguments, strategy)
        return 0
    with flags.errors_of_arguments(parser):
        corpus = data.load_corpus(arguments.languages, arguments.sizes["vocabulary"])
    num_languages = len(arguments.languages)
    print(f"{len(corpus.train):,} pairs of {num_languages} languages, {len(corpus.held_out):,} held out")
    model = train(arguments, strategy, corpus)
    print_scores(arguments, model, corpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
