"""Accuracy and forgetting curves for print: the same files give the same bytes."""

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from medcil.report.read import RunRecord, StepRecord, read_run
from medcil.report.tables import are_comparable, run_labels
from medcil.storage.atomic import write_bytes

# Okabe and Ito's palette without its yellow: told apart by color-blind readers, dark enough for white paper.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B7280")
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
    """accuracy and forgetting, each as PDF, SVG and PNG."""
    records = [read_run(path) for path in runs]
    with matplotlib.rc_context(STYLE):
        figures = {"accuracy": _accuracy(records), "forgetting": _forgetting(records)}
        content = {
            out_dir / f"{name}.{suffix}": _rendered(figure, suffix)
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


def _rendered(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=300, metadata=METADATA[suffix])
    return buffer.getvalue()
