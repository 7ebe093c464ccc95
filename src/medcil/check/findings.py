"""What a check of the data finds: classes, groups, files, duplicates, published counts."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool

from medcil.check.near_duplicates import is_blank, near_pairs
from medcil.check.scan import Look, Thumbnail
from medcil.data.decoding.image import ImageFacts
from medcil.data.image_table import ImageTable

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
MAX_EXAMPLES = 100  # of one finding; the count is always the whole
EXEMPLARS = 20  # kept of each class by default, and in the published experiments
MIN_GROUPS = 2  # so that one can be held out
MAX_ASPECT = 3.0  # pictures are resized to squares: beyond, what they show is squeezed past recognition
MIN_SIDE = 32  # pixels; CIFAR's images have 32, and so have thumbnails

Named = Sequence[tuple[str, ImageFacts]]
Pair = tuple[int, int]
Alike = tuple[list[int], list[int]]
"""Copies of one picture, and copies of one that is almost the same."""
PublishedCounts = Mapping[str, Sequence[int]]
"""`train` and `test`, or `total`: images of each class."""


@dataclass(frozen=True)
class Finding:
    severity: Severity
    code: str
    """Stable, for programs; docs/how-to/check-images.md explains each."""
    count: int
    advice: str
    """What was found and what to do about it."""
    examples: tuple[str, ...] = ()
    """File names and class names, nothing else that could point to a patient."""
    details: dict[str, int] = field(default_factory=dict)
    """Further counts by name."""


def finding(
    severity: Severity,
    code: str,
    found: Sequence[str],
    advice: str,
    details: Mapping[str, int] | None = None,
) -> Iterator[Finding]:
    """One finding, or none where nothing was found."""
    if found:
        yield Finding(severity, code, len(found), advice, tuple(found[:MAX_EXAMPLES]), dict(details or {}))


@dataclass(frozen=True)
class ClassCounts:
    name: str
    images: int
    train: int | None
    test: int | None
    groups: int | None


def class_counts(table: ImageTable) -> tuple[ClassCounts, ...]:
    counts = []
    for label, name in enumerate(table.class_names):
        members = np.flatnonzero(table.labels == label)
        n_test = None if table.is_test is None else int(table.is_test[members].sum())
        n_train = None if n_test is None else len(members) - n_test
        groups = None if table.groups is None else len({table.groups[i] for i in members})
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


def group_findings(table: ImageTable) -> Iterator[Finding]:
    """Examples are file names: a group may be named after a patient."""
    if table.groups is None or table.is_test is None:
        return
    shared = groups_on_both_sides(table.groups, table.is_test)
    first_of: dict[tuple[str, bool], str] = {}
    for name, group, is_test in zip(table.names, table.groups, table.is_test.tolist(), strict=True):
        first_of.setdefault((group, is_test), name)
    members = set(shared)
    is_shared = np.array([group in members for group in table.groups], dtype=bool)
    n_tested = int((is_shared & table.is_test).sum())
    advice = (
        f"Patients or lesions on both sides of the split: {n_tested:,} of {int(table.is_test.sum()):,} "
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


def file_findings(
    names: Sequence[str], looks: Sequence[Look], *, may_be_tiny: bool = False
) -> Iterator[Finding]:
    """Of a dataset that is known by name, the size of its images is known too."""
    named = list(zip(names, looks, strict=True))
    bad = [f"{name}: {'; '.join(look.problems)}" for name, look in named if look.problems]
    advice = "Files that are missing, damaged, cut short or no image: replace them, or leave them out."
    yield from finding("error", "unreadable", bad, advice)
    facts = [(name, look.facts) for name, look in named if not look.problems]
    yield from _unlike_the_rest(facts)
    yield from _odd_shapes(facts)
    if not may_be_tiny:
        yield from _tiny(facts)
    yield from _blank([(name, look.thumbnail) for name, look in named if look.thumbnail is not None])


def _unlike_the_rest(facts: Named) -> Iterator[Finding]:
    follow = "Make sure that it does not follow the class: a network would learn that."
    yield from _odd("note", "odd-format", "format", [(name, f.format) for name, f in facts], follow)
    yield from _odd("warning", "odd-mode", "kind of pixels", [(name, f.mode) for name, f in facts], follow)
    resized = "All are resized to one square, whatever their shape."
    yield from _odd("note", "odd-size", "size", [(name, size_of(f)) for name, f in facts], resized)


def _odd(
    severity: Severity, code: str, trait: str, values: Sequence[tuple[str, str]], advice: str
) -> Iterator[Finding]:
    """Those unlike the majority; where there is none, the values themselves."""
    frequent = Counter(value for _, value in values).most_common()
    if len(frequent) < 2:
        return
    common, count = frequent[0]
    if 2 * count > len(values):
        odd = [f"{name}: {value}" for name, value in values if value != common]
        yield from finding(severity, code, odd, f"Another {trait} than {common}, which most have. {advice}")
    else:
        several = [f"{value}: {n:,} images" for value, n in frequent]
        yield from finding(severity, code, several, f"No {trait} is that of most images. {advice}")


def size_of(facts: ImageFacts) -> str:
    return f"{facts.width} x {facts.height}"


def _odd_shapes(facts: Named) -> Iterator[Finding]:
    advice = f"Sides in a ratio beyond {MAX_ASPECT:.0f} : 1, to be squeezed into a square: crop them first."
    long = _sized(facts, lambda f: max(f.width, f.height) > MAX_ASPECT * min(f.width, f.height))
    yield from finding("warning", "extreme-aspect", long, advice)


def _tiny(facts: Named) -> Iterator[Finding]:
    advice = f"Fewer than {MIN_SIDE} pixels on a side: rather previews or icons than images. Look at them."
    small = _sized(facts, lambda f: min(f.width, f.height) < MIN_SIDE)
    yield from finding("warning", "tiny", small, advice)


def _sized(facts: Named, test: Callable[[ImageFacts], bool]) -> list[str]:
    return [f"{name}: {size_of(f)}" for name, f in facts if test(f)]


def ignored_findings(files: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """By extension, files in class folders that are not read."""
    n_files = sum(map(len, files.values()))
    lines = [f"{extension}: {len(names):,}, e.g. {names[0]}" for extension, names in files.items()]
    advice = (
        f"{n_files:,} files in class folders that are not read, by extension: convert the pictures among "
        "them to PNG or JPEG, and move the rest elsewhere."
    )
    yield from finding("warning", "ignored-files", lines, advice, {"files": n_files})


def _blank(shown: Sequence[tuple[str, Thumbnail]]) -> Iterator[Finding]:
    if shown:
        blank = is_blank(np.stack([thumbnail for _, thumbnail in shown])).tolist()
        empty = [name for (name, _), is_empty in zip(shown, blank, strict=True) if is_empty]
        advice = "Pictures of a single color: look at them, and leave out what was not meant to be empty."
        yield from finding("warning", "blank", empty, advice)


def duplicate_findings(table: ImageTable, looks: Sequence[Look]) -> Iterator[Finding]:
    groups = exact_copies(looks)
    copies = [(same[0], copy) for same in groups for copy in same[1:]]
    small = [i for i, look in enumerate(looks) if look.thumbnail is not None and is_small(look)]
    near, cut_short = near_copies(looks, without={*(copy for _, copy in copies), *small})
    advice = "Files with the very same content as another: keep one of them."
    yield from finding("warning", "exact-duplicates", _named(table, copies), advice)
    advice = (
        "Pairs that show almost the same: saved again, resized, or taken one right after the other. Keep "
        "one, or both on one side of the split."
    )
    yield from finding("note", "near-duplicates", _named(table, near), advice)
    advice = (
        "So many pictures look like these that they were not compared with all of them: there may be more "
        "near duplicates than are counted here."
    )
    yield from finding("note", "near-duplicates-bounded", [table.names[i] for i in cut_short], advice)
    advice = (
        f"Pictures with fewer than {MIN_SIDE} pixels on a side show too little to find near duplicates: "
        "they were searched for exact copies only."
    )
    yield from finding("note", "near-duplicates-unsearched", [table.names[i] for i in small], advice)
    alike = _with_their_copies(near, groups)
    yield from _under_two_labels(table, copies, alike)
    yield from _across_the_split(table, groups, alike)


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


def _named(table: ImageTable, pairs: Sequence[Pair]) -> list[str]:
    return [f"{table.names[first]}, {table.names[second]}" for first, second in pairs]


def _under_two_labels(table: ImageTable, copies: Sequence[Pair], alike: Sequence[Alike]) -> Iterator[Finding]:
    classes = [table.class_names[label] for label in table.labels.tolist()]

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
            f"{table.names[first]} ({classes[first]}), {table.names[second]} ({classes[second]})"
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
    table: ImageTable, groups: Sequence[list[int]], alike: Sequence[Alike]
) -> Iterator[Finding]:
    if table.is_test is None:
        return
    is_test = table.is_test.tolist()
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
    named = [(table.names[twin], table.names[tested]) for tested, twin in twin_of.items()]
    examples = [f"{twin} (train), {tested} (test)" for twin, tested in named]
    advice = "Test images whose copy is in training: their scores say nothing. Take one of the two out."
    details = {"exact": n_exact, "near": len(twin_of) - n_exact}
    yield from finding("warning", "duplicates-across-split", examples, advice, details)


@dataclass(frozen=True)
class Published:
    """What a whole copy has; empty where nobody says."""

    counts: PublishedCounts = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """`train` and `test`: images of all classes together."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """So many more of `train` and `test` are no surplus: the published count left them out."""

    def __bool__(self) -> bool:
        return bool(self.counts or self.sizes)


def published_findings(classes: Sequence[ClassCounts], published: Published) -> Iterator[Finding]:
    missing, surplus = [], []
    n_missing, n_surplus = 0, Counter[str]()
    for name, part, here, there in (
        *_compared(classes, published.counts),
        *_totals(classes, published.sizes),
    ):
        line = f"{name}{part and f' ({part})'}: {here:,} of {there:,}"
        if here < there:
            missing.append(line)
            n_missing += there - here
        elif here > there:
            surplus.append(line)
            n_surplus[part] += here - there
    advice = f"{n_missing:,} images fewer than published: complete the copy, or results cannot be compared."
    yield from finding("error", "incomplete", missing, advice, {"images": n_missing})
    spare = {**published.left_out, "": sum(published.left_out.values())}
    if any(n > spare.get(part, 0) for part, n in n_surplus.items()):
        advice = f"{n_surplus.total():,} images more than published: find out where they come from."
        yield from finding("warning", "surplus", surplus, advice, {"images": n_surplus.total()})


def _compared(
    classes: Sequence[ClassCounts], published: PublishedCounts
) -> Iterator[tuple[str, str, int, int]]:
    """(class, part, images here, images published), by parts where both sides have them."""
    for label, counts in enumerate(classes if published else ()):
        if counts.train is not None and counts.test is not None and {"train", "test"} <= set(published):
            yield counts.name, "train", counts.train, published["train"][label]
            yield counts.name, "test", counts.test, published["test"][label]
        else:
            total = sum(part[label] for part in published.values())
            yield counts.name, "", counts.images, total


def _totals(classes: Sequence[ClassCounts], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, int, int]]:
    here = {"train": sum(c.train or 0 for c in classes), "test": sum(c.test or 0 for c in classes)}
    for part, there in sizes.items():
        yield "all classes", part, here[part], there
