"""Statistics of batch norm: collected, pooled, and what moves the averages."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_gpipe import compat, moments
from tf_gpipe.errors import ModelError


def moments_of(values, dtype="float32"):
    """What a batch-norm layer gives for a group of rows; NaN for none, as the mean of nothing is."""
    values = values.astype("float64")
    if len(values):
        mean, variance = values.mean(axis=0), values.var(axis=0)
    else:
        mean = variance = np.full(values.shape[1:], np.nan)
    return tf.constant(mean, dtype), tf.constant(variance, dtype), tf.constant(len(values), tf.float32)


def pooled(groups, dtype="float32"):
    return [tensor.numpy() for tensor in moments.pool([moments_of(group, dtype) for group in groups])]


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_pooled_moments_are_those_of_all_rows(sizes, channels, seed):
    rng = np.random.default_rng(seed)
    groups = [rng.normal(rng.normal(), 2.0, (size, channels)) for size in sizes]
    everything = np.concatenate(groups)
    mean, variance, count = pooled(groups)
    np.testing.assert_allclose(mean, everything.mean(axis=0), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(variance, everything.var(axis=0), rtol=1e-5, atol=1e-6)
    assert count == len(everything)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_mean_does_not_cancel(offset):
    values = np.random.default_rng(0).normal(offset, 1.0, (12, 3))
    mean, variance, _ = pooled(np.split(values, [1, 3, 8]))
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=2e-7)
    np.testing.assert_allclose(variance, values.var(axis=0), rtol=1e-3)


def test_groups_far_apart():
    groups = [np.full([3, 1], -1e3), np.full([1, 1], 1e3)]
    mean, variance, count = pooled(groups)
    assert (mean[0], variance[0], count) == (-500, 750000, 4)


def test_float64_keeps_its_precision():
    values = np.random.default_rng(0).normal(3.0, 1.0, (11, 3))
    mean, variance, _ = pooled(np.split(values, [2, 5]), "float64")
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(variance, values.var(axis=0), rtol=1e-14)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_group_does_not_count_even_where_its_moments_are_nan(place):
    values = np.random.default_rng(0).normal(size=(7, 2))
    groups = np.split(values, [3])
    mean, variance, count = pooled([*groups[:place], values[:0], *groups[place:]])
    np.testing.assert_allclose(mean, values.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(variance, values.var(axis=0), rtol=1e-6)
    assert count == 7


def test_nothing_but_empty_groups_gives_zeros():
    for result in pooled([np.zeros([0, 2])] * 3):
        np.testing.assert_array_equal(result, np.zeros_like(result))


def test_each_value_may_have_a_count_of_its_own():
    values = np.random.default_rng(0).normal(size=(9, 2))
    parts = [(values[:2, 0], values[:5, 1]), (values[2:, 0], values[5:, 1])]
    groups = [[tf.stack(column) for column in zip(*(moments_of(v) for v in part), strict=True)] for part in parts]
    mean, variance, count = moments.pool(groups)
    np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, values.var(axis=0), rtol=1e-5)
    assert count.numpy().tolist() == [9, 9]


def test_one_group_is_returned_as_it_is():
    group = moments_of(np.random.default_rng(0).normal(size=(5, 2)))
    assert moments.pool([group]) is group


def test_moments_of_any_rank():
    # A layer over one channel gives scalars with a mask, since Keras squeezes them.
    values = np.random.default_rng(0).normal(size=(9, 2, 3))
    mean, variance, _ = pooled(np.split(values, [4]))
    np.testing.assert_allclose(mean, values.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(variance, values.var(axis=0), rtol=1e-5)
    mean, variance, _ = pooled(np.split(values[:, 0, 0], [4]))
    np.testing.assert_allclose([mean, variance], [values[:, 0, 0].mean(), values[:, 0, 0].var()], rtol=1e-5)


# --- moving averages -------------------------------------------------------------------------------------------------


def built_norm(**arguments):
    layer = keras.layers.BatchNormalization(**{"momentum": 0.9, **arguments})
    layer.build([None, 2])
    return layer


def packed(*calls):
    """What one micro-batch gives: of each call of a layer, means, variances and count."""
    means, variances, counts = zip(*calls, strict=True)
    return [tf.concat(means, 0), tf.concat(variances, 0), tf.constant(counts)]


ONE = packed(([1.0, 2.0], [3.0, 4.0], 5.0))


def test_moving_averages_move_once_by_the_layers_momentum():
    layer = built_norm()
    moments.update_moving_averages([layer], [ONE])
    np.testing.assert_allclose(layer.moving_mean, [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [1.2, 1.3], rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_no_values_move_nothing(value):
    layer = built_norm()
    moments.update_moving_averages([layer], [packed(([value] * 2, [value] * 2, 0.0))] * 2)
    np.testing.assert_array_equal(layer.moving_mean, [0, 0])
    np.testing.assert_array_equal(layer.moving_variance, [1, 1])


def test_averages_of_16_bits_move_in_the_precision_of_the_statistics():
    layer = built_norm(dtype="bfloat16")
    moments.update_moving_averages([layer], [ONE])
    assert layer.moving_mean.dtype == "bfloat16"
    np.testing.assert_array_equal(
        tf.cast(layer.moving_variance.value, tf.float32), tf.cast(tf.cast([1.2, 1.3], tf.bfloat16), tf.float32)
    )


def test_layers_of_a_stage_move_by_themselves():
    """Each by its own momentum and counts, whatever the others', and once for each call."""
    slow, fast, empty = built_norm(momentum=0.99), built_norm(momentum=0.5), built_norm()
    nan = [float("nan")] * 2
    first = packed(
        ([1.0, 2.0], [1.0, 1.0], 2.0), ([8.0, 8.0], [1.0, 1.0], 4.0), (nan, nan, 0.0), ([0.0, 4.0], [1.0, 1.0], 1.0)
    )
    second = packed(([4.0, 5.0], [1.0, 1.0], 1.0), (nan, nan, 0.0), (nan, nan, 0.0), ([2.0, 2.0], [1.0, 1.0], 1.0))
    moments.update_moving_averages([slow, fast, empty, fast], [first, second])
    np.testing.assert_allclose(slow.moving_mean, [0.02, 0.03], rtol=1e-5)
    np.testing.assert_allclose(fast.moving_mean, [(8 / 2 + 1) / 2, (8 / 2 + 3) / 2], rtol=1e-6)
    np.testing.assert_allclose(fast.moving_variance, [1.5, 1.5], rtol=1e-6)
    np.testing.assert_array_equal(empty.moving_mean, [0, 0])


def test_a_momentum_may_be_a_variable():
    layer = keras.layers.BatchNormalization()
    layer.momentum = keras.Variable(0.75, trainable=False)
    layer.build([None, 2])
    moments.update_moving_averages([layer], [ONE])
    np.testing.assert_allclose(layer.moving_mean, [0.25, 0.5], rtol=1e-6)


def test_packing_takes_the_widest_precision_and_scalars_of_one_channel():
    one, two = keras.layers.BatchNormalization(), built_norm()
    one.build([None, 1])
    calls = [
        moments.Moments(one, tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)),
        moments.Moments(
            two, tf.constant([0.1, 4.0], tf.float64), tf.constant([5.0, 6.0], tf.float64), tf.constant(7.0)
        ),
    ]
    means, variances, counts = moments.pack(calls)
    assert (means.numpy().tolist(), variances.numpy().tolist(), counts.numpy().tolist()) == (
        [1.0, 0.1, 4.0],
        [2.0, 5.0, 6.0],
        [3.0, 7.0],
    )
    assert moments.pack([]) == []


# --- collecting ------------------------------------------------------------------------------------------------------


def test_moments_are_collected_with_the_number_of_values():
    layer, x = built_norm(), tf.random.stateless_normal([3, 4, 2], seed=[1, 2])
    layer_3d = keras.layers.BatchNormalization()
    layer_3d.build([None, 4, 2])
    with moments.collected([layer, layer_3d, layer]) as collected:
        layer(x[:, 0], training=True)
        layer_3d(x, training=True)
        layer_3d(x, training=True, mask=tf.constant([[True] * 4, [False] * 4, [True, False, False, False]]))
        layer(x[:, 0], training=False)
    assert [m.layer for m in collected] == [layer, layer_3d, layer_3d]
    assert [float(m.count) for m in collected] == [3, 12, 5]
    np.testing.assert_allclose(collected[1].mean, tf.reduce_mean(x, [0, 1]), atol=1e-6)
    valid = np.concatenate([x[0], x[2, :1]])
    np.testing.assert_allclose(collected[2].variance, valid.var(axis=0), rtol=1e-5)


def test_layers_are_left_as_they_were():
    layer = built_norm(synchronized=True)
    before = set(vars(layer))

    def fail_while_collecting():
        with moments.collected([layer]):
            assert set(vars(layer)) == before | {compat.MOMENTS}
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_while_collecting()
    assert layer.synchronized is True
    assert set(vars(layer)) == before


def test_statistics_are_not_synchronised_over_replicas():
    seen = []

    class Noting(keras.layers.BatchNormalization):
        def _moments(self, inputs, mask):
            seen.append(self.synchronized)
            return super()._moments(inputs, mask)

    layer = Noting(synchronized=True)
    layer.build([None, 2])
    x = tf.constant([[1.0, 2.0], [3.0, 6.0]])
    with moments.collected([layer]) as collected:
        layer(x, training=True)
    layer(x, training=True)
    assert seen == [False, True]
    np.testing.assert_allclose(collected[0].mean, [2.0, 4.0])


def test_frozen_layers_and_layers_with_renorm_are_not_pooled():
    frozen, renorm = built_norm(), built_norm(renorm=True)
    frozen.trainable = False
    with moments.collected([frozen, renorm]) as collected:
        frozen(tf.ones([3, 2]), training=True)
        renorm(tf.ones([3, 2]), training=True)
    assert collected == []
    assert not moments.pools_statistics(renorm)
    assert not moments.pools_statistics(keras.layers.Dense(2))
    assert moments.pools_statistics(frozen)


def test_statistics_of_an_instance_are_its_own():
    layer = built_norm()
    plain = layer._moments
    layer._moments = lambda inputs, mask: tuple(2 * part for part in plain(inputs, mask))
    with moments.collected([layer]) as collected:
        layer(tf.constant([[1.0, 2.0], [3.0, 6.0]]), training=True)
    np.testing.assert_allclose(collected[0].mean, [4.0, 8.0])


@pytest.mark.parametrize(
    "inside", [tf.function, lambda call: lambda x: tf.cond(tf.size(x) > 0, lambda: call(x), lambda: x)]
)
def test_batch_norm_inside_a_graph_of_its_own_is_refused(inside):
    layer = built_norm()

    @tf.function
    def step(x):
        with moments.collected([layer]):
            return inside(lambda x: layer(x, training=True))(x)

    with pytest.raises(ModelError, match="called inside a `tf.function`, loop or branch.*Call it outside of that"):
        step(tf.ones([3, 2]))
