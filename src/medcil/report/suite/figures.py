"""Draw the figures of a suite as PDF and SVG; the same runs give the same bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import mean_and_deviation
from medcil.recipe import laid_over, leaves
from medcil.report.markup import in_figure
from medcil.report.plots import SINGLE, SMALL, SUITE_STYLE, Look, add_legend, look, looks, panels, rendered
from medcil.report.runs import ARCHIVE, StepRecord
from medcil.report.suite.results import (
    NotDrawn,
    Order,
    Results,
    averaged,
    chosen_run,
    figure_rows,
    figure_settings,
    first_line,
    metric_label,
    varied_summaries,
)
from medcil.report.suite.scatter import draw_tradeoff, draw_tsne, plane
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
    with matplotlib.rc_context(SUITE_STYLE):
        for spec in results.suite.figures:
            try:
                figure = KINDS[spec.kind](results, spec)
            except (NotDrawn, DamagedFile) as reason:
                earlier = _file(results, spec, "svg")
                if (results.folder / ARCHIVE).is_file() and earlier.is_file():  # features are not archived
                    svg, caption = earlier.read_bytes(), _caption(results, spec)
                    figures.append(DrawnFigure(spec, caption, svg, is_wide=True))
                    continue
                figures.append(DrawnFigure(spec, "", why_not=first_line(reason, results.folder).rstrip(".")))
                for suffix in SUFFIXES:  # a figure of other runs must not remain beside this page
                    _file(results, spec, suffix).unlink(missing_ok=True)
                continue
            is_wide = bool(figure.get_figwidth() > SINGLE)
            content = {suffix: rendered(figure, suffix) for suffix in SUFFIXES}
            figures.append(DrawnFigure(spec, _caption(results, spec), content["svg"], is_wide))
            for suffix, drawn in content.items():
                written.append(_file(results, spec, suffix))
                write_bytes(written[-1], drawn)
    return figures, written


def _file(results: Results, spec: FigureSpec, suffix: str) -> Path:
    return results.folder / "figures" / f"{spec.file}.{suffix}"


def _caption(results: Results, spec: FigureSpec) -> str:
    text = CAPTIONS[spec.kind]
    settings = figure_settings(results, spec)
    if spec.kind in ("tsne", "confusion"):
        place = results.suite.place_shown(spec, "", settings[0])
        text = f"{_orders_sentence([place.order_and_seed])} {text}"
    elif spec.kind in ("line", "heatmap", "tradeoff"):
        text = f"{_orders_drawn(results, spec)} {text}"
    if spec.kind in ("curves", "line", "heatmap", "tradeoff") and averages_seeds(results):
        text += " The seeds of a class order are averaged first."
    left_out: list[str] = []
    if spec.kind == "tradeoff":
        left_out = [row for setting in settings for row in plane(results, spec, setting).left_out]
        if left_out:
            text += f" Left out, for they lack some of these class orders: {_named(left_out)}."
    missing = [
        row
        for setting in settings
        for row in figure_rows(results, spec, setting)
        if row not in left_out and any(not run.counts for run in results.placed(row, setting))
    ]
    return f"{text} Not all runs are finished of: {_named(missing)}." if missing else text


def _named(rows: Sequence[str]) -> str:
    """Join the names, each once."""
    return ", ".join(dict.fromkeys(rows))


def _orders_drawn(results: Results, spec: FigureSpec) -> str:
    """Name the class orders of the means, panel by panel where they differ."""
    said = {
        panel: f"Class order {results.orders(setting)[0]}, mean over {len(units)} of its seeds."
        if setting in results.over_seeds
        else _orders_sentence(units)
        for setting in figure_settings(results, spec)
        for panel, units in _units_drawn(results, spec, setting)
    }
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return " ".join(f"{panel}: {sentence[0].lower()}{sentence[1:]}" for panel, sentence in said.items())


def _units_drawn(results: Results, spec: FigureSpec, setting: str) -> Iterator[tuple[str, Sequence[Order]]]:
    if spec.kind == "tradeoff":
        if orders := plane(results, spec, setting).orders:
            yield setting, orders
        return
    metric = spec.metric or next(iter(results.suite.metrics.values()))
    for base in results.suite.rows:
        if found := varied_summaries(results, base, setting, metric):
            yield f"{base}, {setting}", list(found[0][1].values)


def _orders_sentence(orders: Sequence[Order]) -> str:
    named = ", ".join(map(str, orders))
    return f"Class order {named}." if len(orders) == 1 else f"Mean over class orders {named}."


PER_STEP = {
    "micro": "Accuracy (%)",
    "balanced": "Balanced accuracy (%)",
    "forgetting": "Forgetting (points)",
    "old": "Accuracy, old classes (%)",
    "new": "Accuracy, new classes (%)",
}
MAX_TICKS = 7
MANY_ROWS = 8  # too many for one column of a page
Band = tuple[list[float], list[float], list[float]]
"""x, mean, deviation"""


def draw_curves(results: Results, spec: FigureSpec) -> Figure:
    metric = spec.metric or "micro"
    settings = figure_settings(results, spec)
    bands = {
        (row, setting): band
        for setting in settings
        for row in figure_rows(results, spec, setting)
        if (band := _over_steps(results, row, setting, metric)) is not None
    }
    _refuse_empty(bands)
    known = looks(results.suite)
    rows = [row for row in known if any(place[0] == row for place in bands)]
    is_wide = len(rows) > MANY_ROWS
    height = 2.8 if is_wide else 2.1
    figure, axes = panels(len(settings), height=height, legend=rows, share_y=True, is_wide=is_wide)
    for panel, setting in zip(axes, settings, strict=True):
        for row in rows:
            if (row, setting) in bands:
                _band(panel, bands[row, setting], known[row])
        _step_ticks(panel, results, setting)
        if len(settings) > 1:
            panel.set_title(in_figure(setting))
    _left_labels(axes, PER_STEP[metric])
    add_legend(figure, [_handle(known[row]) for row in rows], rows)
    return figure


def draw_line(results: Results, spec: FigureSpec) -> Figure:
    """Draw a metric of the whole run against the one varied key."""
    if len(results.suite.vary) != 1:
        raise NotDrawn("a line needs one key under `vary`")
    ((key, values),) = results.suite.vary.items()
    metric = spec.metric or next(iter(results.suite.metrics.values()))
    settings, names = figure_settings(results, spec), list(results.suite.rows)
    bands = {
        (name, setting): band
        for setting in settings
        for name in names
        if (band := _over_values(results, name, setting, metric)) is not None
    }
    _refuse_empty(bands)
    settings = [setting for setting in settings if any(place[1] == setting for place in bands)]
    figure, axes = panels(len(settings), height=2.0, legend=names if len(names) > 1 else ())
    for panel, setting in zip(axes, settings, strict=True):
        for i, name in enumerate(names):
            if (name, setting) in bands:
                _band(panel, bands[name, setting], look(i))
        panel.set_xlabel(in_figure(results.suite.symbols.get(key, key)))
        panel.set_xticks(_places(values), [in_figure(str(value)) for value in values])
        panel.margins(x=0.08, y=0.12)
        if len(settings) > 1:
            panel.set_title(in_figure(setting))
    _left_labels(axes, metric_label(results, metric))
    if len(names) > 1:
        add_legend(figure, [_handle(look(i)) for i in range(len(names))], names)
    return figure


def _over_steps(results: Results, row: str, setting: str, metric: str) -> Band | None:
    runs = [(results.unit(run, setting), record) for run, record in results.finished(row, setting)]
    if not runs:
        return None
    points = []
    for i in range(min(len(record.steps) for _, record in runs)):
        steps = [(unit, getattr(record.steps[i], metric)) for unit, record in runs]
        if all(value is not None for _, value in steps):
            values = averaged((unit, 100 * value) for unit, value in steps)
            mean, deviation = mean_and_deviation(list(values.values()))
            points.append((float(runs[0][1].steps[i].step), mean, deviation or 0.0))
    return _columns(points)


def _over_values(results: Results, name: str, setting: str, metric: str) -> Band | None:
    ((key, values),) = results.suite.vary.items()
    points = []
    for row, summary in varied_summaries(results, name, setting, metric):
        place = _places(values)[list(values).index(row.varied[key])]
        points.append((place, summary.mean, summary.deviation or 0.0))
    return _columns(points)


def _places(values: Sequence[object]) -> list[float]:
    """Return positions on the axis: numbers as they are, anything else at equal distances."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values]  # type: ignore[arg-type]
    return [float(i) for i in range(len(values))]


def _columns(points: Sequence[tuple[float, float, float]]) -> Band | None:
    if not points:
        return None
    x, mean, deviation = (list(column) for column in zip(*points, strict=True))
    return x, mean, deviation


def _refuse_empty(bands: object) -> None:
    if not bands:
        raise NotDrawn("none of its runs is finished yet")


def _band(axes: Axes, band: Band, shown: Look) -> None:
    x, mean, deviation = map(np.array, band)
    axes.fill_between(x, mean - deviation, mean + deviation, color=shown.color, alpha=0.12, linewidth=0)
    axes.plot(x, mean, **_line(shown), zorder=3)


def _line(shown: Look) -> dict[str, Any]:
    return {
        "color": shown.color,
        "marker": shown.marker,
        "linestyle": shown.dash,
        "markerfacecolor": shown.face,
        "markeredgewidth": 0.9,
    }


def _handle(shown: Look) -> Line2D:
    return Line2D([], [], **_line(shown))


def _left_labels(axes: Sequence[Axes], label: str) -> None:
    for panel in axes:
        if panel.get_subplotspec() is not None and panel.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            panel.set_ylabel(in_figure(label))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6))


def _step_ticks(axes: Axes, results: Results, setting: str) -> None:
    """Label the steps with the number of classes seen."""
    runs = [run for row in results.rows(setting) for run in results.records(row, setting).values()]
    if not runs:
        return
    steps = max(runs, key=lambda run: len(run.steps)).steps
    ticked = steps[:: -(-len(steps) // MAX_TICKS)]
    axes.set_xticks(
        [step.step for step in ticked], [f"{step.step}\n({len(step.classes)})" for step in ticked]
    )
    axes.set_xlabel("Step (classes seen)")


MAX_NUMBERED = 12  # classes; more cells are too small for their numbers
MAX_NAMED = 25


def draw_heatmap(results: Results, spec: FigureSpec) -> Figure:
    """Draw the mean over orders for each pair of values; frame the recipe's own pair, best value bold."""
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
    colors = matplotlib.colormaps["viridis_r" if METRICS[metric].is_lower_better else "viridis"]
    figure, axes = panels(len(grids), height=2.7)
    for panel, ((base, setting), grid) in zip(axes, grids.items(), strict=True):
        image = _cells(panel, grid, colors, Normalize(float(np.nanmin(grid)), float(np.nanmax(grid))))
        best = (np.nanmin if METRICS[metric].is_lower_better else np.nanmax)(grid)
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
    """Return the grid: first varied key by second; nan where nothing is finished."""
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
        frame = {"fill": False, "clip_on": False, "zorder": 4}
        axes.add_patch(Rectangle(corner, 1, 1, edgecolor="white", linewidth=3.2, **frame))  # type: ignore[arg-type]
        axes.add_patch(Rectangle(corner, 1, 1, edgecolor="#D55E00", linewidth=1.8, **frame))  # type: ignore[arg-type]


def draw_confusion(results: Results, spec: FigureSpec) -> Figure:
    """Draw confusion after the last step as shares of the true class: rare classes are as visible as any."""
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


KINDS: dict[str, Callable[[Results, FigureSpec], Figure]] = {
    "curves": draw_curves,
    "line": draw_line,
    "heatmap": draw_heatmap,
    "confusion": draw_confusion,
    "tsne": draw_tsne,
    "tradeoff": draw_tradeoff,
}
