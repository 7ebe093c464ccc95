"""Draw points of a plane: test images by t-SNE, and rows as a trade-off of two metrics.

Scale and rotation of t-SNE are arbitrary. To make panels comparable, each starts from the one before, with
the same images, and is then aligned with it.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.report.markup import PALETTE, in_figure
from medcil.report.plots import LEGEND_LINE, SMALL, Look, add_legend, looks, panels
from medcil.report.suite.results import (
    NotDrawn,
    Order,
    Results,
    Summary,
    chosen_run,
    figure_rows,
    figure_settings,
    metric_label,
    most_complete,
)
from medcil.storage.atomic import sha256, write_json

FEATURES = "features.safetensors"
COLORS = (*PALETTE, "#000000")
PERPLEXITY = 30


@dataclass(frozen=True)
class Features:
    """Embeddings of some test images after the last step, as `medcil bench` stores them in a run."""

    vectors: np.ndarray
    labels: np.ndarray
    images: np.ndarray  # their numbers in the test set
    class_names: tuple[str, ...]
    n_old: int
    digest: str


def draw_tsne(results: Results, spec: FigureSpec) -> Figure:
    (setting, *others) = figure_settings(results, spec) or [""]
    if others:
        raise NotDrawn("a t-SNE shows one setting: name it under `settings`")
    found = {
        row: read_features(record.path / FEATURES, results.folder)
        for row in figure_rows(results, spec, setting)
        if (record := chosen_run(results, spec, row, setting)) is not None
        and (record.path / FEATURES).is_file()
    }
    if not found:
        raise NotDrawn("no run of it is finished and has features of its test images yet")
    first = next(iter(found.values()))
    for row, features in found.items():
        if not np.array_equal(features.images, first.images) or features.class_names != first.class_names:
            raise NotDrawn(f"the features of {row} are of other images than those of the first panel")
    positions = _positions(found, results.folder / "figures" / f"{spec.file}-positions.json")
    figure, axes = panels(len(found), height=2.35 if len(found) > 2 else 3.2, legend=first.class_names)
    low, high = _square(list(positions.values()))
    for panel, row in zip(axes, found, strict=True):
        _points(panel, positions[row], found[row])
        panel.set(title=in_figure(row), aspect="equal", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    add_legend(figure, [_handle(c, first.n_old) for c in range(len(first.class_names))], first.class_names)
    return figure


def read_features(file: Path, folder: Path) -> Features:
    """Read the features; `folder` is that of the suite's results, named in the error."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load

    try:
        content = file.read_bytes()
        tensors = load(content)
        with safe_open(file, framework="numpy") as opened:
            about = json.loads(opened.metadata()["medcil"])
        return Features(
            vectors=tensors["features"].astype(np.float64),
            labels=tensors["labels"].astype(int),
            images=tensors["images"].astype(int),
            class_names=tuple(about["class_names"]),
            n_old=int(about["n_old"]),
            digest=sha256(content),
        )
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DamagedFile(
            f"Delete {file}, which cannot be read, and {folder}/done.json, then run `medcil bench` again.\n"
            f"{error!r}"
        ) from None


def _positions(found: Mapping[str, Features], file: Path) -> dict[str, np.ndarray]:
    """Compute the positions, or read them from the file beside the figure: t-SNE is slow."""
    digests = {row: features.digest for row, features in found.items()}
    kept = _kept_positions(file, digests, next(iter(found.values())).images)
    if kept is not None:
        return kept
    positions = {
        row: points.round(3)
        for row, points in zip(found, embed_aligned([f.vectors for f in found.values()]), strict=True)
    }
    shown = {row: points.tolist() for row, points in positions.items()}
    write_json(file, {"features": digests, "positions": shown})
    return positions


def _kept_positions(
    file: Path, digests: Mapping[str, str], images: np.ndarray
) -> dict[str, np.ndarray] | None:
    """Read the positions of an earlier call; None if there are none of these features."""
    try:
        kept = json.loads(file.read_bytes())
        is_same = list(kept["features"].items()) == list(digests.items())
        positions = {row: np.array(kept["positions"][row], dtype=float) for row in digests}
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    fits = all(
        points.shape == (len(images), 2) and np.isfinite(points).all() for points in positions.values()
    )
    return positions if is_same and fits else None


def embed_aligned(panels_of_vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Embed each panel, starting from the one before; the images and their order are the same."""
    positions: list[np.ndarray] = []
    for vectors in panels_of_vectors:
        before = positions[-1] if positions else None
        points = _tsne(vectors, before)
        positions.append(points if before is None else aligned(points, before))
    return positions


def aligned(points: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """Rotate, mirror, move and scale points onto others (Procrustes)."""
    centered, target = points - points.mean(axis=0), onto - onto.mean(axis=0)
    left, _, right = np.linalg.svd(centered.T @ target)
    scale = np.linalg.norm(target) / max(float(np.linalg.norm(centered)), 1e-12)
    moved: np.ndarray = scale * centered @ left @ right + onto.mean(axis=0)
    return moved


def _tsne(vectors: np.ndarray, start: np.ndarray | None) -> np.ndarray:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    if start is not None:
        start = start - start.mean(axis=0)
        start = start / max(float(start[:, 0].std()), 1e-12) * 1e-4  # as small as t-SNE wants to start
    tsne = TSNE(
        perplexity=min(PERPLEXITY, (len(unit) - 1) / 3),
        init="pca" if start is None else start.astype(np.float32),
        learning_rate="auto",
        random_state=0,
    )
    with threadpool_limits(1):  # sums over threads come out in another order each time
        points: np.ndarray = tsne.fit_transform(unit.astype(np.float32)).astype(np.float64)
    return points


def _square(panels_of_points: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return corners that enclose the points of all panels."""
    points = np.concatenate(list(panels_of_points))
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    half = 1.06 * float((points.max(axis=0) - points.min(axis=0)).max()) / 2
    return middle - half, middle + half


def _points(axes: Axes, positions: np.ndarray, features: Features) -> None:
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    for c in range(len(features.class_names)):
        x, y = positions[features.labels == c].T
        marker = "o" if c < features.n_old else "^"
        color = COLORS[c % len(COLORS)]
        axes.scatter(x, y, s=7, marker=marker, color=color, alpha=0.75, linewidths=0, rasterized=False)


def _handle(c: int, n_old: int) -> Line2D:
    marker = "o" if c < n_old else "^"
    return Line2D([], [], linestyle="", marker=marker, color=COLORS[c % len(COLORS)], markersize=4.5)


BOUND = "*"  # no row has this marker elsewhere
BOUND_SAID = "upper bound, not ranked"
INK = "#111827"
GRAY = "#6B7280"
COLUMN = 1.7  # inches of the legend
WRAPPED = 23  # characters of a name that fit there


@dataclass(frozen=True)
class Plane:
    """One panel: the means of its rows over the same class orders."""

    points: Mapping[str, tuple[float, float]]
    orders: tuple[Order, ...]
    left_out: tuple[str, ...]
    """Rows that lack some of these orders, whose means would not be comparable."""


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
    known = looks(results.suite)
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
    """Write each marker's number beside it; a thin line leads to one that had to go further."""
    from adjustText import adjust_text

    style: dict[str, Any] = {"fontsize": SMALL, "color": INK, "weight": "bold", "zorder": 4}
    texts = [axes.text(x, y, number, **style) for number, (x, y) in points.items()]
    x, y = zip(*points.values(), strict=True)
    line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.5, "shrinkB": 2.5}
    adjust_text(texts, x, y, ax=axes, expand=(1.25, 1.35), iter_lim=1000, arrowprops=line)


def _add_legend(
    figure: Figure, numbers: Mapping[str, str], marks: Mapping[str, dict[str, Any]], *, has_bounds: bool
) -> None:
    """Add the legend below, in columns; long names are wrapped."""
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
