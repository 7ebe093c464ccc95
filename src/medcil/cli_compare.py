"""The command that ranks runs: a leaderboard of any set of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from medcil.cli_data import messages, plain_table, screen

if TYPE_CHECKING:
    from medcil.report.cells import Results


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the tables, the figures and the page.")
    ] = Path("leaderboard"),
) -> None:
    """Rank runs. Those that differ in class order or seed alone are one row; like is ranked with like."""
    from medcil.report.leaderboard import build_leaderboard
    from medcil.report.results import write_all
    from medcil.runs import refuse_other_page

    refuse_other_page(out / "index.html", "results")
    results = build_leaderboard(runs, out)
    for setting in results.settings:
        _show(results, setting)
    for sentence in results.left_out:
        messages.print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True)
    *_, page = write_all(results)
    screen.print(f"Leaderboard: [bold]{escape(str(page))}[/]", soft_wrap=True)


def _show(results: "Results", setting: str) -> None:
    from medcil.report.result_tables import setting_table

    found = setting_table(results, setting)
    table = plain_table(escape(setting), *(escape(column.name) for column in found.columns))
    for row, figures in found.rows.items():
        cells = (f"[bold]{escape(f.text)}[/]" if f.is_best else escape(f.text) for f in figures)
        table.add_row(escape(row), *cells)
    screen.print(table)
    screen.print()
