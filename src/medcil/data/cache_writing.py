"""How a prepared store comes about: chunk by chunk, by threads, processes or machines, stopped at any moment.

A chunk is a file of pixels and a record of what lies in it; the record is written last and makes it count.
docs/reference/prepared-store.md describes the files.
"""

import hashlib
import json
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import UInt8

from medcil.data.cache_plan import (
    CHUNK_IMAGES,
    PIXELS,
    PLAN,
    UNFINISHED,
    Chunk,
    Plan,
    Skipped,
    crc32_of,
    map_pixels,
    pixel_path,
    read_chunk,
    record_path,
)
from medcil.data.catalog import Catalog
from medcil.errors import DamagedFile, InvalidInput, RunLocked

TEMPORARY = ".tmp"
UNREADABLE = (InvalidInput, DamagedFile, OSError)
"""What reading or decoding a bad source raises."""
OneImage = UInt8[np.ndarray, "3 side side"]
Watch = Callable[[int, int], None]
"""Is told how many images are done, and of how many."""


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
    if before is not None and crc32_of(path) == before.crc32:
        rows = map_pixels(path, len(before.kept), plan.side)
        earlier = dict(zip(before.kept, zip(before.sha256s, rows, strict=True), strict=True))
    if all(i in earlier and hash_source(catalog, i) == earlier[i][0] for i in plan.chunk(number)):
        for _ in plan.chunk(number):
            advance(number)
        return
    kept: dict[int, str] = {}
    bad: list[Skipped] = []
    crc32 = 0
    with replacing(path) as file:
        for index in plan.chunk(number):
            advance(number)
            image = _decode(catalog, index, plan.side, earlier.get(index))
            if isinstance(image, Skipped):
                bad.append(image)
                continue
            kept[index], pixels = image
            file.write(pixels.data)
            crc32 = zlib.crc32(pixels.data, crc32)
    chunk = Chunk(tuple(kept), tuple(kept.values()), tuple(bad), crc32)
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


def hash_sources(catalog: Catalog) -> list[str | None]:
    """Sha256 of every file of a catalog, which reads each of them once; None where one cannot be read."""

    def hash_part(start: int) -> list[str | None]:
        part = range(start, min(start + CHUNK_IMAGES, len(catalog)))
        return [hash_source(catalog, index) for index in part]

    with ThreadPoolExecutor() as pool:
        parts = pool.map(hash_part, range(0, len(catalog), CHUNK_IMAGES))
        return [sha256 for part in parts for sha256 in part]


def hash_source(catalog: Catalog, index: int) -> str | None:
    """None where it cannot be read."""
    try:
        return hashlib.sha256(catalog.read(index)).hexdigest()
    except UNREADABLE:
        return None
