"""`medcil compare`: which runs are one row, which are not ranked together, what it says of bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from medcil.cli.main import main
from medcil.errors import InvalidInput
from medcil.report.leaderboard import build_leaderboard, find_runs
from medcil.report.results import Results, Summary
from medcil.report.suite import compared_pairs, setting_table, write_tables

from .fake_results import metrics_of, write_run

METHOD = {"name": "balanced", "alpha": 0.5}


def run(
    folder: Path,
    name: str,
    *,
    kept: float = 0.9,
    order: int = 0,
    sizes: tuple[int, ...] = (3, 2, 2),
    metrics: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    made = metrics_of(kept, order, sizes=sizes, method=config.get("method", METHOD)["name"]) | (metrics or {})
    scenario = {"base": sizes[0], "increment": sizes[1], "order": order}
    content = {"method": METHOD, "scenario": scenario, "memory": {"per_class": 20}} | config
    return write_run(folder / name, made, **content)


def three_orders(folder: Path, name: str, **options: Any) -> None:
    for order in range(3):
        run(folder, f"{name}-{order}", order=order, **options)


def test_runs_that_differ_in_order_or_seed_are_one_row(tmp_path: Path) -> None:
    three_orders(tmp_path, "a")
    run(tmp_path, "a-seed", seed=7)
    run(
        tmp_path,
        "elsewhere",
        order=1,
        seed=7,
        execution={"device": "cuda"},
        data={"name": "phantom", "root": "x"},
    )
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.settings == ["phantom 3-2-2"]
    assert results.rows("phantom 3-2-2") == ["balanced"]
    assert [run.name for run in results.runs["balanced", "phantom 3-2-2"]] == [
        "0, seed 0",
        "0, seed 7",
        "1, seed 0",
        "1, seed 7",
        "2, seed 0",
    ]
    assert results.summary("balanced", "phantom 3-2-2", "acc_micro").n == 3


def test_recipes_that_differ_are_rows_of_their_own_best_first(tmp_path: Path) -> None:
    three_orders(tmp_path, "worse", kept=0.7, method=METHOD | {"alpha": 0.1})
    three_orders(tmp_path, "better", kept=0.95, method=METHOD | {"alpha": 0.9})
    three_orders(tmp_path, "plain", kept=0.8, method={"name": "finetune"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.rows("phantom 3-2-2") == ["balanced (alpha = 0.9)", "finetune", "balanced (alpha = 0.1)"]


def test_a_row_over_fewer_orders_stands_below_and_is_compared_with_nothing_better(tmp_path: Path) -> None:
    three_orders(tmp_path, "good", kept=0.9)
    three_orders(tmp_path, "plain", kept=0.8, method={"name": "finetune"})
    run(tmp_path, "lucky", kept=0.97, order=1, method={"name": "ucir"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.rows("phantom 3-2-2") == ["balanced", "finetune", "ucir"]
    means = {row: results.summary(row, "phantom 3-2-2", "acc_balanced").mean for row in ("balanced", "ucir")}
    assert means["ucir"] > means["balanced"]
    assert compared_pairs(results, "phantom 3-2-2") == [("balanced", "finetune"), ("balanced", "ucir")]
    assert not any(figure.is_best for figure in setting_table(results, "phantom 3-2-2").rows["ucir"])


def test_an_upper_bound_stands_below_the_methods(tmp_path: Path) -> None:
    three_orders(tmp_path, "worse", kept=0.7)
    three_orders(tmp_path, "better", kept=0.9, method={"name": "ucir"})
    for order in range(3):
        scenario = {"base": 3, "increment": 2, "order": order, "cumulative": True}
        run(tmp_path, f"j-{order}", kept=0.99, order=order, scenario=scenario, method={"name": "finetune"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.rows("phantom 3-2-2") == ["ucir", "balanced", "finetune"]
    means = [results.summary(row, "phantom 3-2-2", "acc_balanced").mean for row in ("finetune", "ucir")]
    assert means[0] > means[1]
    table = setting_table(results, "phantom 3-2-2")
    assert table.rows["ucir"][0].is_best
    assert not any(figure.is_best for figure in table.rows["finetune"])


def test_the_set_of_orders_that_most_rows_have_is_ranked(tmp_path: Path) -> None:
    run(tmp_path, "0-alone", kept=0.97, order=3, method={"name": "ucir"})
    run(tmp_path, "a", kept=0.9, order=1)
    run(tmp_path, "b", kept=0.8, order=1, method={"name": "finetune"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.rows("phantom 3-2-2") == ["balanced", "finetune", "ucir"]


def with_seeds(folder: Path, values: dict[tuple[int, int], float], **config: Any) -> None:
    """(order, seed) -> balanced accuracy, in percent"""
    for (order, seed), value in values.items():
        name = f"{config['method']['name']}-{order}-{seed}"
        run(folder, name, order=order, seed=seed, metrics={"acc_balanced": value / 100}, **config)


def difference_of(results: Results) -> Summary:
    ((row, other),) = compared_pairs(results, "phantom 3-2-2")
    first, second = (results.summary(name, "phantom 3-2-2", "acc_balanced") for name in (row, other))
    return first.minus(second)


def test_seeds_of_an_order_are_averaged_before_the_interval(tmp_path: Path) -> None:
    first = {(0, 0): 80.0, (0, 1): 84.0, (1, 0): 70.0, (1, 1): 71.0, (2, 0): 90.0}
    second = {(0, 0): 75.0, (1, 0): 69.0, (1, 1): 66.0, (2, 0): 81.0, (2, 1): 83.0}
    with_seeds(tmp_path, first, method=METHOD)
    with_seeds(tmp_path, second, method={"name": "finetune"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    difference = difference_of(results)
    ours, theirs = [82.0, 70.5, 90.0], [75.0, 67.5, 82.0]
    expected = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert list(difference.values) == [0, 1, 2]
    assert difference.interval == (pytest.approx(expected.low), pytest.approx(expected.high))
    summary = results.summary("balanced", "phantom 3-2-2", "acc_balanced")
    assert (summary.mean, summary.deviation) == (
        pytest.approx(np.mean(ours)),
        pytest.approx(np.std(ours, ddof=1)),
    )
    assert "(n =" not in setting_table(results, "phantom 3-2-2").rows["balanced"][0].text
    assert not results.is_over_seeds("phantom 3-2-2")


def test_an_interval_over_seeds_says_that_it_is(tmp_path: Path) -> None:
    with_seeds(tmp_path, {(0, 0): 80.0, (0, 1): 84.0}, method=METHOD)
    with_seeds(tmp_path, {(0, 0): 75.0, (0, 1): 77.0}, method={"name": "finetune"})
    results = build_leaderboard([tmp_path], tmp_path / "out")
    difference = difference_of(results)
    assert difference.interval is not None
    assert list(difference.values) == ["0, seed 0", "0, seed 1"]
    write_tables(results)
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    said = "One class order, so over its seeds, which says nothing about other orders: phantom 3-2-2."
    assert text.count(said) == 2  # of the means, and of the intervals


def test_as_few_settings_as_tell_rows_apart_name_them(tmp_path: Path) -> None:
    base = {"name": "ucir", "lambda_base": 5.0}
    for name, plugins in {
        "plain": {},
        "margin": {"margin": {"kind": "distribution", "weight": 0.1}},
        "both": {
            "margin": {"kind": "distribution", "weight": 0.1},
            "classification": {"kind": "cil_balanced"},
        },
    }.items():
        run(tmp_path, name, method=base | ({"plugins": plugins} if plugins else {}))
    rows = set(build_leaderboard([tmp_path], tmp_path / "out").rows("phantom 3-2-2"))
    assert "ucir" in rows
    assert len(rows) == 3
    assert all(row.count("=") <= 2 for row in rows)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"sizes": (3, 1, 1, 1, 1)}, "phantom 3-1-…"),
        ({"memory": {"per_class": 5}}, "phantom 3-2-2, 5 exemplars per class"),
        ({"memory": {"total": 50}}, "phantom 3-2-2, 50 exemplars"),
        ({"data": {"name": "phantom", "split": "groups"}}, "phantom 3-2-2, 20 exemplars per class"),
        ({"metrics": {"dataset": "ham10000"}}, "ham10000 3-2-2"),
        ({"metrics": {"inherent_counts": [90] * 7}}, "phantom 3-2-2, 20 exemplars per class"),
    ],
)
def test_other_data_or_another_protocol_is_another_table(
    tmp_path: Path, other: dict[str, Any], name: str
) -> None:
    three_orders(tmp_path, "a", kept=0.7)
    three_orders(tmp_path, "b", kept=0.95, **other)
    results = build_leaderboard([tmp_path / "a-0", tmp_path], tmp_path / "out")
    assert results.settings == ["phantom 3-2-2", name]
    assert [results.rows(setting) for setting in results.settings] == [["balanced"], ["balanced"]]
    assert results.summary("balanced", name, "acc_micro").n == 3


def test_a_run_counts_once(tmp_path: Path) -> None:
    run(tmp_path, "one", label="mine")
    run(tmp_path, "copy", label="yours")
    results = build_leaderboard([tmp_path, tmp_path / "one"], tmp_path / "out")
    assert results.summary("balanced", "phantom 3-2-2", "acc_micro").n == 1
    assert results.left_out == ("../one: the same class order, seed and recipe as ../copy.",)


def test_unfinished_runs_are_not_ranked(tmp_path: Path) -> None:
    run(tmp_path, "done")
    run(tmp_path, "half", order=1, metrics={"finished": False})
    (run(tmp_path, "none", order=2) / "metrics.json").unlink()
    results = build_leaderboard([tmp_path], tmp_path / "out")
    waiting = "none: No step of none is finished: it has no metrics.json. Wait for its first step."
    assert results.left_out == ("half: unfinished, so not ranked.", waiting)
    assert len(find_runs([tmp_path])) == 3
    with pytest.raises(InvalidInput, match="None of these runs is finished"):
        build_leaderboard([tmp_path / "half"], tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.json", "{"),
        ("metrics.json", "[]"),
        ("config.yaml", "memory: much"),
        ("config.yaml", "a: [\n"),
        ("environment.json", "{"),
    ],
)
def test_a_damaged_run_leaves_the_others_their_table(tmp_path: Path, file: str, content: str) -> None:
    three_orders(tmp_path, "good")
    (run(tmp_path, "bad", method={"name": "finetune"}) / file).write_text(content)
    results = build_leaderboard([tmp_path], tmp_path / "out")
    assert results.rows("phantom 3-2-2") == ["balanced"]
    (said,) = results.left_out
    assert said.startswith("bad: ")
    assert "again" in said
    with pytest.raises(InvalidInput, match=r"None of these runs is finished.*\nbad: "):
        build_leaderboard([tmp_path / "bad"], tmp_path / "out")


def code_of(*arguments: str) -> int:
    try:
        main(["compare", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_command_writes_tables_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_orders(tmp_path / "runs", "a", kept=0.7, method={"name": "finetune"})
    three_orders(tmp_path / "runs", "b", kept=0.95)
    out = tmp_path / "out"
    assert code_of(str(tmp_path / "runs"), "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert said.index("balanced") < said.index("finetune")
    assert "Leaderboard:" in said
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "| balanced minus (points) |" in text
    assert "](<../runs/a-0>)" in text
    assert (out / "../runs/a-0").is_dir()
    assert (out / "index.html").read_text(encoding="utf-8").count("data:image/svg+xml") == 3
    assert {path.suffix for path in out.rglob("*") if path.is_file()} >= {".tex", ".csv", ".pdf", ".svg"}


def test_a_page_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    three_orders(tmp_path / "runs", "a", kept=0.7)
    page = tmp_path / "out" / "index.html"
    page.parent.mkdir()
    page.write_text('<meta name="generator" content="medcil explain">')
    assert code_of(str(tmp_path / "runs"), "--out", str(page.parent)) == 4
    assert list(page.parent.iterdir()) == [page]
    page.unlink()
    for _ in range(2):
        assert code_of(str(tmp_path / "runs"), "--out", str(page.parent)) == 0


@pytest.mark.parametrize("make", [False, True])
def test_bad_input_is_answered_before_anything_is_written(
    tmp_path: Path, make: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if make:
        (tmp_path / "empty").mkdir()
    assert code_of(str(tmp_path / "empty"), "--out", str(tmp_path / "out")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("No runs in" if make else "There is no folder") in said
    assert not (tmp_path / "out").exists()
