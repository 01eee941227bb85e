"""Pictures as lists of shapes, and the two writers that put such a list into a file: SVG and PNG.

`drawing.py` decides where everything is; nothing here moves or measures a shape, so that the two files show the same.
SVG is written by hand and needs no package. PNG needs Matplotlib. Lengths are pixels from the upper left corner.
"""

from __future__ import annotations

import importlib
import os
import re
import unicodedata
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from tf_gpipe.errors import ArgumentError

__all__ = ["Box", "Line", "Picture", "Text", "text_width", "to_png", "to_svg"]

_DPI = 100
_FONT = "DejaVu Sans"  # Matplotlib brings it; Verdana, which browsers have, is as wide.
# Widths as a part of the font size: of a digit, which is wider than the average small letter; of capitals.
_DIGIT_WIDTH, _CAPITAL_WIDTH, _WIDE_WIDTH = 0.64, 0.79, 1.0
_UNPRINTABLE = re.compile("[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # most are no XML either
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle.

    Args:
        x, y: its upper left corner.
        width, height: its size.
        fill: colour as `#rrggbb`.
        edge: colour of its outline, as `#rrggbb`; none by default.
        kind: what it shows, such as `"forward"`: its class in the SVG.
        label: what it shows in words, which viewers of the SVG display under the pointer.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    kind: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text.

    Args:
        x, y: the point on its baseline at which it is anchored.
        text: the text.
        size: font size in pixels.
        anchor: which part of it is at x: `"start"`, `"middle"` or `"end"`.
        fill: colour as `#rrggbb`.
        bold: whether it is bold.
    """

    x: float
    y: float
    text: str
    size: float
    anchor: str = "start"
    fill: str = "#222222"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line, one pixel wide."""

    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str = "#222222"


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture.

    Args:
        width, height: its size.
        title: what it shows, in one line; also for screen readers.
        description: what it shows in words, for screen readers.
        shapes: what is drawn on white ground, the first one lowest.
    """

    width: float
    height: float
    title: str
    description: str
    shapes: tuple[Box | Text | Line, ...]


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About how many pixels a text takes: never much less than it does in the fonts that are used."""
    return sum(map(_character_width, text)) * size * (1.1 if bold else 1)


def _character_width(character: str) -> float:
    if character in "MW" or unicodedata.east_asian_width(character) in "FW":
        return _WIDE_WIDTH
    return _CAPITAL_WIDTH if character.isupper() else _DIGIT_WIDTH


def _printable(text: str) -> str:
    """A text in one line, with the sign for a replaced character in place of each that cannot be shown."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def to_svg(picture: Picture) -> str:
    """Writes a picture as SVG.

    Args:
        picture: the picture.

    Returns:
        An XML document.

    Example:
        >>> print(to_svg(Picture(20, 10, "A box", "One box.", (Box(1, 2, 3.25, 4, "#0072b2", kind="forward"),))))
        <svg xmlns="http://www.w3.org/2000/svg" width="20" height="10" viewBox="0 0 20 10" role="img" \
aria-labelledby="title desc" font-family="DejaVu Sans, Verdana, sans-serif">
        <title id="title">A box</title>
        <desc id="desc">One box.</desc>
        <rect width="20" height="10" fill="#ffffff"/>
        <rect class="forward" x="1" y="2" width="3.25" height="4" fill="#0072b2"/>
        </svg>
    """
    size = f'width="{_number(picture.width)}" height="{_number(picture.height)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {_number(picture.width)} {_number(picture.height)}" role="img" '
        f'aria-labelledby="title desc" font-family="{_FONT}, Verdana, sans-serif">',
        f'<title id="title">{escape(_printable(picture.title))}</title>',
        f'<desc id="desc">{escape(_printable(picture.description))}</desc>',
        f'<rect {size} fill="#ffffff"/>',
    ]
    return "\n".join([*lines, *map(_element, picture.shapes), "</svg>"])


def _element(shape: Box | Text | Line) -> str:
    if isinstance(shape, Box):
        kind = f"class={quoteattr(shape.kind)} " if shape.kind else ""
        places = " ".join(f'{name}="{_number(getattr(shape, name))}"' for name in ("x", "y", "width", "height"))
        edge = f' stroke="{shape.edge}"' if shape.edge else ""
        inside = f"><title>{escape(_printable(shape.label))}</title></rect>" if shape.label else "/>"
        return f'<rect {kind}{places} fill="{shape.fill}"{edge}{inside}'
    if isinstance(shape, Line):
        places = " ".join(f'{name}="{_number(getattr(shape, name))}"' for name in ("x1", "y1", "x2", "y2"))
        return f'<line {places} stroke="{shape.stroke}"/>'
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    bold = ' font-weight="bold"' if shape.bold else ""
    place = f'x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"'
    return f'<text {place}{anchor}{bold} fill="{shape.fill}">{escape(_printable(shape.text))}</text>'


def to_png(picture: Picture, path: str | os.PathLike[str], scale: float = 2.0) -> None:
    """Writes a picture as PNG.

    Args:
        picture: the picture.
        path: the file.
        scale: pixels of the file in a pixel of the picture; 2 for sharp text on present screens.

    Raises:
        ArgumentError: Matplotlib is not installed.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError as error:
        raise ArgumentError(
            f"A PNG needs Matplotlib: expected it to be installed; received path={os.fspath(path)!r} and {error}. "
            "Install it with `pip install matplotlib`, or draw to a path that ends with '.svg'."
        ) from error
    figure = figure_module.Figure(figsize=(picture.width / _DPI, picture.height / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    points = 72 / _DPI  # of a pixel
    for shape in picture.shapes:
        if isinstance(shape, Box):
            look = {"facecolor": shape.fill, "edgecolor": shape.edge or "none", "linewidth": points}
            axes.add_patch(patches.Rectangle((shape.x, shape.y), shape.width, shape.height, **look))
        elif isinstance(shape, Line):
            axes.plot((shape.x1, shape.x2), (shape.y1, shape.y2), color=shape.stroke, linewidth=points)
        else:
            font = {
                "fontfamily": _FONT,
                "fontsize": shape.size * points,
                "fontweight": "bold" if shape.bold else "normal",
            }
            place = {"horizontalalignment": _ANCHORS[shape.anchor], "verticalalignment": "baseline"}
            axes.text(shape.x, shape.y, _printable(shape.text), color=shape.fill, parse_math=False, **font, **place)
    figure.savefig(path, format="png", dpi=_DPI * scale)


def _number(value: float) -> str:
    """A number with at most two decimals, without zeros at the end."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
