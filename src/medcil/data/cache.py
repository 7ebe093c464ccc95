"""A prepared store: every image decoded and resized once, read by memory map from then on.

`prepare` makes one from a catalog, `open_store` opens it. It remembers the sha256 of every source file, so
that no change goes unnoticed. docs/reference/prepared-store.md describes the files and what is promised.
"""

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int

from medcil.data import cache_plan
from medcil.data import cache_writing as writing
from medcil.data.cache_images import StoreImages
from medcil.data.cache_plan import MANIFEST, PIXELS, PLAN, Chunk, Plan, Skipped
from medcil.data.cache_writing import Watch
from medcil.data.catalog import Catalog
from medcil.data.samples import Samples
from medcil.data.wording import listed_below
from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.storage.overwrite_guard import refuse_within_model

REMEDY = "delete the folder and prepare it again."


@dataclass(frozen=True, eq=False)
class Store:
    """What a catalog says of its images, and their pixels; without the images that were skipped."""

    folder: Path
    dataset: str
    """What the images were read as when they were prepared."""
    names: tuple[str, ...]
    labels: Int[np.ndarray, "n"]
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None
    is_test: Bool[np.ndarray, "n"] | None
    sha256s: tuple[str, ...]
    """Of the source files."""
    skipped: tuple[Skipped, ...]
    images: StoreImages

    def __len__(self) -> int:
        return len(self.names)

    def samples(self, split: Literal["train", "test", "all"] = "all") -> Samples:
        every = Samples(self.images, torch.from_numpy(self.labels))
        if split == "all":
            return every
        if self.is_test is None:
            raise InvalidInput(f"{self.folder} has no split of its own: split its images, or take all.")
        return every.select(torch.from_numpy(np.flatnonzero(self.is_test == (split == "test"))))


def is_store(folder: Path) -> bool:
    """Whether a finished store lies there; damaged or not."""
    return (folder / MANIFEST).is_file() and (folder / PIXELS).is_dir()


def open_store(folder: Path, *, verify: Literal["sizes", "hashes"] = "hashes") -> Store:
    """`hashes` reads every pixel and finds any changed byte; `sizes` only looks at the files."""
    content = _read_manifest(folder)
    side, chunks = content["side"], content["chunks"]
    paths = [cache_plan.pixel_path(folder, number) for number in range(len(chunks))]
    for path, chunk in zip(paths, chunks, strict=True):
        if not path.is_file() or path.stat().st_size != chunk["images"] * 3 * side**2:
            raise DamagedFile(f"{path} is missing, or not of the size it should be: {REMEDY}")
    if verify == "hashes":
        with ThreadPoolExecutor() as pool:
            for path, chunk, found in zip(paths, chunks, pool.map(cache_plan.crc32_of, paths), strict=True):
                if found != chunk["crc32"]:
                    raise DamagedFile(f"{path} was changed or damaged: {REMEDY}")
    return Store(
        folder=folder,
        dataset=content["dataset"],
        names=tuple(content["names"]),
        labels=np.array(content["labels"], np.int64),
        class_names=tuple(content["class_names"]),
        groups=None if content["groups"] is None else tuple(content["groups"]),
        is_test=None if content["is_test"] is None else np.array(content["is_test"], np.bool_),
        sha256s=tuple(content["sha256s"]),
        skipped=tuple(Skipped(**skipped) for skipped in content["skipped"]),
        images=StoreImages(folder, side, tuple(chunk["images"] for chunk in chunks)),
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not is_store(folder):
        if (folder / PLAN).is_file():
            raise InvalidInput(f"{folder} is not finished: run the command that prepares it once more.")
        raise InvalidInput(f"{folder} holds no prepared store: prepare one there, or give another folder.")
    manifest = _read_json(folder / MANIFEST)
    content: Any = manifest.get("content")
    is_whole = isinstance(content, dict) and cache_plan.digest_of(content) == manifest.get("sha256")
    if not is_whole or content.get("format") != cache_plan.FORMAT:
        raise DamagedFile(
            f"{folder / MANIFEST} is not, or no longer, that of a prepared store: if it was one, {REMEDY}"
        )
    _check_version(folder, content)
    problem = cache_plan.manifest_problem(content)
    if problem is not None:
        raise DamagedFile(f"{folder / MANIFEST} contradicts itself ({problem}): {REMEDY}")
    return dict(content)


def _check_version(folder: Path, content: dict[str, Any]) -> None:
    if content.get("version") != cache_plan.VERSION:
        versions = f"of version {content.get('version')}, not {cache_plan.VERSION}"
        raise InvalidInput(f"{folder} is a store {versions}: prepare the images anew, into another folder.")
    if "dataset" not in content:
        raise InvalidInput(
            f"{folder} does not say of which dataset its images are: prepare them anew, into another folder."
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where it is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def prepare(
    catalog: Catalog,
    folder: Path,
    *,
    side: int,
    shard: tuple[int, int] = (1, 1),
    workers: int | None = None,
    skip_bad: bool = False,
    watch: Watch = lambda done, total: None,
) -> Store | None:
    """Makes a store, goes on with one, or verifies a finished one; None while shards of others are missing.

    `shard` (i, n) is the i-th of n parts, and `watch` is told how far that is.
    """
    if not len(catalog) or side < 1 or not 1 <= shard[0] <= shard[1] or (workers or 1) < 1:
        asked = f"{len(catalog)} images, side {side}, shard {shard[0]}/{shard[1]}, workers {workers}"
        raise InvalidInput(f"{asked}: give one image, pixel and worker at least, and a shard i/n of 1 to n.")
    refuse_within_model(folder)
    catalog = cache_plan.without_ids(catalog)
    plan = cache_plan.plan_of(catalog, side)
    _check_folder(folder, plan)
    if not is_store(folder):
        _check_room(folder, plan, plan.shard(shard))
        with writing.alone_in(folder):
            _check_folder(folder, plan)  # another may have begun it in this moment
            lock = None if is_store(folder) else writing.begin(folder, plan, shard)
        if lock is not None:
            try:
                writing.pack(catalog, plan, folder, plan.shard(shard), workers=workers, watch=watch)
                with writing.alone_in(folder):
                    lock.release()  # here, so that of several the last one sees nobody else at work
                    return _finish(catalog, plan, folder, plan.shard(shard), skip_bad=skip_bad)
            finally:
                lock.release()
    store = _verify(catalog, folder, skip_bad=skip_bad)
    if (folder / PLAN).exists():
        with writing.alone_in(folder):
            _tidy(folder)
    return store


def _check_folder(folder: Path, plan: Plan) -> None:
    """Refuses what is, or is to become, another store, or is none; touches nothing."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder. Give a new or empty folder.")
    # The plan comes first and goes when the manifest is there: looking in this order misses neither.
    is_begun, found, wanted = (folder / PLAN).exists(), _read_json(folder / PLAN), plan.content()
    if is_store(folder):
        found = _read_manifest(folder)
    elif not is_begun:
        names = [path.name for path in folder.glob("[!.]*")]
        if not names:
            return
        if PLAN in names or is_store(folder):  # another process has begun in this moment
            found = wanted
    if found.get("format") != cache_plan.FORMAT:
        raise RunConflict(f"{folder} holds something else than a prepared store. Give a new or empty folder.")
    _check_version(folder, found)
    differ = [key for key in wanted if found.get(key) != wanted[key]]
    if differ:
        lines = [f"  {key}: {found.get(key)} there, {wanted[key]} asked for" for key in differ]
        what = "the store of other images, or of the same in another size or preprocessing"
        reason = f"{folder} is {what}. Give another folder."
        raise RunConflict("\n".join([reason, *lines]))


def _check_room(folder: Path, plan: Plan, chunks: range) -> None:
    missing = [plan.chunk(number) for number in chunks if not cache_plan.pixel_path(folder, number).exists()]
    needed = sum(len(chunk) for chunk in missing) * 3 * plan.side**2
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(place)
    if not disk.total or not os.access(place, os.W_OK):  # a system's own tree, such as /proc, has no size
        raise InvalidInput(f"{folder} cannot be made: you may not write to {place}. Give another folder.")
    if needed > disk.free:
        sizes = f"{needed / 1e9:.1f} GB are needed and {disk.free / 1e9:.1f} GB free"
        raise InvalidInput(f"{folder} has no room ({sizes}): make room, or give another folder or side.")


def _finish(catalog: Catalog, plan: Plan, folder: Path, own: range, *, skip_bad: bool) -> Store | None:
    """Whoever finds every chunk written and nobody else at work makes the store count."""
    found = {number: cache_plan.read_chunk(folder, plan, number) for number in range(plan.n_chunks)}
    is_last = not writing.held_locks(folder) and None not in found.values()
    chunks = [chunk for number, chunk in found.items() if chunk is not None and (is_last or number in own)]
    bad = [image for chunk in chunks for image in chunk.bad]
    if any(image.sha256 is None for image in bad):
        raise _unread_files(bad, len(catalog))
    if bad and (not skip_bad or len(bad) == len(catalog)):
        raise _bad_files(bad, len(catalog))
    if not is_last:
        return None
    content = _manifest_content(catalog, plan, chunks, bad)
    writing.write_json(folder / MANIFEST, {"sha256": cache_plan.digest_of(content), "content": content})
    _tidy(folder)
    return open_store(folder, verify="sizes")


def _manifest_content(
    catalog: Catalog, plan: Plan, chunks: Sequence[Chunk], skipped: Sequence[Skipped]
) -> dict[str, Any]:
    kept = catalog.select(np.array([index for chunk in chunks for index in chunk.kept], np.int64))
    return {
        **plan.content(),
        "chunks": [{"images": len(chunk.kept), "crc32": chunk.crc32} for chunk in chunks],
        "skipped": [asdict(image) for image in skipped],
        "names": list(kept.names),
        "labels": kept.labels.tolist(),
        "groups": None if kept.groups is None else list(kept.groups),
        "is_test": None if kept.is_test is None else kept.is_test.tolist(),
        "sha256s": [sha256 for chunk in chunks for sha256 in chunk.sha256s],
    }


def _tidy(folder: Path) -> None:
    """The plan goes last: while it is there, this has not been done to the end."""
    shutil.rmtree(folder / cache_plan.UNFINISHED, ignore_errors=True)
    for place in (folder, folder / PIXELS):
        for unfinished in place.glob(f".*{writing.TEMPORARY}"):
            unfinished.unlink(missing_ok=True)
    (folder / PLAN).unlink(missing_ok=True)


def _verify(catalog: Catalog, folder: Path, *, skip_bad: bool) -> Store:
    store = open_store(folder, verify="hashes")
    if store.skipped and not skip_bad:
        raise _bad_files(store.skipped, len(catalog))
    changed = changed_sources(store, catalog)
    if changed:
        reason = f"{folder} was prepared from other files: {len(changed)} have changed since."
        raise RunConflict(listed_below(f"{reason} Prepare them into another folder.", changed))
    return store


def _bad_files(bad: Sequence[Skipped], n_images: int) -> InvalidInput:
    first_line = (
        f"{len(bad)} of {n_images} files cannot be decoded: replace them, or leave them out (--skip-bad). "
        "What could be decoded is kept."
    )
    return InvalidInput(listed_below(first_line, _problems(bad)))


def _unread_files(bad: Sequence[Skipped], n_images: int) -> InvalidInput:
    """They are never left out: a disk that is away for an hour would make a store with gaps."""
    unread = [image for image in bad if image.sha256 is None]
    others = f"\n  {len(bad) - len(unread)} more cannot be decoded" if len(bad) > len(unread) else ""
    first_line = (
        f"{len(unread)} of {n_images} files cannot be read: see that their disk is there and open to you, "
        "then run the same again. What could be decoded is kept; --skip-bad leaves out only what was read."
    )
    return InvalidInput(listed_below(first_line, _problems(unread)) + others)


def _problems(bad: Sequence[Skipped]) -> list[str]:
    return [b.problem if b.name in b.problem else f"{b.name}: {b.problem}" for b in bad]


def changed_sources(store: Store, catalog: Catalog) -> list[str]:
    """The files that are not, to the last byte, those the store was made from: changed, missing or new."""
    recorded: dict[str, str | None] = dict(zip(store.names, store.sha256s, strict=True))
    recorded |= {skipped.name: skipped.sha256 for skipped in store.skipped}
    found = dict(zip(catalog.names, writing.hash_sources(catalog), strict=True))
    same = {name for name in found if name in recorded and found[name] == recorded[name]}
    return sorted((found.keys() | recorded.keys()) - same)
