"""The baseline cells of the paper's Tables 1-3, from the runs released with LO2LN."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medcil.metrics.incremental import (
    AccuracyMatrix,
    acc_balanced,
    acc_micro,
    acc_task,
    forgetting,
    forgetting_lo2ln,
    mean_and_deviation,
    micro_per_step,
)

# In percent: half a unit of the last digit printed, and a little for the rounding of what was averaged.
TOLERANCE = 0.06
# Released recalls and released micro accuracies have three digits each.
ROUNDING = 0.05

# (dataset, protocol): method: Acc, its deviation, Fgt, its deviation. In percent.
PUBLISHED = {
    ("cch5000", "4-2"): {
        "icarl": (93.0, 0.2, 6.8, 1.0),
        "ucir": (93.9, 0.3, 4.4, 0.9),
        "podnet": (92.0, 0.3, 5.2, 0.4),
        "der": (93.0, 0.5, 6.4, 1.4),
        "lo2ln": (94.6, 0.4, 4.0, 0.8),
    },
    ("cch5000", "4-1"): {
        "icarl": (91.1, 1.8, 9.0, 3.3),
        "ucir": (92.0, 1.0, 5.5, 2.6),
        "podnet": (89.2, 0.5, 6.0, 1.2),
        "der": (91.0, 1.7, 5.6, 1.9),
        "lo2ln": (94.5, 0.8, 3.9, 2.0),
    },
    ("ham10000", "3-2"): {
        "icarl": (76.3, 3.1, 20.1, 12.6),
        "ucir": (79.1, 1.4, 16.8, 9.5),
        "podnet": (75.6, 2.2, 20.5, 2.1),
        "der": (76.2, 2.8, 24.8, 10.9),
        "lo2ln": (82.0, 1.3, 12.8, 3.3),
    },
    ("ham10000", "3-1"): {
        "icarl": (68.3, 2.8, 25.3, 4.5),
        "ucir": (74.1, 3.1, 16.3, 9.1),
        "podnet": (66.3, 2.3, 17.3, 4.8),
        "der": (66.9, 4.5, 24.7, 4.8),
        "lo2ln": (78.1, 3.4, 10.1, 3.9),
    },
    ("eyepacs", "3-1"): {
        "icarl": (64.4, 3.3, 17.8, 4.6),
        "ucir": (70.2, 7.6, 15.4, 11.4),
        "podnet": (63.3, 5.4, 22.8, 4.9),
        "der": (58.7, 9.4, 30.2, 6.9),
        "lo2ln": (81.9, 2.5, -0.2, 0.8),
    },
}
SETTINGS = [(*setting, method) for setting, methods in PUBLISHED.items() for method in methods]

Setting = tuple[str, str, str]


@pytest.fixture(scope="module")
def content(shared_data: Path) -> dict[str, Any]:
    return json.loads((shared_data / "lo2ln_released_runs.json").read_text())


@pytest.fixture(scope="module")
def released(content: dict[str, Any]) -> dict[Setting, list[AccuracyMatrix]]:
    """One matrix per class order."""
    runs: dict[Setting, list[AccuracyMatrix]] = {}
    for run in content["runs"]:
        support = np.array(content["test_counts"][run["dataset"]])[run["class_order"]]
        recall = np.full((len(run["steps"]), len(support)), np.nan)
        for step, measured in enumerate(run["steps"]):
            recall[step, : len(measured["per_class"])] = measured["per_class"]
        matrix = AccuracyMatrix(recall, support, tuple(run["sizes"]))
        runs.setdefault((run["dataset"], run["protocol"], run["method"]), []).append(matrix)
    return runs


@pytest.fixture(scope="module")
def released_micro(content: dict[str, Any]) -> dict[Setting, list[list[float]]]:
    """Per class order, the micro accuracy of every step as released."""
    runs: dict[Setting, list[list[float]]] = {}
    for run in content["runs"]:
        setting = (run["dataset"], run["protocol"], run["method"])
        runs.setdefault(setting, []).append([step["micro"] for step in run["steps"]])
    return runs


def percent(metric: Callable[[AccuracyMatrix], float], matrices: list[AccuracyMatrix]) -> tuple[float, ...]:
    return mean_and_deviation([100 * metric(matrix) for matrix in matrices])


def always_the_most_frequent(matrix: AccuracyMatrix) -> AccuracyMatrix:
    """What a predictor scores that answers every image with the most frequent class seen."""
    recall = np.where(np.isnan(matrix.recall), np.nan, 0.0)
    for step, n_seen in enumerate(np.cumsum(matrix.task_sizes)):
        recall[step, matrix.support[:n_seen].argmax()] = 1
    return AccuracyMatrix(recall, matrix.support, matrix.task_sizes)


@pytest.mark.parametrize(("dataset", "protocol", "method"), SETTINGS)
def test_published_cells(released, released_micro, dataset, protocol, method):
    matrices = released[dataset, protocol, method]
    accuracies = [100 * float(np.mean(steps)) for steps in released_micro[dataset, protocol, method]]
    assert len(matrices) == len(accuracies) == 3
    measured = (*mean_and_deviation(accuracies), *percent(forgetting_lo2ln, matrices))
    published = PUBLISHED[dataset, protocol][method]
    assert measured == pytest.approx(published, abs=TOLERANCE)
    assert percent(acc_micro, matrices) == pytest.approx(published[:2], abs=TOLERANCE + ROUNDING)


@pytest.mark.parametrize("setting", SETTINGS)
def test_micro_accuracy_of_every_step_is_the_released_one(released, released_micro, setting):
    for matrix, steps in zip(released[setting], released_micro[setting], strict=True):
        assert 100 * micro_per_step(matrix) == pytest.approx(100 * np.array(steps), abs=2 * ROUNDING)


@pytest.mark.parametrize(
    ("method", "true_tasks"),
    [("icarl", 23.4), ("ucir", 20.1), ("podnet", 20.8), ("der", 28.0), ("lo2ln", 13.8)],
)
def test_the_published_ham_3_2_forgetting_is_not_that_of_the_true_tasks(released, method, true_tasks):
    mean, _ = percent(forgetting, released["ham10000", "3-2", method])
    assert mean == pytest.approx(true_tasks, abs=TOLERANCE)
    published = PUBLISHED["ham10000", "3-2"][method][2]
    assert abs(mean - published) > 4 * TOLERANCE


@pytest.mark.parametrize(("dataset", "protocol", "method"), SETTINGS)
def test_elsewhere_the_published_groups_are_the_true_tasks(released, dataset, protocol, method):
    if (dataset, protocol) != ("ham10000", "3-2"):
        for matrix in released[dataset, protocol, method]:
            assert forgetting(matrix) == forgetting_lo2ln(matrix)


@pytest.mark.parametrize(
    ("dataset", "protocol", "printed", "balanced"),
    [
        ("cch5000", "4-2", (95.1, 0.6), (94.7, 0.4)),
        ("cch5000", "4-1", (94.8, 1.2), (94.5, 0.8)),
        ("ham10000", "3-2", (79.2, 5.0), (75.0, 2.4)),
        ("ham10000", "3-1", (77.1, 7.9), (72.2, 3.8)),
        ("eyepacs", "3-1", (60.8, 5.6), (52.3, 4.7)),
    ],
)
def test_the_same_runs_under_the_other_accuracies(released, dataset, protocol, printed, balanced):
    matrices = released[dataset, protocol, "lo2ln"]
    assert percent(acc_task, matrices) == pytest.approx(printed, abs=TOLERANCE)
    assert percent(acc_balanced, matrices) == pytest.approx(balanced, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("dataset", "protocol", "micro"),
    [("ham10000", "3-2", 63.8), ("ham10000", "3-1", 62.9), ("eyepacs", "3-1", 77.7)],
)
def test_what_answering_the_most_frequent_class_scores(released, dataset, protocol, micro):
    blind = [always_the_most_frequent(matrix) for matrix in released[dataset, protocol, "lo2ln"]]
    assert percent(acc_micro, blind)[0] == pytest.approx(micro, abs=TOLERANCE)
    sizes = blind[0].task_sizes
    chance = np.mean([100 / n_seen for n_seen in np.cumsum(sizes)])
    assert percent(acc_balanced, blind)[0] == pytest.approx(chance)


def test_the_table_in_the_docs_is_what_its_snippet_prints(shared_data, monkeypatch, capsys):
    repository = Path(__file__).resolve().parents[2]
    page = (repository / "docs/reference/metrics.md").read_text()
    snippet = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(repository)
    exec(snippet, {})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(SETTINGS)
    assert printed in page
