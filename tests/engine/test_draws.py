"""Randomness as a function of its place; batches as a fair partition."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medcil.engine.draws import Key, Purpose, draw_noise, plan_epoch

QUICK = settings(max_examples=100, deadline=None)
KEY = Key(seed=1, task=2, phase=3, epoch=4)
OTHER_KEYS = [replace(KEY, **{name: 9}) for name in ("seed", "task", "phase", "epoch")]


def plan(key=KEY, n=40, batch_size=8, slack=5):
    return plan_epoch(torch.arange(n), key, batch_size=batch_size, slack=slack)


def content(epoch_plan):
    return [
        tensor.tolist() for tensor in (epoch_plan.order, epoch_plan.top, epoch_plan.left, epoch_plan.flip)
    ]


def test_the_same_place_draws_the_same():
    assert content(plan()) == content(plan(replace(KEY)))
    assert torch.equal(draw_noise(KEY, 0, (3, 4)), draw_noise(replace(KEY), 0, (3, 4)))
    assert KEY.integer(Purpose.LAYERS) == replace(KEY).integer(Purpose.LAYERS)


@pytest.mark.parametrize("other", OTHER_KEYS, ids=["seed", "task", "phase", "epoch"])
def test_every_part_of_a_place_matters(other):
    for mine, others in zip(content(plan()), content(plan(other)), strict=True):
        assert mine != others
    assert not torch.equal(draw_noise(KEY, 0, (3, 4)), draw_noise(other, 0, (3, 4)))
    assert KEY.integer(Purpose.LAYERS) != other.integer(Purpose.LAYERS)


def test_swapped_parts_are_another_place():
    assert not torch.equal(draw_noise(Key(0, 1, 2, 3), 0, (2, 2)), draw_noise(Key(3, 2, 1, 0), 0, (2, 2)))


def test_every_purpose_and_step_draws_its_own():
    assert len({KEY.integer(purpose) for purpose in Purpose}) == len(Purpose)
    assert len({KEY.generator(Purpose.NOISE, step).integers(2**63) for step in range(50)}) == 50
    assert not torch.equal(draw_noise(KEY, 0, (3, 4)), draw_noise(KEY, 1, (3, 4)))


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    plan()
    draw_noise(KEY, 0, (3, 4))
    assert (torch.rand(1), np.random.rand()) == expected


@QUICK
@given(n=st.integers(2, 400), batch_size=st.integers(2, 64))
@example(n=3, batch_size=2)
def test_batches_are_a_partition_into_almost_equal_parts(n, batch_size):
    slices = plan(n=n, batch_size=batch_size).slices()
    assert [i for part in slices for i in range(n)[part]] == list(range(n))
    sizes = [len(range(n)[part]) for part in slices]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2  # batch norm needs two
    assert max(sizes) <= max(batch_size, 3)  # three where batches of two would leave one image over


@QUICK
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=50, unique=True), st.integers(0, 6))
def test_an_epoch_takes_every_sample_once_and_crops_inside_the_image(samples, slack):
    epoch_plan = plan_epoch(torch.tensor(samples), KEY, batch_size=4, slack=slack)
    assert sorted(epoch_plan.order.tolist()) == sorted(samples)
    for place in (epoch_plan.top, epoch_plan.left):
        assert place.shape == epoch_plan.order.shape
        assert 0 <= int(place.min()) <= int(place.max()) <= slack


def test_a_lone_sample_is_taken_twice():
    epoch_plan = plan_epoch(torch.tensor([7]), KEY, batch_size=4, slack=0)
    assert epoch_plan.order.tolist() == [7, 7]
    assert epoch_plan.slices() == [slice(0, 2)]


def test_crops_reach_every_place_and_half_of_the_images_are_flipped():
    large = plan(n=4000, slack=3)
    for place in (large.top, large.left):
        assert torch.bincount(place, minlength=4).tolist() == pytest.approx([1000] * 4, abs=150)
    assert int(large.flip.sum()) == pytest.approx(2000, abs=150)
    assert not torch.equal(large.top, large.left)


def test_noise_is_standard_normal():
    noise = draw_noise(KEY, 0, (100, 100))
    assert noise.dtype == torch.float32
    assert noise.mean().item() == pytest.approx(0, abs=0.05)
    assert noise.std().item() == pytest.approx(1, abs=0.05)
