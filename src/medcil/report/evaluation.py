"""Show an evaluation from its JSON: rows for the terminal, tables in Markdown, and one HTML page."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medcil.report.charts import Chart, confusion_chart, plotly_text
from medcil.report.markup import PALETTE, render_text, render_with_charts, shortened
from medcil.storage.atomic import write_bytes

NOTICE = "Research use; not a medical device."
OVERALL = {
    "balanced_accuracy": "Balanced accuracy",
    "accuracy": "Accuracy",
    "auroc": "AUROC, mean of the classes",
    "kappa": "Cohen's kappa",
    "quadratic_kappa": "Quadratic kappa",
    "ece": "Calibration error (ECE)",
    "brier": "Brier score",
}
PER_CLASS = {
    "sensitivity": "Sensitivity",
    "specificity": "Specificity",
    "ppv": "PPV",
    "npv": "NPV",
    "class_auroc": "AUROC",
}
PERCENT = {"balanced_accuracy", "accuracy", "sensitivity", "specificity", "ppv", "npv"}
HEADLINES = ("balanced_accuracy", "accuracy", "auroc", "ece")

Content = Mapping[str, Any]
"""Of evaluation.json."""
Table = list[list[str]]
"""The header, then the rows."""


def number(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if name in PERCENT else f"{value:.3f}"


def with_interval(name: str, figure: Content) -> str:
    """Format a number with its interval: `87.5% (80.1% to 93.2%)`."""
    value = number(name, figure["value"])
    if figure["value"] is None or figure["low"] is None:
        return value
    return f"{value} ({number(name, figure['low'])} to {number(name, figure['high'])})"


def overall_table(content: Content) -> Table:
    """Return a row for each metric, with a column by image and, if present, by patient."""
    units = {unit: content[f"by_{unit}"] for unit in ("image", "patient") if content[f"by_{unit}"]}
    rows = [
        [title, *(with_interval(name, section[name]) for section in units.values())]
        for name, title in OVERALL.items()
        if name in content["by_image"]
    ]
    return [["", *(f"by {unit} ({section['n']:,})" for unit, section in units.items())], *rows]


def class_table(section: Content, unit: str) -> Table:
    classes = ((c["name"], c) for c in section["classes"])
    return [["Class", unit, *PER_CLASS.values()], *_measured_rows(classes, PER_CLASS)]


def subgroup_table(column: str, groups: Content) -> Table:
    titles = [OVERALL[name] for name in HEADLINES]
    return [[column, "Images", *titles], *_measured_rows(groups.items(), HEADLINES)]


def _measured_rows(sections: Iterable[tuple[str, Content]], metrics: Collection[str]) -> Table:
    return [
        [name, f"{of['n']:,}", *(with_interval(key, of[key]) for key in metrics)] for name, of in sections
    ]


def unlike_sentences(content: Content) -> list[str]:
    """Say how often the flag `unlike anything known` was raised."""
    unlike = content["unlike"]
    stated = unlike["stated_false_alarms"]
    if stated is None:
        return ["Whether an image is unlike anything known was never measured for this model."]
    known = f"classes it knows are falsely called unlike anything known (stated: up to {stated:.3g} of any)"
    other = "classes it does not know are called unlike anything known"
    return [
        f"{rate['flagged']:,} of {rate['n']:,} images of {what}: {rate['value']:.1%} "
        f"({rate['low']:.1%} to {rate['high']:.1%})."
        for what, rate in ((known, unlike["known_classes"]), (other, unlike["other_classes"]))
        if rate is not None
    ]


def interval_sentence(content: Content) -> str:
    intervals = content["intervals"]
    return (
        f"95% intervals: {intervals['draws']:,} bootstrap draws of {intervals['unit']}; of shares the wider "
        f"of that and Wilson's. Prior: {content['prior']['name']}."
    )


def _parts(content: Content) -> dict[str, Any]:
    """Return what Markdown and the page show."""
    names = content["classes"]
    counts = [[f"{n:,}" for n in row] for row in content["by_image"]["confusion"]]
    return {
        "content": content,
        "title": f"{content['version']} on {content['data']}",
        "notice": NOTICE,
        "intervals": interval_sentence(content),
        "unlike": unlike_sentences(content),
        "overall": overall_table(content),
        "by_class": {
            unit: class_table(section, heading)
            for unit, heading in (("image", "Images"), ("patient", "Patients"))
            if (section := content[f"by_{unit}"])
        },
        "confusion": [["", *names], *([name, *row] for name, row in zip(names, counts, strict=True))],
        "by_subgroup": {
            column: subgroup_table(column, groups) for column, groups in content["by_subgroup"].items()
        },
    }


def write_markdown(content: Content, path: Path) -> None:
    write_bytes(path, render_text("evaluation.md.j2", **_parts(content)).encode())


def write_page(content: Content, path: Path) -> None:
    """Write the page; the same evaluation gives the same bytes."""
    page = render_with_charts(
        "evaluation_page.html.j2",
        _charts(content),
        headlines=[(OVERALL[name], name, content["by_image"][name]) for name in HEADLINES],
        number=number,
        **_parts(content),
    )
    write_bytes(path, page.encode())


def _charts(content: Content) -> dict[str, Chart]:
    by_image = content["by_image"]
    metrics = {
        title: [(c["name"], c[key]) for c in by_image["classes"]]
        for key, title in (("sensitivity", "Sensitivity"), ("specificity", "Specificity"))
    }
    charts = {
        "confusion": confusion_chart(content["classes"], by_image["confusion"]),
        "reliability": _reliability_chart(by_image["reliability"]),
        "classes": _ranges_chart(metrics),
    }
    for i, groups in enumerate(content["by_subgroup"].values(), start=1):
        values = [
            (f"{value} ({section['n']:,})", section["balanced_accuracy"]) for value, section in groups.items()
        ]
        charts[f"subgroup{i}"] = _ranges_chart({"Balanced accuracy": values})
    return charts


AXIS = {"range": [-2, 102], "ticksuffix": "%"}
ROW_HEIGHT = 34  # of a chart with a row for each class or subgroup


def _ranges_chart(series: Mapping[str, Sequence[tuple[str, Content]]]) -> Chart:
    """Draw a dot with its interval for each name; several metrics of a name are drawn side by side."""
    names = [name for name, _ in next(iter(series.values()))]
    traces = []
    for i, (title, figures) in enumerate(series.items()):
        shift = 0.3 * (i - (len(series) - 1) / 2)
        measured = [
            (y, name, figure) for y, (name, figure) in enumerate(figures) if figure["value"] is not None
        ]
        traces.append(
            {
                "mode": "markers",
                "name": title,
                "x": [_percent(figure["value"]) for _, _, figure in measured],
                "y": [y + shift for y, _, _ in measured],
                "error_x": _error_bars([figure for _, _, figure in measured]),
                "marker": {"color": PALETTE[i], "size": 9, "symbol": ("circle", "diamond")[i % 2]},
                "customdata": [[plotly_text(name), with_interval("accuracy", f)] for _, name, f in measured],
                "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{title} %{{customdata[1]}}<extra></extra>",
            }
        )
    layout = {
        "height": 90 + ROW_HEIGHT * len(names),
        "showlegend": len(series) > 1,
        "xaxis": AXIS,
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": [plotly_text(shortened(name, 24)) for name in names],
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
        },
    }
    return {"data": traces, "layout": layout}


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _error_bars(figures: Sequence[Content]) -> dict[str, Any]:
    """Describe the intervals of values; a value without an interval has a bar of no length."""
    ends = [
        [figure["value"] if figure[end] is None else figure[end] for end in ("low", "value", "high")]
        for figure in figures
    ]
    return {
        "array": [_percent(high - value) for _, value, high in ends],
        "arrayminus": [_percent(value - low) for low, value, _ in ends],
        "thickness": 1.5,
    }


def _reliability_chart(bins: Sequence[Content]) -> Chart:
    """Draw accuracy against confidence; on the diagonal the model is right as often as it says."""
    diagonal = {
        "mode": "lines",
        "x": [0, 100],
        "y": [0, 100],
        "line": {"color": PALETTE[-1], "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }
    points = {
        "mode": "lines+markers",
        "x": [_percent(b["confidence"]) for b in bins],
        "y": [_percent(b["accuracy"]) for b in bins],
        "error_y": _error_bars([{**b, "value": b["accuracy"]} for b in bins]),
        "customdata": [[b["images"]] for b in bins],
        "hovertemplate": "says %{x:.0f}%, is right in %{y:.0f}%<br>%{customdata[0]} images<extra></extra>",
        "line": {"color": PALETTE[0], "width": 2},
        "marker": {"color": PALETTE[0], "size": 8},
    }
    layout = {
        "height": 390,
        "xaxis": AXIS | {"title": {"text": "probability of the predicted class"}},
        "yaxis": AXIS | {"title": {"text": "share that is right"}},
    }
    return {"data": [diagonal, points], "layout": layout}
