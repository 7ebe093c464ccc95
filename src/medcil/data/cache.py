"""Prepared images: decoded and resized once, read by memory map from then on.

A folder holds one file of pixels (image after image, 3 x side x side bytes each) and one JSON file that
describes them, with the sha256 of every source file. While it is written, a list of finished chunks makes it
resumable. `prepare` writes such a folder, `open_cache` reads it as an `ImageTable`.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import Int, UInt8
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from medcil.data.image_table import (
    UNREADABLE,
    ImageTable,
    MemoryFiles,
    hash_files,
    without_ids,
)
from medcil.errors import DamagedFile, InvalidInput, RunConflict, RunLocked, listed_below
from medcil.storage.atomic import write_json
from medcil.storage.overwrite_guard import refuse_within_model

FORMAT, VERSION = "medcil prepared images", 2
MANIFEST, PIXELS, PROGRESS = "images.json", "pixels.u8", "progress.jsonl"
CHUNK = 64
"""Images: what a killed process loses at most, for each of its threads."""

Watch = Callable[[int, int], None]
"""(images done, images in all)"""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Plan(_Strict):
    """What a folder is to hold: processes that continue it must agree."""

    format: str
    version: int
    dataset: str
    side: int
    preprocess: str
    chunk_images: int
    class_names: list[str]
    names: list[str]
    labels: list[int]
    groups: list[str] | None
    is_test: list[bool] | None

    @classmethod
    def of(cls, table: ImageTable, side: int) -> "_Plan":
        return cls(
            format=FORMAT,
            version=VERSION,
            dataset=table.dataset,
            side=side,
            preprocess=_name_of(table),
            chunk_images=CHUNK,
            class_names=list(table.class_names),
            names=list(table.names),
            labels=table.labels.tolist(),
            groups=None if table.groups is None else list(table.groups),
            is_test=None if table.is_test is None else table.is_test.tolist(),
        )

    @property
    def image_bytes(self) -> int:
        return 3 * self.side**2

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def chunks(self) -> list[range]:
        n, size = len(self.names), self.chunk_images
        return [range(start, min(start + size, n)) for start in range(0, n, size)]

    def is_sound(self) -> bool:
        columns = [self.labels, *(column for column in (self.groups, self.is_test) if column is not None)]
        in_range = all(0 <= label < len(self.class_names) for label in self.labels)
        is_known = (self.format, self.version) == (FORMAT, VERSION)
        return (
            is_known
            and min(self.side, self.chunk_images) > 0
            and in_range
            and {len(c) for c in columns} == {len(self.names)}
        )


class _Chunk(_Strict):
    start: int
    crc32: int
    sha256: list[str | None]
    problems: dict[str, str]
    """By the number of an image, why it cannot be decoded."""


class _Manifest(_Strict):
    plan: _Plan
    chunks: list[_Chunk]
    sha256: str
    """Of everything above."""

    @classmethod
    def of(cls, plan: _Plan, chunks: Sequence[_Chunk]) -> "_Manifest":
        unsigned = cls(plan=plan, chunks=list(chunks), sha256="")
        return unsigned.model_copy(update={"sha256": unsigned.digest()})

    def digest(self) -> str:
        content = self.model_dump_json(exclude={"sha256"})
        return hashlib.sha256(content.encode()).hexdigest()

    def is_sound(self) -> bool:
        starts = [part.start for part in self.plan.chunks()]
        lengths = [len(part) for part in self.plan.chunks()]
        return (
            self.sha256 == self.digest()
            and self.plan.is_sound()
            and [chunk.start for chunk in self.chunks] == starts
            and [len(chunk.sha256) for chunk in self.chunks] == lengths
        )

    def problems(self) -> dict[int, str]:
        return {int(i): problem for chunk in self.chunks for i, problem in chunk.problems.items()}

    def hashes(self) -> list[str | None]:
        return [sha256 for chunk in self.chunks for sha256 in chunk.sha256]


class CacheImages:
    """An image source over a file of pixels. Safe in threads; another process maps the file again."""

    def __init__(self, path: Path, side: int, n_images: int) -> None:
        self._path, self._side, self._n_images = path, side, n_images
        self._pixels = np.memmap(path, np.uint8, mode="r", shape=(n_images, 3, side, side))

    def __reduce__(self) -> tuple[type["CacheImages"], tuple[Path, int, int]]:
        return CacheImages, (self._path, self._side, self._n_images)

    @property
    def side(self) -> int:
        return self._side

    def __len__(self) -> int:
        return self._n_images

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        rows = indices.cpu().numpy()
        if len(rows) and rows.min() < 0:
            raise IndexError(f"there is no image {rows.min()}")
        return torch.from_numpy(np.asarray(self._pixels[rows]))  # indexing by an array copies


def is_cache(folder: Path) -> bool:
    """Tell whether a folder holds prepared images, damaged or not."""
    return (folder / MANIFEST).is_file()


def is_unfinished_cache(folder: Path) -> bool:
    return (folder / PROGRESS).is_file() and not is_cache(folder)


def open_cache(folder: Path, *, verify: Literal["sizes", "hashes"] = "hashes") -> ImageTable:
    """Open prepared images. `hashes` reads every pixel and finds any changed byte."""
    manifest = _read_manifest(folder)
    plan, path = manifest.plan, folder / PIXELS
    if not path.is_file() or path.stat().st_size != len(plan.names) * plan.image_bytes:
        raise DamagedFile(
            f"{path} is missing or not of its size. Delete the folder and prepare it again.",
            code="data.prepared.damaged",
        )
    if verify == "hashes":
        with ThreadPoolExecutor() as pool:
            is_whole = pool.map(lambda chunk: _crc32(path, plan, chunk) == chunk.crc32, manifest.chunks)
            if not all(is_whole):
                raise DamagedFile(
                    f"{path} was changed or damaged. Delete the folder and prepare it again.",
                    code="data.prepared.damaged",
                )
    table = ImageTable(
        files=MemoryFiles({}),
        names=tuple(plan.names),
        labels=np.array(plan.labels, np.int64),
        class_names=tuple(plan.class_names),
        groups=None if plan.groups is None else tuple(plan.groups),
        is_test=None if plan.is_test is None else np.array(plan.is_test, np.bool_),
        dataset=plan.dataset,
        sha256=tuple(manifest.hashes()),
        pixels=CacheImages(path, plan.side, len(plan.names)),
    )
    bad = manifest.problems()
    return table.select(np.array([i for i in range(len(table)) if i not in bad], np.int64)) if bad else table


def skipped_images(folder: Path) -> list[str]:
    """Name the images that were left out when a folder was prepared, with the reason."""
    manifest = _read_manifest(folder)
    return _named(manifest.plan, manifest.problems())


def _read_manifest(folder: Path) -> _Manifest:
    if not (folder / MANIFEST).is_file():
        if (folder / PROGRESS).is_file():
            raise InvalidInput(
                f"{folder} is not finished. Run the command that prepares it again.",
                code="data.prepared.unfinished",
            )
        raise InvalidInput(f"{folder} holds no prepared images.", code="data.prepared.missing")
    try:
        content = (folder / MANIFEST).read_bytes()
        manifest = _Manifest.model_validate_json(content)
    except (OSError, ValidationError, RecursionError):
        manifest = None
    if manifest is None or not manifest.is_sound():
        raise DamagedFile(
            f"{folder / MANIFEST} is damaged or of another version. Delete the folder and prepare it again.",
            code="data.prepared.damaged",
        )
    return manifest


def prepare(
    table: ImageTable,
    folder: Path,
    *,
    side: int,
    workers: int | None = None,
    skip_bad: bool = False,
    watch: Watch = lambda done, total: None,
) -> ImageTable:
    """Prepare images, continue where a killed process stopped, or verify a finished folder."""
    if not len(table) or side < 1 or (workers is not None and workers < 1):
        raise InvalidInput(
            f"Nothing to prepare: {len(table)} images, side {side}, {workers} workers. Give one or more.",
            code="data.prepare.empty",
        )
    refuse_within_model(folder)
    table = without_ids(table)
    plan = _Plan.of(table, side)
    _check_folder(folder, plan)
    if not (folder / MANIFEST).is_file():
        _check_room(folder, plan)
        with _locked(folder):
            if not (folder / MANIFEST).is_file():
                _write(table, plan, folder, workers, watch, skip_bad=skip_bad)
                return open_cache(folder, verify="sizes")
    return _verified(table, plan, folder, skip_bad=skip_bad)


def _name_of(table: ImageTable) -> str:
    if table.preprocess is None:
        return "resize"
    name = f"{table.preprocess.__module__}.{getattr(table.preprocess, '__qualname__', '<object>')}"
    if "<" in name:  # two lambdas may have one name
        raise ValueError(f"{name} preprocesses the images: only functions of a module have a name to keep")
    return name


def _check_folder(folder: Path, plan: _Plan) -> None:
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder. Give a new one.", code="data.prepare.not_a_folder")
    if (folder / MANIFEST).is_file():
        before = _read_manifest(folder).plan.digest
    elif (folder / PROGRESS).is_file():
        lines = (folder / PROGRESS).read_bytes().splitlines()
        before = lines[0].decode("ascii", "replace").strip('"') if lines else plan.digest
    elif any(folder.glob("[!.]*")):
        raise RunConflict(f"{folder} holds something else. Give a new folder.", code="data.prepare.conflict")
    else:
        return
    if before != plan.digest:
        raise RunConflict(
            f"{folder} holds other images, or these in another size or preprocessing. Give another folder.",
            code="data.prepare.mismatch",
        )


def _check_room(folder: Path, plan: _Plan) -> None:
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk, path = shutil.disk_usage(place), folder / PIXELS
    needed = len(plan.names) * plan.image_bytes - (path.stat().st_blocks * 512 if path.exists() else 0)
    if not disk.total or not os.access(place, os.W_OK):  # a system's own tree, such as /proc, has no size
        raise InvalidInput(
            f"{folder} cannot be created: {place} is not writable. Give another folder.",
            code="data.prepare.unwritable",
        )
    if needed > disk.free:
        raise InvalidInput(
            f"{folder} has no room: {needed / 1e9:.1f} GB are needed, {disk.free / 1e9:.1f} GB free. Give "
            "another folder or side.",
            code="data.prepare.no_room",
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunLocked(
            f"Another process is preparing {folder}. Wait for it, or end it.", code="data.prepare.locked"
        ) from None
    except OSError as error:
        raise InvalidInput(
            f"{folder} cannot be written: {error.strerror or error}. Fix this and run the command again: "
            "what is prepared so far is kept.",
            code="data.prepare.unwritable",
        ) from None


def _write(
    table: ImageTable, plan: _Plan, folder: Path, workers: int | None, watch: Watch, *, skip_bad: bool
) -> None:
    """Decode what no earlier process has, chunk by chunk in threads, and then write the manifest."""
    progress, path = folder / PROGRESS, folder / PIXELS
    done = _finished_chunks(progress, plan)
    with progress.open("w") as lines:  # without a last line that was cut off
        lines.write("\n".join([json.dumps(plan.digest), *(c.model_dump_json() for c in done.values()), ""]))
    threads, stop = torch.get_num_threads(), threading.Event()
    # One more than there are cores, which computes while another waits for the disk.
    pool = ThreadPoolExecutor(
        workers or (os.cpu_count() or 1) + 1, initializer=torch.set_num_threads, initargs=(1,)
    )
    n_done, chunks = 0, dict[int, _Chunk]()
    with path.open("r+b" if path.exists() else "w+b") as pixels, progress.open("a") as lines, pool:
        pixels.truncate(len(plan.names) * plan.image_bytes)

        def work(part: range) -> _Chunk | None:
            before = done.get(part.start)
            if before is not None and _is_unchanged(table, plan, path, before):
                return before
            return _decode_chunk(table, plan, part, pixels.fileno(), stop)

        try:
            for future in [pool.submit(work, part) for part in plan.chunks()]:
                chunk = future.result()
                assert chunk is not None  # only stopped ones are
                chunks[chunk.start] = chunk
                if chunk is not done.get(chunk.start):
                    os.fsync(pixels.fileno())
                    lines.write(chunk.model_dump_json() + "\n")
                    lines.flush()
                n_done += len(chunk.sha256)
                watch(n_done, len(plan.names))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
    manifest = _Manifest.of(plan, [chunks[part.start] for part in plan.chunks()])
    _refuse_bad(manifest, skip_bad=skip_bad)
    write_json(folder / MANIFEST, manifest.model_dump())
    progress.unlink()


def _finished_chunks(progress: Path, plan: _Plan) -> dict[int, _Chunk]:
    chunks = dict[int, _Chunk]()
    lengths = {part.start: len(part) for part in plan.chunks()}
    for line in progress.read_bytes().splitlines()[1:] if progress.exists() else ():
        try:
            chunk = _Chunk.model_validate_json(line)
        except ValidationError:  # cut off by the end of its process
            continue
        if lengths.get(chunk.start) == len(chunk.sha256):
            chunks[chunk.start] = chunk
    return chunks


def _is_unchanged(table: ImageTable, plan: _Plan, path: Path, chunk: _Chunk) -> bool:
    part = np.arange(chunk.start, chunk.start + len(chunk.sha256))
    is_read = None not in chunk.sha256
    return is_read and _crc32(path, plan, chunk) == chunk.crc32 and _hash(table, part) == chunk.sha256


def _hash(table: ImageTable, part: Int[np.ndarray, "n"]) -> list[str | None]:
    hashes: list[str | None] = []
    for index in part.tolist():
        try:
            hashes.append(hashlib.sha256(table.read(index)).hexdigest())
        except UNREADABLE:
            hashes.append(None)
    return hashes


def _decode_chunk(
    table: ImageTable, plan: _Plan, part: range, pixels: int, stop: threading.Event
) -> _Chunk | None:
    rows = np.zeros((len(part), 3, plan.side, plan.side), np.uint8)
    hashes, problems = list[str | None](), dict[str, str]()
    for row, index in enumerate(part):
        if stop.is_set():
            return None
        hashes.append(None)
        try:
            content = table.read(index)
            hashes[-1] = hashlib.sha256(content).hexdigest()
            decoded = table.decode_content(content, plan.side, table.names[index]).numpy()
        except UNREADABLE as error:
            # Pillow's messages give the address of an object, which differs between processes.
            problems[str(index)] = re.sub(
                r" at 0x[0-9a-fA-F]+", "", (str(error) or repr(error)).splitlines()[0]
            )
            continue
        if decoded.shape != rows.shape[1:] or decoded.dtype != np.uint8:
            raise ValueError(f"{table.names[index]} was decoded to {decoded.dtype} {decoded.shape}")
        rows[row] = decoded
    content, offset = rows.tobytes(), part.start * plan.image_bytes
    crc32, written = zlib.crc32(content), 0
    while written < len(content):
        written += os.pwrite(pixels, memoryview(content)[written:], offset + written)
    return _Chunk(start=part.start, crc32=crc32, sha256=hashes, problems=problems)


def _crc32(path: Path, plan: _Plan, chunk: _Chunk) -> int | None:
    """A checksum finds damage as sha256 does, but for one case in 2 ** 32, in a third of the time."""
    try:
        with path.open("rb") as file:
            file.seek(chunk.start * plan.image_bytes)
            return zlib.crc32(file.read(len(chunk.sha256) * plan.image_bytes))
    except OSError:
        return None


def _refuse_bad(manifest: _Manifest, *, skip_bad: bool) -> None:
    bad, hashes = manifest.problems(), manifest.hashes()
    n_images = len(hashes)
    unread = {i: problem for i, problem in bad.items() if hashes[i] is None}
    if unread:  # never left out: a disk that is away for an hour would leave gaps
        raise InvalidInput(
            listed_below(
                f"{len(unread)} of {n_images} files cannot be read. Make them readable and run again.",
                _named(manifest.plan, unread),
            ),
            code="data.prepare.unreadable",
        )
    if bad and (not skip_bad or len(bad) == n_images):
        raise InvalidInput(
            listed_below(
                f"{len(bad)} of {n_images} files cannot be decoded. Replace them, or give --skip-bad.",
                _named(manifest.plan, bad),
            ),
            code="data.prepare.damaged",
        )


def _named(plan: _Plan, problems: dict[int, str]) -> list[str]:
    named = [(plan.names[i], problem) for i, problem in sorted(problems.items())]
    return [problem if name in problem else f"{name}: {problem}" for name, problem in named]


def _verified(table: ImageTable, plan: _Plan, folder: Path, *, skip_bad: bool) -> ImageTable:
    prepared, manifest = open_cache(folder, verify="hashes"), _read_manifest(folder)
    _refuse_bad(manifest, skip_bad=skip_bad)
    changed = [
        name
        for name, before, now in zip(plan.names, manifest.hashes(), hash_files(table), strict=True)
        if before != now
    ]
    if changed:
        first = f"{folder} was prepared from other files: {len(changed)} have changed. Give another folder."
        raise RunConflict(listed_below(first, changed), code="data.prepare.changed")
    return prepared
