"""Which rows a micro-batch takes, how they are put together again, and how much each counts."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_gpipe.errors import MicroBatchError
from tf_gpipe.micro_batch import Rows, count_rows, split_rows


def numbers(values):
    return [int(value) for value in values]


def known_when_it_runs(num_rows, num_micro_batches) -> Rows:
    return split_rows(tf.constant(num_rows, tf.int32), num_micro_batches)


# --- split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "num_micro_batches", "sizes", "static_size"),
    [
        (8, 4, (2, 2, 2, 2), 2),
        (7, 4, (2, 2, 2, 1), None),
        (10, 4, (3, 3, 2, 2), None),
        (2, 4, (1, 1), 1),
        (1, 8, (1,), 1),
        (5, 1, (5,), 5),
        (5, 5, (1, 1, 1, 1, 1), 1),
        (0, 3, (0,), 0),
    ],
)
def test_rows_are_split_as_equally_as_possible_longer_first(num_rows, num_micro_batches, sizes, static_size):
    rows = split_rows(num_rows, num_micro_batches)
    assert rows.sizes == sizes
    assert rows.begins == tuple(sum(sizes[:m]) for m in range(len(sizes)))
    assert rows.total == num_rows
    assert rows.static_size == static_size
    assert rows.is_static
    assert len(rows) == len(sizes)


@given(num_rows=st.integers(1, 500), num_micro_batches=st.integers(1, 64))
def test_known_rows_are_all_there_once_and_in_order(num_rows, num_micro_batches):
    rows = split_rows(num_rows, num_micro_batches)
    taken = [begin + i for begin, size in zip(rows.begins, rows.sizes, strict=True) for i in range(size)]
    assert taken == list(range(num_rows))
    assert len(rows) == min(num_micro_batches, num_rows)
    assert max(rows.sizes) - min(rows.sizes) <= 1
    assert list(rows.sizes) == sorted(rows.sizes, reverse=True)
    assert min(rows.sizes) >= 1
    assert rows.static_size == (rows.sizes[0] if len(set(rows.sizes)) == 1 else None)


@given(num_rows=st.integers(1, 60), num_micro_batches=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_rows_known_when_the_step_runs_are_split_alike(num_rows, num_micro_batches):
    expected, rows = split_rows(num_rows, num_micro_batches), known_when_it_runs(num_rows, num_micro_batches)
    assert not rows.is_static
    assert rows.static_size is None
    assert len(rows) == num_micro_batches
    count = len(expected)
    assert numbers(rows.sizes) == [*expected.sizes, *[0] * (num_micro_batches - count)]
    assert numbers(rows.begins)[:count] == list(expected.begins)
    # What comes after the last row repeats it, so that nothing is ever empty.
    assert numbers(rows.begins)[count:] == [num_rows - 1] * (num_micro_batches - count)
    assert int(rows.total) == num_rows


def test_rows_known_when_the_step_runs_keep_their_integer_type():
    rows = split_rows(tf.constant(7, tf.int64), 3)
    assert {tensor.dtype for tensor in rows.sizes} == {tf.int64}
    assert numbers(rows.sizes) == [3, 2, 2]


# --- take and gather -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [split_rows, known_when_it_runs])
@pytest.mark.parametrize("shape", [[], [3], [2, 3], [0]])
@pytest.mark.parametrize(("num_rows", "num_micro_batches"), [(8, 4), (7, 4), (2, 4), (1, 3), (5, 1)])
def test_gather_undoes_take(num_rows, num_micro_batches, shape, make):
    x = normal(num_rows, *shape)
    rows = make(num_rows, num_micro_batches)
    parts = rows.split(tf.constant(x))
    assert all(part.shape[0] >= 1 for part in parts)
    np.testing.assert_array_equal(rows.gather(parts), x)


@pytest.mark.parametrize("dtype", ["int32", "bool", "string", "bfloat16", "complex64"])
def test_any_dtype_is_split(dtype):
    x = tf.constant([f"row {i}" for i in range(5)]) if dtype == "string" else tf.cast(tf.range(5), dtype)
    for rows in (split_rows(5, 3), known_when_it_runs(5, 8)):
        gathered = rows.gather(rows.split(x))
        assert gathered.dtype == x.dtype
        np.testing.assert_array_equal(gathered.numpy(), x.numpy())


def test_tensors_of_other_shapes_are_split_at_the_same_rows():
    rows = split_rows(7, 3)
    a, b = tf.range(7), tf.reshape(tf.range(14), [7, 2])
    for m in range(3):
        np.testing.assert_array_equal(rows.split(b)[m][:, 0], 2 * rows.split(a)[m])


def test_the_static_shape_is_kept_where_rows_are_known():
    rows = split_rows(7, 3)

    @tf.function
    def shapes(x):
        parts = rows.split(x)
        return tuple(tf.constant(part.shape.as_list()) for part in [*parts, rows.gather(parts)])

    assert [s.numpy().tolist() for s in shapes(tf.zeros([7, 4]))] == [[3, 4], [2, 4], [2, 4], [7, 4]]


def test_a_first_axis_that_turns_out_otherwise_fails_with_the_rows_in_the_message():
    """And not with what the splitting of too few rows says."""

    @tf.function(input_signature=[tf.TensorSpec([8, 2]), tf.TensorSpec([None, 2])])
    def split(a, b):
        rows = split_rows(count_rows([a, b], ["a", "b"]), 4)
        return rows.split(a), rows.split(b)

    for num_rows in (6, 7, 9, 12):
        with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
            split(tf.zeros([8, 2]), tf.zeros([num_rows, 2]))


def test_one_micro_batch_is_the_mini_batch_itself():
    x = tf.constant(normal(5, 2))
    for rows in (split_rows(5, 1), known_when_it_runs(5, 1), split_rows(1, 4)):
        assert rows.split(x)[0] is x
        assert rows.gather([x]) is x


def test_a_batch_of_unknown_size_works_in_one_trace():
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def round_trip(x):
        traces.append(x.shape)
        rows = split_rows(count_rows([x], ["x"]), 4)
        return rows.gather([part * 1.0 for part in rows.split(x)]), tf.stack([rows.weight(m) for m in range(4)])

    for num_rows in (1, 2, 3, 4, 5, 9, 16):
        x = normal(num_rows, 2)
        gathered, weights = round_trip(x)
        np.testing.assert_array_equal(gathered, x)
        np.testing.assert_allclose(tf.reduce_sum(weights), 1, rtol=1e-7)
    assert len(traces) == 1


def test_outputs_beyond_the_mini_batch_are_dropped():
    rows = known_when_it_runs(2, 4)
    parts = [tf.fill([1, 2], float(m)) for m in range(4)]
    np.testing.assert_array_equal(rows.gather(parts), [[0, 0], [1, 1]])
    assert [rows.counted(part, m).shape[0] for m, part in enumerate(parts)] == [1, 1, 0, 0]


def test_gradients_of_outputs_beyond_the_mini_batch_are_zero():
    d = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    rows = known_when_it_runs(2, 4)
    np.testing.assert_array_equal(tf.concat(rows.split_gradient(d), axis=0), [[1, 2], [3, 4], [0, 0], [0, 0]])
    rows = split_rows(2, 4)
    np.testing.assert_array_equal(tf.concat(rows.split_gradient(d), axis=0), d)


def test_gradients_beyond_the_mini_batch_are_zero_even_where_they_are_not_finite():
    rows = known_when_it_runs(1, 2)
    np.testing.assert_array_equal(rows.split_gradient(tf.constant([[np.inf, np.nan]]))[1], [[0, 0]])


def test_no_rows_at_all_give_weights_of_zero():
    rows = known_when_it_runs(0, 3)
    assert numbers(rows.sizes) == [0, 0, 0]
    assert [float(rows.weight(m)) for m in range(3)] == [0, 0, 0]
    assert float(split_rows(0, 3).weight(0)) == 0


# --- weights ---------------------------------------------------------------------------------------------------------


@given(num_rows=st.integers(1, 300), num_micro_batches=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_weights_are_shares_of_rows_and_add_up_to_one(num_rows, num_micro_batches):
    for rows in (split_rows(num_rows, num_micro_batches), known_when_it_runs(num_rows, num_micro_batches)):
        weights = [rows.weight(m) for m in range(len(rows))]
        assert {weight.dtype for weight in weights} == {tf.float32}
        np.testing.assert_allclose(weights, [int(size) / num_rows for size in rows.sizes], rtol=1e-7)
        np.testing.assert_allclose(np.sum(weights, dtype="float64"), 1, rtol=1e-6)


@pytest.mark.parametrize("make", [split_rows, known_when_it_runs])
def test_weights_have_the_precision_of_their_dtype(make):
    rows = make(7, 3)
    assert [float(rows.weight(m, tf.float64)) for m in range(3)] == [3 / 7, 2 / 7, 2 / 7]
    assert rows.weight(0, tf.float16).dtype == tf.float16


# --- number of rows --------------------------------------------------------------------------------------------------


def test_the_number_of_rows_is_the_common_first_axis():
    assert count_rows([tf.zeros([5, 2]), tf.zeros([5]), tf.zeros([5, 1, 1])], ["a", "b", "c"]) == 5


def test_one_input_of_known_length_is_enough():
    known = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([6])])
    def run(x, y):
        known.append(count_rows([x, y], ["x", "y"]))
        return x

    run(tf.zeros([6, 2]), tf.zeros([6]))
    assert known == [6]


def test_inputs_of_unknown_length_are_counted_when_the_step_runs():
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def run(x, y):
        rows = count_rows([x, y], ["x", "y"])
        assert isinstance(rows, tf.Tensor)
        return rows

    assert int(run(tf.zeros([6, 2]), tf.zeros([6]))) == 6


def test_inputs_of_different_length_are_refused_with_their_names():
    with pytest.raises(MicroBatchError, match=r"same number of rows.*'left': 5, 'right': 4.*first axis"):
        count_rows([tf.zeros([5, 2]), tf.zeros([4, 2]), tf.zeros([5])], ["left", "right", "other"])


def test_a_scalar_input_is_refused_with_its_name():
    with pytest.raises(MicroBatchError, match=r"batch axis.*input 'temperature' is a scalar"):
        count_rows([tf.zeros([5, 2]), tf.zeros([])], ["x", "temperature"])


def test_errors_are_value_errors():
    with pytest.raises(ValueError, match="same number of rows"):
        count_rows([tf.zeros([5]), tf.zeros([4])], ["a", "b"])


@pytest.mark.parametrize("known", [(None, None), (None, 6), (6, None)])
def test_inputs_whose_lengths_differ_only_when_the_step_runs_are_refused_then(known):
    @tf.function(input_signature=[tf.TensorSpec([known[0], 2]), tf.TensorSpec([known[1]])])
    def run(x, y):
        return x[: count_rows([x, y], ["left", "right"])]

    assert run(tf.zeros([6, 2]), tf.zeros([6])).shape == (6, 2)
    lengths = [length or 5 + place for place, length in enumerate(known)]
    lengths = lengths if lengths[0] != lengths[1] else [6, 5]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"same number of rows.*left"):
        run(tf.zeros([lengths[0], 2]), tf.zeros([lengths[1]]))
