"""Cropping, flipping and normalizing against slices and torchvision."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import functional as vision

from medcil.config import Views
from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, crop_and_flip, views_of

from ..small import random_images


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_crops_are_slices(data):
    n_stored, side = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    crop = data.draw(st.integers(1, side))
    place = st.integers(0, side - crop)
    draws = data.draw(
        st.lists(st.tuples(st.integers(0, n_stored - 1), place, place, st.booleans()), max_size=6)
    )
    pixels = random_images(n_stored, side=side)
    columns = list(zip(*draws, strict=True)) or [[], [], [], []]
    indices, top, left = (torch.tensor(column, dtype=torch.int64) for column in columns[:3])
    crops = crop_and_flip(pixels, indices, top, left, torch.tensor(columns[3], dtype=torch.bool), crop=crop)
    assert crops.shape == (len(draws), 3, crop, crop)
    for actual, (i, y, x, is_flipped) in zip(crops, draws, strict=True):
        expected = pixels[i, :, y : y + crop, x : x + crop]
        assert torch.equal(actual, expected.flip(-1) if is_flipped else expected)


@pytest.mark.parametrize(
    ("side", "crop"), [(7, 5), (7, 4), (8, 5), (8, 4), (6, 6), (5, 5), (1, 1), (256, 224)]
)
def test_turned_crops_are_numpys(side, crop):
    n = 3 * 8
    random = np.random.default_rng(side)
    pixels = random_images(4, side=side)
    indices, top, left = (random.integers(0, end, n) for end in (4, side - crop + 1, side - crop + 1))
    flip, turns = np.arange(n) % 2 == 1, np.arange(n) // 2 % 4
    places = (torch.from_numpy(numbers) for numbers in (indices, top, left, flip))
    crops = crop_and_flip(pixels, *places, crop=crop, turns=torch.from_numpy(turns))
    assert crops.shape == (n, 3, crop, crop)
    for k, actual in enumerate(crops.numpy()):
        cut = pixels[indices[k]].numpy()[:, top[k] : top[k] + crop, left[k] : left[k] + crop]
        expected = np.rot90(np.flip(cut, 2) if flip[k] else cut, turns[k], axes=(1, 2))
        np.testing.assert_array_equal(actual, expected)


def test_normalizing_is_torchvisions():
    images = random_images(5, side=6)
    expected = vision.normalize(images.float() / 255, IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(Preprocessing(side=8, crop=6).normalize(images), expected)


def test_normalizing_subtracts_the_mean_and_divides_by_the_deviation():
    preprocessing = Preprocessing(side=1, crop=1, mean=(0.5, 0.0, 1.0), std=(0.5, 2.0, 0.25))
    image = torch.tensor([255, 51, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    assert preprocessing.normalize(image).flatten().tolist() == pytest.approx([1.0, 0.1, -4.0])


def test_slack_is_the_room_of_a_crop():
    assert Preprocessing(side=256, crop=224).slack == 32
    assert Preprocessing(side=8, crop=8).slack == 0


@pytest.mark.parametrize("views", get_args(Views))
@pytest.mark.parametrize("crop", [4, 5])
def test_views_are_numpys_symmetries_and_the_images_as_they_are_come_first(views, crop):
    images = random_images(3, side=crop).float()
    found = views_of(images, views).numpy().reshape(views, 3, 3, crop, crop)
    np.testing.assert_array_equal(found[0], images)
    for i, image in enumerate(images.numpy()):
        turns = range(4 if views == 8 else 1)
        upright = [np.rot90(image, turn, axes=(1, 2)) for turn in turns]
        expected = [one for own in upright for one in (own, np.flip(own, 2))][:views]
        assert len({one.tobytes() for one in expected}) == views
        assert {one.tobytes() for one in found[:, i]} == {one.tobytes() for one in expected}
