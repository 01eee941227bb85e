"""What the three scripts share: the loss, the learning rate, a model that is ready to train, and its scores."""

import time
from collections.abc import Sequence

import keras

import tf_gpipe
from translation import data, decoding
from translation.model import translation_transformer


@keras.saving.register_keras_serializable("translation")
class SmoothedCrossEntropy(keras.losses.Loss):
    """Cross-entropy of the next token against its label, which is taken to be wrong with a small probability.

    A label's share is 1 − `label_smoothing`; the rest is spread evenly over the vocabulary. The loss is the mean over
    the tokens of the mini-batch, where the sample weights are 1 for tokens and 0 for padding.

    Args:
        label_smoothing: from 0, for none, to 1.
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        reduction: str = "mean_with_sample_weight",
        name: str = "smoothed_cross_entropy",
        **kwargs,
    ) -> None:
        super().__init__(reduction=reduction, name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        """Returns the loss of each token, (rows, tokens), for labels (rows, tokens) and logits."""
        of_label = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        of_any = keras.ops.logsumexp(y_pred, axis=-1) - keras.ops.mean(y_pred, axis=-1)
        return (1 - self.label_smoothing) * of_label + self.label_smoothing * of_any

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}


@keras.saving.register_keras_serializable("translation")
class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises linearly to its peak, and then falls with the root of the number of steps.

    Args:
        peak: the highest rate.
        warmup_steps: after how many steps it is reached.
    """

    def __init__(self, peak: float, warmup_steps: int) -> None:
        self.peak = peak
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        """Returns the rate of a step; the first step is 0."""
        progress = (keras.ops.cast(step, "float32") + 1) / self.warmup_steps
        return self.peak * keras.ops.minimum(progress, keras.ops.rsqrt(progress))

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {"peak": self.peak, "warmup_steps": self.warmup_steps}


class StopAfter(keras.callbacks.Callback):
    """Ends the training when its time is up, in the middle of an epoch if need be.

    Args:
        minutes: how long to train.
    """

    def __init__(self, minutes: float) -> None:
        super().__init__()
        self.seconds = 60 * minutes

    def on_train_begin(self, logs=None) -> None:
        """Notes the time."""
        self.end = time.monotonic() + self.seconds

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Stops when it is later."""
        if time.monotonic() > self.end:
            self.model.stop_training = True


def compiled_model(
    strategy: tf_gpipe.GPipeStrategy,
    corpus: data.Corpus,
    *,
    layers: int,
    hidden: int,
    heads: int,
    width: int,
    seed: int,
) -> keras.Model:
    """T(layers, hidden, heads) for a corpus, with its optimizer, loss and metric.

    Heads are 32 wide, half as wide as the paper's. Source and target share a table of the vocabulary. The metric "nll"
    is the negative log likelihood of a token, without label smoothing.

    Args:
        strategy: the pipeline to train in.
        corpus: says how many tokens there are, and how many in a row.
        layers: L, blocks in the encoder, and as many in the decoder.
        hidden: H, width of the feed-forward layers.
        heads: A, attention heads.
        width: of the states between blocks.
        seed: the same seed makes the same initial weights and dropout masks.
    """
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = translation_transformer(
            layers,
            hidden,
            heads,
            width=width,
            head_dim=32,
            vocabulary=corpus.tokenizer.get_piece_size(),
            tables=2,
            length=corpus.length,
            dropout=0.3,  # there is little text
            logit_clip=30.0,
        )
        model.compile(
            keras.optimizers.Adam(InverseSquareRoot(peak=2e-3, warmup_steps=200), beta_2=0.98),
            SmoothedCrossEntropy(),
            weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="nll", from_logits=True)],
        )
    return model


def fit(
    model: keras.Model,
    corpus: data.Corpus,
    *,
    rows: int,
    steps: int,
    seed: int,
    temperature: float = 5.0,
    epochs: int = 1,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> None:
    """Trains a model on mini-batches of `rows` pairs, `steps` of them in each epoch; prints a line for each epoch."""
    batches = data.training_batches(
        corpus.train, corpus.tokenizer, rows=rows, length=corpus.length, temperature=temperature, seed=seed
    )
    # The pairs are shuffled already; Keras would warn that it cannot do it.
    model.fit(batches, epochs=epochs, steps_per_epoch=steps, shuffle=False, callbacks=list(callbacks), verbose=2)


def held_out_loss(model: keras.Model, corpus: data.Corpus, pairs: Sequence[data.Pair], rows: int = 128) -> float:
    """The negative log likelihood of a token of the pairs' English sides, in mini-batches of `rows`."""
    x, y, weights = data.tokenize(pairs, corpus.tokenizer, corpus.length).keras
    return model.evaluate(x, y, rows, verbose=0, sample_weight=weights, return_dict=True)["nll"]


def held_out_bleu(translator: decoding.Translator, pairs: Sequence[data.Pair], beam_size: int) -> float:
    """BLEU of the translations of the pairs."""
    hypotheses = translator([pair.source for pair in pairs], beam_size)
    return decoding.bleu(hypotheses, [pair.english for pair in pairs])
