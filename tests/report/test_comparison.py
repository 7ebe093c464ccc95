from dataclasses import replace
from pathlib import Path

import pytest

from medcil.report.page import best_rows, commonest_mistake, comparison_rows, findings, hardest_hit
from medcil.report.runs import RunRecord, read_run, run_labels

from .fake_runs import write_run, write_three


@pytest.fixture
def three(tmp_path: Path) -> list[RunRecord]:
    summaries = [
        {"acc_balanced": 0.5, "last_balanced": 0.4, "acc_micro": 0.7, "forgetting": 0.5},
        {"acc_balanced": 0.6, "last_balanced": 0.55, "acc_micro": 0.8, "forgetting": 0.313},
        {"acc_balanced": 0.7123, "last_balanced": 0.65, "acc_micro": 0.75, "forgetting": 0.1},
    ]
    runs = [read_run(path) for path in write_three(tmp_path)]
    return [replace(run, summary=run.summary | s) for run, s in zip(runs, summaries, strict=True)]


def test_rows_are_percent_and_points_with_one_decimal(three: list[RunRecord]) -> None:
    assert comparison_rows(three)[2] == {
        "Method": "balanced",
        "Balanced accuracy (average)": "71.2%",
        "Balanced accuracy (last)": "65.0%",
        "Micro accuracy": "75.0%",
        "Forgetting": "10.0 points",
    }


def test_the_best_is_highest_accuracy_and_lowest_forgetting(three: list[RunRecord]) -> None:
    assert list(best_rows(three).values()) == [{2}, {2}, {1}, {2}]


def test_values_that_print_alike_are_all_best(three: list[RunRecord]) -> None:
    near = replace(three[0], summary=three[2].summary | {"forgetting": 0.10004})
    assert best_rows([near, *three[1:]])["Forgetting"] == {0, 2}
    assert findings([near, *three[1:]])[0] == "Least forgetting: finetune and balanced, 10.0 points."


def test_findings_are_sentences(three: list[RunRecord]) -> None:
    assert findings(three) == [
        "Least forgetting: balanced, 10.0 points.",
        "Most accurate over all classes after the last step: balanced, 65.0%.",
    ]


def test_one_run_has_no_best_and_no_finding(three: list[RunRecord]) -> None:
    assert not any(best_rows(three[:1]).values())
    assert findings(three[:1]) == []


def test_runs_on_other_data_are_not_ranked(three: list[RunRecord]) -> None:
    mixed = [replace(three[0], dataset="ham10000"), *three[1:]]
    assert not any(best_rows(mixed).values())
    assert findings(mixed) == []


def test_an_unfinished_run_is_marked_and_not_ranked(tmp_path: Path, three: list[RunRecord]) -> None:
    early = read_run(write_run(tmp_path / "early", "balanced", n_steps=2, forgetting=0.0))
    runs = [*three[:2], early]
    assert comparison_rows(runs)[2]["Method"] == "balanced (unfinished: 2 of 3 steps)"
    assert best_rows(runs)["Forgetting"] == {1}
    assert findings(runs)[0] == "Least forgetting: cross-entropy + distillation, 31.3 points."


def test_unknown_values_are_dashes(three: list[RunRecord]) -> None:
    unknown = replace(three[0], summary=dict.fromkeys(three[0].summary))
    assert comparison_rows([unknown])[0]["Forgetting"] == "–"
    assert findings([unknown, unknown]) == []


def test_shared_labels_are_told_apart_by_folder(three: list[RunRecord]) -> None:
    twin = replace(three[2], path=Path("elsewhere/seed2"))
    assert run_labels([three[2], twin]) == ["balanced (balanced)", "balanced (seed2)"]


def test_the_class_that_suffers_most_has_the_largest_drop(three: list[RunRecord]) -> None:
    first, second, last = three[0].steps
    steps = (
        replace(first, recall=(0.9, 0.8, 0.7)),
        replace(second, recall=(0.5, 0.9, 0.7, 0.9, None)),
        replace(last, recall=(0.5, 0.2, 0.8, 0.6, 0.1, 0.0, 0.0)),
    )
    hit = hardest_hit(replace(three[0], steps=steps))
    assert hit == ("melanoma", 0.9, 0.2)
    assert hardest_hit(replace(three[0], steps=steps[:1])) is None


def test_the_commonest_mistake_is_the_largest_share_of_a_class(three: list[RunRecord]) -> None:
    step = replace(three[0].steps[0], confusion=((90, 10, 0), (0, 4, 1), (0, 0, 5)))
    run = replace(three[0], steps=(step,))
    assert commonest_mistake(run) == ("melanoma", "keratosis", 1, 5)
    perfect = replace(step, confusion=((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    assert commonest_mistake(replace(run, steps=(perfect,))) is None
    assert commonest_mistake(replace(run, steps=(replace(step, confusion=None),))) is None


def test_the_upper_bound_is_shown_and_not_ranked(three: list[RunRecord]) -> None:
    better = {"acc_balanced": 0.9, "last_balanced": 0.9, "acc_micro": 0.9, "forgetting": 0.01}
    config = {**three[0].config, "scenario": {"base": 3, "increment": 2, "cumulative": True}}
    joint = replace(three[0], label="joint", summary=three[0].summary | better, config=config)
    runs = [joint, *three[1:]]
    assert comparison_rows(runs)[0]["Method"] == "joint (upper bound)"
    assert comparison_rows(runs)[0]["Micro accuracy"] == "90.0%"
    assert list(best_rows(runs).values()) == [{2}, {2}, {1}, {2}]
    assert findings(runs)[0] == "Least forgetting: balanced, 10.0 points."
    assert not any(best_rows([joint, three[1]]).values())  # one method alone is not the best of any
    assert findings([joint, three[1]]) == []
