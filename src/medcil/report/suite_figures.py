"""The figures of a suite, as PDF and SVG: the same runs give the same bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.report.canvas import SINGLE, SUITE_STYLE, rendered
from medcil.report.cells import (
    NotDrawn,
    Order,
    Results,
    figure_rows,
    figure_settings,
    first_line,
    varied_summaries,
)
from medcil.report.read import ARCHIVE
from medcil.report.result_tables import averages_seeds
from medcil.report.suite_curves import draw_curves, draw_line
from medcil.report.suite_features import draw_tsne
from medcil.report.suite_matrices import draw_confusion, draw_heatmap
from medcil.report.suite_tradeoff import draw_tradeoff, plane
from medcil.storage.atomic import write_bytes

KINDS: dict[str, Callable[[Results, FigureSpec], Figure]] = {
    "curves": draw_curves,
    "line": draw_line,
    "heatmap": draw_heatmap,
    "confusion": draw_confusion,
    "tsne": draw_tsne,
    "tradeoff": draw_tradeoff,
}
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
    """What the page shows of each, and the files written into figures/."""
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
    """Each once."""
    return ", ".join(dict.fromkeys(rows))


def _orders_drawn(results: Results, spec: FigureSpec) -> str:
    """Which class orders the values are means over; panel by panel where these differ."""
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
