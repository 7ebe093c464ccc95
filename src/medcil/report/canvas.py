"""What all figures of a suite share: sizes of print, how a row looks everywhere, where the legend goes."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from medcil.report.cells import Results
from medcil.report.plots import MARKERS, METADATA, PALETTE, STYLE
from medcil.report.typeset import in_figure

SINGLE, DOUBLE = 3.4, 7.0  # inches: one column of a page, and both
SMALL = 7  # points: nothing is set smaller
SUITE_STYLE: dict[Any, Any] = STYLE | {
    "text.parse_math": True,  # every text goes through `in_figure`
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "lines.markersize": 3.8,
    "lines.linewidth": 1.2,
}
MAX_COLUMNS = 3
LEGEND_LINE = 0.165  # inches


@dataclass(frozen=True)
class Look:
    """How a row is drawn: told apart by color, and by marker and dash where colors repeat or are not seen."""

    color: str
    marker: str
    dash: str
    face: str


def look(i: int) -> Look:
    color, again = PALETTE[i % len(PALETTE)], i // len(PALETTE)
    marker = MARKERS[(i + 2 * again) % len(MARKERS)]
    return Look(color, marker, ("-", "--", ":")[again % 3], color if again == 0 else "white")


def looks(results: Results) -> dict[str, Look]:
    """The same row looks the same in every figure of its suite."""
    return {row.name: look(i) for i, row in enumerate(results.suite.expanded_rows())}


def panels(
    n: int, *, height: float, legend: Sequence[str] = (), share_y: bool = False, is_wide: bool = False
) -> tuple[Figure, list[Axes]]:
    """As many panels in rows of up to three, with room for a legend below."""
    n_columns = 2 if n == 4 else min(n, MAX_COLUMNS)
    n_rows = -(-n // n_columns)
    width = SINGLE if n == 1 and not is_wide else DOUBLE
    lines = legend_lines(legend, width)
    figure = Figure(figsize=(width, n_rows * height + LEGEND_LINE * lines), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_y)
    every = [axes for row in grid for axes in row]
    for axes in every[n:]:
        axes.remove()
    return figure, every[:n]


def legend_columns(labels: Sequence[str], width: float) -> int:
    widest = max((len(label) for label in labels), default=1) * 0.058 + 0.42  # inches at this font, roughly
    return max(1, min(len(labels), int(width / widest)))


def legend_lines(labels: Sequence[str], width: float) -> int:
    return -(-len(labels) // legend_columns(labels, width)) if labels else 0


def add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    figure.legend(
        list(handles),
        [in_figure(textwrap.shorten(label, 48, placeholder="…")) for label in labels],
        loc="outside lower center",
        ncols=legend_columns(labels, figure.get_figwidth()),
        handlelength=2.4,
        columnspacing=1.2,
        borderaxespad=0.1,
    )


def rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, metadata=METADATA[suffix])
    return buffer.getvalue()
