"""A suite's figures: what is drawn is what was measured, and what cannot be drawn says why."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from safetensors.numpy import save_file

from medcil.errors import DamagedFile
from medcil.experiments.suite import OF_A_STEP, FigureSpec
from medcil.report.figures import (
    default_place,
    draw_confusion,
    draw_curves,
    draw_figures,
    draw_heatmap,
    draw_line,
)
from medcil.report.plots import PER_STEP, STYLE, NotDrawn, look
from medcil.report.results import read_results
from medcil.report.scatter import aligned, draw_tsne, embed_aligned, read_features
from medcil.report.suite import render_page, write_results

from .fake_results import suite_of, write_fake_results

VARY = {"method.margin_weight": [0.1, 0.2, 0.3], "method.distillation_weight": [0.1, 0.5]}


def spec_of(kind: str, **options: Any) -> FigureSpec:
    return FigureSpec.model_validate({"kind": kind, "title": "t", "file": "f", **options})


def varied(
    tmp_path: Path, vary: dict[str, list[Any]], states: dict[Any, Any] | None = None, **changes: Any
) -> Path:
    suite = suite_of(rows={"balanced": {"method": {"margin_weight": 0.2, "distillation_weight": 0.1}}})
    suite |= {"vary": vary, "symbols": {"method.margin_weight": "λ_d"}, "settings": {"3-2": {}}}
    return write_fake_results(tmp_path, suite | {"published": {}, "figures": []} | changes, states=states)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_curves_are_means_with_a_band_of_deviations(tmp_path: Path) -> None:
    results = read_results(write_fake_results(tmp_path))
    figure = draw_curves(results, spec_of("curves", metric="micro", settings=["3-2"]))
    (axes,) = figure.axes
    steps = [
        [100 * step.micro for step in record.steps] for record in results.records("balanced", "3-2").values()
    ]
    line = axes.get_lines()[3]
    np.testing.assert_allclose(line.get_ydata(), np.mean(steps, axis=0))
    outline = axes.collections[3].get_paths()[0].vertices
    for x, values in zip((1, 2, 3), np.transpose(steps), strict=True):
        at = outline[np.isclose(outline[:, 0], x), 1]
        half = np.std(values, ddof=1)
        np.testing.assert_allclose([at.min(), at.max()], [np.mean(values) - half, np.mean(values) + half])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1\n(3)", "2\n(5)", "3\n(7)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "iCaRL",
        "iCaRL + $L_{dm}$",
        "$λ_{d}$ & 5% of #1",
        "balanced",
    ]


def test_twelve_rows_are_told_apart_without_color() -> None:
    shapes = [
        (look(i)["marker"], look(i)["linestyle"], look(i)["markerfacecolor"] == "white") for i in range(14)
    ]
    assert len(set(shapes)) == 14
    pairs = [(look(i)["color"], shape) for i, shape in enumerate(shapes)]
    assert len(set(pairs)) == 14


def test_a_row_looks_the_same_in_every_figure(tmp_path: Path) -> None:
    results = read_results(write_fake_results(tmp_path))
    figure = draw_curves(results, spec_of("curves", rows=["balanced"], settings=["3-1"]))
    assert to_hex(figure.axes[0].get_lines()[0].get_color()) == look(3)["color"].lower()


def test_nothing_is_set_smaller_than_seven_points(tmp_path: Path) -> None:
    results = read_results(varied(tmp_path, VARY))
    with matplotlib.rc_context(STYLE):
        figures = [
            draw_heatmap(results, spec_of("heatmap")),
            draw_confusion(results, spec_of("confusion", rows=())),
        ]
        for figure in figures:
            figure.draw_without_rendering()
            sizes = [t.get_fontsize() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]
            assert min(sizes) >= 7
            assert figure.get_figwidth() in (3.4, 7.0)


def test_the_heat_map_shows_the_means_and_frames_the_recipe(tmp_path: Path) -> None:
    folder = varied(tmp_path, VARY, figures=[{"kind": "heatmap", "title": "t", "file": "heat"}])
    results = read_results(folder)
    figure = draw_heatmap(results, spec_of("heatmap", metric="acc_micro"))
    means = [
        results.summary(f"balanced, λ_d = {a}, method.distillation_weight = {b}", "3-2", "acc_micro").mean
        for a in VARY["method.margin_weight"]
        for b in VARY["method.distillation_weight"]
    ]
    assert texts(figure)[:6] == [f"{mean:.1f}" for mean in means]
    bold = [text.get_text() for text in figure.axes[0].texts if text.get_weight() == "bold"]
    assert bold == [f"{max(means):.1f}"]
    assert default_place(results, "balanced", "3-2") == (1, 0)
    frames = [patch.get_xy() for patch in figure.axes[0].patches]
    assert frames == [(-0.5, 0.5)]
    assert figure.axes[0].get_ylabel() == "$λ_{d}$"
    assert figure.axes[1].get_ylabel() == "Acc (%)"


def one_unfinished(value: float, *orders: int) -> dict[tuple[str, str, int], tuple[str, str]]:
    return {(f"balanced, method.alpha = {value}", "3-2", order): ("failed", "it broke") for order in orders}


@pytest.mark.parametrize(
    ("states", "orders"),
    [
        ({}, "Mean over class orders 0, 1, 2."),
        (one_unfinished(0.1, 1), "Mean over class orders 0, 1, 2."),
        (one_unfinished(0.1, 1, 2) | one_unfinished(0.5, 0, 1), "Mean over class orders 0."),
    ],
)
def test_a_line_says_over_which_orders_it_is(tmp_path: Path, states: dict[Any, Any], orders: str) -> None:
    figures = [{"kind": "line", "title": "t", "file": "f", "metric": "acc_micro"}]
    folder = varied(tmp_path, {"method.alpha": [0.1, 0.5]}, states=states, figures=figures)
    (drawn,), _ = draw_figures(read_results(folder))
    assert drawn.caption.startswith(f"{orders} The band")


def test_means_over_different_orders_are_not_drawn(tmp_path: Path) -> None:
    states = one_unfinished(0.1, 0) | one_unfinished(0.5, 1, 2)
    figures = [{"kind": "line", "title": "t", "file": "f", "metric": "acc_micro"}]
    folder = varied(tmp_path, {"method.alpha": [0.1, 0.5]}, states=states, figures=figures)
    figure = draw_line(read_results(folder), spec_of("line"))
    assert list(figure.axes[0].get_lines()[0].get_xdata()) == [0.1]
    (drawn,), _ = draw_figures(read_results(folder))
    assert "lack some of these class orders: balanced, method.alpha = 0.5." in drawn.caption


def test_orders_are_said_panel_by_panel_where_they_differ(tmp_path: Path) -> None:
    settings = {"3-2": {}, "5-1": {"scenario": {"order": "seed-1"}}}
    figures = [{"kind": "heatmap", "title": "t", "file": "f"}]
    (drawn,), _ = draw_figures(read_results(varied(tmp_path, VARY, settings=settings, figures=figures)))
    assert drawn.caption.startswith(
        "3-2: mean over class orders 0, 1, 2. 5-1: mean over class orders seed-1. Brighter"
    )


def test_text_is_readable_on_its_cell(tmp_path: Path) -> None:
    figure = draw_heatmap(read_results(varied(tmp_path, VARY)), spec_of("heatmap"))
    image = figure.axes[0].images[0]
    for text in figure.axes[0].texts:
        x, y = text.get_position()
        cell = np.array(image.cmap(image.norm(image.get_array()[int(y), int(x)])))[:3]
        ink = np.ones(3) if text.get_color() == "white" else np.zeros(3)
        weights = np.array([0.2126, 0.7152, 0.0722])
        light, dark = sorted(
            (
                float(weights @ np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4))
                for c in (cell, ink)
            ),
            reverse=True,
        )
        assert (light + 0.05) / (dark + 0.05) > 3  # the contrast asked of large or bold print, at least


def test_a_line_over_one_setting(tmp_path: Path) -> None:
    results = read_results(varied(tmp_path, {"method.alpha": [0.1, 0.5, 0.9]}))
    figure = draw_line(results, spec_of("line", metric="forgetting"))
    (line,) = figure.axes[0].get_lines()
    means = [
        results.summary(f"balanced, method.alpha = {a}", "3-2", "forgetting").mean for a in (0.1, 0.5, 0.9)
    ]
    np.testing.assert_allclose(line.get_xdata(), [0.1, 0.5, 0.9])
    np.testing.assert_allclose(line.get_ydata(), means)
    assert figure.axes[0].get_ylabel() == "Fgt (points)"


def test_confusion_shows_shares_of_the_true_class(tmp_path: Path) -> None:
    results = read_results(write_fake_results(tmp_path))
    spec = spec_of("confusion", rows=["balanced"], settings=["3-2"], order=1)
    figure = draw_confusion(results, spec)
    counts = np.array(results.records("balanced", "3-2")[1].last.confusion)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert texts(figure) == [f"{100 * share:.0f}" for share in shares.flatten()]


@pytest.mark.parametrize(
    ("draw", "options", "why"),
    [
        (draw_line, {}, "one key under `vary`"),
        (draw_heatmap, {}, "two keys under `vary`"),
        (draw_tsne, {"settings": ["3-2"]}, "no run of it is finished and has features"),
        (draw_tsne, {}, "one setting"),
        (draw_confusion, {"order": 7}, "none of its runs"),
    ],
)
def test_what_cannot_be_drawn_says_why(tmp_path: Path, draw: Any, options: dict[str, Any], why: str) -> None:
    results = read_results(write_fake_results(tmp_path))
    with pytest.raises(NotDrawn, match=why):
        draw(results, spec_of("curves", **options))


def test_a_figure_without_runs_leaves_the_others(tmp_path: Path) -> None:
    figures = [
        {"kind": "heatmap", "title": "Heat", "file": "heat"},
        {"kind": "curves", "title": "Accuracy", "file": "accuracy"},
    ]
    folder = write_fake_results(tmp_path, suite_of(figures=figures))
    (folder / "figures").mkdir()
    for name in ("heat.pdf", "heat.svg", "mine.pdf"):
        (folder / "figures" / name).write_text("of earlier runs")
    drawn, files = draw_figures(read_results(folder))
    assert drawn[0].why_not == "a heat map needs two keys under `vary`"
    assert [file.name for file in files] == ["accuracy.pdf", "accuracy.svg"]
    assert "a heat map needs two keys under <code>vary</code>" in render_page(read_results(folder), drawn, [])
    left = {path.name for path in (folder / "figures").iterdir()}
    assert left == {"accuracy.pdf", "accuracy.svg", "mine.pdf"}


def test_every_metric_a_figure_may_name_has_its_words() -> None:
    assert set(PER_STEP) == set(OF_A_STEP)


def rotated(points: np.ndarray) -> np.ndarray:
    turn = np.array([[np.cos(2.0), -np.sin(2.0)], [np.sin(2.0), np.cos(2.0)]])
    return 0.3 * (points * [-1, 1]) @ turn + [5.0, -8.0]


def test_a_turned_mirrored_and_scaled_copy_is_laid_onto_its_original() -> None:
    points = np.random.default_rng(0).normal(size=(50, 2)) * [3, 1] + [2, 1]
    np.testing.assert_allclose(aligned(rotated(points), points), points, atol=1e-9)


def test_panels_are_laid_onto_the_first() -> None:
    random = np.random.default_rng(1)
    centers = 12 * random.normal(size=(4, 16))
    labels = np.repeat(np.arange(4), 25)
    first = centers[labels] + random.normal(size=(100, 16))
    basis = np.linalg.qr(random.normal(size=(16, 16)))[0]
    before, after = embed_aligned([first, first @ basis])  # the same features, seen from elsewhere
    means = [np.array([points[labels == c].mean(axis=0) for c in range(4)]) for points in (before, after)]
    width = np.linalg.norm(before.max(axis=0) - before.min(axis=0))
    assert np.linalg.norm(means[0] - means[1], axis=1).max() < 0.1 * width


def features_suite(tmp_path: Path) -> Path:
    spec = {
        "kind": "tsne",
        "title": "Features",
        "file": "tsne",
        "settings": ["3-2"],
        "rows": ["iCaRL", "balanced"],
    }
    folder = write_fake_results(tmp_path, suite_of(figures=[spec]))
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(7), 6)
    runs = json.loads((folder / "runs.json").read_text())["runs"]
    for run in runs:
        row, setting, order = run["places"][0]
        if row in ("iCaRL", "balanced") and setting == "3-2" and order == 0:
            vectors = (np.eye(7)[labels] * 8 + random.normal(size=(42, 7))).astype(np.float16)
            write_features(folder / run["path"], vectors, labels)
    return folder


def write_features(run: Path, vectors: np.ndarray, labels: np.ndarray, first_image: int = 0) -> None:
    names = json.loads((run / "metrics.json").read_text())["class_names"]
    images = np.arange(len(labels)) + first_image
    about = json.dumps({"class_names": names, "n_old": 5})
    tensors = {"features": vectors, "labels": labels, "images": images}
    save_file(tensors, run / "features.safetensors", {"medcil": about})


def test_features_are_drawn(tmp_path: Path) -> None:
    folder = features_suite(tmp_path)
    results = read_results(folder)
    figure = draw_tsne(results, results.suite.figures[0])
    assert [axes.get_title() for axes in figure.axes] == ["iCaRL", "balanced"]
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in figure.axes}) == 1
    for axes in figure.axes:
        assert [line.get_marker() for line in axes.get_lines()] == ["o"] * 5 + ["^"] * 2
        assert [len(line.get_xdata()) for line in axes.get_lines()] == [6] * 7
    first = {path: path.read_bytes() for path in write_results(folder)}
    assert {path: path.read_bytes() for path in write_results(folder)} == first


def test_features_of_other_images_are_not_laid_side_by_side(tmp_path: Path) -> None:
    folder = features_suite(tmp_path)
    files = sorted(tmp_path.glob("runs/*/features.safetensors"))
    features = read_features(files[1], folder)
    write_features(files[1].parent, features.vectors.astype(np.float16), features.labels, first_image=1)
    results = read_results(folder)
    with pytest.raises(NotDrawn, match="of other images"):
        draw_tsne(results, results.suite.figures[0])
    damaged = files[0]
    damaged.write_bytes(b"not features")
    with pytest.raises(DamagedFile, match=r"Delete .*features\.safetensors"):
        draw_tsne(results, results.suite.figures[0])
    (drawn,), files = draw_figures(results)
    name = f"../runs/{damaged.parent.name}/features.safetensors"
    said = f"Delete {name}, which cannot be read, and done.json, then run `medcil bench` again"
    assert drawn.why_not == said
    assert files == []


@pytest.mark.parametrize("label", ["$5 $x_{", "_hidden", "a label " * 20])
def test_any_name_of_a_row_can_be_drawn(tmp_path: Path, label: str) -> None:
    suite = suite_of(rows={label: {}, "b": {}}, published={}, settings={"3-2": {}})
    folder = write_fake_results(tmp_path, suite | {"figures": suite_of()["figures"][:1]})
    (drawn,), files = draw_figures(read_results(folder))
    assert drawn.why_not is None
    assert all(path.stat().st_size > 1000 for path in files)


def test_reports_need_no_torch() -> None:
    check = "import sys, medcil.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
