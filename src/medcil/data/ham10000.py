"""HAM10000 (Tschandl et al. 2018): the owner's layout, with the benchmark's split where its lists are there.

What every reader of an owner's layout needs is here as well: opening, finding and reading lists.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from medcil.data.catalog import Catalog, Files
from medcil.data.files import open_files
from medcil.data.samples import Samples, Selection, TensorImages
from medcil.errors import InvalidInput

CLASS_NAMES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
# The benchmark's three class orders; NV, two thirds of all images, comes last, in between, and first.
ORDERS = ((0, 2, 3, 4, 5, 6, 1), (5, 4, 0, 1, 3, 6, 2), (1, 5, 0, 6, 2, 4, 3))
COUNTS = {"train": (901, 5363, 398, 262, 875, 94, 119), "test": (212, 1342, 116, 65, 224, 21, 23)}
PAGE = "Harvard Dataverse, doi:10.7910/DVN/DBW86T"
FILES_NEEDED = (
    "the images (in HAM10000_images_part_1 and HAM10000_images_part_2, or all in images), "
    "HAM10000_metadata.csv beside these folders and, for the benchmark's split, split_train.csv and "
    "split_test.csv there too"
)
LISTS = (("split_train.csv", "split_test.csv"), ("train.csv", "val.csv"))
METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")


def read_ham10000(root: Path | None, side: int) -> tuple[Samples, Samples]:
    """Training and test samples of the benchmark's split, labels in the order of CLASS_NAMES."""
    catalog = read_catalog(root)
    if catalog.is_test is None:
        raise InvalidInput(
            f"data.root: {root} has no {' and no '.join(LISTS[0])}, the benchmark's lists; put them there."
        )
    is_test = torch.from_numpy(catalog.is_test)
    source = catalog.samples(side) if root is not None and root.is_dir() else _in_memory(catalog, side)
    train, test = (
        Samples(Selection(source.images, chosen), source.labels[chosen])
        for chosen in (torch.nonzero(~is_test).flatten(), torch.nonzero(is_test).flatten())
    )
    return train, test


def read_catalog(root: Path | None) -> Catalog:
    """Groups are lesions. With the lists: training list, then test list, in their order."""
    files = open_root(root, "HAM10000", FILES_NEEDED, PAGE)
    names = files.names()
    images: dict[str, str] = {}
    for name in names:
        if PurePosixPath(name).suffix.lower() == ".jpg":
            images.setdefault(PurePosixPath(name).name, name)  # some packages hold images twice
    if not images:
        raise InvalidInput(f"data.root: {root} lacks images. {give(FILES_NEEDED, PAGE)}")
    metadata, lists = _metadata(files, names), find_lists(names, LISTS)
    if lists is not None:
        rows = [read_rows(files, name, ("image", *CLASS_NAMES)) for name in lists]
        is_test = np.repeat([False, True], [len(part) for part in rows])
        listed = [(row["image"], _marked_class(row)) for part in rows for row in part]
    elif metadata:
        is_test = None
        listed = [(row["image_id"], _diagnosis(row)) for row in metadata.values()]
    else:
        raise InvalidInput(f"data.root: {root} lacks HAM10000_metadata.csv. {give(FILES_NEEDED, PAGE)}")
    return Catalog(
        files,
        named_files([f"{image}.jpg" for image, _ in listed], images, give(FILES_NEEDED, PAGE)),
        np.array([label for _, label in listed], dtype=np.int64),
        CLASS_NAMES,
        tuple(metadata.get(image, {}).get("lesion_id", image) for image, _ in listed) if metadata else None,
        is_test,
    )


def recognizes(names: Sequence[str]) -> bool:
    return any(PurePosixPath(name).name in METADATA for name in names) or (
        find_file(names, "split_train.csv") is not None
        and any(PurePosixPath(name).match("ISIC_*.jpg") for name in names)
    )


def _metadata(files: Files, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The rows about each image; empty where the file is not there."""
    name = find_file(names, *METADATA)
    rows = [] if name is None else read_rows(files, name, ("lesion_id", "image_id", "dx"))
    return {row["image_id"]: row for row in rows}


def _diagnosis(row: Mapping[str, str]) -> int:
    if row["dx"].upper() not in CLASS_NAMES:
        raise InvalidInput(
            f"data.root: HAM10000_metadata.csv gives {row['image_id']} the diagnosis {row['dx']!r}, which is "
            "none of HAM10000's; mend it."
        )
    return CLASS_NAMES.index(row["dx"].upper())


def _marked_class(row: Mapping[str, str]) -> int:
    try:
        marks = [float(row[name]) for name in CLASS_NAMES]
    except ValueError:
        marks = []
    if sorted(marks) != [0.0] * (len(CLASS_NAMES) - 1) + [1.0]:
        raise InvalidInput(f"data.root: a list does not name one class for {row['image']}; mend it.")
    return marks.index(1.0)


def _in_memory(catalog: Catalog, side: int) -> Samples:
    """All images decoded by several threads."""
    pixels = torch.empty(len(catalog), 3, side, side, dtype=torch.uint8)

    def decode(index: int) -> None:
        pixels[index] = catalog.decode(catalog.read(index), side, catalog.names[index])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(catalog))):
            pass
    return Samples(TensorImages(pixels), torch.from_numpy(catalog.labels))


def give(needed: str, page: str) -> str:
    """A sentence that leads from missing data to the data."""
    return f"Give the folder or archive that holds {needed}. Owner's page: {page}."


def open_root(root: Path | None, title: str, needed: str, page: str) -> Files:
    if root is None or not root.exists():
        problem = "is not given" if root is None else f"is not at {root}"
        raise InvalidInput(f"data.root: {title} {problem}. {give(needed, page)}")
    return open_files(root)


def find_file(names: Sequence[str], *wanted: str) -> str | None:
    """The first of these names that some folder holds; of several folders, the uppermost."""
    for name in wanted:
        found = [candidate for candidate in names if candidate == name or candidate.endswith(f"/{name}")]
        if found:
            return min(found, key=lambda candidate: (candidate.count("/"), candidate))
    return None


def find_lists(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """A training and a test list. One alone is an error: whether it is the whole split cannot be known."""
    found = {name: find_file(names, name) for pair in pairs for name in pair}
    for train, test in pairs:
        train_list, test_list = found[train], found[test]
        if train_list is not None and test_list is not None:
            return train_list, test_list
    for pair in pairs:
        present, absent = ([n for n in pair if (found[n] is not None) is there] for there in (True, False))
        if present:
            raise InvalidInput(
                f"data.root has {present[0]}, but no {absent[0]}: put both lists there, or neither."
            )
    return None


def read_rows(files: Files, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table with a header, separated by commas or tabs; a cell that is not there is empty."""
    try:
        text = files.read(name).decode("utf-8-sig")
        delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
        rows = list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"data.root: {name} cannot be read as a table ({error}); replace it.") from None
    if not rows or not set(columns) <= set(rows[0]):
        raise InvalidInput(
            f"data.root: {name} has not the columns {', '.join(columns)}, or no rows; replace it."
        )
    return [{column: (row[column] or "").strip() for column in columns} for row in rows]


def named_files(wanted: Sequence[str], found: Mapping[str, str], needed: str) -> tuple[str, ...]:
    """The files of listed images."""
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise InvalidInput(f"data.root lacks {len(unknown)} listed images, e.g. {unknown[0]}. {needed}")
    return tuple(found[name] for name in wanted)
