"""Write the page of a suite or a leaderboard: one HTML file without scripts, with links to its runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from markupsafe import Markup

from medcil.recipe import leaves, override
from medcil.report.markup import asset, data_uri
from medcil.report.markup import render as render_template
from medcil.report.runs import ARCHIVE, MACHINE_KEYS, RunRecord
from medcil.report.suite.figures import DrawnFigure
from medcil.report.suite.results import PlacedRun, Results
from medcil.report.suite.tables import PAPER, problems, reading, sections, title_of
from medcil.storage.atomic import write_bytes


def write_page(results: Results, figures: Sequence[DrawnFigure], tables: Sequence[Path]) -> Path:
    page = results.folder / "index.html"
    write_bytes(page, render(results, figures, tables).encode())
    return page


def render(results: Results, figures: Sequence[DrawnFigure], tables: Sequence[Path]) -> str:
    synthetic = {record.dataset for record in results.finished_records() if record.is_synthetic}
    return render_template(
        "suite_page.html.j2",
        title=title_of(results),
        about=results.suite.about,
        is_ranked=results.is_ranked,
        synthetic=sorted(synthetic),
        sections=sections(results),
        runs={setting: _runs(results, setting) for setting in results.settings},
        links=_links,
        paper=PAPER,
        reading=reading(results),
        figures=figures,
        picture=lambda svg: data_uri("svg+xml", svg),
        files=[(path.name, _href(str(path.relative_to(results.folder)))) for path in tables],
        problems=problems(results),
        recipes=_recipes(results),
        changes=results.changes,
        style=Markup(asset("page.css") + asset("suite_page.css")),
    )


def _runs(results: Results, setting: str) -> list[tuple[str, str, str, str, str | None]]:
    return [
        (row, str(run.name), run.state, _run_href(run), _report(results, run))
        for row in results.rows(setting)
        for run in results.placed(row, setting)
    ]


def _links(runs: Sequence[PlacedRun]) -> list[tuple[str, str]]:
    """Link a number to each run behind it."""
    return [(str(run.name), _run_href(run)) for run in runs if run.counts]


def _report(results: Results, run: PlacedRun) -> str | None:
    path = f"{run.path}/report.html"
    return _href(path) if (results.folder / path).is_file() else None


def _run_href(run: PlacedRun) -> str:
    """Link to the run's folder, or to its line of runs.jsonl."""
    file, is_archived, line = run.path.rpartition(f"{ARCHIVE}#")
    return f"{_href(file)}{ARCHIVE}#{line}" if is_archived else f"{_href(run.path)}/"


def _href(path: str) -> str:
    return quote(path, safe="/.")


def _recipes(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """List the settings of all runs, then those that settings and rows add; on a leaderboard, of each row."""
    suite = results.suite
    if results.is_ranked:
        return [(row, _pairs(record)) for row, record in _one_run_each(results)]
    replaced = tuple(change.partition("=")[0].strip() for change in results.changes)
    added = [(f"Setting {name}", piece) for name, piece in suite.settings.items()]
    added += [(f"Row {name}", piece) for name, piece in suite.rows.items()]
    added += [("Varied", {**suite.vary, "seed": suite.seeds} if suite.seeds else suite.vary)]
    common = override(suite.common, [*_weights(results), *results.changes])
    parts = [("All runs", list(leaves(common)))]
    parts += [  # --set overrides all of them
        (title, [(key, value) for key, value in leaves(piece) if not _is_within(key, replaced)])
        for title, piece in added
    ]
    return [(title, [(key, _written(value)) for key, value in said]) for title, said in parts if said]


def _weights(results: Results) -> list[str]:
    """Name the weights file that all runs began with, as a change: the suite does not name it."""
    configs = (record.config for record in results.finished_records())
    files = {str((config.get("network") or {}).get("weights") or "") for config in configs}
    return [f"network.weights={json.dumps(Path(file).name)}" for file in files if file and len(files) == 1]


def _is_within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _one_run_each(results: Results) -> list[tuple[str, RunRecord]]:
    records = ((f"{row}, {setting}", results.records(row, setting)) for row, setting in results.runs)
    return [(title, next(iter(found.values()))) for title, found in records if found]


def _pairs(record: RunRecord) -> list[tuple[str, str]]:
    return [
        (key, _written(value)) for key, value in leaves(record.config) if not key.startswith(MACHINE_KEYS)
    ]


def _written(value: Any) -> str:
    """Write a value as in a recipe."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()
