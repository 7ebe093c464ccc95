"""Read every image once: its hash, its facts, a thumbnail and, for training, its pixels."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from medcil.config import usable_cores
from medcil.data.decoding import ImageFacts, examine, examine_pixels
from medcil.data.image_table import MEMORY_BYTES, ImageTable
from medcil.data.samples import TensorImages, resized
from medcil.errors import MedcilError
from medcil.storage.atomic import writing

THUMBNAIL = 32  # pixels on a side: enough to tell pictures apart, small enough to keep them all
GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # the usual weights of red, green and blue
FIRST = 64
"""Images whose sizes decide the side, where that is chosen from the images."""
AT_A_TIME = 256
"""Images that wait for a thread."""

Watch = Callable[[int, int], None]
"""(images done, images in all)"""
Side = int | Callable[[Sequence[ImageFacts]], int]
"""Pixels on a side, or a function that chooses them from the facts of some of the images."""
Thumbnail = UInt8[np.ndarray, "32 32"]
T = TypeVar("T")


def unwatched(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, eq=False)
class Look:
    sha256: str | None
    """Of the file; None where it cannot be read at all."""
    facts: ImageFacts
    thumbnail: Thumbnail | None
    """Gray, of the picture in the file, without a dataset's preprocessing; None where there is none."""
    problems: tuple[str, ...] = ()
    """Why training would refuse the file; empty for a sound one."""


def scan(
    table: ImageTable, side: Side | None = None, *, folder: Path | None = None, watch: Watch = unwatched
) -> tuple[ImageTable, list[Look]]:
    """Read, hash, check and decode each file in one visit; return the table with hashes and pixels.

    Pixels of a side are kept in memory where they fit, or else in a file without a name on the disk of
    `folder`; without a folder they are decoded again when they are read. Prepared images are
    looked at without their files.
    """
    if table.pixels is not None:
        looks = _in_threads(lambda i: _look_at_pixels(table, i), range(len(table)), watch)
        return table, [looks[i] for i in range(len(table))]
    places = {name: place for place, name in enumerate(table.files.names())}
    # Neighbors in an archive or on a disk are read fastest one after the other.
    order = sorted(range(len(table)), key=lambda i: places.get(table.names[i], 0))
    contents = dict[int, bytes | str]()
    if callable(side):
        contents = _in_threads(lambda i: _content(table, i), order[:: -(-len(order) // FIRST)], unwatched)
        facts = [examine(c) for c in contents.values() if isinstance(c, bytes)]
        side = side([seen for seen in facts if not seen.problems])
    size, pixels = side, None if side is None else _empty_pixels(len(table), side, folder)
    preprocess = table.preprocess or (lambda picture, side, name: resized(picture, side))

    def look(i: int) -> Look:
        name = table.names[i]
        content = contents.pop(i) if i in contents else _content(table, i)
        if isinstance(content, str):
            return Look(None, ImageFacts(), None, (content,))
        sha256 = hashlib.sha256(content).hexdigest()
        facts, picture = examine_pixels(content, side=size if table.preprocess is None else None)
        if picture is None:
            return Look(sha256, facts, None, facts.problems)
        seen = Look(sha256, facts, _thumbnail(picture))
        if pixels is not None and size is not None:
            try:
                pixels[i] = preprocess(picture, size, name)
            except Exception as error:  # a dataset may expect more than a sound image
                return replace(seen, problems=(_reason(error),))
        return seen

    looks = _in_threads(look, order, watch)
    by_index = [looks[i] for i in range(len(table))]
    hashes = tuple(seen.sha256 for seen in by_index)
    return replace(table, sha256=hashes, pixels=None if pixels is None else TensorImages(pixels)), by_index


def _empty_pixels(n: int, side: int, folder: Path | None) -> UInt8[Tensor, "n 3 side side"] | None:
    shape, n_bytes = (n, 3, side, side), n * 3 * side**2
    if n_bytes <= MEMORY_BYTES:
        return torch.zeros(shape, dtype=torch.uint8)
    if folder is None:
        return None
    existing = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    with writing(existing), tempfile.TemporaryFile(dir=existing) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, n_bytes)  # else a full disk would end the process later
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=shape))


def _in_threads(visit: Callable[[int], T], order: Sequence[int], watch: Watch) -> dict[int, T]:
    """Visit images by index. Decoding releases Python's lock, so threads use every core."""
    visited = {}
    pool = ThreadPoolExecutor(usable_cores())
    # A few at a time: Ctrl-C then meets a thread that waits, not one that is filling the pool.
    parts = (order[first : first + AT_A_TIME] for first in range(0, len(order), AT_A_TIME))
    values = chain.from_iterable(pool.map(visit, part) for part in parts)
    try:
        for index, value in zip(order, values, strict=True):
            visited[index] = value
            watch(len(visited), len(order))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun need not begin
    return visited


def _content(table: ImageTable, index: int) -> bytes | str:
    """Return a file's content, or why it cannot be read."""
    try:
        return table.read(index)
    except (MedcilError, OSError, KeyError) as error:
        return _reason(error)


def _look_at_pixels(table: ImageTable, index: int) -> Look:
    assert table.pixels is not None
    side = table.pixels.side
    picture = Image.fromarray(table.decode(index, side).permute(1, 2, 0).numpy())
    facts = ImageFacts("prepared", "RGB", width=side, height=side)
    return Look(table.sha256[index] if table.sha256 else None, facts, _thumbnail(picture))


def _thumbnail(picture: Image.Image) -> Thumbnail:
    small = picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(np.rint(np.asarray(small).astype(np.float32) @ GRAY), dtype=np.uint8)


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
