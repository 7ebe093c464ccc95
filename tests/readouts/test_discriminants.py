"""Cosines, linear discriminants and Mahalanobis distances against plain arithmetic and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from medcil.readouts.discriminants import CosinePrototypes, LinearDiscriminants, MahalanobisDistances
from medcil.readouts.statistics import StatisticsReadout

from .test_ridge import CLASSES, DIM, VIEWS, images

KINDS = [CosinePrototypes, LinearDiscriminants, MahalanobisDistances]
UNSEEN = torch.tensor(np.random.default_rng(9).normal(size=(20, DIM))).float() + 0.5


def solved(kind: type[StatisticsReadout], features: torch.Tensor, labels: torch.Tensor) -> StatisticsReadout:
    readout = kind(n_features=DIM)
    for c in range(CLASSES):
        readout.add(features[labels == c], c)
    readout.solve()
    return readout


def rows_of(features: torch.Tensor, labels: torch.Tensor, c: int) -> np.ndarray:
    return features[labels == c].flatten(0, 1).numpy()


def test_a_cosine_prototype_is_the_mean_of_its_class():
    features, labels = images()
    scores = solved(CosinePrototypes, features, labels).scores_of(UNSEEN)
    for i, x in enumerate(UNSEEN.double().numpy()):
        for c in range(CLASSES):
            mean = rows_of(features, labels, c).mean(axis=0)
            cosine = x @ mean / np.sqrt((x @ x) * (mean @ mean))
            assert float(scores[i, c]) == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("shrinkage", [1e-4, 0.5, 1.0])
def test_linear_discriminants_are_those_of_one_shrunk_covariance(shrinkage):
    features, labels = images()
    readout = solved(LinearDiscriminants, features, labels)
    readout.shrinkage.fill_(shrinkage)
    readout.solve()
    means = np.stack([rows_of(features, labels, c).mean(axis=0) for c in range(CLASSES)])
    scatter = np.zeros((DIM, DIM))
    for views, c in zip(features.numpy(), labels.numpy(), strict=True):
        for x in views:
            scatter += np.outer(x - means[c], x - means[c]) / VIEWS
    inverse = np.linalg.inv((1 - shrinkage) * scatter / len(features) + shrinkage * np.eye(DIM))
    expected = np.array(
        [[mean @ inverse @ x - mean @ inverse @ mean / 2 for mean in means] for x in UNSEEN.double().numpy()]
    )
    expected -= expected[:, :1]  # they are known up to a constant of all classes
    scores = readout.scores_of(UNSEEN).double().numpy()
    np.testing.assert_allclose(scores - scores[:, :1], expected, atol=1e-4)


def test_linear_discriminants_are_those_of_scikit_learn():
    features, labels = images()
    readout = solved(LinearDiscriminants, features, labels)
    readout.shrinkage.fill_(0.0)
    readout.solve()
    theirs = LinearDiscriminantAnalysis(solver="lsqr")
    theirs.fit(features.flatten(0, 1).numpy(), labels.repeat_interleave(VIEWS).numpy())
    expected = theirs.decision_function(UNSEEN.double().numpy()) - np.log(theirs.priors_)
    scores = readout.scores_of(UNSEEN).double().numpy()
    np.testing.assert_allclose(scores - scores[:, :1], expected - expected[:, :1], atol=1e-4)


@pytest.mark.parametrize(("diagonal", "other"), [(1.0, 1.0), (3.0, 3.0), (1.0, 0.0), (0.0, 0.0)])
def test_mahalanobis_distances_are_those_of_shrunk_correlations(diagonal, other):
    features, labels = images(n=120)
    readout = solved(MahalanobisDistances, features, labels)
    readout.shrinkage.copy_(torch.tensor([diagonal, other]))
    readout.solve()
    scores = readout.scores_of(UNSEEN)
    for c in range(CLASSES):
        of_class = features[labels == c].numpy()
        mean = of_class.mean(axis=(0, 1))
        covariance = np.zeros((DIM, DIM))
        for views in of_class:
            for x in views:
                covariance += np.outer(x - mean, x - mean) / VIEWS / (len(of_class) - 1)
        off = ~np.eye(DIM, dtype=bool)
        shrunk = covariance + np.where(
            off, other * covariance[off].mean(), diagonal * covariance.trace() / DIM
        )
        correlation = np.empty_like(shrunk)
        for i in range(DIM):
            for j in range(DIM):
                correlation[i, j] = shrunk[i, j] / np.sqrt(shrunk[i, i] * shrunk[j, j])
        for i, x in enumerate(UNSEEN.double().numpy()):
            away = x / np.linalg.norm(x) - mean / np.linalg.norm(mean)
            distance = away @ np.linalg.inv(correlation) @ away
            assert float(scores[i, c]) == pytest.approx(-distance, rel=1e-3, abs=1e-4)


def test_shrinking_twice_is_shrinking_more_once():
    """By a₁ and a₂ twice, as FeCAM's code does, is by (1 + a)² - 1 once."""
    covariance = np.cov(np.random.default_rng(0).normal(size=(DIM, 20)))
    off = ~np.eye(DIM, dtype=bool)

    def shrunk(matrix: np.ndarray, a: tuple[float, float]) -> np.ndarray:
        return matrix + np.where(off, a[1] * matrix[off].mean(), a[0] * np.diagonal(matrix).mean())

    twice = shrunk(shrunk(covariance, (1.0, 0.5)), (1.0, 0.5))
    np.testing.assert_allclose(twice, shrunk(covariance, (3.0, 1.25)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_arrival_and_images_that_left_make_no_difference(kind):
    features, labels = images()
    expected = solved(kind, features, labels).scores_of(UNSEEN)
    others, of_others = images(seed=5)
    readout = kind(n_features=DIM, is_pooled=kind is not MahalanobisDistances)
    for i in np.random.default_rng(1).permutation(len(labels)):
        readout.add(features[i : i + 1], int(labels[i]))
    for c in range(CLASSES):
        readout.add(others[of_others == c], c)
    for c in range(CLASSES):
        readout.remove(others[of_others == c], c)
    readout.solve()
    torch.testing.assert_close(readout.scores_of(UNSEEN), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_merged_score_as_the_whole(kind):
    features, labels = images(n=80)
    parts = []
    for k in range(2):
        part = kind(n_features=DIM, is_pooled=kind is not MahalanobisDistances)
        for c in torch.unique(labels[k::2]).tolist():
            part.add(features[k::2][labels[k::2] == c], c)
        parts.append(part)
    parts[0].merge(parts[1])
    parts[0].solve()
    expected = solved(kind, features, labels).scores_of(UNSEEN)
    torch.testing.assert_close(parts[0].scores_of(UNSEEN), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_means_over_views_and_carry_no_prior(kind):
    features, labels = images()
    readout = solved(kind, features, labels)
    in_two_views = readout.scores_of(UNSEEN, views=2)
    single = readout.scores_of(UNSEEN)
    torch.testing.assert_close(in_two_views, (single[:10] + single[10:]) / 2)
    readout.finish_task(torch.zeros(CLASSES, DIM), torch.full((CLASSES,), 7.0))
    assert readout.log_prior.tolist() == [0.0] * CLASSES
    posterior = torch.softmax(single / readout.temperature, dim=1)
    assert (single.argmax(dim=1) == posterior.argmax(dim=1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_one_image_or_with_a_constant_feature_has_finite_scores(kind):
    features, labels = images()
    features[:, :, 0] = 1.0
    features[labels == CLASSES - 1] = features[labels == CLASSES - 1][:1, :1]
    readout = solved(kind, features, labels)
    assert torch.isfinite(readout.scores_of(UNSEEN)).all()
