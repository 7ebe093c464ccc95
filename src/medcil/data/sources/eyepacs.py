"""EyePACS: Kaggle's diabetic retinopathy detection, with the benchmark's fundus preprocessing.

Training images are Kaggle's training set, test images its whole test set. A folder that the benchmark's own
script has preprocessed already (`train_process`, `test_process`) is read as it is.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from medcil.data.decoding.fundus import GRADES, fundus_pixels, read_grade
from medcil.data.image_table import Files, ImageTable
from medcil.data.sources.layouts import complete, find_file, give, named_files, open_root, read_rows
from medcil.errors import InvalidInput

CLASS_NAMES = GRADES
ORDERS = ((0, 1, 2, 3, 4), (0, 2, 3, 4, 1), (4, 0, 1, 2, 3))
# As the benchmark read them. It left out what it could not read: a whole copy has a few images more.
COUNTS = {"train": (25809, 2443, 5292, 873, 708), "test": (39531, 3762, 7860, 1214, 1206)}
LEFT_OUT = {"train": 1, "test": 3}
MEAN, STD = (0.3738, 0.3728, 0.3717), (0.2454, 0.2450, 0.2395)
PAGE = "Kaggle, competition diabetic-retinopathy-detection"
FILES_NEEDED = (
    "train/*.jpeg and trainLabels.csv and, for the benchmark's split, test/*.jpeg and "
    "retinopathy_solution.csv (which Kaggle published after the competition), the lists beside the folders"
)
# The benchmark's lists leave out what it could not read; where such files are present, they count.
LISTS = {
    "train": ("trainLabels_process.csv", "trainLabels.csv"),
    "test": ("testLabels_process.csv", "retinopathy_solution.csv", "testLabels.csv"),
}
SUFFIXES = (".jpeg", ".jpg", ".png")


def read_table(root: Path | None) -> ImageTable:
    """Groups are patients: the number before `_left` and `_right`. Training images first."""
    files = open_root(root, "EyePACS", FILES_NEEDED, PAGE)
    names = files.names()
    images = _images(names)
    folders = {folder for folder, _, _ in (key.partition("/") for key in images)}
    ending = "_process" if "train_process" in folders else ""
    if f"train{ending}" not in folders:
        raise InvalidInput(
            f"data.root: {root} lacks the folder train and its images. {give(FILES_NEEDED, PAGE)}"
        )
    parts = [
        _listed(files, names, split, f"{split}{ending}")
        for split in ("train", "test")
        if f"{split}{ending}" in folders
    ]
    listed = [image for part in parts for image in part]
    table = ImageTable(
        files,
        named_files([key for key, _ in listed], images),
        np.array([grade for _, grade in listed], dtype=np.int64),
        CLASS_NAMES,
        tuple(PurePosixPath(key).name.rpartition("_")[0] for key, _ in listed),
        np.repeat([False, True], [len(part) for part in parts]) if len(parts) == 2 else None,
        preprocess=None if ending else fundus_pixels,
    )
    return complete(table, give(FILES_NEEDED, PAGE))


def recognizes(names: Sequence[str]) -> bool:
    return find_file(names, *LISTS["train"]) is not None and any(
        key.startswith(("train/", "train_process/")) for key in _images(names)
    )


def _images(names: Sequence[str]) -> dict[str, str]:
    """`train/10_left` and where it is."""
    images: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() in SUFFIXES:
            images.setdefault(f"{path.parent.name}/{path.stem}", name)
    return images


def _listed(files: Files, names: Sequence[str], split: str, folder: str) -> list[tuple[str, int]]:
    name = find_file(names, *LISTS[split])
    if name is None:
        wanted = " or ".join(LISTS[split][:2])
        raise InvalidInput(f"data.root has {folder}/, but no {wanted}. {give(FILES_NEEDED, PAGE)}")
    rows = read_rows(files, name, ("image", "level"))
    return [(f"{folder}/{row['image']}", read_grade(row["level"], row["image"], name)) for row in rows]
