"""Findings about pictures that are there twice."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from medcil.check.alike import near_pairs
from medcil.check.look import Look
from medcil.check.report import Finding, finding
from medcil.data.catalog import Catalog

Pair = tuple[int, int]


def duplicate_findings(catalog: Catalog, looks: Sequence[Look]) -> Iterator[Finding]:
    copies = [(same[0], copy) for same in exact_copies(looks) for copy in same[1:]]
    near = near_copies(looks, without={copy for _, copy in copies})
    advice = "Files with the very same content as another: keep one of them."
    yield from finding("warning", "exact-duplicates", _named(catalog, copies), advice)
    advice = (
        "Pairs that show almost the same: saved again, resized, or taken one right after the other. Keep "
        "one, or both on one side of the split."
    )
    yield from finding("note", "near-duplicates", _named(catalog, near), advice)
    yield from _under_two_labels(catalog, copies, near)
    yield from _across_the_split(catalog, looks, near)


def exact_copies(looks: Sequence[Look]) -> list[list[int]]:
    """Images of one content, for each content that is there more than once; damaged files show nothing."""
    places = defaultdict(list)
    for index, look in enumerate(looks):
        if look.sha256 is not None and not look.problems:
            places[look.sha256].append(index)
    return [same for same in places.values() if len(same) > 1]


def near_copies(looks: Sequence[Look], *, without: set[int]) -> list[Pair]:
    """Damaged files are left out: what they show is an accident of the decoder."""
    shown = [(i, look.thumbnail) for i, look in enumerate(looks) if i not in without and not look.problems]
    kept = [(index, thumbnail) for index, thumbnail in shown if thumbnail is not None]
    if not kept:
        return []
    places = [index for index, _ in kept]
    pairs = near_pairs(np.stack([thumbnail for _, thumbnail in kept])).tolist()
    return [(places[first], places[second]) for first, second in pairs]


def _named(catalog: Catalog, pairs: Sequence[Pair]) -> list[str]:
    return [f"{catalog.names[first]}, {catalog.names[second]}" for first, second in pairs]


def _under_two_labels(catalog: Catalog, copies: Sequence[Pair], near: Sequence[Pair]) -> Iterator[Finding]:
    classes = [catalog.class_names[label] for label in catalog.labels.tolist()]
    exact, almost = ([p for p in pairs if classes[p[0]] != classes[p[1]]] for pairs in (copies, near))
    examples = [
        f"{catalog.names[first]} ({classes[first]}), {catalog.names[second]} ({classes[second]})"
        for first, second in exact + almost
    ]
    advice = "One picture under two classes, so that one label is wrong: find out which, or leave both out."
    details = {"exact": len(exact), "near": len(almost)}
    yield from finding("error", "two-labels", examples, advice, details)


def _across_the_split(catalog: Catalog, looks: Sequence[Look], near: Sequence[Pair]) -> Iterator[Finding]:
    if catalog.is_test is None:
        return
    is_test = catalog.is_test.tolist()
    twin_of: dict[int, int] = {}  # test image -> a training image that shows the same
    for same in exact_copies(looks):
        trained = [index for index in same if not is_test[index]]
        if trained:
            twin_of |= {index: trained[0] for index in same if is_test[index]}
    n_exact = len(twin_of)
    for first, second in near:
        tested, twin = (first, second) if is_test[first] else (second, first)
        if is_test[tested] and not is_test[twin]:
            twin_of.setdefault(tested, twin)
    named = [(catalog.names[twin], catalog.names[tested]) for tested, twin in twin_of.items()]
    examples = [f"{twin} (train), {tested} (test)" for twin, tested in named]
    advice = "Test images whose copy is in training: their scores say nothing. Take one of the two out."
    details = {"exact": n_exact, "near": len(twin_of) - n_exact}
    yield from finding("warning", "duplicates-across-split", examples, advice, details)
