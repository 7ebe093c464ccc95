"""Draw a suite's tables, figures and page from the files of its runs; the same runs give the same bytes.

One model of rows (`tables.py`) is rendered by three templates: Markdown, LaTeX and HTML.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from medcil.errors import needs_extra
from medcil.report.markup import asset, data_uri, render_text
from medcil.report.markup import render as render_template
from medcil.report.results import PlacedRun, Results, Summary, read_results
from medcil.report.runs import ARCHIVE
from medcil.report.tables import problems, reading, tables_of, title_of
from medcil.storage.atomic import write_bytes, write_csv

if TYPE_CHECKING:
    from medcil.report.figures import DrawnFigure

__all__ = ["Results", "Summary", "read_results", "write_results", "write_tables"]


def write_results(folder: Path) -> list[Path]:
    """Draw table.md, tables/, figures/ and index.html of a suite's folder."""
    return write_all(read_results(folder))


def write_all(results: Results) -> list[Path]:
    written = write_tables(results)
    with needs_extra("report"):
        from medcil.report.figures import draw_figures
    figures, files = draw_figures(results)
    page = results.folder / "index.html"
    write_bytes(page, render_page(results, figures, written).encode())
    return [*written, *files, page]


def write_tables(results: Results) -> list[Path]:
    """Write table.md, and LaTeX and CSV into tables/; this needs no drawing library."""
    markdown, tables = results.folder / "table.md", results.folder / "tables"
    latex, alone = tables / f"{results.name}.tex", tables / f"{results.name}-standalone.tex"
    runs = tables / f"{results.name}.csv"
    content = _content(results)
    for file, template in (
        (markdown, "suite.md.j2"),
        (latex, "suite.tex.j2"),
        (alone, "standalone.tex.j2"),
    ):
        write_bytes(file, render_text(template, file=latex.name, **content).encode())
    header = ["row", "setting", "column", "metric", "order", "seed", "percent", "state", "run"]
    write_csv(runs, header, _run_lines(results))
    return [markdown, latex, alone, runs]


def _content(results: Results) -> dict[str, Any]:
    """Return what the templates show."""
    settings = tables_of(results)
    return {
        "results": results,
        "title": title_of(results),
        "settings": settings,
        "tables": [(setting, table) for setting, tables in settings.items() for table in tables],
        "label": re.sub("[^A-Za-z0-9]", "-", results.name),
        "reading": reading(results),
        "problems": problems(results),
    }


def _run_lines(results: Results) -> Iterator[list[object]]:
    """List every run and metric, in percent, with more digits than are printed."""
    for row, setting, run in results.every_run():
        for column, metric in results.suite.metrics.items():
            value = run.record.summary[metric] if run.record else None
            percent = "" if value is None else f"{100 * value:.4f}"
            seed = "" if run.seed is None else run.seed
            path = f"../{run.path}"  # from tables/
            yield [row, setting, column, metric, run.order, seed, percent, run.state, path]


def render_page(results: Results, figures: Sequence["DrawnFigure"], tables: Sequence[Path]) -> str:
    """Render one HTML file without scripts, with links to its runs."""
    return render_template(
        "suite_page.html.j2",
        synthetic=sorted({record.dataset for record in results.finished_records() if record.is_synthetic}),
        run_href=_run_href,
        figures=figures,
        picture=lambda svg: data_uri("svg+xml", svg),
        files=[(path.name, _href(str(path.relative_to(results.folder)))) for path in tables],
        recipe=None if results.is_ranked else (results.folder / "suite.yaml").read_text(encoding="utf-8"),
        style=Markup(asset("page.css") + asset("suite_page.css")),
        **_content(results),
    )


def _run_href(run: PlacedRun) -> str:
    """Link to the run's folder, or to its line of runs.jsonl."""
    file, is_archived, line = run.path.rpartition(f"{ARCHIVE}#")
    return f"{_href(file)}{ARCHIVE}#{line}" if is_archived else f"{_href(run.path)}/"


def _href(path: str) -> str:
    return quote(path, safe="/.")
