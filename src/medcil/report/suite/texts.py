"""A suite's tables as Markdown, and as CSV for whoever computes on."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from medcil.report.markup import in_latex, in_markdown
from medcil.report.suite.results import PlacedRun, Results
from medcil.report.suite.tables import (
    PAPER,
    Difference,
    Figure,
    OrderTable,
    SettingTable,
    difference_names,
    difference_rows,
    difference_text,
    explanation,
    interval_explanation,
    legend,
    number,
    order_explanation,
    order_notes,
    order_rows,
    order_tables,
    rerun_noise,
    setting_table,
)
from medcil.storage.atomic import write_bytes, write_csv

UP = "../"
"""From tables/ to the folder from which the paths of runs start."""


def write_markdown(results: Results, file: Path) -> None:
    write_bytes(file, ("\n".join(_lines(results)).rstrip() + "\n").encode())


def title_of(results: Results) -> str:
    numbered = results.suite.number
    return f"{results.suite.title} ({numbered} of the paper)" if numbered else results.suite.title


def _lines(results: Results) -> Iterator[str]:
    yield from (f"# {in_markdown(title_of(results))}", "")
    if results.suite.about:
        yield from (in_markdown(results.suite.about.strip()), "")
    for setting in results.settings:
        yield from _setting_lines(results, setting)
    yield from ("## How to read it", "")
    sentences = [*legend(results), *explanation(results)]
    if any(difference_rows(results, setting) for setting in results.settings):
        sentences.append(interval_explanation(results))
    if (by_order := order_explanation(results)) is not None:
        sentences.append(by_order)
    yield from (f"- {in_markdown(sentence)}" for sentence in sentences)
    yield ""
    problems = [*results.left_out, *unfinished_sentences(results)]
    if problems:
        yield from ("## Left out", "")
        yield from (f"- {in_markdown(sentence)}" for sentence in problems)
        yield ""
    yield from ("## Every run", "")
    yield from _run_lines(results)


def unfinished_sentences(results: Results) -> list[str]:
    return [
        f"{row}, {setting}, order {run.name}: {run.state}. {run.why}"
        for row, setting, run in results.not_finished()
    ]


def _setting_lines(results: Results, setting: str) -> Iterator[str]:
    table = setting_table(results, setting)
    yield from (f"## {in_markdown(setting)}", "")
    headings = (f"{c.name} ({PAPER})" if c.is_published else c.name for c in table.columns)
    rows = ([in_markdown(row), *map(_bold, figures)] for row, figures in table.rows.items())
    yield from _grid(["Method", *map(in_markdown, headings)], rows)
    differences = difference_rows(results, setting)
    if differences:
        heading, names = difference_names(differences)
        n = results.n_expected(setting)
        texts = ([difference_text(each, n) for each in found.differences.values()] for found in differences)
        lines = ([name, *line] for name, line in zip(names, texts, strict=True))
        header = [f"{heading} (points)", *results.suite.metrics]
        yield from _grid(list(map(in_markdown, header)), (list(map(in_markdown, line)) for line in lines))
    yield from _order_lines(results, setting)


def _order_lines(results: Results, setting: str) -> Iterator[str]:
    tables = order_tables(results, setting)
    if tables:
        yield from ("### Order by order", "")
    for table in tables:
        headings = [in_markdown(f"{table.heading} (points)"), *map(in_markdown, table.columns)]
        yield from _grid(headings, (list(map(in_markdown, row)) for row in table.rows))
    if notes := order_notes(results, setting):
        yield from (in_markdown(" ".join(notes)), "")


def _bold(figure: Figure) -> str:
    return f"**{figure.text}**" if figure.is_best else figure.text


def _run_lines(results: Results) -> Iterator[str]:
    """One line a run, so that every number leads to the folder it comes from."""
    rows = [
        [in_markdown(row), in_markdown(setting), _link(run), *_values(results, run)]
        for setting in results.settings
        for row in results.rows(setting)
        for run in results.placed(row, setting)
    ]
    yield from _grid(["Method", "Setting", "Class order", *map(in_markdown, results.suite.metrics)], rows)


def _link(run: PlacedRun) -> str:
    return f"[{in_markdown(str(run.name))}](<{run.path}>)"


def _values(results: Results, run: PlacedRun) -> list[str]:
    if not run.counts or run.record is None:
        return [run.state for _ in results.suite.metrics]
    values = [run.record.summary[metric] for metric in results.suite.metrics.values()]
    return ["–" if value is None else number(100 * value) for value in values]


def _grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|---|" + "---:|" * (len(headings) - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def write_csvs(results: Results, folder: Path) -> list[Path]:
    """Run by run, cell by cell, and the differences; in percent, with more digits than are printed."""
    files = [folder / f"{results.name}{ending}.csv" for ending in ("", "-summary", "-differences")]
    run = ["order", "seed"] if _has_seeds(results) else ["order"]
    write_csv(
        files[0], ["row", "setting", "column", "metric", *run, "percent", "state", "run"], _long(results)
    )
    cells = ["row", "setting", "column", "metric", "n", "mean", "deviation", "best"]
    write_csv(files[1], [*cells, "paper_mean", "paper_deviation", "runs"], _cells(results))
    header = ["row", "minus", "setting", "column", "metric", "n", "mean", "low", "high"]
    write_csv(files[2], header, _differences(results))
    return files + _write_rerun_csvs(results, folder)


def _write_rerun_csvs(results: Results, folder: Path) -> list[Path]:
    """Only where several seeds of a class order are finished."""
    pair = ["row", "minus", "setting", "column", "metric"]
    tables = {
        "orders": ([*pair, "order", "seed", "n", "mean", "low", "high"], list(_by_order(results))),
        "reruns": (["setting", "column", "metric", "n", "deviation"], list(_noise(results))),
    }
    files = []
    for ending, (header, lines) in tables.items():
        if lines:
            files.append(folder / f"{results.name}-{ending}.csv")
            write_csv(files[-1], header, lines)
    return files


def _has_seeds(results: Results) -> bool:
    return any(run.seed is not None for runs in results.runs.values() for run in runs)


def _long(results: Results) -> Iterator[list[object]]:
    has_seeds = _has_seeds(results)
    for setting in results.settings:
        for row in results.rows(setting):
            for run in results.placed(row, setting):
                for column, metric in results.suite.metrics.items():
                    value = run.record.summary[metric] if run.counts and run.record else None
                    shown = "" if value is None else _digits(100 * value)
                    told_by = [run.order, run.seed] if has_seeds else [run.order]
                    yield [row, setting, column, metric, *told_by, shown, run.state, UP + run.path]


def _cells(results: Results) -> Iterator[list[object]]:
    for setting in results.settings:
        table = setting_table(results, setting)
        ours = {c.name: i for i, c in enumerate(table.columns) if not c.is_published}
        for row, figures in table.rows.items():
            for column, metric in results.suite.metrics.items():
                summary, figure = results.summary(row, setting, metric), figures[ours[column]]
                printed = results.suite.published.get(row, {}).get(setting, {}).get(column, ())
                mean = _digits(summary.mean) if summary.n else ""
                deviation = "" if summary.n < 2 or summary.deviation is None else _digits(summary.deviation)
                best = "best" if figure.is_best else ""
                paper = [*printed, "", ""][:2]
                runs = " ".join(UP + run.path for run in figure.runs)
                yield [row, setting, column, metric, summary.n, mean, deviation, best, *paper, runs]


def _differences(results: Results) -> Iterator[list[object]]:
    for setting in results.settings:
        for found in difference_rows(results, setting):
            for column, each in found.differences.items():
                place = [found.row, found.reference, setting, column, results.suite.metrics[column]]
                if each is not None:
                    yield [*place, *_interval(each)]


def _interval(found: Difference) -> list[object]:
    limits = ["" if limit is None else _digits(limit) for limit in (found.low, found.high)]
    return [len(found.orders), _digits(found.mean), *limits]


def _by_order(results: Results) -> Iterator[list[object]]:
    """Seed by seed, order by order (without a seed), and all of them (without an order)."""
    for setting in results.settings:
        for column, metric in results.suite.metrics.items():
            for found in order_rows(results, setting, metric):
                place = [found.row, found.reference, setting, column, metric]
                for order, seeds in found.by_order.items():
                    for seed, value in seeds.items():
                        yield [*place, order, seed, 1, _digits(value), "", ""]
                    if seeds:
                        mean = sum(seeds.values()) / len(seeds)
                        yield [*place, order, "", len(seeds), _digits(mean), "", ""]
                if found.overall is not None:
                    yield [*place, "", "", *_interval(found.overall)]


def _noise(results: Results) -> Iterator[list[object]]:
    for setting in results.settings:
        for column, metric in results.suite.metrics.items():
            if (noise := rerun_noise(results, setting, metric)) is not None:
                yield [setting, column, metric, noise.n, _digits(noise.deviation)]


def _digits(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"


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
    write_bytes(file, ("\n".join(_latex_lines(results)) + "\n").encode())
    write_bytes(alone, DOCUMENT.replace("FILE", file.name).encode())
    return [file, alone]


def _latex_lines(results: Results) -> Iterator[str]:
    yield f"% Written by medcil from the runs of {_one_line(results.name)}; needs booktabs."
    note = " ".join([*legend(results), *explanation(results)])
    title, label = title_of(results), f"tab:{_label(results.name)}"
    for i, tables in enumerate(_side_by_side(results), start=1):
        caption = f"{title}." if i == 1 else f"{title}, continued."
        yield from _table(caption, f"{label}-{i}", _results(tables), note if i == 1 else "")
    differences = list(_latex_differences(results))
    if differences:
        note = interval_explanation(results)
        yield from _table(f"{title}: differences.", f"{label}-differences", differences, note)
    explained = order_explanation(results) or ""
    by_order = [(setting, found) for setting in results.settings if (found := order_tables(results, setting))]
    for i, (setting, found) in enumerate(by_order, start=1):
        caption = f"{title}: differences order by order, {setting}."
        note = " ".join([explained, *order_notes(results, setting)])
        yield from _table(caption, f"{label}-orders-{i}", _orders(found), note)


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


def _latex_differences(results: Results) -> Iterator[str]:
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
