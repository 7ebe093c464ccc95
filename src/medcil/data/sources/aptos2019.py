"""APTOS 2019: Kaggle's blindness detection; the grades of EyePACS on a tenth as many images.

Kaggle's PNG files get EyePACS's fundus preprocessing. JPEG files are a smaller, preprocessed form and are
read as they are.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from medcil.data.decoding.fundus import GRADES, fundus_pixels, read_grade
from medcil.data.image_table import Files, ImageTable
from medcil.data.sources import eyepacs
from medcil.data.sources.layouts import (
    complete,
    find_file,
    find_lists,
    give,
    has_columns,
    named_files,
    open_root,
    read_rows,
)
from medcil.errors import InvalidInput, printable

CLASS_NAMES = GRADES
ORDERS = eyepacs.ORDERS
COUNTS = {"total": (1805, 370, 999, 193, 295)}
PAGE = "Kaggle, competition aptos2019-blindness-detection"
FILES_NEEDED = (
    "train_images/*.png and train.csv beside it (and, for a split of your own, split_train.csv and "
    "split_test.csv with a column id_code)"
)
LISTS = (("split_train.csv", "split_test.csv"),)
COLUMNS = ("id_code", "diagnosis")


def read_table(root: Path | None) -> ImageTable:
    """No patients are known. The published test images have no grades and are left out."""
    files = open_root(root, "APTOS 2019", FILES_NEEDED, PAGE)
    names = files.names()
    images = _images(names)
    labels = find_file(names, "train.csv")
    if labels is None or not images:
        missing = "train.csv" if images else "the folder train_images"
        raise InvalidInput(f"data.root: {root} lacks {missing}. {give(FILES_NEEDED, PAGE)}")
    rows = read_rows(files, labels, COLUMNS)
    grades = {row["id_code"]: read_grade(row["diagnosis"], row["id_code"], labels) for row in rows}
    lists = find_lists(names, LISTS)
    parts = [list(grades)]
    if lists is not None:
        parts = [[row["id_code"] for row in read_rows(files, name, ("id_code",))] for name in lists]
    listed = [code for part in parts for code in part]
    unknown = [code for code in listed if code not in grades]
    if unknown:
        raise InvalidInput(
            f"data.root: {labels} has no grade for {printable(unknown[0])}, which a list names; correct it."
        )
    is_original = next(iter(images.values())).lower().endswith(".png")
    table = ImageTable(
        files,
        named_files(listed, images),
        np.array([grades[code] for code in listed], dtype=np.int64),
        CLASS_NAMES,
        is_test=None if lists is None else np.repeat([False, True], [len(part) for part in parts]),
        preprocess=fundus_pixels if is_original else None,
    )
    return complete(table, give(FILES_NEEDED, PAGE))


def recognizes(names: Sequence[str]) -> bool:
    return find_file(names, "train.csv") is not None and bool(_images(names))


def confirms(files: Files) -> bool:
    """Others call a table and a folder like this, too: the table's columns tell."""
    table = find_file(files.names(), "train.csv")
    return table is not None and has_columns(files, table, COLUMNS)


def _images(names: Sequence[str]) -> dict[str, str]:
    images: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.parent.name == "train_images" and path.suffix.lower() in (".png", ".jpg", ".jpeg"):
            images.setdefault(path.stem, name)
    return images
