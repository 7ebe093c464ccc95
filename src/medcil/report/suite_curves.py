"""Lines over the steps, or over the values of one setting; the band is the deviation over class orders."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from medcil.experiments.suite import FigureSpec
from medcil.metrics import mean_and_deviation
from medcil.report.canvas import Look, add_legend, look, looks, panels
from medcil.report.cells import NotDrawn, Results, averaged, figure_rows, figure_settings, varied_summaries
from medcil.report.read import SUMMARY
from medcil.report.typeset import in_figure

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
    known = looks(results)
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
    """One varied key against a metric of the whole run."""
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


def metric_label(results: Results, metric: str) -> str:
    """As the table calls it, with its unit."""
    named = next((name for name, key in results.suite.metrics.items() if key == metric), SUMMARY[metric])
    return f"{named} ({'points' if metric.startswith('forgetting') else '%'})"


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
    """Numbers stand where they are, anything else side by side."""
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
    """Steps, and how many classes have been seen then: the same for all rows of a setting."""
    runs = [run for row in results.rows(setting) for run in results.records(row, setting).values()]
    if not runs:
        return
    steps = max(runs, key=lambda run: len(run.steps)).steps
    ticked = steps[:: -(-len(steps) // MAX_TICKS)]
    axes.set_xticks(
        [step.step for step in ticked], [f"{step.step}\n({len(step.classes)})" for step in ticked]
    )
    axes.set_xlabel("Step (classes seen)")
