import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from medcil.clinic.calibration import (
    Calibration,
    Unlike,
    calibrate,
    calibrated,
    fit_temperature,
    likeness_threshold,
    softmax,
)
from medcil.config import ExecutionConfig
from medcil.data.samples import no_samples
from medcil.errors import DamagedFile, InvalidInput
from medcil.training.inference import Scorer, predict_scores

from ..small import SIDE, random_samples
from .tiny_model import NAMES, tiny_state

CPU = ExecutionConfig(device="cpu")


def simulated(n: int, sharpness: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Evidence of which 1 / sharpness of it is true: labels are drawn from the softmax of that part."""
    generator = np.random.default_rng(seed)
    truth = generator.normal(scale=2, size=(n, 4))
    chances = softmax(truth).cumsum(axis=1)
    labels = (generator.random((n, 1)) > chances[:, :-1]).sum(axis=1)
    return sharpness * truth, labels


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 5.0])
def test_the_true_temperature_is_found(sharpness):
    evidence, labels = simulated(6000, sharpness)
    assert fit_temperature(evidence, labels, reference=1.0) == pytest.approx(sharpness, rel=0.07)


def test_classes_count_alike_in_the_fit():
    """How often the hold-out holds a class says nothing: more copies of its images change nothing."""
    evidence, labels = simulated(4000, 3.0)
    again = np.concatenate([np.arange(4000), *[np.flatnonzero(labels == 0)] * 2])
    once, repeated = (
        fit_temperature(evidence[i], labels[i], reference=1.0) for i in (np.arange(4000), again)
    )
    assert repeated == pytest.approx(once, rel=1e-3)


def test_the_loss_is_lowest_there():
    evidence, labels = simulated(60, 4.0)
    temperature = fit_temperature(evidence, labels, reference=1.0)
    counts = np.bincount(labels)

    def loss(t: float) -> float:
        total = 0.5 * math.log(t) ** 2
        for row, label in zip(evidence, labels, strict=True):
            share = math.exp(row[label] / t) / sum(math.exp(value / t) for value in row)
            total -= len(labels) / (len(counts) * counts[label]) * math.log(share)
        return total

    nearby = [loss(temperature * factor) for factor in (0.99, 0.999, 1.001, 1.01)]
    assert loss(temperature) < min(nearby)


def test_few_images_are_not_believed():
    """Eight images, all right: they alone speak for a temperature near zero."""
    evidence = 2 * np.eye(4)[np.arange(8) % 4]
    assert 0.3 < fit_temperature(evidence, np.arange(8) % 4, reference=1.0) < 1
    found = calibrated(evidence, np.ones(8), np.arange(8) % 4, np.zeros(4), reference=1.0, false_alarms=0.05)
    assert any(
        "The fewest images of a class, 2, do not suffice for a false-alarm rate of 0.05: it is up to 0.333"
        in note
        for note in found.notes
    )


def test_a_prior_enters_by_bayes_rule():
    generator = np.random.default_rng(1)
    scores = generator.normal(size=(30, 3))
    in_scores = np.log([0.7, 0.2, 0.1])
    calibration = Calibration(1.7, tuple(in_scores), Unlike(None, None, "nothing"), 0)
    for prior in ([1 / 3] * 3, [0.7, 0.2, 0.1], [0.01, 0.0, 0.99]):
        found = calibration.probabilities(scores, prior)
        for row, probabilities in zip(scores, found, strict=True):
            likelihoods = [math.exp((s - p) / 1.7) for s, p in zip(row, in_scores, strict=True)]
            joint = [share * likelihood for share, likelihood in zip(prior, likelihoods, strict=True)]
            np.testing.assert_allclose(probabilities, np.array(joint) / sum(joint), rtol=1e-12)
    # From one prior to another: multiply by their ratio and normalize again.
    uniform, other = (calibration.probabilities(scores, p) for p in ([1 / 3] * 3, [0.5, 0.3, 0.2]))
    moved = uniform * np.array([0.5, 0.3, 0.2])
    np.testing.assert_allclose(other, moved / moved.sum(axis=1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize(("n", "rate"), [(19, 0.05), (140, 0.05), (50, 0.1)])
def test_false_alarms_stay_within_the_stated_rate(n, rate):
    generator = np.random.default_rng(n)
    alarms = []
    for _ in range(1500):
        threshold, stated = likeness_threshold(generator.normal(size=n), np.zeros(n, dtype=np.int64), rate)
        assert stated == rate
        alarms.append(stats.norm.cdf(threshold))  # of a further image of the same kind
    error = np.std(alarms) / math.sqrt(len(alarms))
    expected = math.floor(rate * (n + 1) + 1e-9) / (n + 1)  # of that order statistic
    assert np.mean(alarms) == pytest.approx(expected, abs=4 * error)
    assert expected <= rate + 1e-12


def test_too_few_images_state_a_wider_rate():
    assert likeness_threshold(np.array([0.4, 0.2, 0.9]), np.array([1, 1, 1]), 0.05) == (0.2, 0.25)
    assert likeness_threshold(np.array([]), np.array([], dtype=np.int64), 0.05) == (None, None)


def test_the_stated_rate_holds_in_every_class_however_frequent():
    """One class is less like its mean than the other: a rate over both would be broken by its images."""
    generator, labels = np.random.default_rng(2), np.repeat([0, 1], 40)
    alarms = []
    for _ in range(400):
        threshold, stated = likeness_threshold(generator.normal(size=80) - 2 * labels, labels, 0.05)
        alarms.append(stats.norm.cdf(threshold + 2))  # of a further image of the second class
        assert stated == 0.05
    error = np.std(alarms) / 20
    assert 2 / 41 - 4 * error < np.mean(alarms) < 0.05 + 4 * error


def test_images_of_a_patient_are_not_taken_for_independent_ones():
    """Each of ten patients has four images that are alike: a threshold for 40 images would be too high."""
    generator, labels = np.random.default_rng(4), np.zeros(40, dtype=np.int64)
    groups = tuple(f"p{i // 4}" for i in range(40))
    alarms = {10: [], 40: []}
    for _ in range(600):
        likeness = generator.normal(size=10).repeat(4)
        for n, known in ((10, groups), (40, None)):
            threshold, stated = likeness_threshold(likeness, labels, 0.05, known)
            alarms[n].append(stats.norm.cdf(threshold))  # of a further patient's images
            assert stated == (1 / 11 if n == 10 else 0.05)
    error = np.std(alarms[10]) / math.sqrt(600)
    assert np.mean(alarms[10]) == pytest.approx(1 / 11, abs=4 * error)
    assert np.mean(alarms[40]) > 0.05 + 4 * error  # what would have been stated
    found = calibrated(
        np.zeros((40, 2)),
        likeness,
        labels,
        np.zeros(2),
        reference=1.0,
        false_alarms=0.05,
        groups=groups,
    )
    assert any("The fewest patients of a class, 10, do not suffice" in note for note in found.notes)


def test_patients_who_differ_keep_the_rate_of_a_further_patients_image():
    """Forty patients with one to five images, alike in part: neither too many false alarms nor too few."""
    generator, below = np.random.default_rng(6), []
    sizes = 1 + np.arange(40) % 5
    groups = [f"p{i}" for i in range(40) for _ in range(sizes[i])]
    labels = np.zeros(len(groups), dtype=np.int64)
    for _ in range(1500):
        likeness = generator.normal(size=40).repeat(sizes) + generator.normal(size=len(groups))
        threshold, stated = likeness_threshold(likeness, labels, 0.1, groups)
        assert stated == 0.1
        below.append(stats.norm.cdf(threshold / math.sqrt(2)))  # of a further patient's image
    error = np.std(below) / math.sqrt(len(below))
    assert 0.08 < np.mean(below) < 0.1 + 4 * error


@pytest.mark.parametrize("readout", ["classifier", "nearest_mean"])
def test_a_model_is_calibrated(readout):
    state = tiny_state(readout=readout)
    samples = random_samples([12, 8, 5])
    calibration = calibrate(state, samples, CPU)
    assert calibration == calibrate(state, samples, CPU)
    assert calibration.images == 25
    assert calibration.class_prior_in_scores == tuple(state.readout.log_prior.double().tolist())
    assert calibration.unlike.measured_on == "hold-out"
    scores, likeness = Scorer(state, CPU)(samples)
    assert calibration.is_unlike(likeness).sum() == 0  # the smallest of 25 is the threshold itself
    assert calibration.unlike.threshold == likeness.min()
    assert calibration.probabilities(scores, [1 / 3] * 3).sum(axis=1) == pytest.approx(np.ones(25))

    written = json.loads(json.dumps(calibration.to_json()))
    assert Calibration.from_json(written, "calibration.json") == calibration


def test_scores_are_those_of_the_engine_and_likeness_is_a_cosine():
    state = tiny_state()
    samples = random_samples([4, 4, 4])
    scores, likeness = Scorer(state, CPU)(samples)
    torch.testing.assert_close(torch.from_numpy(scores).float(), predict_scores(state, samples, CPU))
    offset = state.preprocessing.slack // 2
    crops = samples.read_all()[:, :, offset : offset + 8, offset : offset + 8]
    with torch.no_grad():
        embedding = state.network.eval()(state.preprocessing.normalize(crops)).embedding
    cosines = [
        max(float(row @ mean / (row.norm() * mean.norm())) for mean in state.readout.class_means)
        for row in embedding
    ]
    np.testing.assert_allclose(likeness, cosines, atol=1e-5)


def test_several_views_change_scores_and_not_the_likeness():
    state, samples = tiny_state(), random_samples([12, 8, 5])
    in_views = replace(state, preprocessing=replace(state.preprocessing, views=8))
    (of_one, as_it_is), (scores, likeness) = (Scorer(one, CPU)(samples) for one in (state, in_views))
    np.testing.assert_allclose(likeness, as_it_is, atol=1e-6)
    np.testing.assert_allclose(scores, predict_scores(in_views, samples, CPU), atol=1e-6)
    assert np.abs(scores - of_one).max() > 1e-3
    calibration, before = calibrate(in_views, samples, CPU), calibrate(state, samples, CPU)
    assert calibration.unlike.threshold == likeness.min() == pytest.approx(before.unlike.threshold)
    assert calibration.temperature != before.temperature


def test_without_images_nothing_is_invented():
    calibration = calibrate(tiny_state(), no_samples(SIDE), CPU)
    assert calibration.temperature == 1
    assert calibration.unlike.threshold is None
    assert not calibration.is_unlike(np.array([-1.0])).any()
    assert "no images to calibrate on" in calibration.notes[0]


def test_what_was_measured_on_is_said():
    state = tiny_state()
    notes = calibrate(state, random_samples([5, 5]), CPU, measured_on="exemplars").notes
    assert any(NAMES[2] in note for note in notes)
    assert any("exemplars, which were trained on" in note for note in notes)
    evaluated = calibrate(state, random_samples([5, 5, 5]), CPU, measured_on="eval")
    assert evaluated.unlike.measured_on == "eval"
    assert not any("trained on" in note for note in evaluated.notes)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0},
        {"temperature": "hot"},
        {"unlike": {"no": 1}},
        {"unlike": {"threshold": "high", "false_alarms": 0.05, "measured_on": "hold-out"}},
        {"unlike": {"threshold": math.nan, "false_alarms": 0.05, "measured_on": "hold-out"}},
        {"class_prior_in_scores": 3},
    ],
)
def test_a_damaged_file_is_named(change):
    sound = Calibration(1.0, (0.0,), Unlike(None, None, "nothing"), 0).to_json()
    with pytest.raises(DamagedFile, match=r"calibration\.json is damaged"):
        Calibration.from_json(sound | change, "calibration.json")
    with pytest.raises(InvalidInput, match="newer medcil"):
        Calibration.from_json(sound | {"format": 2}, "calibration.json")
