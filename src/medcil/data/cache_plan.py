"""What a prepared store is to hold, chunk by chunk, and in which file.

docs/reference/prepared-store.md describes the files.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from medcil.data.catalog import OWN, Catalog, Decode, numbered_groups

FORMAT, VERSION = "medcil prepared store", 2
MANIFEST, PLAN, PIXELS, UNFINISHED = "manifest.json", "plan.json", "pixels", "unfinished"
CHUNK_BYTES, CHUNK_IMAGES = 2**25, 1024
"""A chunk is as large as both allow: a kill loses one per worker."""
LISTS: dict[str, type] = dict.fromkeys(("class_names", "names", "sha256s", "groups"), str)
LISTS |= {"labels": int, "is_test": bool, "chunks": dict, "skipped": dict}
"""The lists of a manifest, and of what they are."""
SKIPPED_KEYS = {"name", "sha256", "problem"}


@dataclass(frozen=True)
class Plan:
    """What a store is to hold: equal for every process that may work on it."""

    dataset: str
    """The name of the dataset that the images were read as."""
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


def without_ids(catalog: Catalog) -> Catalog:
    """What may be stored. Groups of published datasets are public, and splits are drawn by their names."""
    if catalog.groups is None or catalog.dataset != OWN:
        return catalog
    return replace(catalog, groups=numbered_groups(catalog.groups, catalog.names))


def plan_of(catalog: Catalog, side: int) -> Plan:
    """Of a catalog without patients' ids."""
    split = None if catalog.is_test is None else catalog.is_test.tolist()
    return Plan(
        dataset=catalog.dataset,
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


def manifest_problem(content: Mapping[str, Any]) -> str | None:
    """Where the manifest of a finished store contradicts itself, whoever wrote it."""
    optional = [key for key in ("groups", "is_test") if content.get(key, "") is None]
    if not all(_is_list_of(content.get(key), kind) for key, kind in LISTS.items() if key not in optional):
        return "a list in it is missing, or one of other things"
    chunks, skipped = content["chunks"], content["skipped"]
    numbers = [content.get("side"), content.get("n_images")]
    numbers += [chunk.get(key) for chunk in chunks for key in ("images", "crc32")]
    texts = [content.get("dataset"), *(text for image in skipped for text in image.values())]
    if any(type(number) is not int or number < 0 for number in numbers) or not content["side"]:
        return "a number in it is missing, or none"
    if set(map(type, texts)) != {str} or any(set(image) != SKIPPED_KEYS for image in skipped):
        return "a text in it is missing, or none"
    n_images = sum(chunk["images"] for chunk in chunks)
    columns = [key for key in ("names", "labels", "sha256s", "groups", "is_test") if key not in optional]
    if {len(content[key]) for key in columns} != {n_images} or not n_images:
        return "it does not say of every image what it is"
    if n_images + len(skipped) != content["n_images"]:
        return "it has more or fewer images than it says"
    if not 0 <= min(content["labels"]) <= max(content["labels"]) < len(content["class_names"]):
        return "it has labels of no class"
    return None


def _is_list_of(items: object, kind: type) -> bool:
    return isinstance(items, list) and all(type(item) is kind for item in items)


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """An image that could not be decoded."""

    name: str
    sha256: str | None
    """None where the file could not even be read, which no finished store has."""
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
