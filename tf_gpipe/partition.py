"""From the cost of each operation to K consecutive, non-empty stages.

The slowest stage sets the pace of a pipeline, so the partition minimises the heaviest stage, and does so exactly:
costs are turned into whole numbers of one common unit (every float is one), so neither rounding nor the order of
summation can make two machines cut differently. Heuristics were rejected, since the exact answer is instantaneous: a
threshold on the cumulative cost leaves stages empty, and moving cuts until the stages look alike stops early (costs
`[1, 1, 1, 1, 1, 1, 10]` in two stages gave a heaviest stage of 13 where 10 is possible).

    costs     4 | 1  1  1 | 3  2      K = 3
    counts    1 |    3    |   2
    loads     4 |    3    |   5       heaviest 5, squares 50; 4 1 | 1 1 | 3 2 has 5 too, and squares 54

Nothing here imports TensorFlow, and an operation is only an index and, for explicit partitions, a name.
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from typing import SupportsIndex

from tf_gpipe.errors import PartitionError

__all__ = ["balance", "balance_around", "balance_behind", "explicit"]

_MAX_NAMES_IN_ERROR = 8


def balance(
    costs: Sequence[float],
    num_stages: int,
    *,
    boundary_bytes: Sequence[float] | None = None,
    memory_bytes: Sequence[float] | None = None,
    memory_limit_bytes: float | None = None,
) -> tuple[int, ...]:
    """Divides a chain of operations into stages so that the heaviest stage is as light as possible.

    Stands for the minimum over all partitions of (heaviest load, sum of squared loads, bytes that cross the cuts,
    cuts), compared in this order: of equally good partitions the most even one, then the one that sends least, then the
    one that cuts earliest.

    Args:
        costs: cost of each of n operations, ≥ 0, in any unit (FLOPs, seconds, bytes).
        num_stages: K, from 1 to n.
        boundary_bytes: n numbers ≥ 0; entry i is what crosses a cut before operation i (entry 0 is not used).
        memory_bytes: n numbers ≥ 0, the memory of each operation. Needed with `memory_limit_bytes`, else not used.
        memory_limit_bytes: the most memory that the operations of one stage may need together; no limit by default.

    Returns:
        K counts ≥ 1 that add up to n: the number of consecutive operations in each stage.

    Raises:
        PartitionError: K is not from 1 to n; a sequence has the wrong length or holds a number that is negative or not
            finite; or no partition keeps to the memory limit, and the message names the smallest limit that one does.

    Example:
        >>> balance([1, 1, 1, 1, 1, 1, 10], num_stages=2)
        (6, 1)
        >>> balance([1, 2, 3, 4], num_stages=2, memory_bytes=[5, 5, 1, 1], memory_limit_bytes=8)
        (1, 3)
    """
    num_operations = len(costs)
    num_stages = _check_num_stages(num_operations, num_stages)
    loads, _ = _prefix_sums("costs", costs, num_operations)
    furthest = [num_operations] * num_operations
    if memory_limit_bytes is not None:
        furthest = _furthest_by_memory(memory_bytes, memory_limit_bytes, num_operations, num_stages)
    bottleneck = _lightest_bottleneck(loads, furthest, num_stages)
    furthest = list(map(min, furthest, _furthest_ends(loads, bottleneck)))
    crossing = [0] * num_operations
    if boundary_bytes is not None:
        crossing, _ = _whole_numbers("boundary_bytes", boundary_bytes, num_operations)
    return _most_even(loads, crossing, furthest, num_stages)


def balance_behind(
    forward: Sequence[float],
    whole: Sequence[float],
    first: int,
    num_stages: int,
    *,
    boundary_bytes: Sequence[float],
) -> tuple[int, ...]:
    """As `balance`, where stages before operation `first` only go forward: frozen layers before all that is trained.

    An operation before it costs less in such a stage than in one that goes back, which runs it forward again. So the
    stages that only go forward are balanced apart from the others, for each number of them and the best cut between.

    Args:
        forward: cost of each of n operations in a stage that only goes forward.
        whole: cost of each in a stage that goes back; not less than the former.
        first: the first operation whose stage goes back, from 0 to n − 1.
        num_stages: K, from 1 to n.
        boundary_bytes: as in `balance`.

    Returns:
        K counts ≥ 1 that add up to n.

    Example:
        >>> balance_behind([1] * 10, [2] * 9 + [4], first=9, num_stages=2, boundary_bytes=[0] * 10)
        (7, 3)
        >>> balance([1] * 9 + [3], num_stages=2)
        (6, 4)
    """
    n = len(forward)
    sums, scale = _prefix_sums("forward", forward, n)
    whole_sums, whole_scale = _prefix_sums("whole", whole, n)

    def before(stages: int, cut: int) -> Fraction:
        return Fraction(_lightest_bottleneck(sums[: cut + 1], [cut] * cut, stages), scale)

    def behind(stages: int, cut: int) -> Fraction:
        rest = [total - whole_sums[cut] for total in whole_sums[cut:]]
        return Fraction(_lightest_bottleneck(rest, [n - cut] * (n - cut), stages), whole_scale)

    tries = [(behind(num_stages, 0), 0, 0)]
    for stages in range(1, num_stages):
        # The further the cut, the more is before it and the less behind it: the best is where these are equal.
        cuts = range(stages, min(first, n - num_stages + stages) + 1)
        at = bisect_left(cuts, True, key=lambda cut: before(stages, cut) >= behind(num_stages - stages, cut))
        near = cuts[max(at - 1, 0) : at + 1]
        tries += [(max(before(stages, cut), behind(num_stages - stages, cut)), stages, cut) for cut in near]
    _, stages, cut = min(tries)
    found = balance(forward[:cut], stages, boundary_bytes=boundary_bytes[:cut]) if stages else ()
    return (*found, *balance(whole[cut:], num_stages - stages, boundary_bytes=boundary_bytes[cut:]))


def balance_around(costs: Sequence[float], stages: Sequence[int | None], num_stages: int) -> tuple[int, ...]:
    """Divides a chain of operations, some of which have their stages already, so that the heaviest is light.

    Args:
        costs: cost of each of n operations, ≥ 0, in any unit.
        stages: n entries: the stage of an operation that has one, in ascending order, else None.
        num_stages: K.

    Returns:
        K counts that add up to n; 0 where nothing is left for a stage.

    Example:
        >>> balance_around([1, 1, 1, 1, 1, 1], [0, 0, None, None, None, None], num_stages=3)
        (2, 2, 2)
        >>> balance_around([1, 1, 1, 1], [None, 1, None, None], num_stages=3)
        (1, 2, 1)
    """
    num_operations = len(costs)
    sums, _ = _prefix_sums("costs", costs, num_operations)
    fixed = [(i, stage) for i, stage in enumerate(stages) if stage is not None]
    # Stage k may begin after the operations of the stages before it, and must before its own.
    lows = [max((i + 1 for i, stage in fixed if stage < k), default=0) for k in range(num_stages)] + [num_operations]
    highs = [min((i for i, stage in fixed if stage >= k), default=num_operations) for k in range(num_stages)]
    highs.append(num_operations)

    def cuts(limit: int) -> list[int] | None:
        """Where stages begin if each is filled up to a limit; None if that is not enough."""
        found = [0]
        for k in range(1, num_stages + 1):
            found.append(min(bisect_right(sums, sums[found[-1]] + limit) - 1, highs[k]))
            if found[-1] < lows[k]:
                return None
        return found

    low, high = 0, sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cuts(middle) is not None else (middle + 1, high)
    best = cuts(low) or [0] * num_stages + [num_operations]
    return tuple(end - start for start, end in itertools.pairwise(best))


def explicit(partition: Sequence[int] | Sequence[str], names: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Turns a partition written by the user into the number of operations in each stage.

    A name is looked up in full, then as the end of a longer name after a `/` (`"dense_1"` or `"block/dense_1"` for
    `"encoder/block/dense_1"`), then as a nested model, which is cut before the first of its operations.

    Args:
        partition: K counts ≥ 1 that add up to the number of operations, or the K−1 names of the operations to cut
            before, in the model's order.
        names: name of each operation, in the model's order; `/` separates a nested model from its layers.
        num_stages: K.

    Returns:
        K counts ≥ 1 that add up to `len(names)`.

    Raises:
        PartitionError: K is not from 1 to `len(names)`, or the partition does not name K non-empty stages. The message
            gives the total of the counts, or similar names, or the names between which a short one does not decide.

    Example:
        >>> explicit([1, 2], ["dense", "head/dense_1", "head/softmax"], num_stages=2)
        (1, 2)
        >>> explicit(["softmax"], ["dense", "head/dense_1", "head/softmax"], num_stages=2)
        (2, 1)
    """
    num_stages = _check_num_stages(len(names), num_stages)
    counts, cut_names = counts_or_names(partition, num_stages, len(names))
    return _from_counts(counts, len(names)) if counts else _from_names(cut_names, names)


def counts_or_names(
    partition: object, num_stages: int, num_operations: int | None = None
) -> tuple[list[int], list[str]]:
    """Checks what can be known of a partition written by the user without the model.

    Args:
        partition: K counts ≥ 1, or K−1 names of operations to cut before.
        num_stages: K.
        num_operations: those of the model, for the advice, if they are known.

    Returns:
        The counts and the names; one of the lists is empty.

    Raises:
        PartitionError: the partition is neither, or too long or too short.

    Example:
        >>> counts_or_names((1, 2), num_stages=2), counts_or_names(["softmax"], num_stages=2)
        (([1, 2], []), ([], ['softmax']))
    """
    if num_operations is None:
        advice = (
            f"Write {num_stages} whole numbers that add up to the model's operations, or {num_stages - 1} of their "
            "names; `plan` of a strategy without `partition` tells them."
        )
    else:
        advice = f"Write, for example, {_even_counts(num_operations, num_stages)}."
    if isinstance(partition, Iterable) and not isinstance(partition, (str, bytes, Set, Mapping)):
        entries = _entries(partition)
        counts = [count for count in map(_whole, entries) if count is not None]
        cut_names = [str(entry) for entry in entries if isinstance(entry, str)]
        if len(counts) == len(entries) > 0:
            _check_counts(counts, num_stages, advice)
            return counts, []
        if len(cut_names) == len(entries):
            _check_number_of_names(cut_names, num_stages)
            return [], cut_names
    raise PartitionError(
        f"An explicit partition is a list of {num_stages} operation counts, or of the {num_stages - 1} operation names "
        f"to cut before; received {partition!r}. {advice}"
    )


def _entries(partition: Iterable[object]) -> list[object]:
    try:
        return list(partition)
    except TypeError:  # an array without dimensions
        return [partition]


def _check_counts(counts: list[int], num_stages: int, advice: str) -> None:
    if len(counts) != num_stages:
        raise PartitionError(
            f"A partition into {num_stages} stages has {num_stages} operation counts; received {len(counts)}, "
            f"{counts}. {advice}"
        )
    if min(counts) < 1:
        raise PartitionError(
            f"Every stage holds at least 1 operation; received the operation counts {counts}. {advice}"
        )


def _check_number_of_names(cut_names: list[str], num_stages: int) -> None:
    if len(cut_names) != num_stages - 1:
        raise PartitionError(
            f"A partition into {num_stages} stages has {num_stages - 1} operation names to cut before; received "
            f"{len(cut_names)}, {cut_names}. Name one operation for each stage but the first, or set "
            f"num_stages={len(cut_names) + 1}."
        )


def _from_counts(counts: list[int], num_operations: int) -> tuple[int, ...]:
    if sum(counts) != num_operations:
        raise PartitionError(
            f"The operation counts of a partition must add up to the model's {num_operations} operations; received "
            f"{counts}, which add up to {sum(counts)}. Write, for example, {_even_counts(num_operations, len(counts))}."
        )
    return tuple(counts)


def _from_names(cut_names: list[str], names: Sequence[str]) -> tuple[int, ...]:
    cuts = [_find(name, names) for name in cut_names]
    for name, cut in zip(cut_names, cuts, strict=True):
        if cut == 0:
            raise PartitionError(
                f"A partition cannot cut before {name!r}, the model's first operation, since the first stage would be "
                "empty. Name the first operation of each stage but the first."
            )
    for (first_name, first), (name, cut) in itertools.pairwise(zip(cut_names, cuts, strict=True)):
        if first == cut:
            raise PartitionError(
                f"Each cut of a partition must be another; received {first_name!r} and {name!r}, the same operation. "
                "Name it once, and another operation for the other cut."
            )
        if first > cut:
            in_order = [name for _, name in sorted(zip(cuts, cut_names, strict=True))]
            raise PartitionError(
                f"The operations to cut before must be in the model's order; received {first_name!r} (operation "
                f"{first}) before {name!r} (operation {cut}). Write {in_order}."
            )
    return tuple(end - start for start, end in itertools.pairwise([0, *cuts, len(names)]))


def _find(name: str, names: Sequence[str]) -> int:
    """Index of the operation that `name` stands for: in full, as the end of a path, or as a nested model."""
    found = [i for i, full in enumerate(names) if full == name]
    found = found or [i for i, full in enumerate(names) if full.endswith(f"/{name}")]
    found = found or [i for i, full in enumerate(names) if f"/{name}/" in f"/{full}"][:1]
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(f"{names[i]!r} (operation {i})" for i in found)
        repeated = len({names[i] for i in found}) < len(found)
        advice = "Write the partition as operation counts." if repeated else "Write the whole name."
        raise PartitionError(f"{name!r} must stand for one operation; received a name of {candidates}. {advice}")
    short = {full.rpartition("/")[2]: full for full in reversed(names)}
    near = [short.get(match, match) for match in difflib.get_close_matches(name, [*names, *short], n=3)]
    if near:
        advice = f"Did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?"
    else:
        known = ", ".join(map(repr, names[:_MAX_NAMES_IN_ERROR]))
        advice = f"Its operations are {known}{', …' if len(names) > _MAX_NAMES_IN_ERROR else ''}."
    raise PartitionError(f"The model has no operation {name!r} to cut before. {advice}")


def _even_counts(num_operations: int, num_stages: int) -> list[int]:
    quotient, remainder = divmod(num_operations, num_stages)
    return [quotient + (k < remainder) for k in range(num_stages)]


def _check_num_stages(num_operations: int, num_stages: int) -> int:
    count = _whole(num_stages)
    if count is None or count < 1:
        raise PartitionError(f"num_stages must be a whole number of at least 1; received {num_stages!r}.")
    if count > num_operations:
        raise PartitionError(
            f"Every stage holds at least 1 operation; received {count} stages for a model of {num_operations} "
            f"operations. Set num_stages to {num_operations} or less."
        )
    return count


def _whole(value: object) -> int | None:
    """`value` as an int if it is a whole number of any type but bool, else None."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several numbers, or of floats
        return None


def _whole_numbers(name: str, values: Sequence[float], length: int) -> tuple[list[int], int]:
    """Scales numbers to whole ones without any rounding, and returns the scale: a float is a whole number over 2^p."""
    if len(values) != length:
        raise PartitionError(
            f"{name} must hold one number for each of the {length} operations; received {len(values)}. "
            "Measure both on the same model."
        )
    ratios = []
    for i, value in enumerate(values):
        whole = _whole(value)
        number = float(value) if whole is None else whole
        if not math.isfinite(number) or number < 0:
            raise PartitionError(f"{name} must be finite and at least 0; received {value!r} for operation {i}.")
        ratios.append(number.as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios], scale


def _prefix_sums(name: str, values: Sequence[float], length: int) -> tuple[list[int], int]:
    """Sums of the first 0, 1, …, n values as whole numbers, and their scale: operations i to j−1 weigh s[j] − s[i]."""
    whole, scale = _whole_numbers(name, values, length)
    return list(itertools.accumulate(whole, initial=0)), scale


def _furthest_ends(sums: Sequence[int], limit: int) -> list[int]:
    """For each first operation i, the furthest end j of a stage i … j−1 that weighs no more than the limit."""
    return [bisect_right(sums, start + limit) - 1 for start in sums[:-1]]


def _furthest_by_memory(
    memory_bytes: Sequence[float] | None, limit_bytes: float, num_operations: int, num_stages: int
) -> list[int]:
    """`_furthest_ends` under the memory limit; raises a `PartitionError` if that leaves no partition."""
    if memory_bytes is None:
        raise PartitionError(
            f"memory_limit_bytes={limit_bytes} needs memory_bytes, the memory of each operation; received none. "
            "Pass both or neither."
        )
    sums, scale = _prefix_sums("memory_bytes", memory_bytes, num_operations)
    (limit,), limit_scale = _whole_numbers("memory_limit_bytes", [limit_bytes], 1)
    smallest = _lightest_bottleneck(sums, [num_operations] * num_operations, num_stages)
    if smallest * limit_scale > limit * scale:
        raise PartitionError(
            f"No partition into {num_stages} stages keeps every stage within memory_limit_bytes={limit_bytes}. The "
            f"smallest limit that works is {-(-smallest // scale)} bytes; raise the limit to it or use more stages."
        )
    return _furthest_ends(sums, limit * scale // limit_scale)


def _lightest_bottleneck(sums: Sequence[int], furthest: Sequence[int], num_stages: int) -> int:
    """Weight of the heaviest stage in the best partition, by bisection over whole numbers.

    A limit can be kept if filling stage after stage up to it needs at most K stages: stages can then be divided until
    there are K, which makes none of them heavier.
    """

    def can_keep(limit: int) -> bool:
        end = 0
        for _ in range(num_stages):
            end = min(bisect_right(sums, sums[end] + limit) - 1, furthest[end])
            if end == len(furthest):
                return True
        return False

    low, high = max(end - start for start, end in itertools.pairwise(sums)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if can_keep(middle) else (middle + 1, high)
    return low


def _most_even(
    loads: Sequence[int], crossing: Sequence[int], furthest: Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Of the partitions whose stages end by `furthest`, the one of smallest squares, then bytes, then cuts.

    Dynamic programme over suffixes. With best[k][i] for operations i, i+1, … in k stages, whose first stage ends at j:

        best[k][i] = min over j of  (loads[j] − loads[i])² · W  +  crossing[j]  +  best[k−1][j]

    W exceeds all bytes together, so one number compares squares first and bytes second, and the first of equal j cuts
    earliest. As squares are convex, that j never moves left when i moves right; so the middle row's j halves the
    columns that are left to try for the rows on either side: O(K·n·log n) in all.
    """
    num_operations = len(furthest)
    weight = sum(crossing) + 1
    starts = range(bisect_left(furthest, num_operations), num_operations)  # Where the last k stages may start.
    best = {i: (loads[-1] - loads[i]) ** 2 * weight for i in starts}
    first_ends = []  # One dictionary for k = 2, 3, …: where the first of k stages ends, by its start.
    for k in range(2, num_stages + 1):
        ends, starts = starts, range(bisect_left(furthest, starts[0]), num_operations - k + 1)
        rest = {j: crossing[j] + best[j] for j in ends}
        best, first_end = {}, {}
        todo = [(starts[0], starts[-1], ends[0], ends[-1])]
        while todo:
            first, last, low, high = todo.pop()
            if first > last:
                continue
            i = (first + last) // 2
            tries = range(max(low, i + 1), min(high, furthest[i]) + 1)
            best[i], first_end[i] = min(((loads[j] - loads[i]) ** 2 * weight + rest[j], j) for j in tries)
            todo += [(first, i - 1, low, first_end[i]), (i + 1, last, first_end[i], high)]
        first_ends.append(first_end)
    cuts = [0]
    for first_end in reversed(first_ends):
        cuts.append(first_end[cuts[-1]])
    return tuple(end - start for start, end in itertools.pairwise([*cuts, num_operations]))
