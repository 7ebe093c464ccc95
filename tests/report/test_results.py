"""A suite's tables: what they compute against numpy and scipy, what they say, where their numbers lead."""

import csv
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from medcil.errors import DamagedFile, InvalidInput
from medcil.report.markup import in_html, in_latex, in_markdown, number
from medcil.report.results import Summary, read_results
from medcil.report.suite import (
    compared_pairs,
    difference_tables,
    difference_text,
    reading,
    render_page,
    setting_table,
    signed,
    write_results,
    write_tables,
)

from ..errors.raises import raises
from .fake_results import metrics_of, suite_of, write_fake_results

FAILED = {("iCaRL", "3-2", 1): ("failed", "the loss is no longer finite")}
NO_FIGURES: dict[str, Any] = {"figures": []}


def with_values(row: str, setting: str, values: dict[str, list[float]]) -> dict[tuple[str, str, Any], Any]:
    """Runs of orders 0, 1, ... with these metrics, in percent."""
    return {
        (row, setting, order): metrics_of(0.9, order) | {key: v[order] / 100 for key, v in values.items()}
        for order in range(len(next(iter(values.values()))))
    }


def one_setting(rows: dict[str, list[float]], tmp_path: Path, **changes: Any) -> Path:
    """A suite whose rows have these accuracies over orders 0, 1, ...; forgetting is 100 minus that."""
    n = len(next(iter(rows.values())))
    suite = suite_of(
        rows={name: {} for name in rows},
        settings={"3-2": {}},
        orders=list(range(n)),
        metrics={"Acc": "acc_micro", "Fgt": "forgetting"},
        published={},
        figures=[],
        **changes,
    )
    metrics: dict[tuple[str, str, Any], Any] = {}
    for name, values in rows.items():
        metrics |= with_values(
            name, "3-2", {"acc_micro": values, "forgetting": [100 - value for value in values]}
        )
    return write_fake_results(tmp_path, suite, metrics=metrics)


def test_means_and_deviations_are_numpys(tmp_path: Path) -> None:
    values = [81.25, 84.5, 79.125]
    results = read_results(one_setting({"a": values, "b": [70.0, 71.0, 75.5]}, tmp_path))
    summary = results.summary("a", "3-2", "acc_micro")
    assert summary.n == 3
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.deviation == pytest.approx(np.std(values, ddof=1))
    figures = setting_table(results, "3-2").rows["a"]
    assert figures[0].text == f"{np.mean(values):.1f}±{np.std(values, ddof=1):.1f}"


def test_a_column_may_show_a_metric_that_its_runs_did_not_write_down(tmp_path: Path) -> None:
    """From the recalls: steps of three classes and then two, so tasks are these slices."""
    suite = suite_of(metrics={"Task": "acc_task_balanced"}, published={}, **NO_FIGURES)
    results = read_results(write_fake_results(tmp_path, suite))
    expected = []
    for record in results.records("iCaRL", "3-2").values():
        assert "acc_task_balanced" not in json.loads((record.path / "metrics.json").read_text())
        tasks = [slice(0, 3), slice(3, 5), slice(5, 7)]
        steps = [[np.mean(step.recall[s]) for s in tasks[: step.step]] for step in record.steps]
        expected.append(100 * np.mean([np.mean(step) for step in steps]))
    assert len(expected) == 3
    (figure,) = setting_table(results, "3-2").rows["iCaRL"]
    assert figure.text == f"{np.mean(expected):.1f}±{np.std(expected, ddof=1):.1f}"


@pytest.mark.parametrize("n", [2, 3, 4, 5, 30, 101])
def test_the_paired_interval_is_scipys(n: int) -> None:
    random = np.random.default_rng(n)
    first, second = random.normal(80, 3, n), random.normal(78, 4, n)
    found = Summary(dict(enumerate(first))).minus(Summary(dict(enumerate(second))))
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.95)
    assert found.mean == pytest.approx((first - second).mean())
    assert found.interval == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_only_common_orders_are_compared() -> None:
    first, second = Summary({0: 80.0, 1: 90.0, 2: 70.0}), Summary({2: 60.0, 0: 78.0, "seed-1": 1.0})
    found = first.minus(second)
    assert list(found.values) == [0, 2]
    assert found.mean == pytest.approx(6.0)
    assert difference_text(found, 3).endswith("(n = 2)")
    alone = Summary({0: 80.0}).minus(Summary({0: 75.5}))
    assert difference_text(alone, 1) == "+4.5"
    assert difference_text(first.minus(Summary({9: 1.0})), 3) == "–"


def test_the_last_row_is_compared_with_the_others(tmp_path: Path) -> None:
    results = read_results(one_setting({"a": [80, 81, 82], "b": [70, 75, 79], "c": [90, 91, 92]}, tmp_path))
    assert compared_pairs(results, "3-2") == [("c", "a"), ("c", "b")]
    (table,) = difference_tables(results, "3-2")
    assert table.header == ("c minus (points)", "Acc", "Fgt")
    assert table.rows["a"][0].text == "+10.0 [+10.0, +10.0]"


def test_a_suite_names_what_a_row_is_compared_with(tmp_path: Path) -> None:
    rows = {"a": [80.0, 81.0], "a + x": [82.0, 81.0], "b": [70.0, 71.0], "b + x": [75.0, 74.0]}
    folder = one_setting(rows, tmp_path, compare=[["a + x", "a"], ["b + x", "b"]])
    (table,) = difference_tables(read_results(folder), "3-2")
    assert list(table.rows) == ["a + x minus a", "b + x minus b"]


def test_the_best_is_bold_to_the_digits_shown(tmp_path: Path) -> None:
    rows = {"a": [80.04, 80.04], "b": [80.0, 80.0], "c": [79.9, 79.9]}
    results = read_results(one_setting(rows, tmp_path))
    table = setting_table(results, "3-2")
    assert [figure.is_best for figure in (table.rows[row][0] for row in "abc")] == [True, True, False]
    assert [figure.is_best for figure in (table.rows[row][1] for row in "abc")] == [True, True, False]


def test_an_incomplete_row_is_not_the_best(tmp_path: Path) -> None:
    folder = write_fake_results(
        tmp_path,
        suite_of(**NO_FIGURES),
        metrics=with_values("iCaRL", "3-2", {"acc_micro": [99.0, 99.0, 99.0]}),
        states=FAILED,
    )
    table = setting_table(read_results(folder), "3-2")
    assert table.rows["iCaRL"][0].text == "99.0±0.0 (n = 2)"
    assert not table.rows["iCaRL"][0].is_best
    assert sum(figures[0].is_best for figures in table.rows.values()) == 1


def test_an_upper_bound_is_not_ranked(tmp_path: Path) -> None:
    suite = suite_of(
        rows={"a": {}, "b": {}, "joint": {"scenario": {"cumulative": True}}},
        settings={"3-2": {"scenario": {"base": 3, "increment": 2}}},
        published={},
        figures=[],
    )
    metrics = with_values("joint", "3-2", {"acc_micro": [99.0, 99.0, 99.0]})
    metrics |= with_values("b", "3-2", {"acc_micro": [90.0, 91.0, 92.0]})
    results = read_results(write_fake_results(tmp_path, suite, metrics=metrics))
    assert [figures[0].is_best for figures in setting_table(results, "3-2").rows.values()] == [
        False,
        True,
        False,
    ]
    assert compared_pairs(results, "3-2") == [("b", "a"), ("b", "joint")]
    write_tables(results)
    text = (results.folder / "table.md").read_text(encoding="utf-8")
    assert "an upper bound that is not ranked: joint." in text


def test_published_figures_stand_in_their_own_columns(tmp_path: Path) -> None:
    table = setting_table(read_results(write_fake_results(tmp_path)), "3-2")
    assert table.header == ("Method", "Acc", "Acc (paper)", "Balanced", "Fgt", "Fgt (paper)")
    assert [(f.text, f.is_best) for f in (table.rows["iCaRL"][1], table.rows["iCaRL"][4])] == [
        ("76.2±3.1", False),
        ("20.1±12.6", False),
    ]
    assert [(f.text, f.is_best) for f in (table.rows["balanced"][1], table.rows["balanced"][4])] == [
        ("85.0", True),
        ("8.0±3.5", True),
    ]
    assert table.rows["iCaRL + L_dm"][1].text == ""
    assert setting_table(read_results(tmp_path / "made"), "3-1").header == (
        "Method",
        "Acc",
        "Balanced",
        "Fgt",
    )


def test_markdown_says_what_was_measured(tmp_path: Path) -> None:
    folder = write_fake_results(
        tmp_path,
        suite_of(**NO_FIGURES),
        states=FAILED,
        left_out=["EyePACS: no images"],
        set=["training.epochs=2"],
    )
    write_tables(read_results(folder))
    text = (folder / "table.md").read_text(encoding="utf-8")
    results = read_results(folder)
    mean = results.summary("balanced", "3-2", "acc_micro")
    assert f"**{mean.mean:.1f}±{mean.deviation:.1f}** | **85.0** |" in text
    for said in (
        "# Made of numbers (Table 2 of the paper)",
        "| Method | Acc | Acc (paper) | Balanced | Fgt | Fgt (paper) |",
        "Acc is acc\\_micro: mean over steps of the share of all test images",
        "| iCaRL + L<sub>dm</sub> |",
        "| λ<sub>d</sub> &amp; 5% of \\#1 |",
        "- EyePACS: no images",
        "- iCaRL, 3-2, order 1: failed. the loss is no longer finite",
        "--set training.epochs=2",
        "(n = 2)",
        "95% interval",
    ):
        assert said in text, said


def test_every_link_leads_to_a_run(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path, suite_of(figures=suite_of()["figures"][:1]))
    write_results(folder)
    text = (folder / "table.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(<([^>]+)>\)", text)
    assert len(links) == 4 * 2 * 3  # rows, settings, orders
    assert all((folder / link / "metrics.json").is_file() for link in links)
    page = (folder / "index.html").read_text(encoding="utf-8")
    links = [unescape(link) for link in re.findall(r'href="([^"]+)"', page)]
    assert all((folder / link).exists() for link in links)
    assert sum("/runs/" in link for link in links) == 4 * 2 * 3  # every row links to its three runs


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_csv_holds_every_run(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path, suite_of(**NO_FIGURES), states=FAILED)
    write_tables(read_results(folder))
    long = rows_of(folder / "tables" / "made.csv")
    assert len(long) == 4 * 2 * 3 * 3
    for line in long:
        file = folder / "tables" / line["run"] / "metrics.json"
        if line["state"] == "finished":
            value = 100 * json.loads(file.read_text())[line["metric"]]
            assert float(line["percent"]) == pytest.approx(value, abs=1e-4)
        else:
            assert (line["row"], line["order"], line["percent"]) == ("iCaRL", "1", "")


def test_cells_without_results_say_why(tmp_path: Path) -> None:
    states = {("iCaRL", "3-2", order): ("failed", "it broke") for order in range(3)}
    states |= {("balanced", "3-2", order): ("unfinished", "") for order in range(3)}
    folder = write_fake_results(tmp_path, suite_of(**NO_FIGURES), states=states)
    results = read_results(folder)
    table = setting_table(results, "3-2")
    assert table.rows["iCaRL"][0].text == "failed"
    assert table.rows["balanced"][0].text == "unfinished"
    unfinished = {run.why for _, _, run in results.every_run() if run.record is None}
    assert unfinished == {"it broke", "it was not run yet"}


def test_a_run_that_only_claims_to_be_finished_does_not_count(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path, suite_of(**NO_FIGURES))
    broken, partial, gone = (tmp_path / "runs" / key / "metrics.json" for key in ("0000", "0001", "0002"))
    broken.write_text("{")
    partial.write_text(json.dumps(json.loads(partial.read_text()) | {"finished": False}))
    gone.unlink()
    results = read_results(folder)
    placed = results.runs["iCaRL", "3-2"]
    assert [run.state for run in placed] == ["failed", "unfinished", "failed"]
    assert (placed[0].why or "").startswith("Restore ../runs/0000/metrics.json")
    assert results.summary("iCaRL", "3-2", "acc_micro").n == 0
    write_tables(results)


def test_a_setting_without_runs_has_no_table(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path, suite_of(**NO_FIGURES))
    content = json.loads((folder / "runs.json").read_text())
    content["runs"] = [run for run in content["runs"] if run["places"][0][1] == "3-2"]
    (folder / "runs.json").write_text(json.dumps(content | {"left_out": ["3-1: its images are not there"]}))
    assert read_results(folder).settings == ["3-2"]
    write_results(folder)
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert "## 3-1" not in text
    assert "3-1: its images are not there" in text


def test_a_setting_with_its_own_order_has_one_run_a_cell(tmp_path: Path) -> None:
    suite = suite_of(
        settings={"50-5": {"scenario": {"order": "seed-1993"}}}, published={}, orders=[], figures=[]
    )
    folder = write_fake_results(tmp_path, suite)
    results = read_results(folder)
    text = setting_table(results, "50-5").rows["iCaRL"][0].text
    assert text == number(results.summary("iCaRL", "50-5", "acc_micro").mean)
    write_tables(results)
    assert "over class orders (n = 1);" in (folder / "table.md").read_text(encoding="utf-8")


def test_numbers_have_no_negative_zero() -> None:
    assert [number(value) for value in (-0.04, 12.345, -3.21)] == ["0.0", "12.3", "−3.2"]
    assert [signed(value) for value in (-0.04, 0.06, -3.21)] == ["0.0", "+0.1", "−3.2"]


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path, states=FAILED)
    first = {path: path.read_bytes() for path in write_results(folder)}
    assert {path.suffix for path in first} == {".md", ".tex", ".csv", ".pdf", ".svg", ".html"}
    assert {path: path.read_bytes() for path in write_results(folder)} == first
    assert not any(str(tmp_path).encode() in content for content in first.values())


def test_the_page_stands_alone_and_names_stay_text(tmp_path: Path) -> None:
    hostile = "</style><script>alert(1)</script>"
    suite = suite_of(
        rows={"a": {}, hostile: {}}, published={}, title=hostile, figures=suite_of()["figures"][:1]
    )
    folder = write_fake_results(tmp_path, suite, left_out=[hostile])
    write_results(folder)
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("</style>") == 1
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(|https?://", page)
    assert page.count("data:image/svg+xml;base64,") == 1
    for said in ("Synthetic images: phantom", "95% interval", "Figure 3b. Accuracy.", "Settings", "Left out"):
        assert said in page, said


def test_the_page_shows_the_suite_as_written_and_what_was_changed(tmp_path: Path) -> None:
    suite = suite_of(rows={"a": {"training": {"epochs": 160}}}, published={}, figures=[])
    folder = write_fake_results(tmp_path, suite, set=["training.epochs=2"])
    page = unescape(render_page(read_results(folder), [], []))
    assert (folder / "suite.yaml").read_text() in page
    assert "Not as the suite is written: --set training.epochs=2" in page


def environment(**changes: Any) -> dict[str, Any]:
    packages = {"torch": "2.11.0", "medcil": "0.1.0"} | changes.pop("packages", {})
    return (
        {"device_kind": "cpu", "precision": "float32", "git_commit": "0123", "cores": 2}
        | changes
        | {"packages": packages}
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"cores": 16}, ""),
        (
            {"device_kind": "cuda", "precision": "bfloat16"},
            "; device kind cpu, cuda; precision bfloat16, float32",
        ),
        ({"packages": {"torch": "2.12.0"}}, "; torch 2.11.0, 2.12.0"),
        ({"packages": {"medcil": "0.2.0"}}, "; medcil 0.1.0, 0.2.0"),
    ],
)
def test_what_computed_the_runs_is_said_where_it_differs(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    suite = suite_of(rows={"balanced": {}}, settings={"3-2": {}}, orders=[0, 1], published={}, **NO_FIGURES)
    folder = write_fake_results(tmp_path, suite)
    for key, content in {"0000": environment(), "0001": environment(**other)}.items():
        (tmp_path / "runs" / key / "environment.json").write_text(json.dumps(content))
    assert f"Computed with git commit 0123{said}." in reading(read_results(folder))


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        ([None, None, None], []),
        (["a" * 40] * 3, ["Computed with git commit aaaaaaaaa."]),
        (
            ["b" * 40, "a" * 40 + "+changes", "b" * 40],
            ["Computed with git commit aaaaaaaaa+changes, bbbbbbbbb."],
        ),
        (["a" * 40, None, "a" * 40], ["Computed with git commit aaaaaaaaa, unknown."]),
    ],
)
def test_a_table_names_the_commits_of_its_runs(
    tmp_path: Path, commits: list[str | None], said: list[str]
) -> None:
    suite = suite_of(rows={"balanced": {}}, settings={"3-2": {}}, published={}, **NO_FIGURES)
    folder = write_fake_results(tmp_path, suite)
    for index, commit in enumerate(commits):
        content = json.dumps(environment(git_commit=commit))
        (tmp_path / "runs" / f"{index:04x}" / "environment.json").write_text(content)
    write_tables(read_results(folder))
    lines = (folder / "table.md").read_text().splitlines()
    assert [line for line in lines if "commit" in line] == [f"- {sentence}" for sentence in said]


def test_code_stays_code() -> None:
    text = "as `forgetting_lo2ln`, not `a|b` or ``x"
    assert in_markdown(text) == "as `forgetting_lo2ln`, not \\`a\\|b\\` or \\`\\`x"
    assert in_html("as `forgetting`") == "as <code>forgetting</code>"
    assert in_latex("as `forgetting_x`") == r"as \texttt{forgetting\_x}"


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    folder = write_fake_results(tmp_path)
    suite = folder / "suite.yaml"
    suite.write_text(suite.read_text().replace("acc_micro", "acc_mikro"))
    with pytest.raises(InvalidInput, match="Did you mean 'acc_micro'"):
        read_results(folder)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with raises("suite.results.missing"):
        read_results(tmp_path)
    folder = write_fake_results(tmp_path)
    (folder / "runs.json").write_text(json.dumps({"format": 2}))
    with raises("suite.results.unsupported", "2"):
        read_results(folder)
    (folder / "runs.json").write_text(json.dumps({"format": 1, "suite": "../x", "runs": []}))
    with pytest.raises(InvalidInput, match=r"'\.\./x' is not a valid file name"):
        read_results(folder)
    (folder / "runs.json").write_text(json.dumps({"format": 1, "suite": "x", "runs": [{}]}))
    with pytest.raises(DamagedFile, match="incomplete"):
        read_results(folder)
