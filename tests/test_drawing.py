"""Pictures: what is drawn is what the value says, in every form, and nothing is clipped or covered."""

import importlib
import re
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import keras
import pytest

import tf_gpipe
from tf_gpipe.drawing import draw
from tf_gpipe.drawing_writers import Box, Line, Picture, Text, text_width, to_svg
from tf_gpipe.errors import ArgumentError, ScheduleError
from tf_gpipe.schedule import Schedule, Task
from tf_gpipe.timeline import Timeline

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
LABEL = re.compile(r"stage (\d+), micro-batch (\d+): (\w+), ([\d.e+-]+) to ([\d.e+-]+) (ticks|ms)")
LOOP = "# loop\n0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"

GRIDS = {
    "gpipe": Schedule.gpipe(4, 8).simulate(remat="always"),
    "except_last": Schedule.gpipe(3, 4).simulate(2, 3, remat="except_last"),
    "uneven": Schedule.gpipe(2, 3).simulate([1, 4], [5, 2]),
    "large": Schedule.gpipe(8, 32).simulate(remat="always"),
    "huge": Schedule.gpipe(64, 256).simulate(),
    "one": Schedule.gpipe(1, 1).simulate(),
    "loop": Schedule.from_text(LOOP).simulate(remat="always"),
    "measured": Timeline.from_simulation(Schedule.gpipe(3, 5).simulate([3, 5, 4], 9, remat="except_last"), 0.00071),
}


class FakePlan:
    """What a picture reads of a plan."""

    def __init__(self, stages):
        self.graph = types.SimpleNamespace(steps=range(9), model=types.SimpleNamespace(name="a<b"))
        self.stages = [types.SimpleNamespace(**stage) for stage in stages]
        self.balance = 0.5

    def __str__(self):
        return "the table of the plan"


def plan():
    def stage(k, operations, flops, parameters, received):
        device = f"/job:localhost/replica:0/task:0/device:GPU:{k}"
        return {
            "index": k,
            "device": device,
            "operations": operations,
            "flops": flops,
            "work": 3 * flops,
            "parameters": parameters,
            "received_bytes": received,
        }

    long = "encoder/block_17/attention/output/dense_with_a_long_name"
    return FakePlan(
        [
            stage(0, ["stem", "a", "b"], 6e6, 100, 0),
            stage(1, [long], 2e6, 300, 123456),
            stage(2, [], 0.0, 0, 0),
            stage(3, ["c", "d&e"], 8e6, 0, 256),
        ]
    )


def svg(what, folder, **options):
    draw(what, folder / "picture.svg", **options)
    return ElementTree.parse(folder / "picture.svg").getroot()


def boxes(root):
    """Task, kind, start and end in the label, left, right and row of every task's box."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") in ("forward", "backward", "recompute"):
            stage, micro_batch, kind, start, end, _ = LABEL.fullmatch(rect.find(f"{SVG}title").text).groups()
            assert kind == rect.get("class")
            task = Task("forward" if kind == "forward" else "backward", int(stage), int(micro_batch))
            left, y = float(rect.get("x")), float(rect.get("y"))
            found.append((task, kind, float(start), float(end), left, left + float(rect.get("width")), y))
    return found


def times(what):
    """Start, length of recomputation and length of each task, in the unit of the picture."""
    if isinstance(what, Timeline):
        return {
            e.task: (1e3 * (e.start - what.begin), 1e3 * what.recompute(e.task), 1e3 * (e.end - e.start))
            for e in what.events
        }
    return {task: (start, what.recompute_ticks(task), what.ticks(task)) for task, start in what.start().items()}


@pytest.mark.parametrize("what", GRIDS.values(), ids=GRIDS)
def test_every_task_has_one_box_where_it_runs(what, tmp_path):
    root = svg(what, tmp_path)
    drawn = boxes(root)
    expected = times(what)
    assert sorted(task for task, kind, *_ in drawn if kind != "recompute") == sorted(expected)
    recomputed = [task for task, kind, *_ in drawn if kind == "recompute"]
    assert sorted(recomputed) == sorted(task for task, (_, again, _) in expected.items() if again)
    frames = {rect.get("y"): rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "row"}
    assert len(frames) == what.schedule.num_devices
    first = min(left for *_, left, _, _ in drawn)
    end = 1e3 * what.duration if isinstance(what, Timeline) else what.num_ticks
    pixels = float(next(iter(frames.values())).get("width")) / end
    for task, kind, start, stop, left, right, _ in drawn:
        begin, again, length = expected[task]
        assert start == pytest.approx(begin if kind == "recompute" else begin + again, rel=1e-4)
        assert stop == pytest.approx(begin + again if kind == "recompute" else begin + length, rel=1e-4)
        assert left == pytest.approx(first + start * pixels, abs=0.02)
        assert right == pytest.approx(first + stop * pixels, abs=0.03)


@pytest.mark.parametrize("what", GRIDS.values(), ids=GRIDS)
def test_the_boxes_of_a_row_do_not_overlap_and_a_row_is_a_device(what, tmp_path):
    rows = {}
    for task, *_, left, right, y in boxes(svg(what, tmp_path)):
        rows.setdefault(y, []).append((left, right, task))
    tasks = [{task for _, _, task in rows[y]} for y in sorted(rows)]
    assert tasks == [set(row) for row in what.schedule.tasks]
    for row in rows.values():
        row.sort()
        assert all(right <= left + 0.02 for (_, right, _), (left, _, _) in zip(row, row[1:], strict=False))


@pytest.mark.parametrize("what", [*GRIDS.values(), plan()], ids=[*GRIDS, "plan"])
def test_nothing_is_clipped_and_text_can_be_read(what, tmp_path):
    root = svg(what, tmp_path)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 2600
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
        assert size >= 9
        extent = text_width(text.text, size, text.get("font-weight") == "bold")
        left = x - extent * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
        assert left >= 0, text.text
        assert left + extent <= width, text.text
        assert size <= y <= height - 3
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height")) <= height


@pytest.mark.parametrize(("name", "number"), [("gpipe", "7"), ("large", "31"), ("loop", "3B1")])
def test_numbers_fit_and_are_in_every_box(name, number, tmp_path):
    root = svg(GRIDS[name], tmp_path)
    drawn = boxes(root)
    assert all(right - left > text_width(number, 9) for *_, left, right, _ in drawn)
    numbers = [text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "middle"]
    inside = [text.text for text in numbers if any(y < float(text.get("y")) < y + 24 for *_, y in drawn)]
    assert len(inside) == len(drawn)
    assert number in inside


def test_boxes_too_narrow_for_numbers_have_none(tmp_path):
    root = svg(Schedule.gpipe(2, 500), tmp_path)
    inside = [text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "middle"]
    assert len(boxes(root)) == 2000
    assert "499" not in inside


def test_titles_legend_and_axis(tmp_path):
    root = svg(GRIDS["gpipe"], tmp_path)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    title = "gpipe: 4 stages, 8 micro-batches, 44 ticks, bubble 27.3 %, remat always"
    assert (texts[0], root.find(f"{SVG}title").text) == (title, title)
    assert "forward, recompute, backward" in root.find(f"{SVG}desc").text
    assert texts[1:5] == ["forward", "recompute", "backward", "idle"]
    assert [text for text in texts if text in {"ticks", "40", "stage 3"}] == ["stage 3", "ticks", "40"]
    assert "recompute" not in [text.text for text in svg(Schedule.gpipe(2, 2), tmp_path).iter(f"{SVG}text")]
    measured = [text.text for text in svg(GRIDS["measured"], tmp_path).iter(f"{SVG}text")]
    assert re.fullmatch(r"gpipe: .*, step [\d.]+ ms, remat except_last, bubble [\d.]+ %", measured[0])
    assert "ms" in measured
    assert [text.text for text in svg(GRIDS["one"], tmp_path, title="a < b & c").iter(f"{SVG}text")][0] == "a < b & c"


ODD_TITLES = {
    "markup": ('<b title="a">&amp; ]]> \'</b>',) * 2,
    "several lines": ("first\nsecond\r\n  third\t\u2028", "first second third"),
    "control characters": ("\x1b[31mred\x00 \x7f\x9b \ud800\uffff", "�[31mred� �� ��"),
    "other scripts": ("Schritt 10, étape 10, шаг 10 … 😀",) * 2,
}


@pytest.mark.parametrize("what", [GRIDS["one"], plan()], ids=["grid", "plan"])
@pytest.mark.parametrize(("title", "shown"), ODD_TITLES.values(), ids=ODD_TITLES)
def test_titles_of_odd_characters(title, shown, what, tmp_path):
    root = svg(what, tmp_path, title=title)
    assert [next(root.iter(f"{SVG}text")).text, root.find(f"{SVG}title").text] == [shown] * 2


def test_a_blank_title_is_none(tmp_path):
    assert svg(GRIDS["one"], tmp_path, title=" \n").find(f"{SVG}title").text.startswith("gpipe: 1 stage")


LONG_TITLES = {"words": "words of a title " * 40, "one word": "x" * 1000, "capitals": "MWMW AND THE LIKE " * 30}


@pytest.mark.parametrize("title", LONG_TITLES.values(), ids=LONG_TITLES)
@pytest.mark.parametrize("what", [GRIDS["one"], GRIDS["large"], plan()], ids=["one", "large", "plan"])
def test_a_long_title_has_several_lines(what, title, tmp_path):
    plain, root = svg(what, tmp_path), svg(what, tmp_path, title=title)
    lines = [text for text in root.iter(f"{SVG}text") if text.get("font-size") == "14"]
    broken = "".join(line.text for line in lines).replace(" ", "")
    assert len(lines) > 2
    assert broken == title.replace(" ", "")
    width = float(root.get("width"))
    assert width <= max(1.2 * float(plain.get("width")), 1200)
    for line in lines:
        assert float(line.get("x")) + text_width(line.text, 14, bold=True) <= width
    grown = float(root.get("height")) - float(plain.get("height"))
    assert grown == pytest.approx(18 * (len(lines) - 1), abs=1)
    shift = [
        float(new.get("y")) - float(old.get("y"))
        for old, new in zip(plain.iter(f"{SVG}rect"), root.iter(f"{SVG}rect"), strict=True)
        if old.get("y")
    ]
    assert shift == pytest.approx([grown] * len(shift), abs=0.02)


def test_a_plan(tmp_path):
    root = svg(plan(), tmp_path)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "9 operations of 'a<b', balance 0.50"
    assert [text.partition(" % of ")[0] + " %" for text in texts if " % of " in text] == [
        *("37.5 %", "25.0 %", "12.5 %", "75.0 %", "0.0 %", "0.0 %", "50.0 %", "0.0 %")
    ]
    assert {"3 operations: stem to b", "0 operations", "2 operations: c to d&e", "stage 3", "GPU:3"} <= set(texts)
    assert [text for text in texts if text.startswith("receives")] == [
        "receives the mini-batch",
        "receives 123 kB a row",
        "receives 0 B a row",
        "receives 256 B a row",
    ]
    assert any(re.fullmatch(r"1 operation: encoder/.*….*long_name", text) for text in texts)
    for kind, shares in (("flops", (0.375, 0.125, 0, 0.5)), ("parameters", (0.25, 0.75, 0, 0))):
        widths = [float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == kind]
        assert widths == pytest.approx([300 * share / 0.75 for share in shares], abs=0.01)


def test_the_plan_of_a_model(tmp_path):
    hidden = [keras.layers.Dense(16, name=name) for name in "abc"]
    model = keras.Sequential([keras.Input([8]), *hidden, keras.layers.Dense(1, name="d")], name="small")
    found = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=1, partition=[3, 1]).plan(model)
    texts = [text.text for text in svg(found, tmp_path).iter(f"{SVG}text")]
    assert texts[0] in str(found).splitlines()
    assert {"3 operations: a to c", "1 operation: d", "CPU:1", "receives 64 B a row"} <= set(texts)
    assert [text.removesuffix(" of FLOPs") for text in texts if text.endswith(" % of FLOPs")] == re.findall(
        r"[\d.]+ %", str(found)
    )
    assert draw(found) == str(found)


def test_text(tmp_path):
    simulation = GRIDS["except_last"]
    assert draw(simulation) == draw(simulation, tmp_path / "a.txt") == draw(simulation, tmp_path / "a.SVG")
    assert (tmp_path / "a.txt").read_text() == str(simulation) + "\n"
    assert draw(Schedule.gpipe(2, 3)) == str(Schedule.gpipe(2, 3))
    assert draw(GRIDS["measured"]) == str(GRIDS["measured"])
    assert draw(plan()) == "the table of the plan"


def test_the_picture_in_the_docs_is_the_one_that_is_drawn(tmp_path):
    draw(GRIDS["gpipe"], tmp_path / "gpipe.svg")
    assert (PICTURES / "gpipe.svg").read_text(encoding="utf-8") == (tmp_path / "gpipe.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["picture.gif", "picture", "", "picture.svg/"])
def test_other_endings_are_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"ends with '.svg', '.png' or '.txt'; received '{path}'. Write"):
        draw(Schedule.gpipe(2, 2), path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["svg", "txt"])
def test_a_directory_that_does_not_exist(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("some", "where", f"picture.{form}")
    with pytest.raises(ArgumentError, match=re.escape(f"received '{path}'. Make it first: os.makedirs('some/where', ")):
        draw(Schedule.gpipe(2, 2), path)
    path.parent.mkdir(parents=True)
    draw(Schedule.gpipe(2, 2), path)
    assert path.stat().st_size > 100


@pytest.mark.parametrize("path", [3, b"picture.svg", ["picture.svg"]])
def test_other_paths_are_refused(path):
    with pytest.raises(ArgumentError, match=re.escape(f"a string or a path object; received {path!r}. Write")):
        draw(Schedule.gpipe(2, 2), path)


@pytest.mark.parametrize("title", [3, None, b"title"])
@pytest.mark.parametrize("path", [None, "picture.svg"])
def test_other_titles_are_refused(title, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"Expected `title` to be a string; received {title}. Write"):
        draw(Schedule.gpipe(2, 2), path, title=title)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [None, "0F0,0B0", 3])
def test_other_things_are_refused(what):
    with pytest.raises(ArgumentError, match=f"Timeline to draw; received {type(what).__name__}. Pass"):
        draw(what)


def test_a_schedule_that_cannot_run_is_not_drawn(tmp_path):
    with pytest.raises(ScheduleError, match="expected 0F0 once, received it nowhere"):
        draw(Schedule("none", 1, 1, ()), tmp_path / "none.svg")
    assert list(tmp_path.iterdir()) == []


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ArgumentError, match="pip install matplotlib") as caught:
        draw(Schedule.gpipe(2, 2), tmp_path / "picture.png")
    assert isinstance(caught.value.__cause__, ImportError)
    assert list(tmp_path.iterdir()) == []


def test_png_shows_the_colours_of_the_shapes(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG needs Matplotlib")
    image = importlib.import_module("matplotlib.image")
    root = svg(GRIDS["gpipe"], tmp_path)
    draw(GRIDS["gpipe"], tmp_path / "picture.png")
    pixels = image.imread(tmp_path / "picture.png")
    assert pixels.shape[:2] == (2 * int(root.get("height")), 2 * int(root.get("width")))
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") in ("forward", "backward", "recompute"):
            x, y = (round(2 * (float(rect.get(name)) + 3)) for name in ("x", "y"))
            colour = "#" + "".join(f"{round(255 * float(part)):02x}" for part in pixels[y, x, :3])
            assert colour == rect.get("fill")


@pytest.mark.parametrize("title", [*LONG_TITLES.values(), *(title for title, _ in ODD_TITLES.values())])
def test_titles_fit_into_the_png(title, tmp_path):
    pytest.importorskip("matplotlib", reason="PNG needs Matplotlib")
    image = importlib.import_module("matplotlib.image")
    draw(GRIDS["one"], tmp_path / "picture.png", title=title.replace("😀", ""))  # which its font does not have
    pixels = image.imread(tmp_path / "picture.png")
    ink = (pixels[:, :, :3] < 1).any(axis=2)
    assert ink[28:60].any()
    assert not ink[:, -20:].any()
    assert not ink[-6:].any()


def test_shapes_in_svg():
    shapes = (
        Box(1, 2.004, 3, 4, "#000000", "#ffffff", "a", "a & <b>"),
        Line(0, 0, 9.999, 5),
        Text(1, 9, "x < y", 9, "middle", bold=True),
    )
    root = ElementTree.fromstring(to_svg(Picture(20, 10, "t & t", "d > d", shapes)))
    assert root.find(f"{SVG}title").text == "t & t"
    assert root.find(f"{SVG}desc").text == "d > d"
    _, box = root.iter(f"{SVG}rect")
    assert (box.get("y"), box.get("stroke"), box.find(f"{SVG}title").text) == ("2", "#ffffff", "a & <b>")
    assert root.find(f"{SVG}line").get("x2") == "10"
    text = root.find(f"{SVG}text")
    assert (text.text, text.get("font-weight"), text.get("text-anchor")) == ("x < y", "bold", "middle")
