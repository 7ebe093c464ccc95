import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medcil.metrics.catalogue import METRICS, of_recalls, summarize
from medcil.metrics.incremental import (
    AccuracyMatrix,
    acc_balanced,
    acc_micro,
    acc_task,
    acc_task_balanced,
    balanced_per_step,
    forgetting,
    forgetting_lo2ln,
    forgetting_per_step,
    forgetting_printed,
    mean_and_deviation,
    micro_per_step,
)

NAN = math.nan


@pytest.fixture
def by_hand() -> AccuracyMatrix:
    """Three steps, two classes and then one at a time."""
    recall = np.array([[0.9, 0.5, NAN, NAN], [0.5, 0.7, 0.8, NAN], [0.6, 0.2, 0.9, 0.4]])
    return AccuracyMatrix(recall, np.array([30, 10, 40, 20]), (2, 1, 1))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The arguments of a matrix: beartype draws random numbers, which a strategy must not."""
    task_sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    n_classes = sum(task_sizes)
    support = np.array(draw(st.lists(st.integers(1, 50), min_size=n_classes, max_size=n_classes)))
    recall = np.full((len(task_sizes), n_classes), NAN)
    for step, n_seen in enumerate(np.cumsum(task_sizes)):
        row = st.lists(st.floats(0, 1), min_size=int(n_seen), max_size=int(n_seen))
        recall[step, :n_seen] = draw(row)
    return recall, support, task_sizes


def test_accuracies_by_hand(by_hand):
    micro = [(27 + 5) / 40, (15 + 7 + 32) / 80, (18 + 2 + 36 + 8) / 100]
    np.testing.assert_allclose(micro_per_step(by_hand), micro)
    assert acc_micro(by_hand) == pytest.approx(sum(micro) / 3)
    balanced = [(0.9 + 0.5) / 2, (0.5 + 0.7 + 0.8) / 3, (0.6 + 0.2 + 0.9 + 0.4) / 4]
    np.testing.assert_allclose(balanced_per_step(by_hand), balanced)
    assert acc_balanced(by_hand) == pytest.approx(sum(balanced) / 3)
    # The first task over its 40 images: 32/40 = .8, then 22/40 = .55, then 20/40 = .5.
    assert acc_task(by_hand) == pytest.approx((0.8 + (0.55 + 0.8) / 2 + (0.5 + 0.9 + 0.4) / 3) / 3)
    # Over its two classes: .7, then .6, then .4.
    assert acc_task_balanced(by_hand) == pytest.approx((0.7 + (0.6 + 0.8) / 2 + (0.4 + 0.9 + 0.4) / 3) / 3)


def test_forgetting_by_hand(by_hand):
    # Class means of the first task: .7, .6, .4; its best stays .7. The second task rises from .8 to .9.
    per_step = [0, 0.7 - 0.6, ((0.7 - 0.4) + (0.8 - 0.9)) / 2]
    np.testing.assert_allclose(forgetting_per_step(by_hand), per_step)
    assert forgetting(by_hand) == pytest.approx(sum(per_step) / 3)
    # Image-weighted, the first task: .8, .55, .5.
    printed = [0, 0.8 - 0.55, ((0.8 - 0.5) + (0.8 - 0.9)) / 2]
    assert forgetting_printed(by_hand) == pytest.approx(sum(printed) / 3)


def test_forgetting_is_negative_where_old_tasks_improve():
    recall = np.array([[0.5, NAN], [0.8, 0.9]])
    matrix = AccuracyMatrix(recall, np.array([10, 10]), (1, 1))
    for metric in (forgetting, forgetting_printed, forgetting_lo2ln):
        assert metric(matrix) == pytest.approx((0 + 0.5 - 0.8) / 2)


def test_lo2ln_groups_of_the_3_2_protocol_by_hand():
    recall = np.array(
        [
            [0.9, 0.7, 0.5, NAN, NAN, NAN, NAN],
            [0.7, 0.7, 0.2, 0.8, 0.9, NAN, NAN],
            [0.5, 0.6, 0.1, 0.4, 0.6, 0.8, 0.9],
        ]
    )
    matrix = AccuracyMatrix(recall, np.full(7, 10), (3, 2, 2))
    # {0, 1}: .8, .7, .55. {2, 3}: .5 in step 2, .25 in step 3.
    expected = [0, 0.8 - 0.7, ((0.8 - 0.55) + (0.5 - 0.25)) / 2]
    assert forgetting_lo2ln(matrix) == pytest.approx(sum(expected) / 3)
    # {0, 1, 2}: .7, 1.6/3, .4. {3, 4}: .85, .5.
    true = [0, 0.7 - 1.6 / 3, ((0.7 - 0.4) + (0.85 - 0.5)) / 2]
    assert forgetting(matrix) == pytest.approx(sum(true) / 3)
    first_two = AccuracyMatrix(recall[:2, :5], np.full(5, 10), (3, 2))
    assert forgetting_lo2ln(first_two) == pytest.approx(sum(expected[:2]) / 2)


@given(matrices())
def test_lo2ln_groups_are_the_tasks_elsewhere(arguments):
    matrix = AccuracyMatrix(*arguments)
    if matrix.task_sizes[0] != 3 or set(matrix.task_sizes[1:]) != {2}:
        assert forgetting_lo2ln(matrix) == forgetting(matrix)


@given(matrices())
def test_printed_forgetting_is_the_printed_formula(arguments):
    matrix = AccuracyMatrix(*arguments)
    n_steps, starts = len(matrix.task_sizes), np.cumsum((0, *matrix.task_sizes))
    a = np.zeros((n_steps, n_steps))
    for t in range(n_steps):
        for i in range(t + 1):
            images = matrix.support[starts[i] : starts[i + 1]]
            a[t, i] = (matrix.recall[t, starts[i] : starts[i + 1]] * images).sum() / images.sum()
    drops = [0.0]
    for t in range(1, n_steps):
        drops.append(sum(max(a[j, i] - a[t, i] for j in range(t)) for i in range(t)) / t)
    assert forgetting_printed(matrix) == pytest.approx(sum(drops) / n_steps)


@given(matrices())
def test_ranges(arguments):
    matrix = AccuracyMatrix(*arguments)
    for name in ("acc_micro", "acc_task", "acc_task_balanced", "acc_balanced"):
        assert -1e-9 <= METRICS[name].function(matrix) <= 1 + 1e-9
    for name in ("forgetting", "forgetting_printed", "forgetting_lo2ln"):
        assert -1 - 1e-9 <= METRICS[name].function(matrix) <= 1 + 1e-9


@given(matrices(), st.floats(0, 1))
def test_a_constant_matrix_has_that_accuracy_and_no_forgetting(arguments, value):
    matrix = AccuracyMatrix(*arguments)
    recall = np.where(np.isnan(matrix.recall), NAN, value)
    constant = AccuracyMatrix(recall, matrix.support, matrix.task_sizes)
    for name, metric in METRICS.items():
        expected = 0 if metric.is_lower_better else value
        assert metric.function(constant) == pytest.approx(expected, abs=1e-9), name


@given(matrices())
def test_equal_supports_make_micro_balanced_and_printed_forgetting_the_true_one(arguments):
    matrix = AccuracyMatrix(*arguments)
    equal = AccuracyMatrix(matrix.recall, np.full_like(matrix.support, 7), matrix.task_sizes)
    assert acc_micro(equal) == pytest.approx(acc_balanced(equal))
    assert acc_task(equal) == pytest.approx(acc_task_balanced(equal))
    assert forgetting_printed(equal) == pytest.approx(forgetting(equal))


@given(matrices(), st.data())
def test_what_counts_classes_follows_from_recalls_whatever_the_supports(arguments, data):
    """And some class may have no test image."""
    recall, support, task_sizes = arguments
    support = np.where(
        data.draw(st.lists(st.booleans(), min_size=len(support), max_size=len(support))), support, 0
    )
    matrix = AccuracyMatrix(np.where(support > 0, recall, NAN), support, task_sizes)
    rows = zip(matrix.recall.tolist(), np.cumsum(task_sizes), strict=True)
    written = [[None if math.isnan(r) else r for r in row[:n_seen]] for row, n_seen in rows]
    found = of_recalls(written, (*task_sizes, 5))  # a task that is not finished
    assert set(found) == {
        "acc_task_balanced",
        "acc_balanced",
        "last_balanced",
        "forgetting",
        "forgetting_lo2ln",
    }
    for name, value in found.items():
        assert (math.nan if value is None else value) == pytest.approx(
            METRICS[name].function(matrix), nan_ok=True
        )


@pytest.mark.parametrize("recalls", [[[0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]] * 3])
def test_recalls_that_do_not_fit_the_tasks_are_refused(recalls):
    with pytest.raises(ValueError, match="classes seen"):
        of_recalls(recalls, (2, 1))


@given(matrices())
def test_one_class_at_a_time_makes_the_task_mean_the_balanced_accuracy(arguments):
    matrix = AccuracyMatrix(*arguments)
    n_steps = len(matrix.task_sizes)
    recall = np.where(np.tri(n_steps, dtype=bool), 0.5, NAN)
    singles = AccuracyMatrix(recall, matrix.support[:n_steps], (1,) * n_steps)
    assert acc_task(singles) == pytest.approx(acc_balanced(singles))


def test_a_class_without_test_images_is_left_out():
    recall = np.array([[0.8, NAN, NAN], [0.6, NAN, 0.4]])
    matrix = AccuracyMatrix(recall, np.array([10, 0, 30]), (2, 1))
    assert acc_micro(matrix) == pytest.approx((0.8 + (6 + 12) / 40) / 2)
    assert acc_balanced(matrix) == pytest.approx((0.8 + 0.5) / 2)
    assert forgetting(matrix) == pytest.approx(0.2 / 2)


def test_a_task_without_test_images_is_left_out():
    recall = np.array([[0.8, NAN, NAN], [0.6, NAN, NAN], [0.4, NAN, 1.0]])
    matrix = AccuracyMatrix(recall, np.array([10, 0, 10]), (1, 1, 1))
    assert acc_task(matrix) == pytest.approx((0.8 + 0.6 + 0.7) / 3)
    assert forgetting(matrix) == pytest.approx((0 + 0.2 + 0.4) / 3)


@pytest.mark.parametrize(
    ("recall", "support", "task_sizes", "message"),
    [
        ([[0.5, 0.5]], [1, 1], (1, 1), "shape"),
        ([[0.5, 0.5], [0.5, 0.5]], [1, 1], (1, 1), "not yet seen"),
        ([[0.5, NAN], [NAN, 0.5]], [1, 1], (1, 1), "not yet seen"),
        ([[0.5]], [0], (1,), "no test image"),
        ([[50.0]], [1], (1,), "fraction"),
        ([[0.5]], [-1], (1,), "no test image"),
        ([[0.5]], [1], (1, 0), "at least one class"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused(recall, support, task_sizes, message):
    with pytest.raises(ValueError, match=message):
        AccuracyMatrix(np.array(recall), np.array(support), task_sizes)


CONFUSIONS = [
    np.array([[8, 2], [1, 3]]),
    np.array([[6, 2, 2], [0, 4, 0], [1, 0, 19]]),
]


def test_confusions_to_matrix():
    matrix = AccuracyMatrix.from_confusions(CONFUSIONS, [2, 1])
    np.testing.assert_array_equal(matrix.recall, [[0.8, 0.75, NAN], [0.6, 1.0, 0.95]])
    np.testing.assert_array_equal(matrix.support, [10, 4, 20])
    assert matrix.task_sizes == (2, 1)


@pytest.mark.parametrize(
    ("confusions", "task_sizes", "message"),
    [
        ([], (2, 1), "0 confusion matrices for 2 tasks"),
        (CONFUSIONS, (2,), "2 confusion matrices for 1 tasks"),
        (CONFUSIONS, (1, 2), "step 1 has seen 1 classes"),
        ([np.eye(2, dtype=np.int64), CONFUSIONS[1]], (2, 1), "step 1 was tested on other images"),
    ],
)
def test_confusions_that_do_not_fit_are_refused(confusions, task_sizes, message):
    with pytest.raises(ValueError, match=message):
        AccuracyMatrix.from_confusions(confusions, task_sizes)


def test_summary_of_a_run():
    summary = summarize(
        CONFUSIONS, task_sizes=(2, 1), class_names=["mild", "severe", "none"], original_labels=[1, 2, 0]
    )
    matrix = AccuracyMatrix.from_confusions(CONFUSIONS, (2, 1))
    assert {name: summary[name] for name in METRICS} == {
        name: METRICS[name].function(matrix) for name in METRICS
    }
    assert summary["last_micro"] == 29 / 34
    assert summary["last_balanced"] == pytest.approx((0.6 + 1 + 0.95) / 3)
    first, second = summary["steps"]
    assert first["step"] == 1
    assert first["classes"] == ["mild", "severe"]
    assert (first["n_old"], first["old"], first["new"]) == (0, None, 11 / 14)
    assert first["forgetting"] == 0
    assert (second["n_old"], second["old"], second["new"]) == (2, 10 / 14, 19 / 20)
    assert second["recall"] == [0.6, 1.0, 0.95]
    assert second["forgetting"] == pytest.approx(0.775 - 0.8)
    assert second["confusion"] == CONFUSIONS[1].tolist()
    assert set(second) == {
        *("step", "classes", "n_old", "micro", "balanced", "recall", "macro_f1"),
        *("old", "new", "kappa", "forgetting", "confusion"),
    }
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_summary_of_a_run_that_is_not_finished():
    names, labels = ["a", "b", "c", "d"], [3, 1, 0, 2]
    partial = summarize(CONFUSIONS[:1], task_sizes=(2, 1, 1), class_names=names, original_labels=labels)
    alone = summarize(CONFUSIONS[:1], task_sizes=(2,), class_names=names[:2], original_labels=labels[:2])
    assert partial == alone
    assert len(partial["steps"]) == 1


def test_summary_without_test_images_has_no_nan():
    summary = summarize([np.array([[0]])], task_sizes=(1,), class_names=["a"], original_labels=[0])
    assert summary["acc_micro"] is None
    assert summary["steps"][0]["recall"] == [None]
    json.dumps(summary, allow_nan=False)


def test_mean_and_sample_deviation():
    assert mean_and_deviation([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3)))
    assert mean_and_deviation([0.3]) == (0.3, None)
    with pytest.raises(ValueError, match="no values"):
        mean_and_deviation([])
