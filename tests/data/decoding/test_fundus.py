"""The fundus preprocessing against scipy, PyTorch and plain geometry."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage

from medcil.data.decoding.fundus import (
    cut_disk,
    find_disk,
    foreground,
    fundus_pixels,
    preprocess_fundus,
    resize,
)
from medcil.data.decoding.image import read_upright
from medcil.errors import InvalidInput


def fundus_of(content, side, name):
    return fundus_pixels(read_upright(content, name=name), side, name)


def retina(height=300, width=400, row=150, column=200, radius=120, *, seed=0, background=3) -> np.ndarray:
    """Bright in the upper left, with vessels that are darker, on a background that is not quite black."""
    rng = np.random.default_rng(seed)
    y, x = (np.mgrid[:height, :width] - np.array([row, column])[:, None, None]) / radius
    light = 120 - 30 * x - 20 * y
    vessels = 25 * np.cos(9 * x + 4 * np.sin(5 * y)) + rng.normal(0, 4, (height, width))
    color = np.stack([light + vessels + 40, light * 0.7 + vessels, light * 0.4 + 0.5 * vessels], axis=-1)
    outside = rng.integers(0, background + 1, (height, width))[..., None]
    return np.clip(np.where((x**2 + y**2 < 1)[..., None], color, outside), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", **options)
    return buffer.getvalue()


def expected(disk: np.ndarray) -> np.ndarray:
    """The normalization of a disk that was cut and resized, written with scipy."""
    inside = foreground(disk)
    sums = 51 * 51 * ndimage.uniform_filter(disk.astype(float), size=(51, 51, 1), mode="mirror")
    number = 51 * 51 * ndimage.uniform_filter(inside.astype(float), size=51, mode="mirror")
    flat = disk - sums / np.maximum(number, 1)[..., None]
    values = flat[inside]
    z = ((flat - values.mean(axis=0)) / values.std(axis=0)).clip(-3, 3)
    levels = np.where(inside[..., None], np.floor(255 * (z + 3) / 6 + 0.5), 0)
    return ndimage.median_filter(levels, size=(3, 3, 1), mode="nearest")


def test_the_disk_is_found():
    row, column, radius = find_disk(retina(row=140, column=190, radius=110), name="x")
    assert abs(row - 140) <= 1
    assert abs(column - 190) <= 1
    assert abs(radius - 109) <= 1


def test_a_disk_that_the_frame_cuts_at_top_and_bottom_keeps_its_radius():
    row, column, radius = find_disk(retina(height=200, width=400, row=100, column=200, radius=130), name="x")
    assert abs(row - 100) <= 1
    assert abs(column - 200) <= 1
    assert abs(radius - 129) <= 1


def test_a_picture_without_background_gets_the_disk_that_fits():
    assert find_disk(np.full((100, 140, 3), 90, dtype=np.uint8), name="x") == (49, 69, 48)


def test_edges_far_from_the_center_are_no_disk():
    pixels = np.full((100, 100, 3), 90, dtype=np.uint8)
    for corner in (np.s_[:10, :10], np.s_[:10, 90:], np.s_[90:, :10], np.s_[90:, 90:]):
        pixels[corner] = 0
    assert find_disk(pixels, name="x") == (49, 49, 48)


def test_the_background_ends_where_the_histogram_is_emptiest():
    pixels = np.zeros((12, 10, 3), dtype=np.uint8)
    pixels[:, 5:] = 40
    assert foreground(pixels).sum() == 60
    pixels[:, :5] = np.arange(12)[:, None, None]  # a noisy background: grays 0 to 11, none from 12 to 39
    assert foreground(pixels).sum() == 60
    pixels[:, 5:] = (40, 8, 0)  # the mean of the channels is 16
    assert foreground(pixels).sum() == 60
    pixels[:, 5:] = (12, 12, 12)  # no gap: what follows on from the background is background
    assert not foreground(pixels).any()


def test_the_square_around_a_disk_is_black_outside_of_disk_and_picture():
    pixels = np.full((30, 30, 3), 200, dtype=np.uint8)
    square = cut_disk(pixels, 5, 15, 10)
    assert square.shape == (21, 21, 3)
    y, x = np.mgrid[-10:11, -10:11]
    bright = (y**2 + x**2 < 100) & (y + 5 >= 0)
    assert np.array_equal(square[..., 0] == 200, bright)
    assert np.array_equal(square[..., 0] == 0, ~bright)


@pytest.mark.parametrize("side", [37, 90, 200])
def test_resizing_is_bilinear_without_smoothing(side):
    pixels = np.random.default_rng(0).integers(256, size=(90, 70, 3), dtype=np.uint8)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    reference = F.interpolate(tensor, size=(side, side), mode="bilinear", align_corners=False)[0]
    difference = reference.permute(1, 2, 0).numpy() - resize(pixels, side)
    assert difference.min() > -1e-6
    assert difference.max() < 1 + 1e-6


def test_the_whole_is_what_scipy_gives():
    pixels = retina()
    disk = resize(cut_disk(pixels, *find_disk(pixels, name="x")), 512)
    difference = np.abs(preprocess_fundus(pixels).astype(int) - expected(disk))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3


def test_slow_changes_of_light_are_taken_away():
    result = preprocess_fundus(retina()).astype(float)
    y, x = np.mgrid[:512, :512] - 255.5
    inner = x**2 + y**2 < 200**2
    upper_left, lower_right = result[inner & (x < -50) & (y < -50)], result[inner & (x > 50) & (y > 50)]
    assert np.abs(upper_left.mean(axis=0) - lower_right.mean(axis=0)).max() < 6
    assert np.abs(result[inner].mean(axis=0) - 127.5).max() < 5
    assert result[x**2 + y**2 > 258**2].max() == 0


def test_brightness_and_contrast_of_the_camera_do_not_show():
    pixels = retina(background=0)
    dimmer = (pixels * 0.6).astype(np.uint8)
    difference = np.abs(preprocess_fundus(pixels).astype(float) - preprocess_fundus(dimmer))
    assert difference.mean() < 0.4 * np.abs(pixels.astype(float) - dimmer).mean()


def test_a_cameras_magenta_marks_are_left_out():
    pixels = retina()
    pixels[140:160, 190:210] = (255, 0, 255)
    assert preprocess_fundus(pixels)[250:262, 250:262].max() == 0


def test_a_channel_without_light_becomes_gray():
    pixels = retina(background=0)
    pixels[..., 2] = 0
    result = preprocess_fundus(pixels)
    assert result[200:312, 200:312, 2].min() == result[200:312, 200:312, 2].max() == 128
    assert result[200:312, 200:312, 1].std() > 10


def test_a_uniform_retina_becomes_gray():
    pixels = np.full((120, 120, 3), 90, dtype=np.uint8)
    middle = preprocess_fundus(pixels)[200:312, 200:312]
    assert 127 <= middle.min() == middle.max() <= 130  # but for the rim it would be 128


@pytest.mark.parametrize("side", [64, 512])
def test_a_file_is_decoded_preprocessed_and_resized(side):
    pixels = retina()
    result = fundus_of(encoded(pixels), side, "x")
    reference = Image.fromarray(preprocess_fundus(pixels)).resize((side, side), Image.Resampling.BILINEAR)
    assert np.array_equal(result.permute(1, 2, 0).numpy(), np.asarray(reference))


def test_a_turned_photograph_is_turned_back():
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(np.rot90(retina()).copy(), exif=exif)
    assert torch.equal(fundus_of(turned, 64, "x"), fundus_of(encoded(retina()), 64, "x"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (encoded(np.zeros((40, 40, 3), dtype=np.uint8)), "is black"),
        (encoded(retina())[:2000], "cannot be read as an image"),
        (b"no image", "cannot be read as an image"),
    ],
    ids=["black", "cut off", "text"],
)
def test_what_shows_no_retina_is_named(content, words):
    with pytest.raises(InvalidInput, match=rf"^10_left\.jpeg .*{words}.*remove or replace"):
        fundus_of(content, 64, "10_left.jpeg")


def test_a_single_bright_point_is_no_retina():
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[20, 20] = 255
    with pytest.raises(InvalidInput, match="shows no disk"):
        preprocess_fundus(pixels)
