"""Rows as numbered points in the plane of two metrics: what the one costs of the other."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from medcil.experiments.suite import FigureSpec
from medcil.report.canvas import LEGEND_LINE, SMALL, Look, looks, panels
from medcil.report.cells import (
    NotDrawn,
    Order,
    Results,
    Summary,
    figure_rows,
    figure_settings,
    most_complete,
)
from medcil.report.label_places import label_places
from medcil.report.suite_curves import metric_label
from medcil.report.typeset import in_figure

BOUND = "*"  # no row has this marker elsewhere
BOUND_SAID = "upper bound, not ranked"
INK = "#111827"
GRAY = "#6B7280"
COLUMN = 1.7  # inches of the legend
WRAPPED = 23  # characters of a name that fit there


@dataclass(frozen=True)
class Plane:
    """One panel: the means of its rows, all over the same class orders."""

    points: Mapping[str, tuple[float, float]]
    orders: tuple[Order, ...]
    left_out: tuple[str, ...]
    """Rows without runs of some of these orders: another mean would differ for the orders' sake."""


def plane(results: Results, spec: FigureSpec, setting: str) -> Plane:
    values = {}
    for row in figure_rows(results, spec, setting):
        x, y = (results.summary(row, setting, metric).values for metric in _metrics(results, spec))
        if both := {order: (x[order], y[order]) for order in x if order in y}:
            values[row] = both
    methods = [row for row in values if not results.is_upper_bound(row, setting)] or list(values)
    shared = most_complete([Summary(dict.fromkeys(values[row], 0.0)) for row in methods])
    drawn = [row for row in values if shared <= set(values[row])]
    orders = [order for order in values[drawn[0]] if order in shared] if drawn else []
    return Plane(
        {row: tuple(np.mean([values[row][order] for order in orders], axis=0).tolist()) for row in drawn},
        tuple(orders),
        tuple(row for row in values if row not in drawn),
    )


def draw_tradeoff(results: Results, spec: FigureSpec) -> Figure:
    planes = {setting: plane(results, spec, setting) for setting in figure_settings(results, spec)}
    planes = {setting: found for setting, found in planes.items() if found.points}
    if not planes:
        raise NotDrawn("none of its runs is finished yet")
    known = looks(results)
    rows = [row for row in known if any(row in found.points for found in planes.values())]
    numbers = {row: str(i) for i, row in enumerate(rows, start=1)}
    bounds = {row for setting in planes for row in rows if results.is_upper_bound(row, setting)}
    marks = {row: _mark(known[row], is_bound=row in bounds) for row in rows}
    figure, axes = panels(len(planes), height=2.7)
    _add_legend(figure, numbers, marks, has_bounds=bool(bounds))
    x, y = (metric_label(results, metric) for metric in _metrics(results, spec))
    for panel, (setting, found) in zip(axes, planes.items(), strict=True):
        for row, point in found.points.items():
            panel.plot(*point, **marks[row], zorder=3)
        _name_axes(panel, x, y)
        if len(planes) > 1:
            panel.set_title(in_figure(setting))
    figure.draw_without_rendering()  # numbers need to know how far apart points are on paper,
    figure.set_layout_engine("none")  # and that they stay there
    for panel, found in zip(axes, planes.values(), strict=True):
        _number(panel, {numbers[row]: point for row, point in found.points.items()})
    return figure


def _metrics(results: Results, spec: FigureSpec) -> tuple[str, str]:
    return results.suite.metrics[str(spec.x)], results.suite.metrics[str(spec.y)]


def _mark(shown: Look, *, is_bound: bool) -> dict[str, Any]:
    return {
        "linestyle": "",
        "color": shown.color,
        "marker": BOUND if is_bound else shown.marker,
        "markersize": 7.0 if is_bound else 4.2,
        "markerfacecolor": shown.face,
        "markeredgewidth": 0.9,
    }


def _name_axes(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(in_figure(x))
    axes.set_ylabel(in_figure(y))
    axes.grid(visible=True, axis="both")
    axes.margins(0.09)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))


def _number(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Beside each marker its number; one that has to go further is led to by a thin line."""
    to_points = 72 / axes.figure.dpi
    placed = axes.transData.transform(list(points.values())) * to_points
    on_paper = [(x, y) for x, y in placed.tolist()]
    panel = axes.get_window_extent()
    left, bottom, right, top = (to_points * float(edge) for edge in panel.extents)
    places = label_places(on_paper, [len(number) for number in points], (left, bottom, right, top))
    for (number, point), place in zip(points.items(), places, strict=True):
        line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2.5}
        axes.annotate(
            number,
            point,
            (place.x, place.y),
            textcoords="offset points",
            ha="center",
            va="center_baseline",
            fontsize=SMALL,
            color=INK,
            weight="bold",
            zorder=4,
            arrowprops=line if place.is_led else None,
        )


def _add_legend(
    figure: Figure, numbers: Mapping[str, str], marks: Mapping[str, dict[str, Any]], *, has_bounds: bool
) -> None:
    """Below, in columns: a longer name goes on in the next line."""
    labels = [_label(number, row) for row, number in numbers.items()]
    handles = [Line2D([], [], **marks[row]) for row in numbers]
    if has_bounds:
        labels.append(BOUND_SAID)
        handles.append(Line2D([], [], linestyle="", marker=BOUND, markersize=7.0, color=INK))
    n_columns = int(figure.get_figwidth() / COLUMN)
    n_lines = [label.count("\n") + 1 for label in labels]
    highest = max(int(sum(column)) for column in np.array_split(n_lines, n_columns))  # as matplotlib does
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * highest)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=n_columns,
        handlelength=1.0,
        handletextpad=0.4,
        columnspacing=1.0,
        borderaxespad=0.1,
    )


def _label(number: str, row: str) -> str:
    lines = textwrap.wrap(row, WRAPPED, max_lines=2, placeholder="…")
    indented = "\n" + " " * (2 * len(number) + 2)  # a digit is as wide as two blanks
    return rf"$\mathbf{{{number}}}$  " + indented.join(in_figure(line) for line in lines)
