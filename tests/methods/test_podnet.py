"""PODNet: proxies by k-means, local similarity, NCA, pooled distillation, fine-tuning on the exemplars."""

import itertools
import math

import pytest
import torch
from sklearn.cluster import KMeans

from medcil.errors import InvalidInput
from medcil.methods.podnet import PODNet
from medcil.models.network import NetworkSpec

from ..small import random_images, task_of
from .by_hand import (
    DIM,
    batch_of,
    cosine,
    cross_entropy,
    increment_of,
    labels_drawn_from_exemplars,
    learned,
    mean,
    phases_of,
    tiny_network,
    under,
)

LABELS, SIZES = [0, 1, 2, 3, 4, 3], (3, 2)


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in vector))
    return [x / length for x in vector]


def blobs(n_blobs: int, n_each: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in tight clusters around far directions, of any length; which cluster each is in."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.eye(DIM)[:n_blobs]
    where = torch.arange(n_blobs).repeat_interleave(n_each)
    points = directions[where] + 0.005 * torch.randn(n_blobs * n_each, DIM, generator=generator)
    lengths = 1 + 4 * torch.rand(len(points), 1, generator=generator)
    return lengths * points, where


def new_proxies(n_proxies: int, points: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
    """Of one new class that has these embeddings; the old ones have lengths 1, 2 and 3, and more of each."""
    network = tiny_network(2, n_proxies=n_proxies)
    lengths = 1.0 + torch.arange(2 * n_proxies) % 3
    with torch.no_grad():
        for rows in network.classifier.columns_of_blocks()[0]:
            rows.copy_(torch.nn.functional.normalize(rows) * lengths[:, None])
    increment = increment_of(network, 2, 1, embeddings=lambda label: points, seed=seed)
    next(iter(PODNet(n_proxies=n_proxies).learn(network, increment)))
    return network.classifier.columns_of_blocks()[1][0].detach()


def test_proxies_are_the_centers_of_clusters_far_apart():
    points, where = blobs(4, 8)
    found = [unit(row) for row in new_proxies(4, points).tolist()]
    units = [unit(row) for row in points.tolist()]
    centers = []
    for k in range(4):
        members = [u for u, cluster in zip(units, where.tolist(), strict=True) if cluster == k]
        centers.append(unit([mean(column) for column in zip(*members, strict=True)]))
    for center in centers:
        assert max(cosine(center, proxy) for proxy in found) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_k_means_is_as_good_as_scikit_learns(seed):
    points, _ = blobs(10, 12, seed=seed)
    units = torch.nn.functional.normalize(points)
    proxies = torch.nn.functional.normalize(new_proxies(10, points, seed=seed))
    ours = sum(min(math.dist(u, p) ** 2 for p in proxies.tolist()) for u in units.tolist())
    theirs = KMeans(n_clusters=10, n_init=10, random_state=0).fit(units.double().numpy()).inertia_
    assert ours == pytest.approx(theirs, rel=0.02)


def test_proxies_of_scattered_points_do_not_move_in_another_round():
    """Lloyd's fixed point, nearly: a proxy points where the mean of the points nearest to it does."""
    points = torch.randn(60, DIM, generator=torch.Generator().manual_seed(3))[:, :3]
    points = torch.nn.functional.pad(points, (0, DIM - 3))
    found = [unit(row) for row in new_proxies(4, points).tolist()]
    units = [unit(row) for row in points.tolist()]
    groups = {k: [] for k in range(4)}
    for u in units:
        groups[max(range(4), key=lambda k: cosine(u, found[k]))].append(u)
    means = [[mean(column) for column in zip(*groups[k], strict=True)] for k in range(4)]
    assert all(cosine(m, p) > 0.99 for m, p in zip(means, found, strict=True))


def test_new_proxies_are_as_long_as_the_old_ones_are_on_average():
    points, _ = blobs(4, 8)
    lengths = [math.sqrt(sum(x * x for x in row)) for row in new_proxies(4, points).tolist()]
    old = [1 + i % 3 for i in range(8)]
    assert lengths == pytest.approx([mean(old)] * 4, rel=1e-5)


@pytest.mark.parametrize("n_images", [1, 3])
def test_a_class_with_fewer_images_than_proxies_has_some_twice(n_images):
    points = torch.eye(DIM)[:n_images] * 7
    found = [unit(row) for row in new_proxies(10, points).tolist()]
    assert len(found) == 10
    for point in points.tolist():
        assert max(cosine(point, proxy) for proxy in found) == pytest.approx(1, abs=1e-6)
    for proxy in found:
        assert max(cosine(point, proxy) for point in points.tolist()) == pytest.approx(1, abs=1e-6)


def test_similarity_to_a_class_is_the_softmax_weighted_mean_of_its_proxies_cosines():
    network = tiny_network(2, n_proxies=3).eval()
    phases_of(PODNet(n_proxies=3), 2, 1, network=network)
    images = random_images(4).float() / 255
    with torch.no_grad():
        out = network(images)
        network.classifier.scale.fill_(2.5)
        scaled = network(images).logits
    proxies = network.classifier.weight.tolist()
    for h, found, logits in zip(out.embedding.tolist(), out.cosine.tolist(), scaled.tolist(), strict=True):
        for c in range(3):
            cosines = [cosine(h, proxy) for proxy in proxies[3 * c : 3 * c + 3]]
            weights = [math.exp(s) for s in cosines]
            similarity = sum(w * s for w, s in zip(weights, cosines, strict=True)) / sum(weights)
            assert found[c] == pytest.approx(similarity, abs=1e-5)
            assert logits[c] == pytest.approx(2.5 * similarity, abs=1e-5)


@pytest.mark.parametrize("delta", [0.0, 0.6])
def test_the_classification_is_nca_with_a_hinge(delta):
    eta = 3.0
    batch = batch_of(LABELS, SIZES, scale=eta)
    phase = phases_of(PODNet(margin=delta), 3, 2, network=tiny_network(3, n_proxies=10))["learn"]
    losses = []
    for row, label in zip(batch.out.cosine.tolist(), LABELS, strict=True):
        others = sum(math.exp(eta * s) for c, s in enumerate(row) if c != label)
        losses.append(max(0.0, -math.log(math.exp(eta * (row[label] - delta)) / others)))
    assert min(losses) == 0 or delta > 0
    assert phase.classification(batch).item() == pytest.approx(mean(losses), rel=1e-5)


def test_the_classification_can_be_cross_entropy():
    batch = batch_of(LABELS, SIZES)
    method = PODNet(classification="cross_entropy")
    phase = phases_of(method, 3, 2, network=tiny_network(3, n_proxies=10))["learn"]
    expected = cross_entropy(batch.out.logits.tolist(), LABELS)
    assert phase.classification(batch).item() == pytest.approx(expected, rel=1e-5)


def profile(feature_map: list[list[list[float]]]) -> list[float]:
    """Squares of a map [channel][row][column], summed along the width and along the height."""
    rows = [sum(x * x for x in row) for channel in feature_map for row in channel]
    columns = [sum(x * x for x in column) for channel in feature_map for column in zip(*channel, strict=True)]
    return unit(rows + columns)


@pytest.mark.parametrize(("n_old", "n_new"), [(3, 2), (4, 1), (3, 1)])
def test_both_distillations_grow_with_the_share_of_classes_seen(n_old, n_new):
    batch = batch_of(LABELS, SIZES)
    network = tiny_network(n_old, n_proxies=10)
    phase = phases_of(PODNet(spatial=5.0, flat=8.0), n_old, n_new, network=network)["learn"]
    growth = math.sqrt((n_old + n_new) / n_new)
    spatial = mean(
        [
            mean([math.dist(profile(a), profile(b)) for a, b in zip(new.tolist(), old.tolist(), strict=True)])
            for new, old in zip(batch.out.maps, batch.old.maps, strict=True)
        ]
    )
    pairs = zip(batch.out.embedding.tolist(), batch.old.embedding.tolist(), strict=True)
    flat = mean([1 - cosine(new, old) for new, old in pairs])
    assert phase.terms["pod_spatial"](batch).item() == pytest.approx(5 * growth * spatial, rel=1e-5)
    assert phase.terms["pod_flat"](batch).item() == pytest.approx(8 * growth * flat, rel=1e-5)


def test_the_maps_compared_are_those_of_every_stage_before_its_relu():
    maps = tiny_network(2).eval()(random_images(2).float() / 255).maps
    assert [tuple(m.shape[1:]) for m in maps] == [(16, 10, 10), (32, 5, 5), (64, 3, 3)]
    assert all((m < 0).any() for m in maps)


def test_old_proxies_are_held_while_it_learns_and_move_in_fine_tuning():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(PODNet(n_proxies=3, finetune_share=1.0), *tasks)
    assert list(chapters) == ["learn", "fine-tune"]
    learn, tune = chapters["learn"], chapters["fine-tune"]
    assert learn.moved == set(learn.before) - {"classifier.blocks.0.0"}
    assert tune.moved == {"classifier.blocks.0.0", "classifier.blocks.1.0"}


def test_fine_tuning_moves_the_scale_too_where_told_so():
    tasks = task_of([6, 5]), task_of([7, 4], n_old=2, seed=1)
    _, chapters = learned(PODNet(n_proxies=3, finetune_scale=True), *tasks)
    tune = chapters["fine-tune"]
    assert tune.moved == under("classifier.", tune.before)
    assert "classifier.scale" in tune.moved


def test_fine_tuning_has_the_same_losses_a_fifth_of_the_epochs_and_the_exemplars():
    phases = phases_of(PODNet(), 3, 2, network=tiny_network(3, n_proxies=10))
    learn, tune = phases["learn"], phases["fine-tune"]
    assert set(learn.terms) == {"classification", "pod_spatial", "pod_flat"}
    assert dict(tune.terms) == dict(learn.terms)
    assert (learn.part, tune.part) == ("all", "exemplars")
    assert tune.training is not None
    assert tune.training.epochs == 20
    assert tune.rates == {"classifier": 0.01}
    assert list(phases_of(PODNet(finetune_share=0), 3, 2, network=tiny_network(3, n_proxies=10))) == ["learn"]


@pytest.mark.parametrize("sampler", ["plain", "balanced"])
@pytest.mark.parametrize(("memory", "each"), [({"per_class": 4}, 4), ({"total": 12}, 3)])
def test_fine_tuning_draws_as_many_exemplars_of_every_class_each_once(memory, each, sampler):
    method = PODNet(n_proxies=3, finetune_share=1.0)
    found = labels_drawn_from_exemplars(method, "fine-tune", memory=memory, sampler=sampler)
    assert found == sorted(each * [0, 1, 2, 3])


def test_the_first_task_has_random_proxies_and_its_classification_alone():
    network = tiny_network()
    phases = phases_of(PODNet(), 0, 3, network=network)
    assert list(phases) == ["learn"]
    assert set(phases["learn"].terms) == {"classification"}
    assert network.spec().n_proxies == 10
    numbers = list(itertools.chain(*network.classifier.weight.tolist()))
    assert len(numbers) == 3 * 10 * DIM
    bound = 1 / math.sqrt(DIM)
    assert max(map(abs, numbers)) <= bound
    assert mean([x * x for x in numbers]) == pytest.approx(bound**2 / 3, rel=0.1)


def test_a_backbone_without_stages_is_refused_before_anything_is_trained():
    network = NetworkSpec("mobilenetv3_small_050", last_relu=True, learn_scale=True).build()
    with pytest.raises(InvalidInput, match="stages"):
        next(iter(PODNet().learn(network, increment_of(network, 0, 2))))
