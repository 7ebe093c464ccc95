"""Labelled images as one table: names, classes, patients, split, and how pixels are read.

Every source becomes an `ImageTable`: a folder, a manifest, an archive, a known dataset, prepared images.
Checking, splitting, preparing, training and measuring start from it and know no dataset. Nothing is decoded
until `decode`.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from PIL import Image
from torch import Tensor

from medcil.config import Augmentation
from medcil.data.decoding import read_upright
from medcil.data.samples import ImageSource, Samples, Selection, TensorImages, resized
from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from medcil.errors import DamagedFile, InvalidInput, listed_below

OWN = "own"
"""The name of the user's own images, where a dataset's name is expected."""
REFUSE, SKIP = "refuse", "skip"
MEMORY_BYTES = 2**31
"""Pixels up to this size are decoded into memory; more are decoded each time they are read."""
UNREADABLE = (InvalidInput, DamagedFile, OSError)
"""What reading or decoding a bad file raises."""

Indices = Int[np.ndarray, "_"]


@runtime_checkable
class Files(Protocol):
    """A folder, an archive or arrays. Names are relative, with forward slashes."""

    def names(self) -> Sequence[str]: ...

    def read(self, name: str) -> bytes:
        """Safe to call from several threads at once."""
        ...


@dataclass(frozen=True, eq=False)
class MemoryFiles:
    """Files whose content is in memory."""

    contents: Mapping[str, bytes]

    def names(self) -> Sequence[str]:
        return sorted(self.contents)

    def read(self, name: str) -> bytes:
        if name not in self.contents:
            raise InvalidInput(
                f"The data has no file {name!r}. Add it, or leave it out of the list.",
                code="data.file.missing",
            )
        return self.contents[name]


Preprocess = Callable[[Image.Image, int, str], UInt8[Tensor, "3 side side"]]
"""(whole upright RGB picture, side, name for messages) -> pixels"""


@dataclass(frozen=True, eq=False)
class ImageTable:
    files: Files
    names: tuple[str, ...]
    """Of the images, in a fixed order; each is a name in `files`."""
    labels: Int[np.ndarray, "n"]
    """Index into `class_names`."""
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    """The patient or lesion of each image; an image of its own group where unknown."""
    is_test: Bool[np.ndarray, "n"] | None = None
    """The split that came with the data; None where there is none."""
    is_validation: Bool[np.ndarray, "n"] | None = None
    """Its validation images, beside others to test on; they are not trained on either."""
    preprocess: Preprocess | None = None
    """A dataset's own preprocessing; None: resize."""
    patients: tuple[str, ...] | None = None
    """Ids as they were written, empty where unknown: a model folder keeps them to be able to erase a patient.
    Everything else uses `groups`, which have numbers in their place."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns of a manifest, such as age, sex or site: for subgroups."""
    dataset: str = OWN
    """The dataset whose layout it was read from."""
    sha256: tuple[str | None, ...] | None = None
    """Of the files, once they were read; None for a file that cannot be read."""
    pixels: ImageSource | None = None
    """Decoded already; row i is image i."""
    published_as: str | None = None
    """The dataset whose published figures are those of one split; None where there are no such figures."""
    remarks: tuple[str, ...] = ()
    """How the files were understood, for the screen."""

    def __post_init__(self) -> None:
        split = (self.is_test, self.is_validation)
        columns = [self.labels, self.groups, *split, self.patients, self.sha256, self.pixels]
        lengths = {len(self.names), *(len(column) for column in columns if column is not None)}
        lengths |= {len(column) for column in self.columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"the columns of an image table differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_kept_out(self) -> Bool[np.ndarray, "n"] | None:
        """Whether the split that came with the data keeps each image out of training; None without one."""
        if self.is_test is None or self.is_validation is None:
            return self.is_test
        return np.asarray(self.is_test | self.is_validation)

    def read(self, index: int) -> bytes:
        return self.files.read(self.names[index])

    def decode(self, index: int, side: int) -> UInt8[Tensor, "3 side side"]:
        if self.pixels is not None:
            self._check_side(side)
            return self.pixels.read(torch.tensor([index]))[0]
        return self.decode_content(self.read(index), side, self.names[index])

    def decode_content(self, content: bytes, side: int, name: str) -> UInt8[Tensor, "3 side side"]:
        """Decode a file's content the way this table decodes its images."""
        if self.preprocess is None:
            return resized(read_upright(content, side=side, name=name), side)
        return self.preprocess(read_upright(content, name=name), side, name)

    @property
    def side(self) -> int | None:
        """Return the pixels on a side of images that are decoded already."""
        return None if self.pixels is None else self.pixels.side

    def _check_side(self, side: int) -> None:
        if self.pixels is not None and self.pixels.side != side:
            raise InvalidInput(
                f"The images were prepared with side {self.pixels.side}, but side {side} is needed."
                " Prepare them with that side.",
                code="data.side.mismatch",
            )

    def select(self, indices: Indices) -> "ImageTable":
        chosen = indices.tolist()
        return replace(
            self,
            names=tuple(self.names[i] for i in chosen),
            labels=self.labels[indices],
            groups=_some(self.groups, chosen),
            is_test=None if self.is_test is None else self.is_test[indices],
            is_validation=None if self.is_validation is None else self.is_validation[indices],
            patients=_some(self.patients, chosen),
            columns={name: tuple(column[i] for i in chosen) for name, column in self.columns.items()},
            sha256=_some(self.sha256, chosen),
            pixels=None if self.pixels is None else Selection(self.pixels, torch.from_numpy(indices)),
        )

    def counts(self, indices: Indices) -> dict[str, int]:
        """Count the images of each class."""
        found = np.bincount(self.labels[indices], minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, found, strict=True))

    def samples(self, side: int) -> Samples:
        """Return all images with their labels; ids are the hashes of the files, or else the names."""
        self._check_side(side)
        images = TableImages(self, side) if self.pixels is None else self.pixels
        ids = [sha256 or name for sha256, name in zip(self.sha256 or self.names, self.names, strict=True)]
        labels = torch.from_numpy(self.labels.astype(np.int64))
        return Samples(images, labels, np.array(ids), None if self.groups is None else np.array(self.groups))

    def loaded(self, side: int, indices: Indices | None = None) -> "ImageTable":
        """Read each file once, or those at `indices`: hash it and, where all fit into memory, decode it."""
        table = self if indices is None else self.select(indices)
        if table.pixels is not None:
            table._check_side(side)
            return table
        if len(self) * 3 * side**2 > MEMORY_BYTES:
            return table if table.sha256 is not None else replace(table, sha256=hash_files(table))
        pixels = torch.empty(len(table), 3, side, side, dtype=torch.uint8)

        def load(index: int) -> str | None:
            content = table.read(index)
            pixels[index] = table.decode_content(content, side, table.names[index])
            return hashlib.sha256(content).hexdigest()

        with ThreadPoolExecutor() as pool:
            sha256 = tuple(pool.map(load, range(len(table))))
        return replace(table, sha256=sha256, pixels=TensorImages(pixels))

    def fingerprint(self, indices: Indices) -> str:
        """Hash the content and classes of images: the same whatever their names, order and place."""
        if self.sha256 is None:
            raise ValueError("the files have not been read")
        entries = (f"{self.sha256[i]} {self.class_names[self.labels[i]]}" for i in indices.tolist())
        return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()

    def renamed(self, names: Mapping[str, str]) -> "ImageTable":
        """Give classes other names; those of one name become one class."""
        given = [names.get(name, name) for name in self.class_names]
        kept = tuple(dict.fromkeys(given))
        places = np.array([kept.index(name) for name in given], dtype=np.int64)
        return replace(self, labels=places[self.labels], class_names=kept)

    def without_empty_classes(self) -> "ImageTable":
        """Drop classes of a known dataset that have no image here."""
        present, labels = np.unique(self.labels, return_inverse=True)
        return replace(self, labels=labels, class_names=tuple(self.class_names[c] for c in present))


@dataclass(frozen=True, eq=False)
class TableImages:
    """An image source that decodes the files of a table each time they are read."""

    table: ImageTable
    side: int

    def __len__(self) -> int:
        return len(self.table)

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        images = [self.table.decode(i, self.side) for i in indices.tolist()]
        return torch.stack(images) if images else torch.empty(0, 3, self.side, self.side, dtype=torch.uint8)


@dataclass(frozen=True)
class Dataset:
    """A published or synthetic dataset: what it holds, and how its files become a table."""

    description: str
    class_names: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]
    """The class orders of published experiments."""
    protocols: tuple[str, ...]
    """base-increment"""
    read: Callable[[Path | None], ImageTable] | None = None
    """List the images in the owner's layout; None where there are no files."""
    draw: Callable[[int], ImageTable] | None = None
    """Draw synthetic images of a side."""
    recognizes: Callable[[Sequence[str]], bool] = lambda names: False
    """Whether a folder or archive with these file names is this dataset."""
    confirms: Callable[[Files], bool] = lambda files: True
    """Whether it is by the content of its lists as well; for names that others use too."""
    published_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Images per class of `train` and `test`, or in `total`; empty where nobody published them."""
    published_sizes: Mapping[str, int] = field(default_factory=dict)
    """Images of `train` and `test` over all classes, where no more than that is published."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Images of `train` and `test` that the owner has beyond the published counts: no surplus."""
    page: str = ""
    """The owner's page, in words."""
    files_needed: str = ""
    """Which files, and where they belong below data.root."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    augmentation: Augmentation = "crop"
    """Of training images, where a recipe says nothing."""
    name: str = OWN

    @property
    def is_synthetic(self) -> bool:
        return self.draw is not None

    @property
    def hint(self) -> str:
        """Tell which files to give, and where they come from."""
        return f"Give the folder or archive that holds {self.files_needed}. Owner's page: {self.page}."

    @property
    def has_published_split(self) -> bool:
        return {"train", "test"} <= set(self.published_counts)


def hash_files(table: ImageTable) -> tuple[str | None, ...]:
    """Read every file once and return its sha256; None where it cannot be read."""

    def hash_file(index: int) -> str | None:
        try:
            return hashlib.sha256(table.read(index)).hexdigest()
        except UNREADABLE:
            return None

    with ThreadPoolExecutor() as pool:
        return tuple(pool.map(hash_file, range(len(table))))


def numbered_groups(groups: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Replace the ids of patients by numbers, so that no id is kept; doing it twice changes nothing.

    An image whose patient is unknown stays a group with its own name.
    """
    n_images, named = Counter(groups), zip(groups, names, strict=True)
    ids = {group for group, name in named if group != f"image {name}" or n_images[group] > 1}
    by_length = sorted(ids, key=lambda group: (len(group), group))  # patient 2 before patient 10
    number = {group: n for n, group in enumerate(by_length, start=1)}
    return tuple(f"patient {number[group]}" if group in number else group for group in groups)


def without_ids(table: ImageTable) -> ImageTable:
    """Replace ids of patients by numbers; groups of published datasets are public and keep their names."""
    if table.groups is None or table.dataset != OWN:
        return table
    return replace(table, groups=numbered_groups(table.groups, table.names))


def without_conflicts(table: ImageTable, rule: str) -> ImageTable:
    """Decide what happens to one picture in several classes.

    Files of the same content in several classes are an error under `refuse`; under `skip` none of them is
    used; under the name of a class its copies are used, and a picture that is not in that class is an error.
    """
    if rule not in (REFUSE, SKIP, *table.class_names):
        raise InvalidInput(
            f"--conflicts {rule}: no such class. Give refuse, skip or one of {', '.join(table.class_names)}.",
            code="data.conflicts.unknown",
        )
    if table.sha256 is None:
        raise ValueError("the files have not been read")
    classes = [table.class_names[label] for label in table.labels.tolist()]
    copies = defaultdict(list)
    for index, sha256 in enumerate(table.sha256):
        copies[sha256].append(index)
    dropped, unsolved = set[int](), list[str]()
    for same in copies.values():
        several = {classes[index] for index in same}
        if len(several) > 1 and (rule == SKIP or rule in several):
            dropped |= {index for index in same if classes[index] != rule}
        elif len(several) > 1:
            unsolved.append(", ".join(f"{table.names[index]} ({classes[index]})" for index in same))
    if unsolved:
        first = f"{len(unsolved)} pictures are in several classes. Remove wrong ones, or give --conflicts."
        raise InvalidInput(listed_below(first, unsolved), code="data.conflicts.unsolved")
    kept = np.array([index for index in range(len(table)) if index not in dropped], dtype=np.int64)
    emptied = set(table.labels.tolist()) - set(table.labels[kept].tolist())
    if emptied:
        raise InvalidInput(
            f"All images of {table.class_names[min(emptied)]!r} are in another class too. Remove wrong ones.",
            code="data.conflicts.empty",
        )
    return table.select(kept) if dropped else table


def _some(column: Sequence[str | None] | None, chosen: Sequence[int]) -> tuple[str, ...] | None:
    return None if column is None else tuple(column[i] for i in chosen)  # type: ignore[misc]
