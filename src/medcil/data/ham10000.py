"""HAM10000 (Tschandl et al. 2018) with the benchmark's split: a folder or a tar of it.

Expected: `images/*.jpg` under their official names, and the benchmark's one-hot lists `split_train.csv` and
`split_test.csv` with the columns `image MEL NV BCC AKIEC BKL DF VASC`.
"""

import csv
import io
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from medcil.data.decode import decode_image
from medcil.data.samples import FileImages, ImageSource, Samples, Selection, TensorImages
from medcil.errors import InvalidInput

CLASS_NAMES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
# The benchmark's three class orders; NV, two thirds of all images, comes last, in between, and first.
ORDERS = ((0, 2, 3, 4, 5, 6, 1), (5, 4, 0, 1, 3, 6, 2), (1, 5, 0, 6, 2, 4, 3))
LISTS = {"train": "split_train.csv", "test": "split_test.csv"}


def read_ham10000(root: Path | None, side: int) -> tuple[Samples, Samples]:
    """Training and test samples of the benchmark's split, labels in the order of CLASS_NAMES."""
    if root is None or not root.exists():
        problem = "is not given" if root is None else f"is not at {root}"
        raise InvalidInput(
            f"data.root: HAM10000 {problem}. Give the folder or tar that holds images/, "
            "split_train.csv and split_test.csv. The Harvard Dataverse distributes the images "
            "(doi:10.7910/DVN/DBW86T)."
        )
    images, lists = _read_folder(root, side) if root.is_dir() else _read_tar(root, side)
    train, test = (_listed(images, lists[split], root) for split in ("train", "test"))
    return train, test


def _read_folder(root: Path, side: int) -> tuple[tuple[ImageSource, dict[str, int]], dict[str, str]]:
    paths = sorted((root / "images").glob("*.jpg"))
    lists = {}
    for split, name in LISTS.items():
        if not (root / name).is_file():
            raise InvalidInput(f"data.root: {root} has no {name}; put the benchmark's list there.")
        lists[split] = (root / name).read_text()
    return (FileImages(paths, side), {path.stem: i for i, path in enumerate(paths)}), lists


def _read_tar(path: Path, side: int) -> tuple[tuple[ImageSource, dict[str, int]], dict[str, str]]:
    """Decodes every image while reading the archive once; nothing is written."""
    positions: dict[str, int] = {}
    pixels: list[Tensor] = []
    texts: dict[str, str] = {}

    def image_files() -> Iterator[tuple[str, bytes]]:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                file = archive.extractfile(member) if member.isfile() else None
                if file is None:
                    continue
                if name.name.startswith("._"):  # what macOS adds
                    continue
                if name.suffix == ".jpg" and name.stem not in positions:  # some packages hold images twice
                    positions[name.stem] = len(positions)
                    yield name.name, file.read()
                elif name.name in LISTS.values():
                    texts[name.name] = io.TextIOWrapper(file, encoding="utf-8").read()

    try:
        with ThreadPoolExecutor() as pool:
            files = image_files()
            while chunk := list(islice(files, 256)):  # so that not all compressed files are in memory at once
                pixels += pool.map(lambda file: decode_image(file[1], side, name=file[0]), chunk)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InvalidInput(
            f"data.root: {path} cannot be read as a tar ({error}); give a folder or a tar."
        ) from None
    missing = sorted(set(LISTS.values()) - set(texts))
    if missing or not pixels:
        raise InvalidInput(f"data.root: {path} lacks {missing[0] if missing else 'images'}; is it HAM10000?")
    images = TensorImages(torch.stack(pixels))
    return (images, positions), {split: texts[name] for split, name in LISTS.items()}


def _listed(images: tuple[ImageSource, dict[str, int]], text: str, root: Path) -> Samples:
    source, positions = images
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or not {"image", *CLASS_NAMES} <= set(rows[0]):
        raise InvalidInput(
            f"data.root: a list in {root} has not the columns image, {', '.join(CLASS_NAMES)}."
        )
    unknown = [row["image"] for row in rows if row["image"] not in positions]
    if unknown:
        raise InvalidInput(f"data.root: {root} lacks {len(unknown)} listed images, e.g. {unknown[0]}.jpg.")
    chosen = torch.tensor([positions[row["image"]] for row in rows])
    labels = torch.tensor([_label(row, root) for row in rows])
    return Samples(Selection(source, chosen), labels)


def _label(row: dict[str, str], root: Path) -> int:
    try:
        marks = [float(row[name]) for name in CLASS_NAMES]
    except (TypeError, ValueError):
        marks = []
    if sorted(marks) != [0.0] * (len(CLASS_NAMES) - 1) + [1.0]:
        raise InvalidInput(
            f"data.root: a list in {root} does not name one class for {row['image']}; mend it."
        )
    return marks.index(1.0)
