"""How a prepared store comes about: chunk by chunk, by threads, processes or machines, stopped at any moment.

A chunk is a file of pixels and a record of what lies in it; the record is written last and makes it count.
docs/prepared-store.md describes the files.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import UInt8

from medcil.data.catalog import Catalog
from medcil.errors import DamagedFile, InvalidInput, RunLocked

FORMAT, VERSION = "medcil prepared store", 1
MANIFEST, PLAN, PIXELS, UNFINISHED = "manifest.json", "plan.json", "pixels", "unfinished"
TEMPORARY = ".tmp"
CHUNK_BYTES, CHUNK_IMAGES = 2**25, 1024
"""A chunk is as large as both allow: a kill loses one per worker."""
UNREADABLE = (InvalidInput, DamagedFile, OSError)
"""What reading or decoding a bad source raises."""
OneImage = UInt8[np.ndarray, "3 side side"]
Watch = Callable[[int, int], None]
"""Is told how many images are done, and of how many."""


@dataclass(frozen=True)
class Plan:
    """What a store is to hold: equal for every process that may work on it."""

    side: int
    class_names: tuple[str, ...]
    n_images: int
    catalog_sha256: str
    """Of names, labels, groups and split."""
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
        chunk_images=max(1, min(CHUNK_IMAGES, CHUNK_BYTES // (3 * side * side))),
    )


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
    pixels: str
    """The sha256 of the file."""


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
            pixels=content["pixels"],
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


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is whole and on the disk. One process at a time writes one path."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """For the moments in which a store is begun or finished; whoever comes second waits."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=60):
            yield
    except Timeout:
        raise RunLocked(f"Another process is finishing {folder} and does not end: look after it.") from None
    except OSError as error:
        raise _unwritable(folder, error) from None


def begin(folder: Path, plan: Plan, shard: tuple[int, int]) -> FileLock:
    """Claims a new folder for a plan, or joins those who follow the same; the lock keeps a shard to one."""
    if not (folder / PLAN).exists():
        write_json(folder / PLAN, plan.content())
    (folder / UNFINISHED).mkdir(exist_ok=True)
    (folder / PIXELS).mkdir(exist_ok=True)
    own = folder / UNFINISHED / f"{shard[0]}-of-{shard[1]}.lock"
    # Another number of shards cuts otherwise, and two processes could write the same chunk.
    if any(path == own or not path.name.endswith(f"-of-{shard[1]}.lock") for path in held_locks(folder)):
        raise RunLocked(f"Another process is preparing these images in {folder}. Wait for it, or end it.")
    lock = FileLock(own, timeout=0)
    lock.acquire()
    return lock


def held_locks(folder: Path) -> list[Path]:
    """Of the shards somebody is working on."""
    held = []
    for path in sorted((folder / UNFINISHED).glob("*.lock")):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            held.append(path)
    return held


def _unwritable(folder: Path, error: OSError) -> InvalidInput:
    return InvalidInput(
        f"{folder} cannot be written to ({error.strerror or error}). Mend that and run the same again: what "
        "is prepared so far is kept."
    )


def pack(
    catalog: Catalog, plan: Plan, folder: Path, chunks: range, *, workers: int | None, watch: Watch
) -> None:
    """Writes what is missing of these chunks. Threads: decoding, resizing and hashing leave Python's lock."""
    total = sum(len(plan.chunk(number)) for number in chunks)
    done = dict.fromkeys(chunks, 0)
    stop = threading.Event()

    def advance(number: int) -> None:
        if stop.is_set():
            raise CancelledError
        done[number] += 1  # by one thread alone

    threads = torch.get_num_threads()
    # One more than there are cores, which computes while another waits for the disk.
    count = workers or (os.cpu_count() or 1) + 1
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            pending = {pool.submit(_pack_chunk, catalog, plan, folder, number, advance) for number in chunks}
            while pending:
                ended, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                watch(sum(done.values()), total)
        except OSError as error:
            raise _unwritable(folder, error) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def _pack_chunk(
    catalog: Catalog, plan: Plan, folder: Path, number: int, advance: Callable[[int], None]
) -> None:
    path, before = pixel_path(folder, number), read_chunk(folder, plan, number)
    earlier: dict[int, tuple[str, OneImage]] = {}
    if before is not None and hash_file(path) == before.pixels:
        rows = map_pixels(path, len(before.kept), plan.side)
        earlier = dict(zip(before.kept, zip(before.sha256s, rows, strict=True), strict=True))
    if all(i in earlier and hash_source(catalog, i) == earlier[i][0] for i in plan.chunk(number)):
        for _ in plan.chunk(number):
            advance(number)
        return
    kept: dict[int, str] = {}
    bad: list[Skipped] = []
    digest = hashlib.sha256()
    with replacing(path) as file:
        for index in plan.chunk(number):
            advance(number)
            image = _decode(catalog, index, plan.side, earlier.get(index))
            if isinstance(image, Skipped):
                bad.append(image)
                continue
            kept[index], pixels = image
            file.write(pixels.data)
            digest.update(pixels.data)
    chunk = Chunk(tuple(kept), tuple(kept.values()), tuple(bad), digest.hexdigest())
    write_json(record_path(folder, number), asdict(chunk))


def _decode(
    catalog: Catalog, index: int, side: int, earlier: tuple[str, OneImage] | None
) -> tuple[str, OneImage] | Skipped:
    """The sha256 of the file and the pixels, from one reading; unchanged files are not decoded twice."""
    sha256 = None
    try:
        content = catalog.read(index)
        sha256 = hashlib.sha256(content).hexdigest()
        if earlier is not None and earlier[0] == sha256:
            return earlier
        pixels = catalog.decode(content, side, catalog.names[index]).contiguous().numpy()
    except UNREADABLE as error:
        # Pillow's messages give the address of an object, which is another in every process.
        problem = re.sub(r" at 0x[0-9a-fA-F]+", "", (str(error) or repr(error)).splitlines()[0])
        return Skipped(catalog.names[index], sha256, problem)
    if pixels.shape != (3, side, side) or pixels.dtype != np.uint8:
        raise ValueError(f"{catalog.names[index]} was decoded to {pixels.dtype} {pixels.shape}")
    return sha256, pixels


def hash_source(catalog: Catalog, index: int) -> str | None:
    """None where it cannot be read."""
    try:
        return hashlib.sha256(catalog.read(index)).hexdigest()
    except UNREADABLE:
        return None
