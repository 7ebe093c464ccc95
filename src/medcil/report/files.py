"""What `medcil report` and `medcil compare` write, and how such files are known. No drawing library."""

import os
from pathlib import Path

from medcil.errors import InvalidInput
from medcil.report.leaderboard import ABOUT, FIGURES, NAME
from medcil.storage.overwrite_guard import Files, generator, holds
from medcil.storage.run_dir import RunDir

CSVS = ("summary", "differences", "orders", "reruns")
LEADERBOARD = b'<p class="eyebrow">medcil leaderboard</p>'
"""Of its page alone: the page of a suite is of the same generator."""


def report_page(out: Path) -> Path:
    """The file that a name given for the page means."""
    page = out / "report.html" if out.is_dir() else out
    if page.suffix.lower() != ".html":
        raise InvalidInput(f"{page} must end in .html, by which browsers know it: name it {page}.html.")
    return page


def report_files(page: Path) -> Files:
    """The page is written first. Pages in one folder share their figures."""
    mark = generator("report")
    run = RunDir(page.parent)
    if run.config_path.is_file() and run.environment_path.is_file():
        return {page: mark}  # its figures are nobody else's, also where their page is gone
    readable = (path for path in page.parent.glob("*.html") if os.access(path, os.R_OK))
    pages = [page, *(path for path in readable if holds(path, mark))]
    figures = (
        page.parent / "figures" / f"{name}.{suffix}"
        for name in ("accuracy", "forgetting")
        for suffix in ("pdf", "svg", "png")
    )
    return {**dict.fromkeys(pages, mark), **dict.fromkeys(figures)}


def leaderboard_files(folder: Path) -> Files:
    """The tables in Markdown are written first, the page last."""
    tables = folder / "tables"
    endings = (".tex", "-standalone.tex", ".csv", *(f"-{name}.csv" for name in CSVS))
    drawn = (folder / "figures" / f"{spec.file}.{suffix}" for spec in FIGURES for suffix in ("pdf", "svg"))
    return {
        folder / "index.html": LEADERBOARD,
        folder / "table.md": ABOUT.encode(),
        **dict.fromkeys(tables / f"{NAME}{ending}" for ending in endings),
        **dict.fromkeys(drawn),
    }
