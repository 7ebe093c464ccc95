"""Labelled images as tensors. Pixels are read by index, so a million images need not be in memory."""

import io
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional

from medcil.data.decoding import read_upright, resized_planes

EXACT_SIDE = 1024
"""Far below the 2 ** 13 up to which PyTorch's weights suffice."""


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
        images = torch.empty(len(indices), 3, self.side, self.side, dtype=torch.uint8)
        images[in_first] = self.first.read(indices[in_first])
        images[~in_first] = self.second.read(indices[~in_first] - len(self.first))
        return images


class Lease:
    """A source that can be taken back: reading it afterwards is an error, for every holder."""

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
    ids: np.ndarray | None = None
    """What identifies each image: the sha256 of its file, or its name; None where nothing does."""
    groups: np.ndarray | None = None
    """The patient or lesion of each image; None where nothing tells."""

    def __post_init__(self) -> None:
        columns = (self.images, self.labels, self.ids, self.groups)
        lengths = {len(column) for column in columns if column is not None}
        if len(lengths) > 1:
            raise ValueError(f"images, labels, ids and groups differ in number: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.labels)

    def __add__(self, other: "Samples") -> "Samples":
        if not len(other):
            return self
        if not len(self):
            return other
        return Samples(
            Joined(self.images, other.images),
            torch.cat([self.labels, other.labels]),
            _concatenated(self.ids, other.ids),
            _concatenated(self.groups, other.groups),
        )

    def select(self, indices: Int[Tensor, "m"]) -> "Samples":
        ids, groups = (
            None if column is None else column[indices.cpu().numpy()] for column in (self.ids, self.groups)
        )
        return Samples(Selection(self.images, indices), self.labels[indices], ids, groups)

    def of_class(self, label: int) -> "Samples":
        return self.select(torch.nonzero(self.labels == label).flatten())

    def group_names(self) -> np.ndarray:
        """Return the patient or lesion of each image; a name of its own where nothing tells."""
        return np.array([f"image {i}" for i in range(len(self))]) if self.groups is None else self.groups

    def class_counts(self, n_classes: int) -> Int[Tensor, "classes"]:
        return torch.bincount(self.labels, minlength=n_classes)

    def read_all(self) -> UInt8[Tensor, "n 3 side side"]:
        return self.images.read(torch.arange(len(self)))

    def copied(self) -> "Samples":
        """Return the same samples with pixels of their own, so that the source may go away."""
        return replace(self, images=TensorImages(self.read_all()), labels=self.labels.clone())


def _concatenated(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    return None if first is None or second is None else np.concatenate([first, second])


def no_samples(side: int) -> Samples:
    return Samples(
        TensorImages(torch.empty(0, 3, side, side, dtype=torch.uint8)), torch.empty(0, dtype=torch.int64)
    )


def decode_image(content: bytes, side: int, *, name: str = "an image") -> UInt8[Tensor, "3 side side"]:
    """Decode a file to upright 8-bit RGB, side x side (bilinear, aspect ratio not kept)."""
    return resized(read_upright(content, side=side, name=name), side)


def resized(image: Image.Image, side: int) -> UInt8[Tensor, "3 side side"]:
    """Resize an RGB image as Pillow's bilinear filter does, bit for bit, in the faster way."""
    is_power_of_two = side & (side - 1) == 0
    if is_power_of_two and max(image.size) <= side <= EXACT_SIDE:
        # Enlarged to a power of two, every weight is a multiple of 1 / (2 side): Pillow's 22 bits and
        # PyTorch's 14 both hold it exactly, and both then round the same sums in the same way.
        small = torch.from_numpy(np.array(image)[None]).permute(0, 3, 1, 2)  # channels last: half the time
        return functional.interpolate(small, size=side, mode="bilinear", antialias=True)[0].contiguous()
    return torch.from_numpy(resized_planes(image, side))


def encode_png(pixels: UInt8[Tensor, "3 side side"]) -> bytes:
    """Encode without loss, and with nothing in the file but the pixels."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.save(buffer, "PNG", compress_level=1)  # an eighth larger than usual, written five times as fast
    return buffer.getvalue()
