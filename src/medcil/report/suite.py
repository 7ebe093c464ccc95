"""A suite's tables as one model of rows, which three templates render: Markdown, LaTeX and HTML.

Tables, figures and page are drawn from the files of the runs; the same runs give the same bytes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medcil.errors import needs_extra
from medcil.experiments.suite import order_and_seed
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import mean_and_deviation
from medcil.report.markup import data_uri, number, render_text
from medcil.report.markup import render as render_template
from medcil.report.results import Order, Results, Summary, most_complete, read_results
from medcil.storage.atomic import write_bytes, write_csv

if TYPE_CHECKING:
    from medcil.report.figures import DrawnFigure

PAPER = "paper"
COMMIT = re.compile(r"^([0-9a-f]{9})[0-9a-f]{31}")  # its first digits name it as well


@dataclass(frozen=True)
class Cell:
    """A number as it is printed."""

    text: str
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    """Of the names of the rows, then of the cells."""
    rows: Mapping[str, tuple[Cell, ...]]


def tables_of(results: Results, setting: str) -> list[Table]:
    """Return the results of a setting, the differences, and each metric order by order."""
    differences = [*difference_tables(results, setting), *order_tables(results, setting)]
    return [setting_table(results, setting), *differences]


def problems(results: Results) -> list[str]:
    """List what was left out, failed or is not finished."""
    return [
        *results.left_out,
        *(
            f"{row}, {setting}, order {run.name}: {run.state}. {run.why}"
            for row, setting, run in results.every_run()
            if not run.record
        ),
    ]


def signed(value: float) -> str:
    text = number(value)
    return text if text.startswith("−") or text == "0.0" else f"+{text}"


def setting_table(results: Results, setting: str) -> Table:
    rows = results.rows(setting)
    header, columns = ["Method"], []
    for name, metric in results.suite.metrics.items():
        header.append(name)
        columns.append(_measured(results, rows, setting, metric))
        printed = [results.suite.published.get(row, {}).get(setting, {}).get(name, ()) for row in rows]
        if any(printed):
            header.append(f"{name} ({PAPER})")
            best = _best([figures[0] for figures in printed if figures], metric)
            columns.append(
                [Cell("±".join(map(number, f)), bool(f) and number(f[0]) == best) for f in printed]
            )
    return Table("", tuple(header), dict(zip(rows, zip(*columns, strict=True), strict=True)))


def _measured(results: Results, rows: Sequence[str], setting: str, metric: str) -> list[Cell]:
    summaries = {row: results.summary(row, setting, metric) for row in rows}
    methods = [row for row in rows if summaries[row].n and not results.is_upper_bound(row, setting)]
    orders = most_complete([summaries[row] for row in methods])  # fewer may be the easy ones
    ranked = [row for row in methods if set(summaries[row].values) == orders]
    best = _best([summaries[row].mean for row in ranked], metric)
    return [
        Cell(_cell_text(results, row, setting, summary), row in ranked and number(summary.mean) == best)
        for row, summary in summaries.items()
    ]


def _best(means: Sequence[float], metric: str) -> str | None:
    """Return the best value as printed: bold must not decide what the reader cannot see."""
    if len(means) < 2:
        return None
    return number((min if METRICS[metric].is_lower_better else max)(means))


def _cell_text(results: Results, row: str, setting: str, summary: Summary) -> str:
    placed = results.runs[row, setting]
    if not summary.n:
        states = {run.state for run in placed}
        return next((state for state in ("failed", "unfinished") if state in states), "–")
    text = number(summary.mean)
    if summary.deviation is not None:
        text += f"±{number(summary.deviation)}"
    n_orders, n_runs = results.n_expected(setting), results.n_runs(setting)
    lacking = [] if summary.n == n_orders else [f"n = {summary.n}"]
    n_finished = sum(run.record is not None for run in placed)
    if n_runs != n_orders and n_finished != n_runs:  # an order may be there with some of its seeds
        lacking.append(f"{n_finished} of {n_runs} runs")
    return f"{text} ({', '.join(lacking)})" if lacking else text


def compared_pairs(results: Results, setting: str) -> list[tuple[str, str]]:
    """List pairs of a row and the row it is compared with; a suite that varies a key has none."""
    rows = results.rows(setting)
    if results.suite.compare:
        return [pair for pair in results.suite.compare if pair[0] in rows]
    ranked = [row for row in rows if not results.is_upper_bound(row, setting)]
    if results.suite.vary or not ranked:
        return []
    first = ranked[0 if results.is_ranked else -1]
    return [(first, row) for row in rows if row != first]


def _pair_names(pairs: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
    """Return a heading and a name for each line; a row common to all lines moves into the heading."""
    if len({row for row, _ in pairs}) == 1:
        return f"{pairs[0][0]} minus", [other for _, other in pairs]
    return "Difference", [f"{row} minus {other}" for row, other in pairs]


def difference_tables(results: Results, setting: str) -> list[Table]:
    """Return one table, or none if no rows are compared."""
    pairs, n = compared_pairs(results, setting), results.n_expected(setting)
    if not pairs:
        return []
    heading, names = _pair_names(pairs)
    metrics, rows = results.suite.metrics, {}
    for name, pair in zip(names, pairs, strict=True):
        summaries = ([results.summary(row, setting, key) for row in pair] for key in metrics.values())
        rows[name] = tuple(Cell(difference_text(ours.minus(theirs), n)) for ours, theirs in summaries)
    return [Table("Differences", (f"{heading} (points)", *metrics), rows)]


def difference_text(difference: Summary, n_expected: int) -> str:
    """Format the mean with its interval: `−1.5 [−4.5, +1.5]`, and where it is over fewer, how many."""
    if not difference.n:
        return "–"
    text = signed(difference.mean)
    if difference.interval is not None:
        text += f" [{', '.join(map(signed, difference.interval))}]"
    return text if difference.n == n_expected else f"{text} (n = {difference.n})"


def order_tables(results: Results, setting: str) -> list[Table]:
    """Return a table of differences for each metric, if a class order has several seeds."""
    orders, seeds = results.orders(setting), results.seeds(setting)
    pairs = compared_pairs(results, setting)
    tables = []
    for column, metric in results.suite.metrics.items():
        if not pairs or rerun_noise(results, setting, metric) is None:
            continue
        heading, names = _pair_names(pairs)
        rows = {}
        for name, (row, other) in zip(names, pairs, strict=True):
            runs = results.values(row, setting, metric).minus(results.values(other, setting, metric))
            texts = [
                _seeds_text([runs.values.get(order_and_seed(order, seed)) for seed in seeds])
                for order in orders
            ]
            rows[name] = tuple(map(Cell, [*texts, difference_text(runs, len(orders) * len(seeds))]))
        header = (f"{column}: {heading} (points)", *(f"Order {order}" for order in orders), "All")
        tables.append(Table("Order by order", header, rows))
    return tables


def _seeds_text(values: Sequence[float | None]) -> str:
    """Format the mean and each seed's difference: `+1.2 (+0.9, +1.5)`."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "–"
    own = ", ".join("–" if value is None else signed(value) for value in values)
    return f"{signed(sum(measured) / len(measured))} ({own})"


def rerun_noise(results: Results, setting: str, metric: str) -> float | None:
    """Return the deviation between seeds of a class order: pooled variance over all rows and orders."""
    by_order: dict[tuple[str, Order], list[float]] = {}
    for row, _, run in results.every_run(setting):
        if run.record and (value := run.record.summary[metric]) is not None:
            by_order.setdefault((row, run.order), []).append(100 * value)
    deviations = [mean_and_deviation(values)[1] for values in by_order.values()]
    variances = [deviation**2 for deviation in deviations if deviation is not None]
    return math.sqrt(sum(variances) / len(variances)) if variances else None


def reading(results: Results) -> list[str]:
    """Explain columns, deviations, bold, changes, commits, and intervals where there are any."""
    settings = results.settings
    sentences = render_text(
        "reading.txt.j2",
        results=results,
        metrics=METRICS,
        paper=PAPER,
        over_seeds=", ".join(setting for setting in settings if results.is_over_seeds(setting)),
        has_seeds=any(len(results.orders(name)) > 1 < len(results.seeds(name)) for name in settings),
        n_orders=" or ".join(map(str, sorted({len(results.orders(setting)) for setting in settings}))),
        bounds=dict.fromkeys(row for row, setting in results.runs if results.is_upper_bound(row, setting)),
        computed_with=_computed_with(results),
        is_compared=any(compared_pairs(results, setting) for setting in settings),
        is_order_by_order=any(order_tables(results, setting) for setting in settings),
        rerun_noises=list(_rerun_noises(results)),
    )
    return sentences.strip().split("\n")


def _rerun_noises(results: Results) -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield (setting, seeds, the noise of each metric) where an order has several seeds."""
    for setting in results.settings:
        noises = {name: rerun_noise(results, setting, key) for name, key in results.suite.metrics.items()}
        if listed := [f"{name} {number(noise)}" for name, noise in noises.items() if noise is not None]:
            yield setting, results.seeds(setting), listed


def _computed_with(results: Results) -> list[str]:
    """Name the commit, and the machines and versions where runs differ in them."""
    environments = [record.environment for record in results.finished_records()]
    parts = []
    for key in ("git_commit", "device_kind", "precision", "torch", "medcil"):
        values = [each.get(key) or (each.get("packages") or {}).get(key) for each in environments]
        distinct = sorted({COMMIT.sub(r"\1", str(value or "unknown")) for value in values})
        if len(distinct) > 1 or (key == "git_commit" and any(values)):
            parts.append(f"{key.replace('_', ' ')} {', '.join(distinct)}")
    return parts


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
    for file, template in {
        markdown: "suite.md.j2",
        latex: "suite.tex.j2",
        alone: "standalone.tex.j2",
    }.items():
        write_bytes(file, render_text(template, file=latex.name, **content).encode())
    header = ["row", "setting", "column", "metric", "order", "seed", "percent", "state", "run"]
    write_csv(runs, header, _run_lines(results))
    return [markdown, latex, alone, runs]


def _content(results: Results) -> dict[str, Any]:
    """Return what the templates show."""
    settings = {setting: tables_of(results, setting) for setting in results.settings}
    suite = results.suite
    return {
        "results": results,
        "title": f"{suite.title} ({suite.number} of the paper)" if suite.number else suite.title,
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
        figures=figures,
        picture=lambda svg: data_uri("svg+xml", svg),
        files=[path.relative_to(results.folder).as_posix() for path in tables],
        recipe=None if results.is_ranked else (results.folder / "suite.yaml").read_text(encoding="utf-8"),
        **_content(results),
    )
