"""Cropping, flipping and normalizing against slices and torchvision."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import functional as vision

from medcil.config import Augmentation, Views
from medcil.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    crop_and_flip,
    draw_tones,
    draw_transforms,
    draw_turns,
    transformed,
    turned_transforms,
    views_of,
)
from medcil.training.sampling import Key
from medcil.training.state import load_state, save_state

from ..small import new_state, plain_epoch, random_images


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
        turns = (0, 2, 1, 3)[: max(1, views // 2)]
        upright = [np.rot90(image, turn, axes=(1, 2)) for turn in turns]
        expected = [one for own in upright for one in (own, np.flip(own, 2))][:views]
        assert len({one.tobytes() for one in expected}) == views
        assert {one.tobytes() for one in found[:, i]} == {one.tobytes() for one in expected}


IDENTITY = torch.tensor([[1.0, 0, 0], [0, 1, 0]])


def drawn(augmentation: str, n: int = 4000, seed: int = 0) -> np.ndarray:
    return draw_transforms(augmentation, n, np.random.default_rng(seed)).double().numpy()


def seen(matrix: torch.Tensor, *, crop: int = 10) -> torch.Tensor:
    return transformed(random_images(3), torch.tensor([2, 0]), matrix.expand(2, 2, 3), crop=crop)


def test_the_identity_shows_the_images_as_they_are():
    assert torch.equal(seen(IDENTITY), random_images(3)[[2, 0]])


def test_a_mirror_and_a_quarter_turn_are_exact():
    mirror = IDENTITY * torch.tensor([-1.0, 1, 1])
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0]])
    assert torch.equal(seen(mirror), random_images(3)[[2, 0]].flip(3))
    assert torch.equal(seen(turn), torch.rot90(random_images(3)[[2, 0]], 1, (2, 3)))


@pytest.mark.parametrize("turns", range(4))
def test_a_transformation_can_be_followed_by_quarter_turns(turns):
    box = torch.tensor([[0.5, 0, -0.5], [0, 0.5, 0.5]])
    turned = turned_transforms(box.expand(2, 2, 3), torch.full((2,), turns))
    assert torch.equal(seen(turned[0]), torch.rot90(seen(box), turns, (2, 3)))


def test_beyond_the_edges_it_is_black():
    shifted = torch.tensor([[1.0, 0, 2], [0, 1, 0]])
    assert (seen(shifted) == 0).all()


def test_a_quarter_of_the_image_is_shown_in_full_size():
    image = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    image[:, :, 4:, :4] = 200  # below, on the left
    box = torch.tensor([[0.5, 0, -0.5], [0, 0.5, 0.5]])
    shown = transformed(image, torch.tensor([0]), box[None], crop=8)
    assert (shown[:, :, 1:-1, 1:-1] == 200).all()  # the rim is mixed with what lies beyond it


@pytest.mark.parametrize(("augmentation", "whole"), [("resized_crop", 1.25), ("fundus", 1.0)])
def test_half_of_the_images_are_mirrored(augmentation, whole):
    determinants = np.linalg.det(drawn(augmentation)[:, :, :2])
    assert np.mean(determinants < 0) == pytest.approx(0.5, abs=0.04)
    assert (np.abs(determinants) <= whole**2 + 1e-6).all()


def test_a_resized_crop_takes_8_to_100_percent_of_the_padded_image_and_stays_in_it():
    matrices = drawn("resized_crop")
    width, height = np.abs(matrices[:, 0, 0]) / 1.25, matrices[:, 1, 1] / 1.25
    area, ratio = width * height, width / height
    assert area.min() == pytest.approx(0.08, abs=0.01)
    assert area.max() > 0.97
    # Uniform but for the boxes that do not fit, which are large and long.
    assert np.median(area[area < 0.5]) == pytest.approx((0.08 + 0.5) / 2, abs=0.02)
    assert 3 / 4 - 1e-6 <= ratio.min() < 0.77 < 1.3 < ratio.max() <= 4 / 3 + 1e-6
    edges = np.abs(matrices[:, :, 2] / 1.25) + np.stack([width, height], axis=1)
    assert edges.max() <= 1 + 1e-6
    assert edges.max() > 0.99
    assert (matrices[:, 0, 1] == 0).all()


def test_a_fundus_is_turned_by_any_angle_and_shifted_a_little():
    matrices = drawn("fundus")
    upright = matrices.copy()
    upright[:, :, 0] *= np.sign(np.linalg.det(matrices[:, :, :2]))[:, None]
    area = np.linalg.det(upright[:, :, :2])
    assert area.min() >= 0.8 - 1e-6
    assert area.max() <= 1 + 1e-6
    angles = np.arctan2(upright[:, 1, 0], upright[:, 0, 0])
    quarter, _ = np.histogram(angles, bins=4, range=(-math.pi, math.pi))
    assert quarter / len(angles) == pytest.approx([0.25] * 4, abs=0.04)
    # A box off the center by at most 1 - .77, and 5% of the width.
    assert 0.1 < np.abs(matrices[:, :, 2]).max() < 0.1 * math.sqrt(2) + 0.25


@pytest.mark.parametrize("augmentation", ["crop", "dihedral"])
def test_crops_at_full_scale_need_no_transformation(augmentation):
    assert draw_transforms(augmentation, 5, np.random.default_rng(0)) is None
    assert plain_epoch(6, Key(0), batch_size=2, augmentation=augmentation).transforms is None


def test_a_strong_crop_has_half_the_area_or_more_in_all_eight_symmetries_and_stays_in_the_image():
    matrices = drawn("strong")
    axes = matrices[:, :, :2]
    area = np.abs(np.linalg.det(axes))
    assert area.min() == pytest.approx(0.5, abs=0.01)
    assert 0.97 < area.max() <= 1 + 1e-6
    corners = np.einsum("nij,kj->nki", axes, np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]))
    corners += matrices[:, None, :, 2]
    assert np.abs(corners).max() <= 1 + 1e-6  # nothing black
    assert np.abs(corners).max() > 0.999
    signs = np.sign(np.round(axes, 6)).reshape(-1, 4)
    symmetries, counts = np.unique(signs, axis=0, return_counts=True)
    assert len(symmetries) == 8
    assert counts / len(signs) == pytest.approx([1 / 8] * 8, abs=0.03)


def test_tones_are_a_factor_and_an_offset_of_each_channel():
    tones = torch.tensor([[[1.0, 0], [0.6, 10], [2, -300]]]).expand(2, 3, 2)
    images = random_images(3)[[2, 0]]
    toned = transformed(
        random_images(3), torch.tensor([2, 0]), IDENTITY.expand(2, 2, 3), crop=10, tones=tones
    )
    assert torch.equal(toned[:, 0], images[:, 0])
    assert toned[:, 1].tolist() == (images[:, 1].float() * 0.6 + 10).round().tolist()
    assert toned[:, 2].tolist() == (images[:, 2].float() * 2 - 300).clamp(0, 255).tolist()


def test_strong_tones_change_contrast_by_a_fifth_and_gray_by_a_tenth():
    tones = draw_tones("strong", 4000, np.random.default_rng(0)).double().numpy()
    factor, offset = tones[..., 0], tones[..., 1]
    assert (factor.min(), factor.max()) == pytest.approx((0.8 * 0.9, 1.2 * 1.1), abs=0.02)
    assert factor.mean() == pytest.approx(1, abs=0.01)
    assert (offset == offset[:, :1]).all()  # one shift for all channels
    gray = factor * 127.5 + offset - 127.5  # what becomes of the middle of the range
    assert np.abs(gray).max() == pytest.approx(25.5 + 1.2 * 0.1 * 127.5, abs=3)
    assert gray.mean() == pytest.approx(0, abs=1)
    others = set(get_args(Augmentation)) - {"strong"}
    assert all(draw_tones(name, 3, np.random.default_rng(0)) is None for name in others)


def test_all_eight_symmetries_of_the_square_are_equally_likely_at_every_place():
    """Recognized by the pixels: of the whole image, no two symmetries show the same."""
    image, n = random_images(1, side=3), 8000
    symmetries = [
        np.rot90(mirrored, k, (1, 2)) for mirrored in (image[0], image[0].flip(2)) for k in range(4)
    ]
    names = {symmetry.tobytes(): number for number, symmetry in enumerate(symmetries)}
    assert len(names) == 8
    plan = plain_epoch(n, Key(5), batch_size=8, slack=1, augmentation="dihedral")
    nowhere = torch.zeros(n, dtype=torch.int64)
    seen = crop_and_flip(image, nowhere, nowhere, nowhere, plan.flip, crop=3, turns=plan.turns)
    found = [names[pixels.tobytes()] for pixels in seen.numpy()]
    counts = np.bincount(8 * (2 * plan.top + plan.left).numpy() + found, minlength=32)
    assert counts.tolist() == pytest.approx([n / 32] * 32, abs=5 * math.sqrt(n / 32))


def test_only_dihedral_turns_by_right_angles():
    for augmentation in get_args(Augmentation):
        turns = plain_epoch(9, Key(0), batch_size=3, augmentation=augmentation).turns
        assert (turns is None) == (augmentation != "dihedral")
    assert draw_turns(0, np.random.default_rng(0)).shape == (0,)


MATRICES = {
    "crop": None,
    "dihedral": None,
    "resized_crop": [
        [-0.525137, 0, 0.410154, 0, 0.680402, 0.322165],
        [-1.217033, 0, -0.018329, 0, 1.109113, 0.052780],
        [-1.172396, 0, -0.021267, 0, 1.209117, -0.036095],
    ],
    "fundus": [
        [0.886827, 0.352963, 0.121124, -0.339234, 0.852332, 0.067968],
        [-0.920192, 0.173654, 0.035009, 0.178915, 0.948072, 0.086316],
        [0.402385, 0.725749, -0.053267, -0.853697, 0.473325, -0.063147],
    ],
    "strong": [
        [-0.669525, 0, 0.186994, 0, 0.867482, 0.074952],
        [0, -0.920814, -0.044025, 0.995673, 0, 0.001621],
        [0.959556, 0, -0.011083, 0, 0.989611, -0.009172],
    ],
}
"""Those of `crop`, `resized_crop` and `fundus` from before there were `dihedral`, which crops as `crop` does,
and `strong`."""
TONES = [
    [1.1586, -30.1483, 1.0757, -30.1483, 1.0679, -30.1483],
    [1.0926, -10.0516, 1.1187, -10.0516, 1.1511, -10.0516],
    [0.9869, -18.5121, 1.0173, -18.5121, 1.0034, -18.5121],
]


@pytest.mark.parametrize("augmentation", get_args(Augmentation))
def test_every_augmentation_draws_what_it_always_drew(augmentation):
    plan = plain_epoch(3, Key(1, 2, 3, 4), batch_size=3, slack=5, augmentation=augmentation)
    places = [numbers.tolist() for numbers in (plan.order, plan.top, plan.left, plan.flip)]
    assert places == [[1, 2, 0], [4, 2, 4], [4, 2, 1], [True, True, True]]
    if MATRICES[augmentation] is None:
        assert plan.transforms is None
    else:
        assert plan.transforms.flatten(1).numpy() == pytest.approx(np.array(MATRICES[augmentation]), abs=2e-6)
    if augmentation == "dihedral":
        assert plan.turns.tolist() == [1, 0, 2]
    if augmentation == "strong":
        assert plan.tones.flatten(1).numpy() == pytest.approx(np.array(TONES), abs=2e-4)


def test_what_training_images_undergo_is_kept_with_the_model(tmp_path):
    preprocessing = Preprocessing(side=10, crop=8, augmentation="fundus")
    save_state(replace(new_state(), preprocessing=preprocessing), tmp_path / "state")
    assert load_state(tmp_path / "state").preprocessing == preprocessing
