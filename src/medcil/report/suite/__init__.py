"""Draw a suite's tables, figures and page from the files of its runs; the same runs give the same bytes."""

from pathlib import Path

from medcil.errors import InvalidInput
from medcil.report.suite.results import Results, Summary, read_results
from medcil.report.suite.texts import write_csvs, write_latex, write_markdown

__all__ = ["Results", "Summary", "read_results", "write_results", "write_tables"]


def write_results(folder: Path) -> list[Path]:
    """Draw table.md, tables/, figures/ and index.html of a suite's folder."""
    return write_all(read_results(folder))


def write_all(results: Results) -> list[Path]:
    written = write_tables(results)
    try:
        from medcil.report.suite.figures import draw_figures
        from medcil.report.suite.page import write_page
    except ImportError as error:
        raise InvalidInput(
            f"The tables are written; the figures and the page need {error.name}, which is not installed: "
            "run pip install 'medcil[report]', then the same command again."
        ) from None
    figures, files = draw_figures(results)
    return [*written, *files, write_page(results, figures, written)]


def write_tables(results: Results) -> list[Path]:
    """Write table.md, and LaTeX and CSV into tables/; this needs no drawing library."""
    tables, markdown = results.folder / "tables", results.folder / "table.md"
    write_markdown(results, markdown)
    return [markdown, *write_latex(results, tables / f"{results.name}.tex"), *write_csvs(results, tables)]
