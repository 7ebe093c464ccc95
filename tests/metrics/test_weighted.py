import math
import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from medcil.metrics.classification import (
    auroc,
    brier_score,
    calibration_error,
    class_rates,
    cohen_kappa,
    equal_mass_bins,
    mean_accuracy,
    mean_sensitivity,
    reliability_curve,
    weighted_confusions,
)
from medcil.metrics.intervals import percentiles, resamplings, wilson

CLASSES = 4


@pytest.fixture(params=range(3))
def drawn(request):
    generator = np.random.default_rng(request.param)
    labels = generator.integers(CLASSES, size=60)
    probabilities = generator.dirichlet(np.ones(CLASSES), size=60).round(2)  # rounded: with ties
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    weights = generator.integers(0, 4, size=(5, 60))
    return labels, probabilities, weights


def test_confusions_and_rates_are_those_of_scikit_learn(drawn):
    labels, probabilities, weights = drawn
    predictions = probabilities.argmax(axis=1)
    confusions = weighted_confusions(labels, predictions, weights, CLASSES)
    rates = class_rates(confusions)
    for b, weight in enumerate(weights):
        options = {"sample_weight": weight}
        np.testing.assert_allclose(
            confusions[b], sklearn_metrics.confusion_matrix(labels, predictions, **options)
        )
        assert mean_accuracy(confusions)[b] == pytest.approx(
            sklearn_metrics.accuracy_score(labels, predictions, **options)
        )
        assert mean_sensitivity(confusions)[b] == pytest.approx(
            sklearn_metrics.balanced_accuracy_score(labels, predictions, **options)
        )
        for quadratic, name in ((False, None), (True, "quadratic")):
            expected = sklearn_metrics.cohen_kappa_score(labels, predictions, weights=name, **options)
            assert cohen_kappa(confusions, quadratic=quadratic)[b] == pytest.approx(expected)
        for c in range(CLASSES):
            is_c, says_c = labels == c, predictions == c
            for key, rows, wanted in (
                ("sensitivity", is_c, says_c),
                ("specificity", ~is_c, ~says_c),
                ("ppv", says_c, is_c),
                ("npv", ~says_c, ~is_c),
            ):
                assert rates[key][b, c] == pytest.approx(np.average(wanted[rows], weights=weight[rows]))


def test_auroc_is_that_of_scikit_learn_and_of_counted_pairs(drawn):
    labels, probabilities, weights = drawn
    for c in range(CLASSES):
        found = auroc(labels == c, probabilities[:, c], weights)
        for b, weight in enumerate(weights):
            expected = sklearn_metrics.roc_auc_score(labels == c, probabilities[:, c], sample_weight=weight)
            assert found[b] == pytest.approx(expected)
    tied = auroc(np.array([True, False, False]), np.array([0.5, 0.5, 0.2]), np.ones((1, 3)))
    assert tied[0] == pytest.approx((0.5 + 1) / 2)


def test_brier_is_that_of_plain_arithmetic(drawn):
    labels, probabilities, weights = drawn
    found = brier_score(labels, probabilities, weights)
    for b, weight in enumerate(weights):
        errors = [
            sum((p - (c == label)) ** 2 for c, p in enumerate(row))
            for row, label in zip(probabilities, labels, strict=True)
        ]
        assert found[b] == pytest.approx(np.average(errors, weights=weight))


def test_calibration_error_of_two_bins_by_hand():
    confidence = np.array([0.6, 0.9, 0.5, 0.8])
    is_right = np.array([True, True, False, True])
    # bins {0.5, 0.6} and {0.8, 0.9}: |0.55 - 0.5| and |0.85 - 1|
    found = calibration_error(confidence, is_right, np.ones((1, 4)), n_bins=2)
    assert found[0] == pytest.approx(0.5 * 0.05 + 0.5 * 0.15)
    # The second image twice, the third not at all: |0.6 - 1| of one, |2.6 - 3| of three.
    found = calibration_error(confidence, is_right, np.array([[1, 2, 0, 1]]), n_bins=2)
    assert found[0] == pytest.approx(0.4 / 4 + 0.4 / 4)
    curve = reliability_curve(confidence, is_right, n_bins=2)
    assert [(b["images"], b["accuracy"]) for b in curve] == [(2, 0.5), (2, 1.0)]
    assert [b["confidence"] for b in curve] == pytest.approx([0.55, 0.85])


def test_bins_do_not_depend_on_the_order_of_the_images():
    confidence = np.array([0.7] * 6 + [0.9] * 2)
    bins = equal_mass_bins(confidence, 4)
    assert len(set(bins[:6])) == 1
    assert bins[6] == bins[7] != bins[0]
    turned = equal_mass_bins(confidence[::-1], 4)
    np.testing.assert_array_equal(turned[::-1], bins)


def test_what_cannot_be_computed_is_nan():
    confusions = weighted_confusions(np.array([0]), np.array([0]), np.ones((1, 1)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = class_rates(confusions)
        assert math.isnan(rates["sensitivity"][0, 1])
        assert math.isnan(rates["specificity"][0, 0])
        assert mean_sensitivity(confusions)[0] == 1
        assert math.isnan(cohen_kappa(confusions)[0])
        assert math.isnan(auroc(np.array([True]), np.array([0.3]), np.ones((1, 1)))[0])


@pytest.mark.parametrize(("k", "n"), [(0, 20), (20, 20), (7, 20), (499, 500), (1, 1)])
def test_wilson_is_that_of_scipy(k, n):
    expected = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_of_nothing_is_everything():
    assert wilson(0, 0) == (0.0, 1.0)


def test_whole_patients_are_drawn():
    groups = ["a", "b", "a", "c", "b", "a"]
    counts = np.concatenate(list(resamplings(6, groups, draws=200, seed=3)))
    assert counts.shape == (200, 6)
    for same in ((0, 2, 5), (1, 4)):
        assert (counts[:, same] == counts[:, same[:1]]).all()
    assert (counts[:, [0, 1, 3]].sum(axis=1) == 3).all()
    again = np.concatenate(list(resamplings(6, groups, draws=200, seed=3)))
    np.testing.assert_array_equal(counts, again)
    assert (counts != np.concatenate(list(resamplings(6, groups, draws=200, seed=4)))).any()


def test_a_bootstrap_is_as_wide_as_theory_says():
    values = np.random.default_rng(0).normal(size=400)
    weights = np.concatenate(list(resamplings(400, None, draws=2000)))
    low, high = percentiles(weights @ values / 400)
    error = values.std() / math.sqrt(400)
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)


def test_blocks_of_draws_are_small(monkeypatch):
    monkeypatch.setattr("medcil.metrics.intervals.MOST_NUMBERS", 30)
    blocks = list(resamplings(10, None, draws=7))
    assert [len(block) for block in blocks] == [3, 3, 1]
    assert all((block.sum(axis=1) == 10).all() for block in blocks)
