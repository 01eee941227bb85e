"""What the first training step of a model warns of, once each, and what it shows while stages are traced."""

import io
import logging
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tf_gpipe
from tf_gpipe import advice, progress

GPipeWarning = tf_gpipe.GPipeWarning


def compiled(strategy, *middle, optimizer="sgd"):
    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), *middle], name="model")
        model.compile(optimizer, "mse")
    return model


def data(rows, columns=8):
    return np.ones([rows, 6], "float32"), np.ones([rows, columns], "float32")


def dense(count, units=8):
    return [layers.Dense(units, name=f"dense_{i}") for i in range(count)]


def told(call):
    """The texts of the warnings of this package that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GPipeWarning)
        call()
    return [str(one.message) for one in caught]


def fitted(model, rows, batch_size, **more):
    return lambda: model.fit(*data(rows, model.output_shape[-1]), batch_size=batch_size, verbose=0, **more)


def test_the_category_is_a_user_warning_that_can_be_silenced_by_its_name():
    assert GPipeWarning.__bases__ == (UserWarning,)
    model = compiled(tf_gpipe.GPipeStrategy(2, 8), *dense(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)
        fitted(model, 4, 4)()


def test_a_warning_is_at_the_users_line():
    model = compiled(tf_gpipe.GPipeStrategy(2, 8), *dense(2))
    with pytest.warns(GPipeWarning) as seen:
        model.fit(*data(4), batch_size=4, verbose=0)
    assert seen[0].filename == __file__


# --- rows ---


@pytest.mark.parametrize("method", ["fit", "train_on_batch", "run"])
def test_fewer_rows_than_micro_batches(method):
    strategy = tf_gpipe.GPipeStrategy(2, 8)
    model = compiled(strategy, *dense(2))
    x, y = data(4)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x, training=True) - y))
        return tape.gradient(loss, model.trainable_variables)[0]

    calls = {
        "fit": fitted(model, 4, 4),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "run": lambda: strategy.run(step, args=(tf.constant(x), tf.constant(y))),
    }
    with pytest.warns(GPipeWarning) as caught:
        calls[method]()
    assert [str(one.message) for one in caught] == [
        "'model' trains on mini-batches of 4 rows, fewer than its 8 micro-batches, so that some have nothing to do. "
        "Train on at least 8 rows, or set num_micro_batches=4."
    ]
    assert told(calls[method]) == [], "says it once"


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # of Keras, at the end of any generator
@pytest.mark.parametrize("kind", ["arrays", "dataset", "generator"])
def test_rows_that_only_the_data_tell(kind):
    """The graph of a step knows no number of rows where the last batch has fewer."""
    model = compiled(tf_gpipe.GPipeStrategy(2, 8), *dense(2))
    x, y = data(9)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).prefetch(1)
    batches = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8))
    arguments = {"arrays": (x, y, 4), "dataset": (dataset,), "generator": (batches,)}[kind]
    with pytest.warns(GPipeWarning, match="trains on mini-batches of 4 rows, fewer than its 8 micro-batches"):
        model.fit(*arguments, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("rows", "batch_size", "more"),
    [(33, 16, {}), (16, 8, {}), (8, 8, {"validation_data": data(2)}), (17, 16, {"epochs": 2})],
    ids=["a remainder", "as many", "validation", "a remainder of each epoch"],
)
def test_no_word_of_rows(rows, batch_size, more):
    model = compiled(tf_gpipe.GPipeStrategy(2, 8), *dense(2))
    assert told(fitted(model, rows, batch_size, **more)) == []


def test_no_word_while_nothing_is_trained():
    strategy = tf_gpipe.GPipeStrategy(4, 8)
    model = compiled(strategy, layers.Dense(100, name="wide"), layers.BatchNormalization(), layers.Dense(1))
    x, y = data(4, 1)

    def all_but_training():
        strategy.plan(model)
        strategy.place(model)
        model.predict(x, verbose=0)
        model.evaluate(x, y, verbose=0)
        strategy.run(model, args=(tf.constant(x),))

    assert told(all_but_training) == []
    assert len(told(fitted(model, 4, 4))) == 3, "devices, rows and batch norm"


# --- batch norm ---


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 4)])
def test_batch_norm_with_few_rows(stages, micro_batches):
    middle = [layers.Dense(8), layers.BatchNormalization(name="first"), layers.BatchNormalization(name="second")]
    model = compiled(tf_gpipe.GPipeStrategy(stages, micro_batches), *middle, layers.Dense(8))
    with pytest.warns(GPipeWarning, match="^Batch norm in 'model'") as caught:
        fitted(model, 31, 31)()
    assert [str(one.message) for one in caught] == [
        "Batch norm in 'model' ('first' and 1 more) normalises each micro-batch by itself, and 31 rows in 4 "
        "micro-batches leave 7 for each: their statistics are noisy. Train on at least 32 rows, set a smaller "
        "num_micro_batches, or use another normalisation."
    ]
    assert told(fitted(model, 31, 31)) == [], "says it once"


@pytest.mark.parametrize(
    ("micro_batches", "rows", "layer"),
    [
        (4, 32, layers.BatchNormalization()),
        (1, 4, layers.BatchNormalization()),
        (4, 16, layers.BatchNormalization(trainable=False)),
        (4, 16, layers.LayerNormalization()),
    ],
    ids=["enough rows", "one micro-batch", "frozen", "another normalisation"],
)
def test_no_word_of_batch_norm(micro_batches, rows, layer):
    model = compiled(tf_gpipe.GPipeStrategy(2, micro_batches), layers.Dense(8), layer, layers.Dense(8))
    assert told(fitted(model, rows, rows)) == []


# --- balance ---


def test_an_operation_that_cannot_be_cut():
    middle = [layers.Dense(100, name="wide"), layers.Dense(4, name="a"), layers.Dense(4, name="b")]
    strategy = tf_gpipe.GPipeStrategy(3, 2)
    model = compiled(strategy, *middle)
    with pytest.warns(GPipeWarning) as caught:
        fitted(model, 16, 16)()
    loads = [stage.flops for stage in strategy.plan(model).stages]
    share = loads[0] / sum(loads)
    assert 0.5 < share < 0.7
    assert [str(one.message) for one in caught] == [
        f"The stages of 'model' are uneven (balance {1 / 3 / share:.2f}, where 1.00 is best), so that devices wait for "
        f"stage 0. 'wide' alone has {share:.0%} of the work, where an even stage has 33%, and an operation is never "
        "cut. Make it of several smaller layers, or set a smaller num_stages."
    ]
    assert told(fitted(model, 16, 16)) == [], "says it once"


@pytest.mark.parametrize(
    ("partition", "count", "advice"),
    [("flops", 5, "Set a smaller num_stages, or make"), ([2, 1, 1, 1], 5, "Leave out `partition`")],
)
def test_other_uneven_stages(partition, count, advice):
    model = compiled(tf_gpipe.GPipeStrategy(4, 2, partition=partition), *dense(count))
    (text,) = told(fitted(model, 16, 16))
    assert text.startswith("The stages of 'model' are uneven (balance 0.6")
    assert advice in text


def test_a_model_that_was_placed_before_it_was_frozen():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = compiled(strategy, *dense(8))
    assert told(fitted(model, 32, 32)) == []
    for layer in model.layers[:7]:
        layer.trainable = False
    with strategy.scope():
        model.compile("sgd", "mse")
    (text,) = told(fitted(model, 32, 32))
    assert "Its weights stay where they were placed; cut anew, its balance would be" in text
    assert "Save the model, and load it inside `strategy.scope()`" in text


def test_devices_without_work():
    model = compiled(tf_gpipe.GPipeStrategy(4, 2), *dense(2))
    with pytest.warns(GPipeWarning) as caught:
        fitted(model, 16, 16)()
    assert [str(one.message) for one in caught] == [
        "'model' has no work for CPU:2, CPU:3: its 2 operations make 2 of 4 stages. Set num_stages=2, or make the "
        "model of more layers, since a layer is never cut."
    ]
    assert told(fitted(model, 16, 16)) == [], "says it once"


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 4)])
def test_no_word_of_even_stages(stages, count):
    layers_of_equal_work = [layers.Dense(6) for _ in range(count)]
    model = compiled(tf_gpipe.GPipeStrategy(stages, 2), *layers_of_equal_work)
    assert told(fitted(model, 16, 16)) == []


def test_each_model_is_told_of_its_own():
    strategy = tf_gpipe.GPipeStrategy(2, 8)
    texts = [told(fitted(compiled(strategy, *dense(2)), 4, 4)) for _ in range(2)]
    assert [len(one) for one in texts] == [1, 1]
    assert advice.LEAST_ROWS == 8
    assert advice.LEAST_BALANCE == 0.8


# --- what is shown while stages are traced ---


class Screen(io.StringIO):
    """Stands for standard output, on a terminal or not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def impatient(monkeypatch):
    """Tracing takes long from its first moment."""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)


def shown(monkeypatch, call, terminal=False):
    """What a call writes on the screen."""
    monkeypatch.setattr(sys, "stdout", screen := Screen(terminal))
    try:
        call()
    finally:
        monkeypatch.undo()
    return screen.getvalue()


def slow(strategy=None):
    return compiled(strategy or tf_gpipe.GPipeStrategy(3, 2), *dense(3))


LINES = [f"tracing stage {k} of 3" for k in (1, 2, 3)]


def test_each_stage_has_a_line_before_the_progress_bar(monkeypatch, impatient):
    model = slow()
    text = shown(monkeypatch, lambda: model.fit(*data(16), epochs=2, verbose=1, validation_data=data(16)))
    before, _, after = text.partition("1/1")
    assert [line.strip() for line in before.splitlines()][:4] == ["Epoch 1/2", *LINES]
    assert "tracing" not in after
    assert "tracing" not in shown(monkeypatch, lambda: model.fit(*data(16), verbose=1)), "nothing is traced again"


def test_one_line_is_written_over_on_a_terminal_and_left_empty(monkeypatch, impatient):
    model = slow()
    text = shown(
        monkeypatch, lambda: model.fit(*data(16), epochs=2, verbose=1, validation_data=data(16)), terminal=True
    )
    lines = text.split("\n")
    assert lines[0] == "Epoch 1/2"
    parts = lines[1].split("\r")
    traced = [part for part in parts if part.startswith("tracing")]
    assert traced[:3] == LINES
    assert parts[: len(traced) + 3] == ["", *traced, " " * len(LINES[0]), ""]
    assert "1/1" in parts[len(traced) + 3]
    assert text.count("tracing") == len(traced)


@pytest.mark.parametrize("how", ["verbose=0", "on_batch", "fast", "no interactive logging"])
def test_nothing_is_shown(monkeypatch, how):
    monkeypatch.setattr(progress, "PATIENCE", 600.0 if how == "fast" else -1.0)
    model, (x, y) = slow(), data(16)
    if how == "no interactive logging":
        keras.config.disable_interactive_logging()
    try:
        if how == "on_batch":
            text = shown(monkeypatch, lambda: model.train_on_batch(x, y))
        else:
            text = shown(monkeypatch, lambda: model.fit(x, y, verbose=0 if how == "verbose=0" else 1))
    finally:
        keras.config.enable_interactive_logging()
    assert "tracing" not in text


@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_a_first_prediction_is_told_of_too(monkeypatch, impatient, method):
    model = slow()
    arguments = data(16) if method == "evaluate" else data(16)[:1]
    text = shown(monkeypatch, lambda: getattr(model, method)(*arguments, verbose=2))
    assert text.splitlines()[:3] == LINES


def test_logging_has_the_lines_of_every_program(monkeypatch, impatient, caplog):
    strategy = tf_gpipe.GPipeStrategy(3, 2)
    model = slow(strategy)
    with caplog.at_level(logging.INFO, logger="tf_gpipe"):
        strategy.run(model, args=(tf.constant(data(16)[0]),))
    assert [record.getMessage() for record in caplog.records if record.name == "tf_gpipe"] == LINES


def test_only_a_step_that_takes_long_is_told_of():
    assert progress.PATIENCE == 3.0
    line = progress._Line()
    assert time.monotonic() - line.began < 3.0


def test_nothing_is_left_after_a_step():
    strategy = tf_gpipe.GPipeStrategy(3, 2)
    with pytest.raises(KeyError, match="mine"):
        strategy.run(lambda: {}["mine"])
    assert progress._thread.line is None
