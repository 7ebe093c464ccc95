"""Labeled images. Pixels are read by index, so that a million images need not be in memory."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int, UInt8
from torch import Tensor


@runtime_checkable
class ImageSource(Protocol):
    """Square RGB images of one size, read by index."""

    @property
    def side(self) -> int: ...
    def __len__(self) -> int: ...
    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]: ...


@dataclass(frozen=True, eq=False)
class TensorImages:
    """Images that are in memory already."""

    pixels: UInt8[Tensor, "n 3 side side"]

    @property
    def side(self) -> int:
        return self.pixels.shape[-1]

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        return self.pixels[indices]


@dataclass(frozen=True, eq=False)
class Selection:
    """Some images of another source."""

    source: ImageSource
    indices: Int[Tensor, "m"]

    @property
    def side(self) -> int:
        return self.source.side

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        return self.source.read(self.indices[indices])


@dataclass(frozen=True, eq=False)
class Joined:
    """One source after another."""

    first: ImageSource
    second: ImageSource

    @property
    def side(self) -> int:
        return self.first.side

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        in_first = indices < len(self.first)
        n = int(in_first.sum())
        if bool(in_first[:n].all()):  # as where everything is read: no image by image
            parts = (self.first.read(indices[:n]), self.second.read(indices[n:] - len(self.first)))
            return torch.cat(parts)
        images = torch.empty(len(indices), 3, self.side, self.side, dtype=torch.uint8)
        images[in_first] = self.first.read(indices[in_first])
        images[~in_first] = self.second.read(indices[~in_first] - len(self.first))
        return images


class Lease:
    """A source that can be taken back: reading it afterwards is an error, whoever still holds it."""

    def __init__(self, source: ImageSource) -> None:
        self._source: ImageSource | None = source
        self._side = source.side
        self._length = len(source)

    @property
    def side(self) -> int:
        return self._side

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        if self._source is None:
            raise PermissionError(
                "these training images belong to an earlier task; only its exemplars remain"
            )
        return self._source.read(indices)

    def end(self) -> None:
        self._source = None


@dataclass(frozen=True, eq=False)
class Samples:
    """Images with their labels."""

    images: ImageSource
    labels: Int[Tensor, "n"]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __add__(self, other: "Samples") -> "Samples":
        if not len(other):
            return self
        if not len(self):
            return other
        return Samples(Joined(self.images, other.images), torch.cat([self.labels, other.labels]))

    def select(self, indices: Int[Tensor, "m"]) -> "Samples":
        return Samples(Selection(self.images, indices), self.labels[indices])

    def of_class(self, label: int) -> "Samples":
        return self.select(torch.nonzero(self.labels == label).flatten())

    def class_counts(self, n_classes: int) -> Int[Tensor, "classes"]:
        return torch.bincount(self.labels, minlength=n_classes)

    def read_all(self) -> UInt8[Tensor, "n 3 side side"]:
        return self.images.read(torch.arange(len(self)))

    def copied(self) -> "Samples":
        """The same samples with pixels of their own, so that the source may go away."""
        return Samples(TensorImages(self.read_all()), self.labels.clone())


def no_samples(side: int) -> Samples:
    return Samples(
        TensorImages(torch.empty(0, 3, side, side, dtype=torch.uint8)), torch.empty(0, dtype=torch.int64)
    )
