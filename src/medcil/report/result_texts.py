"""A suite's tables as Markdown, and as CSV for whoever computes on."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from medcil.report.cells import PlacedRun, Results
from medcil.report.intervals import Difference
from medcil.report.order_by_order import (
    order_explanation,
    order_notes,
    order_rows,
    order_tables,
    rerun_noise,
)
from medcil.report.result_tables import (
    PAPER,
    Figure,
    difference_names,
    difference_rows,
    difference_text,
    explanation,
    interval_explanation,
    legend,
    number,
    setting_table,
)
from medcil.report.typeset import in_markdown
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
