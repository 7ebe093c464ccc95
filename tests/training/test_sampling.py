"""Randomness as a function of its place; what each sampler draws; batches as a fair partition."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medcil.config import Sampler
from medcil.training.sampling import EpochPlan, EpochPlanner, Key, Purpose

QUICK = settings(max_examples=100, deadline=None)
KEY = Key(seed=1, task=2, phase=3, epoch=4)
OTHER_KEYS = [replace(KEY, **{name: 9}) for name in ("seed", "task", "phase", "epoch")]


SAMPLERS = get_args(Sampler)
LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80)
"""Classes of any sizes, some without an image."""
N_OLD = st.integers(0, 6)
BATCH_SIZE = st.integers(2, 24)
SEED = st.integers(0, 1000)


def plan(key=KEY, n=40, batch_size=8, slack=5, sampler="plain") -> EpochPlan:
    return draw([i % 5 for i in range(n)], key, sampler=sampler, batch_size=batch_size, slack=slack)


def draw(labels, key=KEY, *, sampler, n_old=2, batch_size=8, slack=5, **more) -> EpochPlan:
    """Sample i has the i-th label."""
    return planner(labels, sampler=sampler, n_old=n_old, batch_size=batch_size, slack=slack, **more).plan(key)


def planner(labels, *, sampler, n_old=2, batch_size=8, slack=5, **more) -> EpochPlanner:
    return EpochPlanner(
        torch.arange(len(labels)),
        torch.tensor(labels, dtype=torch.int64),
        sampler=sampler,
        n_old=n_old,
        batch_size=batch_size,
        slack=slack,
        **more,
    )


def content(epoch_plan):
    return [
        tensor.tolist() for tensor in (epoch_plan.order, epoch_plan.top, epoch_plan.left, epoch_plan.flip)
    ]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_place_draws_the_same_samples(sampler):
    assert content(plan(sampler=sampler)) == content(plan(replace(KEY), sampler=sampler))


def test_the_same_place_draws_the_same():
    for purpose in Purpose:
        assert KEY.integer(purpose) == replace(KEY).integer(purpose)


@pytest.mark.parametrize("other", OTHER_KEYS, ids=["seed", "task", "phase", "epoch"])
def test_every_part_of_a_place_matters(other):
    for sampler in SAMPLERS:
        mine, others = plan(sampler=sampler), plan(other, sampler=sampler)
        for my_draws, other_draws in zip(content(mine), content(others), strict=True):
            assert my_draws != other_draws
    for purpose in Purpose:
        assert KEY.integer(purpose) != other.integer(purpose)


def test_swapped_parts_are_another_place():
    assert Key(0, 1, 2, 3).integer(Purpose.NOISE) != Key(3, 2, 1, 0).integer(Purpose.NOISE)


def test_every_purpose_draws_its_own():
    assert len({KEY.integer(purpose) for purpose in Purpose}) == len(Purpose)


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    for sampler in SAMPLERS:
        plan(sampler=sampler)
    KEY.integer(Purpose.NOISE)
    assert (torch.rand(1), np.random.rand()) == expected


@QUICK
@given(n=st.integers(2, 400), batch_size=st.integers(2, 64), sampler=st.sampled_from(SAMPLERS[:3]))
@example(n=3, batch_size=2, sampler="plain")
@example(n=3, batch_size=2, sampler="class_aware")
def test_batches_are_a_partition_into_almost_equal_parts(n, batch_size, sampler):
    epoch_plan = plan(n=n, batch_size=batch_size, sampler=sampler)
    n_drawn, slices = len(epoch_plan.order), epoch_plan.slices()
    assert [i for part in slices for i in range(n_drawn)[part]] == list(range(n_drawn))
    assert [part.stop - part.start for part in slices] == list(epoch_plan.sizes)
    assert len(slices) == len(epoch_plan.sizes)
    assert max(epoch_plan.sizes) - min(epoch_plan.sizes) <= 1
    assert max(epoch_plan.sizes) <= max(
        batch_size, 3
    )  # three where batches of two would leave one image over


@QUICK
@given(LABELS, N_OLD, BATCH_SIZE, st.sampled_from(SAMPLERS), st.integers(0, 6))
def test_whatever_is_drawn_fills_its_batches_and_is_cropped_inside_the_image(
    labels, n_old, batch_size, sampler, slack
):
    epoch_plan = draw(labels, sampler=sampler, n_old=n_old, batch_size=batch_size, slack=slack)
    assert sum(epoch_plan.sizes) == len(epoch_plan.order) >= 2
    assert min(epoch_plan.sizes) >= 2  # batch norm needs two
    assert set(epoch_plan.order.tolist()) <= set(range(len(labels)))
    assert epoch_plan.flip.shape == epoch_plan.order.shape
    for place in (epoch_plan.top, epoch_plan.left):
        assert place.shape == epoch_plan.order.shape
        assert 0 <= int(place.min()) <= int(place.max()) <= slack


@QUICK
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=50, unique=True), N_OLD)
def test_a_plain_epoch_takes_every_sample_once(samples, n_old):
    labels = torch.arange(len(samples)) % 5
    epoch_plan = EpochPlanner(
        torch.tensor(samples), labels, sampler="plain", n_old=n_old, batch_size=4, slack=2
    ).plan(KEY)
    assert sorted(epoch_plan.order.tolist()) == sorted(samples)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_lone_sample_is_taken_twice(sampler):
    for n_old in (0, 4):
        epoch_plan = EpochPlanner(
            torch.tensor([7]), torch.tensor([3]), sampler=sampler, n_old=n_old, batch_size=4, slack=0
        ).plan(KEY)
        assert epoch_plan.order.tolist() == [7, 7]
        assert epoch_plan.slices() == [slice(0, 2)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_of_no_samples_none_are_drawn(sampler):
    epoch_plan = draw([], sampler=sampler)
    assert content(epoch_plan) == [[]] * 4
    assert epoch_plan.slices() == []


PINNED = [
    (
        (1, Key(0), 4, 3),
        ([0, 0], [3, 1], [2, 1], [0, 1], [2]),
    ),
    (
        (7, Key(1, 2, 3, 4), 3, 5),
        (
            [20, 50, 10, 60, 40, 0, 30],
            [4, 2, 4, 4, 2, 1, 4],
            [0, 1, 1, 4, 0, 1, 0],
            [0, 0, 1, 1, 1, 0, 0],
            [2, 3, 2],
        ),
    ),
    (
        (10, Key(0, 4, 1, 99), 4, 32),
        (
            [90, 70, 80, 60, 50, 10, 20, 0, 30, 40],
            [32, 0, 26, 9, 18, 10, 5, 27, 32, 23],
            [13, 9, 30, 16, 20, 3, 20, 31, 8, 2],
            [1, 0, 1, 0, 0, 0, 0, 1, 0, 1],
            [3, 4, 3],
        ),
    ),
]
"""Drawn by version 0.1.0, which knew no other sampler; n, key, batch size and slack stand before them."""


@pytest.mark.parametrize(("place", "expected"), PINNED, ids=["lone", "seven", "ten"])
def test_a_plain_epoch_draws_what_it_always_drew(place, expected):
    n, key, batch_size, slack = place
    samples, labels = 10 * torch.arange(n), torch.arange(n) % 3
    epochs = EpochPlanner(samples, labels, sampler="plain", n_old=1, batch_size=batch_size, slack=slack)
    epoch_plan = epochs.plan(key)
    assert (*content(epoch_plan), list(epoch_plan.sizes)) == expected


@QUICK
@given(LABELS, N_OLD, SEED)
def test_a_balanced_epoch_takes_exemplars_once_and_new_classes_as_often_as_each_other(labels, n_old, seed):
    drawn = draw(labels, Key(seed), sampler="balanced", n_old=n_old).order.tolist()
    new_sizes = Counter(label for label in labels if label >= n_old)
    if len(new_sizes) < 2:
        assert drawn == draw(labels, Key(seed), sampler="plain", n_old=n_old).order.tolist()
        return
    assert sorted(i for i in drawn if labels[i] < n_old) == [i for i, c in enumerate(labels) if c < n_old]
    mean = round(sum(new_sizes.values()) / len(new_sizes))
    assert Counter(labels[i] for i in drawn if labels[i] >= n_old) == dict.fromkeys(new_sizes, mean)


def test_a_balanced_epoch_draws_with_replacement_and_mixes_classes():
    labels = [0] * 100 + [1] * 300 + [2] * 500
    drawn = draw(labels, sampler="balanced", n_old=1).order.tolist()
    of_largest = Counter(i for i in drawn if labels[i] == 2)
    # 400 draws from 500 images leave (1 - 1/500)^400 = 45% of them out.
    assert len(of_largest) == pytest.approx(0.55 * 500, abs=30)
    in_first_half = Counter(labels[i] for i in drawn[:450])
    assert [in_first_half[c] for c in range(3)] == pytest.approx([50, 200, 200], abs=40)


def assert_in_rounds(drawn, items):
    """Every one once before any comes again, over and over."""
    for start in range(0, len(drawn), len(items)):
        part = drawn[start : start + len(items)]
        assert len(set(part)) == len(part)
        assert set(part) <= set(items)


@QUICK
@given(LABELS, N_OLD, SEED)
def test_a_class_aware_epoch_visits_classes_in_turn_for_four_draws_each(labels, n_old, seed):
    drawn = draw(labels, Key(seed), sampler="class_aware", n_old=n_old).order.tolist()
    assert len(drawn) == max(len(labels), 2)
    visits = [[labels[i] for i in drawn[start : start + 4]] for start in range(0, len(drawn), 4)]
    assert all(len(set(visit)) == 1 for visit in visits)
    assert_in_rounds([visit[0] for visit in visits], sorted(set(labels)))
    for label in set(labels):
        members = [i for i, c in enumerate(labels) if c == label]
        assert_in_rounds([i for i in drawn if labels[i] == label], members)


def test_a_class_aware_epoch_has_a_new_order_in_every_cycle_and_round():
    labels = [0] * 8 + [1] * 192 + [2] * 200
    drawn = draw(labels, sampler="class_aware").order.tolist()
    cycles = [tuple(labels[i] for i in drawn[start : start + 12 : 4]) for start in range(0, 396, 12)]
    assert len(set(cycles)) == 6
    of_smallest = [i for i in drawn if labels[i] == 0]
    rounds = {tuple(of_smallest[start : start + 8]) for start in range(0, 128, 8)}
    assert len(rounds) == 16


@QUICK
@given(LABELS, N_OLD, BATCH_SIZE, SEED, st.sampled_from([None, 0.01, 0.25, 0.5, 2.0]))
def test_a_batch_of_two_streams_has_a_share_of_its_size_in_exemplars_beside_the_new(
    labels, n_old, batch_size, seed, share
):
    shared = {} if share is None else {"exemplar_share": share}
    epoch_plan = draw(labels, Key(seed), sampler="two_stream", n_old=n_old, batch_size=batch_size, **shared)
    drawn = epoch_plan.order.tolist()
    new = [i for i, c in enumerate(labels) if c >= n_old]
    exemplars = [i for i, c in enumerate(labels) if c < n_old]
    if not new or not exemplars:
        assert drawn == draw(labels, Key(seed), sampler="plain", n_old=n_old).order.tolist()
        return
    assert sorted(i for i in drawn if labels[i] >= n_old) == new
    assert_in_rounds([i for i in drawn if labels[i] < n_old], exemplars)
    new_sizes = [sum(labels[i] >= n_old for i in drawn[part]) for part in epoch_plan.slices()]
    assert len(new_sizes) == -(-len(new) // batch_size)
    assert max(new_sizes) - min(new_sizes) <= 1
    assert max(new_sizes) <= batch_size
    beside = max(1, round(batch_size * (share or 0.25)))
    if share is None:  # no exemplar less than once
        beside = max(beside, -(-len(exemplars) // len(new_sizes)))
        assert {i for i in drawn if labels[i] < n_old} == {*exemplars}
    assert list(epoch_plan.sizes) == [size + beside for size in new_sizes]


def test_two_streams_are_shuffled_each():
    labels = [0] * 40 + [1] * 400
    drawn = draw(labels, sampler="two_stream", n_old=1, batch_size=40).order.tolist()
    new = [i for i in drawn if labels[i] == 1]
    rounds = [[i for i in drawn if labels[i] == 0][start : start + 40] for start in (0, 40)]
    assert new != sorted(new)
    assert rounds[0] != rounds[1] != list(range(40))


def test_crops_reach_every_place_and_half_of_the_images_are_flipped():
    large = plan(n=4000, slack=3)
    for place in (large.top, large.left):
        assert torch.bincount(place, minlength=4).tolist() == pytest.approx([1000] * 4, abs=150)
    assert int(large.flip.sum()) == pytest.approx(2000, abs=150)
    assert not torch.equal(large.top, large.left)


@QUICK
@given(LABELS, N_OLD, BATCH_SIZE, st.sampled_from(SAMPLERS), st.integers(1, 5))
def test_class_counts_are_the_mean_over_the_epochs_plans(labels, n_old, batch_size, sampler, epochs):
    of_phase = planner(labels, sampler=sampler, n_old=n_old, batch_size=batch_size)
    counts = of_phase.class_counts(KEY, epochs=epochs, n_classes=6)
    drawn = Counter(
        labels[i] for e in range(epochs) for i in of_phase.plan(replace(KEY, epoch=e)).order.tolist()
    )
    assert counts.tolist() == pytest.approx([drawn[c] / epochs for c in range(6)])


def test_class_counts_of_many_epochs_need_no_augmentation_and_no_order_twice(monkeypatch):
    """One order where every epoch draws the same numbers, else one for each epoch, and no crops."""
    purposes = []
    generator = Key.generator

    def recording(key, purpose):
        purposes.append(purpose)
        return generator(key, purpose)

    monkeypatch.setattr(Key, "generator", recording)
    for sampler, n_orders in {"plain": 1, "balanced": 1, "class_aware": 50, "two_stream": 50}.items():
        purposes.clear()
        planner([0, 0, 1, 2, 2, 2], sampler=sampler).class_counts(KEY, epochs=50, n_classes=3)
        assert purposes == [Purpose.ORDER] * n_orders
