"""Prepared images: decoded and resized once, read by memory map from then on.

A folder holds one file of pixels (image after image, 3 x side x side bytes each) and one JSON file that
describes them, with the sha256 of every source file. While it is written, a list of finished chunks makes it
resumable. `prepare` writes such a folder, `open_cache` reads it as an `ImageTable`.
"""

import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int, UInt8
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator
from torch import Tensor

from medcil.data.image_table import UNREADABLE, ImageTable, MemoryFiles, hash_files, without_ids
from medcil.errors import DamagedFile, InvalidInput, RunConflict, listed_below
from medcil.storage.atomic import locked_folder, write_bytes, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_model

MANIFEST, PIXELS, PROGRESS = "images.json", "pixels.u8", "progress.jsonl"
CHUNK = 64
"""Images: what a killed process loses at most, for each of its threads."""

Watch = Callable[[int, int], None]
"""(images done, images in all)"""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Chunk(_Strict):
    start: int
    crc32: int
    """Of the pixels. It finds damage as sha256 does, but for one case in 2 ** 32, in a third of the time."""
    sha256: list[str | None]
    """Of each file; None where it cannot be read."""
    problems: dict[str, str]
    """By the number of an image, why it cannot be decoded."""


class _Store(_Strict):
    """What a folder holds, or is to hold as long as it has no chunks: all processes must agree on that."""

    format: Literal["medcil prepared images"] = "medcil prepared images"
    version: Literal[3] = 3
    dataset: str
    side: PositiveInt
    preprocess: str
    chunk_images: PositiveInt
    class_names: list[str]
    names: list[str]
    labels: list[int]
    groups: list[str] | None
    is_test: list[bool] | None
    is_validation: list[bool] | None = None
    chunks: list[_Chunk] = []
    sha256: str = ""
    """Of everything above."""

    @model_validator(mode="after")
    def _is_sound(self) -> "_Store":
        columns: list[Sized | None] = [self.names, self.labels, self.groups, self.is_test]
        columns.append(self.is_validation)
        if len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("the columns differ in length")
        if not all(0 <= label < len(self.class_names) for label in self.labels):
            raise ValueError("a label is of no class")
        parts = [range(chunk.start, chunk.start + len(chunk.sha256)) for chunk in self.chunks]
        if parts and parts != self.parts:
            raise ValueError("the chunks are not those of the images")
        return self

    @property
    def digest(self) -> str:
        absent = {"is_validation"} if self.is_validation is None else set()  # as in earlier stores
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"} | absent).encode()).hexdigest()

    @property
    def image_bytes(self) -> int:
        return 3 * self.side**2

    @property
    def n_bytes(self) -> int:
        return len(self.names) * self.image_bytes

    @property
    def parts(self) -> list[range]:
        """Return the images of each chunk."""
        starts = range(0, len(self.names), self.chunk_images)
        return [range(start, min(start + self.chunk_images, len(self.names))) for start in starts]

    @property
    def sources(self) -> list[str | None]:
        return [sha256 for chunk in self.chunks for sha256 in chunk.sha256]

    @property
    def problems(self) -> dict[int, str]:
        return {int(i): problem for chunk in self.chunks for i, problem in sorted(chunk.problems.items())}

    def named(self, problems: dict[int, str]) -> list[str]:
        lines = [(self.names[i], problem) for i, problem in sorted(problems.items())]
        return [problem if name in problem else f"{name}: {problem}" for name, problem in lines]


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
    return _open(_read_store(folder), folder / PIXELS, verify)


def skipped_images(folder: Path) -> list[str]:
    """Name the images that were left out when a folder was prepared, with the reason."""
    store = _read_store(folder)
    return store.named(store.problems)


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
            f"Nothing to prepare: {len(table)} images, side {side}, {workers} workers. Give some.",
            code="data.prepare.empty",
        )
    refuse_within_model(folder)
    table = without_ids(table)
    plan = _plan(table, side)
    _check_folder(folder, plan)
    if not is_cache(folder):
        check_writable(folder)
        _check_room(folder, plan)
        with locked_folder(folder), writing(folder):
            if not is_cache(folder):
                store = _write(table, plan, folder, workers, watch, skip_bad=skip_bad)
                return _open(store, folder / PIXELS, "sizes")
    store = _read_store(folder)
    prepared = _open(store, folder / PIXELS, "hashes")
    _refuse_bad(store, skip_bad=skip_bad)
    sources = zip(store.names, store.sources, hash_files(table), strict=True)
    changed = [name for name, before, now in sources if before != now]
    if changed:
        first = f"{folder} was prepared from other files: {len(changed)} have changed. Give another folder."
        raise RunConflict(listed_below(first, changed), code="data.prepare.changed")
    return prepared


def _open(store: _Store, path: Path, verify: Literal["sizes", "hashes"]) -> ImageTable:
    if not path.is_file() or path.stat().st_size != store.n_bytes:
        raise _damaged(path, "is missing or not of its size")
    if verify == "hashes":
        with ThreadPoolExecutor() as pool:
            is_whole = pool.map(lambda chunk: _crc32(path, store, chunk) == chunk.crc32, store.chunks)
            if not all(is_whole):
                raise _damaged(path, "was changed or damaged")
    table = ImageTable(
        files=MemoryFiles({}),
        names=tuple(store.names),
        labels=np.array(store.labels, np.int64),
        class_names=tuple(store.class_names),
        groups=None if store.groups is None else tuple(store.groups),
        is_test=None if store.is_test is None else np.array(store.is_test, np.bool_),
        is_validation=None if store.is_validation is None else np.array(store.is_validation, np.bool_),
        dataset=store.dataset,
        sha256=tuple(store.sources),
        pixels=CacheImages(path, store.side, len(store.names)),
    )
    bad = store.problems
    return table.select(np.array([i for i in range(len(table)) if i not in bad], np.int64)) if bad else table


def _read_store(folder: Path) -> _Store:
    if is_unfinished_cache(folder):
        raise InvalidInput(
            f"{folder} is not finished. Run the command that prepares it again.",
            code="data.prepared.unfinished",
        )
    if not is_cache(folder):
        raise InvalidInput(f"{folder} holds no prepared images.", code="data.prepared.missing")
    try:
        store = _Store.model_validate_json((folder / MANIFEST).read_bytes())
        if store.chunks and store.sha256 == store.digest:
            return store
    except (OSError, ValidationError, RecursionError):
        pass
    raise _damaged(folder / MANIFEST, "is damaged or of another version")


def _damaged(path: Path, problem: str) -> DamagedFile:
    return DamagedFile(
        f"{path} {problem}. Delete the folder and prepare it again.", code="data.prepared.damaged"
    )


def _plan(table: ImageTable, side: int) -> _Store:
    preprocess = "resize"
    if table.preprocess is not None:
        preprocess = f"{table.preprocess.__module__}.{getattr(table.preprocess, '__qualname__', '<object>')}"
    if "<" in preprocess:  # two lambdas may have one name
        raise ValueError(f"{preprocess} preprocesses the images: only functions of a module are identifiable")
    return _Store(
        dataset=table.dataset,
        side=side,
        preprocess=preprocess,
        chunk_images=CHUNK,
        class_names=list(table.class_names),
        names=list(table.names),
        labels=table.labels.tolist(),
        groups=None if table.groups is None else list(table.groups),
        is_test=None if table.is_test is None else table.is_test.tolist(),
        is_validation=None if table.is_validation is None else table.is_validation.tolist(),
    )


def _check_folder(folder: Path, plan: _Store) -> None:
    if is_cache(folder):
        before = _read_store(folder).model_copy(update={"chunks": []}).digest
    elif is_unfinished_cache(folder):
        lines = (folder / PROGRESS).read_text("ascii", "replace").splitlines()
        before = lines[0] if lines else plan.digest
    elif any(folder.glob("[!.]*")):
        raise RunConflict(f"{folder} holds something else. Give a new folder.", code="data.prepare.conflict")
    else:
        return
    if before != plan.digest:
        raise RunConflict(
            f"{folder} holds other images, or these in another size or preprocessing. Give another folder.",
            code="data.prepare.mismatch",
        )


def _check_room(folder: Path, plan: _Store) -> None:
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk, path = shutil.disk_usage(place), folder / PIXELS
    needed = plan.n_bytes - (path.stat().st_blocks * 512 if path.exists() else 0)
    if needed > disk.free:
        raise InvalidInput(
            f"{folder} has no room: {needed / 1e9:.1f} GB are needed, {disk.free / 1e9:.1f} GB free."
            " Give another folder or side.",
            code="data.prepare.no_room",
        )


def _write(
    table: ImageTable, plan: _Store, folder: Path, workers: int | None, watch: Watch, *, skip_bad: bool
) -> _Store:
    """Decode what no earlier process has, chunk by chunk in threads, and then write the manifest.

    A chunk that is listed is checked before it is used, so the order in which files reach the disk is free.
    """
    progress, path = folder / PROGRESS, folder / PIXELS
    done = _finished_chunks(progress, plan)
    threads, chunks = torch.get_num_threads(), list[_Chunk]()
    # One more than there are cores, which computes while another waits for the disk.
    pool = ThreadPoolExecutor(
        workers or (os.cpu_count() or 1) + 1, initializer=torch.set_num_threads, initargs=(1,)
    )
    with path.open("r+b" if path.exists() else "w+b") as pixels, progress.open("w") as lines, pool:
        pixels.truncate(plan.n_bytes)
        lines.write("\n".join([plan.digest, *(chunk.model_dump_json() for chunk in done.values()), ""]))
        lines.flush()

        def work(part: range) -> _Chunk:
            before = done.get(part.start)
            if before is not None and _is_unchanged(table, path, plan, before):
                return before
            return _decode(table, plan, part, pixels.fileno())

        try:
            for future in [pool.submit(work, part) for part in plan.parts]:
                chunk = future.result()
                chunks.append(chunk)
                if chunk is not done.get(chunk.start):
                    lines.write(chunk.model_dump_json() + "\n")
                    lines.flush()
                watch(chunk.start + len(chunk.sha256), len(plan.names))
            os.fsync(pixels.fileno())
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
    store = plan.model_copy(update={"chunks": chunks})
    _refuse_bad(store, skip_bad=skip_bad)
    store = store.model_copy(update={"sha256": store.digest})
    write_bytes(folder / MANIFEST, store.model_dump_json().encode())
    progress.unlink()
    return store


def _finished_chunks(progress: Path, plan: _Store) -> dict[int, _Chunk]:
    chunks = dict[int, _Chunk]()
    lengths = {part.start: len(part) for part in plan.parts}
    for line in progress.read_bytes().splitlines()[1:] if progress.exists() else ():
        try:
            chunk = _Chunk.model_validate_json(line)
        except ValidationError:  # cut off by the end of its process
            continue
        if lengths.get(chunk.start) == len(chunk.sha256):
            chunks[chunk.start] = chunk
    return chunks


def _is_unchanged(table: ImageTable, path: Path, plan: _Store, chunk: _Chunk) -> bool:
    if None in chunk.sha256 or _crc32(path, plan, chunk) != chunk.crc32:
        return False
    part = np.arange(chunk.start, chunk.start + len(chunk.sha256))
    return list(hash_files(table.select(part))) == chunk.sha256


def _decode(table: ImageTable, plan: _Store, part: range, pixels: int) -> _Chunk:
    rows = np.zeros((len(part), 3, plan.side, plan.side), np.uint8)
    hashes, problems = list[str | None](), dict[str, str]()
    for row, index in enumerate(part):
        hashes.append(None)
        try:
            content = table.read(index)
            hashes[-1] = hashlib.sha256(content).hexdigest()
            rows[row] = table.decode_content(content, plan.side, table.names[index]).numpy()
        except UNREADABLE as error:
            # Pillow's messages give the address of an object, which differs between processes.
            reason = (str(error) or repr(error)).splitlines()[0]
            problems[str(index)] = re.sub(r" at 0x[0-9a-fA-F]+", "", reason)
    content, offset = rows.tobytes(), part.start * plan.image_bytes
    written = 0
    while written < len(content):
        written += os.pwrite(pixels, memoryview(content)[written:], offset + written)
    return _Chunk(start=part.start, crc32=zlib.crc32(content), sha256=hashes, problems=problems)


def _crc32(path: Path, store: _Store, chunk: _Chunk) -> int | None:
    try:
        with path.open("rb") as file:
            file.seek(chunk.start * store.image_bytes)
            return zlib.crc32(file.read(len(chunk.sha256) * store.image_bytes))
    except OSError:
        return None


def _refuse_bad(store: _Store, *, skip_bad: bool) -> None:
    n_images, bad = len(store.names), store.problems
    unread = {i: problem for i, problem in bad.items() if store.sources[i] is None}
    if unread:  # never left out: a disk that is away for an hour would leave gaps
        first = f"{len(unread)} of {n_images} files cannot be read. Make them readable and run again."
        raise InvalidInput(listed_below(first, store.named(unread)), code="data.prepare.unreadable")
    if bad and (not skip_bad or len(bad) == n_images):
        first = f"{len(bad)} of {n_images} files cannot be decoded. Replace them, or give --skip-bad."
        raise InvalidInput(listed_below(first, store.named(bad)), code="data.prepare.damaged")
