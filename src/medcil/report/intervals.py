"""Differences between rows over the class orders they share, with an interval."""

import math
from dataclasses import dataclass

import numpy as np

from medcil.report.cells import Order, Results, Summary

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of `first - second` over common orders, in points; no interval for a single order."""

    mean: float
    low: float | None
    high: float | None
    orders: tuple[Order, ...]


def paired_difference(first: Summary, second: Summary) -> Difference | None:
    """None where the rows share no order."""
    orders = tuple(order for order in first.values if order in second.values)
    if not orders:
        return None
    differences = np.array([first.values[order] - second.values[order] for order in orders])
    mean = float(differences.mean())
    if len(orders) == 1:
        return Difference(mean, None, None, orders)
    error = float(differences.std(ddof=1)) / math.sqrt(len(orders))
    half = t_quantile(CONFIDENCE, len(orders) - 1) * error
    return Difference(mean, mean - half, mean + half, orders)


def compared_pairs(results: Results, setting: str) -> list[tuple[str, str]]:
    """(row, the row it is compared with); a study of one method's settings compares none."""
    rows = results.rows(setting)
    if results.suite.compare:
        return [pair for pair in results.suite.compare if pair[0] in rows]
    ranked = [row for row in rows if not results.is_upper_bound(row, setting)]
    if results.suite.vary or not ranked:
        return []
    chosen = ranked[0] if results.is_ranked else ranked[-1]
    return [(chosen, row) for row in rows if row != chosen]


def t_quantile(confidence: float, freedom: int) -> float:
    """The t for which Student's distribution has this share between -t and t."""
    low, high = 0.0, 1.0
    while share_within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):  # halves of an interval: down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, freedom) < confidence else (low, middle)
    return high


def share_within(t: float, freedom: int) -> float:
    """P(|T| <= t) as the finite sum it is for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if is_odd else 1)
    total = 0.0
    for k in range(1, freedom // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k / (2 * k + 1) if is_odd else (2 * k - 1) / (2 * k))
    return 2 / math.pi * (angle + total) if is_odd else total
