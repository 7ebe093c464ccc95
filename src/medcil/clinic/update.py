"""Add classes to a model as a new version, measure what it cost; list versions and go back to one."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medcil.build import build_method
from medcil.check.scan import Watch
from medcil.clinic.holdout import (
    Measure,
    Seen,
    read_images,
    refuse_known_pictures,
    set_aside,
)
from medcil.clinic.measure import (
    forgetting,
    loss_in_points,
    metrics,
    of_classes,
    predicted,
    sealed_or_exemplars,
)
from medcil.clinic.model_dir import FORMAT, MANIFEST, Draft, ModelFolder, VersionFolder
from medcil.clinic.settings import Choice, Recipe, asked_keys, requested, settings_to_update
from medcil.clinic.train import (
    Lesson,
    Watches,
    calibrate_on,
    describe,
    eval_images,
    learn,
    provenance,
    refuse_lost,
    refuse_strangers,
)
from medcil.config import RunConfig
from medcil.data.image_table import REFUSE
from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.methods.outline import NOMINAL, outline, try_out
from medcil.recipe import leaves
from medcil.storage.atomic import flush_folder, reading, sha256, write_json, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_data, refuse_within_model
from medcil.training.environment import prepare_machine
from medcil.training.state import State


@dataclass(frozen=True)
class Updated:
    model: Path
    version: str
    promoted: bool
    """Whether it became current; False if it forgot more than allowed."""
    metrics: dict[str, Any]
    forgetting: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    images_per_epoch: int
    epochs: int
    seconds: float | None
    """On a machine like the one that trained the parent; None if its pace is unknown."""
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """What an update would do, for `--dry-run`."""

    version: str
    parent: str
    images: dict[str, int]
    """Training images of each new class."""
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
    piece = requested(method=method, epochs=epochs, exemplars=exemplars, settings=settings)
    source = ModelFolder(Path(model))
    source.refuse_half_erased()
    target = source if out is None else _new_folder(ModelFolder(Path(out)), source)
    refuse_within_data(target.root, Path(new_data))
    with reading(source.root):
        place = _Place.of(source, target)
    _refuse_unlisted(place, target)
    if not dry_run:
        check_writable(target.root)
    lesson, choices = _lesson(place, Path(new_data), piece, holdout, conflicts, watches.checking)
    if place.is_listed and not Draft(target, place.name).is_of(lesson.request()):
        if target.root != source.root:
            raise _taken(target)
        place = _Place.after_current(source)
        _refuse_unlisted(place, target)
        lesson, choices = _lesson(place, Path(new_data), piece, holdout, conflicts, watches.checking)
    given_eval = None if eval is None else eval_images(Path(eval), lesson, place.seen())
    refuse_blind_gate(max_forgetting, given_eval, lesson)
    if dry_run:
        return _plan(place, lesson, choices)
    watches.settings(choices, lesson)
    with writing(target.root), target.locked():
        draft = Draft(target, place.name)
        if not place.is_listed:
            lesson = _settled(lesson, place, target)
            before = _hashes(place, target)  # now: the original of a copy may change meanwhile
            draft.begin(lesson.request())
            if target.root != source.root:
                _remove_unlisted_images(place, target, draft)
            state = learn(draft, lesson, watches.training)
            passed = _write_version(draft, lesson, state, given_eval, max_forgetting)
            current = place.name if passed else place.parent.name
            target.write({**before, place.name: draft.finish()}, current)
        target.copying_path.unlink(missing_ok=True)
        draft.clean()
    return _updated(target, target.version(place.name))


@dataclass(frozen=True)
class _Place:
    """The version to write, and its parent."""

    source: ModelFolder
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
        raise InvalidInput(f"--out {target.root}: one model cannot be inside another. Give another folder.")
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
    place: _Place, data: Path, piece: Recipe, holdout: int | None, conflicts: str, watch: Watch
) -> tuple[Lesson, list[Choice]]:
    parent, read = place.parent, place.parent.sha256
    state, facts = parent.load_state(), parent.provenance()
    given = read_images(
        data,
        state.preprocessing.side,
        version=place.name,
        fewest_classes=1,
        known_classes=state.class_names,
        conflicts=conflicts,
        watch=watch,
    )
    refuse_known_pictures(given, state, parent, data)
    warn_of_unrehearsed(state)
    per_class = facts["holdout_per_class"] if holdout is None else holdout
    train, sealed = set_aside(given, per_class, seed=0, seen=place.seen())
    new_counts = list(given.counts(train).values())
    config, choices = settings_to_update(
        facts["settings"], facts["asked"], state.inherent_counts.tolist(), new_counts, piece
    )
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
        asked=tuple(asked_keys(facts["settings"], facts["asked"], piece)),
        holdout_per_class=per_class,
        parent_sha256=read,
    )
    return lesson, choices


def _settled(lesson: Lesson, place: _Place, target: ModelFolder) -> Lesson:
    """Check, once the folder is locked, that no other command changed the model while images were read.

    In particular, a patient who was erased meanwhile must not come back with exemplars read before.
    """
    source = place.source
    source.refuse_half_erased()
    if (source.versions, source.current) != (place.versions, place.parent.name):
        raise _changed(source.root)
    if target.root != source.root:
        _copy_versions(place, target)
    parent = _copied(place, target, place.parent.name)
    if parent.sha256 != lesson.parent_sha256:
        raise _changed(place.parent.root)
    for name in place.versions:
        Draft(target, name).clean()
    return replace(lesson, parent=parent)


def _copied(place: _Place, target: ModelFolder, name: str) -> VersionFolder:
    if target.root == place.source.root:
        return place.source.version(name)
    return VersionFolder.open(target.versions_path / name, target.images, place.source.hashes[name])


def _hashes(place: _Place, target: ModelFolder) -> dict[str, str]:
    """Return the hashes by which model.json lists the versions before the new one."""
    if target.root == place.source.root:
        return {name: place.source.hashes[name] for name in place.versions}
    return {name: sha256((target.versions_path / name / MANIFEST).read_bytes()) for name in place.versions}


def _changed(place: Path) -> RunConflict:
    return RunConflict(
        f"{place} was changed by another command meanwhile: run this one again.", code="model.changed"
    )


def _copy_versions(place: _Place, target: ModelFolder) -> None:
    """Copy the versions into the new folder, each whole or not at all, and as it is now.

    A patient may have been erased since a command that was killed had copied a version.
    """
    write_json(target.copying_path, {"format": FORMAT})
    for name in place.versions:
        original, copy = place.source.version(name), target.versions_path / name
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
            if place.source.hashes[name] == original.sha256:
                raise
        if place.source.hashes[name] != original.sha256:
            raise _changed(original.root)
        part.rename(copy)
        flush_folder(target.versions_path)


def _remove_unlisted_images(place: _Place, target: ModelFolder, draft: Draft) -> None:
    """Remove what an earlier attempt copied of a patient who has been erased since."""
    versions = [_copied(place, target, name) for name in place.versions]
    target.images.remove_except(
        image for version in (*versions, draft.version) for image in version.image_names()
    )


def _write_version(
    draft: Draft, lesson: Lesson, state: State, given_eval: Measure | None, limit: float | None
) -> bool:
    """Write what the update cost, and everything else beside the state; return whether the gate is passed."""
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
    return passed


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
        forgetting=version.forgetting() or {},
        provenance=facts,
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
LIBRARIES = 400e6
"""Bytes that Python and PyTorch need before any image."""


def estimate(lesson: Lesson) -> Estimate:
    assert lesson.parent is not None
    epochs = lesson.config.training.epochs
    n_images = len(lesson.train) + len(lesson.state.memory)
    facts = lesson.parent.provenance()
    pace = facts["images_per_second"]
    if pace and facts["parent"] is None:  # the first classes were learned without an old network
        pace /= OLD_NETWORK
    return Estimate(
        images_per_epoch=n_images,
        epochs=epochs,
        seconds=_passes(lesson) * epochs * n_images / pace if pace else None,
        memory_bytes=_memory(lesson.state, n_images, lesson.config.training.batch_size),
    )


def _passes(lesson: Lesson) -> float:
    """Count the epochs of all phases, relative to those of the recipe."""
    phases = outline(build_method(lesson.config.method))
    return sum(found.epochs for found in phases if found.task == "later") / NOMINAL.epochs


def _memory(state: State, n_images: int, batch_size: int) -> int:
    """Add up pixels, two networks, gradients and momentum for one of them, and activations."""
    pixels = n_images * 3 * state.preprocessing.side**2
    parameters = 4 * 4 * sum(tensor.numel() for tensor in state.network.parameters())
    return int(LIBRARIES + pixels + parameters + batch_size * _activations(state))


@torch.no_grad()
def _activations(state: State) -> int:
    """Return the bytes of all layers' outputs for one image."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not list(module.children()):
            sizes.append(4 * output.numel())

    hooks = [module.register_forward_hook(note) for module in state.network.modules()]
    crop = state.preprocessing.crop
    state.network.eval()(torch.zeros(1, 3, crop, crop))
    for hook in hooks:
        hook.remove()
    return sum(sizes)


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
