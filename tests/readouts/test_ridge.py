"""Ridge regression from statistics, and the choice of its parameters, against plain arithmetic."""

import numpy as np
import pytest
import torch

from medcil.errors import InvalidInput
from medcil.models.network import NetworkSpec
from medcil.readouts import statistics as statistics_module
from medcil.readouts.readout import ImageFeatures
from medcil.readouts.ridge import SHARPNESSES, Ridge, solve_ridge
from medcil.readouts.statistics import ClassStatistics, FeatureSpec

N, VIEWS, DIM, CLASSES = 60, 3, 7, 4


def images(seed: int = 0, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = np.sort(random.choice(CLASSES, size=n, p=[0.5, 0.3, 0.15, 0.05]))
    labels[:CLASSES] = range(CLASSES)
    features = random.normal(size=(n, VIEWS, DIM)) + 2 * np.eye(CLASSES, DIM)[labels][:, None]
    return torch.tensor(features), torch.tensor(labels)


def statistics_of(
    features: torch.Tensor, labels: torch.Tensor, balance: float | None = None
) -> ClassStatistics:
    whole = ClassStatistics.empty(CLASSES, DIM, balance=balance)
    for c in torch.unique(labels).tolist():
        whole = whole.plus(ClassStatistics.of(features[labels == c], c, balance=balance))
    return whole


def empty_ridge(balance: float, *, is_pooled: bool = False) -> Ridge:
    ridge = Ridge(n_features=DIM, is_pooled=is_pooled)
    ridge.balance = torch.tensor(balance, dtype=torch.float64)
    return ridge


def weights_by_hand(features: np.ndarray, labels: np.ndarray, balance: float, ridge: float) -> np.ndarray:
    """Weighted least squares over single rows, every view of every image written out."""
    counts = np.bincount(labels, minlength=CLASSES)
    gram, targets = np.zeros((DIM, DIM)), np.zeros((DIM, CLASSES))
    for image, label in zip(features, labels, strict=True):
        for view in image:
            weight = counts[label] ** -balance / VIEWS
            gram += weight * np.outer(view, view)
            targets[:, label] += weight * view
    return np.linalg.solve(gram + ridge * np.eye(DIM), targets)


def weighted_rows(features: torch.Tensor, labels: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
    """Σ_c π_c A_c, row by row."""
    rows = features.flatten(0, 1)
    weights = pi[labels].repeat_interleave(VIEWS) / VIEWS
    gram = torch.zeros(DIM, DIM, dtype=torch.float64)
    for weight, row in zip(weights, rows, strict=True):
        gram += weight * torch.outer(row, row)
    return gram


def same(a: ClassStatistics, b: ClassStatistics, tolerance: float = 1e-10) -> bool:
    pairs = ((a.counts, b.counts), (a.sums, b.sums), (a.moments, b.moments))
    return all(torch.allclose(x, y, rtol=0, atol=tolerance) for x, y in pairs)


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_the_weights_are_those_of_weighted_least_squares(balance, ridge):
    features, labels = images()
    weights = solve_ridge(statistics_of(features, labels), balance=balance, ridge=ridge)
    expected = weights_by_hand(features.numpy(), labels.numpy(), balance, ridge)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=0, atol=1e-10)


def test_without_regularization_and_balance_it_is_plain_least_squares():
    features, labels = images()
    weights = solve_ridge(statistics_of(features, labels), balance=0.0, ridge=1e-12)
    rows = features.reshape(-1, DIM).numpy()
    targets = np.repeat(np.eye(CLASSES)[labels.numpy()], VIEWS, axis=0)
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-8)


def test_a_class_whose_images_are_all_removed_leaves_nothing():
    features, labels = images()
    whole, last = statistics_of(features, labels), labels == CLASSES - 1
    left = whole.minus(statistics_of(features[last], labels[last]))
    assert left.counts[-1] == 0
    assert not left.sums[-1].any()
    assert not left.moments[-1].any()
    assert torch.isfinite(solve_ridge(left, balance=1.0, ridge=1e-3)).all()


def test_more_cannot_be_removed_than_was_added():
    features, labels = images()
    whole = statistics_of(features, labels)
    with pytest.raises(ValueError, match="removed"):
        statistics_of(features[:4], labels[:4]).minus(whole)


def test_the_ridge_and_the_sharpness_make_labels_of_unseen_patients_likeliest():
    features, labels = images(n=40)
    groups, strengths, balance = np.array([f"patient {i % 11}" for i in range(40)]), (1.0, 1e-3, 10.0), 0.5
    ridge = empty_ridge(balance)
    of_classes = {
        c: ImageFeatures(features[labels == c], groups[labels == c].tolist()) for c in range(CLASSES)
    }
    for c, of_class in of_classes.items():
        ridge.add(of_class.values, c)
    ridge.tune(of_classes, strengths=strengths)

    counts = np.bincount(labels)
    trace = sum(
        (features[i, v] ** 2).sum() / VIEWS / counts[labels[i]] ** 0.5
        for i in range(40)
        for v in range(VIEWS)
    )
    likelihoods = {}
    for strength in strengths:
        rho = strength * float(trace) / DIM
        scores = np.empty((40, CLASSES))
        for group in set(groups):
            own = groups == group
            pi = torch.tensor(counts**-balance)
            gram = weighted_rows(features[~own], labels[~own], pi) + rho * torch.eye(DIM)
            sums = torch.stack(
                [features[~own][labels[~own] == c].mean(dim=1).sum(dim=0) for c in range(CLASSES)]
            )
            scores[own] = features[own].mean(dim=1) @ torch.linalg.solve(gram, (pi[:, None] * sums).T)
        for sharpness in SHARPNESSES.numpy():
            odds = np.exp(sharpness * scores) / counts ** (1 - balance)
            posterior = odds[np.arange(40), labels] / odds.sum(axis=1)
            likelihoods[rho, sharpness] = sum(np.log(posterior[labels == c]).mean() for c in range(CLASSES))
    rho, sharpness = max(likelihoods, key=likelihoods.__getitem__)
    assert float(ridge.ridge) == pytest.approx(rho)
    assert float(ridge.sharpness) == pytest.approx(sharpness)


def test_what_was_chosen_on_the_first_images_stays():
    features, labels = images()
    ridge = empty_ridge(0.5)
    for c in range(2):
        ridge.add(features[labels == c], c)
    of_classes = {
        c: ImageFeatures(features[labels == c], [f"{c} {i}" for i in range(N)][: int((labels == c).sum())])
        for c in range(2)
    }
    ridge.tune(of_classes)
    before = float(ridge.ridge)
    for c in range(2, CLASSES):
        ridge.add(features[labels == c], c)
    ridge.solve()
    expected = solve_ridge(statistics_of(features, labels), balance=0.5, ridge=before)
    torch.testing.assert_close(ridge.weights, expected.float())


FAMILIES = ["test_vit", "test_efficientnet", "test_convnext", "tf_efficientnet_lite0"]


@pytest.mark.parametrize("name", [*FAMILIES, "resnet18", "resnet8_cifar"])
def test_stages_of_any_backbone_are_features(name):
    network = NetworkSpec(name, last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.ones(2, network.classifier.dim))
    ridge = Ridge()
    ridge.choose_features(network, FeatureSpec(stages=2), with_companion=True)
    with torch.no_grad():
        out = network(torch.randn(3, 3, 160, 160))
        features = ridge.features(out)
    before = out.maps[-2] if name in FAMILIES else out.maps[-2].relu()
    parts = [out.embedding, before.mean(dim=(2, 3))] * 2  # the companion is a copy
    expected = [part / part.norm(dim=1, keepdim=True) * part.shape[1] ** 0.5 for part in parts]
    torch.testing.assert_close(features, torch.cat([*expected, torch.ones(3, 1)], dim=1))


def test_a_companion_runs_in_the_precision_of_the_network():
    network = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.ones(2, network.classifier.dim))
    ridge, images = Ridge(), torch.randn(3, 3, 32, 32)
    ridge.choose_features(network, FeatureSpec(), with_companion=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = network(images)
    with torch.no_grad():
        own, companions, _ = ridge.features(out).split([64, 64, 1], dim=1)
    assert torch.equal(own, companions)  # the companion is a copy


def test_random_features_are_rectified_projections_that_a_state_keeps():
    network = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.ones(2, network.classifier.dim))
    ridge = Ridge()
    ridge.choose_features(network, FeatureSpec(n_random=50), seed=3)
    with torch.no_grad():
        features = ridge.features(network(torch.randn(3, 3, 32, 32)))
    others, random, constant = features.split([64, 50, 1], dim=1)
    torch.testing.assert_close(random, (others @ ridge.projection).relu())
    assert (constant == 1).all()
    assert 0.9 < float(ridge.projection.std()) * 64**0.5 < 1.1


def test_more_images_of_a_known_class_are_as_if_they_had_come_first():
    features, labels = images()
    late = torch.arange(N) % 4 == 0
    ridges = [empty_ridge(0.5), empty_ridge(0.5)]
    for c in range(CLASSES):
        ridges[0].add(features[labels == c], c)
        ridges[1].add(features[(labels == c) & ~late], c)
    for c in range(CLASSES):
        if ((labels == c) & late).any():
            ridges[1].add(features[(labels == c) & late], c)
    assert same(ridges[0].statistics, ridges[1].statistics)


def test_a_readout_takes_images_away_and_takes_over_those_of_another():
    features, labels = images()
    here, there = torch.arange(N) % 2 == 0, torch.arange(N) % 2 == 1
    a, b = empty_ridge(0.5), empty_ridge(0.5)
    for c in range(CLASSES):
        a.add(features[(labels == c) & here], c)
        if ((labels == c) & there).any():
            b.add(features[(labels == c) & there], c)
    a.merge(b)
    assert same(a.statistics, statistics_of(features, labels))
    for c in torch.unique(labels[there]).tolist():
        a.remove(features[(labels == c) & there], c)
    assert same(a.statistics, statistics_of(features[here], labels[here]))


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_pooled_statistics_solve_to_the_same_weights(balance):
    features, labels = images()
    pooled, by_class = statistics_of(features, labels, balance), statistics_of(features, labels)
    assert pooled.moments.shape[0] == 1
    a, b = (solve_ridge(s, balance=balance, ridge=0.1) for s in (pooled, by_class))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_pooled_statistics_refuse_more_images_of_a_known_class():
    features, labels = images()
    ridge = empty_ridge(0.5, is_pooled=True)
    ridge.add(features[labels == 0][:5], 0)
    with pytest.raises(InvalidInput) as error:
        ridge.add(features[labels == 0][5:], 0)
    assert error.value.code == "readout.statistics.pooled"


def test_pooled_statistics_that_count_images_alike_lose_images_again():
    features, labels = images()
    ridge = empty_ridge(0.0, is_pooled=True)
    for c in range(CLASSES):
        ridge.add(features[labels == c], c)
    before = ridge.statistics
    ridge.add(features[labels == 0][:5], 0)
    ridge.remove(features[labels == 0][:5], 0)
    assert same(ridge.statistics, before)


@pytest.mark.parametrize("n", [60, 9], ids=["more rows than features", "fewer"])
@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_the_ridge_with_the_least_error_on_a_fifth_of_the_patients_is_chosen(balance, n):
    features, labels = images(n=n)
    features = torch.cat([features, features.square()], dim=2)[:, :1] if n == 9 else features
    dim, n_views = features.shape[2], features.shape[1]
    patients, ridges = np.array([f"patient {i % 7}" for i in range(n)]), (1e-3, 0.3, 10.0, 1e3)
    ridge = Ridge(n_features=dim)
    ridge.balance.fill_(balance)
    of_classes = {c: ImageFeatures(features[labels == c], patients[labels == c]) for c in range(CLASSES)}
    for c, of_class in of_classes.items():
        ridge.add(of_class.values, c)
    ridge.choose_on_part(of_classes, ridges=ridges, random=np.random.default_rng(2), and_sharpness=True)

    chosen = np.random.default_rng(2).permutation(np.unique(patients))[:5]
    is_fitted = np.isin(patients, chosen)
    counts = np.bincount(labels[is_fitted], minlength=CLASSES)
    rows, wanted, roots = [], [], []
    for i in np.flatnonzero(is_fitted):
        for view in features[i].numpy():
            rows.append(view)
            wanted.append(np.eye(CLASSES)[labels[i]])
            roots.append(np.sqrt(counts[labels[i]] ** -balance / n_views))
    x, y, w = np.array(rows), np.array(wanted), np.array(roots)[:, None]
    scores = {}
    for rho in ridges:  # least squares with rows √ρ I below
        above = np.vstack([w * x, np.sqrt(rho) * np.eye(dim)])
        weights = np.linalg.lstsq(above, np.vstack([w * y, np.zeros((dim, CLASSES))]), rcond=None)[0]
        scores[rho] = features[~is_fitted].mean(dim=1).numpy() @ weights
    held_out = np.eye(CLASSES)[labels[~is_fitted]]
    best = min(ridges, key=lambda rho: ((scores[rho] - held_out) ** 2).mean())
    assert float(ridge.ridge) == best

    inherent, own = np.bincount(labels, minlength=CLASSES), labels[~is_fitted].numpy()
    losses = {}
    for sharpness in SHARPNESSES.numpy():
        odds = np.exp(sharpness * scores[best]) / inherent ** (1 - balance)
        posterior = odds[np.arange(len(own)), own] / odds.sum(axis=1)
        losses[sharpness] = np.average(-np.log(posterior), weights=1 / inherent[own])
    assert float(ridge.sharpness) == pytest.approx(min(losses, key=losses.__getitem__))


def test_one_patient_alone_chooses_nothing():
    features, labels = images()
    ridge = empty_ridge(0.0)
    ridge.add(features[labels == 0], 0)
    alone = {0: ImageFeatures(features[labels == 0], ["a"] * int((labels == 0).sum()))}
    ridge.choose_on_part(alone, ridges=(5.0,), random=np.random.default_rng(0), and_sharpness=True)
    assert (float(ridge.ridge), float(ridge.sharpness)) == (1.0, 1.0)


def test_a_ridge_below_rounding_errors_is_the_least_of_all_solutions():
    features = 1e6 * torch.eye(DIM)[:3, None].double() + 1e6
    statistics = ClassStatistics.of(features)
    weights = solve_ridge(statistics, balance=0.0, ridge=1e-12)
    expected = np.linalg.lstsq(features[:, 0].numpy(), np.ones((3, 1)), rcond=None)[0]
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-12)


def test_moments_are_summed_in_portions(monkeypatch):
    features, labels = images()
    expected = statistics_of(features, labels)
    monkeypatch.setattr(statistics_module, "MOST_NUMBERS", 3 * VIEWS * DIM)
    assert same(statistics_of(features, labels), expected)
