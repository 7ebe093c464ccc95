"""Random transformations: drawn as published, applied as arithmetic says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from medcil.data.augment import draw_transforms, transformed
from medcil.data.preprocess import Preprocessing
from medcil.engine.draws import Key
from medcil.engine.state import load_state, save_state

from ..small import new_state, plain_epoch, random_images

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


def test_the_plain_crop_needs_no_transformation():
    assert draw_transforms("crop", 5, np.random.default_rng(0)) is None
    assert plain_epoch(6, Key(0), batch_size=2).transforms is None


def test_what_training_images_undergo_is_kept_with_the_model(tmp_path):
    preprocessing = Preprocessing(side=10, crop=8, augmentation="fundus")
    save_state(replace(new_state(), preprocessing=preprocessing), tmp_path / "state")
    assert load_state(tmp_path / "state").preprocessing == preprocessing
