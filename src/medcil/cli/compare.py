"""The commands that show runs: a page of some, a leaderboard of any set of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from medcil.cli.data import messages, plain_table, screen
from medcil.errors import InvalidInput

if TYPE_CHECKING:
    from medcil.report.suite.results import Results


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="One run, several to compare, or the folder of a suite's results.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for the page and the figures; default: the (first) run. For a suite: a folder that "
            "receives all its runs in one file, runs.jsonl, with the tables and figures.",
        ),
    ] = None,
    *,
    exemplars: Annotated[
        bool, typer.Option("--exemplars/--no-exemplars", help="Show the stored images on the page.")
    ] = True,
) -> None:
    """Write the page and the figures of finished runs, or a suite's tables and figures, from files alone."""
    from medcil.storage.overwrite_guard import check_output_folder, check_writable, claim_output_folder

    if (runs[0] / "suite.yaml").is_file():
        _report_suite(runs, out)
        return
    folder = out or runs[0]
    is_new = folder not in runs  # the page of a run is part of the run
    check_output_folder(folder, "report") if is_new else check_writable(folder)
    show_table(runs)
    if is_new:
        claim_output_folder(folder, "report")
    _write_report(runs, folder, exemplars=exemplars)


def _report_suite(folders: Sequence[Path], out: Path | None) -> None:
    from medcil.report.runs import write_archive
    from medcil.report.suite import write_results
    from medcil.storage.os_errors import writing

    if len(folders) > 1:
        raise InvalidInput(
            f"Two folders where a suite's results are one: {folders[1]}. Report on each by itself, or rank "
            "their runs with `medcil compare`.",
            code="option.report.invalid",
        )
    target = out or folders[0]
    with writing(target):
        if out is not None:
            write_archive(folders[0], out)
        written = write_results(target)
    screen.print(f"Results: [bold]{escape(str(written[0]))}[/]", soft_wrap=True)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories, or folders that hold some or a runs.jsonl.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the tables, the figures and the page.")
    ] = Path("leaderboard"),
) -> None:
    """Rank runs. Those that differ in class order or seed alone are one row; like is ranked with like."""
    from medcil.report.leaderboard import build_leaderboard
    from medcil.report.suite import write_all
    from medcil.storage.os_errors import writing
    from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder

    check_output_folder(out, "compare")
    results = build_leaderboard(runs, out)
    for setting in results.settings:
        _show(results, setting)
    for sentence in results.left_out:
        messages.print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True)
    claim_output_folder(out, "compare")
    with writing(out):
        *_, page = write_all(results)
    screen.print(f"Leaderboard: [bold]{escape(str(page))}[/]", soft_wrap=True)


def _show(results: "Results", setting: str) -> None:
    from medcil.report.suite.tables import setting_table

    found = setting_table(results, setting)
    table = plain_table(escape(setting), *(escape(column.name) for column in found.columns))
    for row, figures in found.rows.items():
        cells = (f"[bold]{escape(f.text)}[/]" if f.is_best else escape(f.text) for f in figures)
        table.add_row(escape(row), *cells)
    screen.print(table)
    screen.print()


def show_table(runs: Sequence[Path]) -> None:
    from medcil.report.runs import read_run
    from medcil.report.tables import best_rows, comparison_rows, findings

    records = [read_run(path) for path in runs]
    rows, best = comparison_rows(records), best_rows(records)
    table = plain_table(*rows[0])
    for index, row in enumerate(rows):
        cells = ((column, escape(text)) for column, text in row.items())
        table.add_row(
            *(f"[bold]{text}[/]" if index in best.get(column, ()) else text for column, text in cells)
        )
    screen.print(table)
    for sentence in findings(records):
        screen.print(escape(sentence), soft_wrap=True)


def write_report_if_possible(runs: Sequence[Path], folder: Path) -> None:
    """A finished run is a success, also on a machine that cannot draw its page."""
    try:
        _write_report(runs, folder)
    except InvalidInput as error:
        messages.print(escape(str(error)), soft_wrap=True)


def _write_report(runs: Sequence[Path], folder: Path, *, exemplars: bool = True) -> None:
    from medcil.storage.os_errors import writing

    try:
        from medcil.report.page import write_report
        from medcil.report.plots import write_figures
    except ImportError as error:
        raise InvalidInput(
            f"The page and the figures need {error.name}, which is not installed: run "
            "pip install 'medcil[report]', then `medcil report`."
        ) from None
    with writing(folder):
        page = write_report(list(runs), folder / "report.html", show_exemplars=exemplars)
        write_figures(list(runs), folder / "figures")
    screen.print(f"Report: [bold]{escape(str(page))}[/]", soft_wrap=True)
