"""A suite's tables in LaTeX, to be read in with \\input, and a document that holds nothing else."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from medcil.report.cells import Results
from medcil.report.order_by_order import OrderTable, order_explanation, order_notes, order_tables
from medcil.report.result_tables import (
    PAPER,
    Figure,
    SettingTable,
    difference_names,
    difference_rows,
    difference_text,
    explanation,
    interval_explanation,
    legend,
    setting_table,
)
from medcil.report.result_texts import title_of
from medcil.report.typeset import in_latex
from medcil.storage.atomic import write_bytes

# In points, at the size of the tables: what fits across both columns of a page, a character, a gap.
LINE, CHARACTER, GAP = 475, 4.4, 7
DOCUMENT = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage{amsmath}
\usepackage{booktabs}
\usepackage[a4paper, margin=18mm]{geometry}
\pagestyle{empty}
\begin{document}
\input{FILE}
\end{document}
"""


def write_latex(results: Results, file: Path) -> list[Path]:
    """Beside the table the document `…-standalone.tex`."""
    alone = file.with_name(f"{file.stem}-standalone.tex")
    write_bytes(file, ("\n".join(_lines(results)) + "\n").encode())
    write_bytes(alone, DOCUMENT.replace("FILE", file.name).encode())
    return [file, alone]


def _lines(results: Results) -> Iterator[str]:
    yield f"% Written by medcil from the runs of {_one_line(results.name)}; needs booktabs."
    note = " ".join([*legend(results), *explanation(results)])
    title, label = title_of(results), f"tab:{_label(results.name)}"
    for number, tables in enumerate(_side_by_side(results), start=1):
        caption = f"{title}." if number == 1 else f"{title}, continued."
        yield from _table(caption, f"{label}-{number}", _results(tables), note if number == 1 else "")
    differences = list(_differences(results))
    if differences:
        note = interval_explanation(results)
        yield from _table(f"{title}: differences.", f"{label}-differences", differences, note)
    explained = order_explanation(results) or ""
    by_order = [(setting, found) for setting in results.settings if (found := order_tables(results, setting))]
    for number, (setting, found) in enumerate(by_order, start=1):
        caption = f"{title}: differences order by order, {setting}."
        note = " ".join([explained, *order_notes(results, setting)])
        yield from _table(caption, f"{label}-orders-{number}", _orders(found), note)


def _side_by_side(results: Results) -> list[list[SettingTable]]:
    """As many settings beside each other as fit, where the rows are the same."""
    groups: list[list[SettingTable]] = []
    for setting in results.settings:
        table = setting_table(results, setting)
        if groups and list(groups[-1][0].rows) == list(table.rows) and _width([*groups[-1], table]) <= LINE:
            groups[-1].append(table)
        else:
            groups.append([table])
    return groups


def _width(tables: Sequence[SettingTable]) -> float:
    columns = [list(tables[0].rows)]
    for table in tables:
        for i, column in enumerate(table.columns):
            columns.append(
                [
                    PAPER if column.is_published else column.name,
                    *(figures[i].text for figures in table.rows.values()),
                ]
            )
    return sum(CHARACTER * max(map(len, column), default=0) + GAP for column in columns)


def _table(caption: str, label: str, tabular: Iterable[str], note: str) -> Iterator[str]:
    yield r"\begin{table*}[tp]"
    yield r"\centering\footnotesize\setlength{\tabcolsep}{3.5pt}"
    yield rf"\caption{{{in_latex(caption)}}}\label{{{label}}}"
    yield from tabular
    yield rf"\par\smallskip\parbox{{.92\linewidth}}{{\scriptsize {in_latex(note)}}}"
    yield r"\end{table*}"


def _results(tables: Sequence[SettingTable]) -> list[str]:
    columns = [column for table in tables for column in table.columns]
    rules, spans, start = "", [], 2
    for table in tables:
        end = start + len(table.columns) - 1
        spans.append(rf"\multicolumn{{{len(table.columns)}}}{{c}}{{{in_latex(table.setting)}}}")
        rules += rf"\cmidrule(lr){{{start}-{end}}}"
        start = end + 1
    names = (rf"\emph{{{PAPER}}}" if column.is_published else in_latex(column.name) for column in columns)
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["", *spans]) + r" \\ " + rules,
        " & ".join(["Method", *names]) + r" \\",
        r"\midrule",
    ]
    for row in tables[0].rows:
        figures = (figure for table in tables for figure in table.rows[row])
        lines.append(" & ".join([in_latex(row), *map(_figure, figures)]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _figure(figure: Figure) -> str:
    text = in_latex(figure.text)
    return rf"\textbf{{{text}}}" if figure.is_best else text


def _differences(results: Results) -> Iterator[str]:
    parts = [(setting, rows) for setting in results.settings if (rows := difference_rows(results, setting))]
    if not parts:
        return
    names = [in_latex(name) for name in results.suite.metrics]
    yield rf"\begin{{tabular}}{{ll{'r' * len(names)}}}"
    yield r"\toprule"
    heading, pairs = difference_names([found for _, rows in parts for found in rows])
    yield " & ".join(["Setting", in_latex(heading), *names]) + r" \\"
    lines = iter(pairs)
    for setting, rows in parts:
        yield r"\midrule"
        for found in rows:
            texts = (
                difference_text(each, results.n_expected(setting)) for each in found.differences.values()
            )
            yield " & ".join(map(in_latex, [setting, next(lines), *texts])) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _orders(tables: Sequence[OrderTable]) -> Iterator[str]:
    """One metric below the other."""
    yield rf"\begin{{tabular}}{{l{'r' * len(tables[0].columns)}}}"
    yield r"\toprule"
    for i, table in enumerate(tables):
        if i:
            yield r"\midrule"
        yield " & ".join(map(in_latex, [table.heading, *table.columns])) + r" \\"
        yield r"\midrule"
        for row in table.rows:
            yield " & ".join(map(in_latex, row)) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _label(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)
