"""`balance` against brute force, and every way in which an explicit partition can be right or wrong."""

import doctest
import itertools
import random
import time

import numpy as np
import pytest

from tf_gpipe import partition
from tf_gpipe.errors import PartitionError
from tf_gpipe.partition import balance, balance_behind, explicit


def brute_force(costs, num_stages, boundary_bytes, memory_bytes, limit):
    """The definition, tried on every partition: (load, squares, bytes, cuts), smallest first; None if none fits."""
    candidates = []
    for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1):
        stages = [slice(*ends) for ends in itertools.pairwise([0, *cuts, len(costs)])]
        if limit is None or max(sum(memory_bytes[stage]) for stage in stages) <= limit:
            loads = [sum(costs[stage]) for stage in stages]
            squares = sum(load * load for load in loads)
            crossing = sum(boundary_bytes[cut] for cut in cuts)
            counts = tuple(stage.stop - stage.start for stage in stages)
            candidates.append((max(loads), squares, crossing, cuts, counts))
    return min(candidates)[-1] if candidates else None


# A partition is written as it falls: costs, and a bar for each cut.
PICTURES = {
    "1 to 6": "1 2 3 4 | 5 6",
    "heavy last": "1 1 1 1 1 1 | 10",
    "heavy first": "10 | 1 1 1 1 1 1",
    "one a little heavier": "100 100 100 | 100 100 100 | 100 101",
    "one heavy stage cannot be helped": "100 | 1 | 1",
    "equal layers": "1 | 1 | 1 | 1",
    "zero costs cut early": "0 | 0 | 0 0 0",
    "zeros before and after": "0 0 7 | 7 0 0 0",
    "a stage for each operation": "3 | 1 | 2",
    "one stage": "3 1 2",
    "one operation": "5",
    "most even of equal bottlenecks": "4 | 1 1 1 | 3 2",
    "seconds": "0.1 0.2 | 0.3",
    "embedding, blocks, head": "1 2 2 | 2 2 | 2 2 | 9",
}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_balance(picture):
    stages = [[float(cost) if "." in cost else int(cost) for cost in stage.split()] for stage in picture.split("|")]
    assert balance(sum(stages, []), len(stages)) == tuple(map(len, stages))


@pytest.mark.parametrize(
    ("costs", "num_stages", "bottleneck"),
    [([1] * 6 + [10], 2, 10), ([100] * 7 + [101], 3, 300), ([0] * 5, 3, 0), ([1e-300, 2e-300, 1e300], 2, 1e300)],
)
def test_balance_reaches_the_lightest_bottleneck(costs, num_stages, bottleneck):
    ends = itertools.accumulate(balance(costs, num_stages), initial=0)
    assert max(sum(costs[start:end]) for start, end in itertools.pairwise(ends)) == bottleneck


@pytest.mark.parametrize("seed", range(20))
def test_balance_equals_brute_force(seed):
    random_numbers = random.Random(seed)
    for _ in range(100):
        n = random_numbers.randint(1, 9)
        num_stages = random_numbers.randint(1, n)
        highest = random_numbers.choice([1, 3, 10])
        costs, boundary, memory = ([random_numbers.randint(0, highest) for _ in range(n)] for _ in range(3))
        limit = random_numbers.choice([None, random_numbers.randint(0, 2 * highest)])
        case = costs, num_stages, boundary, memory
        arguments = {"boundary_bytes": boundary, "memory_bytes": memory, "memory_limit_bytes": limit}
        expected = brute_force(*case, limit)
        if expected is not None:
            assert balance(costs, num_stages, **arguments) == expected, (case, limit)
            continue
        with pytest.raises(PartitionError, match="smallest limit that works is") as caught:
            balance(costs, num_stages, **arguments)
        smallest = int(str(caught.value).partition("works is ")[2].split()[0])
        assert brute_force(*case, smallest) is not None
        assert brute_force(*case, smallest - 1) is None


@pytest.mark.parametrize("seed", range(10))
def test_balance_behind_reaches_the_lightest_bottleneck(seed):
    random_numbers = random.Random(seed)
    for _ in range(50):
        n = random_numbers.randint(1, 9)
        num_stages, first = random_numbers.randint(1, n), random_numbers.randint(0, n - 1)
        forward = [random_numbers.randint(0, 5) for _ in range(n)]
        whole = [
            cost * random_numbers.choice([1, 1.75, 2]) if i < first else 3 * cost for i, cost in enumerate(forward)
        ]

        def heaviest(ends):
            loads = [sum((forward if j <= first else whole)[i:j]) for i, j in itertools.pairwise(ends)]  # noqa: B023
            return max(loads)

        counts = balance_behind(forward, whole, first, num_stages, boundary_bytes=[1] * n)
        assert (len(counts), min(counts) >= 1) == (num_stages, True)
        every = ([0, *cuts, n] for cuts in itertools.combinations(range(1, n), num_stages - 1))
        assert heaviest([*itertools.accumulate(counts, initial=0)]) == min(map(heaviest, every))


def test_balance_behind_is_quick():
    start = time.perf_counter()
    counts = balance_behind([1.5] * 1000, [2.75] * 1000, 900, 8, boundary_bytes=[1] * 1000)
    assert sum(counts) == 1000
    assert time.perf_counter() - start < 5


def test_balance_does_not_depend_on_the_unit():
    random_numbers = random.Random(1)
    costs = [random_numbers.randint(0, 1000) for _ in range(60)]
    for unit in (2.0**-70, 0.25, 2**80):
        assert balance([cost * unit for cost in costs], 7) == balance(costs, 7)


def test_balance_takes_numpy_numbers():
    numpy = pytest.importorskip("numpy")
    for dtype in ("int64", "float32", "float64"):
        assert balance(list(numpy.array([1, 2, 3], dtype)), numpy.int64(2)) == (2, 1)


def test_balance_cuts_where_least_crosses():
    assert balance([1, 0, 0, 1], 2, boundary_bytes=[0, 9, 5, 9]) == (2, 2)
    assert balance([1, 0, 0, 1], 2, boundary_bytes=[0, 9, 5, 4]) == (3, 1)
    assert balance([1, 0, 0, 1], 2) == (1, 3)


def test_the_memory_limit_comes_before_balance():
    costs, memory = [1, 2, 3, 4], [5, 5, 1, 1]
    assert balance(costs, 2) == (3, 1)
    assert balance(costs, 2, memory_bytes=memory, memory_limit_bytes=11) == (3, 1)
    assert balance(costs, 2, memory_bytes=memory, memory_limit_bytes=10.5) == (2, 2)
    assert balance(costs, 2, memory_bytes=memory, memory_limit_bytes=7) == (1, 3)


@pytest.mark.parametrize("cost", [lambda i: 0, lambda i: 1 + i % 7, lambda i: 0.1 * (1 + i % 13)])
def test_512_operations_into_32_stages_take_less_than_2_seconds(cost):
    costs = [cost(i) for i in range(512)]
    start = time.process_time()
    counts = balance(costs, 32, boundary_bytes=costs, memory_bytes=costs, memory_limit_bytes=sum(costs))
    assert time.process_time() - start < 2
    assert len(counts) == 32
    assert sum(counts) == 512
    assert min(counts) >= 1


@pytest.mark.parametrize(
    ("costs", "num_stages", "more", "text"),
    [
        ([1, 2], 3, {}, "received 3 stages for a model of 2 operations. Set num_stages to 2 or less."),
        ([], 1, {}, "received 1 stages for a model of 0 operations."),
        ([1, 2], 0, {}, "num_stages must be a whole number of at least 1; received 0."),
        ([1, 2], 1.5, {}, "num_stages must be a whole number of at least 1; received 1.5."),
        ([1, 2], True, {}, "num_stages must be a whole number of at least 1; received True."),
        ([1, -2], 1, {}, "costs must be finite and at least 0; received -2 for operation 1."),
        ([float("nan")], 1, {}, "costs must be finite and at least 0; received nan for operation 0."),
        ([1, float("inf")], 1, {}, "costs must be finite and at least 0; received inf for operation 1."),
        ([1, 2], 1, {"boundary_bytes": [1]}, "boundary_bytes must hold one number for each of the 2 operations"),
        ([1], 1, {"memory_limit_bytes": 1}, "memory_limit_bytes=1 needs memory_bytes"),
        ([1], 1, {"memory_bytes": [], "memory_limit_bytes": 1}, "memory_bytes must hold one number for each of the 1"),
        ([1], 1, {"memory_bytes": [1], "memory_limit_bytes": -1}, "memory_limit_bytes must be finite and at least 0"),
        (
            [1, 1, 1],
            2,
            {"memory_bytes": [4, 2.5, 3], "memory_limit_bytes": 5},
            "No partition into 2 stages keeps every stage within memory_limit_bytes=5. The smallest limit that works "
            "is 6 bytes; raise the limit to it or use more stages.",
        ),
    ],
)
def test_balance_refuses(costs, num_stages, more, text):
    with pytest.raises(PartitionError) as caught:
        balance(costs, num_stages, **more)
    assert text in str(caught.value)


NAMES = ["stem", "encoder/dense", "encoder/dense_1", "encoder/block/dense_2", "decoder/dense", "decoder/out", "head"]


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ([7], (7,)),
        ([], (7,)),
        ([1, 6], (1, 6)),
        ((2, 3, 2), (2, 3, 2)),
        (["head"], (6, 1)),
        (np.array(["head"]), (6, 1)),
        ((count for count in (1, 6)), (1, 6)),
        (["encoder/dense"], (1, 6)),
        (["dense_1", "out"], (2, 3, 2)),
        (["dense_2"], (3, 4)),
        (["block/dense_2"], (3, 4)),
        (["encoder", "decoder"], (1, 3, 3)),
        (["block", "decoder/dense", "head"], (3, 1, 2, 1)),
    ],
)
def test_explicit(given, counts):
    assert explicit(given, NAMES, num_stages=len(counts)) == counts


def test_a_whole_name_wins_over_the_end_of_another():
    assert explicit(["dense"], ["encoder/dense", "mask", "dense"], num_stages=2) == (2, 1)


@pytest.mark.parametrize(
    ("given", "num_stages", "text"),
    [
        (
            [3, 4],
            3,
            "A partition into 3 stages has 3 operation counts; received 2, [3, 4]. Write, for example, [3, 2, 2].",
        ),
        ([7, 0], 2, "Every stage holds at least 1 operation; received the operation counts [7, 0]."),
        (
            [3, 3],
            2,
            "must add up to the model's 7 operations; received [3, 3], which add up to 6. Write, for example, [4,",
        ),
        ([1] * 8, 8, "received 8 stages for a model of 7 operations"),
        ("flops", 2, "is a list of 2 operation counts, or of the 1 operation names to cut before; received 'flops'."),
        (7, 1, "received 7. Write, for example, [7]."),
        ([3, "head"], 2, "received [3, 'head']. Write, for example, [4, 3]."),
        ([3.5, 3.5], 2, "received [3.5, 3.5]."),
        ([True, 6], 2, "received [True, 6]."),
        ({3, 4}, 2, "received {3, 4}."),
        ({"head": 1}, 2, "received {'head': 1}."),
        (b"ab", 2, "received b'ab'."),
        (np.array([[3, 4]]), 2, "received array([[3, 4]])."),
        (np.array(["haed"]), 2, "The model has no operation 'haed' to cut before."),
        (
            ["head"],
            3,
            "has 2 operation names to cut before; received 1, ['head']. Name one operation for each stage but the",
        ),
        (["stem"], 2, "cannot cut before 'stem', the model's first operation, since the first stage would be empty."),
        (["head", "out"], 3, "received 'head' (operation 6) before 'out' (operation 5). Write ['out', 'head']."),
        (["out", "decoder/out"], 3, "received 'out' and 'decoder/out', the same operation."),
        (["dense"], 2, "a name of 'encoder/dense' (operation 1), 'decoder/dense' (operation 4). Write the whole name."),
        (["haed"], 2, "The model has no operation 'haed' to cut before. Did you mean 'head'?"),
        (["dense1"], 2, "Did you mean 'encoder/dense_1' or "),
        (["zzz"], 2, "Its operations are 'stem', 'encoder/dense', "),
    ],
)
def test_explicit_refuses(given, num_stages, text):
    with pytest.raises(PartitionError) as caught:
        explicit(given, NAMES, num_stages)
    assert text in str(caught.value)


def test_a_layer_that_is_called_twice_has_to_be_counted():
    with pytest.raises(
        PartitionError, match=r"'b' \(operation 1\), 'b' \(operation 2\). Write the partition as operation counts"
    ):
        explicit(["b"], ["a", "b", "b"], num_stages=2)


def test_a_long_model_is_listed_in_part():
    with pytest.raises(PartitionError, match=r"'8', …\.$"):
        explicit(["zzz"], list("123456789"), num_stages=2)


def test_the_examples_of_the_docstrings():
    failed, attempted = doctest.testmod(partition)
    assert failed == 0
    assert attempted >= 4
