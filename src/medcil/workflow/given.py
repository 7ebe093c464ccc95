"""The images someone gives: read, checked, and divided into what is trained on and what is sealed."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int

from medcil.check import Finding, Report, check, check_store
from medcil.check.look import Watch, unwatched
from medcil.data.catalog import Catalog
from medcil.data.own import read_own
from medcil.data.samples import Samples
from medcil.data.source import decoded
from medcil.data.splits import group_split
from medcil.data.store import Store, is_store, open_store
from medcil.errors import InvalidInput
from medcil.workflow.refused import reading

HOLDOUT = 20
"""Images of a class that are sealed, where it has five times as many."""
HOLDOUT_SHARE = 0.2
SHOWN = 5  # examples of a finding in a message

Indices = Int[np.ndarray, "_"]


@dataclass(frozen=True, eq=False)
class Given:
    """Images with their classes, none of them decoded for training yet."""

    names: tuple[str, ...]
    labels: Indices
    class_names: tuple[str, ...]
    groups: tuple[str, ...] | None
    patients: tuple[str, ...] | None
    """As they were named; empty where unknown."""
    is_test: Bool[np.ndarray, "_"] | None
    sha256s: tuple[str, ...]
    """Of the files."""
    samples_of: Callable[[Indices, int], Samples]
    """(which of them, side) -> with pixels of that side"""

    def __len__(self) -> int:
        return len(self.names)

    def counts(self, chosen: Indices) -> dict[str, int]:
        found = np.bincount(self.labels[chosen], minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, found, strict=True))

    def fingerprint(self) -> str:
        """The same for the same images of the same classes, whatever their names and wherever they lie."""
        entries = (
            f"{sha} {self.class_names[label]}"
            for sha, label in zip(self.sha256s, self.labels.tolist(), strict=True)
        )
        return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()


def read_images(path: Path, *, fewest_classes: int) -> Given:
    """A folder per class, a manifest, an archive of either, or a prepared store."""
    with reading(path):
        try:
            if is_store(path):
                return _of_store(open_store(path))
            return _of_catalog(read_own(path, fewest_classes=fewest_classes))
        except InvalidInput as error:
            raise InvalidInput(str(error).removeprefix("data.root: ")) from None


def _of_catalog(catalog: Catalog) -> Given:
    def sha256_of(index: int) -> str:
        return hashlib.sha256(catalog.read(index)).hexdigest()

    with ThreadPoolExecutor() as pool:
        sha256s = tuple(pool.map(sha256_of, range(len(catalog))))
    return Given(
        names=catalog.names,
        labels=catalog.labels,
        class_names=catalog.class_names,
        groups=catalog.groups,
        patients=catalog.patients,
        is_test=catalog.is_test,
        sha256s=sha256s,
        samples_of=lambda chosen, side: decoded(catalog, side, chosen),
    )


def _of_store(store: Store) -> Given:
    def samples_of(chosen: Indices, side: int) -> Samples:
        if side != store.images.side:
            raise InvalidInput(
                f"{store.folder} was prepared with side {store.images.side}, but the model needs {side}: "
                "give the images themselves, or a store of that side."
            )
        return store.samples().select(torch.from_numpy(chosen))

    numbered = None if store.groups is None else ["" if g.startswith("image ") else g for g in store.groups]
    return Given(
        names=store.names,
        labels=store.labels,
        class_names=store.class_names,
        groups=store.groups,
        patients=None if numbered is None else tuple(numbered),
        is_test=store.is_test,
        sha256s=store.sha256s,
        samples_of=samples_of,
    )


def check_images(path: Path, *, fewest_classes: int, watch: Watch = unwatched) -> Report:
    """The doctor's report. Errors stop; warnings are warned of."""
    with reading(path):
        if is_store(path):
            report = check_store(open_store(path, verify="sizes"), watch=watch)
        else:
            try:
                report = check(read_own(path, fewest_classes=fewest_classes), watch=watch)
            except InvalidInput as error:
                raise InvalidInput(str(error).removeprefix("data.root: ")) from None
    errors = [found for found in report.findings if found.severity == "error"]
    if errors:
        lines = [_said(found) for found in errors]
        raise InvalidInput(
            "\n  ".join([f"{path} cannot be learned from as it is. {lines[0]}", *lines[1:]])
            + f"\n`medcil check {path}` shows all that it found."
        )
    for found in report.findings:
        if found.severity == "warning":
            warnings.warn(_said(found), stacklevel=2)
    return report


def _said(found: Finding) -> str:
    examples = ", ".join(found.examples[:SHOWN]) + (", ..." if found.count > SHOWN else "")
    return f"{found.advice} ({examples})"


def typical_side(report: Report) -> int:
    """The median of the shorter sides, over the sizes that occur most."""
    sides = [side for size, n in report.sizes.items() for side in [min(map(int, size.split(" x ")))] * n]
    return sorted(sides)[len(sides) // 2]


def set_aside(given: Given, per_class: int, *, seed: int) -> tuple[Indices, Indices]:
    """The places of the images to train on, and of those that are sealed.

    Test images that came with the data are never trained on; the sealed ones are then some of them. Else they
    are drawn: of a patient, and of files that are the same, all or none.
    """
    every = np.arange(len(given))
    train = every if given.is_test is None else every[~given.is_test]
    if per_class == 0:
        return train, every[:0]
    if given.is_test is not None:
        sealed = _some_of_test(given, train, per_class, seed)
    else:
        groups = given.groups or given.sha256s
        sealed = every[group_split(given.labels, groups, share=HOLDOUT_SHARE, most=per_class, seed=seed)]
        train = np.setdiff1d(every, sealed)
    there = set(given.labels[sealed].tolist())
    lacking = [name for label, name in enumerate(given.class_names) if label not in there]
    if lacking:
        warnings.warn(
            f"No image of {', '.join(lacking)} can be set aside without its patient being trained on: how "
            "well it is recognized stays unknown. Add images of other patients, or give --eval.",
            stacklevel=2,
        )
    return train, sealed


def _some_of_test(given: Given, train: Indices, per_class: int, seed: int) -> Indices:
    groups: Sequence[str] = given.groups or given.sha256s
    trained = {groups[i] for i in train.tolist()}
    apart = [i for i in range(len(given)) if groups[i] not in trained]
    drawn = sorted(apart, key=lambda i: hashlib.sha256(f"{seed} {given.names[i]}".encode()).digest())
    chosen = [
        i
        for label in range(len(given.class_names))
        for i in [i for i in drawn if given.labels[i] == label][:per_class]
    ]
    return np.array(sorted(chosen), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Measure:
    """Images to measure a model on, and what they are called."""

    samples: Samples
    """Labels count the model's classes."""
    names: tuple[str, ...]
    kind: str
    """`hold-out`, `eval` or `exemplars`; the last were trained on."""


def eval_images(path: Path, class_names: Sequence[str], side: int, *, trained: Given) -> Measure:
    """The images of `--eval`: of known classes, none of them trained on."""
    given = read_images(path, fewest_classes=1)
    unknown = [name for name in given.class_names if name not in class_names]
    if unknown:
        raise InvalidInput(
            f"--eval {path} has the class {unknown[0]!r}, which the model does not know "
            f"({', '.join(class_names)}): rename the folder, or move it away."
        )
    same = set(given.sha256s) & set(trained.sha256s)
    if same:
        first = next(name for name, sha in zip(given.names, given.sha256s, strict=True) if sha in same)
        raise InvalidInput(
            f"--eval {path} has {len(same)} images that are also given for training ({first}): take them "
            "out of one of the two."
        )
    samples = given.samples_of(np.arange(len(given)), side)
    places = torch.tensor([list(class_names).index(name) for name in given.class_names])
    return Measure(Samples(samples.images, places[samples.labels]), given.names, "eval")


def samples_of_new(given: Given, chosen: Indices, side: int, *, n_old: int) -> Samples:
    """Labels count the model's classes, of which these are the newest."""
    samples = given.samples_of(chosen, side)
    return Samples(samples.images, samples.labels + n_old)
