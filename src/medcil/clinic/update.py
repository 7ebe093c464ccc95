"""Add classes to a model as a new version, measure what it cost; list versions and go back to one."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medcil.build import RunConfig
from medcil.check.scan import Watch
from medcil.clinic.holdout import Measure, Seen, read_images, refuse_known_pictures, set_aside
from medcil.clinic.model_dir import FORMAT, MANIFEST, Draft, ModelFolder, VersionFolder
from medcil.clinic.settings import Choice, Recipe, asked_keys, requested, settings_to_update
from medcil.clinic.train import (
    Lesson,
    Trained,
    Watches,
    check_new_model,
    eval_images,
    is_a_model,
    learn,
    ready_to_learn,
    write_version,
)
from medcil.data.image_table import REFUSE
from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.methods.outline import NOMINAL, outline
from medcil.recipe import leaves
from medcil.storage.atomic import flush_folder, reading, sha256, write_json, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_data, refuse_within_model
from medcil.training.state import State


@dataclass(frozen=True)
class Plan:
    """What an update would do, for `--dry-run`."""

    version: str
    parent: str
    images: dict[str, int]
    """Training images of each new class."""
    holdout: dict[str, int]
    choices: list[Choice]
    epochs: int
    images_per_epoch: int
    seconds: float | None
    """On a machine like the one that trained the parent; None if its pace is unknown."""


def update(
    model: Path | str,
    new_data: Path | str,
    *,
    out: Path | str | None = None,
    max_forgetting: float | None = None,
    dry_run: bool = False,
    eval: Path | str | None = None,
    holdout: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    exemplars: int | None = None,
    settings: Sequence[str] = (),
    conflicts: str = REFUSE,
    watches: Watches | None = None,
) -> Trained | Plan:
    """Add the classes of `new_data` to the current version.

    The new version becomes current by the last write, unless the old classes' mean recall fell by more than
    `max_forgetting` points. With `out`, the model stays as it is and a new folder gets both. Interrupted, the
    same call goes on. `conflicts` is as for `train`. With `dry_run` nothing is written, and what would be
    done is returned.
    """
    watches = watches or Watches()
    piece = requested(method=method, epochs=epochs, exemplars=exemplars, settings=settings)
    source = ModelFolder(Path(model))
    source.refuse_half_erased()
    target = source if out is None else _new_folder(ModelFolder(Path(out)), source)
    refuse_within_data(target.root, Path(new_data))
    with reading(source.root):
        place = _Place.of(source, target)
    if not dry_run:
        check_writable(target.root)
    lesson, choices = _lesson(place, Path(new_data), piece, holdout, conflicts, watches.checking)
    if place.is_listed and not place.draft.is_of(lesson.request()):
        if target.root != source.root:
            raise is_a_model(target)
        place = _Place.after_current(source, target)
        lesson, choices = _lesson(place, Path(new_data), piece, holdout, conflicts, watches.checking)
    measure = None if eval is None else eval_images(Path(eval), lesson, place.seen())
    refuse_blind_gate(max_forgetting, measure, lesson)
    if dry_run:
        return _plan(place, lesson, choices)
    watches.settings(choices, lesson)
    with writing(target.root), target.locked():
        if not place.is_listed:
            lesson = _settled(lesson, place)
            before = {name: place.copy(name).sha256 for name in place.versions}
            place.draft.begin(lesson.request())
            if target.root != source.root:
                _remove_unlisted_images(place)
            state = learn(place.draft, lesson, watches.training)
            passed = write_version(place.draft, lesson, state, measure, max_forgetting)
            current = place.name if passed else place.parent.name
            target.write({**before, place.name: place.draft.finish()}, current)
        target.copying_path.unlink(missing_ok=True)
        place.draft.clean()
    return Trained.read(target, target.version(place.name))


@dataclass(frozen=True)
class _Place:
    """The version to write, and its parent."""

    source: ModelFolder
    target: ModelFolder
    """The same folder, or a new one that gets copies of the versions."""
    name: str
    parent: VersionFolder
    versions: tuple[str, ...]
    """The versions before it."""
    is_listed: bool = False
    """The version is finished and listed: a command was killed before it cleaned up."""

    @classmethod
    def of(cls, source: ModelFolder, target: ModelFolder) -> "_Place":
        if target.exists and Draft(target, target.versions[-1]).is_begun:
            *before, name = target.versions
            parent = source.version(target.version(name).provenance()["parent"])
            return cls(source, target, name, parent, tuple(before), is_listed=True)
        return cls.after_current(source, target)

    @classmethod
    def after_current(cls, source: ModelFolder, target: ModelFolder) -> "_Place":
        place = cls(source, target, source.next_name(), source.version(), source.versions)
        place.draft.refuse_unlisted()
        return place

    @property
    def draft(self) -> Draft:
        return Draft(self.target, self.name)

    def seen(self) -> Seen:
        return Seen.by(self.source, self.parent)

    def copy(self, name: str) -> VersionFolder:
        """Open a version in the target."""
        if self.target.root == self.source.root:
            return self.source.version(name)
        folder = self.target.versions_path / name
        return VersionFolder.open(folder, self.target.images, sha256((folder / MANIFEST).read_bytes()))


def _new_folder(target: ModelFolder, source: ModelFolder) -> ModelFolder:
    new, old = target.root.resolve(), source.root.resolve()
    if new == old:
        raise InvalidInput(f"--out {target.root} is the model itself: leave it out, or give another folder.")
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise InvalidInput(f"--out {target.root}: one model cannot be inside another. Give another folder.")
    refuse_within_model(new.parent)
    check_new_model(target, target.copying_path)
    return target


def _lesson(
    place: _Place, data: Path, piece: Recipe, holdout: int | None, conflicts: str, watch: Watch
) -> tuple[Lesson, list[Choice]]:
    parent = place.parent
    state, facts = parent.load_state(), parent.provenance()
    table = read_images(
        data,
        state.preprocessing.side,
        version=place.name,
        fewest_classes=1,
        known_classes=state.class_names,
        conflicts=conflicts,
        watch=watch,
    )
    refuse_known_pictures(table, state, parent, data)
    warn_of_unrehearsed(state)
    per_class = facts["holdout_per_class"] if holdout is None else holdout
    split = set_aside(table, per_class, seed=0, seen=place.seen())
    recipe, asked = facts["settings"], facts["asked"]
    new_counts = list(table.counts(split[0]).values())
    config, choices = settings_to_update(recipe, asked, state.inherent_counts.tolist(), new_counts, piece)
    refuse_settled(config, recipe)
    ready_to_learn(config, state)
    asked = tuple(asked_keys(recipe, asked, piece))
    return Lesson(table, *split, state, parent, config, asked, per_class), choices


def _settled(lesson: Lesson, place: _Place) -> Lesson:
    """Check, once the folder is locked, that no other command changed the model while images were read.

    In particular, a patient who was erased meanwhile must not come back with exemplars read before.
    """
    source = place.source
    source.refuse_half_erased()
    if (source.versions, source.current) != (place.versions, place.parent.name):
        raise _changed(source.root)
    if place.target.root != source.root:
        _copy_versions(place)
    parent = place.copy(place.parent.name)
    if parent.sha256 != place.parent.sha256:
        raise _changed(place.parent.root)
    for name in place.versions:
        Draft(place.target, name).clean()
    return replace(lesson, parent=parent)


def _changed(place: Path) -> RunConflict:
    return RunConflict(
        f"{place} was changed by another command meanwhile: run this one again.", code="model.changed"
    )


def _copy_versions(place: _Place) -> None:
    """Copy the versions into the new folder, each whole or not at all, and as it is now.

    A patient may have been erased since a command that was killed had copied a version.
    """
    source, target = place.source, place.target
    write_json(target.copying_path, {"format": FORMAT})
    for name in place.versions:
        original, copy = source.version(name), target.versions_path / name
        part = target.versions_path / f".{name}.copy"
        if copy.exists() and sha256((copy / MANIFEST).read_bytes()) != original.sha256:
            warnings.warn(f"{name} has changed since it was copied: it is copied again.", stacklevel=2)
            shutil.rmtree(copy)
        if copy.exists():
            continue
        if part.exists():
            shutil.rmtree(part)
        try:
            original.copy_to(part, target.images)
        except DamagedFile:
            if source.hashes[name] == original.sha256:
                raise
        if source.hashes[name] != original.sha256:
            raise _changed(original.root)
        part.rename(copy)
        flush_folder(target.versions_path)


def _remove_unlisted_images(place: _Place) -> None:
    """Remove what an earlier attempt copied of a patient who has been erased since."""
    versions = [place.copy(name) for name in place.versions]
    place.target.images.remove_except(
        image for version in (*versions, place.draft.version) for image in version.image_names()
    )


CHANGEABLE = ("data.views", "data.augmentation")
"""Settings of `data` that nothing learned depends on."""


def refuse_settled(config: RunConfig, before: dict[str, Any]) -> None:
    """Refuse to change what the embeddings of the network depend on."""
    if config.data.root is not None:
        raise InvalidInput("data.root has no part in an update: its images are the folder or table you name.")
    was, asked = dict(leaves(before)), dict(leaves(config.identity()))
    for key, value in asked.items():
        is_settled = key.split(".")[0] in ("data", "network") and key not in CHANGEABLE
        if is_settled and was.get(key, value) != value:
            raise InvalidInput(
                f"{key}={value}: it was settled as {was[key]} when the model was trained. Leave it out; "
                "for another one train a new model with `medcil train`."
            )


def warn_of_unrehearsed(state: State) -> None:
    counts = state.memory.class_counts(len(state.class_names)).tolist()
    lacking = [name for name, n in zip(state.class_names, counts, strict=True) if not n]
    if lacking:
        warnings.warn(
            f"The model keeps no exemplar of {', '.join(lacking)}: nothing rehearses what it knows of it, "
            "and the update will forget more of it than of the others.",
            stacklevel=2,
        )


def refuse_blind_gate(limit: float | None, given_eval: Measure | None, lesson: Lesson) -> None:
    if limit is None:
        return
    if not 0 <= limit <= 100:
        raise InvalidInput(f"--max-forgetting {limit:g}: give points of recall from 0 to 100, such as 5.")
    assert lesson.parent is not None
    has_old = (
        len(lesson.parent.holdout_entries()) > 0
        if given_eval is None
        else bool((given_eval.samples.labels < lesson.n_old).any())
    )
    if not has_old:
        raise InvalidInput(
            "--max-forgetting needs images of the old classes that were not trained on, and there are none: "
            "give some with --eval."
        )


OLD_NETWORK = 4 / 3
"""Cost of a step with the old network's forward pass, relative to one without."""


def _plan(place: _Place, lesson: Lesson, choices: list[Choice]) -> Plan:
    epochs, n_images = lesson.config.training.epochs, len(lesson.train) + len(lesson.state.memory)
    facts = place.parent.provenance()
    pace = facts["images_per_second"]
    if pace and facts["parent"] is None:  # the first classes were learned without an old network
        pace /= OLD_NETWORK
    phases = outline(lesson.config.method)
    passes = sum(phase.epochs for phase in phases if phase.task == "later") / NOMINAL.epochs
    return Plan(
        version=place.name,
        parent=place.parent.name,
        images=lesson.table.counts(lesson.train),
        holdout=lesson.table.counts(lesson.sealed),
        choices=choices,
        epochs=epochs,
        images_per_epoch=n_images,
        seconds=passes * epochs * n_images / pace if pace else None,
    )


@dataclass(frozen=True)
class Past:
    """A version in the list."""

    version: str
    when: str
    parent: str | None
    classes_added: tuple[str, ...]
    n_classes: int
    images: int
    """Number of training images."""
    images_sha256: str | None
    """Of all images together; None if some were erased."""
    method: str
    measured_on: str
    accuracy: float | None
    balanced_accuracy: float | None
    change_of_old_recall: float | None
    """Change of the old classes' mean recall by the update; None for the first version."""
    is_promoted: bool
    """Whether it became current when it was written."""
    is_current: bool


def history(model: Path | str) -> tuple[Past, ...]:
    """Oldest first."""
    folder = ModelFolder(Path(model))
    current = folder.current
    return tuple(read_past(folder.version(name), is_current=name == current) for name in folder.versions)


def read_past(version: VersionFolder, *, is_current: bool) -> Past:
    facts, found = version.provenance(), version.metrics()
    cost = version.forgetting() or {}
    mean = cost.get("mean_recall_of_old_classes")
    return Past(
        version=version.name,
        when=facts["when"],
        parent=facts["parent"],
        classes_added=tuple(facts["classes_added"]),
        n_classes=len(version.class_names()),
        images=sum(facts["images"].values()),
        images_sha256=facts["images_sha256"],
        method=facts["settings"]["method"]["name"],
        measured_on=found["measured_on"],
        accuracy=found["accuracy"],
        balanced_accuracy=found["balanced_accuracy"],
        change_of_old_recall=None if mean is None else mean["change"],
        is_promoted=facts["promoted"],
        is_current=is_current,
    )


def rollback(model: Path | str, version: str) -> str:
    """Make a version current, an older or a newer one; return the one that was. Nothing is deleted."""
    folder = ModelFolder(Path(model))
    chosen, before = folder.version(version), folder.current
    chosen.load_state()  # raises if it cannot be loaded
    with folder.locked():
        folder.write(folder.hashes, chosen.name)
    return before
