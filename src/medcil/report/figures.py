"""Draw the figures of a suite as PDF and SVG; the same runs give the same bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.metrics.catalogue import METRICS
from medcil.recipe import laid_over, leaves
from medcil.report import plots
from medcil.report.markup import in_figure, number, render_text, shortened
from medcil.report.plots import NotDrawn
from medcil.report.results import Results, Summary, first_line
from medcil.report.runs import ARCHIVE, StepRecord
from medcil.report.scatter import draw_tradeoff, draw_tsne
from medcil.storage.atomic import write_bytes

SUFFIXES = ("pdf", "svg")


@dataclass(frozen=True)
class DrawnFigure:
    spec: FigureSpec
    caption: str
    svg: bytes = b""
    is_wide: bool = False
    why_not: str | None = None


def draw_figures(results: Results) -> tuple[list[DrawnFigure], list[Path]]:
    """Draw every figure into figures/; return what the page shows of each, and the files."""
    figures, written = [], []
    with matplotlib.rc_context(plots.STYLE):
        for spec in results.suite.figures:
            files = {suffix: results.folder / "figures" / f"{spec.file}.{suffix}" for suffix in SUFFIXES}
            try:
                figure = KINDS[spec.kind](results, spec)
            except (NotDrawn, DamagedFile) as reason:
                if (results.folder / ARCHIVE).is_file() and files["svg"].is_file():
                    svg = files["svg"].read_bytes()  # of features, which are not archived
                    figures.append(DrawnFigure(spec, _caption(results, spec), svg, is_wide=True))
                    continue
                figures.append(DrawnFigure(spec, "", why_not=first_line(reason, results.folder).rstrip(".")))
                for file in files.values():  # a figure of other runs must not remain beside this page
                    file.unlink(missing_ok=True)
                continue
            is_wide = bool(figure.get_figwidth() > plots.SINGLE)
            content = {suffix: plots.rendered(figure, suffix) for suffix in SUFFIXES}
            figures.append(DrawnFigure(spec, _caption(results, spec), content["svg"], is_wide))
            for suffix, drawn in content.items():
                written.append(files[suffix])
                write_bytes(files[suffix], drawn)
    return figures, written


def _caption(results: Results, spec: FigureSpec) -> str:
    """Name the class orders that are drawn, and the rows left out because they lack some of them."""
    settings = results.figure_settings(spec)
    is_mean = spec.kind in ("line", "heatmap", "tradeoff")
    shown = {setting: results.comparable(spec, setting) for setting in settings} if is_mean else {}
    sentences = render_text(
        "caption.txt.j2",
        kind=spec.kind,
        order=results.suite.place_shown(spec, "", settings[0]).order_and_seed,
        orders={setting: ", ".join(map(str, each.orders)) for setting, each in shown.items() if each.orders},
        left_out=dict.fromkeys(row for each in shown.values() for row in each.left_out),
    )
    return " ".join(sentences.strip().split("\n"))


MANY_ROWS = 8  # too many for one column of a page
Band = Sequence[tuple[float, Summary]]
"""Places on the x axis, and what was measured there."""


def draw_curves(results: Results, spec: FigureSpec) -> Figure:
    metric = spec.metric or "micro"
    bands = {
        (row, setting): band
        for setting in results.figure_settings(spec)
        for row in results.figure_rows(spec, setting)
        if (band := _over_steps(results, row, setting, metric))
    }
    looks = {row.name: plots.look(i) for i, row in enumerate(results.suite.expanded_rows())}
    figure, axes = _draw_bands(bands, looks, plots.PER_STEP[metric], share_y=True)
    for setting, panel in axes.items():
        place = next(place for place in bands if place[1] == setting)
        plots.name_steps(panel, next(iter(results.records(*place).values())))
    return figure


def _over_steps(results: Results, row: str, setting: str, metric: str) -> Band:
    runs = [(results.unit(run, setting), run.record) for run in results.runs[row, setting] if run.record]
    band = []
    for steps in zip(*(record.steps for _, record in runs), strict=False):
        values = [(unit, getattr(step, metric)) for (unit, _), step in zip(runs, steps, strict=True)]
        if all(value is not None for _, value in values):
            band.append((steps[0].step, Summary.averaged((unit, 100 * value) for unit, value in values)))
    return band


def draw_line(results: Results, spec: FigureSpec) -> Figure:
    """Draw a metric of the whole run against the one varied key."""
    if len(results.suite.vary) != 1:
        raise NotDrawn("a line needs one key under `vary`")
    ((key, values),) = results.suite.vary.items()
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = dict(zip(map(str, values), values if is_number else range(len(values)), strict=True))
    bands: dict[tuple[str, str], list[tuple[float, Summary]]] = {}
    for setting in results.figure_settings(spec):
        measured = results.comparable(spec, setting).rows
        for row in results.suite.expanded_rows():
            if row.name in measured:
                band = bands.setdefault((row.base, setting), [])
                band.append((places[str(row.varied[key])], measured[row.name][0]))
    looks = {name: plots.look(i) for i, name in enumerate(results.suite.rows)}
    label = results.metric_label(results.figure_metrics(spec)[0])
    figure, axes = _draw_bands(bands, looks, label, share_y=False)
    for panel in axes.values():
        panel.set_xlabel(in_figure(results.suite.symbols.get(key, key)))
        panel.set_xticks(list(places.values()), [in_figure(value) for value in places])
        panel.margins(x=0.08, y=0.12)
    return figure


def _draw_bands(
    bands: Mapping[tuple[str, str], Band], looks: Mapping[str, plots.Look], label: str, *, share_y: bool
) -> tuple[Figure, dict[str, Axes]]:
    """Draw the mean and deviation of each (row, setting): a panel for each setting."""
    settings = list(dict.fromkeys(setting for _, setting in bands))
    rows = [row for row in looks if any(place[0] == row for place in bands)]
    is_wide = len(rows) > MANY_ROWS
    height = 2.8 if is_wide else 2.1
    figure, axes = plots.panels(len(settings), height=height, legend=rows, share_y=share_y, is_wide=is_wide)
    panels = dict(zip(settings, axes, strict=True))
    for row in rows:
        for setting, panel in panels.items():
            band = bands.get((row, setting), ())
            x = [place for place, _ in band]
            mean = np.array([summary.mean for _, summary in band])
            half = np.array([summary.deviation or 0.0 for _, summary in band])
            shade = {"color": looks[row]["color"], "alpha": 0.12, "linewidth": 0}
            panel.fill_between(x, mean - half, mean + half, **shade)
            panel.plot(x, mean, **looks[row], zorder=3)
    for setting, panel in panels.items():
        panel.set_title(in_figure(setting) if len(settings) > 1 else "")
        panel.set_ylabel(in_figure(label))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=6))
    plots.add_legend(figure, [looks[row] for row in rows], rows)
    return figure, panels


MAX_NUMBERED = 12  # classes; more cells are too small for their numbers
MAX_NAMED = 25


def draw_heatmap(results: Results, spec: FigureSpec) -> Figure:
    """Draw the mean over orders for each pair of values; frame the recipe's own pair, best value bold."""
    if len(results.suite.vary) != 2:
        raise NotDrawn("a heat map needs two keys under `vary`")
    (metric,) = results.figure_metrics(spec)
    settings = results.figure_settings(spec)
    places = [(base, setting) for setting in settings for base in results.suite.rows]
    grids = {place: _means(results, spec, *place) for place in places}
    grids = {place: grid for place, grid in grids.items() if not np.isnan(grid).all()}
    is_lower_better = METRICS[metric].is_lower_better
    figure, axes = plots.panels(len(grids), height=2.7)
    for panel, ((base, setting), grid) in zip(axes, grids.items(), strict=True):
        limits = float(np.nanmin(grid)), float(np.nanmax(grid))
        texts = [["–" if np.isnan(value) else number(value) for value in row] for row in grid.tolist()]
        # The brighter the better, whichever way that is.
        image = _draw_cells(panel, grid, "viridis_r" if is_lower_better else "viridis", limits, texts)
        best = number(limits[0 if is_lower_better else 1])
        for text in panel.texts:
            text.set_fontweight("bold" if text.get_text() == best else "normal")
        _name_axes(panel, results)
        if (place := default_place(results, base, setting)) is not None:
            frame = {"edgecolor": "#D55E00", "linewidth": 2, "fill": False, "clip_on": False, "zorder": 4}
            panel.add_patch(Rectangle((place[1] - 0.5, place[0] - 0.5), 1, 1, **frame))  # type: ignore[arg-type]
        names = ([base] if len(results.suite.rows) > 1 else []) + ([setting] if len(settings) > 1 else [])
        panel.set_title(in_figure(", ".join(names)))
        bar = figure.colorbar(image, ax=panel, shrink=0.85, pad=0.03)
        bar.set_label(in_figure(results.metric_label(metric)))
        bar.outline.set_visible(False)
    return figure


def _means(results: Results, spec: FigureSpec, base: str, setting: str) -> np.ndarray:
    """Return the grid: first varied key by second; nan where nothing is finished."""
    (first, rows), (second, columns) = results.suite.vary.items()
    grid = np.full((len(rows), len(columns)), np.nan)
    measured = results.comparable(spec, setting).rows
    for row in results.suite.expanded_rows():
        if row.base == base and row.name in measured:
            place = list(rows).index(row.varied[first]), list(columns).index(row.varied[second])
            grid[place] = measured[row.name][0].mean
    return grid


def _name_axes(axes: Axes, results: Results) -> None:
    for (key, values), axis in zip(results.suite.vary.items(), (axes.yaxis, axes.xaxis), strict=True):
        axis.set_ticks(range(len(values)), [in_figure(str(value)) for value in values])
        axis.set_label_text(in_figure(results.suite.symbols.get(key, key)))


def default_place(results: Results, base: str, setting: str) -> tuple[int, int] | None:
    """Find the recipe's own pair of values; None if it does not set them."""
    suite = results.suite
    recipe = dict(leaves(laid_over(laid_over(suite.common, suite.settings[setting]), suite.rows[base])))
    place = [
        list(values).index(recipe[key]) for key, values in suite.vary.items() if recipe.get(key) in values
    ]
    return (place[0], place[1]) if len(place) == 2 else None


def draw_confusion(results: Results, spec: FigureSpec) -> Figure:
    """Draw confusion after the last step as shares of the true class: rare classes are as visible as any."""
    shown = [
        (setting, row, record.last)
        for setting in results.figure_settings(spec)
        for row in results.figure_rows(spec, setting)
        if (record := results.figure_record(spec, row, setting)) is not None and record.last.confusion
    ]
    figure, axes = plots.panels(len(shown), height=2.75)
    n_settings = len({setting for setting, _, _ in shown})
    for panel, (setting, row, step) in zip(axes, shown, strict=True):
        counts = np.array(step.confusion, dtype=float)
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        texts = [[f"{100 * share:.0f}" for share in row] for row in shares.tolist()]
        _draw_cells(panel, shares, "Blues", (0, 1), texts if len(texts) <= MAX_NUMBERED else ())
        _name_classes(panel, step)
        panel.set_title(in_figure(f"{row}, {setting}" if n_settings > 1 else row))
    return figure


def _name_classes(axes: Axes, step: StepRecord) -> None:
    n = len(step.classes)
    names = [in_figure(shortened(name, 14)) for name in step.classes] if n <= MAX_NAMED else []
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted (%)", ylabel="true")
    if 0 < step.n_old < n:  # between old classes and those of the last step
        for line in (axes.axhline, axes.axvline):
            line(step.n_old - 0.5, color="#D55E00", linewidth=1)


def _draw_cells(
    axes: Axes, values: np.ndarray, colors: str, limits: tuple[float, float], texts: Sequence[Sequence[str]]
) -> AxesImage:
    """Draw a colored cell for each value, with its text, white where the cell is dark."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_facecolor("#e5e7eb")  # of cells without a value
    image = axes.imshow(values, cmap=colors, vmin=limits[0], vmax=limits[1], aspect="equal")
    shades = np.asarray(image.cmap(image.norm(values)))[..., :3] @ [0.299, 0.587, 0.114]
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            color = "white" if shades[i, j] < 0.55 else "black"
            axes.text(j, i, text, color=color, ha="center", va="center", fontsize=plots.SMALL)
    return image


KINDS: dict[str, Callable[[Results, FigureSpec], Figure]] = {
    "curves": draw_curves,
    "line": draw_line,
    "heatmap": draw_heatmap,
    "confusion": draw_confusion,
    "tsne": draw_tsne,
    "tradeoff": draw_tradeoff,
}
