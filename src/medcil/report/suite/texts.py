"""Write a suite's tables as Markdown and LaTeX, and its runs and cells as CSV."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from medcil.report.markup import in_latex, in_markdown
from medcil.report.suite.results import PlacedRun, Results
from medcil.report.suite.tables import (
    PAPER,
    Cell,
    Column,
    Table,
    number,
    problems,
    reading,
    sections,
    setting_table,
    title_of,
)
from medcil.storage.atomic import write_bytes, write_csv

UP = "../"
"""From tables/ to the folder from which the paths of runs start."""
DOCUMENT = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage{amsmath}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[a4paper, margin=18mm]{geometry}
\pagestyle{empty}
\begin{document}
\input{FILE}
\end{document}
"""
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""A table that is wider than the page is scaled down."""


def write_markdown(results: Results, file: Path) -> None:
    write_bytes(file, ("\n".join(markdown_lines(results)).rstrip() + "\n").encode())


def markdown_lines(results: Results) -> Iterator[str]:
    yield from (f"# {in_markdown(title_of(results))}", "")
    if results.suite.about:
        yield from (in_markdown(results.suite.about.strip()), "")
    for section in sections(results):
        yield from (f"## {in_markdown(section.setting)}", "")
        for title, tables in groupby(section.tables, lambda table: table.title):
            if title == "Order by order":
                yield from (f"### {title}", "")
            for table in tables:
                yield from _grid(table)
        if section.notes:
            yield from (in_markdown(" ".join(section.notes)), "")
    for heading, sentences in (("How to read it", reading(results)), ("Left out", problems(results))):
        if sentences:
            yield from (f"## {heading}", "", *(f"- {in_markdown(sentence)}" for sentence in sentences), "")
    yield from ("## Every run", "")
    yield from _lines(["Method", "Setting", "Class order", *map(in_markdown, results.suite.metrics)])
    for setting in results.settings:
        for row in results.rows(setting):
            for run in results.placed(row, setting):
                link = f"[{in_markdown(str(run.name))}](<{run.path}>)"
                yield _line([in_markdown(row), in_markdown(setting), link, *_values(results, run)])


def _grid(table: Table) -> Iterator[str]:
    names = (f"{c.name} ({PAPER})" if c.is_published else c.name for c in table.columns)
    yield from _lines([in_markdown(table.heading), *map(in_markdown, names)])
    for row, cells in table.rows.items():
        texts = (f"**{cell.text}**" if cell.is_best else in_markdown(cell.text) for cell in cells)
        yield _line([in_markdown(row), *texts])
    yield ""


def _lines(headings: list[str]) -> list[str]:
    return [_line(headings), "|---|" + "---:|" * (len(headings) - 1)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _values(results: Results, run: PlacedRun) -> list[str]:
    if not run.counts or run.record is None:
        return [run.state for _ in results.suite.metrics]
    values = [run.record.summary[metric] for metric in results.suite.metrics.values()]
    return ["–" if value is None else number(100 * value) for value in values]


def write_latex(results: Results, file: Path) -> list[Path]:
    """Write the tables for \\input, and beside them a document that holds nothing else."""
    alone = file.with_name(f"{file.stem}-standalone.tex")
    write_bytes(file, ("\n".join(_latex_lines(results)) + "\n").encode())
    write_bytes(alone, DOCUMENT.replace("FILE", file.name).encode())
    return [file, alone]


def _latex_lines(results: Results) -> Iterator[str]:
    yield f"% The runs of {' '.join(results.name.split())}, by medcil; needs booktabs and graphicx."
    label = "".join(c if c.isascii() and c.isalnum() else "-" for c in results.name)
    tables = [(section, table) for section in sections(results) for table in section.tables]
    for i, (section, table) in enumerate(tables, start=1):
        caption = ", ".join(filter(None, [title_of(results), section.setting, table.title.lower()]))
        notes = reading(results) if i == 1 else section.notes if table.title == "Order by order" else ()
        yield r"\begin{table*}[tp]"
        yield r"\centering\footnotesize\setlength{\tabcolsep}{3.5pt}"
        yield rf"\caption{{{in_latex(caption)}.}}\label{{tab:{label}-{i}}}"
        yield from (FITTED, *_tabular(table), "}")
        if notes:
            yield rf"\par\smallskip\parbox{{.92\linewidth}}{{\scriptsize {in_latex(' '.join(notes))}}}"
        yield r"\end{table*}"


def _tabular(table: Table) -> Iterator[str]:
    yield rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    yield r"\toprule"
    yield " & ".join([in_latex(table.heading), *map(_latex_name, table.columns)]) + r" \\"
    yield r"\midrule"
    for row, cells in table.rows.items():
        yield " & ".join([in_latex(row), *map(_latex_cell, cells)]) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_name(column: Column) -> str:
    return rf"\emph{{{PAPER}}}" if column.is_published else in_latex(column.name)


def _latex_cell(cell: Cell) -> str:
    text = in_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.is_best else text


def write_csvs(results: Results, folder: Path) -> list[Path]:
    """Write a line for every run and one for every cell, in percent, with more digits than are printed."""
    files = [folder / f"{results.name}{ending}.csv" for ending in ("", "-summary")]
    header = ["row", "setting", "column", "metric", "order", "seed", "percent", "state", "run"]
    write_csv(files[0], header, _runs(results))
    header = ["row", "setting", "column", "metric", "n", "mean", "deviation", "best"]
    write_csv(files[1], [*header, "paper_mean", "paper_deviation"], _cells(results))
    return files


def _runs(results: Results) -> Iterator[list[object]]:
    for setting in results.settings:
        for row in results.rows(setting):
            for run in results.placed(row, setting):
                for column, metric in results.suite.metrics.items():
                    value = run.record.summary[metric] if run.counts and run.record else None
                    percent = "" if value is None else _digits(100 * value)
                    seed = "" if run.seed is None else run.seed
                    yield [row, setting, column, metric, run.order, seed, percent, run.state, UP + run.path]


def _cells(results: Results) -> Iterator[list[object]]:
    for setting in results.settings:
        table = setting_table(results, setting)
        ours = {column.name: i for i, column in enumerate(table.columns) if not column.is_published}
        for row, cells in table.rows.items():
            for column, metric in results.suite.metrics.items():
                summary = results.summary(row, setting, metric)
                printed = results.suite.published.get(row, {}).get(setting, {}).get(column, ())
                mean = _digits(summary.mean) if summary.n else ""
                deviation = "" if summary.n < 2 or summary.deviation is None else _digits(summary.deviation)
                best = "best" if cells[ours[column]].is_best else ""
                paper = [*printed, "", ""][:2]
                yield [row, setting, column, metric, summary.n, mean, deviation, best, *paper]


def _digits(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"
