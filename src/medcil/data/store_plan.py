"""What a prepared store is to hold, chunk by chunk, and where that lies. docs/prepared-store.md describes the
files.
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from medcil.data.catalog import Catalog, Decode

FORMAT, VERSION = "medcil prepared store", 2
MANIFEST, PLAN, PIXELS, UNFINISHED = "manifest.json", "plan.json", "pixels", "unfinished"
CHUNK_BYTES, CHUNK_IMAGES = 2**25, 1024
"""A chunk is as large as both allow: a kill loses one per worker."""


@dataclass(frozen=True)
class Plan:
    """What a store is to hold: equal for every process that may work on it."""

    side: int
    class_names: tuple[str, ...]
    n_images: int
    catalog_sha256: str
    """Of names, labels, groups and split."""
    decode: str
    """The name of what makes pixels of a file: two preprocessings never share a store."""
    chunk_images: int
    format: str = FORMAT
    version: int = VERSION

    @property
    def n_chunks(self) -> int:
        return -(-self.n_images // self.chunk_images)

    def chunk(self, number: int) -> range:
        start = number * self.chunk_images
        return range(start, min(start + self.chunk_images, self.n_images))

    def shard(self, shard: tuple[int, int]) -> range:
        """The chunks of one shard: next to each other, as their files are in an archive."""
        index, n_shards = shard
        return range(self.n_chunks * (index - 1) // n_shards, self.n_chunks * index // n_shards)

    def content(self) -> dict[str, Any]:
        return asdict(self) | {"class_names": list(self.class_names)}


def plan_of(catalog: Catalog, side: int) -> Plan:
    split = None if catalog.is_test is None else catalog.is_test.tolist()
    return Plan(
        side=side,
        class_names=catalog.class_names,
        n_images=len(catalog),
        catalog_sha256=digest_of([catalog.names, catalog.labels.tolist(), catalog.groups, split]),
        decode=_name_of(catalog.decode),
        chunk_images=max(1, min(CHUNK_IMAGES, CHUNK_BYTES // (3 * side * side))),
    )


def _name_of(decode: Decode) -> str:
    name = f"{getattr(decode, '__module__', None)}.{getattr(decode, '__qualname__', '<object>')}"
    if "<" in name:  # lambdas and local functions, of which two may have one name
        raise ValueError(f"{name} decodes the images, but a store can only tell functions of a module apart")
    return name


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """An image that could not be decoded."""

    name: str
    sha256: str | None
    """None where the file could not even be read."""
    problem: str


@dataclass(frozen=True)
class Chunk:
    """What lies in one file of pixels."""

    kept: tuple[int, ...]
    """Row by row the image's place in the catalog."""
    sha256s: tuple[str, ...]
    bad: tuple[Skipped, ...]
    crc32: int
    """Of the file."""


def pixel_path(folder: Path, number: int) -> Path:
    return folder / PIXELS / f"{number:06d}.u8"


def record_path(folder: Path, number: int) -> Path:
    return folder / UNFINISHED / f"{number:06d}.json"


def read_chunk(folder: Path, plan: Plan, number: int) -> Chunk | None:
    """None where it has not been written, or not to the end."""
    try:
        content = json.loads(record_path(folder, number).read_bytes())
        chunk = Chunk(
            kept=tuple(content["kept"]),
            sha256s=tuple(content["sha256s"]),
            bad=tuple(Skipped(**bad) for bad in content["bad"]),
            crc32=content["crc32"],
        )
        size = pixel_path(folder, number).stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return chunk if size == len(chunk.kept) * 3 * plan.side**2 else None


def map_pixels(path: Path, rows: int, side: int) -> UInt8[np.ndarray, "rows 3 side side"]:
    """Read from the disk where it is touched."""
    if not rows:  # an empty file cannot be mapped
        return np.empty((0, 3, side, side), np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r", shape=(rows, 3, side, side)))


def crc32_of(path: Path) -> int:
    """It finds damage as sha256 does, but for one case in 2 ** 32, in a third of the time. No hash keeps out
    who changes pixels on purpose: he can write the manifest anew too."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found
