"""Differences order by order, where runs with several seeds tell what a mere rerun changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from medcil.experiments.suite import order_and_seed
from medcil.metrics import mean_and_deviation
from medcil.report.cells import Order, Results, Seed, Summary
from medcil.report.intervals import Difference, compared_pairs, paired_difference
from medcil.report.result_tables import Compared, difference_names, difference_text, number, signed


@dataclass(frozen=True)
class OrderRow(Compared):
    """Of one metric, in points."""

    by_order: Mapping[Order, Mapping[Seed, float]]
    """Class order -> seed -> difference, of the runs that both rows have."""
    overall: Difference | None
    """Over all of these."""


@dataclass(frozen=True)
class OrderTable:
    """One metric of a setting, as texts."""

    column: str
    metric: str
    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A name, then a text for each column."""


@dataclass(frozen=True)
class Noise:
    """What runs differ by that differ in nothing but their seed, in points."""

    deviation: float
    n: int
    """Rows and orders with several seeds."""


def order_rows(results: Results, setting: str, metric: str) -> list[OrderRow]:
    """None where no class order has several seeds: then there is nothing to say of reruns."""
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


def order_tables(results: Results, setting: str) -> list[OrderTable]:
    orders, seeds = results.orders(setting), results.seeds(setting)
    tables = []
    for column, metric in results.suite.metrics.items():
        rows = order_rows(results, setting, metric)
        if not rows:
            continue
        heading, names = difference_names(rows)
        lines = tuple(
            (
                name,
                *(_order_text(found.by_order[order], seeds) for order in orders),
                difference_text(found.overall, len(orders) * len(seeds)),
            )
            for name, found in zip(names, rows, strict=True)
        )
        columns = (*(f"Order {order}" for order in orders), "All")
        tables.append(OrderTable(column, metric, f"{column}: {heading}", columns, lines))
    return tables


def _order_text(found: Mapping[Seed, float], seeds: list[Seed]) -> str:
    """`+1.2 (+0.9, +1.5)`: the mean, and every seed's own."""
    if not found:
        return "–"
    own = ", ".join(signed(found[seed]) if seed in found else "–" for seed in seeds)
    return f"{signed(sum(found.values()) / len(found))} ({own})"


def rerun_noise(results: Results, setting: str, metric: str) -> Noise | None:
    """The root of the mean, over all rows and orders, of the variance within an order."""
    variances = []
    for row in results.rows(setting):
        by_order: dict[Order, list[float]] = {}
        for run, value in results.measured(row, setting, metric):
            by_order.setdefault(run.order, []).append(value)
        deviations = (mean_and_deviation(values)[1] for values in by_order.values())
        variances += [deviation**2 for deviation in deviations if deviation is not None]
    return Noise(math.sqrt(sum(variances) / len(variances)), len(variances)) if variances else None


def order_notes(results: Results, setting: str) -> list[str]:
    """Below a setting's tables: whose figures stand in parentheses, and how much chance there is in all."""
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


def order_explanation(results: Results) -> str | None:
    """None where there is no such table."""
    if not any(order_tables(results, setting) for setting in results.settings):
        return None
    return (
        "Order by order: for each class order the mean difference over the seeds that both rows have, and in "
        "parentheses that of each seed. “All” is the mean over all of these pairs of runs, and in brackets "
        "its 95% interval (paired t, one degree of freedom less than pairs). It covers reruns of these class "
        "orders with other seeds; of other class orders it says nothing."
    )
