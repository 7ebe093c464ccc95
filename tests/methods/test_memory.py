"""Herding against the definition, tried out candidate by candidate; what the memory keeps and forgets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.data.samples import Lease, Samples, TensorImages, no_samples
from medcil.methods.memory import herd, renew_memory

from ..small import SIDE, random_images, random_samples

QUICK = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**20)


def embeddings_of(n, dim, seed):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def distances(embeddings, chosen):
    """By candidate: how far the mean of the chosen and the candidate is from the class mean."""
    unit = embeddings.double() / embeddings.double().norm(dim=1, keepdim=True)
    return {
        i: float((unit.mean(dim=0) - unit[[*chosen, i]].mean(dim=0)).norm())
        for i in range(len(unit))
        if i not in chosen
    }


def herd_by_definition(embeddings, size):
    chosen = []
    while len(chosen) < min(size, len(embeddings)):
        candidates = distances(embeddings, chosen)
        chosen.append(min(candidates, key=candidates.get))
    return chosen


@QUICK
@given(n=st.integers(1, 14), dim=st.integers(2, 6), size=st.integers(0, 16), seed=SEEDS)
def test_every_choice_is_the_best_there_is(n, dim, size, seed):
    embeddings = embeddings_of(n, dim, seed)
    chosen = herd(embeddings, size).tolist()
    for k, choice in enumerate(chosen):
        candidates = distances(embeddings, chosen[:k])
        assert (
            candidates[choice] <= min(candidates.values()) + 1e-6
        )  # two samples are equally far from their mean


@pytest.mark.parametrize("seed", range(3))
def test_herding_is_icarls(seed):
    embeddings = embeddings_of(80, 16, seed)
    assert herd(embeddings, 20).tolist() == herd_by_definition(embeddings, 20)


@QUICK
@given(n=st.integers(1, 40), size=st.integers(0, 40), smaller=st.integers(0, 40), seed=SEEDS)
def test_a_prefix_is_the_smaller_herd(n, size, smaller, seed):
    embeddings = embeddings_of(n, 8, seed)
    large, small = herd(embeddings, max(size, smaller)), herd(embeddings, min(size, smaller))
    assert small.tolist() == large[: len(small)].tolist()


@QUICK
@given(n=st.integers(0, 20), size=st.integers(0, 30), seed=SEEDS)
def test_no_sample_is_chosen_twice(n, size, seed):
    chosen = herd(embeddings_of(n, 3, seed), size).tolist()
    assert len(set(chosen)) == len(chosen) == min(n, size)
    assert all(0 <= i < n for i in chosen)


def test_equal_samples_are_chosen_one_after_another():
    assert sorted(herd(torch.ones(4, 3), 10).tolist()) == [0, 1, 2, 3]


def test_herding_does_not_change_the_embeddings():
    embeddings = embeddings_of(9, 4, 0)
    before = embeddings.clone()
    herd(embeddings, 5)
    assert torch.equal(embeddings, before)


def test_the_first_exemplar_is_the_one_nearest_to_the_mean():
    angles = torch.tensor([0.0, 0.3, 0.5, 0.8, 1.2])
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor(
        [[1.0], [5.0], [0.1], [2.0], [9.0]]
    )
    assert herd(embeddings, 1).tolist() == [2]


def renewed(memory, new, table, *, n_old, n_new, quota):
    return renew_memory(memory, new, lambda label: table[label], n_old=n_old, n_new=n_new, quota=quota)


def a_memory(counts) -> Samples:
    return random_samples(counts, seed=5).copied()


@pytest.mark.parametrize("quota", [0, 1, 2, 3, 50])
def test_old_classes_keep_a_prefix_and_new_ones_get_a_herd(quota):
    memory = a_memory([3, 1])
    mixed = torch.tensor([3, 2, 2, 3, 3, 2, 3, 3])
    new = Samples(TensorImages(random_images(len(mixed), seed=6)), mixed)
    table = {label: embeddings_of(int((mixed == label).sum()), 4, label) for label in (2, 3)}
    after = renewed(memory, new, table, n_old=2, n_new=2, quota=quota)

    expected = []
    for label in (0, 1):
        expected += [(image, label) for image in memory.of_class(label).read_all()[:quota]]
    for label in (2, 3):
        images = new.of_class(label).read_all()
        expected += [(images[i], label) for i in herd_by_definition(table[label], quota)]
    assert after.labels.tolist() == [label for _, label in expected]
    for image, (wanted, _) in zip(after.read_all(), expected, strict=True):
        assert torch.equal(image, wanted)


def test_a_smaller_quota_later_leaves_a_prefix_of_every_class():
    memory = no_samples(SIDE)
    table = {label: embeddings_of(9, 4, label) for label in range(4)}
    for label, quota in enumerate((8, 4, 2, 2)):
        new = random_samples([9], first_label=label, seed=label)
        memory = renewed(memory, new, table, n_old=label, n_new=1, quota=quota)
    assert memory.class_counts(4).tolist() == [2, 2, 2, 2]
    for label in range(4):
        images = random_samples([9], first_label=label, seed=label).read_all()
        chosen = herd_by_definition(table[label], 2)
        assert torch.equal(memory.of_class(label).read_all(), images[chosen])


def test_exemplars_have_pixels_of_their_own():
    pixels = random_images(4, seed=7)
    lease = Lease(TensorImages(pixels))
    new = Samples(lease, torch.zeros(4, dtype=torch.int64))
    table = {0: embeddings_of(4, 3, 0)}
    memory = renewed(no_samples(SIDE), new, table, n_old=0, n_new=1, quota=2)
    expected = pixels[herd_by_definition(table[0], 2)]
    lease.end()
    pixels.zero_()
    assert torch.equal(memory.read_all(), expected)


def test_the_memory_given_is_left_as_it_is():
    memory = a_memory([3])
    before = memory.read_all()
    after = renewed(
        memory, random_samples([2], first_label=1), {1: embeddings_of(2, 3, 0)}, n_old=1, n_new=1, quota=1
    )
    assert len(after) == 2
    assert len(memory) == 3
    assert torch.equal(memory.read_all(), before)


def test_the_memory_can_hold_very_many_classes():
    n_classes = 1200
    labels = torch.arange(n_classes)
    new = Samples(TensorImages(random_images(n_classes, side=1)), labels)
    memory = renew_memory(
        no_samples(1), new, lambda label: torch.ones(1, 2), n_old=0, n_new=n_classes, quota=1
    )
    assert torch.equal(memory.labels, labels)
    assert torch.equal(memory.read_all(), new.read_all())
