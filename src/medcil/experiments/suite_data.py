"""Where the images of a suite's datasets are, and how they become prepared stores that all runs read."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from medcil.data.cache import is_store, open_store, prepare
from medcil.data.cache_writing import hash_sources
from medcil.data.datasets import read_by_name, recognized_name
from medcil.data.source import find_source
from medcil.errors import InvalidInput, RunConflict, RunLocked, nearest
from medcil.experiments.sweep_request import Request

PATIENCE = 2.0
"""Seconds between two looks at a store that another process prepares."""


@dataclass(frozen=True)
class Root:
    dataset: str
    side: int
    folder: Path
    """The prepared store that runs read."""
    source: Path | None
    """What it is prepared from; None: it is there."""


def needs_files(dataset: str) -> bool:
    return find_source(dataset).read_catalog is not None


def given_images(request: Request, known: Collection[str]) -> dict[str, Path]:
    """Dataset -> what `--data` names for it. `known`: the datasets of the suite that have images."""
    given: dict[str, Path] = {}
    for text in request.data:
        name, equals, place = text.partition("=")
        is_named = bool(equals) and not Path(text).exists()
        if is_named and name not in known:
            hint = nearest(name, known) if known else "It needs no images."
            raise InvalidInput(f"--data {text}: the suite has no dataset {name!r}. {hint}")
        path = Path(place if is_named else text)
        if not path.exists():
            raise InvalidInput(f"--data {text}: there is nothing at {path}. Give the images of a dataset.")
        if not known:
            raise InvalidInput(f"--data {text}: the suite needs no images. Leave it out.")
        given |= {name: path} if is_named else _shared(path, known)
    return given


def find_roots(
    request: Request, given: Mapping[str, Path], wanted: Iterable[tuple[str, int]]
) -> tuple[dict[tuple[str, int], Root], list[str]]:
    """(dataset, side) -> its images; and a sentence for each dataset that has none."""
    roots, left_out = {}, []
    for dataset, side in dict.fromkeys(wanted):
        store, path = request.results.store(dataset, side), given.get(dataset)
        if path is not None and is_store(path):
            _check_store(path, dataset, side)
            roots[dataset, side] = Root(dataset, side, path, source=None)
        elif is_store(store):
            roots[dataset, side] = Root(dataset, side, store, source=None)
        elif path is not None:
            roots[dataset, side] = Root(dataset, side, store, source=path)
        else:
            left_out.append(f"{dataset} is left out: give its images with --data {dataset}=DIR.")
    return roots, list(dict.fromkeys(left_out))


def check_prepared(request: Request, given: Mapping[str, Path], wanted: Iterable[tuple[str, int]]) -> None:
    """Refuse images other than those that the stores here were prepared from: every file is read once."""
    listed: dict[str, list[tuple[str, int, str | None]]] = {}
    for dataset, side in dict.fromkeys(wanted):
        folder, path = request.results.store(dataset, side), given.get(dataset)
        if path is None or is_store(path) or not is_store(folder):
            continue
        if dataset not in listed:
            catalog = read_by_name(dataset, path)
            labels, sha256s = catalog.labels.tolist(), hash_sources(catalog)
            listed[dataset] = list(zip(catalog.names, labels, sha256s, strict=True))
        store = open_store(folder, verify="sizes")
        skipped = {(image.name, image.sha256) for image in store.skipped}
        held = list(zip(store.names, store.labels.tolist(), store.sha256s, strict=True))
        if held != [image for image in listed[dataset] if (image[0], image[2]) not in skipped]:
            raise RunConflict(
                f"{folder} was prepared from other images than those at {path}: delete it, or give another "
                "--out."
            )


def prepare_root(root: Root, watch: Callable[[int, int], None]) -> None:
    """Decodes the images once, or what of them is not done yet; waits where another sweep does so."""
    while root.source is not None:
        try:
            prepare(read_by_name(root.dataset, root.source), root.folder, side=root.side, watch=watch)
            return
        except RunLocked:
            time.sleep(PATIENCE)


def _shared(path: Path, known: Collection[str]) -> Mapping[str, Path]:
    """One path for several datasets: a folder with something named after each, or files that they share."""
    if len(known) == 1:
        return dict.fromkeys(known, path)
    entries = sorted(path.iterdir(), reverse=True) if path.is_dir() else []
    named = {entry.name.partition(".")[0]: entry for entry in entries}
    found = {name: named[name] for name in known if name in named}
    if found:
        return found
    held = open_store(path, verify="sizes").dataset if is_store(path) else recognized_name(path)
    if held not in known:
        names = ", ".join(sorted(known))
        raise InvalidInput(f"--data {path} is not known as any of {names}: write --data NAME=DIR for each.")
    # CIFAR-100 and its long tail are read from the same files.
    files = find_source(held).files_needed
    return {name: path for name in known if name == held or find_source(name).files_needed == files != ""}


def _check_store(path: Path, dataset: str, side: int) -> None:
    store = open_store(path, verify="sizes")
    if (store.dataset, store.images.side) != (dataset, side):
        raise InvalidInput(
            f"{path} was prepared as {store.dataset} with side {store.images.side}, but {dataset} with side "
            f"{side} is needed: give the images themselves, or another store."
        )
