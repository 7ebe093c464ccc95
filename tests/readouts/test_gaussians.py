"""Classes as normal distributions: against NumPy, scikit-learn and the definition, number by number."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from medcil.models.network import Outputs
from medcil.readouts import READOUTS, build_readout
from medcil.readouts.gaussians import ClassGaussians


def cloud(counts: list[int], dim: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of each class around a center of its own, class after class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    centers, mixing = (torch.randn(n, dim, generator=generator).double() for n in (len(counts), dim))
    around = torch.randn(len(labels), dim, generator=generator).double() @ mixing
    return centers[labels] + 0.3 * around, labels


def gaussians_of(points: torch.Tensor, labels: torch.Tensor) -> ClassGaussians:
    gaussians = ClassGaussians()
    gaussians.add(points, labels)
    return gaussians


def carried(gaussians: ClassGaussians, *images: torch.Tensor) -> ClassGaussians:
    gaussians = copy.deepcopy(gaussians)
    gaussians.carry(*images)
    return gaussians


def outputs_of(logits: torch.Tensor, embedding: torch.Tensor) -> Outputs:
    return Outputs((), embedding, embedding, logits, logits, None)


def test_means_and_the_one_covariance_are_those_of_the_images():
    points, labels = cloud([5, 9, 2])
    found = gaussians_of(points, labels)
    array, of = points.numpy(), labels.numpy()
    means = np.array([array[of == c].mean(axis=0) for c in range(3)])
    scatter = sum(np.cov(array[of == c].T, bias=True) * (of == c).sum() for c in range(3))
    np.testing.assert_allclose(found.means.numpy(), means)
    np.testing.assert_allclose(found.covariance.numpy(), scatter / len(of))
    assert found.n_images.item() == 16


@pytest.mark.parametrize("shrinkage", [0.05, 0.3, 1.0])
def test_discriminants_are_those_of_scikit_learn(shrinkage):
    points, labels = cloud([12, 12, 12])  # of equal size: it weighs classes alike
    points = torch.nn.functional.normalize(points)
    gaussians = gaussians_of(points, labels)
    gaussians.prepare(weight=1.0, shrinkage=shrinkage)
    judge = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=[1 / 3] * 3)
    judge.fit(points.numpy(), labels.numpy())
    others = cloud([7], seed=1)[0]
    units = torch.nn.functional.normalize(others)
    expected = torch.tensor(judge.decision_function(units.numpy())) - math.log(1 / 3)
    torch.testing.assert_close(gaussians.discriminants(others), expected)
    torch.testing.assert_close(gaussians.discriminants(5 * others), expected)  # only direction counts


@pytest.mark.parametrize("dim", [3, 4, 6])
def test_classes_follow_an_affine_map_of_all_embeddings(dim, monkeypatch):
    monkeypatch.setattr("medcil.readouts.gaussians.RIDGE", 1e-12)  # which draws the map toward zero
    points, labels = cloud([4, 5, 3])
    generator = torch.Generator().manual_seed(3)
    turn, shift = torch.randn(4, dim, generator=generator).double(), torch.randn(dim, generator=generator)
    seen, seen_labels = cloud([60, 5], seed=7)  # of other images, and unlike numbers of them
    moved = carried(gaussians_of(points, labels), seen, seen @ turn + shift.double(), seen_labels)
    expected = gaussians_of(points @ turn + shift.double(), labels)
    torch.testing.assert_close(moved.means, expected.means)
    torch.testing.assert_close(moved.covariance, expected.covariance)
    assert moved.n_images == 12


def test_every_class_weighs_the_same_in_the_map():
    points, labels = cloud([40, 6])
    new = cloud([40, 6], seed=5)[0]
    known = gaussians_of(*cloud([30, 30], seed=9))
    thrice = torch.cat([torch.arange(40).repeat(3), torch.arange(40, 46)])
    once, repeated = (carried(known, points[i], new[i], labels[i]) for i in (torch.arange(46), thrice))
    torch.testing.assert_close(once.means, repeated.means)
    torch.testing.assert_close(once.covariance, repeated.covariance)


def test_what_the_map_cannot_explain_widens_the_covariance():
    points, labels = cloud([300, 300])
    noise = torch.randn(points.shape, generator=torch.Generator().manual_seed(4)).double()
    known = gaussians_of(points, labels)
    moved = carried(known, points, points + noise, labels)
    widened = moved.covariance - known.covariance
    torch.testing.assert_close(widened, torch.eye(4).double(), atol=0.2, rtol=0)


def test_joined_classes_are_as_if_seen_together():
    points, labels = cloud([5, 9, 4])
    first, rest = labels < 2, labels == 2
    joined = gaussians_of(points[first], labels[first])
    joined.add(points[rest], labels[rest])
    together = gaussians_of(points, labels)
    for name in ("means", "covariance", "n_images"):
        torch.testing.assert_close(getattr(joined, name), getattr(together, name))


def of_discriminants(discriminants: torch.Tensor, *, weight: float) -> ClassGaussians:
    """Gaussians that answer the embedding e_i, a unit vector, with row i of these numbers."""
    gaussians = ClassGaussians(discriminants.shape[1], len(discriminants))
    gaussians.directions, gaussians.weight = discriminants.T.contiguous(), torch.tensor(weight)
    return gaussians


def test_scores_are_both_posteriors_mixed_and_the_priors_again():
    logits, discriminants = [1.0, -0.5, 2.0], [3.0, 1.0, -1.0]
    gaussians = of_discriminants(torch.tensor([discriminants]), weight=0.5)
    gaussians.favor, gaussians.log_prior = torch.tensor([0.4, 0.4, 0.0]), torch.tensor([1.1, 1.1, 0.0])
    (found,) = gaussians.scores(outputs_of(torch.tensor([logits]), torch.eye(1))).tolist()
    unbiased = [s - p for s, p in zip(logits, [0.7, 0.7, 0.0], strict=True)]
    shares = [
        [math.exp(value) / sum(math.exp(other) for other in values) for value in values]
        for values in (unbiased, discriminants)
    ]
    mixed = [one + 0.5 * other for one, other in zip(*shares, strict=True)]
    expected = [math.log(p) + more for p, more in zip(mixed, [1.1, 1.1, 0.0], strict=True)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_without_weight_and_favor_the_classifier_decides_alone():
    gaussians = of_discriminants(torch.tensor([[9.0, 0, 0], [0, 9.0, 0]]), weight=0.0)
    gaussians.log_prior = torch.tensor([0.7, 0.0, 0.0])
    logits = torch.tensor([[1.0, -0.5, 2.0], [4.0, 1.0, 0.0]])
    scores = gaussians.scores(outputs_of(logits, torch.eye(2)))
    torch.testing.assert_close(scores.softmax(dim=1), logits.softmax(dim=1))


@pytest.mark.parametrize("n_seen", [1, 3])
def test_single_images_have_no_spread_and_do_no_harm(n_seen):
    points = torch.nn.functional.normalize(cloud([1, 1, 1])[0])
    gaussians = carried(
        gaussians_of(points, torch.arange(3)), points[:n_seen], points[:n_seen], torch.arange(n_seen)
    )
    gaussians.prepare(weight=0.5, shrinkage=0.3)
    assert gaussians.discriminants(points).isfinite().all()
    gaussians.finish_task(points, torch.zeros(3).double())
    assert gaussians.scores(outputs_of(torch.zeros(3, 3).double(), points)).isfinite().all()


def test_scores_far_below_any_probability_stay_finite():
    far = torch.tensor([[0.0, -2000.0]])
    gaussians = of_discriminants(far, weight=1.0)
    (scores,) = gaussians.scores(outputs_of(far, torch.eye(1))).tolist()
    assert scores == pytest.approx([math.log(2), math.log(2) - 2000])


def test_a_method_that_adds_no_classes_is_refused():
    with pytest.raises(TypeError, match="must add every class"):
        gaussians_of(*cloud([2, 2])).finish_task(torch.zeros(3, 4), torch.zeros(3))


@pytest.mark.parametrize("kind", READOUTS)
def test_a_readout_built_from_its_spec_takes_its_tensors(kind):
    readout = READOUTS[kind](3, 5)
    for buffer in readout.buffers():
        buffer += torch.rand(buffer.shape)
    again = build_readout(json.loads(json.dumps(readout.spec())))
    again.load_state_dict(readout.state_dict())
    assert type(again) is type(readout)
    assert all(torch.equal(*pair) for pair in zip(again.buffers(), readout.buffers(), strict=True))
