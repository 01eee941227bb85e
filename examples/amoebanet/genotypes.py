"""What is inside the cells of AmoebaNet-A, -B and -D (arXiv:1802.01548), as data.

These are the settings of the networks' public implementation, which reproduce the published numbers of parameters.
"""

from __future__ import annotations

from typing import NamedTuple


class CellGenotype(NamedTuple):
    """A cell: hidden states, numbered from 0, of which the first two are the cell's inputs, current and previous.

    Each entry of `sums` makes the next state: it names two operations, each with the state that it is applied to, and
    the results are added. The cell's output joins the states in `joined` along the channels.
    """

    sums: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    joined: tuple[int, ...]


class Genotype(NamedTuple):
    """The two cells of a network: one that keeps the size of the image, and one that halves it."""

    normal: CellGenotype
    reduction: CellGenotype


GENOTYPES = {
    "A": Genotype(
        normal=CellGenotype(
            sums=(
                (("average_3x3", 0), ("max_3x3", 0)),
                (("separable_3x3", 1), ("none", 1)),
                (("none", 0), ("average_3x3", 1)),
                (("separable_3x3", 0), ("separable_5x5", 2)),
                (("average_3x3", 5), ("separable_3x3", 0)),
            ),
            joined=(1, 3, 4, 6),
        ),
        reduction=CellGenotype(
            sums=(
                (("separable_3x3", 1), ("average_3x3", 0)),
                (("max_3x3", 0), ("separable_7x7", 2)),
                (("max_3x3", 1), ("max_3x3", 0)),
                (("separable_3x3", 4), ("1x7_7x1", 0)),
                (("average_3x3", 1), ("separable_7x7", 0)),
            ),
            joined=(2, 3, 4, 5, 6),
        ),
    ),
    "B": Genotype(
        normal=CellGenotype(
            sums=(
                (("1x1", 1), ("max_3x3", 1)),
                (("none", 1), ("separable_3x3", 0)),
                (("1x1", 1), ("separable_3x3", 0)),
                (("1x1", 2), ("none", 2)),
                (("average_3x3", 1), ("1x1", 5)),
            ),
            joined=(0, 3, 4, 6),
        ),
        reduction=CellGenotype(
            sums=(
                (("max_2x2", 0), ("max_3x3", 0)),
                (("none", 2), ("3x3", 1)),
                (("separable_5x5", 2), ("max_3x3", 2)),
                (("none", 3), ("separable_3x3", 1)),
                (("average_3x3", 4), ("1x1", 3)),
            ),
            joined=(5, 6),
        ),
    ),
    "D": Genotype(
        normal=CellGenotype(
            sums=(
                (("1x1", 1), ("max_3x3", 1)),
                (("none", 1), ("1x7_7x1", 0)),
                (("1x1", 0), ("1x7_7x1", 0)),
                (("max_3x3", 2), ("none", 2)),
                (("average_3x3", 1), ("1x1", 5)),
            ),
            joined=(0, 3, 4, 6),
        ),
        reduction=CellGenotype(
            sums=(
                (("max_2x2", 0), ("max_3x3", 0)),
                (("none", 2), ("3x3", 1)),
                (("1x7_7x1", 2), ("max_3x3", 2)),
                (("none", 3), ("max_2x2", 1)),
                (("average_3x3", 2), ("1x1", 3)),
            ),
            joined=(4, 5, 6),
        ),
    ),
}
