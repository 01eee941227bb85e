"""Gradients of gradients through the pipeline, and the ways of differentiating that are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, normal, third_derivatives, train
from keras import layers

import tf_gpipe
from tf_gpipe.errors import ModelError

ROWS = 11
X, Y = normal(ROWS, 6, seed=1), normal(ROWS, 2, seed=2)


class Penalised(keras.Model):
    """A step whose loss holds a gradient: of the inputs (WGAN-GP), of the weights, or of both."""

    def __init__(self, of, **options):
        super().__init__()
        x = keras.Input([6])
        first = layers.Dense(8, "tanh", **options)(x)
        second = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(first))
        outputs = [layers.Dense(2)(second + first), layers.Dense(1, "sigmoid")(second)]
        self.inner, self.of = keras.Model(x, outputs), of

    def train_step(self, data):
        x, y = data
        weights = self.inner.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                a, b = self.inner(x, training=True)
                energy = tf.reduce_sum(tf.square(a)) + tf.reduce_sum(tf.sin(b)) + sum(self.inner.losses)
            if self.of == "inputs":
                gradient = inner.gradient(energy, x)
                penalty = tf.reduce_mean(tf.square(tf.norm(gradient, axis=1) - 1.0))
            elif self.of == "weights":
                penalty = 0.01 * tf.add_n([tf.reduce_mean(tf.square(g)) for g in inner.gradient(energy, weights)])
            else:
                d_x, d_weights = inner.gradient(energy, [x, weights])
                penalty = tf.reduce_mean(tf.square(d_x)) + 0.01 * tf.reduce_sum(tf.square(d_weights[2]))
            loss = tf.reduce_mean(tf.square(a - y)) + penalty + tf.reduce_mean(tf.square(b))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"penalty": penalty}


def sgd(**more):
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), **more}


@pytest.mark.parametrize("of", ["inputs", "weights", "both"])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "remat", "eager"),
    [(1, 1, "always", False), (4, 3, "except_last", False), (3, 2, "always", True), (4, 6, "never", False)],
)
def test_gradients_of_gradients(of, stages, micro_batches, remat, eager):
    strategy = tf_gpipe.GPipeStrategy(stages, micro_batches, remat=remat)
    plain, piped = (
        train(lambda: Penalised(of), (X, Y), s, batch_size=8, compile=sgd(run_eagerly=eager)) for s in (None, strategy)
    )
    assert plain[1]["penalty"][0] != plain[1]["penalty"][1]
    np.testing.assert_allclose(piped[1]["penalty"], plain[1]["penalty"], rtol=2e-6, atol=1e-6)
    assert largest_difference(plain[0].inner, piped[0].inner) <= 1e-6
    assert len({weight.value.device for weight in piped[0].inner.weights}) == stages


def test_gradients_of_gradients_of_a_loss_that_a_layer_adds():
    def make():
        return Penalised("inputs", activity_regularizer=keras.regularizers.L2(0.3))

    plain, piped = (train(make, (X, Y), s, compile=sgd()) for s in (None, tf_gpipe.GPipeStrategy(3, 4)))
    np.testing.assert_allclose(piped[1]["penalty"], plain[1]["penalty"], rtol=2e-6, atol=1e-6)
    without = train(lambda: Penalised("inputs"), (X, Y), compile=sgd())
    assert abs(without[1]["penalty"][0] - plain[1]["penalty"][0]) > 1e-3
    assert largest_difference(plain[0].inner, piped[0].inner) <= 1e-6


def model_of(*middle, strategy):
    with strategy.scope():
        x = keras.Input([6])
        y = x
        for layer in (*middle, layers.Dense(8, "tanh"), layers.Dense(2)):
            y = layer(y)
        return keras.Model(x, y, name="model")


def test_a_third_derivative_is_refused():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = model_of(strategy=strategy)

    def nested(x):
        return third_derivatives(model, x, x)

    with pytest.raises(ModelError, match="Expected first and second derivatives only. Received: a third derivative"):
        strategy.run(nested, args=(tf.constant(X),))


def test_a_second_derivative_through_the_gradient_of_an_embedding_is_refused():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        x = keras.Input([3], dtype="int32")
        y = layers.Dense(2)(layers.Flatten()(layers.Embedding(9, 4)(x)))
        model = keras.Model(x, y, name="model")

    def step(x):
        weights = model.trainable_weights
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(model(x) ** 2)
            gradients = inner.gradient(loss, weights)
            penalty = tf.reduce_sum(gradients[0].values ** 2)
        return tape.gradient(penalty, weights)

    message = "(?s)Expected second derivatives through dense gradients only.*an embedding of 'model'"
    with pytest.raises(ModelError, match=message):
        strategy.run(step, args=(tf.constant([[1, 2, 3], [4, 5, 6]]),))


@pytest.mark.parametrize("way", ["function", "cond", "gradients"])
def test_a_gradient_taken_from_outside_the_function_that_calls_the_model_is_refused(way):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = model_of(strategy=strategy)

    @tf.function
    def forward(x):
        return model(x, training=True)

    def step(x):
        if way == "gradients":
            return tf.gradients(tf.reduce_sum(model(x)), [x])
        with tf.GradientTape() as tape:
            if way == "function":
                y = forward(x)
            else:
                y = tf.cond(tf.reduce_sum(x) > 0, lambda: model(x), lambda: 2.0 * model(x))
            loss = tf.reduce_mean(tf.square(y))
        return tape.gradient(loss, model.trainable_weights[0].value)

    with pytest.raises(
        ModelError, match="(?s)taken by a tape in the function that calls it.*Open the `tf.GradientTape"
    ):
        tf.function(lambda x: strategy.run(step, args=(x,)))(tf.constant(X))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_forward_mode_is_refused(compiled):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = model_of(strategy=strategy)

    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = model(x)
        return accumulator.jvp(y)

    def run(x):
        return strategy.run(step, args=(x,))

    with pytest.raises(ModelError, match="(?s)taken by a `tf.GradientTape`.*ForwardAccumulator` around 'model'"):
        (tf.function(run) if compiled else run)(tf.constant(X))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_jacobians(compiled):
    strategy = tf_gpipe.GPipeStrategy(3, 3)
    keras.utils.set_random_seed(0)
    model = model_of(layers.Dense(5, "tanh"), strategy=strategy)
    weight = model.trainable_weights[0].value

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(tf.square(model(x)), axis=0)
        return tape.jacobian(y, weight)

    def run(x):
        return strategy.run(step, args=(x,))

    found = (tf.function(run) if compiled else run)(tf.constant(X))
    assert found.shape == (2, 6, 5)
    np.testing.assert_allclose(found, step(tf.constant(X)), rtol=2e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_weights_of_an_output_that_no_loss_uses_stay_as_they_are(run_eagerly):
    def make():
        x = keras.Input([6])
        y = layers.Dense(6, "tanh")(x)
        return keras.Model(x, [layers.Dense(2)(layers.Dense(4)(y)) for _ in range(2)])

    def compile():
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
        return {"optimizer": optimizer, "loss": ["mse", None], "run_eagerly": run_eagerly}

    plain, piped = (
        train(make, (X, [Y, Y]), s, batch_size=4, compile=compile) for s in (None, tf_gpipe.GPipeStrategy(3, 2))
    )
    assert largest_difference(plain[0], piped[0]) <= 1e-6
    keras.utils.set_random_seed(0)
    first = make().get_weights()
    same = [np.array_equal(a, b) for a, b in zip(first, piped[0].get_weights(), strict=True)]
    assert 0 < sum(same) < len(same)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_zero_gradients_and_none_are_told_apart(compiled):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        x = keras.Input([6])
        y = layers.Dense(4, "tanh")(x)
        model = keras.Model(x, [layers.Dense(2, name="one")(y), layers.Dense(2, name="two")(y)])

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            one, two = model(x, training=True)
            first, second = tf.reduce_sum(0.0 * one), tf.reduce_sum(two)
        weights = [model.get_layer(name).kernel.value for name in ("one", "two")]
        return [[g is None for g in tape.gradient(loss, weights)] for loss in (first, second)]

    found = []
    for call in (step, lambda x: strategy.run(step, args=(x,))):

        def note(x, call=call):
            found.append(call(x))

        (tf.function(note) if compiled else note)(tf.constant(X))
    assert found == [[[False, True], [True, False]]] * 2


def test_outputs_have_their_known_number_of_rows():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    model = model_of(strategy=strategy)
    shapes = []
    tf.function(lambda x: shapes.append(strategy.run(model, args=(x,)).shape))(tf.constant(X))
    assert shapes == [(ROWS, 2)]
