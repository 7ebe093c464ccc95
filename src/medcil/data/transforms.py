"""From stored pixels to what a network sees: crop, flip, turn, normalize; on any device, per image."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from medcil.config import Augmentation, Views

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


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
        """How far a crop can be moved."""
        return self.side - self.crop

    def normalize(self, images: UInt8[Tensor, "n 3 crop crop"]) -> Float[Tensor, "n 3 crop crop"]:
        return (images.float() / 255 - _per_channel(self.mean, images.device)) / _per_channel(
            self.std, images.device
        )


@lru_cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> Float[Tensor, "1 3 1 1"]:
    """Copied to the device once, not for every batch."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


def views_of(images: Float[Tensor, "n 3 crop crop"], views: Views) -> Float[Tensor, "n_views 3 crop crop"]:
    """View after view; the images as they are come first."""
    if views == 1:
        return images
    mirrored = (images, images.flip(3))
    turned = [image.rot90(turns, (2, 3)) for turns in range(1, views // 2) for image in mirrored]
    return torch.cat([*mirrored, *turned])


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
    """A crop of each chosen image at its own place, mirrored where `flip` says so: one gather, no loop.

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
    """The row and the column that each pixel of a turned image comes from."""
    is_half = (turns >= 2)[:, None]
    rows, columns = (torch.where(is_half, axis.flip(1), axis) for axis in (rows, columns))
    is_quarter = (turns % 2 == 1)[:, None, None]
    return (
        torch.where(is_quarter, rows[:, None, :], rows[:, :, None]),
        torch.where(is_quarter, columns.flip(1)[:, :, None], columns[:, None, :]),
    )
