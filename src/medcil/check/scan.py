"""One look at every image: its hash, its facts, a thumbnail. All later findings start from these."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from medcil.data.cache import Store
from medcil.data.catalog import Catalog
from medcil.data.decoding.image import ImageFacts, examine_pixels
from medcil.errors import MedcilError
from medcil.processors import usable_cores

THUMBNAIL = 32  # pixels on a side: enough to tell pictures apart, small enough to keep them all
GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # the usual weights of red, green and blue

Watch = Callable[[int, int], None]
"""(images done, images in all)"""

Thumbnail = UInt8[np.ndarray, "32 32"]


def unwatched(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True, eq=False)
class Look:
    sha256: str | None
    """Of the file's content; None where it could not be read at all."""
    facts: ImageFacts
    thumbnail: Thumbnail | None
    """Gray, of the picture in the file, without a dataset's preprocessing; None where there is none."""
    problems: tuple[str, ...] = ()
    """Why training would refuse the file; empty for a sound one."""


def look_at_all(catalog: Catalog, watch: Watch = unwatched) -> list[Look]:
    """In the order of the catalog."""
    places = {name: place for place, name in enumerate(catalog.files.names())}
    # Files that lie side by side are read fastest one after the other.
    order = sorted(range(len(catalog)), key=lambda i: places.get(catalog.names[i], 0))
    return _by_threads(lambda index: _look_at(catalog, index), order, watch)


def look_at_store(store: Store, watch: Watch = unwatched) -> list[Look]:
    """Of a store the pixels are seen, and of the files they came from the hashes."""

    def look(index: int) -> Look:
        pixels = store.images.read(torch.tensor([index]))[0].permute(1, 2, 0).numpy()
        small = Image.fromarray(pixels).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
        side = store.images.side
        facts = ImageFacts(store.names[index], "prepared", "RGB", width=side, height=side, frames=1)
        return Look(store.sha256s[index], facts, gray(np.asarray(small).transpose(2, 0, 1)))

    return _by_threads(look, range(len(store)), watch)


def _by_threads(look: Callable[[int], Look], order: Sequence[int], watch: Watch) -> list[Look]:
    """By index. Decoding releases Python's lock, so that threads use every core."""
    looks: dict[int, Look] = {}
    pool = ThreadPoolExecutor(usable_cores())
    try:
        for index, found in zip(order, pool.map(look, order), strict=True):
            looks[index] = found
            watch(len(looks), len(order))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun need not begin
    return [looks[index] for index in range(len(order))]


def _look_at(catalog: Catalog, index: int) -> Look:
    name = catalog.names[index]
    try:
        content = catalog.read(index)
    except (MedcilError, OSError, KeyError) as error:
        return Look(None, ImageFacts(name), None, (_reason(error),))
    sha256 = hashlib.sha256(content).hexdigest()
    facts, picture = examine_pixels(content, name)
    if picture is None:
        return Look(sha256, facts, None, facts.problems)
    small = picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return Look(sha256, facts, gray(np.asarray(small).transpose(2, 0, 1)))


def gray(pixels: UInt8[np.ndarray, "3 32 32"]) -> Thumbnail:
    weighted = np.tensordot(GRAY, pixels.astype(np.float32), axes=1)
    return np.rint(weighted).astype(np.uint8)


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
