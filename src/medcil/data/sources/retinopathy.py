"""Diabetic retinopathy: EyePACS and APTOS 2019, with the benchmark's preprocessing of fundus photographs.

Cameras differ in size, crop, light and color. The disk of the retina is found, cut out and resized, slow
changes of light are removed, and each channel gets the same spread. Images that were preprocessed already
(EyePACS's folders `train_process` and `test_process`, APTOS's JPEG files) are read as they are.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageFilter
from scipy.ndimage import binary_erosion, uniform_filter
from torch import Tensor

from medcil.data.image_table import Dataset, Files, ImageTable
from medcil.data.samples import resized
from medcil.data.sources.manifest import (
    Row,
    dataset_table,
    find_file,
    has_columns,
    open_root,
    read_rows,
    split_rows,
)
from medcil.errors import InvalidInput, printable

GRADES = ("No DR", "Mild", "Moderate", "Severe", "Proliferative DR")
# The benchmark's lists leave out what it could not read; where such files are present, they count.
EYEPACS_LISTS = {
    "train": ("trainLabels_process.csv", "trainLabels.csv"),
    "test": ("testLabels_process.csv", "retinopathy_solution.csv", "testLabels.csv"),
}
APTOS_LISTS = (("split_train.csv", "split_test.csv"),)
APTOS_COLUMNS = ("id_code", "diagnosis")
DISK_SIDE = 512
WINDOW = 51
LIMIT = 3.0
DARKEST, BRIGHTEST = 1, 19
"""Between these grays the background ends and the retina begins."""

Picture = UInt8[np.ndarray, "height width 3"]
Mask = Bool[np.ndarray, "height width"]
Disk = UInt8[np.ndarray, "side side 3"]


def read_eyepacs(root: Path | None) -> ImageTable:
    """List Kaggle's training set, then its whole test set.

    Groups are patients: the number before `_left` and `_right`.
    """
    files = open_root(root, "EyePACS", EYEPACS)
    names = files.names()
    images = _images(names)
    folders = {folder for folder, _, _ in (key.partition("/") for key in images)}
    ending = "_process" if "train_process" in folders else ""
    if f"train{ending}" not in folders:
        raise InvalidInput(f"data.root: {root} lacks the folder train and its images. {EYEPACS.hint}")
    rows = [
        row
        for part in ("train", "test")
        if f"{part}{ending}" in folders
        for row in _eyepacs_rows(files, part, f"{part}{ending}")
    ]
    return dataset_table(EYEPACS, files, rows, images, None if ending else fundus_pixels)


def read_aptos2019(root: Path | None) -> ImageTable:
    """List the training images; the published test images have no grades. No patients are known."""
    files = open_root(root, "APTOS 2019", APTOS2019)
    names = files.names()
    images = _aptos_images(names)
    labels = find_file(names, "train.csv")
    if labels is None or not images:
        missing = "train.csv" if images else "the folder train_images"
        raise InvalidInput(f"data.root: {root} lacks {missing}. {APTOS2019.hint}")
    rows = read_rows(files, labels, APTOS_COLUMNS)
    grades = {row["id_code"]: _grade(row["diagnosis"], row["id_code"], labels) for row in rows}
    listed = split_rows(files, APTOS_LISTS, ("id_code",)) or [("", row) for row in rows]
    unknown = [row["id_code"] for _, row in listed if row["id_code"] not in grades]
    if unknown:
        raise InvalidInput(f"data.root: {labels} has no grade for {printable(unknown[0])}; correct a list.")
    rows_of_images = [Row(row["id_code"], grades[row["id_code"]], part) for part, row in listed]
    is_original = next(iter(images.values())).lower().endswith(".png")
    return dataset_table(APTOS2019, files, rows_of_images, images, fundus_pixels if is_original else None)


def recognizes_eyepacs(names: Sequence[str]) -> bool:
    return find_file(names, *EYEPACS_LISTS["train"]) is not None and any(
        key.startswith(("train/", "train_process/")) for key in _images(names)
    )


def recognizes_aptos2019(names: Sequence[str]) -> bool:
    return find_file(names, "train.csv") is not None and bool(_aptos_images(names))


def _has_aptos_columns(files: Files) -> bool:
    """Tell by the columns: others have a table and a folder of these names, too."""
    table = find_file(files.names(), "train.csv")
    return table is not None and has_columns(files, table, APTOS_COLUMNS)


def _images(names: Sequence[str]) -> dict[str, str]:
    """Map `train/10_left` to the file's name."""
    images: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in (".jpeg", ".jpg", ".png"):
            images.setdefault(f"{path.parent.name}/{path.stem}", name)
    return images


def _aptos_images(names: Sequence[str]) -> dict[str, str]:
    return {
        key.removeprefix("train_images/"): name
        for key, name in _images(names).items()
        if key.startswith("train_images/")
    }


def _eyepacs_rows(files: Files, part: str, folder: str) -> Iterator[Row]:
    name = find_file(files.names(), *EYEPACS_LISTS[part])
    if name is None:
        wanted = " or ".join(EYEPACS_LISTS[part][:2])
        raise InvalidInput(f"data.root has {folder}/, but no {wanted}. {EYEPACS.hint}")
    for row in read_rows(files, name, ("image", "level")):
        image = row["image"]
        yield Row(f"{folder}/{image}", _grade(row["level"], image, name), part, image.rpartition("_")[0])


def _grade(text: str, image: str, table: str) -> str:
    if text not in ("0", "1", "2", "3", "4"):
        raise InvalidInput(f"data.root: {table} gives {image} the grade {text!r}, none of 0..4; correct it.")
    return GRADES[int(text)]


EYEPACS = Dataset(
    description="Diabetic retinopathy, 88,698 fundus photographs in five grades",
    class_names=GRADES,
    orders=((0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (4, 0, 1, 2, 3)),
    protocols=("3-1",),
    read=read_eyepacs,
    recognizes=recognizes_eyepacs,
    # As the benchmark read them. It left out what it could not read: a whole copy has a few images more.
    published_counts={"train": (25809, 2443, 5292, 873, 708), "test": (39531, 3762, 7860, 1214, 1206)},
    left_out={"train": 1, "test": 3},
    page="Kaggle, competition diabetic-retinopathy-detection",
    files_needed="train/*.jpeg and trainLabels.csv and, for the benchmark's split, test/*.jpeg and "
    "retinopathy_solution.csv (which Kaggle published after the competition), the lists beside the folders",
    mean=(0.3738, 0.3728, 0.3717),
    std=(0.2454, 0.2450, 0.2395),
    augmentation="fundus",
)
APTOS2019 = Dataset(
    description="Diabetic retinopathy, 3,662 fundus photographs in EyePACS's five grades",
    class_names=GRADES,
    orders=EYEPACS.orders,
    protocols=("3-1",),
    read=read_aptos2019,
    recognizes=recognizes_aptos2019,
    confirms=_has_aptos_columns,
    published_counts={"total": (1805, 370, 999, 193, 295)},
    page="Kaggle, competition aptos2019-blindness-detection",
    files_needed="train_images/*.png and train.csv beside it (and, for a split of your own, split_train.csv "
    "and split_test.csv with a column id_code)",
    mean=EYEPACS.mean,
    std=EYEPACS.std,
    augmentation="fundus",
)


def fundus_pixels(picture: Image.Image, side: int, name: str) -> UInt8[Tensor, "3 side side"]:
    """Preprocess a photograph of full size at 512 x 512, then resize it like any other image."""
    return resized(Image.fromarray(preprocess_fundus(np.asarray(picture), name=name)), side)


def preprocess_fundus(pixels: Picture, *, name: str = "an image") -> Disk:
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
    median: Disk = np.array(normalized.filter(ImageFilter.MedianFilter(3)))
    return median


def foreground(pixels: Picture) -> Mask:
    """Find what is brighter than the background.

    The threshold is the dark gray at which the histogram is emptiest.
    """
    red, green, blue = (pixels[..., channel] for channel in range(3))
    gray = ((red.astype(np.uint16) + green + blue) // 3).astype(np.uint8)
    histogram = np.array(Image.fromarray(gray).histogram())
    darker = histogram.cumsum()
    levels = [level for level in range(DARKEST, BRIGHTEST + 1) if darker[level] > 0]
    threshold = min(levels, key=lambda level: histogram[level + 1] / darker[level], default=0)
    mask: Mask = gray > threshold
    return mask


def find_disk(pixels: Picture, *, name: str) -> tuple[int, int, int]:
    """Return center row, center column and radius: mean of the foreground, median distance of its edge."""
    mask = foreground(pixels)
    if not mask.any():
        raise InvalidInput(f"{name} is black: it shows no retina; remove or replace it.")
    total = mask.sum()
    row = int(mask.sum(axis=1) @ np.arange(mask.shape[0]) / total)
    column = int(mask.sum(axis=0) @ np.arange(mask.shape[1]) / total)
    # Where the frame cuts the disk there is no edge to see: only changes inside the picture count.
    rows, columns = np.nonzero(mask & ~binary_erosion(mask, border_value=1))
    radius = min(row, column) - 1
    if len(rows):
        median = int(np.sqrt(np.sort((rows - row) ** 2 + (columns - column) ** 2)[len(rows) // 2])) - 1
        radius = median if median <= max(mask.shape) / 2 else radius
    if radius < 1:
        raise InvalidInput(f"{name} shows no disk of a retina; remove or replace it.")
    return row, column, radius


def cut_disk(pixels: Picture, row: int, column: int, radius: int) -> Disk:
    """Cut out the square around the disk, black outside of the disk and of the picture."""
    diameter = 2 * radius + 1
    square = np.zeros((diameter, diameter, 3), dtype=np.uint8)
    top, left = row - radius, column - radius
    part = pixels[max(top, 0) : row + radius + 1, max(left, 0) : column + radius + 1]
    down, right = max(-top, 0), max(-left, 0)
    square[down : down + part.shape[0], right : right + part.shape[1]] = part
    steps = np.arange(diameter) - radius
    square[steps[:, None] ** 2 + steps**2 >= radius**2] = 0
    return square


def resize(pixels: Picture, side: int) -> Disk:
    """Interpolate the four nearest pixels, as the benchmark does: no smoothing before shrinking."""
    top, bottom, down = _neighbors(pixels.shape[0], side)
    left, right, across = _neighbors(pixels.shape[1], side)
    rows = pixels[top] * (1 - down)[:, None, None] + pixels[bottom] * down[:, None, None]
    mixed = rows[:, left] * (1 - across)[:, None] + rows[:, right] * across[:, None]
    small: Disk = mixed.astype(np.uint8)
    return small


def _neighbors(length: int, side: int) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, "side"]]:
    place = np.clip((np.arange(side) + 0.5) * length / side - 0.5, 0, length - 1)
    before = place.astype(np.int64)
    return before, np.minimum(before + 1, length - 1), place - before


def _local_mean(disk: Disk, inside: Bool[np.ndarray, "side side"]) -> Float[np.ndarray, "side side 3"]:
    """Divide the light in the window by its pixels inside, so that the outside does not dim the rim."""
    light = uniform_filter(disk.astype(np.float64), WINDOW, mode="mirror", axes=(0, 1))
    share = uniform_filter(inside.astype(np.float64), WINDOW, mode="mirror")[..., None]
    mean: Float[np.ndarray, "side side 3"] = light / np.maximum(share, 1 / WINDOW**2)
    return mean
