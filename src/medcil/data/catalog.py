"""A catalog: which image files there are, of which classes, patients and splits. Nothing is decoded yet.

Every dataset, the owner's layout or one's own folder, is read into a catalog; checking, splitting, preparing
and training start from it and know no dataset.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from medcil.data.decoding.tensors import decode_image
from medcil.data.samples import Samples

OWN = "own"
"""The name of one's own images, where a dataset's name is asked for."""


@runtime_checkable
class Files(Protocol):
    """Where files lie: a folder, an archive, a table. Names are relative, with forward slashes."""

    def names(self) -> Sequence[str]: ...

    def read(self, name: str) -> bytes:
        """Safe to call from several threads at once."""
        ...


Decode = Callable[[bytes, int, str], UInt8[Tensor, "3 side side"]]
"""(content, side, name for messages) -> pixels; raises InvalidInput for a file that is no image."""


def decode_plainly(content: bytes, side: int, name: str) -> UInt8[Tensor, "3 side side"]:
    return decode_image(content, side, name=name)


@dataclass(frozen=True, eq=False)
class Catalog:
    files: Files
    names: tuple[str, ...]
    """Of the images, in a fixed order; each is a name in `files`."""
    labels: Int[np.ndarray, "n"]
    """Counting `class_names`."""
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    """The patient or lesion of each image; an image of its own group where unknown."""
    is_test: Bool[np.ndarray, "n"] | None = None
    """The split that came with the data; None where there is none."""
    decode: Decode = decode_plainly
    patients: tuple[str, ...] | None = None
    """Ids as they were given, empty where unknown: a model folder keeps them so that it can forget a patient.
    Everything else goes by `groups`, which have numbers in their place."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a table says of each image besides, such as age, sex or site: to look at subgroups."""
    dataset: str = OWN
    """Whose layout it was read from, by the name of the dataset."""

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.labels)}
        lengths |= set() if self.groups is None else {len(self.groups)}
        lengths |= set() if self.is_test is None else {len(self.is_test)}
        lengths |= set() if self.patients is None else {len(self.patients)}
        lengths |= {len(column) for column in self.columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"a catalog's columns differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return self.files.read(self.names[index])

    def select(self, chosen: Int[np.ndarray, "m"]) -> "Catalog":
        return replace(
            self,
            names=tuple(self.names[i] for i in chosen),
            labels=self.labels[chosen],
            groups=None if self.groups is None else tuple(self.groups[i] for i in chosen),
            is_test=None if self.is_test is None else self.is_test[chosen],
            patients=None if self.patients is None else tuple(self.patients[i] for i in chosen),
            columns={name: tuple(column[i] for i in chosen) for name, column in self.columns.items()},
        )

    def samples(self, side: int) -> Samples:
        """Decoded and resized each time they are read."""
        return Samples(CatalogImages(self, side), torch.from_numpy(self.labels.astype(np.int64)))


def numbered_groups(groups: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The same groups under numbers, so that no patient's id is kept; done twice, it changes nothing.

    An image whose patient is unknown stays a group called by its own name.
    """
    n_images, named = Counter(groups), zip(groups, names, strict=True)
    ids = {group for group, name in named if group != f"image {name}" or n_images[group] > 1}
    by_length = sorted(ids, key=lambda group: (len(group), group))  # patient 2 before patient 10
    number = {group: n for n, group in enumerate(by_length, start=1)}
    return tuple(f"patient {number[group]}" if group in number else group for group in groups)


@dataclass(frozen=True, eq=False)
class CatalogImages:
    """An image source over a catalog."""

    catalog: Catalog
    side: int

    def __len__(self) -> int:
        return len(self.catalog)

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        catalog, chosen = self.catalog, indices.tolist()
        images = [catalog.decode(catalog.read(i), self.side, catalog.names[i]) for i in chosen]
        return torch.stack(images) if images else torch.empty(0, 3, self.side, self.side, dtype=torch.uint8)
