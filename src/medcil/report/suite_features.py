"""Features of test images in the plane (t-SNE), side by side, so that the panels can be compared.

A panel's positions mean nothing by themselves: neither their scale nor how they are turned. So each panel
starts from the one before, with the same images, and is then laid onto it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from medcil.errors import DamagedFile
from medcil.experiments.suite import FigureSpec
from medcil.report.canvas import add_legend, panels
from medcil.report.cells import NotDrawn, Results, figure_rows, figure_settings
from medcil.report.plots import PALETTE
from medcil.report.suite_matrices import chosen_run
from medcil.report.typeset import in_figure
from medcil.storage.atomic import sha256, write_json

FEATURES = "features.safetensors"
COLORS = (*PALETTE, "#000000")
PERPLEXITY = 30


@dataclass(frozen=True)
class Features:
    """What bench left in a run directory: embeddings of some test images after the last step."""

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
    """`folder`: of the suite's results, where `done.json` says that nothing is left to do."""
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
    """Kept beside the figure: it takes a while, and someone may want to draw them otherwise."""
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
    """Those of an earlier call; None where there are none of these features, or the file is damaged."""
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
    """The same images in every panel, in the same order."""
    positions: list[np.ndarray] = []
    for vectors in panels_of_vectors:
        before = positions[-1] if positions else None
        points = _tsne(vectors, before)
        positions.append(points if before is None else aligned(points, before))
    return positions


def aligned(points: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """Turned, mirrored, moved and scaled to lie on the others as well as can be (Procrustes)."""
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
    """Corners that hold all panels' points: a place is the same place in each of them."""
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
