"""Add images to a model as a new version, measure what it cost; list versions and go back to one."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medcil.build import RunConfig, method_settings
from medcil.clinic.corrections.learned import Learned, hash_images
from medcil.clinic.holdout import (
    SHOWN,
    Measure,
    Seen,
    lineage,
    read_images,
    set_aside,
)
from medcil.clinic.measure import visible_losses
from medcil.clinic.model_dir import Draft, ModelFolder, VersionFolder
from medcil.clinic.settings import (
    Choice,
    Recipe,
    asked_keys,
    inherited,
    method_to_update,
    requested,
    settings_to_update,
)
from medcil.clinic.settings import Plan as Plan
from medcil.clinic.train import (
    PACES,
    Lesson,
    Trained,
    Watches,
    eval_images,
    learn,
    ready_to_learn,
    with_embeddings,
    write_version,
)
from medcil.data.class_names import names_in_model
from medcil.data.image_table import REFUSE, ImageTable
from medcil.errors import InvalidInput, RunConflict
from medcil.methods.outline import NOMINAL, outline
from medcil.methods.protocol import Method
from medcil.readouts import keeps_statistics
from medcil.readouts.statistics import StatisticsReadout
from medcil.recipe import leaves
from medcil.storage.atomic import reading, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_data
from medcil.training.state import State


def update(
    model: Path | str,
    new_data: Path | str,
    *,
    max_forgetting: float | None = None,
    dry_run: bool = False,
    eval: Path | str | None = None,
    holdout: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    exemplars: int | None = None,
    settings: Sequence[str] = (),
    conflicts: str = REFUSE,
    keep_embeddings: bool = False,
    as_new: Sequence[str] = (),
    same_as: Mapping[str, str] | None = None,
    watches: Watches | None = None,
) -> Trained | Plan:
    """Add the images of `new_data` to the current version: of new classes, of known ones, or of both.

    The last write makes the new version current, unless the old classes' mean recall fell by more than
    `max_forgetting` points. Interrupted, the same call goes on. `conflicts` and `keep_embeddings` are as for
    `train`. A class whose name is similar to a known one is refused, unless it is `as_new` or the `same_as`
    one of the model. `dry_run` writes nothing and returns the plan.
    """
    watches = watches or Watches()
    piece = requested(method=method, epochs=epochs, exemplars=exemplars, settings=settings)
    folder = ModelFolder(Path(model))
    folder.refuse_half_erased()
    refuse_within_data(folder.root, Path(new_data))
    with reading(folder.root):
        place = NextVersion.of(folder)
    if not dry_run:
        check_writable(folder.root)
    read = partial(
        read_images,
        Path(new_data),
        conflicts=conflicts,
        folder=None if dry_run else folder.root,
        watch=watches.checking,
    )
    names = partial(names_in_model, as_new=as_new, same_as=same_as)
    lesson, choices = _lesson(place, Path(new_data), read, names, piece, holdout)
    lesson = with_embeddings(lesson, keep_embeddings=keep_embeddings)
    if place.is_listed and not place.draft.is_of(lesson.request()):
        place = NextVersion.after_current(folder)
        lesson, choices = _lesson(place, Path(new_data), read, names, piece, holdout)
        lesson = with_embeddings(lesson, keep_embeddings=keep_embeddings)
    measure = None if eval is None else eval_images(Path(eval), lesson, Seen.by(folder, place.parent))
    refuse_blind_gate(max_forgetting, measure, lesson)
    if dry_run:
        return _plan(place, lesson, choices)
    watches.settings(choices, lesson)
    learned = partial(learn, place.draft, lesson, watches.training)
    return write_next(place, lesson, learned, measure, max_forgetting)


def write_next(
    place: "NextVersion",
    lesson: Lesson,
    learned: Callable[[], State],
    measure: Measure | None,
    max_forgetting: float | None = None,
) -> Trained:
    """Write the version, unless it is listed already, and make it current if it forgets little enough."""
    draft, folder = place.draft, place.draft.model
    with writing(folder.root), folder.locked():
        if not place.is_listed:
            _refuse_changed(place)
            draft.begin(lesson.request())
            passed = write_version(draft, lesson, learned(), measure, max_forgetting)
            current = draft.name if passed else place.parent.name
            folder.write({**folder.hashes, draft.name: draft.version.publish(draft.place)}, current)
        draft.clean()
    return Trained.read(folder, folder.version(draft.name))


@dataclass(frozen=True)
class NextVersion:
    """The version to write, and its parent."""

    draft: Draft
    parent: VersionFolder
    versions: tuple[str, ...]
    """The versions before it."""
    is_listed: bool = False
    """The version is finished and listed: a command was killed before it cleaned up."""

    @classmethod
    def of(cls, folder: ModelFolder) -> "NextVersion":
        *before, name = folder.versions
        draft = Draft(folder, name)
        if draft.is_begun:
            parent = folder.version(folder.version(name).provenance()["parent"])
            return cls(draft, parent, tuple(before), is_listed=True)
        return cls.after_current(folder)

    @classmethod
    def after_current(cls, folder: ModelFolder) -> "NextVersion":
        draft = Draft(folder, folder.next_name())
        if not draft.is_begun:
            draft.refuse_unlisted()
        return cls(draft, folder.version(), folder.versions)


def _lesson(
    place: NextVersion,
    data: Path,
    read: Callable[..., ImageTable],
    names: Callable[..., dict[str, str]],
    piece: Recipe,
    holdout: int | None,
) -> tuple[Lesson, list[Choice]]:
    parent = place.parent
    state, facts = parent.load_state(), parent.provenance()
    recipe, asked = facts["settings"], facts["asked"]

    def renamed(table: ImageTable) -> ImageTable:
        table = table.renamed(names(table.class_names, state.class_names))
        if known := [name for name in table.class_names if name in state.class_names]:
            refuse_more_images(known, method_to_update(recipe, piece), state)
        return table

    table = read(
        state.preprocessing.side,
        version=place.draft.name,
        fewest_classes=1,
        known_classes=state.class_names,
        renamed=renamed,
    )
    rest = without_known_pictures(table, state, parent, data)
    per_class = facts["holdout_per_class"] if holdout is None else holdout
    unsealed = {entry["class"] for entry in parent.holdout_entries()} if holdout is None else ()
    split = set_aside(rest, per_class, seed=0, seen=Seen.by(place.draft.model, parent), unsealed=unsealed)
    counts = list(rest.counts(split[0]).values())
    config, choices = settings_to_update(recipe, asked, state.inherent_counts.tolist(), counts, piece)
    refuse_settled(config, recipe)
    refuse_rebalancing(config, recipe)
    ready_to_learn(config, state)
    warn_of_unrehearsed(config, state)
    asked = tuple(asked_keys(recipe, asked, piece))
    choices += inherited(config, choices, recipe, asked, parent.name)
    if holdout is None:
        choices.append(Choice("--holdout", per_class, f"inherited from {parent.name}"))
    return Lesson(rest, *split, state, parent, config, asked, per_class), choices


def refuse_more_images(known: Sequence[str], method: Method, state: State) -> None:
    """Refuse images of known classes where what the model keeps of a class cannot grow."""
    knows = f"The model knows the class {known[0]!r}"
    if not keeps_statistics(method.readout):
        raise InvalidInput(
            f"{knows}, and {method_settings(method)['name']} learns new ones only. Move that folder away.\n"
            "A method that keeps statistics, such as analytic, takes more images of known classes.\n"
            f"The model knows: {', '.join(state.class_names)}.",
            code="model.class.known",
        )
    if isinstance(state.readout, StatisticsReadout) and state.readout.statistics.balance:
        raise InvalidInput(
            f"{knows}, whose pooled statistics cannot grow. Move that folder away.\n"
            f"Train with method.pooled: false.\nThe model knows: {', '.join(state.class_names)}.",
            code="model.class.pooled",
        )


def without_known_pictures(table: ImageTable, state: State, parent: VersionFolder, data: Path) -> ImageTable:
    """Leave out pictures that are kept or in the statistics; refuse those known as another class.

    They would count twice, or be learned although they are sealed.
    """
    class_of = {entry.image: entry.class_name for entry in Learned.read(parent).images}
    if len(stored := state.memory + parent.holdout()):
        classes = [state.class_names[label] for label in stored.labels.tolist()]
        class_of |= zip(hash_images(stored, parent.store), classes, strict=True)
    if not class_of:
        return table
    hashes = hash_images(table.samples(state.preprocessing.side), parent.store)
    same = {i: class_of[image] for i, image in enumerate(hashes) if image in class_of}
    others = [i for i, name in same.items() if name != table.class_names[table.labels[i]]]
    if others:
        raise InvalidInput(
            f"{len(others)} pictures of {data} are known to the model as another class "
            f"({table.names[others[0]]}: {same[others[0]]!r}). Take them out."
        )
    if len(same) == len(table):
        raise InvalidInput(
            f"The model knows all pictures of {data} already. Give other images.", code="data.images.known"
        )
    if not same:
        return table
    n, examples = len(same), ", ".join(table.names[i] for i in list(same)[:SHOWN])
    warnings.warn(f"{n} pictures are left out: the model knows them already ({examples}).", stacklevel=2)
    return table.select(np.setdiff1d(np.arange(len(table)), list(same))).without_empty_classes()


def _refuse_changed(place: NextVersion) -> None:
    """Check, once the folder is locked, that no other command changed the model while images were read.

    In particular, a patient who was erased meanwhile must not come back with exemplars read before.
    """
    folder, parent = place.draft.model, place.parent
    folder.refuse_half_erased()
    now = (folder.versions, folder.current, folder.hashes[parent.name])
    if now != (place.versions, parent.name, parent.sha256):
        raise RunConflict(
            f"Another command has changed {folder.root}. Run this one again.", code="model.changed"
        )
    for name in place.versions:
        Draft(folder, name).clean()


CHOSEN_AGAIN = ("balance", "strength")
"""Settings of `analytic` that `medcil rebalance` changes."""
CHANGEABLE = ("data.views", "data.augmentation")
"""Settings of `data` that an update may change, because no learned feature depends on them."""


def refuse_settled(config: RunConfig, before: dict[str, Any]) -> None:
    """Refuse to change what the embeddings of the network depend on."""
    if config.data.root is not None:
        raise InvalidInput("data.root has no part in an update: its images are the folder or table you name.")
    was, asked = dict(leaves(before)), config.identity()
    for key, value in leaves({part: asked[part] for part in ("data", "network")}):
        if key not in CHANGEABLE and was.get(key, value) != value:
            raise InvalidInput(
                f"{key}={value} differs from the {was[key]} that the model was trained with. Leave it "
                "out, or train a new model."
            )


def refuse_rebalancing(config: RunConfig, before: dict[str, Any]) -> None:
    """Refuse to change what `analytic` decides once, on its first task."""
    was, now = before["method"], method_settings(config.method)
    if now["name"] != "analytic" or was["name"] != "analytic":
        return
    for key in now.keys() & was.keys():
        if now[key] != was[key]:
            way = f"Use `medcil rebalance MODEL --{key}`" if key in CHOSEN_AGAIN else "Leave it out"
            raise InvalidInput(
                f"method.{key}={now[key]} differs from {was[key]}, which the model keeps. {way}.",
                code="model.method.settled",
            )


def warn_of_unrehearsed(config: RunConfig, state: State) -> None:
    if keeps_statistics(config.method.readout):
        return
    counts = state.memory.class_counts(len(state.class_names)).tolist()
    lacking = [name for name, n in zip(state.class_names, counts, strict=True) if not n]
    if lacking:
        names = ", ".join(lacking)
        warnings.warn(f"The model has no exemplar of {names}: the update forgets more of it.", stacklevel=2)


def refuse_blind_gate(limit: float | None, given_eval: Measure | None, lesson: Lesson) -> None:
    if limit is None:
        return
    if not 0 <= limit <= 100:
        raise InvalidInput(f"--max-forgetting {limit:g}: give points of recall from 0 to 100, such as 5.")
    assert lesson.parent is not None
    sealed = lesson.parent.holdout_entries()
    if not (sealed if given_eval is None else (given_eval.samples.labels < lesson.n_old).any()):
        raise InvalidInput("--max-forgetting needs images of old classes to measure on. Give --eval.")


OLD_NETWORK = 4 / 3
"""Cost of a step with the old network's forward pass, relative to one without."""
TIMES_SCORED = 3
"""A sealed image is scored by the old version, by the new one, and to calibrate that."""


def _plan(place: NextVersion, lesson: Lesson, choices: list[Choice]) -> Plan:
    epochs, n_images = lesson.config.training.epochs, len(lesson.train) + len(lesson.state.memory)
    phases = [phase for phase in outline(lesson.config.method) if phase.task == "later"]
    passes = sum(phase.epochs for phase in phases) / NOMINAL.epochs
    work = {PACES[0]: passes * epochs * n_images, PACES[1]: 0.0}
    if keeps_statistics(lesson.config.method.readout):
        n_sealed = len(lesson.sealed) + len(place.parent.holdout_entries())
        work[PACES[1]] = len(lesson.train) + TIMES_SCORED * n_sealed
    return Plan(
        version=place.draft.name,
        parent=place.parent.name,
        remarks=lesson.table.remarks,
        images=lesson.table.counts(lesson.train),
        known=lesson.known_counts,
        holdout=lesson.table.counts(lesson.sealed),
        visible_losses=visible_losses(lesson.table, lesson.sealed, lesson.new_classes),
        choices=choices,
        epochs=epochs if phases else 0,
        images_per_epoch=n_images,
        seconds=_seconds(place, work),
    )


def _seconds(place: NextVersion, work: Mapping[str, float]) -> float | None:
    """Estimate how long so many images take, each kind at the pace of the newest version that measured it."""
    paces: dict[str, float] = {}
    for version in lineage(place.draft.model, place.parent):
        facts = version.provenance()
        for key in PACES:
            if pace := facts.get(key):
                # The first classes were learned without an old network.
                is_slower = key == PACES[0] and facts["parent"] is None
                paces.setdefault(key, pace / (OLD_NETWORK if is_slower else 1))
    needed = {key: n for key, n in work.items() if n}
    return sum(n / paces[key] for key, n in needed.items()) if needed.keys() <= paces.keys() else None


def history(model: Path | str) -> tuple[dict[str, Any], ...]:
    """Describe every version, oldest first."""
    folder = ModelFolder(Path(model))
    current = folder.current
    return tuple(read_past(folder.version(name), is_current=name == current) for name in folder.versions)


def read_past(version: VersionFolder, *, is_current: bool) -> dict[str, Any]:
    """Describe a version: what it was made of, how well it does, and what the update cost."""
    facts, figures, cost = version.provenance(), version.metrics(), version.forgetting() or {}
    mean = cost.get("mean_recall_of_old_classes")
    return {
        "version": version.name,
        **{key: facts[key] for key in ("when", "parent", "classes_added", "images_sha256")},
        "more_images": facts.get("more_images", {}),
        "rebalanced": facts.get("rebalanced"),
        "corrected": facts.get("corrected"),
        "started_from": facts.get("started_from"),
        "merged_from": facts.get("merged_from", []),
        "n_classes": len(version.class_names()),
        "images": sum(facts["images"].values()),
        "method": facts["settings"]["method"]["name"],
        **{key: figures[key] for key in ("measured_on", "accuracy", "balanced_accuracy")},
        "change_of_old_recall": None if mean is None else mean["change"],
        "is_promoted": facts["promoted"],
        "is_current": is_current,
    }


def rollback(model: Path | str, version: str) -> str:
    """Make a version current, an older or a newer one; return the one that was. Nothing is deleted."""
    folder = ModelFolder(Path(model))
    chosen, before = folder.version(version), folder.current
    chosen.load_state()  # raises if it cannot be loaded
    with folder.locked():
        folder.write(folder.hashes, chosen.name)
    return before
