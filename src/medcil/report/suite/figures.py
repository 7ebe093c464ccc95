"""Draw the figures of a suite as PDF and SVG; the same runs give the same bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.metrics.catalogue import METRICS
from medcil.recipe import laid_over, leaves
from medcil.report.markup import in_figure, shortened
from medcil.report.plots import (
    PER_STEP,
    SINGLE,
    SMALL,
    STYLE,
    Look,
    add_legend,
    look,
    name_steps,
    panels,
    rendered,
)
from medcil.report.runs import ARCHIVE, StepRecord
from medcil.report.suite.results import (
    Comparable,
    NotDrawn,
    Results,
    Summary,
    averaged,
    comparable,
    figure_metrics,
    figure_record,
    figure_rows,
    figure_settings,
    first_line,
    metric_label,
)
from medcil.report.suite.scatter import draw_tradeoff, draw_tsne
from medcil.report.suite.tables import averages_seeds, number
from medcil.storage.atomic import write_bytes

SUFFIXES = ("pdf", "svg")
CAPTIONS = {
    "curves": "Mean over a row's runs; the band is ± the sample standard deviation.",
    "line": "The band, where there are several orders, is ± the sample standard deviation.",
    "heatmap": "Brighter is better, the best value bold; "
    "framed: the values of the recipe itself, where it is among them.",
    "confusion": "After the last step: of the images of each true class, the share answered as each class. "
    "The lines part old classes from those of the last step.",
    "tsne": "Test images as the network sees them after the last step, at unit length. Each panel starts "
    "from the positions of the one before and is turned, mirrored and scaled onto it. Circles: old classes; "
    "triangles: classes of the last step.",
    "tradeoff": "Each point is a row, by its number; stars: upper bounds, trained on all images so far.",
}


@dataclass(frozen=True)
class DrawnFigure:
    spec: FigureSpec
    caption: str
    svg: bytes = b""
    is_wide: bool = False
    why_not: str | None = None

    @property
    def title(self) -> str:
        return f"{self.spec.number}. {self.spec.title}" if self.spec.number else self.spec.title


def draw_figures(results: Results) -> tuple[list[DrawnFigure], list[Path]]:
    """Draw every figure into figures/; return what the page shows of each, and the files."""
    figures, written = [], []
    with matplotlib.rc_context(STYLE):
        for spec in results.suite.figures:
            files = {suffix: results.folder / "figures" / f"{spec.file}.{suffix}" for suffix in SUFFIXES}
            try:
                figure = KINDS[spec.kind](results, spec)
            except (NotDrawn, DamagedFile) as reason:
                if (results.folder / ARCHIVE).is_file() and files[
                    "svg"
                ].is_file():  # features are not archived
                    svg = files["svg"].read_bytes()
                    figures.append(DrawnFigure(spec, _caption(results, spec), svg, is_wide=True))
                    continue
                figures.append(DrawnFigure(spec, "", why_not=first_line(reason, results.folder).rstrip(".")))
                for file in files.values():  # a figure of other runs must not remain beside this page
                    file.unlink(missing_ok=True)
                continue
            is_wide = bool(figure.get_figwidth() > SINGLE)
            content = {suffix: rendered(figure, suffix) for suffix in SUFFIXES}
            figures.append(DrawnFigure(spec, _caption(results, spec), content["svg"], is_wide))
            for suffix, drawn in content.items():
                written.append(files[suffix])
                write_bytes(files[suffix], drawn)
    return figures, written


def _caption(results: Results, spec: FigureSpec) -> str:
    text = CAPTIONS[spec.kind]
    settings = figure_settings(results, spec)
    left_out: list[str] = []
    if spec.kind in ("tsne", "confusion"):
        place = results.suite.place_shown(spec, "", settings[0])
        return f"Class order {place.order_and_seed}. {text}"
    if spec.kind != "curves":
        shown = {setting: comparable(results, spec, setting) for setting in settings}
        orders = {setting: _orders_text(found) for setting, found in shown.items() if found.orders}
        sentences = [f"Drawn is the {text}." for text in dict.fromkeys(orders.values())]
        if len(sentences) > 1:
            sentences = [f"{setting}: the {text}." for setting, text in orders.items()]
        text = " ".join([*sentences, text])
        left_out = [row for found in shown.values() for row in found.left_out]
    if averages_seeds(results):
        text += " The seeds of a class order are averaged first."
    if left_out:
        text += f" Left out, for they lack some of these class orders: {_named(left_out)}."
    missing = [
        row
        for setting in settings
        for row in figure_rows(results, spec, setting)
        if row not in left_out and any(run.record is None for run in results.runs[row, setting])
    ]
    return f"{text} Not all runs are finished of: {_named(missing)}." if missing else text


def _orders_text(shown: Comparable) -> str:
    names = ", ".join(map(str, shown.orders))
    return f"mean over class orders {names}" if len(shown.orders) > 1 else f"result of class order {names}"


def _named(rows: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(rows))


MANY_ROWS = 8  # too many for one column of a page
Band = Sequence[tuple[float, Summary]]
"""Places on the x axis, and what was measured there."""


def draw_curves(results: Results, spec: FigureSpec) -> Figure:
    metric, settings = spec.metric or "micro", figure_settings(results, spec)
    bands = {
        (row, setting): band
        for setting in settings
        for row in figure_rows(results, spec, setting)
        if (band := _over_steps(results, row, setting, metric))
    }
    _refuse_empty(bands)
    known = {row.name: look(i) for i, row in enumerate(results.suite.expanded_rows())}
    rows = [row for row in known if any(place[0] == row for place in bands)]
    is_wide = len(rows) > MANY_ROWS
    height = 2.8 if is_wide else 2.1
    figure, axes = panels(len(settings), height=height, legend=rows, share_y=True, is_wide=is_wide)
    for panel, setting in zip(axes, settings, strict=True):
        for row in rows:
            if (row, setting) in bands:
                _draw_band(panel, bands[row, setting], known[row])
        records = [
            record for row in results.rows(setting) for record in results.records(row, setting).values()
        ]
        name_steps(panel, records[:1])
        if len(settings) > 1:
            panel.set_title(in_figure(setting))
    _left_labels(axes, PER_STEP[metric])
    add_legend(figure, [known[row] for row in rows], rows)
    return figure


def _over_steps(results: Results, row: str, setting: str, metric: str) -> Band:
    runs = [(results.unit(run, setting), run.record) for run in results.runs[row, setting] if run.record]
    band = []
    for i in range(min((len(record.steps) for _, record in runs), default=0)):
        steps = [(unit, getattr(record.steps[i], metric)) for unit, record in runs]
        if all(value is not None for _, value in steps):
            band.append((runs[0][1].steps[i].step, averaged((unit, 100 * value) for unit, value in steps)))
    return band


def draw_line(results: Results, spec: FigureSpec) -> Figure:
    """Draw a metric of the whole run against the one varied key."""
    if len(results.suite.vary) != 1:
        raise NotDrawn("a line needs one key under `vary`")
    ((key, values),) = results.suite.vary.items()
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = dict(zip(map(str, values), values if is_number else range(len(values)), strict=True))
    settings, names = figure_settings(results, spec), list(results.suite.rows)
    bands: dict[tuple[str, str], list[tuple[float, Summary]]] = {}
    for setting in settings:
        measured = comparable(results, spec, setting).rows
        for row in results.suite.expanded_rows():
            if row.name in measured:
                band = bands.setdefault((row.base, setting), [])
                band.append((places[str(row.varied[key])], measured[row.name][0]))
    _refuse_empty(bands)
    settings = [setting for setting in settings if any(place[1] == setting for place in bands)]
    figure, axes = panels(len(settings), height=2.0, legend=names if len(names) > 1 else ())
    for panel, setting in zip(axes, settings, strict=True):
        for i, name in enumerate(names):
            if (name, setting) in bands:
                _draw_band(panel, bands[name, setting], look(i))
        panel.set_xlabel(in_figure(results.suite.symbols.get(key, key)))
        panel.set_xticks(list(places.values()), [in_figure(value) for value in places])
        panel.margins(x=0.08, y=0.12)
        if len(settings) > 1:
            panel.set_title(in_figure(setting))
    _left_labels(axes, metric_label(results, figure_metrics(results, spec)[0]))
    if len(names) > 1:
        add_legend(figure, [look(i) for i in range(len(names))], names)
    return figure


def _refuse_empty(shown: object) -> None:
    if not shown:
        raise NotDrawn("none of its runs is finished yet")


def _draw_band(axes: Axes, band: Band, shown: Look) -> None:
    x = [place for place, _ in band]
    mean = np.array([summary.mean for _, summary in band])
    deviation = np.array([summary.deviation or 0.0 for _, summary in band])
    axes.fill_between(x, mean - deviation, mean + deviation, color=shown["color"], alpha=0.12, linewidth=0)
    axes.plot(x, mean, **shown, zorder=3)


def _left_labels(axes: Sequence[Axes], label: str) -> None:
    for panel in axes:
        if panel.get_subplotspec() is not None and panel.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            panel.set_ylabel(in_figure(label))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6))


MAX_NUMBERED = 12  # classes; more cells are too small for their numbers
MAX_NAMED = 25


def draw_heatmap(results: Results, spec: FigureSpec) -> Figure:
    """Draw the mean over orders for each pair of values; frame the recipe's own pair, best value bold."""
    if len(results.suite.vary) != 2:
        raise NotDrawn("a heat map needs two keys under `vary`")
    (metric,) = figure_metrics(results, spec)
    settings = figure_settings(results, spec)
    places = [(base, setting) for setting in settings for base in results.suite.rows]
    grids = {place: _means(results, spec, *place) for place in places}
    grids = {place: grid for place, grid in grids.items() if not np.isnan(grid).all()}
    _refuse_empty(grids)
    # The brighter the better, whichever way that is.
    colors = matplotlib.colormaps["viridis_r" if METRICS[metric].is_lower_better else "viridis"]
    figure, axes = panels(len(grids), height=2.7)
    for panel, ((base, setting), grid) in zip(axes, grids.items(), strict=True):
        image = _cells(panel, grid, colors, Normalize(float(np.nanmin(grid)), float(np.nanmax(grid))))
        best = (np.nanmin if METRICS[metric].is_lower_better else np.nanmax)(grid)
        texts = [["–" if np.isnan(value) else number(value) for value in row] for row in grid.tolist()]
        _write(panel, image, texts, bold=number(best))
        _name_axes(panel, results)
        _frame_default(panel, results, base, setting)
        names = ([base] if len(results.suite.rows) > 1 else []) + ([setting] if len(settings) > 1 else [])
        panel.set_title(in_figure(", ".join(names)))
        bar = figure.colorbar(image, ax=panel, shrink=0.85, pad=0.03)
        bar.set_label(in_figure(metric_label(results, metric)))
        bar.outline.set_visible(False)
    return figure


def _means(results: Results, spec: FigureSpec, base: str, setting: str) -> np.ndarray:
    """Return the grid: first varied key by second; nan where nothing is finished."""
    (first, rows), (second, columns) = results.suite.vary.items()
    grid = np.full((len(rows), len(columns)), np.nan)
    measured = comparable(results, spec, setting).rows
    for row in results.suite.expanded_rows():
        if row.base == base and row.name in measured:
            place = list(rows).index(row.varied[first]), list(columns).index(row.varied[second])
            grid[place] = measured[row.name][0].mean
    return grid


def _name_axes(axes: Axes, results: Results) -> None:
    (first, rows), (second, columns) = results.suite.vary.items()
    axes.set_yticks(range(len(rows)), [in_figure(str(value)) for value in rows])
    axes.set_xticks(range(len(columns)), [in_figure(str(value)) for value in columns])
    axes.set_ylabel(in_figure(results.suite.symbols.get(first, first)))
    axes.set_xlabel(in_figure(results.suite.symbols.get(second, second)))


def default_place(results: Results, base: str, setting: str) -> tuple[int, int] | None:
    """Find the recipe's own pair of values; None if it does not set them."""
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
        for color, width in (("white", 3.2), ("#D55E00", 1.8)):
            style: Mapping[str, Any] = {"edgecolor": color, "linewidth": width, "zorder": 4}
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, clip_on=False, **style))


def draw_confusion(results: Results, spec: FigureSpec) -> Figure:
    """Draw confusion after the last step as shares of the true class: rare classes are as visible as any."""
    shown = [
        (setting, row, record.last)
        for setting in figure_settings(results, spec)
        for row in figure_rows(results, spec, setting)
        if (record := figure_record(results, spec, row, setting)) is not None and record.last.confusion
    ]
    _refuse_empty(shown)
    figure, axes = panels(len(shown), height=2.75)
    n_settings = len({setting for setting, _, _ in shown})
    for panel, (setting, row, step) in zip(axes, shown, strict=True):
        counts = np.array(step.confusion, dtype=float)
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        image = _cells(panel, shares, matplotlib.colormaps["Blues"], Normalize(0, 1))
        if len(step.classes) <= MAX_NUMBERED:
            _write(panel, image, [[f"{100 * share:.0f}" for share in cells] for cells in shares.tolist()])
        _name_classes(panel, step)
        panel.set_title(in_figure(f"{row}, {setting}" if n_settings > 1 else row))
    return figure


def _name_classes(axes: Axes, step: StepRecord) -> None:
    n = len(step.classes)
    if n <= MAX_NAMED:
        names = [in_figure(shortened(name, 14)) for name in step.classes]
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
    """Write a text into each cell, white where the cell is dark."""
    values = np.asarray(image.get_array())
    colors = np.asarray(image.cmap(image.norm(values)))[..., :3] @ [0.299, 0.587, 0.114]
    for (i, j), brightness in np.ndenumerate(colors):
        style: Mapping[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL}
        weight = "bold" if texts[i][j] == bold else "normal"
        axes.text(j, i, texts[i][j], color="white" if brightness < 0.55 else "black", weight=weight, **style)


KINDS: dict[str, Callable[[Results, FigureSpec], Figure]] = {
    "curves": draw_curves,
    "line": draw_line,
    "heatmap": draw_heatmap,
    "confusion": draw_confusion,
    "tsne": draw_tsne,
    "tradeoff": draw_tradeoff,
}
