"""CCH5000: textures in colorectal cancer histology (Kather et al. 2016), 5,000 tiles of ten slides."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from medcil.data.image_table import Dataset, Files, ImageTable
from medcil.data.sources.manifest import complete, find_lists, named_files, open_root, read_rows
from medcil.errors import InvalidInput, printable

CLASS_NAMES = ("TUMOR", "STROMA", "COMPLEX", "LYMPHO", "DEBRIS", "MUCOSA", "ADIPOSE", "EMPTY")
FOLDERS = tuple(f"{number:02d}_{name}" for number, name in enumerate(CLASS_NAMES, start=1))
LISTS = (("train.csv", "test.csv"), ("train.csv", "val.csv"))
SLIDE = re.compile(r"CRC-Prim-HE-\d+")


def read_table(root: Path | None) -> ImageTable:
    """List the tiles, grouped by slide. With the lists: training list, then test list, in their order."""
    files = open_root(root, "CCH5000", DATASET)
    names = files.names()
    tiles = _tiles(names)
    absent = sorted(set(FOLDERS) - {tile.partition("/")[0] for tile in tiles})
    if absent:
        raise InvalidInput(f"data.root: {root} lacks the tiles of {', '.join(absent)}. {DATASET.hint}")
    lists = find_lists(names, LISTS)
    if lists is None:
        listed, is_test = sorted(tiles), None
    else:
        parts = [_listed(files, name) for name in lists]
        listed = [*parts[0], *parts[1]]
        is_test = np.repeat([False, True], [len(part) for part in parts])
    table = ImageTable(
        files,
        named_files(listed, tiles),
        np.array([FOLDERS.index(tile.partition("/")[0]) for tile in listed], dtype=np.int64),
        CLASS_NAMES,
        tuple(_slide(tile) for tile in listed),
        is_test,
    )
    return complete(table, DATASET)


def recognizes(names: Sequence[str]) -> bool:
    return {PurePosixPath(name).parent.name for name in names} >= set(FOLDERS)


def _tiles(names: Sequence[str]) -> dict[str, str]:
    """Map `01_TUMOR/tile.tif` to the file's name."""
    tiles: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name)
        if path.parent.name in FOLDERS and path.suffix.lower() in (".tif", ".tiff"):
            tiles.setdefault(f"{path.parent.name}/{path.name}", name)
    return tiles


def _listed(files: Files, name: str) -> list[str]:
    rows = read_rows(files, name, ("image", "label"))
    for row in rows:
        folder = row["image"].partition("/")[0]
        if folder not in FOLDERS or row["label"] != str(FOLDERS.index(folder)):
            raise InvalidInput(
                f"data.root: {name} gives {printable(row['image'])} the label {row['label']!r}, which is "
                "not its folder's; replace the list."
            )
    return [row["image"] for row in rows]


def _slide(tile: str) -> str:
    found = SLIDE.search(tile)
    return found[0] if found else tile


DATASET = Dataset(
    description="Colorectal cancer histology, 5,000 tiles of ten slides",
    class_names=CLASS_NAMES,
    orders=((2, 3, 0, 4, 5, 6, 7, 1), (1, 5, 6, 0, 3, 2, 4, 7), (1, 4, 5, 7, 2, 3, 6, 0)),
    protocols=("4-2", "4-1"),
    read=read_table,
    recognizes=recognizes,
    published_counts={"train": (500,) * 8, "test": (125,) * 8},
    page="Zenodo, record 53169 (Kather et al. 2016)",
    files_needed="Kather_texture_2016_image_tiles_5000 with its folders 01_TUMOR to 08_EMPTY of .tif tiles "
    "and, for the benchmark's split, train.csv and test.csv beside it",
)
