"""Which images a phase may draw, against plain loops over the labels."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from medcil.training.sampling import Key, choose_part

from ..small import herd_by_hand

QUICK = settings(max_examples=80, deadline=None)
LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=60)
"""Classes of any sizes, in any order, some without an image."""
N_OLD = st.integers(0, 6)
QUOTA = st.integers(0, 30)
KEY = Key(seed=1, task=2, phase=1)


def embeddings_of(labels, label) -> torch.Tensor:
    generator = torch.Generator().manual_seed(label)
    return torch.randn(labels.count(label), 4, generator=generator)


def chosen(part, labels, key=KEY, *, n_old=2, quota=20) -> list[int]:
    indices = choose_part(
        part,
        torch.tensor(labels),
        key,
        n_old=n_old,
        quota=quota,
        embeddings=lambda label: embeddings_of(labels, label),
    )
    assert indices.dtype == torch.int64
    return indices.tolist()


@QUICK
@given(labels=LABELS, n_old=N_OLD, quota=QUOTA)
def test_all_is_everything_and_new_the_new_classes(labels, n_old, quota):
    assert chosen("all", labels, n_old=n_old, quota=quota) == list(range(len(labels)))
    new = [i for i, label in enumerate(labels) if label >= n_old]
    assert chosen("new", labels, n_old=n_old, quota=quota) == new


@QUICK
@given(labels=LABELS, n_old=N_OLD, quota=QUOTA)
def test_exemplars_are_those_of_the_memory_and_herds_of_the_new_classes(labels, n_old, quota):
    assume(quota != 1 or 2 not in Counter(labels).values())  # two images are as near to their mean
    expected = []
    for label in range(6):
        members = [i for i, of in enumerate(labels) if of == label]
        if label < n_old:
            expected += members[:quota]  # the memory is herded: the first are the best
        else:
            expected += [members[k] for k in herd_by_hand(embeddings_of(labels, label), quota)]
    assert chosen("exemplars", labels, n_old=n_old, quota=quota) == sorted(expected)


def test_exemplars_of_a_memory_that_must_shrink_are_as_many_for_old_and_new_classes():
    labels = [2] * 9 + [3] * 7 + [0] * 6 + [1] * 6  # six of each old class still, but room for four
    counts = Counter(labels[i] for i in chosen("exemplars", labels, quota=4))
    assert counts == {0: 4, 1: 4, 2: 4, 3: 4}


@QUICK
@given(labels=LABELS, n_old=N_OLD, quota=QUOTA, seed=st.integers(0, 99))
@example(labels=[0, 1, 1], n_old=1, quota=20, seed=0)
def test_what_is_kept_back_is_a_tenth_of_the_memory_as_many_of_every_class(labels, n_old, quota, seed):
    """But one at least, where there is a memory at all; and never all images of a class."""
    key = Key(seed)
    kept_back = chosen("kept_back", labels, key, n_old=n_old, quota=quota)
    counts = Counter(labels[i] for i in kept_back)
    wanted = 0 if quota == 0 else max(1, round(quota / 10))
    smallest = min(Counter(labels).values())
    assert all(counts[label] == min(wanted, smallest - 1) for label in set(labels))
    assert kept_back == sorted(set(kept_back))


@QUICK
@given(labels=LABELS, n_old=N_OLD, quota=QUOTA, seed=st.integers(0, 99))
def test_the_rest_is_all_but_what_is_kept_back(labels, n_old, quota, seed):
    parts = (chosen(part, labels, Key(seed), n_old=n_old, quota=quota) for part in ("kept_back", "rest"))
    kept_back, rest = map(set, parts)
    assert kept_back.isdisjoint(rest)
    assert kept_back | rest == set(range(len(labels)))
    assert {labels[i] for i in rest} == set(labels)


@pytest.mark.parametrize("part", ["kept_back", "rest"])
def test_the_same_images_are_kept_back_in_every_phase_of_a_task(part):
    labels = [i % 4 for i in range(200)]
    parts = [chosen(part, labels, replace(KEY, phase=phase)) for phase in range(3)]
    assert parts[0] == parts[1] == parts[2]
    others = [chosen(part, labels, replace(KEY, **{name: 9})) for name in ("seed", "task")]
    assert parts[0] not in others


def test_every_image_has_its_chance_to_be_kept_back():
    labels = [0] * 6 + [1] * 10
    times = Counter(i for seed in range(400) for i in chosen("kept_back", labels, Key(seed), quota=20))
    # Two of each class: 400 · 2 / 6 and 400 · 2 / 10 times each, give or take four standard deviations.
    assert all(abs(times[i] - 400 / 3) < 4 * (400 * 2 / 9) ** 0.5 for i in range(6))
    assert all(abs(times[i] - 80) < 4 * (400 * 0.16) ** 0.5 for i in range(6, 16))


def test_nothing_is_kept_back_where_a_class_has_a_single_image():
    assert chosen("kept_back", [0, 0, 0, 1, 2, 2, 2], quota=20) == []
    assert chosen("rest", [0, 0, 0, 1, 2, 2, 2], quota=20) == list(range(7))


@pytest.mark.parametrize("part", ["exemplars", "kept_back"])
def test_a_memory_without_room_has_no_part_to_offer(part):
    assert chosen(part, [0, 0, 1, 1, 2, 2, 2], quota=0) == []


@pytest.mark.parametrize("part", ["all", "new", "kept_back", "rest"])
def test_only_herding_asks_for_embeddings(part):
    def refuse(label):
        raise AssertionError("nothing needs to be embedded")

    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    assert len(choose_part(part, labels, KEY, n_old=1, quota=5, embeddings=refuse))
