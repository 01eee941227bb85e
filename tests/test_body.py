"""What a stage reads and what it hands on beside tensors: state, weights of other stages, logits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, train
from keras import layers, ops

import tf_gpipe

ROWS = 11
X, Y = normal(ROWS, 6, seed=1), normal(ROWS, 2, seed=2)
REMATS = ["always", "except_last", "never"]


def check(make, *, data=(X, Y), stages=3, micro_batches=3, partition="flops", remat="except_last", **arguments):
    """Trains a model plainly and in stages; everything is equal, the loss moved, and several devices hold weights."""
    strategy = tf_gpipe.GPipeStrategy(stages, micro_batches, partition=partition, remat=remat)
    plain, piped = (train(make, data, s, batch_size=8, **arguments) for s in (None, strategy))
    assert_same(plain, piped)
    losses = plain[1]["loss"]
    assert losses[0] != losses[-1]
    assert len({weight.value.device for weight in piped[0].weights}) > 1
    return plain[0], piped[0]


# --- state ---


class Centre(layers.Layer):
    """Takes off a moving average, which it moves first: no gradient flows through the average."""

    def build(self, shape):
        self.average = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.average.assign(0.5 * self.average + 0.5 * ops.mean(x, axis=0))
        return x - self.average


@pytest.mark.parametrize("remat", REMATS)
def test_no_gradient_flows_through_what_is_assigned(remat):
    def make():
        x = keras.Input([6])
        y = Centre()(layers.Dense(6, "tanh")(x))
        return keras.Model(x, layers.Dense(2)(layers.Dense(6)(y)))

    plain, piped = check(make, micro_batches=1, remat=remat)
    assert piped.layers[2].average.numpy().any()
    np.testing.assert_allclose(piped.layers[2].average, plain.layers[2].average, atol=1e-6)


# --- weights of other stages ---


@pytest.mark.parametrize("remat", REMATS)
def test_a_function_that_uses_a_weight_of_another_stage(remat):
    def make():
        tied = layers.Dense(6, "tanh")
        x = keras.Input([6])
        y = layers.Dense(6, "tanh")(layers.Dense(6, "tanh")(tied(x)))
        y = layers.Lambda(lambda t: ops.matmul(t, ops.transpose(tied.kernel)), output_shape=(6,))(y)
        return keras.Model(x, layers.Dense(2)(y))

    check(make, remat=remat)


def test_a_variable_of_no_layer_gets_its_gradient():
    temperature = keras.Variable(2.0)
    strategy = tf_gpipe.GPipeStrategy(2, 3)
    with strategy.scope():
        x = keras.Input([6])
        y = layers.Lambda(lambda t: t * temperature, output_shape=(6,))(layers.Dense(6, "tanh")(x))
        model = keras.Model(x, layers.Dense(2)(y))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return tape.gradient(loss, temperature.value)

    expected = step(tf.constant(X), tf.constant(Y))
    assert abs(float(expected)) > 1e-3
    found = tf.function(lambda *args: strategy.run(step, args=args))(tf.constant(X), tf.constant(Y))
    np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_layer_on_two_stages(jit_compile):
    def make():
        x, shared = keras.Input([6]), layers.Dense(6, "tanh")
        return keras.Model(x, layers.Dense(2)(shared(layers.Dense(6)(shared(x)))))

    strategy = tf_gpipe.GPipeStrategy(3, 2, jit_compile=jit_compile)
    plain, piped = (train(make, (X, Y), s, batch_size=ROWS) for s in (None, strategy))
    assert_same(plain, piped)


# --- logits ---


LARGE = (60 * normal(ROWS, 6, seed=3)).astype("float32")  # with which probabilities are 0 and 1 in float32
LABELS = np.arange(ROWS) % 5


def classifier(*after, activation="softmax", units=5):
    x = keras.Input([6])
    y = layers.Dense(units, activation, name="probabilities")(layers.Dense(6)(x))
    for layer in after:
        y = layer(y)
    return keras.Model(x, y)


def entropy(loss="sparse_categorical_crossentropy"):
    return lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": loss}


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("layer", [None, "linear", "identity", "dropout"])
def test_a_crossentropy_is_taken_of_the_logits(layer, remat):
    after = {
        None: lambda: [],
        "linear": lambda: [layers.Activation("linear")],
        "identity": lambda: [layers.Identity()],
        "dropout": lambda: [layers.Dropout(0.0)],
    }[layer]
    partition = [1, 1, 1] if layer else [1, 1]
    stages = len(partition)
    plain, _ = check(
        lambda: classifier(*after()),
        data=(LARGE, LABELS),
        stages=stages,
        partition=partition,
        remat=remat,
        compile=entropy(),
    )
    without = train(lambda: classifier(layers.Reshape([5])), (LARGE, LABELS), batch_size=8, compile=entropy())
    assert largest_difference(plain, without[0]) > 1e-3  # what Reshape loses in plain Keras, nothing loses here


def test_a_binary_crossentropy_is_taken_of_the_logits():
    labels = np.random.default_rng(0).integers(0, 2, [ROWS, 3]).astype("float32")
    check(
        lambda: classifier(activation="sigmoid", units=3),
        data=(LARGE, labels),
        stages=2,
        compile=entropy("binary_crossentropy"),
    )


@pytest.mark.parametrize("remat", REMATS)
def test_probabilities_are_used_by_a_loss_and_by_a_later_stage(remat):
    def make():
        x = keras.Input([6])
        y = layers.Dense(5, "softmax", name="classes")(layers.Dense(6)(x))
        return keras.Model(x, [y, layers.Dense(2, name="values")(layers.Dense(4, "tanh")(y))])

    compile = entropy(["sparse_categorical_crossentropy", "mse"])
    check(make, data=(LARGE, [LABELS, Y]), stages=4, partition=[1, 1, 1, 1], remat=remat, compile=compile)


# --- layers that are changed ---


class Outer(keras.Model):
    """Trains a model inside it by a step of its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [keras.Input([6]), layers.Dense(5, "tanh", name="first"), layers.Dense(5), layers.Dense(2)]
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.inner(x, training=True) - y))
        weights = self.inner.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"inner_loss": loss}


def test_a_layer_inside_a_model_that_is_compiled_again():
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 2)):
        outer, first = train(Outer, (X, Y), strategy, compile=lambda: {"optimizer": keras.optimizers.SGD(0.1)})
        outer.inner.get_layer("first").activation = keras.activations.relu
        with strategy.scope() if strategy else keras.name_scope("plain"):
            outer.compile(keras.optimizers.SGD(0.1))
        second = outer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found.append((outer.inner, [*first["inner_loss"], *second["inner_loss"]]))
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6, atol=1e-6)
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6
