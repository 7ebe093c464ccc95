"""Describe the page's interactive figures for Plotly; text and grid take the page's colors."""

import html
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from medcil.report.markup import PALETTE
from medcil.report.runs import EpochRecord, RunRecord, StepRecord
from medcil.report.tables import are_comparable, run_labels

Chart = dict[str, Any]
Value = Callable[[StepRecord], float | None]

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
MAX_COUNTED_CLASSES = 14  # beyond this the counts no longer fit their cells
MAX_NAMED_CLASSES = 30  # beyond this their names overlap; pointing at a cell still tells them
MAX_SPELLED_STEPS = 5
MAX_STEP_TICKS = 9
LOSS_PANEL_HEIGHT = 120
TOTAL_COLOR = PALETTE[-1]


def accuracy_chart(runs: Sequence[RunRecord], value: Value, title: str) -> Chart:
    """Draw one line per run over the steps."""
    labels = run_labels(runs)
    lines = [_line(i, run, labels[i], value, "%") for i, run in enumerate(runs)]
    y_axis = {"title": {"text": title}, "ticksuffix": "%", "range": [0, 102], "zeroline": False}
    return {"data": lines, "layout": _layout(_step_axis(runs), y_axis)}


def forgetting_chart(runs: Sequence[RunRecord]) -> Chart:
    """Draw one line per run, in points; it is below zero where old classes got better."""
    labels = run_labels(runs)
    lines = [_line(i, run, labels[i], lambda step: step.forgetting, " points") for i, run in enumerate(runs)]
    values = [y for line in lines for y in line["y"] if y is not None]
    limits = [min([*values, 0.0]) - 2, max([*values, 10.0]) * 1.08]
    y_axis = {"title": {"text": "Forgetting (points)"}, "range": limits, "zeroline": False}
    return {"data": lines, "layout": _layout(_step_axis(runs), y_axis)}


def progress_chart(run: RunRecord) -> Chart:
    """Draw the accuracies and the forgetting of one run together."""
    lines = [
        _line(0, run, "Balanced accuracy", lambda step: step.balanced, "%"),
        _line(6, run, "Micro accuracy", lambda step: step.micro, "%"),
        _line(1, run, "Forgetting", lambda step: step.forgetting, " points"),
    ]
    lowest = min((y for line in lines for y in line["y"] if y is not None), default=0.0)
    y_axis = {"title": {"text": "percent; points"}, "range": [min(lowest, 0) - 2, 102], "zeroline": False}
    layout = _layout(_step_axis([run]), y_axis)
    legend = {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    return {"data": lines, "layout": layout | {"height": 340, "showlegend": True, "legend": legend}}


def _layout(x_axis: dict[str, Any], y_axis: dict[str, Any]) -> dict[str, Any]:
    return {
        "height": 290,
        "margin": {"l": 58, "r": 14, "t": 10, "b": 56},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": x_axis,
        "yaxis": y_axis,
    }


def _line(i: int, run: RunRecord, label: str, value: Value, unit: str) -> dict[str, Any]:
    color = PALETTE[i % len(PALETTE)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plotly_text(label),
        "x": [step.step for step in run.steps],
        "y": [None if (v := value(step)) is None else round(100 * v, 2) for step in run.steps],
        "customdata": [[_wrapped(label), _wrapped(arrivals(step))] for step in run.steps],
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{y:.1f}" + unit + "<br>%{customdata[1]}<extra></extra>",
        "line": {"color": color, "width": 2.5, "dash": "solid" if i < len(PALETTE) else "dash"},
        "marker": {"color": color, "size": 9, "symbol": SYMBOLS[i % len(SYMBOLS)]},
    }


def arrivals(step: StepRecord, limit: int = 6) -> str:
    """Name the classes that arrived in a step: `2: D, E`."""
    new = step.classes[step.n_old :]
    rest = f" and {len(new) - limit} more" if len(new) > limit else ""
    return f"{step.step}: {', '.join(new[:limit])}{rest}"


def _step_axis(runs: Sequence[RunRecord]) -> dict[str, Any]:
    longest = max(runs, key=lambda run: len(run.steps))
    n = len(longest.steps)
    margin = 0.08 * max(1, n - 1)
    ticked = longest.steps[:: math.ceil(n / MAX_STEP_TICKS)]
    if not are_comparable(runs):
        title, names = "step", [str(step.step) for step in ticked]
    elif n <= MAX_SPELLED_STEPS:
        title = "classes seen after step"
        names = [f"step {step.step}<br>({len(step.classes)} classes)" for step in ticked]
    else:
        title, names = "step (classes seen)", [f"{step.step}<br>({len(step.classes)})" for step in ticked]
    return {
        "title": {"text": title},
        "tickvals": [step.step for step in ticked],
        "ticktext": names,
        "range": [longest.steps[0].step - margin, longest.last.step + margin],
        "showgrid": False,
        "zeroline": False,
    }


def confusion_chart(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """Draw a confusion matrix, colored by the share of the true class: a rare class is as visible as any."""
    n = len(classes)
    ticks = {
        "tickvals": list(range(n)),
        "ticktext": [plotly_text(name if len(name) <= 16 else name[:15] + "…") for name in classes],
        "showticklabels": n <= MAX_NAMED_CLASSES,
        "showgrid": False,
        "zeroline": False,
    }
    cells: dict[str, Any] = {
        "type": "heatmap",
        "z": [[round(count / max(1, sum(row)), 4) for count in row] for row in counts],
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "xgap": 2 if n <= MAX_COUNTED_CLASSES else 0,
        "ygap": 2 if n <= MAX_COUNTED_CLASSES else 0,
        "hovertemplate": "true: %{customdata[0]}<br>predicted: %{customdata[1]}<br>"
        "%{customdata[2]} images, %{z:.1%} of the true class<extra></extra>",
    }
    if n <= MAX_COUNTED_CLASSES:
        cells |= {"text": [[str(count or "") for count in row] for row in counts], "texttemplate": "%{text}"}
    layout = {
        "height": 390,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": ticks | {"title": {"text": "predicted"}, "tickangle": -40, "automargin": True},
        "yaxis": ticks | {"title": {"text": "true"}, "autorange": "reversed", "automargin": True},
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
    n = len(series)
    shapes, annotations = _task_boundaries(epochs)
    layout: dict[str, Any] = {
        "height": LOSS_PANEL_HEIGHT * n + 60,
        "margin": {"l": 64, "r": 14, "t": 24, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": "epoch, all tasks in a row"},
            "showgrid": False,
            "zeroline": False,
            "anchor": f"y{n if n > 1 else ''}",
            "range": [0.5, len(epochs) + 0.5],
        },
        "shapes": shapes,
        "annotations": annotations,
    }
    lines = []
    for i, (term, losses) in enumerate(series.items()):
        suffix = "" if i == 0 else str(i + 1)
        color = TOTAL_COLOR if term == "total" else PALETTE[i % (len(PALETTE) - 1)]
        lines += [_loss_line(epochs, losses, task, f"y{suffix}", color) for task in _tasks(epochs)]
        domain = [1 - (i + 0.86) / n, 1 - i / n]
        layout[f"yaxis{suffix}"] = {"domain": domain, "rangemode": "tozero", "nticks": 4, "zeroline": False}
        annotations.append(_panel_name(plotly_text(term), top=domain[1]))
    return {"data": lines, "layout": layout}


def _tasks(epochs: Sequence[EpochRecord]) -> list[int]:
    return list(dict.fromkeys(epoch.task for epoch in epochs))


def _loss_line(
    epochs: Sequence[EpochRecord], losses: Sequence[float | None], task: int, axis: str, color: str
) -> dict[str, Any]:
    """Draw one line per task; a line between tasks would show losses that were not measured."""
    own = [i for i, epoch in enumerate(epochs) if epoch.task == task]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(own) <= 3 else "lines",
        "x": [i + 1 for i in own],
        "y": [None if (loss := losses[i]) is None else round(loss, 5) for i in own],
        "customdata": [[task, plotly_text(epochs[i].phase), epochs[i].epoch] for i in own],
        "yaxis": axis,
        "line": {"width": 2, "color": color},
        "hovertemplate": "%{y:.4g}<br>task %{customdata[0]}, phase %{customdata[1]}, "
        "epoch %{customdata[2]}<extra></extra>",
    }


def _panel_name(term: str, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 1, "y": top, "xanchor": "right", "yanchor": "top"}
    return place | {"text": f"<b>{term}</b>", "showarrow": False}


def _task_boundaries(epochs: Sequence[EpochRecord]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    starts = [i for i, epoch in enumerate(epochs) if i == 0 or epoch.task != epochs[i - 1].task]
    line = {"color": "#9ca3af", "width": 1, "dash": "dot"}
    shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "line": line}
        | {"x0": i + 0.5, "x1": i + 0.5, "y0": 0, "y1": 1}
        for i in starts[1:]
    ]
    names = [
        {"xref": "x", "yref": "paper", "x": i + 0.5, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        | {"text": f"task {epochs[i].task}", "showarrow": False}
        for i in starts
    ]
    return shapes, names


def _wrapped(text: str) -> str:
    """Break a label into short lines: Plotly cuts off a hover label at the edge of the chart."""
    return "<br>".join(plotly_text(line) for line in textwrap.wrap(text, 32))


def plotly_text(name: str) -> str:
    """Escape a class name: Plotly interprets some HTML in its texts."""
    return html.escape(name, quote=False)
