"""Draw points of a plane: test images by t-SNE, and rows as a trade-off of two metrics.

Scale and rotation of t-SNE are arbitrary. To make panels comparable, each starts from the one before, with
the same images, and is then aligned with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.linalg import orthogonal_procrustes

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.report.markup import PALETTE, in_figure
from medcil.report.plots import SMALL, Look, NotDrawn, add_legend, look, panels
from medcil.report.results import Results

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


def draw_tsne(results: Results, spec: FigureSpec) -> Figure:
    (setting, *others) = results.figure_settings(spec) or [""]
    if others:
        raise NotDrawn("a t-SNE shows one setting: name it under `settings`")
    features = {
        row: read_features(record.path / FEATURES, results.folder)
        for row in results.figure_rows(spec, setting)
        if (record := results.figure_record(spec, row, setting)) is not None
        and (record.path / FEATURES).is_file()
    }
    if not features:
        raise NotDrawn("no run of it is finished and has features of its test images yet")
    first = next(iter(features.values()))
    for row, other in features.items():
        if not np.array_equal(other.images, first.images) or other.class_names != first.class_names:
            raise NotDrawn(f"the features of {row} are of other images than those of the first panel")
    looks = [_class_look(c, first) for c in range(len(first.class_names))]
    figure, axes = panels(len(features), height=2.35 if len(features) > 2 else 3.2, legend=first.class_names)
    positions = embed_aligned([each.vectors for each in features.values()])
    points_of_all = np.concatenate(positions)
    (left, bottom), (right, top) = points_of_all.min(axis=0), points_of_all.max(axis=0)
    for panel, points, (row, of) in zip(axes, positions, features.items(), strict=True):
        panel.grid(visible=False)
        panel.spines[:].set_visible(True)
        for c, shown in enumerate(looks):
            panel.plot(*points[of.labels == c].T, **shown | {"markersize": 2.6, "alpha": 0.75})
        panel.set(title=in_figure(row), xticks=[], yticks=[], aspect="equal")
        panel.set(xlim=(left - 2, right + 2), ylim=(bottom - 2, top + 2))
    add_legend(figure, looks, first.class_names)
    return figure


def _class_look(c: int, features: Features) -> dict[str, Any]:
    marker = "o" if c < features.n_old else "^"
    return {"linestyle": "", "marker": marker, "color": COLORS[c % len(COLORS)], "markeredgewidth": 0}


def read_features(file: Path, folder: Path) -> Features:
    """Read the features; `folder` is that of the suite's results, named in the error."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            about = json.loads(tensors.metadata()["medcil"])
            return Features(
                vectors=tensors.get_tensor("features").astype(np.float64),
                labels=tensors.get_tensor("labels").astype(int),
                images=tensors.get_tensor("images").astype(int),
                class_names=tuple(about["class_names"]),
                n_old=int(about["n_old"]),
            )
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DamagedFile(
            f"Delete {file}, which cannot be read, and {folder}/done.json, then run `medcil bench` again.\n"
            f"{error!r}"
        ) from None


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
    rotation, _ = orthogonal_procrustes(centered, target)
    scale = np.linalg.norm(target) / max(float(np.linalg.norm(centered)), 1e-12)
    moved: np.ndarray = scale * centered @ rotation + onto.mean(axis=0)
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


BOUND = {"marker": "*", "markersize": 7.0}  # no row has this marker elsewhere
INK, GRAY = "#111827", "#6B7280"


def draw_tradeoff(results: Results, spec: FigureSpec) -> Figure:
    points = {
        setting: {row: (horizontal.mean, vertical.mean) for row, (horizontal, vertical) in rows.items()}
        for setting in results.figure_settings(spec)
        if (rows := results.comparable(spec, setting).rows)
    }
    looks: dict[str, Look] = {}
    for i, row in enumerate(row.name for row in results.suite.expanded_rows()):
        if any(row in places for places in points.values()):
            is_bound = any(results.is_upper_bound(row, setting) for setting in points)
            looks[row] = {**look(i), "linestyle": "", **(BOUND if is_bound else {})}
    numbers = {row: str(n) for n, row in enumerate(looks, start=1)}
    labels = [f"{numbers[row]}: {row}" for row in looks]
    figure, axes = panels(len(points), height=2.7, legend=labels)
    add_legend(figure, list(looks.values()), labels)
    x, y = (results.metric_label(metric) for metric in results.figure_metrics(spec))
    for panel, (setting, places) in zip(axes, points.items(), strict=True):
        for row, point in places.items():
            panel.plot(*point, **looks[row], zorder=3)
        panel.set(xlabel=in_figure(x), ylabel=in_figure(y))
        panel.grid(visible=True, axis="both")
        panel.margins(0.09)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        if len(points) > 1:
            panel.set_title(in_figure(setting))
    figure.draw_without_rendering()  # numbers need to know how far apart points are on paper,
    figure.set_layout_engine("none")  # and that they stay there
    for panel, places in zip(axes, points.values(), strict=True):
        _number(panel, {numbers[row]: point for row, point in places.items()})
    return figure


def _number(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each marker's number beside it; a thin line leads to one that had to go further."""
    from adjustText import adjust_text

    style: dict[str, Any] = {"fontsize": SMALL, "color": INK, "weight": "bold", "zorder": 4}
    texts = [axes.text(x, y, number, **style) for number, (x, y) in points.items()]
    x, y = zip(*points.values(), strict=True)
    line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.5, "shrinkB": 2.5}
    forces = {"force_static": (0.2, 0.3), "force_text": (0.2, 0.3), "force_pull": (0, 0)}
    adjust_text(texts, x, y, ax=axes, expand=(1.3, 1.4), iter_lim=1000, arrowprops=line, **forces)
