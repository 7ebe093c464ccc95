"""CCH5000: textures in colorectal cancer histology (Kather et al. 2016), 5,000 tiles of ten slides."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from medcil.data.image_table import Dataset, ImageTable
from medcil.data.sources.manifest import Row, dataset_table, open_root, split_rows
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
    listed = split_rows(files, LISTS, ("image", "label"))
    if listed is None:
        rows = [_row(tile, "") for tile in sorted(tiles)]
    else:
        rows = [_row(row["image"], part, row["label"]) for part, row in listed]
    return dataset_table(DATASET, files, rows, tiles)


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


def _row(tile: str, part: str, label: str | None = None) -> Row:
    folder = tile.partition("/")[0]
    if folder not in FOLDERS or label not in (None, str(FOLDERS.index(folder))):
        raise InvalidInput(
            f"data.root: a list gives {printable(tile)} the label {label!r}, not its folder's."
        )
    slide = SLIDE.search(tile)
    return Row(tile, folder[3:], part, slide[0] if slide else tile)


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
