"""Findings about pictures that are there twice."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from medcil.check.near_duplicates import near_pairs
from medcil.check.report import Finding, finding
from medcil.check.scan import Look
from medcil.data.catalog import Catalog

MIN_SIDE = 32  # pixels: below, the thumbnail has fewer than the comparison looks at
Pair = tuple[int, int]
Alike = tuple[list[int], list[int]]
"""Copies of one picture, and copies of one that is almost the same."""


def duplicate_findings(catalog: Catalog, looks: Sequence[Look]) -> Iterator[Finding]:
    groups = exact_copies(looks)
    copies = [(same[0], copy) for same in groups for copy in same[1:]]
    small = [i for i, look in enumerate(looks) if look.thumbnail is not None and is_small(look)]
    near, cut_short = near_copies(looks, without={*(copy for _, copy in copies), *small})
    advice = "Files with the very same content as another: keep one of them."
    yield from finding("warning", "exact-duplicates", _named(catalog, copies), advice)
    advice = (
        "Pairs that show almost the same: saved again, resized, or taken one right after the other. Keep "
        "one, or both on one side of the split."
    )
    yield from finding("note", "near-duplicates", _named(catalog, near), advice)
    advice = (
        "So many pictures look like these that they were not compared with all of them: there may be more "
        "near duplicates than are counted here."
    )
    yield from finding("note", "near-duplicates-bounded", [catalog.names[i] for i in cut_short], advice)
    advice = (
        f"Pictures with fewer than {MIN_SIDE} pixels on a side show too little to find near duplicates: "
        "they were searched for exact copies only."
    )
    yield from finding("note", "near-duplicates-unsearched", [catalog.names[i] for i in small], advice)
    alike = _with_their_copies(near, groups)
    yield from _under_two_labels(catalog, copies, alike)
    yield from _across_the_split(catalog, groups, alike)


def exact_copies(looks: Sequence[Look]) -> list[list[int]]:
    """Images of one content, for each content that is there more than once; damaged files show nothing."""
    places = defaultdict(list)
    for index, look in enumerate(looks):
        if look.sha256 is not None and not look.problems:
            places[look.sha256].append(index)
    return [same for same in places.values() if len(same) > 1]


def is_small(look: Look) -> bool:
    return min(look.facts.width, look.facts.height) < MIN_SIDE


def near_copies(looks: Sequence[Look], *, without: set[int]) -> tuple[list[Pair], list[int]]:
    """Pairs, and the images that were not compared with all. Damaged files are left out.

    What those show is an accident of the decoder.
    """
    shown = [(i, look.thumbnail) for i, look in enumerate(looks) if i not in without and not look.problems]
    kept = [(index, thumbnail) for index, thumbnail in shown if thumbnail is not None]
    if not kept:
        return [], []
    places = [index for index, _ in kept]
    pairs, cut_short = near_pairs(np.stack([thumbnail for _, thumbnail in kept]))
    near = [(places[first], places[second]) for first, second in pairs.tolist()]
    return near, [places[index] for index in cut_short.tolist()]


def _with_their_copies(near: Sequence[Pair], groups: Sequence[list[int]]) -> list[Alike]:
    """Only one of several copies was compared; what it is like, the others are like as well."""
    group_of = {same[0]: same for same in groups}
    return [(group_of.get(first, [first]), group_of.get(second, [second])) for first, second in near]


def _named(catalog: Catalog, pairs: Sequence[Pair]) -> list[str]:
    return [f"{catalog.names[first]}, {catalog.names[second]}" for first, second in pairs]


def _under_two_labels(catalog: Catalog, copies: Sequence[Pair], alike: Sequence[Alike]) -> Iterator[Finding]:
    classes = [catalog.class_names[label] for label in catalog.labels.tolist()]

    def by_class(same: Sequence[int]) -> dict[str, int]:
        return {classes[index]: index for index in reversed(same)}

    exact = [pair for pair in copies if classes[pair[0]] != classes[pair[1]]]
    almost = [
        (first, second)
        for some, others in alike
        for first in by_class(some).values()
        for second in by_class(others).values()
        if classes[first] != classes[second]
    ]

    def named(pairs: Sequence[Pair]) -> list[str]:
        return [
            f"{catalog.names[first]} ({classes[first]}), {catalog.names[second]} ({classes[second]})"
            for first, second in pairs
        ]

    advice = (
        "The same picture is in two classes: remove the wrong one, or let `--conflicts` of train and update "
        "decide, which leaves out both (skip) or believes one class."
    )
    yield from finding("error", "two-labels", named(exact), advice)
    advice = "Almost the same picture is in two classes. Look at the pairs: one label may be wrong."
    yield from finding("warning", "near-two-labels", named(almost), advice)


def _across_the_split(
    catalog: Catalog, groups: Sequence[list[int]], alike: Sequence[Alike]
) -> Iterator[Finding]:
    if catalog.is_test is None:
        return
    is_test = catalog.is_test.tolist()
    twin_of: dict[int, int] = {}  # test image -> a training image that shows the same

    def match(tested: Sequence[int], trained: Sequence[int]) -> None:
        twin = next((index for index in trained if not is_test[index]), None)
        if twin is not None:
            for index in tested:
                if is_test[index]:
                    twin_of.setdefault(index, twin)

    for same in groups:
        match(same, same)
    n_exact = len(twin_of)
    for some, others in alike:
        match(some, others)
        match(others, some)
    named = [(catalog.names[twin], catalog.names[tested]) for tested, twin in twin_of.items()]
    examples = [f"{twin} (train), {tested} (test)" for twin, tested in named]
    advice = "Test images whose copy is in training: their scores say nothing. Take one of the two out."
    details = {"exact": n_exact, "near": len(twin_of) - n_exact}
    yield from finding("warning", "duplicates-across-split", examples, advice, details)
