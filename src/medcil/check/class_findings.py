"""Findings from the lists alone: classes, the split, groups."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool

from medcil.check.report import ClassCounts, Finding, finding
from medcil.data.catalog import Catalog

EXEMPLARS = 20  # kept of each class by default, and in the published experiments
MIN_GROUPS = 2  # so that one can be held out


def class_counts(catalog: Catalog) -> tuple[ClassCounts, ...]:
    counts = []
    for label, name in enumerate(catalog.class_names):
        members = np.flatnonzero(catalog.labels == label)
        n_test = None if catalog.is_test is None else int(catalog.is_test[members].sum())
        n_train = None if n_test is None else len(members) - n_test
        groups = None if catalog.groups is None else len({catalog.groups[i] for i in members})
        counts.append(ClassCounts(name, len(members), n_train, n_test, groups))
    return tuple(counts)


def class_findings(classes: Sequence[ClassCounts], empty_folders: Sequence[str] = ()) -> Iterator[Finding]:
    """Folders without images are no classes for training, but were perhaps meant to be."""
    learned = {c.name: c.images if c.train is None else c.train for c in classes}
    advice = "Classes with one image to learn from, or none: add images, merge the classes or leave them out."
    too_small = [f"{name}: {n}" for name, n in learned.items() if n < 2]
    too_small += [f"{folder}: 0, a folder without images" for folder in empty_folders]
    yield from finding("error", "class-too-small", too_small, advice)
    advice = (
        f"Classes with fewer than {EXEMPLARS} images to learn from, as many as are usually kept in memory: "
        "lower memory.per_class, or add images."
    )
    small = [f"{name}: {n}" for name, n in learned.items() if 2 <= n < EXEMPLARS]
    yield from finding("warning", "class-small", small, advice)
    advice = "Classes without test images, which are never scored: choose another split."
    untested = [c.name for c in classes if c.test == 0 and c.images]
    yield from finding("warning", "class-untested", untested, advice)
    advice = "All images of one patient or lesion: no split by groups can test these classes. Add others."
    lone = [c.name for c in classes if c.groups is not None and c.images and c.groups < MIN_GROUPS]
    yield from finding("warning", "class-few-groups", lone, advice)
    advice = "Class names that differ in case, spaces or encoding only: give one class one name."
    yield from finding("error", "class-names-collide", _colliding([c.name for c in classes]), advice)


def _colliding(names: Sequence[str]) -> list[str]:
    alike = defaultdict(list)
    for name in names:
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        alike[" ".join(folded.split())].append(name)
    return [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]


def group_findings(catalog: Catalog) -> Iterator[Finding]:
    """Examples are file names: a group may be named after a patient."""
    if catalog.groups is None or catalog.is_test is None:
        return
    shared = groups_on_both_sides(catalog.groups, catalog.is_test)
    first_of: dict[tuple[str, bool], str] = {}
    for name, group, is_test in zip(catalog.names, catalog.groups, catalog.is_test.tolist(), strict=True):
        first_of.setdefault((group, is_test), name)
    members = set(shared)
    is_shared = np.array([group in members for group in catalog.groups], dtype=bool)
    n_tested = int((is_shared & catalog.is_test).sum())
    advice = (
        f"Patients or lesions on both sides of the split: {n_tested:,} of {int(catalog.is_test.sum()):,} "
        "test images have theirs in training, so that scores are optimistic. Split by groups, or say so "
        "with the result."
    )
    examples = [f"{first_of[group, False]} (train), {first_of[group, True]} (test)" for group in shared]
    details = {"groups": len(shared), "images": int(is_shared.sum()), "test_images": n_tested}
    yield from finding("warning", "groups-across-split", examples, advice, details)


def groups_on_both_sides(groups: Sequence[str], is_test: Bool[np.ndarray, "n"]) -> list[str]:
    """In order of first appearance."""
    sides: dict[str, set[bool]] = {}
    for group, side in zip(groups, is_test.tolist(), strict=True):
        sides.setdefault(group, set()).add(side)
    return [group for group, found in sides.items() if len(found) == 2]
