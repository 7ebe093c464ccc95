"""Rows as points of a plane: they stand where the records say, and every number can be read."""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from medcil.report.figures import draw_figures
from medcil.report.plots import STYLE, NotDrawn, look
from medcil.report.results import read_results
from medcil.report.scatter import draw_tradeoff
from medcil.report.suite import render_page

from .fake_results import metrics_of, suite_of, write_fake_results

TRADEOFF = {"kind": "tradeoff", "title": "t", "file": "f", "x": "Acc", "y": "Balanced", "settings": ["3-2"]}
BROKEN = ("failed", "it broke")


def write_tradeoff(
    out: Path,
    spec: Mapping[str, Any] = TRADEOFF,
    states: Mapping[Any, Any] | None = None,
    metrics: Mapping[Any, Any] | None = None,
    **changes: Any,
) -> Path:
    suite = suite_of(figures=[dict(spec)], published={}, **changes)
    return write_fake_results(out, suite, states=states, metrics=metrics)


def drawn(folder: Path) -> Figure:
    results = read_results(folder)
    with matplotlib.rc_context(STYLE):
        return draw_tradeoff(results, results.suite.figures[0])


def points(figure: Figure, panel: int = 0) -> dict[str, tuple[float, float]]:
    """By the number beside them."""
    markers = [tuple(line.get_xydata()[0]) for line in figure.axes[panel].get_lines()]
    numbers = [text.get_text() for text in figure.axes[panel].texts if text.get_text()]
    return dict(zip(numbers, markers, strict=True))


def names(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def recorded(folder: Path, row: str, setting: str, order: int, metric: str) -> float:
    """From the files alone: of an order the mean over its seeds."""
    values = [
        json.loads((folder / run["path"] / "metrics.json").read_text())[metric]
        for run in json.loads((folder / "runs.json").read_text())["runs"]
        if run["places"][0][:3] == [row, setting, order] and run["state"] == "finished"
    ]
    return 100 * mean(values)


def test_a_row_stands_at_its_means(tmp_path: Path) -> None:
    folder = write_tradeoff(tmp_path)
    figure = drawn(folder)
    for number, row in zip("1234", suite_of()["rows"], strict=True):
        expected = [
            mean(recorded(folder, row, "3-2", order, metric) for order in (0, 1, 2))
            for metric in ("acc_micro", "acc_balanced")
        ]
        assert points(figure)[number] == pytest.approx(expected)
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("Acc (%)", "Balanced (%)")
    said = ("iCaRL", "iCaRL + $L_{dm}$", "$λ_{d}$ & 5% of #1", "balanced")
    assert names(figure) == [f"{i}: {name}" for i, name in enumerate(said, start=1)]
    shown = [line.get_marker() for line in figure.axes[0].get_lines()]
    assert shown == [look(i)["marker"] for i in range(4)]


def test_seeds_of_an_order_are_averaged_first(tmp_path: Path) -> None:
    folder = write_tradeoff(tmp_path, seeds=[0, 1], states={("iCaRL", "3-2", 2, 1): BROKEN})
    expected = [
        mean(recorded(folder, "iCaRL", "3-2", order, metric) for order in (0, 1, 2))
        for metric in ("acc_micro", "acc_balanced")
    ]
    assert points(drawn(folder))["1"] == pytest.approx(expected)
    (figure,), _ = draw_figures(read_results(folder))
    assert figure.caption.startswith("Mean over class orders 0, 1, 2. Each point")


def test_rows_can_be_chosen_and_are_numbered(tmp_path: Path) -> None:
    figure = drawn(write_tradeoff(tmp_path, TRADEOFF | {"rows": ["balanced", "iCaRL"], "y": "Fgt"}))
    assert names(figure) == ["1: iCaRL", "2: balanced"]
    assert set(points(figure)) == {"1", "2"}
    assert figure.axes[0].get_ylabel() == "Fgt (points)"


def test_every_setting_has_a_panel_and_a_row_one_number(tmp_path: Path) -> None:
    states = {("iCaRL", "3-2", order): BROKEN for order in (0, 1, 2)}
    folder = write_tradeoff(tmp_path, TRADEOFF | {"settings": []}, states)
    figure = drawn(folder)
    assert [axes.get_title() for axes in figure.axes] == ["3-2", "3-1"]
    assert [set(points(figure, i)) for i in (0, 1)] == [{"2", "3", "4"}, {"1", "2", "3", "4"}]
    expected = mean(recorded(folder, "balanced", "3-1", order, "acc_micro") for order in (0, 1, 2))
    assert points(figure, 1)["4"][0] == pytest.approx(expected)
    assert figure.get_figwidth() == 7.0


def test_a_row_over_fewer_orders_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    folder = write_tradeoff(tmp_path, states={("iCaRL + L_dm", "3-2", 1): BROKEN})
    assert names(drawn(folder))[1] == "2: $λ_{d}$ & 5% of #1"
    results = read_results(folder)
    (figure,), files = draw_figures(results)
    assert figure.caption.endswith("Left out, for they lack some of these class orders: iCaRL + L_dm.")
    assert [file.name for file in files] == ["f.pdf", "f.svg"]
    assert "they lack some of these class orders: iCaRL + L<sub>dm</sub>" in render_page(
        results, [figure], []
    )


def test_upper_bounds_are_stars_over_the_orders_of_the_methods(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"a": {}, "joint": {"scenario": {"cumulative": True}}, "b": {}}
    folder = write_tradeoff(tmp_path, states={(row, "3-2", 1): BROKEN for row in "ab"}, rows=rows)
    figure = drawn(folder)
    assert [line.get_marker() == "*" for line in figure.axes[0].get_lines()] == [False, True, False]
    handles = [handle.get_marker() for handle in figure.legends[0].legend_handles]  # type: ignore[union-attr]
    assert [marker == "*" for marker in handles] == [False, True, False]
    expected = mean(recorded(folder, "joint", "3-2", order, "acc_micro") for order in (0, 2))
    assert points(figure)["2"][0] == pytest.approx(expected)
    (spec,), _ = draw_figures(read_results(folder))
    assert spec.caption.startswith("Mean over class orders 0, 2.")
    assert "*" not in {look(i)["marker"] for i in range(50)}


def test_without_finished_runs_nothing_is_drawn(tmp_path: Path) -> None:
    states = {(row, "3-2", order): BROKEN for row in suite_of()["rows"] for order in (0, 1, 2)}
    with pytest.raises(NotDrawn, match="none of its runs is finished yet"):
        drawn(write_tradeoff(tmp_path, states=states))


def crowded(tmp_path: Path, spread: float) -> Path:
    """Fifteen rows with long names, most of them close to each other."""
    random = np.random.default_rng(0)
    rows: dict[str, Any] = {f"row {i} of those that have a long name": {} for i in range(1, 16)}
    metrics = {}
    for i, row in enumerate(rows):
        x, y = 0.7 + spread * random.standard_normal(2) + (0.1 if i == 0 else 0)
        metrics |= {
            (row, "3-2", order): metrics_of(0.8, order) | {"acc_micro": x, "acc_balanced": y}
            for order in (0, 1, 2)
        }
    settings = {"3-2": {"scenario": {"base": 3, "increment": 2}}}
    return write_tradeoff(tmp_path, metrics=metrics, rows=rows, settings=settings)


@pytest.mark.parametrize("spread", [0.02, 0.004])
def test_no_number_covers_another_or_leaves_the_figure(tmp_path: Path, spread: float) -> None:
    figure = drawn(crowded(tmp_path, spread))
    (axes,) = figure.axes
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text()]
    assert len(boxes) == 15
    for one, other in combinations(boxes, 2):
        assert min(one.x1, other.x1) <= max(one.x0, other.x0) or min(one.y1, other.y1) <= max(
            one.y0, other.y0
        )
    middles = axes.transData.transform(list(points(figure).values()))
    frame = axes.get_window_extent()
    for box in boxes:
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert not any(box.contains(x, y) for x, y in middles)
    legend = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= legend.y0 < legend.y1 < frame.y0
    assert figure.get_figwidth() == 3.4
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 7


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    folder = crowded(tmp_path, 0.01)
    first, files = draw_figures(read_results(folder))
    before = [file.read_bytes() for file in files]
    again, _ = draw_figures(read_results(folder))
    assert [file.name for file in files] == ["f.pdf", "f.svg"]
    assert [file.read_bytes() for file in files] == before
    assert [each.svg for each in again] == [each.svg for each in first] == before[1:]
