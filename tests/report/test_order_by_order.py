"""Several seeds of a class order: what tables say of them against numpy and scipy."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from medcil.experiments.suite import FigureSpec
from medcil.report.figures import draw_confusion, draw_curves, draw_figures
from medcil.report.leaderboard import build_leaderboard
from medcil.report.results import Results, read_results
from medcil.report.suite import (
    Table,
    compared_pairs,
    difference_tables,
    order_tables,
    reading,
    rerun_noise,
    setting_table,
    signed,
    write_results,
    write_tables,
)

from .fake_results import metrics_of, suite_of, write_fake_results, write_run

SEEDS = (0, 5)
ROWS = {  # row -> order -> accuracy of each seed
    "plain": [[70.0, 71.0], [64.5, 66.5], [75.0, 72.5]],
    "+ a": [[73.0, 72.0], [66.0, 70.5], [75.0, 76.5]],
    "+ b": [[74.0, 74.5], [70.0, 69.0], [78.0, 77.5]],
    "+ a + b": [[76.0, 74.0], [69.0, 73.0], [80.0, 79.0]],
}
PAIRS = [("+ a", "plain"), ("+ b", "plain"), ("+ a + b", "+ a"), ("+ a + b", "+ b")]


def with_seeds(
    out: Path, *, rows: dict[str, list[list[float]]] = ROWS, states: Any = None, **changes: Any
) -> Path:
    """A suite with these accuracies; forgetting is 100 minus that."""
    suite = suite_of(
        rows={row: {} for row in rows},
        settings={"3-2": {"scenario": {"base": 3, "increment": 2}}},
        orders=list(range(len(next(iter(rows.values()))))),
        seeds=list(SEEDS),
        metrics={"Acc": "acc_micro", "Fgt": "forgetting"},
        published={},
        figures=[],
    )
    metrics = {
        (row, "3-2", order, seed): metrics_of(0.9, order)
        | {"acc_micro": value / 100, "forgetting": 1 - value / 100}
        for row, orders in rows.items()
        for order, values in enumerate(orders)
        for seed, value in zip(SEEDS, values, strict=True)
    }
    return write_fake_results(out, suite | changes, metrics=metrics, states=states)


def interval_of(first: Any, second: Any) -> tuple[float, float]:
    found = scipy.stats.ttest_rel(np.ravel(first), np.ravel(second)).confidence_interval(0.95)
    return pytest.approx(found.low), pytest.approx(found.high)


def first_row(table: Table) -> tuple[str, list[str]]:
    name, cells = next(iter(table.rows.items()))
    return name, [cell.text for cell in cells]


def test_a_cell_is_over_orders_with_their_seeds_averaged_first(tmp_path: Path) -> None:
    results = read_results(with_seeds(tmp_path))
    for row, values in ROWS.items():
        means = np.mean(values, axis=1)
        summary = results.summary(row, "3-2", "acc_micro")
        assert summary.values == pytest.approx(dict(enumerate(means)))
        text = setting_table(results, "3-2").rows[row][0].text
        assert text == f"{means.mean():.1f}±{means.std(ddof=1):.1f}"
    assert results.n_expected("3-2") == 3


def test_the_paired_interval_is_over_orders(tmp_path: Path) -> None:
    results = read_results(with_seeds(tmp_path))
    pairs = compared_pairs(results, "3-2")
    assert pairs == [("+ a + b", row) for row in ("plain", "+ a", "+ b")]
    for row, other in pairs:
        found = results.summary(row, "3-2", "acc_micro").minus(results.summary(other, "3-2", "acc_micro"))
        ours, theirs = (np.mean(ROWS[name], axis=1) for name in (row, other))
        assert list(found.values) == [0, 1, 2]
        assert found.mean == pytest.approx((ours - theirs).mean())
        assert found.interval == interval_of(ours, theirs)


def test_order_by_order_is_over_all_pairs_of_runs(tmp_path: Path) -> None:
    results = read_results(with_seeds(tmp_path, compare=PAIRS))
    table, _ = order_tables(results, "3-2")
    assert list(table.rows) == [f"{row} minus {other}" for row, other in PAIRS]
    for (row, other), cells in zip(PAIRS, table.rows.values(), strict=True):
        ours, theirs = np.array(ROWS[row]), np.array(ROWS[other])
        for cell, (a, b) in zip(cells, ours - theirs, strict=False):
            assert cell.text == f"{signed((a + b) / 2)} ({signed(a)}, {signed(b)})"
        low, high = interval_of(ours, theirs)
        mean = (ours - theirs).mean()
        assert cells[-1].text == f"{signed(mean)} [{signed(low.expected)}, {signed(high.expected)}]"


def test_a_line_shows_the_mean_of_an_order_and_every_seeds_own(tmp_path: Path) -> None:
    accuracy, forgetting = order_tables(read_results(with_seeds(tmp_path, compare=PAIRS)), "3-2")
    assert accuracy.header == ("Acc: Difference (points)", "Order 0", "Order 1", "Order 2", "All")
    name, (*orders, overall) = first_row(accuracy)
    assert name == "+ a minus plain"
    assert orders == ["+2.0 (+3.0, +1.0)", "+2.8 (+1.5, +4.0)", "+2.0 (0.0, +4.0)"]
    low, high = scipy.stats.ttest_1samp([3, 1, 1.5, 4, 0, 4], 0).confidence_interval(0.95)
    assert overall == f"+2.2 [+{low:.1f}, +{high:.1f}]"
    assert first_row(forgetting)[1][0] == "−2.0 (−3.0, −1.0)"


def test_without_named_pairs_the_rows_are_those_of_the_differences(tmp_path: Path) -> None:
    last = read_results(with_seeds(tmp_path / "last"))
    table = order_tables(last, "3-2")[0]
    assert table.header[0] == "Acc: + a + b minus (points)"
    assert list(table.rows) == list(difference_tables(last, "3-2")[0].rows) == ["plain", "+ a", "+ b"]


def test_named_pairs_are_the_lines_of_both_tables_without_seeds_of_one(tmp_path: Path) -> None:
    pairs = [("balanced", "iCaRL"), ("iCaRL + L_dm", "iCaRL")]
    results = read_results(write_fake_results(tmp_path, suite_of(compare=pairs, figures=[])))
    assert compared_pairs(results, "3-2") == pairs
    assert order_tables(results, "3-2") == []
    files = write_tables(results)
    text = files[0].read_text(encoding="utf-8")
    assert (
        "Differences in points, the pairs that the suite names: mean over the class orders that both" in text
    )
    assert "seeds" not in text
    assert "Rerun noise" not in text


def test_rerun_noise_is_pooled_over_rows_and_orders(tmp_path: Path) -> None:
    results = read_results(with_seeds(tmp_path))
    variances = np.var([ROWS[row] for row in ROWS], axis=2, ddof=1)
    assert rerun_noise(results, "3-2", "acc_micro") == pytest.approx(np.sqrt(variances.mean()))
    shown = f"{np.sqrt(variances.mean()):.1f}"
    assert reading(results)[-1].endswith(f": Acc {shown}, Fgt {shown}.")


FAILED = {("+ a", "3-2", 1, 5): ("failed", "it burst")}


def test_where_a_seed_is_lacking_it_is_said_and_the_others_count(tmp_path: Path) -> None:
    results = read_results(with_seeds(tmp_path, compare=PAIRS, states=FAILED))
    means = [72.5, 66.0, 75.75]
    text = setting_table(results, "3-2").rows["+ a"][0].text
    assert text == f"{np.mean(means):.1f}±{np.std(means, ddof=1):.1f} (5 of 6 runs)"
    _, (*orders, overall) = first_row(order_tables(results, "3-2")[0])
    assert orders == ["+2.0 (+3.0, +1.0)", "+1.5 (+1.5, –)", "+2.0 (0.0, +4.0)"]
    assert overall.endswith("(n = 5)")
    found = results.values("+ a", "3-2", "acc_micro").minus(results.values("plain", "3-2", "acc_micro"))
    assert found.interval == interval_of([73, 72, 66, 75, 76.5], [70, 71, 64.5, 75, 72.5])
    variances = [np.var(values, ddof=1) for row in ROWS for values in ROWS[row]]
    del variances[4]  # a single run has none
    assert rerun_noise(results, "3-2", "acc_micro") == pytest.approx(np.sqrt(np.mean(variances)))
    write_tables(results)
    text = (results.folder / "table.md").read_text(encoding="utf-8")
    assert "- + a, 3-2, order 1, seed 5: failed. it burst" in text


def test_a_lacking_order_is_told_from_a_lacking_seed(tmp_path: Path) -> None:
    states = {("+ a", "3-2", 1, seed): ("failed", "it burst") for seed in SEEDS}
    results = read_results(with_seeds(tmp_path, compare=PAIRS, states=states))
    assert setting_table(results, "3-2").rows["+ a"][0].text.endswith("(n = 2, 4 of 6 runs)")
    assert first_row(order_tables(results, "3-2")[0])[1][1] == "–"


def test_nothing_is_said_of_reruns_while_one_seed_is_finished(tmp_path: Path) -> None:
    states = {
        (row, "3-2", order, 5): ("unfinished", "") for row in ROWS for order in range(len(ROWS["plain"]))
    }
    results = read_results(with_seeds(tmp_path, states=states))
    assert order_tables(results, "3-2") == []
    assert not any("Rerun noise" in sentence for sentence in reading(results))


def test_of_one_class_order_means_are_over_its_seeds(tmp_path: Path) -> None:
    one = {row: values[:1] for row, values in ROWS.items()}
    results = read_results(with_seeds(tmp_path, rows=one))
    assert results.is_over_seeds("3-2")
    assert setting_table(results, "3-2").rows["plain"][0].text == f"70.5±{np.std([70, 71], ddof=1):.1f}"
    rows = [results.summary(row, "3-2", "acc_micro") for row in ("+ a + b", "plain")]
    assert rows[0].minus(rows[1]).interval == interval_of(one["+ a + b"], one["plain"])
    write_tables(results)
    text = (results.folder / "table.md").read_text(encoding="utf-8")
    said = "One class order, so over its seeds, which says nothing about other orders: 3-2."
    assert text.count(said) == 2  # of the means, and of the intervals
    assert "averaged first" not in text


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = with_seeds(tmp_path_factory.mktemp("written"), compare=PAIRS)
    write_results(folder)
    return read_results(folder)


def test_the_tables_say_what_the_interval_covers_and_what_not(written: Results) -> None:
    page = unescape((written.folder / "index.html").read_text(encoding="utf-8"))
    texts = [(written.folder / name).read_text(encoding="utf-8") for name in ("table.md", "tables/made.tex")]
    for text in (page, *texts):
        plain = re.sub(r"[\\${}]|<[^>]+>", "", text).replace("-", "−")  # LaTeX has a minus of its own
        assert "It covers reruns of these class orders with other seeds; of other class orders" in plain
        assert "the seeds of each averaged first" in plain
        assert "Rerun noise of 3−2 in points, the standard deviation of seeds 0, 5 within" in plain.replace(
            "3-2", "3−2"
        )
        rows = [cells for table in order_tables(written, "3-2") for cells in table.rows.values()]
        assert all(cell.text in plain for cells in rows for cell in cells)
    assert texts[0].count("### Order by order\n") == 1
    assert "| Acc: Difference (points) | Order 0 | Order 1 | Order 2 | All |" in texts[0]
    assert "Order by order, in points</h3>" in page
    assert "seeds:\n- 0\n- 5\n" in page


def test_latex_rows_are_whole(written: Results) -> None:
    text = (written.folder / "tables" / "made.tex").read_text(encoding="utf-8")
    *_, (columns, body) = re.findall(r"\\begin\{tabular\}\{(l+r+)\}(.*?)\\end\{tabular\}", text, re.DOTALL)
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(PAIRS)
    assert {len(line.split(" & ")) for line in lines} == {len(columns)} == {5}


def test_every_row_leads_to_its_runs(written: Results) -> None:
    page = (written.folder / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(\.\./runs/[^"]+)/" title="class order 1, seed 5"', page)
    assert len(links) == 4  # rows
    assert all((written.folder / link / "metrics.json").is_file() for link in links)


def test_figures_average_seeds_first_and_show_a_run_of_the_first(tmp_path: Path) -> None:
    figures = [
        {"kind": "curves", "title": "t", "file": "curves", "metric": "micro"},
        {"kind": "confusion", "title": "t", "file": "confusion", "rows": ["+ a"], "order": 1},
    ]
    suite = suite_of(rows={"+ a": {}, "+ b": {}}, seeds=[5, 0], published={}, figures=figures)
    results = read_results(write_fake_results(tmp_path, suite | {"settings": {"3-2": {}}}))
    steps = np.array(
        [
            [[100 * step.micro for step in results.records("+ a", "3-2")[f"{order}, seed {seed}"].steps]
             for seed in (5, 0)]
            for order in range(3)
        ]
    ).mean(axis=1)  # fmt: skip
    axes = draw_curves(results, FigureSpec.model_validate(figures[0])).axes[0]
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), steps.mean(axis=0))
    outline = axes.collections[0].get_paths()[0].vertices
    first = np.asarray(outline)[np.isclose(np.asarray(outline)[:, 0], 1), 1]
    assert first.max() - first.min() == pytest.approx(2 * steps[:, 0].std(ddof=1))
    drawn = draw_confusion(results, FigureSpec.model_validate(figures[1]))
    counts = np.array(results.records("+ a", "3-2")["1, seed 5"].last.confusion)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert [text.get_text() for text in drawn.axes[0].texts] == [f"{100 * x:.0f}" for x in shares.flatten()]
    captions = [figure.caption for figure in draw_figures(results)[0]]
    assert captions[1].startswith("Class order 1, seed 5. After the last step")


def test_a_leaderboard_of_several_seeds_has_the_table_too(tmp_path: Path) -> None:
    values = {"balanced": ROWS["+ a"], "finetune": ROWS["plain"]}
    for name, orders in values.items():
        for order, of_order in enumerate(orders):
            for seed, value in zip(SEEDS, of_order, strict=True):
                write_run(
                    tmp_path / "runs" / f"{name}-{order}-{seed}",
                    metrics_of(0.9, order, method=name) | {"acc_balanced": value / 100},
                    method={"name": name},
                    scenario={"base": 3, "increment": 2, "order": order},
                    seed=seed,
                )
    results = build_leaderboard([tmp_path / "runs"], tmp_path / "out")
    name, cells = first_row(order_tables(results, "phantom 3-2-2")[0])
    low, high = interval_of(ROWS["+ a"], ROWS["plain"])
    assert (name, cells[0]) == ("finetune", "+2.0 (+3.0, +1.0)")
    assert cells[-1].endswith(f"[{signed(low.expected)}, {signed(high.expected)}]")
