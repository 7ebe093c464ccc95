"""The page of an evaluation: one HTML file, no network, nothing beside it."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from medcil.report import evaluation
from medcil.report.charts import Chart, confusion_chart
from medcil.report.html import asset, json_for_script, source_hash
from medcil.report.plots import PALETTE
from medcil.report.read import StepRecord
from medcil.storage.atomic import write_bytes

Content = Mapping[str, Any]
HEADLINES = ("balanced_accuracy", "accuracy", "auroc", "ece")
ROW_HEIGHT = 34  # of a chart with a row for each class or subgroup


def write_page(content: Content, path: Path) -> None:
    write_bytes(path, render(content).encode())


def render(content: Content) -> str:
    """The same evaluation gives the same text."""
    charts = _charts(content)
    script, plotly = asset("page.js"), get_plotlyjs()
    environment = Environment(
        loader=PackageLoader("medcil.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("evaluation_page.html.j2").render(
        content=content,
        title=evaluation.title_of(content),
        words=evaluation,
        headlines=[(evaluation.OVERALL[name], name, content["by_image"][name]) for name in HEADLINES],
        charts=json_for_script(charts),
        subgroups=[(column, f"subgroup{i}") for i, column in enumerate(content["by_subgroup"])],
        style=Markup(asset("page.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        script_hashes=" ".join(source_hash(text) for text in (plotly, script)),
    )


def _charts(content: Content) -> dict[str, Chart]:
    by_image = content["by_image"]
    charts = {
        "confusion": confusion_chart(_as_step(content)),
        "reliability": _reliability_chart(by_image["reliability"]),
        "classes": _ranges_chart(
            {
                title: [(c["name"], c[key]) for c in by_image["classes"]]
                for key, title in (("sensitivity", "Sensitivity"), ("specificity", "Specificity"))
            }
        ),
    }
    for i, groups in enumerate(content["by_subgroup"].values()):
        found = [
            (f"{value} ({section['n']:,})", section["balanced_accuracy"]) for value, section in groups.items()
        ]
        charts[f"subgroup{i}"] = _ranges_chart({"Balanced accuracy": found})
    return charts


def _as_step(content: Content) -> StepRecord:
    """What the chart of a confusion matrix reads."""
    nothing = dict.fromkeys(("micro", "balanced", "macro_f1", "old", "new", "kappa", "forgetting"))
    confusion = tuple(tuple(row) for row in content["by_image"]["confusion"])
    return StepRecord(
        step=1, classes=tuple(content["classes"]), n_old=0, recall=(), confusion=confusion, **nothing
    )


def _ranges_chart(series: Mapping[str, Sequence[tuple[str, Content]]]) -> Chart:
    """A dot with its interval in a row for each name; several figures of one name beside each other."""
    names = [name for name, _ in next(iter(series.values()))]
    traces = [_ranges(i, len(series), title, figures) for i, (title, figures) in enumerate(series.items())]
    layout = {
        "height": 90 + ROW_HEIGHT * len(names),
        "margin": {"l": 10, "r": 14, "t": 30, "b": 40},
        "showlegend": len(series) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"},
        "hovermode": "closest",
        "xaxis": {"range": [-2, 102], "ticksuffix": "%", "zeroline": False},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [_text(name if len(name) <= 24 else name[:23] + "…") for name in names],
            "range": [len(names) - 0.5, -0.5],
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
        },
    }
    return {"data": traces, "layout": layout}


def _ranges(i: int, n: int, title: str, figures: Sequence[tuple[str, Content]]) -> dict[str, Any]:
    """The i-th of n figures in every row, a little above or below the others."""
    shift = 0.0 if n == 1 else 0.3 * (i / (n - 1) - 0.5)
    known = [(y, name, figure) for y, (name, figure) in enumerate(figures) if figure["value"] is not None]
    values = [figure["value"] for _, _, figure in known]
    lows, highs = (
        [
            value if figure[end] is None else figure[end]
            for value, (_, _, figure) in zip(values, known, strict=True)
        ]
        for end in ("low", "high")
    )
    return {
        "type": "scatter",
        "mode": "markers",
        "name": title,
        "x": [round(100 * value, 2) for value in values],
        "y": [y + shift for y, _, _ in known],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round(100 * (high - value), 2) for high, value in zip(highs, values, strict=True)],
            "arrayminus": [round(100 * (value - low), 2) for low, value in zip(lows, values, strict=True)],
            "color": PALETTE[i],
            "thickness": 1.5,
            "width": 4,
        },
        "marker": {"color": PALETTE[i], "size": 9, "symbol": ("circle", "diamond")[i % 2]},
        "customdata": [[_text(name), evaluation.with_interval("accuracy", f)] for _, name, f in known],
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{title} %{{customdata[1]}}<extra></extra>",
    }


def _reliability_chart(bins: Sequence[Content]) -> Chart:
    """How often it is right against how sure it is; on the diagonal it is as good as it says."""
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "x": [0, 100],
        "y": [0, 100],
        "line": {"color": PALETTE[-1], "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }
    points = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [round(100 * b["confidence"], 2) for b in bins],
        "y": [round(100 * b["accuracy"], 2) for b in bins],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [round(100 * (b["high"] - b["accuracy"]), 2) for b in bins],
            "arrayminus": [round(100 * (b["accuracy"] - b["low"]), 2) for b in bins],
            "color": PALETTE[0],
            "thickness": 1,
            "width": 3,
        },
        "customdata": [[b["images"]] for b in bins],
        "hovertemplate": "says %{x:.0f}%, is right in %{y:.0f}%<br>%{customdata[0]} images<extra></extra>",
        "line": {"color": PALETTE[0], "width": 2},
        "marker": {"color": PALETTE[0], "size": 8},
    }
    axis = {"range": [-2, 102], "ticksuffix": "%", "zeroline": False}
    layout = {
        "height": 390,
        "margin": {"l": 58, "r": 14, "t": 10, "b": 46},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": axis | {"title": {"text": "probability of the predicted class"}},
        "yaxis": axis | {"title": {"text": "share that is right"}},
    }
    return {"data": [diagonal, points], "layout": layout}


def _text(name: str) -> str:
    """Plotly reads some HTML in its texts; a name is never meant as HTML."""
    return html.escape(name, quote=False)
