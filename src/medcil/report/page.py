"""Write the report of runs: one HTML file that needs no network, no server and no other file."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from medcil.errors import InvalidInput
from medcil.metrics.catalogue import METRICS
from medcil.recipe import leaves
from medcil.report.charts import Chart, arrivals, confusion_chart, loss_chart, step_chart
from medcil.report.markup import PALETTE, data_uri, environment, render_with_charts
from medcil.report.runs import (
    COLUMNS,
    Exemplar,
    RunRecord,
    StepRecord,
    are_comparable,
    best_rows,
    commonest_mistake,
    comparison_rows,
    findings,
    hardest_hit,
    metric_text,
    read_run,
    run_labels,
    settings_of,
)
from medcil.storage.atomic import write_bytes

PICTURE_BUDGET = 2_000_000  # characters of all pictures together, so that a page can be mailed
MAX_CONFUSIONS = 12
MAX_SIDE = 72  # pixels of a picture

STEP_METRICS = {
    "balanced": "Balanced accuracy",
    "micro": "Micro accuracy",
    "forgetting": "Forgetting (points)",
}
Column = tuple[str, StepRecord]  # a heading and the step whose recalls are listed under it


def write_report(runs: Sequence[Path], page: Path, *, show_exemplars: bool = True) -> Path:
    """Write the page of one run, or of several side by side."""
    if not runs:
        raise InvalidInput("Name at least one run folder to report on.")
    records = [read_run(path) for path in runs]
    write_bytes(page, render(records, show_exemplars=show_exemplars).encode())
    return page


def render(runs: Sequence[RunRecord], *, show_exemplars: bool) -> str:
    """Render the page; the same runs give the same text, without dates and paths of this machine."""
    charts: dict[str, Chart] = {}
    budget = PICTURE_BUDGET // len(runs) if show_exemplars else 0
    environment().filters["tint"] = _tint
    return render_with_charts(
        "page.html.j2",
        charts,
        title=_title(runs),
        synthetic=sorted({run.dataset for run in runs if run.is_synthetic}),
        comparison=_comparison(runs, charts) if len(runs) > 1 else None,
        runs=[_section(i, run, label, budget, charts) for i, (run, label) in enumerate(_labelled(runs))],
    )


def _comparison(runs: Sequence[RunRecord], charts: dict[str, Chart]) -> dict[str, Any]:
    for metric, title in STEP_METRICS.items():
        charts[f"compare-{metric}"] = step_chart(
            [(run, label, metric) for run, label in _labelled(runs)], title
        )
    same = are_comparable(runs)
    return {
        "columns": COLUMNS,
        "rows": comparison_rows(runs),
        "runs": runs,
        "best": best_rows(runs),
        "hardest_hit": [hardest_hit(run) for run in runs],
        "findings": findings(runs),
        "are_comparable": same,
        "recalls": _recalls(runs[0], [(label, run.last) for run, label in _labelled(runs)]) if same else [],
        "labels": run_labels(runs),
        "colors": [_color(i) for i in range(len(runs))],
    }


def _section(i: int, run: RunRecord, label: str, budget: int, charts: dict[str, Chart]) -> dict[str, Any]:
    confusions = [step for step in run.steps if step.confusion][-MAX_CONFUSIONS:]
    lines = [(run, title.removesuffix(" (points)"), metric) for metric, title in STEP_METRICS.items()]
    charts[f"run{i}-progress"] = step_chart(lines, "percent; points")
    for step in confusions:
        charts[f"run{i}-confusion{step.step}"] = confusion_chart(step.classes, step.confusion or ())
    if run.epochs:
        charts[f"run{i}-losses"] = loss_chart(run.epochs)
    return {
        "id": f"run{i}",
        "label": label,
        "color": _color(i),
        "record": run,
        "arrivals": [arrivals(step) for step in run.steps],
        "recalls": _recalls(run, [(f"step {step.step}", step) for step in run.steps]),
        "hardest_hit": hardest_hit(run),
        "mistake": commonest_mistake(run),
        "confusions": confusions,
        "shelves": _shelves(run, budget) if budget else [],
        "settings": list(settings_of(run).items()),
        "environment": list(leaves(run.environment)),
        "summary": [(metric.title, metric_text(run, name)) for name, metric in METRICS.items()],
    }


def _recalls(run: RunRecord, columns: Sequence[Column]) -> dict[str, Any]:
    """Return a row for each class in order of arrival; a cell is None before the class arrives."""
    rows = []
    for c, (name, count) in enumerate(zip(run.class_names, run.inherent_counts, strict=True)):
        cells = [step.recall[c] if c < len(step.recall) else None for _, step in columns]
        arrival = next((step.step for step in run.steps if c < len(step.classes)), None)
        rows.append({"name": name, "count": count, "cells": cells, "arrival": arrival})
    return {"columns": [heading for heading, _ in columns], "rows": rows}


def _labelled(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str]]:
    return list(zip(runs, run_labels(runs), strict=True))


def _color(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _title(runs: Sequence[RunRecord]) -> str:
    data = ", ".join(sorted({run.dataset for run in runs}))
    return f"{runs[0].label} on {data}" if len(runs) == 1 else f"{len(runs)} runs on {data}"


def _tint(share: float | None) -> str:
    """Color a share: orange for 0, gray for half, blue for 1; safe for color-blind readers."""
    if share is None:
        return "transparent"
    low, middle, high = (236, 142, 84), (241, 240, 236), (118, 174, 222)
    start, end, way = (low, middle, 2 * share) if share < 0.5 else (middle, high, 2 * share - 1)
    return "rgb({}, {}, {})".format(*(round(a + (b - a) * way) for a, b in zip(start, end, strict=True)))


def _shelves(run: RunRecord, budget: int) -> list[dict[str, Any]]:
    """Select pictures until `budget` characters are spent: the first of every class, then the second."""
    pictures: dict[str, list[str]] = {name: [] for name in run.class_names}
    ordered = sorted(run.exemplars, key=lambda exemplar: exemplar.rank)
    spent = 0
    for exemplar in ordered:
        picture = _picture(exemplar)
        if picture is None:
            continue
        spent += len(picture)
        if spent > budget:
            break
        pictures.setdefault(exemplar.class_name, []).append(picture)
    stored = Counter(exemplar.class_name for exemplar in ordered)
    return [
        {"class_name": name, "n_stored": stored[name], "pictures": shown}
        for name, shown in pictures.items()
        if stored[name]
    ]


def _picture(exemplar: Exemplar) -> str | None:
    """Encode the picture again, which drops the file's metadata; None for a file that cannot be shown."""
    buffer = io.BytesIO()
    try:
        with Image.open(exemplar.path) as image:
            picture = image.convert("L" if image.mode in ("L", "1") else "RGB")
        kind = "webp" if max(picture.size) > MAX_SIDE else "png"
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        picture.save(buffer, kind, quality=80)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return data_uri(kind, buffer.getvalue())
