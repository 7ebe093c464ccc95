"""Show an evaluation from its JSON: rows for the terminal, tables in Markdown, and one HTML page."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medcil.report.charts import Chart, confusion_chart, plotly_text
from medcil.report.markup import PALETTE, plain_markdown, render_with_charts
from medcil.storage.atomic import write_bytes

NOTICE = "Research use; not a medical device."
TITLE = "# Evaluation of "
"""First words of the tables in Markdown."""
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
IN_SUBGROUPS = ("balanced_accuracy", "accuracy", "auroc", "ece")

Content = Mapping[str, Any]
Rows = list[list[str]]


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


def overall_rows(content: Content) -> Rows:
    """Return a row for each metric, with a column by image and, if present, by patient."""
    sections = [section for section in (content["by_image"], content["by_patient"]) if section]
    return [
        [title, *(with_interval(name, section[name]) for section in sections)]
        for name, title in OVERALL.items()
        if name in sections[0]
    ]


def overall_header(content: Content) -> list[str]:
    by_image, by_patient = content["by_image"], content["by_patient"]
    header = ["", f"by image ({by_image['n']:,})"]
    return [*header, f"by patient ({by_patient['n']:,})"] if by_patient else header


def class_rows(section: Content) -> Rows:
    return [
        [c["name"], f"{c['n']:,}", *(with_interval(key, c[key]) for key in PER_CLASS)]
        for c in section["classes"]
    ]


def class_header(unit: str) -> list[str]:
    return ["Class", unit, *PER_CLASS.values()]


def subgroup_rows(groups: Content) -> Rows:
    return [
        [value, f"{section['n']:,}", *(with_interval(name, section[name]) for name in IN_SUBGROUPS)]
        for value, section in groups.items()
    ]


def subgroup_header(column: str) -> list[str]:
    return [column, "Images", *(OVERALL[name] for name in IN_SUBGROUPS)]


def confusion_rows(content: Content) -> Rows:
    names = content["classes"]
    rows = zip(names, content["by_image"]["confusion"], strict=True)
    return [[name, *(f"{n:,}" for n in row)] for name, row in rows]


def unlike_sentences(content: Content) -> list[str]:
    """Say how often the flag `unlike anything known` was raised."""
    unlike = content["unlike"]
    stated = unlike["stated_false_alarms"]
    if stated is None:
        return ["Whether an image is unlike anything known was never measured for this model."]
    parts = (
        (
            "known_classes",
            f"classes it knows are falsely called unlike anything known (stated: up to {stated:.3g} of any)",
        ),
        ("other_classes", "classes it does not know are called unlike anything known"),
    )
    return [
        f"{found['flagged']:,} of {found['n']:,} images of {said}: {found['value']:.1%} "
        f"({found['low']:.1%} to {found['high']:.1%})."
        for key, said in parts
        if (found := unlike[key]) is not None
    ]


def interval_sentence(content: Content) -> str:
    intervals = content["intervals"]
    return (
        f"95% intervals: {intervals['draws']:,} bootstrap draws of {intervals['unit']}; of shares the wider "
        f"of that and Wilson's. Prior: {content['prior']['name']}."
    )


def title_of(content: Content) -> str:
    return f"{content['version']} on {content['data']}"


def write_markdown(content: Content, path: Path) -> None:
    parts = [
        f"{TITLE}{plain_markdown(title_of(content))}",
        f"{interval_sentence(content)} {NOTICE}",
        *(f"- {plain_markdown(note)}" for note in content["notes"]),
        "## Overall",
        table(overall_header(content), overall_rows(content)),
        "## Classes, by image",
        table(class_header("Images"), class_rows(content["by_image"])),
    ]
    if content["by_patient"]:
        parts += ["## Classes, by patient"]
        parts += [table(class_header("Patients"), class_rows(content["by_patient"]))]
    parts += ["## Confusion (rows true, columns predicted)"]
    parts += [table(["", *content["classes"]], confusion_rows(content))]
    for column, groups in content["by_subgroup"].items():
        parts += [f"## By {plain_markdown(column)}", table(subgroup_header(column), subgroup_rows(groups))]
    parts += ["## Unlike anything known", *(f"- {line}" for line in unlike_sentences(content))]
    write_bytes(path, ("\n\n".join(parts) + "\n").encode())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(plain_markdown(cell) for cell in line)} |" for line in lines)


HEADLINES = ("balanced_accuracy", "accuracy", "auroc", "ece")
ROW_HEIGHT = 34  # of a chart with a row for each class or subgroup


def write_page(content: Content, path: Path) -> None:
    write_bytes(path, render(content).encode())


def render(content: Content) -> str:
    """Render the page; the same evaluation gives the same text."""
    return render_with_charts(
        "evaluation_page.html.j2",
        _charts(content),
        content=content,
        title=title_of(content),
        words=sys.modules[__name__],
        headlines=[(OVERALL[name], name, content["by_image"][name]) for name in HEADLINES],
        subgroups=[(column, f"subgroup{i}") for i, column in enumerate(content["by_subgroup"])],
    )


def _charts(content: Content) -> dict[str, Chart]:
    by_image = content["by_image"]
    charts = {
        "confusion": confusion_chart(content["classes"], by_image["confusion"]),
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


def _ranges_chart(series: Mapping[str, Sequence[tuple[str, Content]]]) -> Chart:
    """Draw a dot with its interval for each name; several metrics of a name are drawn side by side."""
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
            "ticktext": [plotly_text(name if len(name) <= 24 else name[:23] + "…") for name in names],
            "range": [len(names) - 0.5, -0.5],
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
        },
    }
    return {"data": traces, "layout": layout}


def _ranges(i: int, n: int, title: str, figures: Sequence[tuple[str, Content]]) -> dict[str, Any]:
    """Draw the i-th of n metrics in every row, shifted a little from the others."""
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
        "customdata": [[plotly_text(name), with_interval("accuracy", f)] for _, name, f in known],
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{title} %{{customdata[1]}}<extra></extra>",
    }


def _reliability_chart(bins: Sequence[Content]) -> Chart:
    """Draw accuracy against confidence; on the diagonal the model is right as often as it says."""
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
