"""What a check of images can find: one table of findings, and the functions that look for them."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Literal

import numpy as np

from medcil.check.near_duplicates import is_blank, near_pairs
from medcil.check.scan import Look
from medcil.data.decoding import ImageFacts
from medcil.data.image_table import Dataset, ImageTable

Severity = Literal["error", "warning", "note"]
MAX_EXAMPLES = 100  # of one finding; its count has no bound
EXEMPLARS = 20  # of each class in memory by default, and in the published experiments
MIN_GROUPS = 2  # so that one can be held out
MAX_ASPECT = 3.0  # images are resized to squares: beyond, they are squeezed past recognition
MIN_SIDE = 32  # pixels; CIFAR's images have 32, and so have thumbnails

ODD = "Another {trait} than most files have, or no {trait} is that of most."

FINDINGS: dict[Severity, dict[str, str]] = {
    "error": {
        "unreadable": "Files that are missing, damaged, cut short or no image: replace or leave them out.",
        "class-too-small": "Classes with one image to learn from, or none: add images, merge the classes or "
        "leave them out.",
        "class-names-collide": "Class names that differ in case, spaces or encoding only: give one class one "
        "name.",
        "two-labels": "The same picture is in two classes: remove the wrong one, or let `--conflicts` of "
        "train and update decide, which leaves out both (skip) or believes one class.",
        "incomplete": "{images:,} images fewer than published: complete the copy, or results cannot be "
        "compared.",
    },
    "warning": {
        "odd-mode": f"{ODD.format(trait='kind of pixels')} Make sure that it does not follow the class: a "
        "network would learn that.",
        "extreme-aspect": f"Sides in a ratio beyond {MAX_ASPECT:.0f} : 1, to be squeezed into a square: crop "
        "them first.",
        "tiny": f"Fewer than {MIN_SIDE} pixels on a side: rather previews or icons than images. Look at "
        "them.",
        "blank": "Pictures of a single color: look at them, and leave out what was not meant to be empty.",
        "ignored-files": "{files:,} files in class folders that are not read, by extension: convert the "
        "pictures among them to PNG or JPEG, and move the rest elsewhere.",
        "class-small": f"Classes with fewer than {EXEMPLARS} images to learn from, as many as are usually "
        "kept in memory: lower memory.per_class, or add images.",
        "class-untested": "Classes without test images, which are never scored: choose another split.",
        "class-few-groups": "All images of one patient or lesion: no split by groups can test these classes. "
        "Add others.",
        "groups-across-split": "Patients or lesions on both sides of the split: {test_images:,} test images "
        "have theirs in training, so scores are optimistic. Split by groups, or say so with the result.",
        "exact-duplicates": "Files with the very same content as another: keep one of them.",
        "near-two-labels": "Almost the same picture is in two classes. Look at the pairs: one label may be "
        "wrong.",
        "duplicates-across-split": "Test images whose copy is in training: their scores say nothing. Take "
        "one of the two out.",
        "surplus": "{images:,} images more than published: find out where they come from.",
        "skipped": "Images that were left out when they were prepared: fix them and prepare them again.",
    },
    "note": {
        "odd-format": f"{ODD.format(trait='format')} Make sure that it does not follow the class: a network "
        "would learn that.",
        "odd-size": f"{ODD.format(trait='size')} All are resized to one square.",
        "near-duplicates": "Pairs that show almost the same: saved again, resized, or taken one right after "
        "the other. Keep one, or both on one side of the split.",
        "near-duplicates-bounded": "So many pairs look alike that the search ended before these pictures "
        "were compared with all others: there may be more near duplicates than are counted here.",
        "near-duplicates-unsearched": f"Pictures with fewer than {MIN_SIDE} pixels on a side show too little "
        "to find near duplicates: they were searched for exact copies only.",
    },
}
"""The advice of each finding, in the order of a report. Advice may name the finding's details."""
SEVERITY: dict[str, Severity] = {code: severity for severity, codes in FINDINGS.items() for code in codes}


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


def finding(code: str, examples: Sequence[str], **details: int) -> Finding:
    severity, shown = SEVERITY[code], tuple(examples[:MAX_EXAMPLES])
    return Finding(severity, code, len(examples), FINDINGS[severity][code].format(**details), shown, details)


@dataclass(frozen=True)
class ClassCounts:
    name: str
    images: int
    train: int | None
    test: int | None
    groups: int | None

    @property
    def learned(self) -> int:
        """Images to learn from."""
        return self.images if self.train is None else self.train


def class_counts(table: ImageTable) -> tuple[ClassCounts, ...]:
    counts = []
    for label, name in enumerate(table.class_names):
        members = np.flatnonzero(table.labels == label)
        n_test = None if table.is_test is None else int(table.is_test[members].sum())
        n_train = None if table.is_kept_out is None else int((~table.is_kept_out[members]).sum())
        groups = None if table.groups is None else len({table.groups[i] for i in members})
        counts.append(ClassCounts(name, len(members), n_train, n_test, groups))
    return tuple(counts)


def class_findings(classes: Sequence[ClassCounts], empty_folders: Sequence[str]) -> Iterator[Finding]:
    """Look for classes that cannot be learned or tested, among them folders without an image that is read."""
    too_small = [f"{c.name}: {c.learned}" for c in classes if c.learned < 2]
    too_small += [f"{folder}: 0, a folder without images" for folder in empty_folders]
    yield finding("class-too-small", too_small)
    small = [f"{c.name}: {c.learned}" for c in classes if 2 <= c.learned < EXEMPLARS]
    yield finding("class-small", small)
    yield finding("class-untested", [c.name for c in classes if c.test == 0 and c.images])
    lone = [c.name for c in classes if c.groups is not None and c.images and c.groups < MIN_GROUPS]
    yield finding("class-few-groups", lone)
    alike = defaultdict(list)
    for c in classes:
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", c.name).casefold())
        alike[" ".join(plain.split())].append(c.name)
    colliding = [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]
    yield finding("class-names-collide", colliding)


def group_findings(table: ImageTable) -> Iterator[Finding]:
    """Look for groups in training and test. Examples are file names: a group may be named after a patient."""
    if table.groups is None or (is_kept_out := table.is_kept_out) is None:
        return
    train, test = dict[str, str](), dict[str, str]()  # group -> its first image there
    for name, group, is_test in zip(table.names, table.groups, is_kept_out.tolist(), strict=True):
        (test if is_test else train).setdefault(group, name)
    is_shared = np.array([group in train and group in test for group in table.groups], dtype=bool)
    examples = [f"{train[group]} (train), {test[group]} (test)" for group in train if group in test]
    yield finding(
        "groups-across-split",
        examples,
        groups=len(examples),
        images=int(is_shared.sum()),
        test_images=int((is_shared & is_kept_out).sum()),
    )


def file_findings(names: Sequence[str], looks: Sequence[Look], *, may_be_tiny: bool) -> Iterator[Finding]:
    """Look for damaged, odd and blank files. The size of a known dataset's images is known to be small."""
    named = list(zip(names, looks, strict=True))
    bad = [f"{name}: {'; '.join(look.problems)}" for name, look in named if look.problems]
    yield finding("unreadable", bad)
    facts = [(name, look.facts) for name, look in named if not look.problems]
    yield finding("odd-format", _odd([(name, f.format) for name, f in facts]))
    yield finding("odd-mode", _odd([(name, f.mode) for name, f in facts]))
    yield finding("odd-size", _odd([(name, size_of(f)) for name, f in facts]))

    def sized(test: Callable[[ImageFacts], bool]) -> list[str]:
        return [f"{name}: {size_of(f)}" for name, f in facts if test(f)]

    yield finding(
        "extreme-aspect", sized(lambda f: max(f.width, f.height) > MAX_ASPECT * min(f.width, f.height))
    )
    if not may_be_tiny:
        yield finding("tiny", sized(lambda f: min(f.width, f.height) < MIN_SIDE))
    shown = [(name, look.thumbnail) for name, look in named if look.thumbnail is not None]
    yield finding("blank", [name for name, thumbnail in shown if is_blank(thumbnail[None])[0]])


def _odd(values: Sequence[tuple[str, str]]) -> list[str]:
    """List the files unlike the majority; where there is no majority, the values themselves."""
    frequent = Counter(value for _, value in values).most_common()
    if len(frequent) < 2:
        return []
    common, count = frequent[0]
    if 2 * count > len(values):
        return [f"{name}: {value}" for name, value in values if value != common]
    return [f"{value}: {n:,} images" for value, n in frequent]


def size_of(facts: ImageFacts) -> str:
    return f"{facts.width} x {facts.height}"


def ignored_finding(files: Mapping[str, Sequence[str]]) -> Finding:
    """List, by extension, files in class folders that are not read."""
    lines = [f"{extension}: {len(names):,}, e.g. {names[0]}" for extension, names in files.items()]
    return finding("ignored-files", lines, files=sum(map(len, files.values())))


Pair = tuple[int, int]
Alike = tuple[list[int], list[int]]
"""All copies of one picture, and all copies of a near duplicate of it."""


def duplicate_findings(table: ImageTable, looks: Sequence[Look]) -> Iterator[Finding]:
    copies_of: dict[str, list[int]] = defaultdict(list)
    for index, look in enumerate(looks):
        if not look.problems:  # what the decoder leaves of a damaged file is an accident
            copies_of[look.sha256 or f"image {index}"].append(index)
    groups, names = list(copies_of.values()), table.names
    small = [i for i, look in enumerate(looks) if look.thumbnail is not None and _is_small(look)]
    # Of several copies the first is compared.
    shown = [
        same for same in groups if looks[same[0]].thumbnail is not None and not _is_small(looks[same[0]])
    ]
    thumbnails = np.array([looks[same[0]].thumbnail for same in shown], np.uint8).reshape(-1, 32, 32)
    pairs, cut_short = near_pairs(thumbnails)
    copies = [(same[0], copy) for same in groups for copy in same[1:]]
    alike = [(shown[first], shown[second]) for first, second in pairs.tolist()]
    yield finding("exact-duplicates", [f"{names[i]}, {names[j]}" for i, j in copies])
    yield finding("near-duplicates", [f"{names[some[0]]}, {names[others[0]]}" for some, others in alike])
    yield finding("near-duplicates-bounded", [names[shown[place][0]] for place in cut_short.tolist()])
    yield finding("near-duplicates-unsearched", [names[i] for i in small])
    yield from _under_two_labels(table, copies, alike)
    if table.is_kept_out is not None:
        yield _across_the_split(names, table.is_kept_out.tolist(), groups, alike)


def _is_small(look: Look) -> bool:
    return min(look.facts.width, look.facts.height) < MIN_SIDE


def _under_two_labels(table: ImageTable, copies: Sequence[Pair], alike: Sequence[Alike]) -> Iterator[Finding]:
    classes = [table.class_names[label] for label in table.labels.tolist()]

    def first_of_each_class(same: Sequence[int]) -> list[int]:
        return list({classes[index]: index for index in reversed(same)}.values())

    def named(pairs: Iterable[Pair]) -> list[str]:
        return [
            f"{table.names[first]} ({classes[first]}), {table.names[second]} ({classes[second]})"
            for first, second in pairs
            if classes[first] != classes[second]
        ]

    yield finding("two-labels", named(copies))
    near = (product(first_of_each_class(some), first_of_each_class(others)) for some, others in alike)
    yield finding("near-two-labels", named(chain.from_iterable(near)))


def _across_the_split(
    names: Sequence[str], is_test: Sequence[bool], copies: Sequence[list[int]], alike: Sequence[Alike]
) -> Finding:
    twin_of: dict[int, int] = {}  # test image -> a training image that shows the same

    def match(some: Sequence[int], others: Sequence[int]) -> None:
        twin = next((index for index in others if not is_test[index]), None)
        if twin is not None:
            for index in some:
                if is_test[index]:
                    twin_of.setdefault(index, twin)

    for same in copies:
        match(same, same)
    n_exact = len(twin_of)
    for some, others in alike:
        match(some, others)
        match(others, some)
    examples = [f"{names[twin]} (train), {names[tested]} (test)" for tested, twin in twin_of.items()]
    return finding("duplicates-across-split", examples, exact=n_exact, near=len(twin_of) - n_exact)


def published_findings(classes: Sequence[ClassCounts], published: Dataset) -> Iterator[Finding]:
    missing, surplus = [], []
    n_missing, n_surplus = 0, Counter[str]()
    for name, part, here, there in _compared(classes, published):
        line = f"{name}{part and f' ({part})'}: {here:,} of {there:,}"
        if here < there:
            missing.append(line)
            n_missing += there - here
        elif here > there:
            surplus.append(line)
            n_surplus[part] += here - there
    yield finding("incomplete", missing, images=n_missing)
    spare = {**published.left_out, "": sum(published.left_out.values())}
    if any(n > spare.get(part, 0) for part, n in n_surplus.items()):
        yield finding("surplus", surplus, images=n_surplus.total())


def _compared(classes: Sequence[ClassCounts], published: Dataset) -> Iterator[tuple[str, str, int, int]]:
    """Yield (class, part, images here, images published), by parts where both sides have them."""
    counts = published.published_counts
    for label, c in enumerate(classes if counts else ()):
        if c.train is not None and c.test is not None and {"train", "test"} <= set(counts):
            yield c.name, "train", c.train, counts["train"][label]
            yield c.name, "test", c.test, counts["test"][label]
        else:
            yield c.name, "", c.images, sum(part[label] for part in counts.values())
    here = {"train": sum(c.train or 0 for c in classes), "test": sum(c.test or 0 for c in classes)}
    for part, there in published.published_sizes.items():
        yield "all classes", part, here[part], there
