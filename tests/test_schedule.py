"""Schedules as values: GPipe's order, times, text forms, and every way in which a schedule can be wrong."""

import doctest
import itertools
import textwrap

import pytest

from tf_gpipe import schedule as schedule_module
from tf_gpipe import tasks as tasks_module
from tf_gpipe.errors import ScheduleError
from tf_gpipe.schedule import Schedule, Task


def rows(text):
    return tuple(tuple(map(Task.parse, line.split())) for line in text.strip().splitlines())


def picture(text):
    return textwrap.dedent(text).strip()


SIZES = list(itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 5, 16]))

ONE_F_ONE_B = """
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

INTERLEAVED = """
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""


def test_gpipe_runs_forward_in_order_and_backward_in_reverse():
    assert Schedule.gpipe(num_stages=2, num_micro_batches=3).tasks == rows("""
        0F0 0F1 0F2 0B2 0B1 0B0
        1F0 1F1 1F2 1B2 1B1 1B0
    """)


def test_gpipe_drawn():
    assert str(Schedule.gpipe(num_stages=4, num_micro_batches=4)) == picture("""
        gpipe: 4 stages, 4 micro-batches, 21 ticks, bubble 42.9 %
        tick      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20
        stage 0  F0 F1 F2 F3  .  .  .  .  .  .  .  .  . B3 B3 B2 B2 B1 B1 B0 B0
        stage 1   . F0 F1 F2 F3  .  .  .  .  .  . B3 B3 B2 B2 B1 B1 B0 B0  .  .
        stage 2   .  . F0 F1 F2 F3  .  .  . B3 B3 B2 B2 B1 B1 B0 B0  .  .  .  .
        stage 3   .  .  . F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0  .  .  .  .  .  .
    """)


def test_equal_ticks_drawn():
    assert str(Schedule.gpipe(3, 2).simulate(backward_ticks=1)) == picture("""
        gpipe: 3 stages, 2 micro-batches, 8 ticks, bubble 50.0 %
        tick      0  1  2  3  4  5  6  7
        stage 0  F0 F1  .  .  .  . B1 B0
        stage 1   . F0 F1  .  . B1 B0  .
        stage 2   .  . F0 F1 B1 B0  .  .
    """)


def test_one_stage_drawn():
    assert str(Schedule.gpipe(1, 1)) == picture("""
        gpipe: 1 stage, 1 micro-batch, 3 ticks, bubble 0.0 %
        tick      0  1  2
        stage 0  F0 B0 B0
    """)


def test_several_stages_a_device_drawn():
    schedule = Schedule("loop", 4, 2, rows(INTERLEAVED))
    assert str(schedule.simulate(backward_ticks=1)) == picture("""
        loop: 4 stages, 2 micro-batches, 10 ticks, bubble 20.0 %
        tick        0   1   2   3   4   5   6   7   8   9
        device 0  0F0 0F1 2F0 2F1   .   . 2B0 2B1 0B0 0B1
        device 1    . 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1   .
    """)


def test_uneven_stages_drawn():
    assert str(Schedule.gpipe(2, 2).simulate(forward_ticks=[1, 2], backward_ticks=[2, 1])) == picture("""
        gpipe: 2 stages, 2 micro-batches, 10 ticks, bubble 40.0 %
        tick      0  1  2  3  4  5  6  7  8  9
        stage 0  F0 F1  .  .  .  . B1 B1 B0 B0
        stage 1   . F0 F0 F1 F1 B1 B0  .  .  .
    """)


def test_recomputation_drawn():
    assert str(Schedule.gpipe(3, 2).simulate(remat="always")) == picture("""
        gpipe: 3 stages, 2 micro-batches, 16 ticks, bubble 50.0 %, remat always
        tick      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
        stage 0  F0 F1  .  .  .  .  .  .  .  . R1 B1 B1 R0 B0 B0
        stage 1   . F0 F1  .  .  .  . R1 B1 B1 R0 B0 B0  .  .  .
        stage 2   .  . F0 F1 R1 B1 B1 R0 B0 B0  .  .  .  .  .  .
    """)


def test_recomputation_of_uneven_stages_on_one_device_drawn():
    schedule = Schedule("loop", 2, 1, rows("0F0 1F0 1B0 0B0"))
    assert str(schedule.simulate([1, 2], 1, remat="always")) == picture("""
        loop: 2 stages, 1 micro-batch, 8 ticks, bubble 0.0 %, remat always
        tick        0   1   2   3   4   5   6   7
        device 0  0F0 1F0 1F0 1R0 1R0 1B0 0R0 0B0
    """)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_recomputation_lengthens_the_backward_tasks_that_remat_names(num_stages, num_micro_batches):
    schedule = Schedule.gpipe(num_stages, num_micro_batches)
    for remat, recomputed in (("always", num_micro_batches), ("except_last", num_micro_batches - 1), ("never", 0)):
        simulation = schedule.simulate(2, 3, remat=remat)
        for task in schedule.order():
            again = 2 if task.kind == "backward" and task.micro_batch < recomputed else 0
            assert simulation.recompute_ticks(task) == again
            assert simulation.ticks(task) == (2 if task.kind == "forward" else 3) + again
    assert schedule.simulate(2, 3, remat="always").start() == schedule.simulate(2, 5).start()
    assert schedule.simulate(2, 3, remat="never") == schedule.simulate(2, 3)


def test_an_unknown_remat_is_refused():
    with pytest.raises(ScheduleError, match="'always', 'except_last', 'never'; received 'sometimes'"):
        Schedule.gpipe(2, 2).simulate(remat="sometimes")


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
@pytest.mark.parametrize("ticks", [(1, 1), (1, 2), (2, 3)])
def test_the_bubble_of_gpipe(num_stages, num_micro_batches, ticks):
    simulation = Schedule.gpipe(num_stages, num_micro_batches).simulate(*ticks)
    columns = num_micro_batches + num_stages - 1
    assert simulation.num_ticks == columns * sum(ticks)
    assert simulation.bubble == pytest.approx((num_stages - 1) / columns)
    assert simulation.max_live == (num_micro_batches,) * num_stages


def test_1f1b_holds_fewer_activations_in_as_many_ticks():
    schedule = Schedule("1f1b", 3, 4, rows(ONE_F_ONE_B))
    assert schedule.simulate().max_live == (3, 2, 1)
    assert schedule.simulate().num_ticks == Schedule.gpipe(3, 4).simulate().num_ticks


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
def test_order_holds_every_task_once_after_what_it_needs(num_stages, num_micro_batches):
    order = Schedule.gpipe(num_stages, num_micro_batches).order()
    place = {task: position for position, task in enumerate(order)}
    assert len(place) == len(order) == 2 * num_stages * num_micro_batches
    for task in order:
        assert all(place[need] < place[task] for need in task.needs(num_stages))


def test_order_sorts_by_start_tick_then_stage():
    text = " ".join(map(str, Schedule.gpipe(2, 3).order()))
    assert text == "0F0 0F1 1F0 0F2 1F1 1F2 1B2 0B2 1B1 0B1 1B0 0B0"


def test_simulation_maps_each_task_to_its_start():
    start = Schedule.gpipe(2, 1).simulate().start()
    assert {str(task): tick for task, tick in start.items()} == {"0F0": 0, "0B0": 4, "1F0": 1, "1B0": 2}


@pytest.mark.parametrize(
    ("task", "needs"),
    [("0F2", ""), ("1F2", "0F2"), ("2F2", "1F2"), ("2B2", "2F2"), ("1B2", "1F2 2B2"), ("0B2", "0F2 1B2")],
)
def test_needs(task, needs):
    assert " ".join(map(str, Task.parse(task).needs(num_stages=3))) == needs


@pytest.mark.parametrize("task", [Task("forward", 2, 0), Task("backward", 0, 13), Task("forward", 10, 128)])
def test_a_task_round_trips_through_text(task):
    assert Task.parse(str(task)) == task


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2f0", "2F0.", "1F0 1F1", "²F0"])
def test_parse_refuses(text):
    with pytest.raises(ScheduleError, match="such as '2F0' or '2B0'; received") as caught:
        Task.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "schedule",
    [
        *(Schedule.gpipe(*size) for size in SIZES),
        Schedule("1f1b", 3, 4, rows(ONE_F_ONE_B)),
        Schedule("a loop", 4, 2, rows(INTERLEAVED)),
    ],
    ids=repr,
)
def test_a_schedule_is_valid_and_round_trips_through_text(schedule):
    schedule.validate()
    read = Schedule.from_text(schedule.to_text())
    assert read == schedule
    assert hash(read) == hash(schedule)


def test_text_may_be_spaced_and_unnamed():
    read = Schedule.from_text("\n 0F0, 0B0\n\n 1F0 ,1B0\n")
    assert (read.name, read.num_stages, read.num_micro_batches) == ("custom", 2, 1)


@pytest.mark.parametrize("text", ["", "# name only"])
def test_text_without_rows_is_refused(text):
    with pytest.raises(ScheduleError, match="one row of tasks a device; received no row. Write, for example"):
        Schedule.from_text(text)


def test_fields_are_made_immutable_and_repr_is_short():
    schedule = Schedule("mine", 1, 1, [[("forward", 0, 0), ("backward", 0, 0)]])
    assert schedule.tasks == rows("0F0 0B0")
    assert repr(schedule) == "Schedule('mine', num_stages=1, num_micro_batches=1)"


INVALID = {
    "task twice": (
        """
        0F0 0B0 0F0
        1F0 1B0
        """,
        """
        The schedule cannot run: expected 0F0 once, received it twice. Take one of them out.
        place         0     1     2
        device 0  [0F0]   0B0 [0F0]  <-- here
        device 1    1F0   1B0
        """,
    ),
    "task missing": (
        """
        0F0 0B0
        1F0
        """,
        """
        The schedule cannot run: expected 1B0 once, received it nowhere. Add it to row 1.
        place       0   1
        device 0  0F0 0B0
        device 1  1F0 [?]  <-- here
        """,
    ),
    "wrong device": (
        """
        0F0 1F0
        1B0 0B0
        """,
        """
        The schedule cannot run: expected 1F0 on device 1, where stage 1 lives, received it on device 0. \
Move it to row 1.
        place         0     1
        device 0    0F0 [1F0]  <-- here
        device 1    1B0   0B0
        """,
    ),
    "micro-batch out of range": (
        """
        0F0 0F1 0B0
        1F0 1B0
        """,
        """
        The schedule cannot run: expected stages 0 to 1 and micro-batches 0 to 0, received \
('forward', 0, 1) on device 0. Take it out, or raise num_stages or num_micro_batches.
        place         0     1     2
        device 0    0F0 [0F1]   0B0  <-- here
        device 1    1F0   1B0
        """,
    ),
    "stage out of range": (
        """
        0F0 0B0
        7F0 1B0
        """,
        """
        The schedule cannot run: expected stages 0 to 1 and micro-batches 0 to 0, received \
('forward', 7, 0) on device 1. Take it out, or raise num_stages or num_micro_batches.
        place         0     1
        device 0    0F0   0B0
        device 1  [7F0]   1B0  <-- here
        """,
    ),
    "backward before forward": (
        """
        0B0 0F0
        1F0 1B0
        """,
        """
        The schedule cannot run: expected every device to reach the end of its row, received a deadlock: each waits \
for another task, device 0 at 0B0 for 0F0, device 1 at 1F0 for 0F0. Put what is waited for earlier in its row.
        place         0     1
        device 0  [0B0]   0F0  <-- here
        device 1  [1F0]   1B0  <-- here
        """,
    ),
    "too many rows": (
        """
        0F0 0B0
        1F0
        1B0
        """,
        """
        The schedule cannot run: expected at most one row a stage, 2, received 3 rows. Take out those without a stage.
        """,
    ),
}


@pytest.mark.parametrize(("tasks", "text"), INVALID.values(), ids=INVALID)
def test_an_invalid_schedule_shows_the_place(tasks, text):
    schedule = Schedule("wrong", 2, 1, rows(tasks))
    for check in (schedule.validate, schedule.simulate, schedule.order):
        with pytest.raises(ScheduleError) as caught:
            check()
        assert str(caught.value) == picture(text)
    assert str(schedule) == picture(text)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ScheduleError, match=r"received \('sideways', 0, 0\) on device 0"):
        Schedule("wrong", 1, 1, [[("sideways", 0, 0)]]).validate()


def test_no_rows_are_refused():
    with pytest.raises(ScheduleError, match="expected 0F0 once, received it nowhere"):
        Schedule("wrong", 1, 1, ()).validate()


def test_two_devices_that_wait_for_each_other_at_different_micro_batches():
    with pytest.raises(ScheduleError, match="device 0 at 0B0 for 1B0, device 1 at 1F1 for 0F1"):
        Schedule.from_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0")


def test_a_long_schedule_is_shown_around_the_place_only():
    tasks = list(Schedule.gpipe(1, 100).tasks[0])
    tasks[50] = tasks[40]
    with pytest.raises(ScheduleError) as caught:
        Schedule("wrong", 1, 100, [tasks]).validate()
    heading, row = str(caught.value).splitlines()[1:]
    assert heading.split() == ["place", *map(str, range(34, 57))]
    shown = [f"[0F{40 if m == 50 else m}]" if m in (40, 50) else f"0F{m}" for m in range(34, 57)]
    assert row.split() == ["device", "0", *shown, "<--", "here"]


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True])
@pytest.mark.parametrize("argument", ["num_stages", "num_micro_batches"])
def test_counts_are_whole_numbers_from_1(argument, value):
    arguments = {"num_stages": 2, "num_micro_batches": 2, argument: value}
    for make in (Schedule.gpipe, lambda **counts: Schedule("mine", **counts, tasks=())):
        with pytest.raises(ScheduleError) as caught:
            make(**arguments)
        assert f"{argument} must be a whole number of at least 1; received {value!r}. Pass" in str(caught.value)


@pytest.mark.parametrize(
    ("ticks", "text"),
    [
        (0, "backward_ticks must be a whole number of at least 1; received 0."),
        ([1, 0], "backward_ticks[1] must be a whole number of at least 1; received 0."),
        ([1, 2, 3], "one for each of the 2 stages; received 3 numbers, [1, 2, 3]. Pass 2 of them."),
    ],
)
def test_ticks_are_whole_numbers_from_1(ticks, text):
    with pytest.raises(ScheduleError) as caught:
        Schedule.gpipe(2, 2).simulate(backward_ticks=ticks)
    assert text in str(caught.value)


@pytest.mark.parametrize("module", [schedule_module, tasks_module], ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings(module):
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted >= 3
