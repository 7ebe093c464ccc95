"""Which images are trained on, and which are sealed: of a patient, in all versions, all or none."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from medcil.clinic.labelled_images import Given, Indices, Measure, read_images
from medcil.clinic.learning import Lesson
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.clinic.patients import pixel_hashes
from medcil.data.samples import Samples
from medcil.data.sources.folder import folded
from medcil.data.splits import group_split
from medcil.data.wording import NO_PATIENTS
from medcil.errors import InvalidInput
from medcil.training.state import State

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
        trained = _with_files(version, "state/") + version.trained_patients()
        for _ in model.versions:  # no more than there are, whatever a damaged one says of its parent
            if (parent := version.provenance()["parent"]) is not None:
                version = model.version(parent)
                trained += version.trained_patients()
        return cls(frozenset(map(folded, sealed)), frozenset(map(folded, trained)))


def _with_files(version: VersionFolder, part: str) -> list[str]:
    return [who for who, files in version.people().items() if any(file.startswith(part) for file in files)]


def set_aside(
    given: Given, per_class: int, *, seed: int, seen: Seen | None = None
) -> tuple[Indices, Indices]:
    """The places of the images to train on, and of those that are sealed.

    Test images that came with the data are never trained on; the sealed ones are then some of them. Else they
    are drawn: of a patient, and of files that are the same, all or none. Whoever is sealed in an earlier
    version is not trained on now, and whoever was trained on is not sealed.
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


def _groups(given: Given) -> list[str]:
    """Patients, or files that are the same; patients who share a file are one group."""
    if given.groups is None:
        return list(given.sha256s)
    first_of: dict[str, str] = {}
    leader = {group: group for group in given.groups}

    def lead(group: str) -> str:
        while leader[group] != group:
            group = leader[group]
        return group

    for group, sha in zip(given.groups, given.sha256s, strict=True):
        leader[lead(group)] = lead(first_of.setdefault(sha, group))
    return [lead(group) for group in given.groups]


def _settled(given: Given, groups: Sequence[str], seen: Seen) -> tuple[set[str], set[str]]:
    """Groups of those who are sealed already, and of the others who were trained on."""
    if given.patients is None:
        return set(), set()
    names = [folded(patient) for patient in given.patients]
    held = {group for group, name in zip(groups, names, strict=True) if name in seen.sealed}
    kept = {group for group, name in zip(groups, names, strict=True) if name in seen.trained}
    return held, kept - held


def _some_apart(
    given: Given, groups: Sequence[str], train: Indices, kept: set[str], per_class: int, seed: int
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


def _look_at(given: Given, train: Indices, sealed: Indices, *, n_held: int, is_sealing: bool) -> None:
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


def refuse_known_pictures(given: Given, state: State, parent: VersionFolder, data: Path) -> None:
    """What the model keeps as another class would be trained on as both, or sealed and trained on."""
    kept = state.memory + parent.holdout()
    class_of = dict(zip(pixel_hashes(kept), kept.labels.tolist(), strict=True))
    if not class_of:
        return
    every = given.samples_of(np.arange(len(given)), state.preprocessing.side)
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


def eval_images(path: Path, lesson: Lesson, seen: Seen | None = None) -> Measure:
    """The images of `--eval`: of known classes, none of them trained on."""
    class_names, side = lesson.class_names, lesson.state.preprocessing.side
    given = read_images(path, fewest_classes=1)
    in_model = {folded(name): c for c, name in enumerate(class_names)}
    unknown = [name for name in given.class_names if folded(name) not in in_model]
    if unknown:
        raise InvalidInput(
            f"--eval {path} has the class {unknown[0]!r}, which the model does not know "
            f"({', '.join(class_names)}): rename the folder, or move it away."
        )
    samples = given.samples_of(np.arange(len(given)), side)
    exemplars = set(pixel_hashes(lesson.state.memory))
    files = set(lesson.given.sha256s)
    same = [
        name
        for name, sha, pixels in zip(given.names, given.sha256s, pixel_hashes(samples), strict=True)
        if sha in files or pixels in exemplars
    ]
    if same:
        raise InvalidInput(
            f"--eval {path} has {len(same)} images that are also given for training, or were ({same[0]}): "
            "take them out of one of the two."
        )
    _warn_of_trained_patients(given, lesson, seen or Seen())
    places = torch.tensor([in_model[folded(name)] for name in given.class_names])
    return Measure(Samples(samples.images, places[samples.labels]), given.names, "eval", given.groups)


def _warn_of_trained_patients(given: Given, lesson: Lesson, seen: Seen) -> None:
    now = lesson.given.patients
    trained = seen.trained | {folded(now[i]) for i in lesson.train.tolist() if now is not None}
    both = [who for who in given.patients or () if who and folded(who) in trained]
    if both:
        warnings.warn(
            f"{len(both)} of {len(given)} images of --eval are of patients who are trained on too: figures "
            "come out too high.",
            stacklevel=3,
        )
