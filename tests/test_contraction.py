"""Which gradients of weights are taken once for all micro-batches, and that they are the same as their sums."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference, normal, scope_of

import tf_gpipe
from tf_gpipe import contraction
from tf_gpipe.gradients import SMALL, Buffers, GradientLayout


def gradient_of(layer, x):
    """Traces the gradient of a layer's kernel and gives what is found in it, and both gradients' values."""
    layer.build(x.shape)
    found = []

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            y = layer(x)
        d = tape.gradient(y, layer.kernel.value, output_gradients=tf.sin(y))
        parts = []
        for part in tf.split(x, 3):
            with tf.GradientTape() as tape:
                y = layer(part)
            one = tape.gradient(y, layer.kernel.value, output_gradients=tf.sin(y))
            found.append(contraction.find(one))
            parts.append(found[-1][1:])
        kind = found[0][0]
        made = kind.run([a for a, _ in parts], [b for _, b in parts])
        return d, tf.reshape(made, d.shape)

    wanted, made = both(x)
    return found, wanted, made


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (keras.layers.Dense(5), [6, 4]),
        (keras.layers.Dense(5), [6, 3, 4]),
        (keras.layers.EinsumDense("abc,bcd->abd", output_shape=[3, 5]), [6, 3, 4]),
        (keras.layers.Conv2D(5, 3, strides=2, padding="same"), [6, 8, 8, 4]),
        (keras.layers.Dense(5, dtype="mixed_float16"), [6, 4]),
    ],
    ids=["dense", "dense over positions", "einsum", "convolution", "float16"],
)
def test_the_sum_over_micro_batches_is_one_operation(layer, shape):
    found, wanted, made = gradient_of(layer, tf.random.normal(shape, seed=1))
    assert len(found) == 3
    assert len({kind for kind, _, _ in found}) == 1
    tolerance = 2e-3 if layer.compute_dtype == "float16" else 1e-5
    np.testing.assert_allclose(made, wanted, rtol=tolerance, atol=tolerance)


def test_a_gradient_made_in_another_way_is_not_found():
    with tf.Graph().as_default():
        x = tf.ones([4, 3])
        assert contraction.find(tf.reduce_sum(x, 0)) is None
        assert contraction.find(tf.add(tf.matmul(x, x, transpose_a=True), 1.0)) is None
        assert contraction.find(tf.einsum("ab,cb->ac", x, x)) is not None
        assert contraction.find(tf.einsum("aab,cb->ac", tf.ones([4, 4, 3]), x)) is None


def test_an_unknown_size_is_infinite():
    with tf.Graph().as_default():
        known, unknown = tf.ones([2, 3]), tf.compat.v1.placeholder(tf.float32, [None, 3])
        assert contraction.size(known, known) == 12
        assert contraction.size(known, unknown) == math.inf


def trained(strategy, rows, *, batch_size, dtype="float32"):
    keras.utils.set_random_seed(3)
    context = strategy.scope() if strategy else tf.init_scope()
    with context:
        inputs = keras.Input([300], dtype="float32")
        x = inputs
        for _ in range(3):
            x = keras.layers.Dense(300, activation="tanh", dtype=dtype)(x)
        model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=[rows, 300]).astype("float32"), generator.normal(size=[rows, 2]).astype("float32")
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model


def deferred_of(model, strategy):
    """For each stage, the number of deferred gradients of each of its backward functions."""
    (pipeline,) = vars(model)["_gpipe_pipelines"][strategy].values()
    made = [
        [*stage._backwards.values(), *(recorded.kept_backward for recorded in stage._recorded.values())]
        for stage in pipeline.stages
    ]
    return [[len(backward.gives.deferred) for backward in stage] for stage in made]


@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_wide_layers_with_few_rows_are_deferred_and_train_as_plain_keras(remat):
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat=remat)
    wanted, found = trained(None, 32, batch_size=16), trained(strategy, 32, batch_size=16)
    for a, b in zip(wanted.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    counts = deferred_of(found, strategy)
    assert all(stage and all(stage) for stage in counts), counts


@pytest.mark.parametrize(("remat", "deferred"), [("always", False), ("never", True)])
def test_where_memory_is_saved_operands_may_not_outweigh_the_kernel(remat, deferred):
    # 300 × 300 numbers in the kernel; operands are 100 × 600 for a micro-batch and 400 × 600 for all of them.
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat=remat)
    counts = deferred_of(trained(strategy, 400, batch_size=400), strategy)
    assert all(all(stage) == deferred for stage in counts), counts


def test_an_unknown_number_of_rows_is_not_deferred():
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat="never")
    wanted, found = trained(None, 35, batch_size=16), trained(strategy, 35, batch_size=16)
    for a, b in zip(wanted.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    assert all(0 in stage for stage in deferred_of(found, strategy))


def test_mixed_precision_deferred_gradients_are_summed_in_float32():
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat="never")
    wanted = trained(None, 16, batch_size=16, dtype="mixed_bfloat16")
    found = trained(strategy, 16, batch_size=16, dtype="mixed_bfloat16")
    for a, b in zip(wanted.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-3)
    assert all(all(stage) for stage in deferred_of(found, strategy))


@pytest.mark.parametrize("compiled", [False, True])
def test_small_weights_share_a_buffer_and_large_ones_do_not(compiled):
    small = [keras.Variable(np.full(shape, 1.0, "float32")) for shape in ([3], [2, 2], [])]
    large = keras.Variable(np.zeros([SMALL + 1], "float32"))
    half = keras.Variable(np.zeros([5], "float16"), dtype="float16")
    weights = [small[0], large, small[1], half, small[2]]
    buffers = Buffers.of(weights)
    assert buffers.groups == ((1,), (0, 2, 3, 4))
    assert buffers.dtypes == (tf.float32, tf.float32)
    packed = buffers.pack(1, weights, {0: tf.constant([1.0, 2.0, 3.0]), 4: tf.constant(4.0)})
    found = buffers.unpack(1, weights, packed + buffers.zeros(weights, compiled=compiled)[1])
    assert {i: part.numpy().tolist() for i, part in found.items()} == {
        0: [1.0, 2.0, 3.0],
        2: [[0.0, 0.0], [0.0, 0.0]],
        3: [0.0] * 5,
        4: 4.0,
    }


def test_a_layout_without_weights_gives_inputs_only():
    layout = GradientLayout([])
    (made,) = layout.add(layout.sort([tf.ones([2])], [True]), [])
    assert made.numpy().tolist() == [1.0, 1.0]
    assert layout.inputs == (0,)


class ShapeOfPython(keras.layers.Layer):
    """Gives a tensor whose shape only Python knows, so that an imported graph does not."""

    def call(self, x):
        y = tf.boolean_mask(x, tf.ones_like(x[:, 0], tf.bool))
        y.set_shape(x.shape)
        return tf.tanh(y)

    def compute_output_shape(self, input_shape):
        return input_shape


class Padded(keras.layers.Layer):
    def call(self, x):
        return tf.RaggedTensor.from_tensor(x).to_tensor(shape=[None, 512])

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize("layer", [ShapeOfPython, Padded])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_what_is_deferred_is_right_in_every_graph_of_a_step(remat, layer):
    """Sample weights make a second graph, of functions that were traced for the first."""

    def fits(strategy):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(512), layer(), keras.layers.Dense(512, use_bias=False)]
            model = keras.Sequential([keras.Input([8]), *layers])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        x, y = normal(3, 8), normal(3, 512, seed=1)
        for weights in (None, np.array([0.5, 1.0, 2.0])):
            model.fit(x, y, sample_weight=weights, batch_size=3, verbose=0)
        return model

    assert largest_difference(fits(None), fits(tf_gpipe.GPipeStrategy(1, 3, remat=remat))) <= 1e-6
