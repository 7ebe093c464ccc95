"""Photographs of the retina, made alike: the EyePACS benchmark's preprocessing.

Cameras differ in size, crop, light and color. The disk of the retina is found, cut out and resized, the slow
changes of light are taken away, and each channel gets the same spread.
"""

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageFilter
from torch import Tensor

from medcil.data.samples import resized
from medcil.errors import InvalidInput

GRADES = ("No DR", "Mild", "Moderate", "Severe", "Proliferative DR")
DISK_SIDE = 512
WINDOW = 51
LIMIT = 3.0
DARKEST, BRIGHTEST = 1, 19
"""Between these grays the background ends and the retina begins."""


def read_grade(text: str, image: str, table: str) -> int:
    if text not in ("0", "1", "2", "3", "4"):
        raise InvalidInput(
            f"data.root: {table} gives {image} the grade {text!r}, which is none of 0..4; correct it."
        )
    return int(text)


def fundus_pixels(picture: Image.Image, side: int, name: str) -> UInt8[Tensor, "3 side side"]:
    """Preprocess a photograph of full size at 512 x 512, then resize it like any other image."""
    return resized(Image.fromarray(preprocess_fundus(np.asarray(picture), name=name)), side)


def preprocess_fundus(
    pixels: UInt8[np.ndarray, "height width 3"], *, name: str = "an image"
) -> UInt8[np.ndarray, "512 512 3"]:
    disk = resize(cut_disk(pixels, *find_disk(pixels, name=name)), DISK_SIDE)
    inside = foreground(disk)
    magenta = (disk[..., 0] >= 220) & (disk[..., 1] <= 30) & (disk[..., 2] >= 220)  # a camera's marks
    inside &= ~magenta
    if not inside.any():
        raise InvalidInput(f"{name} shows no retina; remove or replace it.")
    flat = disk - _local_mean(disk, inside)
    spread = flat[inside].std(axis=0)
    z = (flat - flat[inside].mean(axis=0)) / np.where(spread > 0, spread, 1)
    levels = (np.clip(z, -LIMIT, LIMIT) + LIMIT) / (2 * LIMIT) * 255 + 0.5
    levels[~inside] = 0
    normalized = Image.fromarray(np.minimum(levels, 255).astype(np.uint8))
    median: UInt8[np.ndarray, "512 512 3"] = np.array(normalized.filter(ImageFilter.MedianFilter(3)))
    return median


def foreground(pixels: UInt8[np.ndarray, "height width 3"]) -> Bool[np.ndarray, "height width"]:
    """Brighter than the background: the threshold is the dark gray at which the histogram is emptiest."""
    red, green, blue = (pixels[..., channel] for channel in range(3))
    gray = ((red.astype(np.uint16) + green + blue) // 3).astype(np.uint8)
    histogram = np.array(Image.fromarray(gray).histogram())
    darker = histogram.cumsum()
    next_share = {
        level: histogram[level + 1] / darker[level]
        for level in range(DARKEST, BRIGHTEST + 1)
        if darker[level] > 0
    }
    threshold = min(next_share, key=lambda level: next_share[level]) if next_share else 0
    mask: Bool[np.ndarray, "height width"] = gray > threshold
    return mask


def find_disk(pixels: UInt8[np.ndarray, "height width 3"], *, name: str) -> tuple[int, int, int]:
    """Center row, center column and radius: the mean of the foreground, the median distance of its edge."""
    mask = foreground(pixels)
    if not mask.any():
        raise InvalidInput(f"{name} is black: it shows no retina; remove or replace it.")
    total = mask.sum()
    row = int(mask.sum(axis=1) @ np.arange(mask.shape[0]) / total)
    column = int(mask.sum(axis=0) @ np.arange(mask.shape[1]) / total)
    # Where the frame cuts the disk there is no edge to see: only changes inside the picture count.
    edge = np.zeros_like(mask)
    edge[1:] |= mask[1:] & ~mask[:-1]
    edge[:-1] |= mask[:-1] & ~mask[1:]
    edge[:, 1:] |= mask[:, 1:] & ~mask[:, :-1]
    edge[:, :-1] |= mask[:, :-1] & ~mask[:, 1:]
    rows, columns = np.nonzero(edge)
    radius = min(row, column) - 1
    if len(rows):
        median = int(np.sqrt(np.sort((rows - row) ** 2 + (columns - column) ** 2)[len(rows) // 2])) - 1
        radius = median if median <= max(mask.shape) / 2 else radius
    if radius < 1:
        raise InvalidInput(f"{name} shows no disk of a retina; remove or replace it.")
    return row, column, radius


def cut_disk(
    pixels: UInt8[np.ndarray, "height width 3"], row: int, column: int, radius: int
) -> UInt8[np.ndarray, "diameter diameter 3"]:
    """The square around the disk, black outside of the disk and of the picture."""
    diameter = 2 * radius + 1
    square = np.zeros((diameter, diameter, 3), dtype=np.uint8)
    top, left = row - radius, column - radius
    part = pixels[max(top, 0) : row + radius + 1, max(left, 0) : column + radius + 1]
    down, right = max(-top, 0), max(-left, 0)
    square[down : down + part.shape[0], right : right + part.shape[1]] = part
    steps = np.arange(diameter) - radius
    square[steps[:, None] ** 2 + steps**2 >= radius**2] = 0
    return square


def resize(pixels: UInt8[np.ndarray, "height width 3"], side: int) -> UInt8[np.ndarray, "side side 3"]:
    """Bilinear between the four nearest pixels, as the benchmark has it: no smoothing before shrinking."""
    top, bottom, down = _neighbors(pixels.shape[0], side)
    left, right, across = _neighbors(pixels.shape[1], side)
    rows = pixels[top] * (1 - down)[:, None, None] + pixels[bottom] * down[:, None, None]
    mixed = rows[:, left] * (1 - across)[:, None] + rows[:, right] * across[:, None]
    small: UInt8[np.ndarray, "side side 3"] = mixed.astype(np.uint8)
    return small


def _neighbors(length: int, side: int) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, "side"]]:
    place = np.clip((np.arange(side) + 0.5) * length / side - 0.5, 0, length - 1)
    before = place.astype(np.int64)
    return before, np.minimum(before + 1, length - 1), place - before


def _local_mean(
    disk: UInt8[np.ndarray, "side side 3"], inside: Bool[np.ndarray, "side side"]
) -> Float[np.ndarray, "side side 3"]:
    """The light in the window over the number of its pixels inside: the outside does not dim the rim."""
    light = _window_sum(disk.astype(np.float64))
    n_inside = _window_sum(inside.astype(np.float64)[..., None])
    mean: Float[np.ndarray, "side side 3"] = light / np.maximum(n_inside, 1)
    return mean


def _window_sum(values: Float[np.ndarray, "side side channels"]) -> Float[np.ndarray, "side side channels"]:
    half = WINDOW // 2
    padded = np.pad(values, ((half + 1, half), (half + 1, half), (0, 0)), mode="reflect")
    corners = padded.cumsum(axis=0).cumsum(axis=1)
    strips = corners[WINDOW:] - corners[:-WINDOW]
    sums: Float[np.ndarray, "side side channels"] = strips[:, WINDOW:] - strips[:, :-WINDOW]
    return sums
