"""A suite's tables as texts: one model that Markdown, LaTeX and HTML render."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from medcil.experiments.suite import order_and_seed
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import mean_and_deviation
from medcil.report.suite.results import Order, PlacedRun, Results, Seed, Summary, most_complete


@dataclass(frozen=True)
class Difference:
    """The mean of `first - second` over common orders, in points; no interval for a single order."""

    mean: float
    low: float | None
    high: float | None
    orders: tuple[Order, ...]


def paired_difference(first: Summary, second: Summary) -> Difference | None:
    """Compare two rows over the orders they share; None if they share none."""
    orders = tuple(order for order in first.values if order in second.values)
    if not orders:
        return None
    differences = np.array([first.values[order] - second.values[order] for order in orders])
    mean = float(differences.mean())
    if len(orders) == 1:
        return Difference(mean, None, None, orders)
    error = float(differences.std(ddof=1)) / math.sqrt(len(orders))
    half = float(stdtrit(len(orders) - 1, 0.975)) * error  # Student's t
    return Difference(mean, mean - half, mean + half, orders)


def compared_pairs(results: Results, setting: str) -> list[tuple[str, str]]:
    """List pairs of a row and the row it is compared with; a suite that varies a key has none."""
    rows = results.rows(setting)
    if results.suite.compare:
        return [pair for pair in results.suite.compare if pair[0] in rows]
    ranked = [row for row in rows if not results.is_upper_bound(row, setting)]
    if results.suite.vary or not ranked:
        return []
    chosen = ranked[0] if results.is_ranked else ranked[-1]
    return [(chosen, row) for row in rows if row != chosen]


PAPER = "paper"
AVERAGED_FIRST = ", the seeds of each averaged first"
COMMIT = re.compile(r"^([0-9a-f]{9})[0-9a-f]{31}")  # its first digits name it as well


@dataclass(frozen=True)
class Cell:
    """A number as it is printed, with the runs it was computed from; none for one copied from the paper."""

    text: str
    is_best: bool = False
    runs: tuple[PlacedRun, ...] = ()


@dataclass(frozen=True)
class Column:
    name: str
    is_published: bool = False


@dataclass(frozen=True)
class Table:
    heading: str
    """Over the names of the rows."""
    columns: tuple[Column, ...]
    rows: Mapping[str, tuple[Cell, ...]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """All tables of a setting: the results, the differences, and each metric order by order."""

    setting: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    row: str
    reference: str


@dataclass(frozen=True)
class DifferenceRow(Compared):
    differences: Mapping[str, Difference | None]  # by column


def sections(results: Results) -> list[Section]:
    return [
        Section(
            setting,
            (
                setting_table(results, setting),
                *difference_tables(results, setting),
                *order_tables(results, setting),
            ),
            tuple(order_notes(results, setting)),
        )
        for setting in results.settings
    ]


def title_of(results: Results) -> str:
    numbered = results.suite.number
    return f"{results.suite.title} ({numbered} of the paper)" if numbered else results.suite.title


def problems(results: Results) -> list[str]:
    """List what was left out, failed or is not finished."""
    return [
        *results.left_out,
        *(
            f"{row}, {setting}, order {run.name}: {run.state}. {run.why}"
            for row, setting, run in results.not_finished()
        ),
    ]


def setting_table(results: Results, setting: str) -> Table:
    rows = results.rows(setting)
    columns, by_column = [], []
    for name, metric in results.suite.metrics.items():
        columns.append(Column(name))
        by_column.append(_measured(results, rows, setting, metric))
        published = _published(results, rows, setting, name, metric)
        if any(figure.text for figure in published):
            columns.append(Column(name, is_published=True))
            by_column.append(published)
    figures = zip(*by_column, strict=True) if rows else ()
    return Table("Method", tuple(columns), dict(zip(rows, figures, strict=True)))


def difference_rows(results: Results, setting: str) -> list[DifferenceRow]:
    return [
        DifferenceRow(
            row,
            reference,
            {
                name: paired_difference(
                    results.summary(row, setting, metric), results.summary(reference, setting, metric)
                )
                for name, metric in results.suite.metrics.items()
            },
        )
        for row, reference in compared_pairs(results, setting)
    ]


def difference_tables(results: Results, setting: str) -> list[Table]:
    """Return one table, or none if no rows are compared."""
    rows = difference_rows(results, setting)
    if not rows:
        return []
    heading, names = difference_names(rows)
    n = results.n_expected(setting)
    cells = (tuple(Cell(difference_text(each, n)) for each in row.differences.values()) for row in rows)
    columns = tuple(map(Column, results.suite.metrics))
    return [Table(f"{heading} (points)", columns, dict(zip(names, cells, strict=True)), "Differences")]


def difference_names(rows: Sequence[Compared]) -> tuple[str, list[str]]:
    """Return a heading and a name for each line; a row common to all lines moves into the heading."""
    first = {found.row for found in rows}
    if len(first) == 1:
        return f"{rows[0].row} minus", [found.reference for found in rows]
    return "Difference", [f"{found.row} minus {found.reference}" for found in rows]


def _measured(results: Results, rows: Sequence[str], setting: str, metric: str) -> list[Cell]:
    summaries = [results.summary(row, setting, metric) for row in rows]
    methods = [row for row in rows if not results.is_upper_bound(row, setting)]
    ranked = _comparable([results.summary(row, setting, metric) for row in methods])
    best = _best(ranked, metric)
    figures = []
    for row, summary in zip(rows, summaries, strict=True):
        placed = results.placed(row, setting)
        is_best = row in methods and summary in ranked and number(summary.mean) == best
        text = _cell_text(summary, placed, results.n_expected(setting), results.n_runs(setting))
        figures.append(Cell(text, is_best, placed))
    return figures


def _comparable(summaries: Sequence[Summary]) -> list[Summary]:
    """Select the summaries over the most orders: fewer may be the easy ones."""
    orders = most_complete(summaries)
    return [summary for summary in summaries if summary.n and set(summary.values) == orders]


def _published(results: Results, rows: Sequence[str], setting: str, column: str, metric: str) -> list[Cell]:
    printed = [results.suite.published.get(row, {}).get(setting, {}).get(column, ()) for row in rows]
    means = [figures[0] for figures in printed if figures]
    best = number((min if METRICS[metric].is_lower_better else max)(means)) if len(means) > 1 else None
    return [
        Cell("±".join(map(number, figures)), bool(figures) and number(figures[0]) == best)
        for figures in printed
    ]


def _best(summaries: Sequence[Summary], metric: str) -> str | None:
    """Return the best value as printed: bold must not decide what the reader cannot see."""
    if len(summaries) < 2:
        return None
    return number((min if METRICS[metric].is_lower_better else max)(summary.mean for summary in summaries))


def _cell_text(summary: Summary, placed: Sequence[PlacedRun], n_orders: int, n_runs: int) -> str:
    if not summary.n:
        states = {run.state for run in placed}
        return next((state for state in ("failed", "unfinished") if state in states), "–")
    text = number(summary.mean)
    if summary.deviation is not None:
        text += f"±{number(summary.deviation)}"
    lacking = [] if summary.n == n_orders else [f"n = {summary.n}"]
    n_finished = sum(run.counts for run in placed)
    if n_runs != n_orders and n_finished != n_runs:  # an order may be there with some of its seeds
        lacking.append(f"{n_finished} of {n_runs} runs")
    return f"{text} ({', '.join(lacking)})" if lacking else text


def difference_text(difference: Difference | None, n_orders: int) -> str:
    if difference is None:
        return "–"
    text = signed(difference.mean)
    if difference.low is not None and difference.high is not None:
        text += f" [{signed(difference.low)}, {signed(difference.high)}]"
    n = len(difference.orders)
    return text if n == n_orders else f"{text} (n = {n})"


def number(value: float) -> str:
    """Format with one decimal, without the sign of a zero."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", "−")


def signed(value: float) -> str:
    text = number(value)
    return text if text.startswith("−") or text == "0.0" else f"+{text}"


def reading(results: Results) -> list[str]:
    """Explain columns, deviations, bold, changes, commits, and intervals where there are any."""
    sentences = [*legend(results), *explanation(results)]
    if any(difference_rows(results, setting) for setting in results.settings):
        sentences.append(interval_explanation(results))
    return [*sentences, *order_explanation(results)]


def legend(results: Results) -> list[str]:
    """Explain each column."""
    sentences = [
        f"{name} is {metric}: {METRICS[metric].meaning}." for name, metric in results.suite.metrics.items()
    ]
    return [f"{sentence} In percent." if i == 0 else sentence for i, sentence in enumerate(sentences)]


def explanation(results: Results) -> list[str]:
    """Explain ±, bold, upper bounds, the paper's columns, changes and commits."""
    sentences = [
        _over_orders(results),
        "Bold: the best of a column to the digits shown, among rows over the same orders.",
    ]
    bounds = {row: None for row, setting in results.runs if results.is_upper_bound(row, setting)}
    if bounds:
        sentences.append(
            f"Trained on all images so far, an upper bound that is not ranked: {', '.join(bounds)}."
        )
    sentences.append("The formulas are in docs/reference/metrics.md.")
    if results.suite.published:
        sentences.append(f"The columns “{PAPER}” repeat what was published; no run of ours is behind them.")
    if results.changes:
        sentences.append(f"All runs with --set {' --set '.join(results.changes)}.")
    return sentences + _computed_by(results) + _commits(results)


def _computed_by(results: Results) -> list[str]:
    """Say where runs were computed by different machines or versions."""
    different = []
    for what in ("device_kind", "precision", "torch", "medcil"):
        said = [
            record.environment.get(what) or (record.environment.get("packages") or {}).get(what)
            for record in results.finished_records()
        ]
        found = sorted({str(value) for value in said if value is not None})
        if len(found) > 1:
            different.append(f"{what.replace('_', ' ')} {' and '.join(found)}")
    return [f"Runs were computed by different {'; '.join(different)}."] if different else []


def _commits(results: Results) -> list[str]:
    said = [record.environment.get("git_commit") for record in results.finished_records()]
    found = sorted({COMMIT.sub(r"\1", str(commit)) for commit in said if commit is not None})
    if not found:
        return []
    named = f"commit {found[0]}" if len(found) == 1 else f"commits {', '.join(found)}"
    unknown = "" if None not in said else "; of some runs it is not known"
    return [f"The code is that of {named}{unknown}."]


def _over_orders(results: Results) -> str:
    if results.is_ranked:
        return (
            "Mean ± sample standard deviation over a row's class orders; seeds of one order are averaged "
            f"first. Rows over other orders than the first row are below, not ranked.{_over_seeds(results)}"
        )
    of_orders = [setting for setting in results.settings if setting not in results.over_seeds]
    if results.settings and not of_orders:
        return (
            f"Mean ± sample standard deviation; “(n = …)” where runs are not finished.{_over_seeds(results)}"
        )
    counts = sorted({results.n_expected(setting) for setting in of_orders})
    if counts == [1]:
        return "One class order each, so no deviation."
    orders = " or ".join(map(str, counts))
    first, lacking = "", ""
    if averages_seeds(results):
        first, lacking = AVERAGED_FIRST, ", “(… of … runs)” where seeds are lacking"
    return (
        f"Mean ± sample standard deviation over {orders} class orders{first}; “(n = …)” where fewer are "
        f"finished{lacking}.{_over_seeds(results)}"
    )


def averages_seeds(results: Results) -> bool:
    """Whether any setting averages several seeds of a class order."""
    return any(
        len(results.seeds(setting)) > 1 for setting in results.settings if setting not in results.over_seeds
    )


def _over_seeds(results: Results) -> str:
    named = ", ".join(setting for setting in results.settings if setting in results.over_seeds)
    return (
        f" One class order, so over its seeds, which says nothing of other orders: {named}." if named else ""
    )


def interval_explanation(results: Results) -> str:
    pairs = f"the {'first' if results.is_ranked else 'last'} ranked row minus each other"
    if results.suite.compare:
        pairs = "the pairs that the suite names"
    if all(results.n_expected(setting) == 1 for setting in results.settings):
        return f"Differences in points, {pairs}. One class order each, so no interval."
    first = AVERAGED_FIRST if averages_seeds(results) else ""
    return (
        f"Differences in points, {pairs}: mean over the class orders both have{first}, and in brackets its "
        "95% interval (paired t, one degree of freedom less than orders). An interval that holds 0 leaves "
        "open which of the two is better; several intervals are not corrected for being several."
        f"{_over_seeds(results)}"
    )


@dataclass(frozen=True)
class OrderRow(Compared):
    """Differences of one metric, in points."""

    by_order: Mapping[Order, Mapping[Seed, float]]
    """Class order -> seed -> difference, for the runs that both rows have."""
    overall: Difference | None
    """Over all of these."""


@dataclass(frozen=True)
class Noise:
    """The deviation of runs that differ in their seed alone, in points."""

    deviation: float
    n: int
    """Number of rows and orders with several seeds."""


def order_rows(results: Results, setting: str, metric: str) -> list[OrderRow]:
    """Compare rows order by order; empty if no class order has several seeds."""
    rows = []
    for row, reference in compared_pairs(results, setting):
        first, second = (
            {run.name: value for run, value in results.measured(name, setting, metric)}
            for name in (row, reference)
        )
        by_order = {
            order: {
                seed: first[name] - second[name]
                for seed in results.seeds(setting)
                if (name := order_and_seed(order, seed)) in first and name in second
            }
            for order in results.orders(setting)
        }
        rows.append(OrderRow(row, reference, by_order, paired_difference(Summary(first), Summary(second))))
    is_rerun = any(len(seeds) > 1 for found in rows for seeds in found.by_order.values())
    return rows if is_rerun else []


def order_tables(results: Results, setting: str) -> list[Table]:
    """Return a table for each metric, if a class order has several seeds."""
    orders, seeds = results.orders(setting), results.seeds(setting)
    columns = (*(Column(f"Order {order}") for order in orders), Column("All"))
    tables = []
    for name, metric in results.suite.metrics.items():
        rows = order_rows(results, setting, metric)
        if not rows:
            continue
        heading, names = difference_names(rows)
        cells = {
            row_name: (
                *(Cell(_order_text(row.by_order[order], seeds)) for order in orders),
                Cell(difference_text(row.overall, len(orders) * len(seeds))),
            )
            for row_name, row in zip(names, rows, strict=True)
        }
        tables.append(Table(f"{name}: {heading} (points)", columns, cells, "Order by order"))
    return tables


def _order_text(found: Mapping[Seed, float], seeds: list[Seed]) -> str:
    """Format the mean and each seed's difference: `+1.2 (+0.9, +1.5)`."""
    if not found:
        return "–"
    own = ", ".join(signed(found[seed]) if seed in found else "–" for seed in seeds)
    return f"{signed(sum(found.values()) / len(found))} ({own})"


def rerun_noise(results: Results, setting: str, metric: str) -> Noise | None:
    """Pool the variance between seeds over all rows and orders."""
    variances = []
    for row in results.rows(setting):
        by_order: dict[Order, list[float]] = {}
        for run, value in results.measured(row, setting, metric):
            by_order.setdefault(run.order, []).append(value)
        deviations = (mean_and_deviation(values)[1] for values in by_order.values())
        variances += [deviation**2 for deviation in deviations if deviation is not None]
    return Noise(math.sqrt(sum(variances) / len(variances)), len(variances)) if variances else None


def order_notes(results: Results, setting: str) -> list[str]:
    """Explain the parentheses and state the noise between seeds."""
    noises = {name: rerun_noise(results, setting, metric) for name, metric in results.suite.metrics.items()}
    said = [f"{name} {number(noise.deviation)}" for name, noise in noises.items() if noise is not None]
    if not said:
        return []
    noise = (
        "Rerun noise in points, the standard deviation of seeds within a class order (root of the mean "
        f"variance over all rows and orders): {', '.join(said)}."
    )
    seeds = f"In parentheses: seeds {', '.join(map(str, results.seeds(setting)))}."
    return [seeds, noise] if order_tables(results, setting) else [noise]


def order_explanation(results: Results) -> list[str]:
    if not any(order_tables(results, setting) for setting in results.settings):
        return []
    return [
        "Order by order: for each class order the mean difference over the seeds that both rows have, and in "
        "parentheses that of each seed. “All” is the mean over all of these pairs of runs, and in brackets "
        "its 95% interval (paired t, one degree of freedom less than pairs). It covers reruns of these class "
        "orders with other seeds; of other class orders it says nothing."
    ]
