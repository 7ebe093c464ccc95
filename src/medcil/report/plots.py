"""The style of all figures for print: fonts, widths, the look of a row, panels, the legend."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from medcil.report.markup import PALETTE, in_figure, shortened
from medcil.report.runs import RunRecord

SINGLE, DOUBLE = 3.4, 7.0  # inches: one column of a page, and both
SMALL = 7  # points: nothing is set smaller
STYLE = rc_params_from_file(Path(__file__).parent / "templates/print.mplstyle", use_default_template=False)
CHANGING = {"pdf": "CreationDate", "svg": "Date", "png": "Software"}  # left out: equal figures, equal bytes
PER_STEP = {
    "micro": "Accuracy (%)",
    "balanced": "Balanced accuracy (%)",
    "forgetting": "Forgetting (points)",
    "old": "Accuracy, old classes (%)",
    "new": "Accuracy, new classes (%)",
}
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
MAX_COLUMNS = 3
MAX_TICKS = 7
LEGEND_LINE = 0.165  # inches

Look = Mapping[str, Any]
"""Line properties of a row: markers and dashes tell rows apart where colors repeat or are not seen."""


class NotDrawn(Exception):
    """A figure cannot be drawn; the page shows the reason instead."""


def name_steps(axes: Axes, run: RunRecord) -> None:
    """Label the steps with the number of classes seen."""
    ticked = run.steps[:: math.ceil(len(run.steps) / MAX_TICKS)]
    names = [f"{step.step}\n({len(step.classes)})" for step in ticked]
    axes.set_xticks([step.step for step in ticked], names)
    axes.set_xlabel("Step (classes seen)")


def look(i: int) -> Look:
    color, again = PALETTE[i % len(PALETTE)], i // len(PALETTE)
    return {
        "color": color,
        "marker": MARKERS[(i + 2 * again) % len(MARKERS)],
        "linestyle": ("-", "--", ":")[again % 3],
        "markerfacecolor": color if again == 0 else "white",
        "markeredgewidth": 0.9,
    }


def panels(
    n: int, *, height: float, legend: Sequence[str] = (), share_y: bool = False, is_wide: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create n panels in rows of up to three, with room for a legend below; refuse a figure without any."""
    if n == 0:
        raise NotDrawn("none of its runs is finished yet")
    n_columns = 2 if n == 4 else min(n, MAX_COLUMNS)
    n_rows = -(-n // n_columns)
    width = SINGLE if n == 1 and not is_wide else DOUBLE
    lines = -(-len(legend) // _legend_columns(legend, width))
    figure = Figure(figsize=(width, n_rows * height + LEGEND_LINE * lines), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_y).flatten()
    for axes in grid[n:]:
        axes.remove()
    return figure, list(grid[:n])


def _legend_columns(labels: Sequence[str], width: float) -> int:
    widest = max((len(shortened(label, 48)) for label in labels), default=1)
    return max(1, min(len(labels), int(width / (0.058 * widest + 0.42))))  # inches at this font, roughly


def add_legend(figure: Figure, looks: Sequence[Look], labels: Sequence[str]) -> None:
    """Add the legend below all panels."""
    legend = figure.legend(
        [Line2D([], [], **shown) for shown in looks],
        [str(i) for i in range(len(labels))],
        loc="outside lower center",
        ncols=_legend_columns(labels, figure.get_figwidth()),
        handlelength=2.4,
        columnspacing=1.2,
        borderaxespad=0.1,
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(in_figure(shortened(label, 48)))  # a legend drops labels with a leading underscore


def rendered(figure: Figure, suffix: str, *, dpi: int = 300) -> bytes:
    buffer, metadata = io.BytesIO(), {CHANGING[suffix]: None}
    figure.savefig(buffer, format=suffix, metadata=metadata, dpi=dpi if suffix == "png" else "figure")
    return buffer.getvalue()
