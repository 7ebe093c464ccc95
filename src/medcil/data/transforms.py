"""From stored pixels to what a network sees: crop, flip, turn, resample, normalize; on any device, per image.

Random transformations of training images are drawn on the CPU, as numbers, and applied on any device. One is
the 2 x 3 matrix that maps a place in the output to a place in the stored image, both from -1 to 1, so that
crop, rotation, shift and mirror are one resampling; tones are a factor and an offset of each channel. Crops
at full scale, mirrored and turned by right angles, only move pixels: `crop_and_flip`.

| augmentation | of training images |
|---|---|
| `crop` | a random crop at full scale, mirrored or not |
| `resized_crop` | padded by an eighth, then a crop of 8 to 100% of the area (long-tailed CIFAR) |
| `fundus` | a crop of 80 to 120% of the area, any rotation, a shift of up to 5% (EyePACS in the benchmark) |
| `dihedral` | as `crop`, then none to three quarter turns: any symmetry of the square, equally likely |
| `strong` | a crop of half the area or more, in any of these symmetries and in other tones |

`dihedral` and `strong` are for images without an up or down, such as dermoscopy and histology; `strong` where
few images must not be learned by heart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from medcil.config import Augmentation, Views

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
TRIES = 10
LOG_RATIO = np.log(4 / 3)
TURNS_FREELY: tuple[Augmentation, ...] = ("fundus", "strong")
"""Augmentations after which nobody can tell by how many quarter turns an image was turned."""


@dataclass(frozen=True)
class Preprocessing:
    """Kept with a model: its images must be treated alike for life."""

    side: int
    crop: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    augmentation: Augmentation = "crop"
    """Of training images; evaluation takes the center crop."""
    views: Views = 1
    """Of that crop, over which the scores of an image are averaged."""

    @property
    def slack(self) -> int:
        """Return how far a crop can be moved."""
        return self.side - self.crop

    def normalize(self, images: UInt8[Tensor, "n 3 crop crop"]) -> Float[Tensor, "n 3 crop crop"]:
        return (images.float() / 255 - _per_channel(self.mean, images.device)) / _per_channel(
            self.std, images.device
        )


@lru_cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Float[Tensor, "1 3 1 1"]:
    """Copy the values to the device once, not for every batch."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


def views_of(images: Float[Tensor, "n 3 crop crop"], views: Views) -> Float[Tensor, "n_views 3 crop crop"]:
    """Return view after view; the images as they are come first, then those of the fewer views."""
    if views == 1:
        return images
    mirrored = (images, images.flip(3))
    turns = (2, 1, 3)[: views // 2 - 1]  # half a turn first: each number of views is a group of symmetries
    return torch.cat([*mirrored, *(image.rot90(k, (2, 3)) for k in turns for image in mirrored)])


def crop_and_flip(
    pixels: UInt8[Tensor, "m 3 side side"],
    indices: Int[Tensor, "n"],
    top: Int[Tensor, "n"],
    left: Int[Tensor, "n"],
    flip: Bool[Tensor, "n"],
    *,
    crop: int,
    turns: Int[Tensor, "n"] | None = None,
) -> UInt8[Tensor, "n 3 crop crop"]:
    """Crop each chosen image at its own place, mirrored where `flip` says so: one gather, no loop.

    After that, so many quarter turns counterclockwise, none to three.
    """
    steps = torch.arange(crop, device=pixels.device)
    rows = top[:, None] + steps  # n crop
    columns = left[:, None] + torch.where(flip[:, None], crop - 1 - steps, steps)  # n crop
    places = (rows[:, :, None], columns[:, None, :]) if turns is None else _turned(rows, columns, turns)
    # Channels last, as the network wants its input: each index fetches a pixel's three bytes together.
    by_pixel = pixels.permute(0, 2, 3, 1)
    return by_pixel[indices[:, None, None], *places].permute(0, 3, 1, 2)


def _turned(
    rows: Int[Tensor, "n crop"], columns: Int[Tensor, "n crop"], turns: Int[Tensor, "n"]
) -> tuple[Int[Tensor, "n crop crop"], Int[Tensor, "n crop crop"]]:
    """Return the row and the column that each pixel of a turned image comes from."""
    is_half = (turns >= 2)[:, None]
    rows, columns = (torch.where(is_half, axis.flip(1), axis) for axis in (rows, columns))
    is_quarter = (turns % 2 == 1)[:, None, None]
    return (
        torch.where(is_quarter, rows[:, None, :], rows[:, :, None]),
        torch.where(is_quarter, columns.flip(1)[:, :, None], columns[:, None, :]),
    )


def draw_transforms(
    augmentation: Augmentation, n: int, random: np.random.Generator
) -> Float[Tensor, "n 2 3"] | None:
    """Draw matrices; None for crops at full scale, which need no resampling."""
    if augmentation not in _TRANSFORMS:
        return None
    matrices = _TRANSFORMS[augmentation](n, random)
    mirrored = np.where(random.random(n) < 0.5, -1.0, 1.0)
    matrices[:, :, 0] *= mirrored[:, None]
    return torch.from_numpy(matrices[:, :2].astype(np.float32))


def draw_turns(n: int, random: np.random.Generator) -> Int[Tensor, "n"]:
    """Draw quarter turns, none to three."""
    return torch.from_numpy(random.integers(0, 4, size=n))


def turned_transforms(transforms: Float[Tensor, "n 2 3"], turns: Int[Tensor, "n"]) -> Float[Tensor, "n 2 3"]:
    """Follow each transformation by so many quarter turns counterclockwise."""
    return transforms @ torch.from_numpy(_quarter_turns(turns.numpy()).astype(np.float32))


def draw_tones(
    augmentation: Augmentation, n: int, random: np.random.Generator
) -> Float[Tensor, "n 3 2"] | None:
    """Draw factor and offset of each channel's bytes; None where tones stay.

    v -> contrast (gain v - mid) + mid + shift, mid half of 255: contrast within 20% and a shift of up to
    a tenth of white for the whole image, gains within 10% for each channel, as light and cameras differ.
    """
    if augmentation != "strong":
        return None
    contrast, shift = random.uniform(0.8, 1.2, (n, 1)), random.uniform(-25.5, 25.5, (n, 1))
    gain = random.uniform(0.9, 1.1, (n, 3))
    offset = np.broadcast_to(127.5 * (1 - contrast) + shift, (n, 3))
    return torch.from_numpy(np.stack([contrast * gain, offset], axis=2).astype(np.float32))


def _resized_crop(n: int, random: np.random.Generator) -> Float[np.ndarray, "n 3 3"]:
    """Crop the padded image, which is 1.25 times as wide as the stored one."""
    boxes = _boxes(n, random, least=0.08, most=1.0)
    boxes[:, :2] *= 1.25
    return boxes


def _fundus(n: int, random: np.random.Generator) -> Float[np.ndarray, "n 3 3"]:
    boxes = _boxes(n, random, least=0.8, most=1.2)
    angle = random.uniform(-np.pi, np.pi, n)
    shift = random.uniform(-0.1, 0.1, (n, 2))  # 5% of the width, which goes from -1 to 1
    turns = _rotations(np.cos(angle), np.sin(angle))
    turns[:, :2, 2] = shift
    turned: Float[np.ndarray, "n 3 3"] = boxes @ turns
    return turned


def _strong(n: int, random: np.random.Generator) -> Float[np.ndarray, "n 3 3"]:
    boxes = _boxes(n, random, least=0.5, most=1.0)
    turned: Float[np.ndarray, "n 3 3"] = boxes @ _quarter_turns(random.integers(0, 4, size=n))
    return turned


def _quarter_turns(turns: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n 3 3"]:
    return _rotations(np.array([1.0, 0, -1, 0])[turns], np.array([0.0, 1, 0, -1])[turns])


def _rotations(cosine: Float[np.ndarray, "n"], sine: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n 3 3"]:
    matrices = np.zeros((len(cosine), 3, 3))
    matrices[:, 0, 0] = matrices[:, 1, 1] = cosine
    matrices[:, 0, 1], matrices[:, 1, 0] = -sine, sine
    matrices[:, 2, 2] = 1
    return matrices


def _boxes(n: int, random: np.random.Generator, *, least: float, most: float) -> Float[np.ndarray, "n 3 3"]:
    """Draw boxes of a random share of the area, sides 3:4 to 4:3: the first of ten that fits, or all."""
    area = random.uniform(least, most, (n, TRIES))
    ratio = np.exp(random.uniform(-LOG_RATIO, LOG_RATIO, (n, TRIES)))
    width, height = np.sqrt(area * ratio), np.sqrt(area / ratio)
    fits = (width <= 1) & (height <= 1)
    first = fits.argmax(axis=1)
    each = np.arange(n)
    some = fits.any(axis=1)
    size = np.stack([np.where(some, side[each, first], 1.0) for side in (width, height)], axis=1)
    center = random.uniform(-1, 1, (n, 2)) * (1 - size)
    boxes = np.zeros((n, 3, 3))
    boxes[:, 0, 0], boxes[:, 1, 1], boxes[:, 2, 2] = size[:, 0], size[:, 1], 1
    boxes[:, :2, 2] = center
    return boxes


_TRANSFORMS: dict[Augmentation, Callable[[int, np.random.Generator], Float[np.ndarray, "n 3 3"]]] = {
    "resized_crop": _resized_crop,
    "fundus": _fundus,
    "strong": _strong,
}


def transformed(
    pixels: UInt8[Tensor, "m 3 side side"],
    indices: Int[Tensor, "n"],
    transforms: Float[Tensor, "n 2 3"],
    *,
    crop: int,
    tones: Float[Tensor, "n 3 2"] | None = None,
) -> UInt8[Tensor, "n 3 crop crop"]:
    """Resample each chosen image, black beyond its edges, then change its tones."""
    grid = F.affine_grid(transforms, [len(indices), 3, crop, crop], align_corners=False)
    images = F.grid_sample(pixels[indices].float(), grid, align_corners=False)
    if tones is not None:
        images = images * tones[:, :, None, None, 0] + tones[:, :, None, None, 1]
    return images.round().clamp(0, 255).to(torch.uint8)
