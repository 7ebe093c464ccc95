"""Read and check labelled images, and choose which of them are sealed for measuring."""

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy.cluster.hierarchy import DisjointSet

from medcil.check import Finding, report_on
from medcil.check.scan import Side, Watch, scan, unwatched
from medcil.clinic.inference import digest
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.data.image_table import REFUSE, ImageTable, Indices, without_conflicts
from medcil.data.samples import Samples
from medcil.data.sources import list_images
from medcil.data.sources.folder import folded
from medcil.data.splits import NO_PATIENTS, group_split
from medcil.errors import InvalidInput
from medcil.storage.atomic import reading

AT_ONCE = 256  # images that are hashed together
SHOWN = 5  # examples of a finding in a message


def read_images(
    path: Path,
    side: Side,
    *,
    version: str,
    fewest_classes: int,
    known_classes: Sequence[str] = (),
    renamed: Callable[[ImageTable], ImageTable] = lambda table: table,
    conflicts: str = REFUSE,
    folder: Path | None = None,
    watch: Watch = unwatched,
) -> ImageTable:
    """List, check and decode labelled images, each file in one visit; `folder` is as for `scan`.

    `renamed` gives classes the names that the model knows them by, before any image is read. Errors raise,
    except conflicts that a rule decides; warnings are passed on. Prepared images have numbers in place of
    patients' ids. The version is added to them, because other images have the same numbers.
    """
    with reading(path):
        table = renamed(list_images(path, fewest_classes=fewest_classes))
        scanned, looks = scan(table, side, folder=folder, watch=watch)
        report = report_on(table, looks, folder=path, known_classes=known_classes)
    decided = () if conflicts == REFUSE else ("two-labels",)
    errors = [_sentence(f) for f in report.findings if f.severity == "error" and f.code not in decided]
    if errors:
        lines = "\n  ".join(errors)
        raise InvalidInput(
            f"{path} cannot be learned from as it is. {lines}\n`medcil check {path}` shows all findings.",
            code="data.check.failed",
        )
    for finding in report.findings:
        if finding.severity == "warning":
            warnings.warn(_sentence(finding), stacklevel=2)
    if table.pixels is not None and table.groups is not None:
        names = ("" if who.startswith("image ") else f"{who} of {version}" for who in table.groups)
        scanned = replace(scanned, patients=tuple(names))
    if conflicts == REFUSE:
        return scanned
    used = without_conflicts(scanned, conflicts)
    if left_out := len(table) - len(used):
        warnings.warn(f"{left_out} images are left out: the same picture is in another class.", stacklevel=2)
    return used


def _sentence(finding: Finding) -> str:
    examples = ", ".join(finding.examples[:SHOWN]) + (", ..." if finding.count > SHOWN else "")
    return f"{finding.advice} ({examples})"


@dataclass(frozen=True, eq=False)
class Measure:
    """Images to measure a model on."""

    samples: Samples
    """Labels count the model's classes."""
    names: tuple[str, ...]
    kind: str
    """`hold-out`, `eval` or `exemplars`; the last were trained on."""
    groups: tuple[str, ...] | None = None
    """The patient of each image, where patients are known."""


HOLDOUT = 200
"""Images of a class that are sealed at most, where a fifth of it is more."""
HOLDOUT_SHARE = 0.2


@dataclass(frozen=True)
class Seen:
    """Patients of earlier versions, as `folded` writes them."""

    sealed: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()

    @classmethod
    def by(cls, model: ModelFolder, version: VersionFolder) -> "Seen":
        """Collect the patients of a version and its parents.

        The last hold-out has everyone who is sealed; each version lists whom it was trained on.
        """
        sealed, trained = _with_files(version, "holdout/"), _with_files(version, "exemplars/")
        for earlier in lineage(model, version):
            trained += earlier.trained_patients()
        return cls(frozenset(map(folded, sealed)), frozenset(map(folded, trained)))


def lineage(model: ModelFolder, version: VersionFolder) -> Iterator[VersionFolder]:
    """Yield a version, its parent, and so on."""
    for _ in model.versions:  # no more than there are, whatever a damaged one says of its parent
        yield version
        if (parent := version.provenance()["parent"]) is None:
            return
        version = model.version(parent)


def _with_files(version: VersionFolder, part: str) -> list[str]:
    return [who for who, files in version.people().items() if any(file.startswith(part) for file in files)]


def set_aside(
    table: ImageTable,
    per_class: int,
    *,
    seed: int,
    seen: Seen | None = None,
    unsealed: Collection[str] = (),
) -> tuple[Indices, Indices]:
    """Choose the images to train on, and those to seal; return the places of both.

    Validation and test images that came with the data are never trained on. The sealed images are some of
    those for validation, or else of those for the test. Without such a part they are drawn: all images of a
    patient and all copies of a file, or none. A patient who is sealed in an earlier version is not trained on
    now, and one who was trained on is not sealed. Nobody is sealed for
    the sake of `unsealed` classes alone.
    """
    groups = _groups(table)
    held, kept = _settled(table, groups, seen or Seen())
    sought = [table.class_names[label] not in unsealed for label in table.labels.tolist()]
    kept |= {*groups} - held - {group for group, is_sought in zip(groups, sought, strict=True) if is_sought}
    every = np.arange(len(table))
    is_held = np.array([group in held for group in groups], dtype=bool)
    if (is_kept_out := table.is_kept_out) is not None or per_class == 0:
        train = every[~is_held if is_kept_out is None else ~(is_held | is_kept_out)]
        sealed = _some_apart(table, groups, train, kept, per_class, seed)
    else:
        drawn = group_split(
            table.labels, groups, share=HOLDOUT_SHARE, most=per_class, held=held, kept=kept, seed=seed
        )
        train, sealed = every[~drawn], every[drawn]
    sealing = {*table.class_names} - {*unsealed} if per_class > 0 else set[str]()
    _look_at(table, train, sealed, n_held=int(is_held.sum()), sealing=sealing)
    return train, sealed


def _groups(table: ImageTable) -> list[str]:
    """Group images by patient, or copies of a file; patients who share a file are one group."""
    files = [str(sha256) for sha256 in table.sha256 or ()]
    groups = table.groups or files
    first_of: dict[str, str] = {}
    together = DisjointSet(dict.fromkeys(groups))
    for group, sha256 in zip(groups, files, strict=True):
        together.merge(first_of.setdefault(sha256, group), group)
    return [together[group] for group in groups]


def _settled(table: ImageTable, groups: Sequence[str], seen: Seen) -> tuple[set[str], set[str]]:
    """Return the groups that are sealed already, and the others that were trained on."""
    if table.patients is None:
        return set(), set()
    named = list(zip(groups, map(folded, table.patients), strict=True))
    held = {group for group, name in named if name in seen.sealed}
    return held, {group for group, name in named if name in seen.trained} - held


def _some_apart(
    table: ImageTable, groups: Sequence[str], train: Indices, kept: set[str], per_class: int, seed: int
) -> Indices:
    """Choose images of each class, none of a patient who is trained on."""
    trained = {groups[i] for i in train.tolist()} | kept
    may_be_sealed = np.ones(len(table), bool) if table.is_validation is None else table.is_validation
    apart = [i for i in np.flatnonzero(may_be_sealed).tolist() if groups[i] not in trained]
    drawn = sorted(apart, key=lambda i: hashlib.sha256(f"{seed} {table.names[i]}".encode()).digest())
    of_class = ([i for i in drawn if table.labels[i] == c] for c in range(len(table.class_names)))
    return np.array(sorted(i for own in of_class for i in own[:per_class]), dtype=np.int64)


def _look_at(
    table: ImageTable, train: Indices, sealed: Indices, *, n_held: int, sealing: Collection[str]
) -> None:
    if table.groups is None:
        warnings.warn(NO_PATIENTS, stacklevel=3)
    untaught = [name for name, n in table.counts(train).items() if not n]
    if untaught and n_held:
        raise InvalidInput(
            f"All images of {untaught[0]!r} are of patients who are sealed in the model. Add other patients."
        )
    if n_held:
        warnings.warn(f"{n_held} images are of sealed patients, and not trained on.", stacklevel=3)
    lacking = [name for name, n in table.counts(sealed).items() if not n and name in sealing]
    if lacking:
        names = ", ".join(lacking)
        warnings.warn(
            f"No image of {names} is of a patient who is not trained on: how well it is recognized stays "
            "unknown. Add images of other patients, or give --eval.",
            stacklevel=3,
        )


def pixel_hashes(samples: Samples) -> Iterator[bytes]:
    """Hash decoded images: the same picture in another file has the same hash."""
    for indices in torch.split(torch.arange(len(samples)), AT_ONCE):
        for image in samples.images.read(indices):
            yield digest(image.numpy())
