"""The images someone gives: read and checked."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from medcil.check import Finding, report_on
from medcil.check.scan import Side, Watch, scan, unwatched
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.data.image_table import REFUSE, ImageTable, Indices, without_conflicts
from medcil.data.samples import Samples
from medcil.data.sources import list_images
from medcil.data.sources.folder import folded
from medcil.data.splits import NO_PATIENTS, group_split
from medcil.errors import InvalidInput
from medcil.storage.atomic import reading
from medcil.training.state import State

AT_ONCE = 256  # images that are hashed together
SHOWN = 5  # examples of a finding in a message


def read_images(
    path: Path,
    side: Side,
    *,
    version: str,
    fewest_classes: int,
    known_classes: Sequence[str] = (),
    conflicts: str = REFUSE,
    watch: Watch = unwatched,
) -> ImageTable:
    """List, check and decode labelled images, each file in one visit.

    Errors raise, but for conflicts that a rule decides; warnings are passed on. Prepared images have numbers
    in place of patients' ids: they become names in this version, since other images have the same numbers.
    """
    with reading(path):
        table = list_images(path, fewest_classes=fewest_classes)
        _refuse_known(table.class_names, known_classes, path)
        scanned = scan(table, side, watch=watch)
        report = report_on(table, scanned.looks, folder=path)
    decided = () if conflicts == REFUSE else ("two-labels",)
    errors = [found for found in report.findings if found.severity == "error" and found.code not in decided]
    if errors:
        lines = [_said(found) for found in errors]
        raise InvalidInput(
            "\n  ".join([f"{path} cannot be learned from as it is. {lines[0]}", *lines[1:]])
            + f"\n`medcil check {path}` shows all that it found.",
            code="data.check.failed",
        )
    for found in report.findings:
        if found.severity == "warning":
            warnings.warn(_said(found), stacklevel=2)
    if table.pixels is not None and table.groups is not None:
        names = ("" if who.startswith("image ") else f"{who} of {version}" for who in table.groups)
        scanned = replace(scanned, table=replace(scanned.table, patients=tuple(names)))
    if conflicts == REFUSE:
        return scanned.table
    used = without_conflicts(scanned.table, conflicts)
    if left_out := len(table) - len(used):
        warnings.warn(f"{left_out} images are left out: the same picture is in another class.", stacklevel=2)
    return used


def _refuse_known(new: Sequence[str], known: Sequence[str], data: Path) -> None:
    taken = set(map(folded, known))
    same = [name for name in new if folded(name) in taken]
    if same:
        raise InvalidInput(
            f"{data} has the class {same[0]!r}, which the model knows already: move that folder away and "
            "update with the others. If it is another class, give it another name; to learn a known class "
            "from more images, train a new model with `medcil train`.\n"
            f"The model knows: {', '.join(known)}.",
            code="model.class.known",
        )


def _said(found: Finding) -> str:
    examples = ", ".join(found.examples[:SHOWN]) + (", ..." if found.count > SHOWN else "")
    return f"{found.advice} ({examples})"


@dataclass(frozen=True, eq=False)
class Measure:
    """Images to measure a model on, and what they are called."""

    samples: Samples
    """Labels count the model's classes."""
    names: tuple[str, ...]
    kind: str
    """`hold-out`, `eval` or `exemplars`; the last were trained on."""
    groups: tuple[str, ...] | None = None
    """Whose image each is, where patients are known."""

    def groups_where(self, chosen: Bool[np.ndarray, "_"]) -> tuple[str, ...] | None:
        if self.groups is None:
            return None
        return tuple(
            group for group, is_chosen in zip(self.groups, chosen.tolist(), strict=True) if is_chosen
        )


HOLDOUT = 20
"""Images of a class that are sealed, where it has five times as many."""
HOLDOUT_SHARE = 0.2


@dataclass(frozen=True)
class Seen:
    """Patients of earlier versions, as `folded` writes them."""

    sealed: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()

    @classmethod
    def by(cls, model: ModelFolder, version: VersionFolder) -> "Seen":
        """Its hold-out has everybody who is sealed; whom it was trained on, each version says of itself."""
        sealed = _with_files(version, "holdout/")
        trained = _with_files(version, "exemplars/") + version.trained_patients()
        for _ in model.versions:  # no more than there are, whatever a damaged one says of its parent
            if (parent := version.provenance()["parent"]) is not None:
                version = model.version(parent)
                trained += version.trained_patients()
        return cls(frozenset(map(folded, sealed)), frozenset(map(folded, trained)))


def _with_files(version: VersionFolder, part: str) -> list[str]:
    return [who for who, files in version.people().items() if any(file.startswith(part) for file in files)]


def set_aside(
    given: ImageTable, per_class: int, *, seed: int, seen: Seen | None = None
) -> tuple[Indices, Indices]:
    """The places of the images to train on, and of those that are sealed.

    Test images that came with the data are never trained on; the sealed ones are then some of them. Else they
    are drawn: of a patient, and of files that are the same, all or none. A patient sealed in an earlier
    version is not trained on now, and one trained on is not sealed.
    """
    groups = _groups(given)
    held, kept = _settled(given, groups, seen or Seen())
    every = np.arange(len(given))
    is_held = np.array([group in held for group in groups], dtype=bool)
    if given.is_test is not None or per_class == 0:
        train = every[~is_held if given.is_test is None else ~(is_held | given.is_test)]
        sealed = _some_apart(given, groups, train, kept, per_class, seed)
    else:
        drawn = group_split(
            given.labels, groups, share=HOLDOUT_SHARE, most=per_class, held=held, kept=kept, seed=seed
        )
        train, sealed = every[~drawn], every[drawn]
    _look_at(given, train, sealed, n_held=int(is_held.sum()), is_sealing=per_class > 0)
    return train, sealed


def _groups(given: ImageTable) -> list[str]:
    """Patients, or files that are the same; patients who share a file are one group."""
    if given.groups is None:
        return _files(given)
    first_of: dict[str, str] = {}
    leader = {group: group for group in given.groups}

    def lead(group: str) -> str:
        while leader[group] != group:
            group = leader[group]
        return group

    for group, sha in zip(given.groups, _files(given), strict=True):
        leader[lead(group)] = lead(first_of.setdefault(sha, group))
    return [lead(group) for group in given.groups]


def _files(given: ImageTable) -> list[str]:
    return [str(sha256) for sha256 in given.sha256 or ()]


def _settled(given: ImageTable, groups: Sequence[str], seen: Seen) -> tuple[set[str], set[str]]:
    """Groups of those who are sealed already, and of the others who were trained on."""
    if given.patients is None:
        return set(), set()
    names = [folded(patient) for patient in given.patients]
    held = {group for group, name in zip(groups, names, strict=True) if name in seen.sealed}
    kept = {group for group, name in zip(groups, names, strict=True) if name in seen.trained}
    return held, kept - held


def _some_apart(
    given: ImageTable, groups: Sequence[str], train: Indices, kept: set[str], per_class: int, seed: int
) -> Indices:
    """Of each class so many that no patient trained on is among them."""
    trained = {groups[i] for i in train.tolist()} | kept
    apart = [i for i in range(len(given)) if groups[i] not in trained]
    drawn = sorted(apart, key=lambda i: hashlib.sha256(f"{seed} {given.names[i]}".encode()).digest())
    chosen = [
        i
        for label in range(len(given.class_names))
        for i in [i for i in drawn if given.labels[i] == label][:per_class]
    ]
    return np.array(sorted(chosen), dtype=np.int64)


def _look_at(given: ImageTable, train: Indices, sealed: Indices, *, n_held: int, is_sealing: bool) -> None:
    if given.groups is None:
        warnings.warn(NO_PATIENTS, stacklevel=3)
    untaught = [name for name, n in given.counts(train).items() if not n]
    if untaught and n_held:
        raise InvalidInput(
            f"All images of {untaught[0]!r} are of patients whose images are sealed in the model: they are "
            "there to measure on, and never trained on. Add images of other patients."
        )
    if n_held:
        warnings.warn(
            f"{n_held} images are of patients whose images are sealed in the model: they are not trained on.",
            stacklevel=3,
        )
    lacking = [name for name, n in given.counts(sealed).items() if not n]
    if lacking and is_sealing:
        warnings.warn(
            f"No image of {', '.join(lacking)} can be set aside without its patient being trained on: how "
            "well it is recognized stays unknown. Add images of other patients, or give --eval.",
            stacklevel=3,
        )


def refuse_known_pictures(given: ImageTable, state: State, parent: VersionFolder, data: Path) -> None:
    """What the model keeps as another class would be trained on as both, or sealed and trained on."""
    kept = state.memory + parent.holdout()
    class_of = dict(zip(pixel_hashes(kept), kept.labels.tolist(), strict=True))
    if not class_of:
        return
    every = given.samples(state.preprocessing.side)
    same = [
        (name, class_of[pixels])
        for name, pixels in zip(given.names, pixel_hashes(every), strict=True)
        if pixels in class_of
    ]
    if same:
        name, label = same[0]
        raise InvalidInput(
            f"{data} has {len(same)} pictures that the model keeps as another class ({name}: "
            f"{state.class_names[label]!r}): one picture cannot be of both. Take them out."
        )


def pixel_hashes(samples: Samples) -> Iterator[bytes]:
    """The same for the same picture, from whatever file."""
    for start in range(0, len(samples), AT_ONCE):
        indices = torch.arange(start, min(start + AT_ONCE, len(samples)))
        yield from _digests(samples.images.read(indices))


def _digests(images: UInt8[Tensor, "n 3 side side"]) -> Iterable[bytes]:
    return [hashlib.sha256(image.contiguous().numpy().tobytes()).digest() for image in images]
