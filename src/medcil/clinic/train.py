"""A folder of images becomes a model folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medcil.build import build_method, build_state
from medcil.check.scan import Watch, unwatched
from medcil.clinic.draft import Draft
from medcil.clinic.hold_out_recall import metrics, predicted, sealed_or_exemplars
from medcil.clinic.holdout import HOLDOUT, eval_images, set_aside
from medcil.clinic.labelled_images import Measure, check_images, read_images, typical_side
from medcil.clinic.learning import Lesson, ProgressWatch, calibrate_on, learn, provenance
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.clinic.settings import Asked, Choice, settings_to_train
from medcil.clinic.version_page import card, page
from medcil.data.conflicts import REFUSE
from medcil.errors import DamagedFile, RunConflict
from medcil.methods.outline import try_out
from medcil.storage.atomic import TEMPORARY, write_bytes, write_json
from medcil.storage.os_errors import reading, writing
from medcil.storage.overwrite_guard import check_writable, refuse_within_data, refuse_within_model
from medcil.training.environment import prepare_machine
from medcil.training.state import State

FIRST = "v1"


@dataclass(frozen=True)
class Watches:
    """Who wants to know how it goes."""

    checking: Watch = unwatched
    settings: Any = field(default=lambda choices, lesson: None)
    """Called with what was chosen, before any training."""
    training: ProgressWatch = field(default=lambda progress: None)


@dataclass(frozen=True)
class Trained:
    model: Path
    version: str
    metrics: dict[str, Any]
    provenance: dict[str, Any]


def train(
    data: Path | str,
    out: Path | str,
    *,
    eval: Path | str | None = None,
    holdout: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    exemplars: int | None = None,
    side: int | None = None,
    backbone: str | None = None,
    weights: str | None = None,
    settings: tuple[str, ...] = (),
    conflicts: str = REFUSE,
    watches: Watches | None = None,
) -> Trained:
    """Checks the images, chooses what is not asked for, trains, measures, writes the model folder `out`.

    `holdout` images of each class are sealed (20, or a fifth of a smaller class); with `eval`, images to
    measure on, none are unless asked for. `settings` are `key.subkey=value` as in a recipe. Interrupted, the
    same call goes on. `conflicts` says what happens to one picture in several classes: `refuse`, `skip` it,
    or the class that is believed.
    """
    watches = watches or Watches()
    asked = Asked(method, epochs, exemplars, side, backbone, weights, tuple(settings))
    asked.check()
    model = ModelFolder(Path(out))
    refuse_within_data(model.root, Path(data))
    refuse_within_model(model.root.resolve().parent)
    with reading(model.root):
        _refuse_existing(model)
    check_writable(model.root)
    lesson, choices = _lesson(
        Path(data), asked, holdout, is_measured=eval is not None, conflicts=conflicts, watch=watches.checking
    )
    given_eval = None if eval is None else eval_images(Path(eval), lesson)
    watches.settings(choices, lesson)
    with writing(model.root), model.locked():
        draft = Draft(model, FIRST)
        if not model.exists:
            draft.begin(lesson.request())
            write_version(draft, lesson, learn(draft, lesson, watches.training), given_eval)
            model.write((FIRST,), FIRST)
        elif not draft.is_of(lesson.request()):
            raise _exists(model)
        draft.clean()
    return trained(model, draft.place)


def _refuse_existing(model: ModelFolder) -> None:
    """An unfinished one goes on; one that was killed after its last write only needs to be tidied up."""
    draft = Draft(model, FIRST)
    if model.exists and not draft.is_begun:
        raise _exists(model)
    refuse_strangers(model)
    refuse_lost(model, own=(FIRST,) if draft.part.exists() else ())


def refuse_strangers(model: ModelFolder, *ours: str) -> None:
    """A new model goes into a new folder, or into one that a command was killed in."""
    if not model.root.is_dir():
        return
    found = {path.name for path in model.root.iterdir() if not path.match(f".*{TEMPORARY}")}
    if strangers := found - {"versions", ".lock", "model.json", *ours}:
        raise RunConflict(
            f"{model.root} is not empty and holds no model (found {min(strangers)!r}). Give a new folder "
            "as --out."
        )


def refuse_lost(model: ModelFolder, *, own: tuple[str, ...]) -> None:
    """Versions that nobody lists may be all that is left of a model, but for those of a killed command."""
    lost = sorted(path.name for path in model.versions_path.glob("v*") if path.name not in own)
    if lost and not model.exists:
        raise DamagedFile(
            f"{model.manifest_path} is missing, though {model.versions_path / lost[0]} is there: restore it, "
            "or give another --out. Nothing was changed."
        )


def _exists(model: ModelFolder) -> RunConflict:
    return RunConflict(
        f"{model.root} is a model already and is left as it is: `medcil update {model.root} DIR` adds "
        "classes to it. To train another one, give another --out."
    )


def _lesson(
    data: Path, asked: Asked, holdout: int | None, *, is_measured: bool, conflicts: str, watch: Watch
) -> tuple[Lesson, list[Choice]]:
    report = check_images(data, fewest_classes=2, conflicts=conflicts, watch=watch)
    given = read_images(data, fewest_classes=2).in_version(FIRST).without_conflicts(conflicts)
    per_class = (0 if is_measured else HOLDOUT) if holdout is None else holdout
    train_places, sealed = set_aside(given, per_class, seed=0)
    counts = list(given.counts(train_places).values())
    config, choices = settings_to_train(counts, typical_side(report), asked)
    prepare_machine(config.execution)
    state = build_state(config)
    try_out(build_method(config.method), state.network, crop=config.data.crop)
    lesson = Lesson(
        given=given,
        train=train_places,
        sealed=sealed,
        state=state,
        parent=None,
        config=config,
        asked=asked,
        holdout_per_class=per_class,
    )
    return lesson, choices


def write_version(draft: Draft, lesson: Lesson, state: State, given_eval: Measure | None) -> None:
    """Everything beside the state, and then the version itself in its place."""
    version, execution = draft.version, lesson.config.execution
    sealed = sealed_or_exemplars(version, state)
    calibrate_on(draft, lesson, state, sealed, given_eval)
    measure = given_eval or sealed
    found = metrics(measure, predicted(state, measure.samples, execution), state.class_names)
    facts = provenance(draft, lesson, promoted=True)
    describe(version, facts, found, None, state.class_names)
    draft.finish()


def describe(
    version: VersionFolder,
    facts: dict[str, Any],
    found: dict[str, Any],
    cost: dict[str, Any] | None,
    class_names: tuple[str, ...],
) -> None:
    """The files that people read."""
    write_json(version.metrics_path, found)
    if cost is not None:
        write_json(version.forgetting_path, cost)
    write_json(version.provenance_path, facts)
    write_bytes(version.report_path, page(facts, found, cost).encode())
    write_bytes(version.card_path, card(facts, found, cost, class_names).encode())


def trained(model: ModelFolder, version: VersionFolder) -> Trained:
    return Trained(model.root, version.name, version.metrics(), version.provenance())
