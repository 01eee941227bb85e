"""Measured steps: where the time goes, what is refused, and the trace that other programs read."""

import itertools
import json
import random

import pytest

from tf_gpipe.errors import ArgumentError, ScheduleError
from tf_gpipe.schedule import Schedule, Task
from tf_gpipe.timeline import Event, Shares, Timeline

SIZES = list(itertools.product([1, 2, 4], [1, 2, 8]))
REMAT = ["always", "except_last", "never"]


def events(text):
    """Events from lines `task ready start end`."""
    fields = [line.split() for line in text.strip().splitlines()]
    return tuple(Event(Task.parse(task), *map(float, times)) for task, *times in fields)


def measured(num_stages, num_micro_batches, remat, seed):
    """A step with uneven stages, lengths that vary, transfers, a loss and an optimizer."""
    draw = random.Random(seed)
    schedule = Schedule.gpipe(num_stages, num_micro_batches)
    speed, transfer, loss = [draw.uniform(0.5, 2) for _ in range(num_stages)], draw.uniform(0, 0.5), draw.uniform(0, 2)
    end, found, free = {}, [], [7.5] * num_stages
    for task in schedule.order():
        arrivals = [7.5, *(end[n] + (transfer if n.stage != task.stage else 0) for n in task.needs(num_stages))]
        if task.kind == "backward" and task.stage == num_stages - 1:
            arrivals.append(max(event.end for event in found if event.task.kind == "forward") + loss)
        ready = max(arrivals)
        start = max(ready, free[task.stage]) + draw.uniform(0, 0.1)
        length = speed[task.stage] * draw.uniform(0.8, 1.2) * (1 if task.kind == "forward" else 3)
        end[task] = free[task.stage] = start + length
        found.append(Event(task, ready, start, end[task]))
    draw.shuffle(found)
    return Timeline(schedule, tuple(found), 7.0, max(free) + 1, remat)


HAND = events("""
    0F0 0.0 0.0 1.0
    1F0 1.5 1.5 2.5
    1B0 2.5 2.5 3.5
    0B0 4.0 4.0 5.0
""")


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)
@pytest.mark.parametrize("remat", REMAT)
def test_a_simulated_step_has_the_bubble_of_its_schedule_and_nothing_else(num_stages, num_micro_batches, remat):
    simulation = Schedule.gpipe(num_stages, num_micro_batches).simulate(2, 3, remat=remat)
    timeline = Timeline.from_simulation(simulation, tick=0.25)
    total = simulation.num_ticks * num_stages
    recompute = sum(map(simulation.recompute_ticks, simulation.start())) / total
    expected = (1 - simulation.bubble - recompute, recompute, 0, simulation.bubble, 0, 0)
    assert timeline.shares == pytest.approx(expected)
    assert timeline.duration == timeline.tasks_duration == pytest.approx(timeline.simulated_duration)
    assert set(timeline.start_differences()) == set(simulation.start())
    assert all(abs(difference) < 1e-9 for difference in timeline.start_differences().values())
    if remat == "always":
        assert timeline.shares.bubble == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("seed", range(8))
def test_shares_add_up_to_1_and_hold_all_that_the_devices_did(remat, seed):
    timeline = measured(3, 5, remat, seed)
    for d, shares in enumerate(timeline.device_shares):
        assert sum(shares) == pytest.approx(1)
        busy = sum(e.end - e.start for e in timeline.events if e.task.stage == d) / timeline.duration
        assert shares.compute + shares.recompute == pytest.approx(busy)
        assert shares.transfer >= 0
        assert (shares.recompute > 0) == (remat != "never")
    assert sum(timeline.shares) == pytest.approx(1)
    for name in Shares._fields:
        mean = sum(getattr(shares, name) for shares in timeline.device_shares) / 3
        assert getattr(timeline.shares, name) == pytest.approx(mean)
    assert timeline.shares.other > 0  # there are a loss, an optimizer and starts that are late
    assert timeline.shares.imbalance > 0


def test_a_wait_for_a_transfer():
    timeline = Timeline(Schedule.gpipe(2, 1), HAND, 0, 5, "never")
    # Each device works 2 s of 5, idles 2 s by the schedule, waits 0.5 s for its own input, 0.5 s for the other's.
    assert timeline.device_shares == (pytest.approx((0.4, 0, 0.1, 0.4, 0, 0.1)),) * 2
    assert timeline.simulated_duration == pytest.approx(4)
    differences = {str(task): difference for task, difference in timeline.start_differences().items()}
    assert differences == pytest.approx({"0F0": 0, "1F0": 0.5, "1B0": 0.5, "0B0": 1})


def test_a_transfer_while_the_device_works_is_no_wait():
    timeline = Timeline(
        Schedule.gpipe(2, 2),
        events("""
            0F0 0.0 0.0 1.0
            0F1 0.0 1.0 2.0
            1F0 1.5 1.5 2.5
            1F1 2.5 2.5 3.5
            1B1 3.5 3.5 4.5
            1B0 3.5 4.5 5.5
            0B1 5.0 5.0 6.0
            0B0 6.0 6.0 7.0
        """),
        begin=0,
        end=8,
        remat="never",
    )
    # Only 1F0 and 0B1 were waited for; 1F1 and 0B0 arrived while their devices worked.
    assert timeline.device_shares == (pytest.approx((4 / 8, 0, 0.5 / 8, 2 / 8, 0, 1.5 / 8)),) * 2


def test_a_transfer_during_a_wait_for_a_slower_stage_costs_nothing():
    # Stage 0 takes 2 s forward and stage 1 takes 1 s; 0.5 s of each transfer pass while stage 1 would idle anyway.
    timeline = Timeline(
        Schedule.gpipe(2, 3),
        events("""
            0F0 0.0 0.0 2.0
            0F1 0.0 2.0 4.0
            0F2 0.0 4.0 6.0
            1F0 2.5 2.5 3.5
            1F1 4.5 4.5 5.5
            1F2 6.5 6.5 7.5
            1B2 7.5 7.5 8.5
            1B1 7.5 8.5 9.5
            1B0 7.5 9.5 10.5
            0B2 8.5 8.5 9.5
            0B1 9.5 9.5 10.5
            0B0 10.5 10.5 11.5
        """),
        begin=0,
        end=11.5,
        remat="never",
    )
    assert timeline.device_shares[1].transfer == pytest.approx(0.5 / 11.5)
    assert timeline.device_shares[1].other == pytest.approx(0)
    assert timeline.simulated_duration == pytest.approx(11)


def test_unequal_stages():
    simulation = Schedule.gpipe(2, 2).simulate([1, 3], [1, 3])
    timeline = Timeline.from_simulation(simulation, tick=1)
    # 14 ticks; equal stages of 2 would idle 4 each; stage 0 idles 10, stage 1 idles 2, and no share is below 0.
    assert timeline.device_shares[0] == pytest.approx((4 / 14, 0, 0, 4 / 14, 6 / 14, 0))
    assert timeline.device_shares[1] == pytest.approx((12 / 14, 0, 0, 2 / 14, 0, 0))
    assert timeline.shares.imbalance == pytest.approx(3 / 14)


def test_what_is_before_between_and_after_the_tasks_is_other():
    found = [
        event._replace(**{name: getattr(event, name) + late for name in ("ready", "start", "end")})
        for event, late in zip(
            Timeline.from_simulation(Schedule.gpipe(1, 1).simulate(), 1).events, (10, 12), strict=True
        )
    ]
    timeline = Timeline(Schedule.gpipe(1, 1), found, 9, 20, "never")
    assert timeline.shares == pytest.approx((3 / 11, 0, 0, 0, 0, 8 / 11))
    assert timeline.duration == 11
    assert timeline.tasks_duration == 5


def test_recomputation_is_as_long_as_forward_tasks_are_and_not_longer_than_the_backward_task():
    found = events("""
        0F0 0 0 1
        0F1 0 1 4
        0B1 4 4 6
        0B0 4 6 9
    """)
    timeline = Timeline(Schedule.gpipe(1, 2), found, 0, 9, "always")
    assert [timeline.recompute(Task.parse(text)) for text in ("0F0", "0F1", "0B0", "0B1")] == [0, 0, 2, 2]
    assert timeline.shares.recompute == pytest.approx(4 / 9)
    timeline = Timeline(Schedule.gpipe(1, 2), found, 0, 9, "except_last")
    assert [timeline.recompute(Task.parse(text)) for text in ("0B0", "0B1")] == [2, 0]


def frozen_first(micro_batches=4, remat="always"):
    """Two stages of which the first, of frozen layers, only goes forward; the second goes back in 1 s, or 2 with R."""
    schedule = Schedule.gpipe(2, micro_batches)
    found, free = [Event(Task("forward", 0, m), 0, m, m + 1) for m in range(micro_batches)], 0.0
    for task in schedule.tasks[1]:
        again = task.kind == "backward" and (remat == "always" or task.micro_batch < micro_batches - 1)
        start = max(free, task.micro_batch + 1.0) if task.kind == "forward" else free
        free = start + 1 + again
        found.append(Event(task, start, start, free, float(again)))
        if task.kind == "backward":
            found.append(Event(Task("backward", 0, task.micro_batch), free, free, free))
    return Timeline(schedule, tuple(found), 0, free, remat)


@pytest.mark.parametrize(("remat", "again"), [("always", 4), ("except_last", 3)])
def test_a_stage_without_backward_tasks_takes_no_time_in_the_simulation(remat, again):
    timeline = frozen_first(remat=remat)
    total = 1 + 4 + 4 + again
    assert timeline.simulated_duration == pytest.approx(timeline.tasks_duration) == pytest.approx(total)
    assert all(abs(difference) < 1e-6 for difference in timeline.start_differences().values())
    assert [timeline.recompute(Task("backward", 0, m)) for m in range(4)] == [0] * 4
    first, second = timeline.device_shares
    # Equal stages, of 1 s forward and a half (with R: 1) back, would idle for one task of each kind.
    assert second == pytest.approx((8 / total, again / total, 0, 1 / total, 0, 0), abs=1e-6)
    assert (first.compute, first.recompute, first.other) == pytest.approx((4 / total, 0, 0), abs=1e-6)
    assert first.bubble + first.imbalance == pytest.approx((total - 4) / total)


def test_a_task_recomputes_what_its_event_tells():
    found = [event._replace(recomputed=0.25) for event in HAND]
    timeline = Timeline(Schedule.gpipe(2, 1), found, 0, 5, "never")
    assert [timeline.recompute(Task("backward", k, 0)) for k in range(2)] == [0.25, 0.25]
    assert timeline.shares.recompute == pytest.approx(0.25 / 5)
    found[-1] = found[-1]._replace(recomputed=2)
    with pytest.raises(ScheduleError, match="from 0 to 1, or None; received 2 for 0B0"):
        Timeline(Schedule.gpipe(2, 1), found, 0, 5, "never")


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("seed", range(8))
def test_no_share_is_below_0(remat, seed):
    timeline = measured(4, 4, remat, seed)
    assert min(min(shares) for shares in timeline.device_shares) >= 0


def test_what_events_tell_is_saved(tmp_path):
    timeline = frozen_first()
    timeline.save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == timeline


def test_devices_with_several_stages():
    schedule = Schedule.from_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    timeline = Timeline.from_simulation(schedule.simulate(1, 1), 1)
    assert timeline.device_shares == (
        pytest.approx((4 / 6, 0, 0, 2 / 6, 0, 0)),
        pytest.approx((2 / 6, 0, 0, 4 / 6, 0, 0)),
    )
    assert str(timeline).splitlines()[1].startswith("device")
    assert [line.split()[0] for line in str(timeline).splitlines()[-3:]] == ["0", "1", "2"]


def test_text_shows_measured_and_simulated():
    lines = str(Timeline(Schedule.gpipe(2, 1), HAND, 0, 5, "never")).splitlines()
    assert lines[0] == "gpipe: 2 stages, 1 micro-batch, step 5000.0 ms, remat never"
    assert " ".join(lines[4].split()) == "all 40.0 % 0.0 % 10.0 % 40.0 % 0.0 % 10.0 %"
    assert "tasks took 5000.0 ms, in a simulation with the mean lengths 4000.0 ms (measured 1.25 times" in lines[6]
    assert " ".join(lines[-1].split()) == ("1 1000.0 1000.0 1500.0 (1000.0) 2500.0 (2000.0) 3500.0 (3000.0) 500.0")


def test_events_may_come_in_any_order():
    assert Timeline(Schedule.gpipe(2, 1), HAND[::-1], 0, 5, "never") == Timeline(
        Schedule.gpipe(2, 1), HAND, 0, 5, "never"
    )


def changed(task, **times):
    return tuple(event._replace(**times) if str(event.task) == task else event for event in HAND)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"events": HAND[:-1]}, "each of the 4 tasks of its schedule; received 3 events, with no 0B0."),
        ({"events": (*HAND, HAND[0])}, "received 5 events, with 0F0 2 times."),
        (
            {"events": (*HAND[1:], HAND[0]._replace(task=Task("forward", 0, 7)))},
            "with 0F7, which the schedule does not",
        ),
        ({"events": changed("1F0", ready=1.6)}, "times of 1F0 contradict others: expected ready <= start <= end"),
        ({"events": changed("1F0", end=1.4)}, "expected ready <= start <= end; received ready=1.5, start=1.5, end=1.4"),
        ({"events": changed("1F0", start=float("nan"))}, "expected ready <= start <= end"),
        ({"events": changed("1F0", ready=float("-inf"))}, "expected ready <= start <= end"),
        ({"events": changed("1F0", end=2.6)}, "1B0 contradict others: expected it to start after the end of 1F0, 2.6"),
        ({"begin": 0.5}, "0F0 contradict others: expected it to start after the beginning of the step, 0.5"),
        ({"end": 4.5}, "0B0 contradict others: expected it to end before the end of the step, 4.5"),
        ({"begin": 5}, "expected begin < end in seconds; received begin=5.0, end=5.0"),
        ({"end": float("inf")}, "expected begin < end in seconds"),
        ({"remat": "sometimes"}, "remat must be one of 'always', 'except_last', 'never'; received 'sometimes'"),
        ({"schedule": Schedule("none", 2, 1, ())}, "The schedule cannot run"),
    ],
)
def test_a_contradiction_is_refused(arguments, text):
    valid = {"schedule": Schedule.gpipe(2, 1), "events": HAND, "begin": 0, "end": 5, "remat": "never"}
    with pytest.raises(ScheduleError) as caught:
        Timeline(**(valid | arguments))
    assert text in str(caught.value)


@pytest.mark.parametrize("remat", REMAT)
def test_the_chrome_trace_holds_every_task_once(remat):
    timeline = measured(3, 4, remat, seed=1)
    trace = json.loads(json.dumps(timeline.to_chrome(), allow_nan=False))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "step"}
    slices = [event for event in trace if event["ph"] == "X"]
    assert {event["ph"] for event in trace} == {"M", "X"}
    tasks = {Task.parse(event["args"]["task"]): event for event in slices if "task" in event["args"]}
    assert set(tasks) == set(timeline.schedule.order())
    for task, event in tasks.items():
        assert event["tid"] == task.stage
        assert f"{task.stage}{event['name']}" == str(task)
        assert event["ts"] == pytest.approx(1e6 * (timeline.event(task).start - timeline.begin))
        assert event["dur"] == pytest.approx(1e6 * (timeline.event(task).end - timeline.event(task).start))
    recomputed = {(event["tid"], event["name"]): event for event in slices if event["cat"] == "recompute"}
    assert len(recomputed) == 3 * {"always": 4, "except_last": 3, "never": 0}[remat]
    for (stage, name), inner in recomputed.items():
        outer = tasks[Task("backward", stage, int(name[1:]))]
        assert inner["ts"] == outer["ts"]
        assert inner["dur"] <= outer["dur"]
    (step,) = (event for event in slices if event["cat"] == "step")
    assert (step["tid"], step["ts"], step["dur"]) == (3, 0, pytest.approx(1e6 * timeline.duration))
    assert len(slices) == len(tasks) + len(recomputed) + 1


def test_a_timeline_round_trips_through_its_file(tmp_path):
    timeline = measured(2, 3, "except_last", seed=2)
    timeline.save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == timeline


def test_only_json_is_saved(tmp_path):
    with pytest.raises(ArgumentError, match="expected a path that ends with '.json'; received '.*step.svg'"):
        measured(1, 1, "never", 0).save(tmp_path / "step.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": [], "otherData": {"schedule": 1}}', '{"otherData": 3}']
)
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"Expected a trace that Timeline.save has written; received '.*step.json'"):
        Timeline.load(tmp_path / "step.json")
