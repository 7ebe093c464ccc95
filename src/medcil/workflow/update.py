"""New classes for a model: a new version beside the old one, and an honest account of what it cost."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.bench.environment import prepare_machine
from medcil.check.look import Watch
from medcil.engine.state import State
from medcil.errors import InvalidInput, RunConflict
from medcil.runs import flush_folder, read_json
from medcil.workflow.choices import Asked, Choice, settings_to_update
from medcil.workflow.cost import Estimate, estimate
from medcil.workflow.draft import Draft
from medcil.workflow.folder import ModelFolder, VersionFolder
from medcil.workflow.forgetting import forgetting, loss_in_points
from medcil.workflow.given import Measure, check_images, eval_images, read_images, set_aside
from medcil.workflow.learning import Lesson, calibrate_on, learn, provenance
from medcil.workflow.measure import metrics, of_classes, predicted, sealed_or_exemplars
from medcil.workflow.refused import writing
from medcil.workflow.train import Watches, describe


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
    watches: Watches | None = None,
) -> Updated | Plan:
    """Adds the classes of `new_data` to the current version.

    The new version becomes current by the last write, unless the old classes' mean recall fell by more than
    `max_forgetting` points. With `out`, the model stays as it is and a new folder gets both. Interrupted, the
    same call goes on. With `dry_run` nothing is written, and what would be done is returned.
    """
    watches = watches or Watches()
    source = ModelFolder(Path(model))
    target = source if out is None else _new_folder(ModelFolder(Path(out)), source)
    asked = Asked(method, epochs, exemplars, set=tuple(settings))
    place = _Place.of(source, target)
    lesson, choices = _lesson(place.parent, Path(new_data), asked, holdout, watches.checking)
    if place.is_listed and not Draft(target, place.name).is_of(lesson.request()):
        if target.root != source.root:
            raise _taken(target)
        place = _Place(source.next_name(), source.version())
        lesson, choices = _lesson(place.parent, Path(new_data), asked, holdout, watches.checking)
    given_eval = None if eval is None else _eval(Path(eval), lesson)
    _refuse_blind_gate(max_forgetting, given_eval, lesson)
    if dry_run:
        return _plan(place, lesson, choices)
    watches.settings(choices, lesson)
    with writing(target.root), target.locked():
        draft = Draft(target, place.name)
        if not place.is_listed:
            if target.exists and place.name in target.versions:
                raise RunConflict(
                    f"{target.root} got {place.name} from another command meanwhile: run it again."
                )
            _copy_versions(source, target)
            for done in source.versions:
                Draft(target, done).clean()
            draft.begin(lesson.request())
        if not draft.is_finished:
            state = learn(draft, lesson, watches.training)
            _write_version(draft, lesson, state, given_eval, max_forgetting)
        if not place.is_listed:
            is_promoted = draft.place.provenance()["promoted"]
            target.write((*source.versions, place.name), place.name if is_promoted else source.current)
        draft.clean()
    return _updated(target, draft.place)


@dataclass(frozen=True)
class _Place:
    """Which version is to be made of which."""

    name: str
    parent: VersionFolder
    is_listed: bool = False
    """It is there and the model lists it: a command was killed after its last write, before it tidied up."""

    @classmethod
    def of(cls, source: ModelFolder, target: ModelFolder) -> "_Place":
        if target.exists and Draft(target, target.versions[-1]).part.exists():
            made = target.version(target.versions[-1])
            return cls(made.name, source.version(made.provenance()["parent"]), is_listed=True)
        return cls(source.next_name(), source.version())


def _new_folder(target: ModelFolder, source: ModelFolder) -> ModelFolder:
    if target.root.resolve() == source.root.resolve():
        raise InvalidInput(f"--out {target.root} is the model itself: leave it out, or give another folder.")
    if target.exists and not any(target.versions_path.glob(".v*.part")):
        raise _taken(target)
    strangers = {path.name for path in target.root.iterdir()} if target.root.is_dir() else set()
    if strangers := strangers - {"versions", ".lock", "model.json"}:
        raise RunConflict(f"{target.root} is not empty (found {min(strangers)!r}). Give another --out.")
    return target


def _taken(target: ModelFolder) -> RunConflict:
    return RunConflict(f"{target.root} is a model already and is left as it is. Give another --out.")


def _lesson(
    parent: VersionFolder, data: Path, asked: Asked, holdout: int | None, watch: Watch
) -> tuple[Lesson, list[Choice]]:
    state, facts = parent.load_state(), parent.provenance()
    given = read_images(data, fewest_classes=1)
    _refuse_known(given.class_names, state.class_names, data)
    check_images(data, fewest_classes=1, watch=watch)
    per_class = facts["holdout_per_class"] if holdout is None else holdout
    train, sealed = set_aside(given, per_class, seed=0)
    asked = asked.laid_over(facts["asked"])
    new_counts = list(given.counts(train).values())
    config, choices = settings_to_update(facts["settings"], state.inherent_counts.tolist(), new_counts, asked)
    prepare_machine(config.execution)
    lesson = Lesson(
        given=given,
        train=train,
        sealed=sealed,
        state=state,
        parent=parent,
        config=config,
        asked=asked,
        holdout_per_class=per_class,
    )
    return lesson, choices


def _refuse_known(new: Sequence[str], known: Sequence[str], data: Path) -> None:
    folded = {name.casefold(): name for name in known}
    same = [name for name in new if name.casefold() in folded]
    if same:
        raise InvalidInput(
            f"{data} has the class {same[0]!r}, which the model knows already: move that folder away and "
            "update with the others. If it is another class, give it another name; to learn a known class "
            "from more images, train a new model with `medcil train`.\n"
            f"The model knows: {', '.join(known)}."
        )


def _eval(path: Path, lesson: Lesson) -> Measure:
    return eval_images(path, lesson.class_names, lesson.state.preprocessing.side, trained=lesson.given)


def _refuse_blind_gate(limit: float | None, given_eval: Measure | None, lesson: Lesson) -> None:
    if limit is None:
        return
    if limit < 0:
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


def _copy_versions(source: ModelFolder, target: ModelFolder) -> None:
    """Into the new folder, each whole or not at all."""
    if target.root == source.root:
        return
    for name in source.versions:
        place, part = target.versions_path / name, target.versions_path / f".{name}.copy"
        if not place.exists():
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source.version(name).root, part)
            part.rename(place)
            flush_folder(target.versions_path)


def _write_version(
    draft: Draft, lesson: Lesson, state: State, given_eval: Measure | None, limit: float | None
) -> None:
    """What it cost, everything else beside the state, and then the version itself in its place."""
    version, execution, n_old = draft.version, lesson.config.execution, lesson.n_old
    sealed = sealed_or_exemplars(version, state, n_old=n_old)
    calibrate_on(draft, lesson, state, given_eval if given_eval and sealed.kind == "exemplars" else sealed)
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
