"""State that layers move in `call`: once a mini-batch where no data move it, else once a micro-batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train
from keras import ops

import tf_gpipe
from tf_gpipe import traced_graph

L = keras.layers
REMATS = ["always", "except_last", "never"]
X, Y = normal(32, 6, seed=1), normal(32, 2, seed=2)
MOVED = "micro-batches, in order"
"""Of the warning of state that the data move."""


class Stateful(keras.layers.Layer):
    """A layer with a few variables that a function of it, its input and the training flag moves."""

    def __init__(self, move, dtype_of_state="float32", **arguments):
        super().__init__(**arguments)
        self.move, self.dtype_of_state = move, dtype_of_state

    def build(self, shape):
        for name, value in (("n", "zeros"), ("beta", "ones")):
            dtype = "int32" if name == "n" else self.dtype_of_state
            weight = self.add_weight(shape=(), initializer=value, dtype=dtype, trainable=False, name=name)
            setattr(self, name, weight)
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows")
        self.centre = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="centre")

    def call(self, x):
        return self.move(self, x)

    def compute_output_shape(self, shape):
        return shape


def counter(layer, x):
    layer.n.assign_add(1)
    return x * (1.0 + 0.1 * ops.cast(layer.n, "float32"))


def annealed(layer, x):
    layer.n.assign_add(1)
    return x * ops.exp(-0.2 * ops.cast(layer.n, "float32"))


def decay(layer, x):
    layer.beta.assign(layer.beta * 0.99)
    return x * layer.beta


def row_count(layer, x):
    layer.rows.assign_add(ops.shape(x)[0])
    layer.n.assign_add(1)
    return x


def running_centre(layer, x):
    layer.centre.assign(0.5 * layer.centre + 0.5 * ops.mean(x, axis=0))
    return x - layer.centre


def model_of(*moves, **arguments):
    """A layer of weights before and after each."""

    def make():
        layers = [keras.Input([6]), L.Dense(4, "tanh")]
        for i, move in enumerate(moves):
            layers += [Stateful(move, name=f"state_{i}", **arguments), L.Dense(4, "tanh")]
        return keras.Sequential([*layers, L.Dense(2)], name="model")

    return make


def states(model):
    """Every value that is not trained, but seeds, with its path."""
    return [(v.path, v.numpy()) for v in model.non_trainable_variables if not v.path.endswith("seed_generator_state")]


def assert_same_as_plain(make, strategy, data=(X, Y), **arguments):
    """Trains plainly and in stages; weights, history and state are equal. Returns both models."""
    arguments = {"batch_size": 8, "epochs": 1, **arguments}
    plain, piped = (train(make, data, s, **arguments) for s in (None, strategy))
    assert_same(plain, piped)
    for (path, expected), (_, found) in zip(states(plain[0]), states(piped[0]), strict=True):
        close = 0 if expected.dtype.kind == "i" else 1e-6
        np.testing.assert_allclose(found, expected, rtol=close, atol=close, err_msg=path)
    return plain[0], piped[0]


# --- state that no data move -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_counter_moves_once_a_mini_batch(stages, micro_batches, remat):
    """Four steps count four, and what is multiplied by the count trains the same weights."""
    strategy = tf_gpipe.GPipeStrategy(stages, micro_batches, remat=remat)
    _, piped = assert_same_as_plain(model_of(counter), strategy)
    assert int(piped.get_layer("state_0").n) == 4


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("move", [annealed, decay])
def test_a_schedule_of_its_own(move, remat):
    _, piped = assert_same_as_plain(model_of(move, move), tf_gpipe.GPipeStrategy(3, 4, remat=remat), epochs=2)
    if move is decay:
        assert float(piped.get_layer("state_1").beta) == pytest.approx(0.99**8, rel=1e-6)


def test_an_annealed_loss():
    """As of a variational autoencoder, whose second term grows with the steps."""

    def move(layer, x):
        layer.n.assign_add(1)
        layer.add_loss(0.1 * ops.minimum(1.0, ops.cast(layer.n, "float32") / 3) * ops.mean(ops.square(x)))
        return x

    def constant(layer, x):
        layer.add_loss(0.1 * ops.mean(ops.square(x)))
        return x

    plain, _ = assert_same_as_plain(model_of(move), tf_gpipe.GPipeStrategy(2, 4))
    assert largest_difference(plain, train(model_of(constant), (X, Y), batch_size=8, epochs=1)[0]) > 1e-4


@pytest.mark.parametrize("condition", ["where", "cond", "cond with data", "while"])
def test_a_counter_that_depends_on_itself(condition):
    def move(layer, x):
        if condition == "where":
            layer.n.assign(ops.where(layer.n < 3, layer.n + 1, layer.n))
        elif condition == "cond":
            layer.n.assign(ops.cond(layer.n < 3, lambda: layer.n + 1, lambda: layer.n + 0))
        elif condition == "cond with data":
            n, x = ops.cond(layer.n < 3, lambda: (layer.n + 1, x * 2.0), lambda: (layer.n + 0, x))
            layer.n.assign(n)
        else:
            layer.n.assign(ops.while_loop(lambda n, _: n < 3, lambda n, x: (n + 3, x * 2.0), (layer.n + 1, x))[0])
        return x * (1.0 + ops.cast(layer.n, "float32"))

    _, piped = assert_same_as_plain(model_of(move), tf_gpipe.GPipeStrategy(2, 4))
    assert int(piped.get_layer("state_0").n) == (7 if condition == "while" else 3)


def test_a_counter_inside_a_branch_and_a_function_that_see_the_data():
    """Each result of a branch or function is followed by itself."""

    def move(layer, x):
        double = ops.mean(x) > 0
        inner = tf.function(lambda n, x: (n + 1, x * 2.0))
        n, x = inner(layer.n.value, x)
        layer.n.assign(n)
        beta, x = ops.cond(
            layer.n > 2, lambda: (layer.beta * 0.5, x * 2.0), lambda: (layer.beta * 1.0, ops.where(double, x, -x))
        )
        layer.beta.assign(beta)
        return x * layer.beta

    def without_branch_on_data(layer, x):
        n, x = tf.function(lambda n, x: (n + 1, x * 2.0))(layer.n.value, x)
        layer.n.assign(n)
        beta, x = ops.cond(layer.n > 2, lambda: (layer.beta * 0.5, x * 2.0), lambda: (layer.beta * 1.0, x))
        layer.beta.assign(beta)
        return x * layer.beta

    _, piped = assert_same_as_plain(model_of(without_branch_on_data), tf_gpipe.GPipeStrategy(2, 4))
    assert float(piped.get_layer("state_0").beta) == 0.25
    # What is chosen by the mean of the rows differs by micro-batch, the counter beside it does not.
    model, _ = train(model_of(move), (X, Y), tf_gpipe.GPipeStrategy(2, 4), batch_size=8, epochs=1)
    assert int(model.get_layer("state_0").n) == 4
    assert float(model.get_layer("state_0").beta) == 0.25


def test_an_operation_with_effects_on_the_data_beside_a_counter():
    """TensorFlow makes every result of a function wait for an assertion; that is no dependence."""

    def move(layer, x):
        tf.debugging.assert_all_finite(x, "finite")
        tf.debugging.assert_less(ops.max(x), 1e6)
        layer.n.assign_add(1)
        return x + ops.cast(layer.n, "float32")

    assert_same_as_plain(model_of(move), tf_gpipe.GPipeStrategy(2, 4))


def shared_twice():
    x = keras.Input([6])
    shared = Stateful(counter, name="shared")
    y = shared(L.Dense(4)(x))
    y = shared(L.Dense(4)(L.Dense(4, "tanh")(y)))
    return keras.Model(x, L.Dense(2)(y))


@pytest.mark.parametrize(("stages", "remat"), [(1, "always"), (2, "except_last"), (4, "always"), (4, "never")])
def test_a_layer_that_is_called_twice_moves_twice(stages, remat):
    """In one stage, and in two: the second call goes on from the first of the same micro-batch."""
    _, piped = assert_same_as_plain(shared_twice, tf_gpipe.GPipeStrategy(stages, 4, remat=remat))
    assert int(piped.get_layer("shared").n) == 8


class Reader(keras.layers.Layer):
    """Multiplies by what another layer has counted."""

    def __init__(self, other, **arguments):
        super().__init__(**arguments)
        self.other = [other]  # a layer in a list is tracked, as any other

    def call(self, x):
        return x * (1.0 + 0.5 * ops.cast(self.other[0].n, "float32"))


@pytest.mark.parametrize(("reads_first", "remat"), [(False, "always"), (True, "always"), (True, "never")])
def test_a_counter_that_another_stage_reads(reads_first, remat):
    """After it was moved, or before, in the order of plain Keras."""

    def make():
        x = keras.Input([6])
        count = Stateful(counter, name="count")
        count.build((None, 4))
        pair = [Reader(count, name="reader"), count] if reads_first else [count, Reader(count, name="reader")]
        y = pair[0](L.Dense(4, "tanh")(x))
        y = pair[1](L.Dense(4, "tanh")(L.Dense(4, "tanh")(y)))
        return keras.Model(x, L.Dense(2)(y))

    assert_same_as_plain(make, tf_gpipe.GPipeStrategy(3, 4, remat=remat))


def test_a_scalar_that_crosses_a_cut_is_followed():
    """What a stage takes from the one before is the data only if it follows from them."""

    class Coefficient(keras.layers.Layer):
        def build(self, shape):
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            self.n.assign_add(1.0)
            return x, ops.exp(-self.n)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype), keras.KerasTensor((), "float32")

    class Total(keras.layers.Layer):
        def build(self, shapes):
            self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")

        def call(self, inputs):
            x, coefficient = inputs
            self.total.assign_add(coefficient)
            return x * self.total

        def compute_output_shape(self, shapes):
            return shapes[0]

    def make():
        x = keras.Input([6])
        y, coefficient = Coefficient(name="coefficient")(L.Dense(4, "tanh")(x))
        y = Total(name="total")([L.Dense(4)(L.Dense(4, "tanh")(y)), coefficient])
        return keras.Model(x, L.Dense(2)(y))

    _, piped = assert_same_as_plain(make, tf_gpipe.GPipeStrategy(3, 4))
    assert float(piped.get_layer("total").total) == pytest.approx(float(sum(np.exp(-np.arange(1.0, 5.0)))), rel=1e-6)


@pytest.mark.parametrize("training", [True, False, None])
def test_a_counter_moves_whatever_the_training_flag(training):
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 4)):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = model_of(counter)()

        def step(x, model=model):
            return model(x, training=training)

        run = tf.function(step if strategy is None else lambda x, s=strategy, f=step: s.run(f, (x,)))
        outputs = [run(tf.constant(X[:8])).numpy() for _ in range(3)]
        assert int(model.get_layer("state_0").n) == 3
        found.append(outputs)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-6, atol=1e-6)


def test_a_counter_in_evaluate_and_predict():
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 4)):
        model, _ = train(model_of(counter), (X, Y), strategy, batch_size=8, epochs=1)
        loss = model.evaluate(X, Y, batch_size=8, verbose=0)
        predicted = model.predict(X[:20], batch_size=8, verbose=0)
        assert int(model.get_layer("state_0").n) == 4 + 4 + 3
        found.append((loss, predicted))
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("move", [counter, decay])
def test_eagerly(move):
    def compile():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "run_eagerly": True}

    assert_same_as_plain(model_of(move), tf_gpipe.GPipeStrategy(2, 4), compile=compile)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_compiled_by_xla(remat):
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat=remat, jit_compile=True)
    assert_same_as_plain(model_of(counter, decay), strategy)


def test_a_counter_beside_dropout():
    """With one micro-batch it is plain Keras's step; with four, draws are for each, and the count is not."""

    def make():
        return keras.Sequential(
            [keras.Input([6]), L.Dense(4), L.Dropout(0.5), Stateful(annealed, name="state_0"), L.Dense(2)]
        )

    assert_same_as_plain(make, tf_gpipe.GPipeStrategy(2, 1))
    model, _ = train(make, (X, Y), tf_gpipe.GPipeStrategy(2, 4), batch_size=8, epochs=1)
    assert int(model.get_layer("state_0").n) == 4
    seed = next(v for v in model.variables if v.path.endswith("seed_generator_state"))
    assert seed.numpy()[1] == 16


def drawn(layer, x):
    layer.beta.assign(keras.random.uniform((), seed=layer.seed))
    return x


class Drawing(Stateful):
    """Keeps what it has drawn."""

    def __init__(self, **arguments):
        super().__init__(drawn, **arguments)
        self.seed = keras.random.SeedGenerator(5)


def test_a_state_that_was_drawn_is_the_first_micro_batchs():
    """Its draw is plain Keras's in the first step; the next step goes on after the draws of all micro-batches."""

    def make():
        return keras.Sequential([keras.Input([6]), L.Dense(4), Drawing(name="drawing"), L.Dense(2)])

    kept = {}
    for micro_batches in (None, 1, 4):
        strategy = micro_batches and tf_gpipe.GPipeStrategy(2, micro_batches)
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            model = make()
            model.compile("sgd", "mse")
        model.train_on_batch(X[:8], Y[:8])
        kept[micro_batches] = float(model.get_layer("drawing").beta), model.get_layer("drawing").seed.state.numpy()[1]
    assert kept[None] == kept[1]
    assert kept[4] == (kept[None][0], 4)


def test_a_seed_of_no_layer_still_draws_for_each_micro_batch():
    seed = keras.random.SeedGenerator(3)

    def move(layer, x):
        layer.n.assign_add(1)
        return x + keras.random.normal(ops.shape(x), seed=seed)

    with tf_gpipe.GPipeStrategy(2, 4).scope():
        model = keras.Sequential([keras.Input([6]), Stateful(move, name="state_0"), L.Activation("linear")])
        model.compile("sgd", "mse")
    noise = model.predict(np.zeros([8, 6], "float32"), verbose=0)
    assert len({part.tobytes() for part in np.split(noise, 4)}) == 4
    assert int(model.get_layer("state_0").n) == 1
    assert seed.state.numpy()[1] == 4


# --- rows ------------------------------------------------------------------------------------------------------------


def row_sets(rows, batch, *, static):
    data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch, drop_remainder=static)
    assert (data.element_spec[0].shape[0] is not None) == static
    return data


@pytest.mark.parametrize(("stages", "remat"), [(1, "never"), (2, "always"), (2, "except_last")])
@pytest.mark.parametrize(("rows", "batch", "static"), [(32, 8, True), (32, 8, False), (11, 9, False)])
def test_a_count_of_rows_is_right(rows, batch, static, stages, remat):
    """Of a number that is known when the step is traced, and of one that is not; of a last batch with few rows."""
    data = (row_sets(rows, batch, static=static),)
    with pytest.warns(UserWarning, match=MOVED):
        _, piped = assert_same_as_plain(
            model_of(row_count), tf_gpipe.GPipeStrategy(stages, 4, remat=remat), data, batch_size=None
        )
    assert int(piped.get_layer("state_0").rows) == rows
    assert int(piped.get_layer("state_0").n) == -(-rows // batch)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.filterwarnings(f"ignore:.*{MOVED}")
def test_batches_of_fewer_rows_than_micro_batches(eagerly):
    with tf_gpipe.GPipeStrategy(2, 4).scope():
        model = model_of(row_count)()
        model.compile("sgd", "mse", run_eagerly=eagerly)
    seen = 0
    for step, rows in enumerate([8, 3, 1, 8, 2], start=1):
        model.train_on_batch(X[:rows], Y[:rows])
        seen += rows
        assert int(model.get_layer("state_0").rows) == seen
        assert int(model.get_layer("state_0").n) == step


@pytest.mark.filterwarnings(f"ignore:.*{MOVED}")
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_rows_are_counted_where_they_are_not_the_first_axis(stages):
    """Across a cut, a transposed tensor has them in its last axis."""

    def move(layer, x):
        layer.rows.assign_add(ops.shape(x)[1])
        return x

    def make():
        x = keras.Input([6])
        y = ops.transpose(L.Dense(4, "tanh", name="before")(x))
        y = ops.transpose(Stateful(move, name="state_0")(y * 2.0))
        return keras.Model(x, L.Dense(2)(y))

    data = (row_sets(32, 8, static=True),)
    strategy = tf_gpipe.GPipeStrategy(stages, 4)
    _, piped = assert_same_as_plain(make, strategy, data, batch_size=None)
    assert int(piped.get_layer("state_0").rows) == 32


@pytest.mark.filterwarnings(f"ignore:.*{MOVED}")
@pytest.mark.parametrize("static", [True, False])
def test_a_metric_inside_a_layer(static):
    """Sums over rows are right, whatever the number of micro-batches."""

    class Measured(keras.layers.Layer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.mean = keras.metrics.Mean(name="mean")

        def call(self, x):
            self.mean.update_state(ops.mean(x, axis=-1))
            return x

    def make():
        return keras.Sequential([keras.Input([6]), Measured(name="measured"), L.Dense(4), L.Dense(2)])

    data = (row_sets(32, 8, static=static),)
    plain, piped = (
        train(make, data, s, batch_size=None, epochs=1)[0].get_layer("measured").mean
        for s in (None, tf_gpipe.GPipeStrategy(2, 4))
    )
    assert float(plain.result()) != 0.0
    np.testing.assert_allclose(piped.result(), plain.result(), rtol=2e-5)
    assert float(piped.count) == float(plain.count) == 32


# --- state that the data move ----------------------------------------------------------------------------------------


def caught(action):
    """The texts of the warnings of an action."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in found if MOVED in str(w.message)]


def test_a_running_centre_warns_once_for_each_layer():
    """Whatever is traced, trained, evaluated and compiled again."""
    strategy = tf_gpipe.GPipeStrategy(2, 4)
    made = []

    def fit():
        model, _ = train(model_of(running_centre, counter, running_centre), (X, Y), strategy, batch_size=8, epochs=1)
        model.fit(X[:5], Y[:5], verbose=0)
        model.evaluate(X, Y, verbose=0)
        model.predict(X[:20], verbose=0)
        with strategy.scope():
            model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
        made.append(model)

    texts = caught(fit)
    assert len(texts) == 2
    for text, layer in zip(texts, ("state_0", "state_2"), strict=True):
        assert f"Layer '{layer}' moves 'model/{layer}/centre' in its `call`" in text
        assert "once for each of the 4 micro-batches" in text
        assert "num_micro_batches=1" in text
        assert "`train_step` or a callback" in text


def test_a_running_centre_moves_by_micro_batch():
    with pytest.warns(UserWarning, match=MOVED):
        model, _ = train(model_of(running_centre), (X[:8], Y[:8]), tf_gpipe.GPipeStrategy(2, 4), batch_size=8, epochs=1)
    keras.utils.set_random_seed(0)
    plain = model_of(running_centre)()
    for part in np.split(X[:8], 4):
        plain(tf.constant(part), training=True)
    expected = plain.get_layer("state_0").centre.numpy()
    np.testing.assert_allclose(model.get_layer("state_0").centre, expected, rtol=2e-6, atol=1e-7)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.filterwarnings(f"ignore:.*{MOVED}")
@pytest.mark.parametrize("remat", REMATS)
def test_each_micro_batch_sees_what_its_predecessors_moved(remat):
    """The recomputation, too: gradients are those of plain Keras called for one micro-batch after the other."""

    def move(layer, x):
        layer.rows.assign_add(ops.shape(x)[0])
        return x * (1.0 + 0.02 * ops.cast(layer.rows, "float32"))

    keras.utils.set_random_seed(0)
    plain, optimizer = model_of(move, move)(), keras.optimizers.SGD(0.1)
    for at in range(0, 29, 12):
        with tf.GradientTape() as tape:
            parts = np.array_split(X[at : min(at + 12, 29)], 4)
            outputs = tf.concat([plain(tf.constant(part), training=True) for part in parts], axis=0)
            loss = tf.reduce_mean(tf.square(outputs - Y[at : min(at + 12, 29)]))
        weights = plain.trainable_variables
        optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)
    strategy = tf_gpipe.GPipeStrategy(3, 4, remat=remat)
    model, _ = train(model_of(move, move), (X[:29], Y[:29]), strategy, batch_size=12, epochs=1)
    assert largest_difference(plain, model) <= 1e-6
    assert int(model.get_layer("state_1").rows) == 29


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_nothing_is_said_where_there_is_one_micro_batch(micro_batches):
    """With M = 1, and where a mini-batch has one row."""

    def fit():
        with tf_gpipe.GPipeStrategy(2, micro_batches).scope():
            model = model_of(running_centre)()
            model.compile("sgd", "mse", run_eagerly=True)
        rows = 1 if micro_batches == 4 else 8
        model.train_on_batch(X[:rows], Y[:rows])

    assert caught(fit) == []


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_state_that_follows_from_state_of_another_stage(stages):
    """A counter that looks at a running centre is moved by the data, too; the one beside it is not."""

    def make():
        x = keras.Input([6])
        first = Stateful(running_centre, name="first")
        first.build((None, 4))

        def follows(layer, x):
            layer.n.assign_add(1)
            layer.beta.assign(layer.beta + ops.sum(first.centre))
            return x

        y = first(L.Dense(4, "tanh")(x))
        return keras.Model(x, L.Dense(2)(Stateful(follows, name="second")(L.Dense(4)(L.Dense(4)(y)))), name="model")

    models = []
    strategy = tf_gpipe.GPipeStrategy(stages, 4)
    texts = caught(lambda: models.append(train(make, (X, Y), strategy, batch_size=8, epochs=1)[0]))
    assert ["'first'" in texts[0], "'second'" in texts[1], len(texts)] == [True, True, 2]
    assert "beta" in texts[1]
    assert "/n'" not in texts[1]
    assert int(models[0].get_layer("second").n) == 4


def test_a_layer_that_cannot_do_without_the_number_of_rows():
    """Of its counter nothing can be proved where that number is a constant in its graph, and the warning says why."""

    def move(layer, x):
        layer.n.assign_add(1)
        return x / float(x.shape[0])

    models = []

    def fit():
        data = (row_sets(32, 8, static=True),)
        models.append(train(model_of(move), data, tf_gpipe.GPipeStrategy(2, 4), batch_size=None, epochs=1)[0])

    texts = caught(fit)
    assert len(texts) == 1
    assert "cannot be told not to (TypeError: " in texts[0]
    assert int(models[0].get_layer("state_0").n) == 16


def in_python(layer, x):
    layer.rows.assign_add(x.shape[0] or 0)
    layer.n.assign_add(1)
    return x


def in_a_condition(layer, x):
    added = ops.cond(layer.n >= 0, lambda: x.shape[0] or 0, lambda: 0)
    layer.rows.assign_add(added)
    layer.n.assign_add(1)
    return x


def in_a_loop(layer, x):
    turns = tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + (x.shape[0] or 0)), (0, 0))
    layer.rows.assign_add(turns[1] // 3)
    layer.n.assign_add(1)
    return x


def in_a_choice(layer, x):
    if x.shape[0] is not None:
        layer.rows.assign_add(tf.size(tf.zeros([x.shape[0], 3])) // 3)
    layer.n.assign_add(1)
    return x


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("move", [in_python, in_a_condition, in_a_loop, in_a_choice])
def test_a_number_of_rows_that_python_looks_at(move, remat):
    """It is a constant in the graph, and so made of nothing; a trace for any number of rows has another there."""
    data = (row_sets(32, 8, static=True),)
    with pytest.warns(UserWarning, match="state_0.*rows.*micro-batches"):
        _, piped = assert_same_as_plain(
            model_of(move, counter), tf_gpipe.GPipeStrategy(2, 4, remat=remat), data, batch_size=None
        )
    assert int(piped.get_layer("state_0").rows) == 32
    assert int(piped.get_layer("state_1").n) == 4


def test_batch_norm_with_renorm_warns():
    def make():
        norm = L.BatchNormalization(renorm=True, name="norm")
        return keras.Sequential([keras.Input([6]), L.Dense(4), norm, L.Dense(2)])

    with pytest.warns(UserWarning, match="Layer 'norm' moves .*renorm.* in its `call`"):
        train(make, (X, Y), tf_gpipe.GPipeStrategy(2, 2), batch_size=16, epochs=1)


def test_seeds_batch_norm_and_kernels_that_are_normalised_say_nothing():
    def make():
        layers = [L.Dense(4), L.BatchNormalization(), L.Dropout(0.5), L.SpectralNormalization(L.Dense(4)), L.Dense(2)]
        return keras.Sequential([keras.Input([6]), *layers])

    assert caught(lambda: train(make, (X, Y), tf_gpipe.GPipeStrategy(2, 4), batch_size=32, epochs=1)) == []


# --- what a graph tells ----------------------------------------------------------------------------------------------


def arguments_of(function, *specs):
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = traced_graph.TracedGraph(concrete.graph)
    return [graph.arguments_of(tensor) for tensor in concrete.graph.outputs]


A, B = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: (a + 1.0, b * a), [{0}, {0, 1}]),
        (lambda a, b: (tf.cast(tf.shape(b)[0], tf.float32), tf.zeros_like(a)), [{1}, set()]),
        (lambda a, b: tf.identity_n([a, b]), [{0}, {1}]),
        (lambda a, b: tf.cond(a > 0, lambda: (a, b), lambda: (a * 2.0, b)), [{0}, {0, 1}]),
        (lambda a, b: tf.cond(b[0] > 0, lambda: a, lambda: a * 2.0), [{0, 1}]),
        (lambda a, b: tf.switch_case(tf.cast(a, tf.int32), [lambda: (a, b), lambda: (a, b * 2.0)]), [{0}, {0, 1}]),
        (lambda a, b: tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 2), [a, b]), [{0}, {0, 1}]),
        (lambda a, b: tf.while_loop(lambda i, x: x[0] < 3, lambda i, x: (i + 1, x * 2), [a, b]), [{0, 1}, {1}]),
        (lambda a, b: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + x[0], x * 2), [a, b]), [{0, 1}, {0, 1}]),
        (lambda a, b: tf.function(lambda x, y: (y, x + 1.0))(a, b), [{1}, {0}]),
        (lambda a, b: tf.numpy_function(lambda x: x, [a], tf.float32), [{0, traced_graph.HIDDEN}]),
        (lambda a, b: tf.random.stateless_uniform([], tf.cast([a, a], tf.int32)), [{0}]),
    ],
)
def test_what_results_depend_on(function, expected):
    assert arguments_of(function, A, B) == [frozenset(found) for found in expected]


def test_a_function_that_is_not_known_hides_everything():
    graph = tf.function(lambda: tf.constant(1)).get_concrete_function().graph
    assert traced_graph.TracedGraph(graph)._through("no_such_function", 0, range(2)) == {0, 1, traced_graph.HIDDEN}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_counter_keeps_its_dtype_under_mixed_precision(policy):
    class Counted(keras.layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count", autocast=False)
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

        def call(self, x):
            self.count.assign_add(1.0 / 512)
            self.steps.assign(self.steps + 1.0)
            return x

    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 1), tf_gpipe.GPipeStrategy(2, 4)):
        keras.config.set_dtype_policy(policy)
        try:
            with scope_of(strategy):
                counted = Counted()
                model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2), counted, keras.layers.Dense(2)])
                model.compile("sgd", "mse")
            model.fit(np.ones([24, 2], "float32"), np.ones([24, 2], "float32"), batch_size=8, epochs=2, verbose=0)
        finally:
            keras.config.set_dtype_policy("float32")
        found.append((float(counted.count.numpy()), float(counted.steps.numpy())))
    assert found[1] == found[2] == found[0]
    assert found[0][1] == 6
