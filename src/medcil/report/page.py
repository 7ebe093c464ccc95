"""Write the report of runs: one HTML file that needs no network, no server and no other file."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from medcil.errors import InvalidInput
from medcil.metrics.catalogue import METRICS
from medcil.report.charts import (
    Chart,
    accuracy_chart,
    arrivals,
    confusion_chart,
    forgetting_chart,
    loss_chart,
    progress_chart,
)
from medcil.report.markup import PALETTE, data_uri, environment, render_with_charts
from medcil.report.runs import Exemplar, RunRecord, StepRecord, read_run
from medcil.report.tables import (
    COLUMNS,
    are_comparable,
    best_rows,
    commonest_mistake,
    comparison_rows,
    findings,
    hardest_hit,
    percent,
    points,
    progress,
    run_labels,
    shown,
)
from medcil.storage.atomic import write_bytes

PICTURE_BUDGET = 2_000_000  # characters of all pictures together, so that a page can be mailed
MAX_CONFUSIONS = 12
MAX_SIDE = 72  # pixels of a picture

MACHINE_PATHS = ("data.root", "network.weights")  # private: the page may be passed on
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
    environment().filters |= {"percent": percent, "points": points, "tint": _tint}
    return render_with_charts(
        "page.html.j2",
        charts,
        title=_title(runs),
        synthetic=sorted({run.dataset for run in runs if run.is_synthetic}),
        comparison=_comparison(runs, charts) if len(runs) > 1 else None,
        runs=[_section(i, run, label, budget, charts) for i, (run, label) in enumerate(_labelled(runs))],
    )


def _comparison(runs: Sequence[RunRecord], charts: dict[str, Chart]) -> dict[str, Any]:
    charts["compare-balanced"] = accuracy_chart(runs, lambda step: step.balanced, "Balanced accuracy")
    charts["compare-micro"] = accuracy_chart(runs, lambda step: step.micro, "Micro accuracy")
    charts["compare-forgetting"] = forgetting_chart(runs)
    same = are_comparable(runs)
    return {
        "columns": list(COLUMNS),
        "rows": comparison_rows(runs),
        "shares": [{column: run.summary[metric] for column, metric in COLUMNS.items()} for run in runs],
        "best": best_rows(runs),
        "hardest_hit": [hardest_hit(run) for run in runs],
        "findings": findings(runs),
        "are_comparable": same,
        "recalls": _recalls(runs[0], [(label, run.last) for run, label in _labelled(runs)]) if same else [],
        "labels": run_labels(runs),
        "colors": _colors(len(runs)),
    }


def _section(i: int, run: RunRecord, label: str, budget: int, charts: dict[str, Chart]) -> dict[str, Any]:
    confusions = [step for step in run.steps if step.confusion][-MAX_CONFUSIONS:]
    charts[f"run{i}-progress"] = progress_chart(run)
    for step in confusions:
        charts[f"run{i}-confusion{step.step}"] = confusion_chart(step.classes, step.confusion or ())
    if run.epochs:
        charts[f"run{i}-losses"] = loss_chart(run.epochs)
    return {
        "id": f"run{i}",
        "label": label,
        "color": _colors(i + 1)[i],
        "record": run,
        "progress": progress(run),
        "arrivals": [arrivals(step) for step in run.steps],
        "recalls": _recalls(run, [(f"step {step.step}", step) for step in run.steps]),
        "hardest_hit": hardest_hit(run),
        "mistake": commonest_mistake(run),
        "confusions": confusions,
        "shelves": shelves(run, budget) if budget else [],
        "settings": [row for row in _flat(run.config) if row[0] not in MACHINE_PATHS],
        "environment": _flat(run.environment),
        "summary": [(metric.title, shown(run, name)) for name, metric in METRICS.items()],
    }


def _recalls(run: RunRecord, columns: Sequence[Column]) -> dict[str, Any]:
    """Return a row for each class in order of arrival; a cell is None before the class arrives."""
    rows = []
    for c, (name, count) in enumerate(zip(run.class_names, run.inherent_counts, strict=True)):
        cells = [step.recall[c] if c < len(step.recall) else None for _, step in columns]
        rows.append({"name": name, "count": count, "cells": cells, "arrival": _arrival(run, c)})
    return {"columns": [heading for heading, _ in columns], "rows": rows}


def _arrival(run: RunRecord, c: int) -> int | None:
    return next((step.step for step in run.steps if c < len(step.classes)), None)


def _labelled(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str]]:
    return list(zip(runs, run_labels(runs), strict=True))


def _colors(n: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(n)]


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings into dotted names, as `--set` has them."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", "–" if value is None else str(value)))
    return rows


@dataclass(frozen=True)
class Shelf:
    """The pictures of one class, first chosen first; `n_stored` may exceed the number shown."""

    class_name: str
    n_stored: int
    pictures: tuple[str, ...]  # data URIs


def shelves(run: RunRecord, budget: int) -> list[Shelf]:
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
    return [Shelf(name, stored[name], tuple(shown)) for name, shown in pictures.items() if stored[name]]


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
