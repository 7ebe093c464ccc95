"""Describe the page's interactive figures for Plotly; `page.js` adds colors, margins and other defaults."""

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from medcil.report.markup import PALETTE, shortened
from medcil.report.runs import EpochRecord, RunRecord, StepRecord, are_comparable

Chart = dict[str, Any]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
MAX_COUNTED_CLASSES = 14  # beyond this the counts no longer fit their cells
MAX_NAMED_CLASSES = 30  # beyond this their names overlap; pointing at a cell still tells them
MAX_STEP_TICKS = 9
LOSS_PANEL_HEIGHT = 120


def step_chart(lines: Sequence[tuple[RunRecord, str, str]], title: str) -> Chart:
    """Draw a line over the steps for each (run, name, metric of a step); forgetting is in points."""
    runs, metrics = [run for run, _, _ in lines], {metric for _, _, metric in lines}
    traces = []
    for i, (run, name, metric) in enumerate(lines):
        unit, color = " points" if metric == "forgetting" else "%", PALETTE[i % len(PALETTE)]
        values = [getattr(step, metric) for step in run.steps]
        traces.append(
            {
                "mode": "lines+markers",
                "name": plotly_text(name),
                "x": [step.step for step in run.steps],
                "y": [None if value is None else round(100 * value, 2) for value in values],
                "customdata": [[_wrapped(name), _wrapped(arrivals(step))] for step in run.steps],
                "hovertemplate": f"<b>%{{customdata[0]}}</b><br>%{{y:.1f}}{unit}<br>%{{customdata[1]}}"
                "<extra></extra>",
                "line": {"color": color, "width": 2.5, "dash": "solid" if i < len(PALETTE) else "dash"},
                "marker": {"color": color, "size": 9, "symbol": SYMBOLS[i % len(SYMBOLS)]},
            }
        )
    limits = {"rangemode": "tozero"} if "forgetting" in metrics else {"range": [0, 102], "ticksuffix": "%"}
    layout = {
        "height": 300,
        "showlegend": len(metrics) > 1,
        "xaxis": _step_axis(runs),
        "yaxis": {"title": {"text": title}, **limits},
    }
    return {"data": traces, "layout": layout}


def arrivals(step: StepRecord, limit: int = 6) -> str:
    """Name the classes that arrived in a step: `2: D, E`."""
    new = step.classes[step.n_old :]
    rest = f" and {len(new) - limit} more" if len(new) > limit else ""
    return f"{step.step}: {', '.join(new[:limit])}{rest}"


def _step_axis(runs: Sequence[RunRecord]) -> dict[str, Any]:
    steps = max(runs, key=lambda run: len(run.steps)).steps
    ticked = steps[:: math.ceil(len(steps) / MAX_STEP_TICKS)]
    same = are_comparable(runs)
    return {
        "title": {"text": "step (classes seen)" if same else "step"},
        "tickvals": [step.step for step in ticked],
        "ticktext": [f"{step.step}<br>({len(step.classes)})" if same else str(step.step) for step in ticked],
        "showgrid": False,
    }


def confusion_chart(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """Draw a confusion matrix, colored by the share of the true class: a rare class is as visible as any."""
    n = len(classes)
    ticks = {
        "tickvals": list(range(n)),
        "ticktext": [plotly_text(shortened(name, 16)) for name in classes],
        "showticklabels": n <= MAX_NAMED_CLASSES,
        "showgrid": False,
    }
    shares = [[round(count / max(1, sum(row)), 4) for count in row] for row in counts]
    cells: dict[str, Any] = {"type": "heatmap", "z": shares}
    if n <= MAX_COUNTED_CLASSES:
        cells |= {"text": [[str(count or "") for count in row] for row in counts], "texttemplate": "%{text}"}
    layout = {
        "height": 390,
        "xaxis": {"title": {"text": "predicted"}, "tickangle": -40, **ticks},
        "yaxis": {"title": {"text": "true"}, "autorange": "reversed", **ticks},
    }
    # The page builds the hover text from names and counts: written out it would be most of the file.
    names = [plotly_text(name) for name in classes]
    return {"data": [cells], "layout": layout, "names": names, "counts": counts}


def loss_chart(epochs: Sequence[EpochRecord]) -> Chart:
    """Draw a panel per loss term over all epochs; the scales of terms differ by orders of magnitude."""
    terms = list(dict.fromkeys(name for epoch in epochs for name in epoch.losses))
    series = {term: [epoch.losses.get(term) for epoch in epochs] for term in terms}
    if len(terms) != 1:
        series["total"] = [epoch.total for epoch in epochs]
    starts = [i for i, epoch in enumerate(epochs) if i == 0 or epoch.task != epochs[i - 1].task]
    layout: dict[str, Any] = {
        "height": LOSS_PANEL_HEIGHT * len(series) + 60,
        "grid": {"rows": len(series), "columns": 1, "pattern": "coupled", "ygap": 0.16},
        "xaxis": {
            "title": {"text": "epochs, task after task"},
            "tickvals": [i + 0.5 for i in starts],
            "ticktext": [f"task {epochs[i].task}" for i in starts],
            "griddash": "dot",
            "range": [0.5, len(epochs) + 0.5],
        },
    }
    lines = []
    for i, (term, losses) in enumerate(series.items()):
        axis, color = f"y{i + 1 if i else ''}", PALETTE[-1 if term == "total" else i % (len(PALETTE) - 1)]
        layout[axis.replace("y", "yaxis")] = {
            "title": {"text": plotly_text(term)},
            "rangemode": "tozero",
            "nticks": 4,
        }
        for start, end in zip(starts, [*starts[1:], len(epochs)], strict=True):  # no line between tasks
            own = epochs[start:end]
            lines.append(
                {
                    "mode": "lines+markers" if len(own) <= 3 else "lines",
                    "x": list(range(start + 1, end + 1)),
                    "y": [None if loss is None else round(loss, 5) for loss in losses[start:end]],
                    "customdata": [[epoch.task, plotly_text(epoch.phase), epoch.epoch] for epoch in own],
                    "yaxis": axis,
                    "line": {"width": 2, "color": color},
                    "hovertemplate": "%{y:.4g}<br>task %{customdata[0]}, phase %{customdata[1]}, "
                    "epoch %{customdata[2]}<extra></extra>",
                }
            )
    return {"data": lines, "layout": layout}


def _wrapped(text: str) -> str:
    """Break a label into short lines: Plotly cuts off a hover label at the edge of the chart."""
    return "<br>".join(plotly_text(line) for line in textwrap.wrap(text, 32))


def plotly_text(name: str) -> str:
    """Escape a class name: Plotly interprets some HTML in its texts."""
    return html.escape(name, quote=False)
