import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from medcil.metrics.classification import (
    accuracy,
    balanced_accuracy,
    confusion_matrix,
    macro_f1,
    old_new_accuracy,
    quadratic_kappa,
    recall,
)


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    n_classes = draw(st.integers(2, 6))
    pair = st.tuples(st.integers(0, n_classes - 1), st.integers(0, n_classes - 1))
    pairs = np.array(draw(st.lists(pair, min_size=1, max_size=40)))
    return pairs[:, 0], pairs[:, 1], n_classes


@given(evaluations())
def test_confusion_matrix_is_that_of_scikit_learn(evaluation):
    labels, predictions, n_classes = evaluation
    expected = sklearn_metrics.confusion_matrix(labels, predictions, labels=range(n_classes))
    np.testing.assert_array_equal(confusion_matrix(labels, predictions, n_classes), expected)


def test_narrow_labels_do_not_overflow():
    labels = np.array([99, 99], dtype=np.int8)
    assert confusion_matrix(labels, labels, 100)[99, 99] == 2


@given(evaluations())
def test_accuracy_and_macro_f1_are_those_of_scikit_learn(evaluation):
    labels, predictions, n_classes = evaluation
    confusion = confusion_matrix(labels, predictions, n_classes)
    assert accuracy(confusion) == pytest.approx(sklearn_metrics.accuracy_score(labels, predictions))
    expected = sklearn_metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert macro_f1(confusion) == pytest.approx(expected)


@given(evaluations())
def test_recall_and_balanced_accuracy_are_those_of_scikit_learn(evaluation):
    labels, predictions, n_classes = evaluation
    confusion = confusion_matrix(labels, predictions, n_classes)
    occurring = np.unique(labels)
    expected = sklearn_metrics.recall_score(
        labels, predictions, labels=occurring, average=None, zero_division=0
    )
    np.testing.assert_allclose(recall(confusion)[occurring], expected)
    assert balanced_accuracy(confusion) == pytest.approx(expected.mean())


@given(evaluations(), st.data())
def test_kappa_in_any_class_order_is_that_of_the_original_labels(evaluation, data):
    labels, predictions, n_classes = evaluation
    # More than one class among labels and predictions, or kappa is 0/0.
    assume(len(set(labels) | set(predictions)) > 1)
    original = data.draw(st.permutations(range(n_classes)))
    confusion = confusion_matrix(labels, predictions, n_classes)
    expected = sklearn_metrics.cohen_kappa_score(
        np.array(original)[labels],
        np.array(original)[predictions],
        labels=range(n_classes),
        weights="quadratic",
    )
    assert quadratic_kappa(confusion, original) == pytest.approx(expected)


def test_kappa_by_hand():
    # Arrival order: grade 2, grade 0, grade 1. One image each, grade 2 answered as grade 0, two ranks away.
    confusion = np.array([[0, 1, 0], [0, 1, 0], [0, 0, 1]])
    # In grades 0, 1, 2: Σ w O = 4; columns sum to 2, 1, 0, rows to 1, 1, 1:
    # Σ w E = (grade 0: 1·1 + grade 1: 1·2 + grade 2: 4·2 + 1·1) / 3 = 12 / 3.
    assert quadratic_kappa(confusion, [2, 0, 1]) == pytest.approx(1 - 4 / 4)
    # In arrival order the same error would be one rank: Σ w O = 1, columns 0, 2, 1, so
    # Σ w E = (1·2 + 4·1 + 1·1 + 1·2) / 3 = 9 / 3.
    assert quadratic_kappa(confusion, [0, 1, 2]) == pytest.approx(1 - 1 / 3)


def test_kappa_ranks_the_labels_seen_so_far():
    confusion = np.array([[3, 1, 1], [0, 2, 1], [1, 0, 4]])
    assert quadratic_kappa(confusion, [1, 4, 9]) == quadratic_kappa(confusion, [0, 1, 2])


def test_old_and_new_accuracy_by_hand():
    confusion = np.array([[6, 2, 0], [1, 0, 1], [0, 5, 5]])
    assert old_new_accuracy(confusion, 2) == (6 / 10, 5 / 10)
    assert old_new_accuracy(confusion, 0) == (None, 11 / 20)
    assert old_new_accuracy(confusion, 3) == (11 / 20, None)


def test_no_test_image_is_undefined_not_wrong():
    confusion = np.array([[3, 1], [0, 0]])
    np.testing.assert_array_equal(recall(confusion), [0.75, math.nan])
    assert balanced_accuracy(confusion) == 0.75
    assert old_new_accuracy(confusion, 1) == (0.75, None)
    empty = np.zeros((2, 2), dtype=np.int64)
    for metric in (accuracy, balanced_accuracy, macro_f1):
        assert math.isnan(metric(empty))
    assert math.isnan(quadratic_kappa(empty, [0, 1]))
    assert math.isnan(quadratic_kappa(np.array([[4]]), [0]))


def test_labels_that_do_not_fit_are_named():
    labels = np.array([0, 3])
    with pytest.raises(ValueError, match="label 3 is not one of the 2 classes"):
        confusion_matrix(labels, np.array([0, 1]), 2)
    with pytest.raises(ValueError, match="prediction -1"):
        confusion_matrix(np.array([0]), np.array([-1]), 2)
    with pytest.raises(ValueError, match="different original labels"):
        quadratic_kappa(np.eye(2, dtype=np.int64), [1, 1])
    with pytest.raises(ValueError, match="n_old = 3"):
        old_new_accuracy(np.eye(2, dtype=np.int64), 3)
