"""Every way to train a model: steps and loops of one's own, subclassed models, freezing, batches of any size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train
from keras import layers, ops

import tf_gpipe
from tf_gpipe.errors import ModelError

ROWS = 10  # Of which 3 micro-batches get 4, 3 and 3.
X, Y = normal(ROWS, 6, seed=1), normal(ROWS, 2, seed=2)


def chain(name="chain"):
    x = keras.Input([6])
    y = layers.Dense(8, "tanh", name="first")(x)
    y = layers.Dense(8, "tanh", name="second")(y)
    return keras.Model(x, layers.Dense(2, name="third")(y), name=name)


def check(make, data=(X, Y), num_stages=3, num_micro_batches=3, *, partition="flops", **arguments):
    """Trains a model plainly and in stages; the results are equal and the loss moved. Returns both."""
    arguments = {"batch_size": ROWS, **arguments}
    plain = train(make, data, **arguments)
    strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, partition=partition)
    piped = train(make, data, strategy, **arguments)
    assert_same(plain, piped)
    assert len(set(next(iter(plain[1].values())))) > 1
    return plain[0], piped[0]


def both_ways(program, num_stages=3, num_micro_batches=3):
    """Runs `program(strategy)` without and with a strategy; it returns a model and numbers, which must be equal."""
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)):
        keras.utils.set_random_seed(0)
        found.append(program(strategy))
    (plain, expected), (piped, received) = found
    np.testing.assert_allclose(received, expected, rtol=2e-6, atol=1e-6)
    assert largest_difference(plain, piped) <= 1e-6
    return plain, piped


def run(strategy, function, *args):
    return strategy.run(function, args=args) if strategy is not None else function(*args)


def stage_scopes(graph):
    """Which `stage_k/micro_batch_m/kind` scopes a graph has operations in, as (k, kind)."""
    parts = [operation.name.split("/") for operation in graph.get_operations()]
    found = [
        (names[i], names[i + 2]) for names in parts for i in range(len(names) - 2) if names[i].startswith("stage_")
    ]
    return {(int(stage.removeprefix("stage_")), kind) for stage, kind in found}


# --- loops and steps of one's own ---


@pytest.mark.parametrize("compiled", [True, False], ids=["graph", "eager"])
def test_a_loop_of_ones_own(compiled):
    def program(strategy):
        with scope_of(strategy):
            model, optimizer = chain(), keras.optimizers.SGD(0.1)
        loss_fn = keras.losses.MeanSquaredError()

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
            return loss

        def train_step(x, y):
            return run(strategy, step, x, y)

        train_step = tf.function(train_step) if compiled else train_step
        return model, [float(train_step(tf.constant(X), tf.constant(Y))) for _ in range(3)]

    _, piped = both_ways(program)
    assert [w.value.device[-1] for w in piped.weights[::2]] == ["0", "1", "2"]


def test_gradients_of_inputs_flow_through_the_pipeline():
    x = tf.constant(X)
    strategy = tf_gpipe.GPipeStrategy(3, 3)
    keras.utils.set_random_seed(0)
    plain = chain()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        piped = chain()

    def slope(model):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = ops.sum(model(x) ** 2)
        return tape.gradient(loss, x)

    expected = slope(plain)
    received = strategy.run(slope, args=(piped,))
    assert float(ops.max(ops.abs(expected))) > 0.1
    np.testing.assert_allclose(received, expected, rtol=2e-6, atol=1e-6)


def test_a_model_called_outside_run_is_plain():
    strategy = tf_gpipe.GPipeStrategy(3, 3)
    with strategy.scope():
        model = chain()
    call = tf.function(lambda x: model(x))
    assert stage_scopes(call.get_concrete_function(tf.constant(X)).graph) == set()
    inside = tf.function(lambda x: strategy.run(model, args=(x,))).get_concrete_function(tf.constant(X))
    assert stage_scopes(inside.graph) == {(0, "forward"), (1, "forward"), (2, "forward")}
    np.testing.assert_allclose(inside(tf.constant(X)), model(X), rtol=1e-6, atol=1e-7)


def test_run_leaves_keras_as_it_was():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        model = chain()
    during = []

    def fails(x):
        during.append("__call__" in vars(keras.Model))
        model(x)
        raise ZeroDivisionError("of the user")

    assert "__call__" not in vars(keras.Model)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        strategy.run(fails, args=(tf.constant(X),))
    assert during == [True]
    assert "__call__" not in vars(keras.Model)


def test_a_model_of_another_scope_is_plain_inside_run():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        chain()
    other = chain("other")
    graph = tf.function(lambda x: strategy.run(other, args=(x,))).get_concrete_function(tf.constant(X)).graph
    assert stage_scopes(graph) == set()


class OwnStep(keras.Model):
    """A functional model with a train step that weighs its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = 3.0 * self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"tripled": loss}


def test_a_train_step_of_ones_own():
    def make():
        x = keras.Input([6])
        return OwnStep(x, layers.Dense(2)(layers.Dense(5, "tanh")(layers.Dense(5, "tanh")(x))))

    check(make)


# --- two models in one step ---


class UnusedCall(keras.Model):
    """Its call cannot be followed, and its train step never uses it."""

    def call(self, x):
        return tf.math.bincount(tf.cast(self.part(x), "int32"))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.part(x, training=True) - y))
        weights = self.part.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"value": loss}


class GAN(keras.Model):
    """A generator and a discriminator that are trained in one step, each with its optimizer."""

    def __init__(self):
        super().__init__()
        noise, point = keras.Input([4]), keras.Input([2])
        hidden = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(noise))
        self.generator = keras.Model(noise, layers.Dense(2)(hidden), name="generator")
        hidden = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(point))
        self.discriminator = keras.Model(point, layers.Dense(1)(hidden), name="discriminator")

    def compile(self):
        super().compile()
        self.g_optimizer, self.d_optimizer = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        noise, real = data
        fake = self.generator(noise, training=True)
        labels = ops.concatenate([ops.ones_like(real[:, :1]), ops.zeros_like(fake[:, :1])])
        with tf.GradientTape() as tape:
            logits = self.discriminator(ops.concatenate([real, fake]), training=True)
            d_loss = self.loss_fn(labels, logits)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(ops.ones_like(logits), logits)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d": d_loss, "g": g_loss}


def test_a_gan():
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            gan = GAN()
            gan.compile()
        before = gan.generator.get_weights()
        history = gan.fit(normal(ROWS, 4), Y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0).history
        assert all(np.any(old != new) for old, new in zip(before, gan.generator.get_weights(), strict=True))
        found.append((gan, history))
    assert_same(*found)
    devices = [w.value.device[-1] for w in found[1][0].discriminator.weights[::2]]
    assert devices == ["0", "1", "2"]


def test_a_model_whose_call_is_never_used():
    def make():
        model = UnusedCall()
        model.part = chain("part")
        return model

    check(make)


class Distiller(keras.Model):
    """A student that learns from a frozen teacher; both are called in one step."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(self.teacher(x) - y_pred)) + super().compute_loss(x, y, y_pred, sample_weight)


def test_distillation_from_a_frozen_teacher():
    plain, piped = check(lambda: Distiller(chain("student"), chain("teacher")))
    assert largest_difference(plain.teacher, piped.teacher) == 0


# --- freezing ---


def test_freezing_and_thawing():
    def program(strategy):
        with scope_of(strategy):
            model = chain()
        numbers = []
        for trainable in (False, True, False):
            with scope_of(strategy):
                model.get_layer("second").trainable = trainable
                model.compile(keras.optimizers.SGD(0.1), "mse")
            before = [w.copy() for w in model.get_layer("second").get_weights()]
            numbers += model.fit(X, Y, batch_size=ROWS, epochs=2, verbose=0).history["loss"]
            after = model.get_layer("second").get_weights()
            assert any(np.any(a != b) for a, b in zip(before, after, strict=True)) == trainable
        return model, numbers

    both_ways(program)


def test_a_frozen_first_stage_has_no_backward_pass():
    strategy = tf_gpipe.GPipeStrategy(3, 3, partition=[1, 1, 1])
    with strategy.scope():
        model = chain()
        model.get_layer("first").trainable = False
        optimizer = keras.optimizers.SGD(0.1)
    strategy.place(model)

    def step():
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(X, training=True) - Y))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))

    graph = tf.function(lambda: strategy.run(step)).get_concrete_function().graph
    backward = {stage for stage, kind in stage_scopes(graph) if kind == "backward"}
    assert backward == {1, 2}


def test_a_frozen_first_stage_trains_the_rest():
    def make():
        model = chain()
        model.get_layer("first").trainable = False
        return model

    _, piped = check(make, partition=[1, 1, 1])
    keras.utils.set_random_seed(0)
    initial = make()
    np.testing.assert_array_equal(initial.get_layer("first").kernel, piped.get_layer("first").kernel)
    assert np.any(initial.get_layer("second").get_weights()[0] != piped.get_layer("second").get_weights()[0])


def test_a_frozen_middle_stage_lets_gradients_through():
    def make():
        model = chain()
        model.get_layer("second").trainable = False
        return model

    check(make, partition=[1, 1, 1])


# --- subclassed models ---


class Subclassed(keras.Model):
    """Branches on the training flag, has a block of layers, and returns a nest."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.first = layers.Dense(8, "tanh")
        self.block = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(8, "tanh")])
        self.dropout = layers.Dropout(rate, seed=3)
        self.noisy = layers.Dense(8, "tanh")
        self.heads = [layers.Dense(2, name="a"), layers.Dense(1, name="b")]

    def call(self, x, training=False):
        x = self.block(self.first(x))
        if training:
            x = self.noisy(x) + x
        x = self.dropout(x)
        return {"a": self.heads[0](x), "more": {"b": self.heads[1](x)}}


def test_a_subclassed_model():
    y = {"a": Y, "more": {"b": Y[:, :1]}}
    compile = {"optimizer": "sgd", "loss": {"a": "mse", "more": {"b": "mae"}}}
    validation = (X[:7], {"a": Y[:7], "more": {"b": Y[:7, :1]}})
    plain, piped = check(Subclassed, (X, y), 4, 3, compile=compile, validation_data=validation)
    expected, received = plain.predict(X, verbose=0), piped.predict(X, verbose=0)
    assert received.keys() == expected.keys()
    np.testing.assert_allclose(received["more"]["b"], expected["more"]["b"], rtol=1e-6, atol=1e-6)
    assert {w.value.device[-1] for w in piped.weights} == {"0", "1", "2", "3"}


def test_a_subclassed_model_gets_its_training_flag():
    y = {"a": Y, "more": {"b": Y[:, :1]}}
    compile = {"optimizer": "sgd", "loss": {"a": "mse", "more": {"b": "mae"}}}
    validation = (X[:7], {"a": Y[:7], "more": {"b": Y[:7, :1]}})
    check(lambda: Subclassed(0.5), (X, y), 2, 1, compile=compile, validation_data=validation)


class TwoInputs(keras.Model):
    """Takes a dict."""

    def __init__(self):
        super().__init__()
        self.dense, self.table, self.head = layers.Dense(4, "tanh"), layers.Embedding(5, 4), layers.Dense(2)

    def call(self, inputs):
        return self.head(self.dense(inputs["x"]) + self.table(inputs["i"]))


def test_a_subclassed_model_with_a_dict_of_inputs():
    x = {"x": X, "i": np.arange(ROWS, dtype="int32") % 5}
    check(TwoInputs, (x, Y))


class UsesTensorFlow(keras.Model):
    """Its call cannot be followed."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers.Dense(4), layers.Dense(2)

    def call(self, x):
        return self.b(tf.nn.relu(self.a(x)))


def test_a_subclassed_model_with_operations_of_tensorflow_is_refused():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        model = UsesTensorFlow()
        model.compile("sgd", "mse")
    expected, advice = "Expected a model whose operations can be followed", "Replace operations of TensorFlow by those"
    with pytest.raises(ValueError, match=f"(?s){expected}.*Received: 'uses_tensor.*{advice}.*functional API"):
        model.fit(X, Y, batch_size=ROWS, verbose=0)


class AddsLoss(keras.Model):
    """A variational autoencoder's habit: the model's own `call` adds a part of the loss."""

    def __init__(self):
        super().__init__(name="adds_loss")
        self.a, self.b = layers.Dense(4, "tanh", name="a"), layers.Dense(4, "tanh", name="b")
        self.c = layers.Dense(2, name="c")

    def call(self, x):
        x = self.a(x)
        self.add_loss([ops.mean(ops.square(x)), 0.1 * ops.mean(ops.abs(x))])
        x = self.b(x)
        self.add_loss(0.3 * ops.mean(ops.square(x)))
        return self.c(x)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_subclassed_model_that_adds_losses(remat):
    plain = train(AddsLoss, (X, Y), batch_size=ROWS)
    strategy = tf_gpipe.GPipeStrategy(3, 3, remat=remat, partition=["b", "c"])
    piped = train(AddsLoss, (X, Y), strategy, batch_size=ROWS)
    assert_same(plain, piped)
    assert plain[1]["loss"][0] != plain[1]["loss"][1]
    assert len(piped[0].losses) == len(plain[0].losses) == 3
    assert [len(stage.operations) for stage in strategy.plan(piped[0], X).stages] != [1, 1, 1]


# --- weights that change within a step ---


class TwoGradients(keras.Model):
    """Two losses of one model, whose gradients are applied one after the other."""

    def __init__(self, both_first):
        super().__init__()
        self.inner, self.both_first = chain(), both_first

    def train_step(self, data):
        x, y = data
        weights = self.inner.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            one = ops.mean(ops.square(self.inner(x, training=True) - y))
            two = ops.mean(ops.abs(self.inner(-x, training=True) + y))
        first = tape.gradient(one, weights)
        second = tape.gradient(two, weights) if self.both_first else None
        self.optimizer.apply_gradients(zip(first, weights, strict=True))
        second = second or tape.gradient(two, weights)
        self.optimizer.apply_gradients(zip(second, weights, strict=True))
        return {"one": one, "two": two}


def sgd(**more):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), **more}


def test_a_plain_model_traced_before_its_layers_were_moved_is_traced_again():
    strategy = tf_gpipe.GPipeStrategy(3, 2)
    with strategy.scope():
        model = chain()
        model.compile("sgd", "mse")
    features = keras.Model(model.input, model.get_layer("second").output)
    features.predict(X, verbose=0)
    model.fit(X, Y, verbose=0)
    found = features.predict(X, verbose=0)
    np.testing.assert_allclose(found, keras.ops.convert_to_numpy(features(X)), rtol=2e-6, atol=1e-6)


def test_a_second_strategy_leaves_variables_where_the_first_has_put_them():
    def program(strategy):
        second = tf_gpipe.GPipeStrategy(2, 2) if strategy is not None else None
        shared = [layers.Dense(6, "tanh", name=f"shared_{i}") for i in range(3)]
        made = []
        for scope, chosen, units in ((strategy, shared, 2), (second, shared[1:], 1)):
            with scope_of(scope):
                x = y = keras.Input([6])
                for layer in chosen:
                    y = layer(y)
                made.append(keras.Model(x, layers.Dense(units)(y)))
                made[-1].compile(keras.optimizers.Adam(0.01), "mse")
        one, two = made
        numbers = []
        for model, y in ((one, Y), (two, Y[:, :1]), (one, Y)):
            numbers += model.fit(X, y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"]
        return one, numbers

    both_ways(program)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_two_gradients_are_applied_after_both_were_taken(run_eagerly):
    def program(strategy):
        model, history = train(lambda: TwoGradients(True), (X, Y), strategy, compile=sgd(run_eagerly=run_eagerly))
        assert history["one"][0] != history["one"][1]
        return model.inner, [*history["one"], *history["two"]]

    both_ways(program)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_gradient_taken_after_the_weights_have_changed_is_refused(run_eagerly):
    message = "(?s)Expected the gradients of 'chain' to be taken before its weights change.*Received: .*'first/kernel"
    with pytest.raises(ModelError, match=message):
        train(
            lambda: TwoGradients(False),
            (X, Y),
            tf_gpipe.GPipeStrategy(3, 3),
            compile=sgd(run_eagerly=run_eagerly),
        )


def normed():
    x = keras.Input([6])
    y = layers.SpectralNormalization(layers.Dense(8, "tanh"), power_iterations=2)(x)
    y = layers.SpectralNormalization(layers.Dense(8, "tanh"))(layers.Dense(8, "tanh")(y))
    return keras.Model(x, layers.Dense(2)(y))


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_spectral_normalisation_takes_place_once_for_all_micro_batches(remat):
    plain = train(normed, (X, Y), batch_size=4, validation_data=(X, Y))
    strategy = tf_gpipe.GPipeStrategy(3, 3, remat=remat)
    piped = train(normed, (X, Y), strategy, batch_size=4, validation_data=(X, Y))
    assert_same(plain, piped)
    assert len({v.value.device for v in piped[0].variables}) == 3
    assert piped[0].layers[1].vector_u.numpy().any()


class TwoCalls(keras.Model):
    """A discriminator is called twice in a step, on real and on made rows."""

    def __init__(self):
        super().__init__()
        self.inner = normed()

    def train_step(self, data):
        x, y = data
        weights = self.inner.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.inner(x, training=True) - y))
            loss += ops.mean(ops.square(self.inner(1.0 - 2.0 * x, training=True) + y))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss_of_both": loss}


@pytest.mark.parametrize("remat", ["always", "never"])
def test_spectral_normalisation_of_two_calls_in_a_step(remat):
    plain, piped = (
        train(TwoCalls, (X, Y), strategy, compile=sgd())
        for strategy in (None, tf_gpipe.GPipeStrategy(3, 3, remat=remat))
    )
    assert largest_difference(plain[0].inner, piped[0].inner) <= 1e-6
    np.testing.assert_allclose(piped[1]["loss_of_both"], plain[1]["loss_of_both"], rtol=2e-6)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_spectral_normalisation_that_is_called_twice_by_a_model_is_refused(num_stages):
    def make():
        x, layer = keras.Input([6]), layers.SpectralNormalization(layers.Dense(6), name="normed")
        return keras.Model(x, layers.Dense(2)(layer(layer(x))))

    partition = [1, 2] if num_stages == 2 else "flops"
    message = "Expected a SpectralNormalization to be called once in a step.*Received: 'normed', which is called again"
    with pytest.raises(ModelError, match=f"(?s){message}"):
        train(make, (X, Y), tf_gpipe.GPipeStrategy(num_stages, 2, partition=partition))


# --- fit's other ways ---


def test_run_eagerly():
    compile = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], "run_eagerly": True}
    check(chain, compile=compile)


def test_steps_per_execution():
    compile = {"optimizer": "sgd", "loss": "mse", "steps_per_execution": 2}
    check(chain, compile=compile, batch_size=2, validation_data=(X, Y))


def test_single_batches():
    def program(strategy):
        with scope_of(strategy):
            model = chain()
            model.compile("sgd", "mse", metrics=["mae"])
        numbers = [*model.train_on_batch(X, Y), *model.test_on_batch(X[:7], Y[:7])]
        numbers += [*model.train_on_batch(X, Y, sample_weight=np.arange(ROWS, dtype="float32"))]
        return model, [*numbers, *model.predict_on_batch(X[:5]).ravel()]

    both_ways(program)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_batches_of_several_sizes(num_micro_batches):
    sizes = [6, 4, 2, 1, 10, 3]

    def program(strategy):
        with scope_of(strategy):
            model = chain()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model, [float(model.train_on_batch(X[:n], Y[:n])) for n in sizes]

    both_ways(program, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize("batch_size", [3, 4, 7, 9, 32])
def test_no_row_is_dropped(batch_size):
    validation = (X[:5], Y[:5])
    check(chain, num_micro_batches=4, batch_size=batch_size, validation_data=validation)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras counts the batches of a generator so
def test_a_batch_size_that_no_one_knows_before_the_step():
    def data(rows):
        batches = [(X[:n], Y[:n]) for n in rows]
        kinds = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2])
        return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=kinds)

    def program(strategy):
        with scope_of(strategy):
            model = chain()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(data([8, 1, 3, 10]), epochs=2, shuffle=False, verbose=0).history["loss"]
        return model, [*history, model.evaluate(data([1, 2, 9]), verbose=0), *model.predict(data([1, 9])).ravel()]

    both_ways(program, num_micro_batches=4)
