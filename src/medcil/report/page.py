"""Compare runs, for the terminal and in one HTML file that needs no network, no server and no other file."""

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
from medcil.report.markup import PALETTE, data_uri, environment, percent, points, render_with_charts
from medcil.report.runs import (
    Exemplar,
    RunRecord,
    StepRecord,
    are_comparable,
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
COLUMNS = {
    "Balanced accuracy (average)": "acc_balanced",
    "Balanced accuracy (last)": "last_balanced",
    "Micro accuracy": "acc_micro",
    "Forgetting": "forgetting",
}


def metric_text(run: RunRecord, metric: str) -> str:
    return (points if METRICS[metric].is_lower_better else percent)(run.summary[metric])


def comparison_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return one row per run: its method, then the headline metrics."""
    return [
        {"Method": label} | {column: metric_text(run, metric) for column, metric in COLUMNS.items()}
        for run, label in zip(runs, run_labels(runs), strict=True)
    ]


def best_rows(runs: Sequence[RunRecord]) -> dict[str, set[int]]:
    """Return the rows to print in bold for every column; none where runs cannot be compared."""
    ranked = [i for i, run in enumerate(runs) if run.is_finished and not run.is_upper_bound]
    if len(ranked) < 2 or not are_comparable(runs):
        return {column: set() for column in COLUMNS}
    best: dict[str, set[int]] = {}
    for column, metric in COLUMNS.items():
        values = {i: v for i in ranked if (v := runs[i].summary[metric]) is not None}
        target = (min if METRICS[metric].is_lower_better else max)(values.values(), default=0.0)
        # Equal to the digits shown: bold must not decide what the reader cannot see.
        best[column] = {i for i, value in values.items() if percent(value) == percent(target)}
    return best


def findings(runs: Sequence[RunRecord]) -> list[str]:
    """Name the best runs in sentences."""
    labels, best = run_labels(runs), best_rows(runs)
    sentences = []
    for heading, column in (
        ("Least forgetting", "Forgetting"),
        ("Most accurate over all classes after the last step", "Balanced accuracy (last)"),
    ):
        if rows := sorted(best[column]):
            value = metric_text(runs[rows[0]], COLUMNS[column])
            sentences.append(f"{heading}: {' and '.join(labels[i] for i in rows)}, {value}.")
    return sentences


def hardest_hit(run: RunRecord) -> tuple[str, float, float] | None:
    """Find the class that lost most since its best step: name, best, last; None if no class got worse."""
    losses = []
    for i, name in enumerate(run.last.classes[: run.last.n_old]):
        earlier = [
            r for step in run.steps[:-1] if i < len(step.classes) and (r := step.recall[i]) is not None
        ]
        last = run.last.recall[i]
        if last is not None and earlier and max(earlier) > last:
            losses.append((name, max(earlier), last))
    return max(losses, key=lambda loss: loss[1] - loss[2], default=None)


def commonest_mistake(run: RunRecord) -> tuple[str, str, int, int] | None:
    """Find the largest confused share after the last step: true, predicted, how often, out of how many."""
    names = run.last.classes
    mistakes = [
        (names[true], names[predicted], n, sum(row))
        for true, row in enumerate(run.last.confusion or ())
        for predicted, n in enumerate(row)
        if true != predicted and n
    ]
    return max(mistakes, key=lambda mistake: mistake[2] / mistake[3], default=None)


def write_report(runs: Sequence[Path], page: Path, *, show_exemplars: bool = True) -> Path:
    """Write the page of one run, or of several side by side.

    The same runs give the same text, without dates and paths of this machine.
    """
    if not runs:
        raise InvalidInput("Name at least one run folder to report on.")
    records, charts = [read_run(path) for path in runs], dict[str, Chart]()
    budget = PICTURE_BUDGET // len(runs) if show_exemplars else 0
    subject = records[0].label if len(runs) == 1 else f"{len(runs)} runs"
    environment().filters["tint"] = _tint
    text = render_with_charts(
        "page.html.j2",
        charts,
        title=f"{subject} on {', '.join(sorted({run.dataset for run in records}))}",
        synthetic=sorted({run.dataset for run in records if run.is_synthetic}),
        comparison=_comparison(records, charts) if len(runs) > 1 else None,
        runs=[_section(i, run, label, budget, charts) for i, (run, label) in enumerate(_labelled(records))],
    )
    write_bytes(page, text.encode())
    return page


def _comparison(runs: Sequence[RunRecord], charts: dict[str, Chart]) -> dict[str, Any]:
    for metric, title in STEP_METRICS.items():
        charts[f"compare-{metric}"] = step_chart(
            [(run, label, metric) for run, label in _labelled(runs)], title
        )
    same = are_comparable(runs)
    return {
        "columns": COLUMNS,
        "rows": comparison_rows(runs),
        "best": best_rows(runs),
        "findings": findings(runs),
        "are_comparable": same,
        "recalls": _recalls(runs[0], [(label, run.last) for run, label in _labelled(runs)]) if same else [],
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
        "color": PALETTE[i % len(PALETTE)],
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


def _recalls(run: RunRecord, columns: Sequence[tuple[str, StepRecord]]) -> dict[str, Any]:
    """List the recalls of each step under its heading, by class; a cell is None before the class arrives."""
    rows = []
    for c, (name, count) in enumerate(zip(run.class_names, run.inherent_counts, strict=True)):
        cells = [step.recall[c] if c < len(step.recall) else None for _, step in columns]
        arrival = next((step.step for step in run.steps if c < len(step.classes)), None)
        rows.append({"name": name, "count": count, "cells": cells, "arrival": arrival})
    return {"columns": [heading for heading, _ in columns], "rows": rows}


def _labelled(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str]]:
    return list(zip(runs, run_labels(runs), strict=True))


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
