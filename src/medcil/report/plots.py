"""Draw curves of accuracy and forgetting for print, and share the style of all figures."""

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from medcil.experiments.suite import Suite
from medcil.report.markup import PALETTE, in_figure
from medcil.report.runs import RunRecord, StepRecord, read_run
from medcil.report.tables import are_comparable, run_labels
from medcil.storage.atomic import write_bytes

MARKERS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so every machine draws the same glyphs
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4b5563",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a label may hold a dollar sign
    "pdf.fonttype": 42,  # journals ask for TrueType
    "svg.hashsalt": "medcil",
}
# Nothing that depends on when a figure was drawn.
METADATA: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}


def write_figures(runs: Sequence[Path], out_dir: Path) -> list[Path]:
    """Draw accuracy and forgetting, each as PDF, SVG and PNG; the same files give the same bytes."""
    records = [read_run(path) for path in runs]
    with matplotlib.rc_context(STYLE):
        figures = {"accuracy": _accuracy(records), "forgetting": _forgetting(records)}
        content = {
            out_dir / f"{name}.{suffix}": rendered(figure, suffix)
            for name, figure in figures.items()
            for suffix in METADATA
        }
    for path, figure_bytes in content.items():
        write_bytes(path, figure_bytes)
    return list(content)


def _accuracy(runs: Sequence[RunRecord]) -> Figure:
    figure = Figure(figsize=(6.9, 2.9), layout="constrained")
    balanced, micro = figure.subplots(1, 2, sharey=True)
    _curves(balanced, runs, lambda step: step.balanced)
    _curves(micro, runs, lambda step: step.micro)
    balanced.set(title="Every class counts the same", ylabel="Balanced accuracy (%)", ylim=(0, 102))
    micro.set(title="Every image counts the same", ylabel="Micro accuracy (%)")
    micro.tick_params(labelleft=True)
    _legend(figure, balanced, runs)
    return figure


def _forgetting(runs: Sequence[RunRecord]) -> Figure:
    figure = Figure(figsize=(3.5, 2.9), layout="constrained")
    axes = figure.subplots()
    _curves(axes, runs, lambda step: step.forgetting)
    axes.set(ylabel="Forgetting (points)")
    lowest = min((v for run in runs for step in run.steps if (v := step.forgetting) is not None), default=0.0)
    axes.set_ylim(bottom=0 if lowest >= 0 else None)
    _legend(figure, axes, runs)
    return figure


def _curves(axes: Axes, runs: Sequence[RunRecord], value: Callable[[StepRecord], float | None]) -> None:
    for i, run in enumerate(runs):
        known = [(step.step, 100 * v) for step in run.steps if (v := value(step)) is not None]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            color=PALETTE[i % len(PALETTE)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="-" if i < len(PALETTE) else "--",
            clip_on=False,
            zorder=3,
        )
    if are_comparable(runs):
        longest = max(runs, key=lambda run: len(run.steps))
        axes.set_xticks(
            [step.step for step in longest.steps],
            [f"{step.step}\n({len(step.classes)})" for step in longest.steps],
        )
        axes.set_xlabel("Step (classes seen)")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("Step")


def _legend(figure: Figure, axes: Axes, runs: Sequence[RunRecord]) -> None:
    labels = run_labels(runs)
    width = 0.075 * max(map(len, labels)) + 0.5  # inches of the widest entry at this font size, roughly
    n_columns = max(1, min(len(labels), int(figure.get_figwidth() / width)))
    numbers = [str(i) for i in range(len(labels))]
    legend = figure.legend(axes.get_lines(), numbers, loc="outside lower center", ncols=n_columns)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(textwrap.fill(label, 44))  # set late: a legend drops labels with a leading underscore


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
    """The style of a row: markers and dashes tell rows apart where colors repeat or are not seen."""

    color: str
    marker: str
    dash: str
    face: str


def look(i: int) -> Look:
    color, again = PALETTE[i % len(PALETTE)], i // len(PALETTE)
    marker = MARKERS[(i + 2 * again) % len(MARKERS)]
    return Look(color, marker, ("-", "--", ":")[again % 3], color if again == 0 else "white")


def looks(suite: Suite) -> dict[str, Look]:
    """Give each row of a suite one look, the same in every figure."""
    return {row.name: look(i) for i, row in enumerate(suite.expanded_rows())}


def panels(
    n: int, *, height: float, legend: Sequence[str] = (), share_y: bool = False, is_wide: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create n panels in rows of up to three, with room for a legend below."""
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
    figure.savefig(buffer, format=suffix, metadata=METADATA[suffix], dpi=300 if suffix == "png" else "figure")
    return buffer.getvalue()
