"""Colored cells with numbers: two settings of a method against each other, true against predicted classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from medcil.experiments.suite import FigureSpec
from medcil.recipe import laid_over, leaves
from medcil.report.canvas import SMALL, panels
from medcil.report.cells import (
    NotDrawn,
    Results,
    figure_rows,
    figure_settings,
    least_is_best,
    varied_summaries,
)
from medcil.report.read import RunRecord, StepRecord
from medcil.report.result_tables import number
from medcil.report.suite_curves import metric_label
from medcil.report.typeset import in_figure

MAX_NUMBERED = 12  # classes; more cells are too small for their numbers
MAX_NAMED = 25


def draw_heatmap(results: Results, spec: FigureSpec) -> Figure:
    """The mean over orders at each pair of values; the recipe's own pair framed, the best value bold."""
    if len(results.suite.vary) != 2:
        raise NotDrawn("a heat map needs two keys under `vary`")
    metric = spec.metric or next(iter(results.suite.metrics.values()))
    label = metric_label(results, metric)
    settings = figure_settings(results, spec)
    places = [(base, setting) for setting in settings for base in results.suite.rows]
    grids = {place: _means(results, *place, metric) for place in places}
    grids = {place: grid for place, grid in grids.items() if not np.isnan(grid).all()}
    if not grids:
        raise NotDrawn("none of its runs is finished yet")
    # The brighter the better, whichever way that is.
    colors = matplotlib.colormaps["viridis_r" if least_is_best(metric) else "viridis"]
    figure, axes = panels(len(grids), height=2.7)
    for panel, ((base, setting), grid) in zip(axes, grids.items(), strict=True):
        image = _cells(panel, grid, colors, Normalize(float(np.nanmin(grid)), float(np.nanmax(grid))))
        best = (np.nanmin if least_is_best(metric) else np.nanmax)(grid)
        _write(panel, image, [[_text(value) for value in row] for row in grid.tolist()], bold=number(best))
        _name_axes(panel, results)
        _frame_default(panel, results, base, setting)
        names = ([base] if len(results.suite.rows) > 1 else []) + ([setting] if len(settings) > 1 else [])
        panel.set_title(in_figure(", ".join(names)))
        bar = figure.colorbar(image, ax=panel, shrink=0.85, pad=0.03)
        bar.set_label(in_figure(label))
        bar.outline.set_visible(False)
    return figure


def _means(results: Results, base: str, setting: str, metric: str) -> np.ndarray:
    """Rows: values of the first varied key, columns: of the second; nan where nothing is finished."""
    (first, rows), (second, columns) = results.suite.vary.items()
    grid = np.full((len(rows), len(columns)), np.nan)
    for row, summary in varied_summaries(results, base, setting, metric):
        place = list(rows).index(row.varied[first]), list(columns).index(row.varied[second])
        grid[place] = summary.mean
    return grid


def _name_axes(axes: Axes, results: Results) -> None:
    (first, rows), (second, columns) = results.suite.vary.items()
    axes.set_yticks(range(len(rows)), [in_figure(str(value)) for value in rows])
    axes.set_xticks(range(len(columns)), [in_figure(str(value)) for value in columns])
    axes.set_ylabel(in_figure(results.suite.symbols.get(first, first)))
    axes.set_xlabel(in_figure(results.suite.symbols.get(second, second)))


def default_place(results: Results, base: str, setting: str) -> tuple[int, int] | None:
    """Where the suite's recipe itself stands among the values; None: it says nothing of them."""
    suite = results.suite
    recipe = dict(leaves(laid_over(laid_over(suite.common, suite.settings[setting]), suite.rows[base])))
    chosen = [
        list(values).index(recipe[key]) for key, values in suite.vary.items() if recipe.get(key) in values
    ]
    return (chosen[0], chosen[1]) if len(chosen) == 2 else None


def _frame_default(axes: Axes, results: Results, base: str, setting: str) -> None:
    place = default_place(results, base, setting)
    if place is not None:
        corner = (place[1] - 0.5, place[0] - 0.5)
        frame = {"fill": False, "clip_on": False, "zorder": 4}
        axes.add_patch(Rectangle(corner, 1, 1, edgecolor="white", linewidth=3.2, **frame))  # type: ignore[arg-type]
        axes.add_patch(Rectangle(corner, 1, 1, edgecolor="#D55E00", linewidth=1.8, **frame))  # type: ignore[arg-type]


def draw_confusion(results: Results, spec: FigureSpec) -> Figure:
    """After the last step of one order: shares of a true class, so that a rare one is as visible as any."""
    shown = [
        (setting, row, record.last)
        for setting in figure_settings(results, spec)
        for row in figure_rows(results, spec, setting)
        if (record := chosen_run(results, spec, row, setting)) is not None and record.last.confusion
    ]
    if not shown:
        raise NotDrawn("none of its runs is finished yet")
    figure, axes = panels(len(shown), height=2.75)
    n_settings = len({setting for setting, _, _ in shown})
    for panel, (setting, row, step) in zip(axes, shown, strict=True):
        shares = _shares(step)
        image = _cells(panel, shares, matplotlib.colormaps["Blues"], Normalize(0, 1))
        n = len(step.classes)
        if n <= MAX_NUMBERED:
            _write(panel, image, [[f"{100 * share:.0f}" for share in cells] for cells in shares.tolist()])
        _name_classes(panel, step)
        panel.set_title(in_figure(f"{row}, {setting}" if n_settings > 1 else row))
    return figure


def chosen_run(results: Results, spec: FigureSpec, row: str, setting: str) -> RunRecord | None:
    """The run of the order that the figure names; without one, of the first order."""
    place = results.suite.place_shown(spec, row, setting)
    return results.records(row, setting).get(place.order_and_seed)


def _shares(step: StepRecord) -> np.ndarray:
    counts = np.array(step.confusion, dtype=float)
    shares: np.ndarray = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    return shares


def _name_classes(axes: Axes, step: StepRecord) -> None:
    n = len(step.classes)
    if n <= MAX_NAMED:
        names = [in_figure(name if len(name) <= 14 else name[:13] + "…") for name in step.classes]
        axes.set_xticks(range(n), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(n), names)
    else:
        axes.set_xticks([0, n - 1], ["1", str(n)])
        axes.set_yticks([0, n - 1], ["1", str(n)])
    axes.set_xlabel("predicted (%)")
    axes.set_ylabel("true")
    if 0 < step.n_old < n:  # between old classes and those of the last step
        for line in (axes.axhline, axes.axvline):
            line(step.n_old - 0.5, color="#D55E00", linewidth=1)


def _cells(axes: Axes, values: np.ndarray, colors: Colormap, norm: Normalize) -> AxesImage:
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_facecolor("#e5e7eb")  # of cells without a value
    return axes.imshow(values, cmap=colors, norm=norm, aspect="equal")


def _write(axes: Axes, image: AxesImage, texts: Sequence[Sequence[str]], *, bold: str | None = None) -> None:
    values = image.get_array()
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            red, green, blue, _ = image.cmap(image.norm(values[i, j])) if values is not None else (1, 1, 1, 1)
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            style: Mapping[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL}
            weight = "bold" if text == bold else "normal"
            axes.text(j, i, text, color="white" if is_dark else "black", weight=weight, **style)


def _text(value: float) -> str:
    return "–" if np.isnan(value) else number(value)
