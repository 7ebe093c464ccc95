"""New classes for a model: a new version beside the old one, and an honest account of what it cost."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medcil.build import build_method
from medcil.check.scan import Watch
from medcil.clinic.draft import Draft
from medcil.clinic.forgetting import forgetting, loss_in_points
from medcil.clinic.hold_out_recall import metrics, of_classes, predicted, sealed_or_exemplars
from medcil.clinic.holdout import Seen, eval_images, refuse_known_pictures, set_aside
from medcil.clinic.labelled_images import Measure, check_images, read_images
from medcil.clinic.learning import Lesson, calibrate_on, learn, provenance
from medcil.clinic.model_dir import FORMAT, ModelFolder, VersionFolder
from medcil.clinic.model_files import copy_files, same_files
from medcil.clinic.settings import Asked, Choice, settings_to_update
from medcil.clinic.train import Watches, describe, refuse_lost, refuse_strangers
from medcil.clinic.update_checks import refuse_blind_gate, refuse_known, refuse_settled, warn_of_unrehearsed
from medcil.clinic.update_cost import Estimate, estimate
from medcil.data.conflicts import REFUSE
from medcil.errors import InvalidInput, RunConflict
from medcil.methods.outline import try_out
from medcil.storage.atomic import flush_folder, read_json, write_json
from medcil.storage.os_errors import reading, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_data, refuse_within_model
from medcil.training.environment import prepare_machine
from medcil.training.state import State


@dataclass(frozen=True)
class Updated:
    model: Path
    version: str
    promoted: bool
    """Whether it is the current version; not where it forgot more than was allowed."""
    metrics: dict[str, Any]
    forgetting: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What an update would do."""

    version: str
    parent: str
    images: dict[str, int]
    """To train on, of each new class."""
    holdout: dict[str, int]
    choices: list[Choice]
    estimate: Estimate


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
) -> Updated | Plan:
    """Adds the classes of `new_data` to the current version.

    The new version becomes current by the last write, unless the old classes' mean recall fell by more than
    `max_forgetting` points. With `out`, the model stays as it is and a new folder gets both. Interrupted, the
    same call goes on. `conflicts` is as for `train`. With `dry_run` nothing is written, and what would be
    done is returned.
    """
    watches = watches or Watches()
    asked = Asked(method, epochs, exemplars, set=tuple(settings))
    asked.check()
    source = ModelFolder(Path(model))
    source.refuse_half_erased()
    target = source if out is None else _new_folder(ModelFolder(Path(out)), source)
    refuse_within_data(target.root, Path(new_data))
    with reading(source.root):
        place = _Place.of(source, target)
    _refuse_unlisted(place, target)
    if not dry_run:
        check_writable(target.root)
    lesson, choices = _lesson(place, Path(new_data), asked, holdout, conflicts, watches.checking)
    if place.is_listed and not Draft(target, place.name).is_of(lesson.request()):
        if target.root != source.root:
            raise _taken(target)
        place = _Place.after_current(source)
        _refuse_unlisted(place, target)
        lesson, choices = _lesson(place, Path(new_data), asked, holdout, conflicts, watches.checking)
    given_eval = None if eval is None else eval_images(Path(eval), lesson, place.seen())
    refuse_blind_gate(max_forgetting, given_eval, lesson)
    if dry_run:
        return _plan(place, lesson, choices)
    watches.settings(choices, lesson)
    with writing(target.root), target.locked():
        draft = Draft(target, place.name)
        if not place.is_listed:
            lesson = _settled(lesson, place, target)
            draft.begin(lesson.request())
            state = learn(draft, lesson, watches.training)
            _write_version(draft, lesson, state, given_eval, max_forgetting)
            is_promoted = draft.place.provenance()["promoted"]
            target.write((*place.versions, place.name), place.name if is_promoted else place.parent.name)
        target.copying_path.unlink(missing_ok=True)
        draft.clean()
    return _updated(target, draft.place)


@dataclass(frozen=True)
class _Place:
    """Which version is to be made of which."""

    source: ModelFolder
    name: str
    parent: VersionFolder
    versions: tuple[str, ...]
    """Those before it."""
    is_listed: bool = False
    """It is there and the model lists it: a command was killed after its last write, before it tidied up."""

    @classmethod
    def of(cls, source: ModelFolder, target: ModelFolder) -> "_Place":
        if target.exists and Draft(target, target.versions[-1]).is_begun:
            *before, name = target.versions
            parent = source.version(target.version(name).provenance()["parent"])
            return cls(source, name, parent, tuple(before), is_listed=True)
        return cls.after_current(source)

    @classmethod
    def after_current(cls, source: ModelFolder) -> "_Place":
        return cls(source, source.next_name(), source.version(), source.versions)

    def seen(self) -> Seen:
        return Seen.by(self.source, self.parent)


def _refuse_unlisted(place: _Place, target: ModelFolder) -> None:
    if not place.is_listed:
        Draft(target, place.name).refuse_unlisted()


def _new_folder(target: ModelFolder, source: ModelFolder) -> ModelFolder:
    new, old = target.root.resolve(), source.root.resolve()
    if new == old:
        raise InvalidInput(f"--out {target.root} is the model itself: leave it out, or give another folder.")
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise InvalidInput(f"--out {target.root}: one model cannot lie in another. Give a folder elsewhere.")
    refuse_within_model(new.parent)
    if target.exists and not Draft(target, target.versions[-1]).is_begun:
        raise _taken(target)
    refuse_strangers(target, target.copying_path.name)
    if not target.copying_path.exists():
        refuse_lost(target, own=())
    return target


def _taken(target: ModelFolder) -> RunConflict:
    return RunConflict(f"{target.root} is a model already and is left as it is. Give another --out.")


def _lesson(
    place: _Place, data: Path, asked: Asked, holdout: int | None, conflicts: str, watch: Watch
) -> tuple[Lesson, list[Choice]]:
    parent, read = place.parent, place.parent.sha256()
    state, facts = parent.load_state(), parent.provenance()
    given = read_images(data, fewest_classes=1).in_version(place.name).without_conflicts(conflicts)
    refuse_known(given.class_names, state.class_names, data)
    check_images(data, fewest_classes=1, conflicts=conflicts, watch=watch)
    refuse_known_pictures(given, state, parent, data)
    warn_of_unrehearsed(state)
    per_class = facts["holdout_per_class"] if holdout is None else holdout
    train, sealed = set_aside(given, per_class, seed=0, seen=place.seen())
    asked = asked.laid_over(facts["asked"])
    new_counts = list(given.counts(train).values())
    config, choices = settings_to_update(facts["settings"], state.inherent_counts.tolist(), new_counts, asked)
    refuse_settled(config, facts["settings"])
    prepare_machine(config.execution)
    try_out(build_method(config.method), state.network, crop=state.preprocessing.crop)
    lesson = Lesson(
        given=given,
        train=train,
        sealed=sealed,
        state=state,
        parent=parent,
        config=config,
        asked=asked,
        holdout_per_class=per_class,
        parent_sha256=read,
    )
    return lesson, choices


def _settled(lesson: Lesson, place: _Place, target: ModelFolder) -> Lesson:
    """Once the folder is locked: other commands may have changed the model while images were looked at.

    Above all, nobody who was forgotten meanwhile comes back with the exemplars that were read before.
    """
    source = place.source
    source.refuse_half_erased()
    if (source.versions, source.current) != (place.versions, place.parent.name):
        raise _changed(source.root)
    if target.root != source.root:
        _copy_versions(place, target)
    parent = VersionFolder(target.versions_path / place.parent.name)
    if parent.sha256() != lesson.parent_sha256:
        raise _changed(place.parent.root)
    for done in place.versions:
        Draft(target, done).clean()
    return replace(lesson, parent=parent)


def _changed(place: Path) -> RunConflict:
    return RunConflict(f"{place} was changed by another command meanwhile: run this one again.")


def _copy_versions(place: _Place, target: ModelFolder) -> None:
    """Into the new folder, each whole or not at all, and as it is now: after a command that was killed had
    copied it, a patient may have been forgotten."""
    write_json(target.copying_path, {"format": FORMAT})
    for name in place.versions:
        original, copy = place.source.version(name).root, target.versions_path / name
        part = target.versions_path / f".{name}.copy"
        if copy.exists() and not same_files(original, copy):
            warnings.warn(f"{name} has changed since it was copied: it is copied anew.", stacklevel=2)
            shutil.rmtree(copy)
        if not copy.exists():
            if part.exists():
                shutil.rmtree(part)
            if not _copied(original, part):
                raise _changed(original)
            part.rename(copy)
            flush_folder(target.versions_path)


def _copied(original: Path, copy: Path) -> bool:
    """Not where another command has changed the original meanwhile."""
    try:
        copy_files(original, copy)
        return same_files(original, copy)
    except FileNotFoundError:
        return False


def _write_version(
    draft: Draft, lesson: Lesson, state: State, given_eval: Measure | None, limit: float | None
) -> None:
    """What it cost, everything else beside the state, and then the version itself in its place."""
    version, execution, n_old = draft.version, lesson.config.execution, lesson.n_old
    sealed = sealed_or_exemplars(version, state, n_old=n_old)
    calibrate_on(draft, lesson, state, sealed, given_eval)
    measure = given_eval or sealed
    before = predicted(lesson.state, of_classes(measure, n_old).samples, execution)
    after = predicted(state, measure.samples, execution)
    cost = forgetting(measure, before, after, state.class_names, n_old)
    loss = loss_in_points(cost)
    passed = limit is None or (loss is not None and loss <= limit + 1e-9)
    cost["gate"] = {"max_forgetting": limit, "loss_in_points": loss, "passed": passed}
    facts = provenance(draft, lesson, promoted=passed)
    describe(version, facts, metrics(measure, after, state.class_names), cost, state.class_names)
    draft.finish()


def _plan(place: _Place, lesson: Lesson, choices: list[Choice]) -> Plan:
    return Plan(
        version=place.name,
        parent=place.parent.name,
        images=lesson.given.counts(lesson.train),
        holdout=lesson.given.counts(lesson.sealed),
        choices=choices,
        estimate=estimate(lesson),
    )


def _updated(model: ModelFolder, version: VersionFolder) -> Updated:
    facts = version.provenance()
    return Updated(
        model=model.root,
        version=version.name,
        promoted=facts["promoted"],
        metrics=version.metrics(),
        forgetting=read_json(version.forgetting_path),
        provenance=facts,
    )
