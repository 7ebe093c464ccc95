"""Where a run's images come from: a dataset's own files, one's own images, or a prepared store.

Opening a source lists images; pixels are decoded once it is known which images are used.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int

from medcil.config import DataConfig, LongTailConfig, SplitRule
from medcil.data.cache import Store, is_store, open_store
from medcil.data.cache_plan import UNFINISHED
from medcil.data.cache_writing import hash_sources
from medcil.data.catalog import OWN, Catalog
from medcil.data.datasets import OWN_DESCRIPTION, Dataset, find_dataset
from medcil.data.long_tail import long_tail
from medcil.data.samples import Samples, TensorImages
from medcil.data.sources.folder import read_own
from medcil.data.splits import choose_rule, group_split, held_out, warn_of_shared_groups
from medcil.errors import InvalidInput

DECODED_AT_ONCE = 2**31
"""Bytes of pixels that are decoded before training; more are decoded each time they are read."""


@dataclass(frozen=True, eq=False)
class Source:
    """Labeled images before any split."""

    labels: Int[np.ndarray, "n"]
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None
    is_test: Bool[np.ndarray, "n"] | None
    samples_of: Callable[[Int[np.ndarray, "m"]], Samples]
    sha256s: Callable[[], Sequence[str | None]] | None = None
    """Compute the sha256 of every image's file; None where there are no files."""
    published_as: str | None = None
    """The dataset whose published figures are those of one split; None where there are no such figures."""


def find_source(name: str) -> Dataset:
    """A dataset by name; `own` has neither classes nor orders until its images are listed."""
    if name != OWN:
        return find_dataset(name)
    return Dataset(
        description=OWN_DESCRIPTION,
        class_names=(),
        orders=(),
        protocols=(),
        read=_nothing_to_read,
        read_catalog=_read_own,
    )


def _nothing_to_read(root: Path | None, side: int) -> tuple[Samples, Samples]:
    raise ValueError("one's own images have no split until they are listed")


def _read_own(root: Path | None) -> Catalog:
    if root is None:
        raise InvalidInput("data.root is not given: name the folder, manifest or archive of your images.")
    return read_own(root)


def open_source(dataset: Dataset, root: Path | None, *, side: int) -> Source:
    source = _opened(dataset, root, side=side)
    has_published_split = {"train", "test"} <= set(dataset.published_counts)
    return replace(source, published_as=dataset.name if has_published_split else None)


def _opened(dataset: Dataset, root: Path | None, *, side: int) -> Source:
    if root is not None and (is_store(root) or (root / UNFINISHED).is_dir()):
        return _of_store(open_store(root), dataset, side=side)
    if dataset.read_catalog is None:
        return _of_samples(*dataset.read(root, side), dataset.class_names)
    catalog = dataset.read_catalog(root)
    return Source(
        labels=catalog.labels,
        class_names=catalog.class_names,
        groups=catalog.groups,
        is_test=catalog.is_test,
        samples_of=partial(decoded, catalog, side),
        sha256s=partial(hash_sources, catalog),
    )


def train_and_test(
    source: Source, data: DataConfig, tail: LongTailConfig | None
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """In words what a run tests on, and the places of the images it trains and tests on."""
    rule, train, test = split(source, rule=data.split, share=data.split_share, seed=data.split_seed)
    if tail is not None:
        train = _thinned_out(source, train, ratio=tail.ratio, seed=tail.seed)
    if data.held_out is None:
        return rule, train, test
    return _set_apart(source, train, rule=rule, share=data.held_out, seed=data.split_seed)


def split(
    source: Source, *, rule: SplitRule | None, share: float, seed: int
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """The rule that was followed, and the places of the training and the test images."""
    rule = choose_rule(
        rule,
        has_split=source.is_test is not None,
        has_groups=source.groups is not None,
        published_as=source.published_as,
    )
    is_test = held_out(source.labels, source.groups, source.is_test, rule=rule, share=share, seed=seed)
    # Who asks for a benchmark's split wants it as it was published.
    if rule == "given" and source.groups is not None:
        warn_of_shared_groups(source.groups, is_test)
    untested = sorted(set(range(len(source.class_names))) - set(source.labels[is_test].tolist()))
    if len(untested) == len(source.class_names):
        raise InvalidInput("data.split leaves no image to test on: add test images, or let a split be drawn.")
    if untested:
        names = ", ".join(source.class_names[c] for c in untested)
        warnings.warn(
            f"There is no image to test on of {names}: how well it goes stays unknown.", stacklevel=2
        )
    return rule, np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _set_apart(
    source: Source, train: Int[np.ndarray, "n"], *, rule: str, share: float, seed: int
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """In words what is tested on, and the places of the training images that stay and of those held out.

    Whole patients or lesions wherever they are known, by whatever rule the test was split off.
    """
    groups = None if source.groups is None else [source.groups[i] for i in train.tolist()]
    is_held = group_split(source.labels[train], groups, share=share, seed=seed)
    there = set(source.labels[train[is_held]].tolist())
    lacking = [source.class_names[c] for c in sorted(set(source.labels[train].tolist()) - there)]
    if lacking:
        what = "image" if groups is None else "patient or lesion"
        warnings.warn(
            f"There is no more than one {what} of {', '.join(lacking)} to train on: none can be held out, "
            "and how well it goes stays unknown.",
            stacklevel=2,
        )
    unit = "images" if groups is None else "groups"
    said = f"{share:g} of the training images, held out by {unit} ({rule} test not read)"
    return said, train[~is_held], train[is_held]


def _thinned_out(
    source: Source, train: Int[np.ndarray, "n"], *, ratio: float, seed: int
) -> Int[np.ndarray, "m"]:
    """The training images that a long tail leaves: one at least of each class that has any."""
    kept = train[long_tail(source.labels[train], ratio=ratio, seed=seed)]
    lost = set(source.labels[train].tolist()) - set(source.labels[kept].tolist())
    if lost:
        raise InvalidInput(
            f"scenario.long_tail.ratio {ratio:g} leaves no training image of "
            f"{source.class_names[min(lost)]!r}: raise it, or add images."
        )
    return np.asarray(kept)


def _of_store(store: Store, dataset: Dataset, *, side: int) -> Source:
    if store.images.side != side:
        raise InvalidInput(
            f"data.root: {store.folder} was prepared with side {store.images.side}, but data.side is {side}: "
            "set that, or prepare the images again."
        )
    if dataset.name not in (OWN, store.dataset):
        raise InvalidInput(
            f"data.root: {store.folder} was prepared as {store.dataset}, but data.name is {dataset.name}: "
            f"prepare the images with --dataset {dataset.name}, or write `data.name: {store.dataset}`."
        )
    if dataset.class_names and store.class_names != dataset.class_names:
        raise InvalidInput(
            f"data.root: {store.folder} holds other classes ({', '.join(store.class_names[:3])}, ...) than "
            "data.name says: write `data.name: own`, or prepare the images again."
        )
    return Source(
        labels=store.labels,
        class_names=store.class_names,
        groups=store.groups,
        is_test=store.is_test,
        samples_of=lambda chosen: store.samples().select(torch.from_numpy(chosen)),
        sha256s=lambda: store.sha256s,
    )


def _of_samples(train: Samples, test: Samples, class_names: tuple[str, ...]) -> Source:
    every = train + test
    return Source(
        labels=every.labels.numpy(),
        class_names=class_names,
        groups=None,
        is_test=np.repeat([False, True], [len(train), len(test)]),
        samples_of=lambda chosen: every.select(torch.from_numpy(chosen)),
    )


def decoded(catalog: Catalog, side: int, chosen: Int[np.ndarray, "m"]) -> Samples:
    """Some images of a catalog, in memory where the whole of it would fit."""
    found = catalog.select(chosen)
    if len(catalog) * 3 * side**2 > DECODED_AT_ONCE:
        return found.samples(side)
    pixels = torch.empty(len(found), 3, side, side, dtype=torch.uint8)

    def decode(index: int) -> None:
        pixels[index] = found.decode(found.read(index), side, found.names[index])

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(found))):
            pass  # an error in a thread is raised here
    return Samples(TensorImages(pixels), torch.from_numpy(found.labels.astype(np.int64)))
