"""Which images are held out for the test: the split that came with the data, or one drawn here.

A patient or lesion with images on both sides makes a test too easy: where groups are known, they stay whole.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from medcil.config import DataConfig, LongTailConfig, SplitRule
from medcil.data.image_table import ImageTable
from medcil.errors import InvalidInput

NO_PATIENTS = (
    "No patient is known, so images of one may be in training and in the test. Name the patients in the "
    "column `patient` of a manifest, unless every image is of another patient."
)
PASSES = 20  # of the refinement; it ends when nothing improves, on real data after two or three


def train_and_test(
    table: ImageTable, data: DataConfig, tail: LongTailConfig | None
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """Return what a run tests on, in words, and the places of the images it trains and tests on."""
    rule, train, test = split(table, rule=data.split, share=data.split_share, seed=data.split_seed)
    if tail is not None:
        train = _thinned_out(table, train, ratio=tail.ratio, seed=tail.seed)
    if data.held_out is None:
        return rule, train, test
    return _set_apart(table, train, rule=rule, share=data.held_out, seed=data.split_seed)


def split(
    table: ImageTable, *, rule: SplitRule | None, share: float, seed: int
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """Return the rule that was followed, and the places of the training and the test images.

    A rule takes the data's own split, or draws one by groups or by single images. Without a rule, the most
    trustworthy that the data allows is followed.
    """
    rule = rule or _most_trustworthy_rule(table)
    if rule in ("benchmark", "given"):
        if table.is_test is None:
            raise InvalidInput(f"data.split is {rule}, but no split came with these images: write images.")
        is_test = is_kept_out = table.is_test
        if table.is_validation is not None:
            is_kept_out = is_test | table.is_validation
        if rule == "given":  # a benchmark's split is wanted as it was published
            _warn_of_shared_groups(table)
    elif rule == "groups" and table.groups is None:
        raise InvalidInput(
            "data.split is groups, but nothing says which patient an image is of. Give a manifest."
        )
    else:
        groups = table.groups if rule == "groups" else None
        is_test = is_kept_out = group_split(table.labels, groups, share=share, seed=seed)
    _warn_of_untested_classes(table, is_test)
    return rule, np.flatnonzero(~is_kept_out), np.flatnonzero(is_test)


def _most_trustworthy_rule(table: ImageTable) -> SplitRule:
    if table.is_test is not None:
        return "given"
    if table.published_as is not None:
        problem = f"The lists of {table.published_as}'s published split are not among its files"
        advice = "another split is drawn, whose results are not comparable with published ones."
        warnings.warn(f"{problem}: {advice} Write `data.split` if this is meant.", stacklevel=3)
    if table.groups is not None:
        return "groups"
    warnings.warn(
        "No split and no patients came with these images: a patient may appear on both sides. Name the "
        "patients in a manifest, or write `data.split: images` if every image is of another patient.",
        stacklevel=3,
    )
    return "images"


def _warn_of_shared_groups(table: ImageTable) -> None:
    if table.groups is None or table.is_test is None:
        return
    groups = np.array(table.groups)
    tested = groups[table.is_test]
    shared = tested[np.isin(tested, groups[~table.is_test])]
    if len(shared):
        n_groups = len(np.unique(shared))
        warnings.warn(
            f"{n_groups:,} patients or lesions appear on both sides of the given split: {len(shared):,} of "
            f"{len(tested):,} test images have theirs in training. Write `data.split: groups`.",
            stacklevel=3,
        )


def _warn_of_untested_classes(table: ImageTable, is_test: Bool[np.ndarray, "n"]) -> None:
    if not is_test.any():
        raise InvalidInput("data.split leaves no image to test on: add test images, or let a split be drawn.")
    untested = sorted(set(range(len(table.class_names))) - set(table.labels[is_test].tolist()))
    if untested:
        names = ", ".join(table.class_names[c] for c in untested)
        warnings.warn(f"There is no image to test on of {names}: their recall stays unknown.", stacklevel=3)


def _set_apart(
    table: ImageTable, train: Int[np.ndarray, "n"], *, rule: str, share: float, seed: int
) -> tuple[str, Int[np.ndarray, "train"], Int[np.ndarray, "test"]]:
    """Return what is tested on, in words, and the places of the training images that stay and are held out.

    Whole patients or lesions wherever they are known, by whatever rule the test was split off.
    """
    groups = None if table.groups is None else [table.groups[i] for i in train.tolist()]
    is_held = group_split(table.labels[train], groups, share=share, seed=seed)
    without = set(table.labels[train].tolist()) - set(table.labels[train[is_held]].tolist())
    lacking = [table.class_names[c] for c in sorted(without)]
    if lacking:
        what = "image" if groups is None else "patient or lesion"
        problem = f"There is no more than one {what} of {', '.join(lacking)} to train on"
        warnings.warn(f"{problem}: none can be held out, and their recall stays unknown.", stacklevel=2)
    unit = "images" if groups is None else "groups"
    said = f"{share:g} of the training images, held out by {unit} ({rule} test not read)"
    return said, train[~is_held], train[is_held]


def _thinned_out(
    table: ImageTable, train: Int[np.ndarray, "n"], *, ratio: float, seed: int
) -> Int[np.ndarray, "m"]:
    """Return the training images that a long tail leaves: one at least of each class that has any."""
    kept = train[long_tail(table.labels[train], ratio=ratio, seed=seed)]
    lost = set(table.labels[train].tolist()) - set(table.labels[kept].tolist())
    if lost:
        problem = f"leaves no training image of {table.class_names[min(lost)]!r}"
        raise InvalidInput(f"scenario.long_tail.ratio {ratio:g} {problem}: raise it, or add images.")
    return np.asarray(kept)


def group_split(
    labels: Int[np.ndarray, "n"],
    groups: Sequence[str] | None,
    *,
    share: float = 0.2,
    most: int | None = None,
    held: Collection[str] = (),
    kept: Collection[str] = (),
    seed: int,
) -> Bool[np.ndarray, "n"]:
    """Hold out about this share of every class, and of a group all or nothing; True where an image is.

    Without groups, each image is one. Every class keeps a training image, and every class of two or more
    groups gets a test image, unless each of its groups is all that another class has left for training. Where
    no group has images of two classes, a class's held-out images differ from its share by at most its largest
    group, and by at most one image where groups are single images. With `most`, what is aimed at is the share
    rounded down, but at least one image and at most this many. Groups that are to be `held` out are, whatever
    is left to train on, and those to be `kept` are not.

    The draw hashes the seed with a group's name: it depends neither on the order of the images nor on a
    library's version. Without groups, an image's name is its place.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of held-out images must be between 0 and 1, not {share}")
    names = range(len(labels)) if groups is None else groups
    draw = _Draw(names, labels.tolist(), share=share, most=most, seed=seed)
    draw.settle(held, kept)
    draw.fill()
    draw.complete()
    draw.refine()
    draw.complete()
    return np.array([name in draw.held for name in names], dtype=bool)


class _Draw:
    """A split in the making: groups move to the held-out side and back, with the counts they change."""

    def __init__(
        self,
        names: Sequence[Hashable],
        labels: Sequence[int],
        *,
        share: float,
        most: int | None,
        seed: int,
    ) -> None:
        self.content: dict[Hashable, Counter[int]] = {name: Counter() for name in _shuffled(names, seed)}
        for name, label in zip(names, labels, strict=True):
            self.content[name][label] += 1
        self.total = Counter(labels)
        self.target = {
            c: share * n if most is None else min(most, max(1, int(share * n))) for c, n in self.total.items()
        }
        self.groups_of: dict[int, list[Hashable]] = {c: [] for c in sorted(self.total)}
        for name, content in self.content.items():
            for c in content:
                self.groups_of[c].append(name)
        self.held: set[Hashable] = set()
        self.n_held: Counter[int] = Counter()
        self.n_left = {c: len(found) for c, found in self.groups_of.items()}  # groups to train on
        self.settled: set[Hashable] = set()

    def settle(self, held: Collection[Hashable], kept: Collection[Hashable]) -> None:
        """Fix the side of groups that are not drawn."""
        for name in held:
            self._move(name)
        self.settled.update(held, kept)

    def fill(self) -> None:
        """Hold out what brings each class nearer its share, the class with the fewest groups first."""
        decided: set[Hashable] = set()
        for c in sorted(self.groups_of, key=lambda c: (len(self.groups_of[c]), c)):
            for name in self.groups_of[c]:
                is_nearer = self.content[name][c] <= 2 * (self.target[c] - self.n_held[c])
                if name not in decided and is_nearer and self._can_be_held(name):
                    self._move(name)
                decided.add(name)

    def complete(self) -> None:
        """Hold out an image of each class without one, unless it is another class's last to train on."""
        lacking = [c for c, found in self.groups_of.items() if len(found) > 1 and not self.n_held[c]]
        for c in lacking:
            possible = [name for name in self.groups_of[c] if self._can_be_held(name)]
            if possible and not self.n_held[c]:
                self._move(min(possible, key=lambda name: self.content[name][c]))

    def refine(self) -> None:
        """Move single groups, as long as that brings the classes nearer their shares."""
        for _ in range(PASSES):
            moved = False
            for name in self.content:
                is_possible = self._can_be_freed(name) if name in self.held else self._can_be_held(name)
                if is_possible and self._gain(name) > 1e-12:
                    self._move(name)
                    moved = True
            if not moved:
                return

    def _can_be_held(self, name: Hashable) -> bool:
        is_free = name not in self.held and name not in self.settled
        return is_free and all(self.n_left[c] > 1 for c in self.content[name])

    def _can_be_freed(self, name: Hashable) -> bool:
        return name not in self.settled and all(self.n_held[c] > n for c, n in self.content[name].items())

    def _gain(self, name: Hashable) -> float:
        """Return by how much the squared errors of the shares fall when this group changes sides."""
        sign = -1 if name in self.held else 1
        gain = 0.0
        for c, n in self.content[name].items():
            error = self.n_held[c] - self.target[c]
            gain += (error**2 - (error + sign * n) ** 2) / self.total[c] ** 2
        return gain

    def _move(self, name: Hashable) -> None:
        sign = -1 if name in self.held else 1
        self.held ^= {name}
        for c, n in self.content[name].items():
            self.n_held[c] += sign * n
            self.n_left[c] -= sign


def _shuffled(names: Sequence[Hashable], seed: int) -> list[Hashable]:
    return sorted(set(names), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())


def long_tail_counts(n_max: int, n_classes: int, *, ratio: float) -> tuple[int, ...]:
    """int(n_max · ratio^(i / (C - 1))) for i = 0 .. C - 1: from n_max down to ratio · n_max."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}, but the last class is a share of the first: 0 < ratio <= 1")
    return tuple(int(n_max * ratio ** (i / max(n_classes - 1, 1))) for i in range(n_classes))


def long_tail(labels: Int[np.ndarray, "n"], *, ratio: float, seed: int) -> Int[np.ndarray, "m"]:
    """Return the indices of the images that stay, ascending.

    The largest class sets n_max. Classes shrink in the order of their index; a class that is smaller than its
    share already stays whole. The choice: numpy's legacy generator with this seed shuffles class after class,
    and the first ones stay, as in the usual long-tailed CIFAR.
    """
    sizes = np.bincount(labels)
    counts = long_tail_counts(int(sizes.max()), len(sizes), ratio=ratio)
    generator = np.random.RandomState(seed)
    kept = []
    for c in range(len(sizes)):
        members = np.flatnonzero(labels == c)
        generator.shuffle(members)
        kept.append(members[: counts[c]])
    return np.sort(np.concatenate(kept))
