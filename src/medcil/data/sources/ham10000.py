"""HAM10000 (Tschandl et al. 2018): the owner's layout, and the benchmark's split if its lists are there."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from medcil.data.image_table import Dataset, Files, ImageTable
from medcil.data.sources.manifest import (
    Row,
    dataset_table,
    find_file,
    open_root,
    read_rows,
    split_rows,
    unpack_first,
)
from medcil.errors import InvalidInput, printable

CLASS_NAMES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
LISTS = (("split_train.csv", "split_test.csv"), ("train.csv", "val.csv"))
METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")
NEEDED = ("lesion_id", "image_id", "dx")
SUBGROUPS = ("age", "sex", "localization")


def read_table(root: Path | None) -> ImageTable:
    """List the images, grouped by lesion. With the lists: training list, then test list, in their order."""
    files = open_root(root, "HAM10000", DATASET)
    names = files.names()
    images: dict[str, str] = {}
    for name in names:
        if PurePosixPath(name).suffix.lower() == ".jpg":
            images.setdefault(PurePosixPath(name).name, name)  # some packages hold images twice
    if not images:
        raise InvalidInput(f"data.root: {root} lacks images. {unpack_first(names)}{DATASET.hint}")
    metadata = _metadata(files, names)
    listed = split_rows(files, LISTS, ("image", *CLASS_NAMES))
    if listed is None and not metadata:
        raise InvalidInput(f"data.root: {root} lacks HAM10000_metadata.csv. {DATASET.hint}")
    if listed is None:
        classes = [(image, _diagnosis(row), "") for image, row in metadata.items()]
    else:
        classes = [(row["image"], _marked_class(row), part) for part, row in listed]
    subgroups = [name for name in SUBGROUPS if name in next(iter(metadata.values()), {})]
    rows = []
    for image, label, part in classes:
        about = metadata.get(image, {})
        lesion = about.get("lesion_id", image) if metadata else ""
        rows.append(Row(f"{image}.jpg", label, part, lesion, {n: about.get(n, "") for n in subgroups}))
    return dataset_table(DATASET, files, rows, images)


def recognizes(names: Sequence[str]) -> bool:
    return any(PurePosixPath(name).name in METADATA for name in names) or (
        find_file(names, "split_train.csv") is not None
        and any(PurePosixPath(name).match("ISIC_*.jpg") for name in names)
    )


def _metadata(files: Files, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the row about each image; empty without the file."""
    name = find_file(names, *METADATA)
    if name is None:
        return {}
    return {row["image_id"]: row for row in read_rows(files, name, NEEDED, optional=SUBGROUPS)}


def _diagnosis(row: Mapping[str, str]) -> str:
    if row["dx"].upper() not in CLASS_NAMES:
        problem = f"{printable(row['image_id'])} the diagnosis {row['dx']!r}, none of HAM10000's"
        raise InvalidInput(f"data.root: HAM10000_metadata.csv gives {problem}; correct it.")
    return row["dx"].upper()


def _marked_class(row: Mapping[str, str]) -> str:
    try:
        marks = [float(row[name]) for name in CLASS_NAMES]
    except ValueError:
        marks = []
    if sorted(marks) != [0.0] * (len(CLASS_NAMES) - 1) + [1.0]:
        raise InvalidInput(f"data.root: a list does not name one class for {printable(row['image'])}.")
    return CLASS_NAMES[marks.index(1.0)]


DATASET = Dataset(
    description="Skin lesions, 10,015 dermatoscopic images, the benchmark's split",
    class_names=CLASS_NAMES,
    # The benchmark's; NV, two thirds of all images, comes last, in between, and first.
    orders=((0, 2, 3, 4, 5, 6, 1), (5, 4, 0, 1, 3, 6, 2), (1, 5, 0, 6, 2, 4, 3)),
    protocols=("3-2", "3-1"),
    read=read_table,
    recognizes=recognizes,
    published_counts={
        "train": (901, 5363, 398, 262, 875, 94, 119),
        "test": (212, 1342, 116, 65, 224, 21, 23),
    },
    page="Harvard Dataverse, doi:10.7910/DVN/DBW86T",
    files_needed="the images (in HAM10000_images_part_1 and HAM10000_images_part_2, or all in images), "
    "HAM10000_metadata.csv beside these folders and, for the benchmark's split, split_train.csv and "
    "split_test.csv there too",
)
