"""Train a model on a folder of images; functions that train and update share."""

import datetime
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from medcil.build import RunConfig, build_state
from medcil.check.scan import Watch, unwatched
from medcil.clinic.calibration import calibrate
from medcil.clinic.corrections.learned import (
    KeepFeatures,
    Learned,
    LearnedImage,
    hash_images,
    hash_patient,
    store_embeddings,
)
from medcil.clinic.holdout import HOLDOUT, Measure, Seen, pixel_hashes, read_images, set_aside
from medcil.clinic.measure import (
    Content,
    card,
    loss_in_points,
    measured,
    page,
    sealed_or_exemplars,
    visible_losses,
)
from medcil.clinic.model_dir import FORMAT, Draft, File, ModelFolder, Source, VersionFolder
from medcil.clinic.settings import (
    SIDES,
    Choice,
    Plan,
    Recipe,
    asked_keys,
    requested,
    settings_to_start,
    settings_to_train,
    side_to_train,
)
from medcil.data.decoding import ImageFacts
from medcil.data.image_table import REFUSE, ImageTable, Indices
from medcil.data.samples import Samples, encode_png, no_samples
from medcil.data.sources import list_images
from medcil.data.sources.folder import folded
from medcil.data.stream import Task
from medcil.errors import DamagedFile, InvalidInput, RunConflict
from medcil.methods.outline import NOMINAL, outline, try_out
from medcil.models.weights import origin_of
from medcil.readouts import READOUTS, keeps_statistics
from medcil.readouts.statistics import StatisticsReadout
from medcil.storage.atomic import (
    TEMPORARY,
    flush_folder,
    read_json,
    reading,
    write_bytes,
    write_json,
    writing,
)
from medcil.storage.overwrite_guard import check_writable, refuse_within_data, refuse_within_model
from medcil.training.checkpoint import FileJournal, Progress
from medcil.training.environment import RECORDED_PACKAGES, environment, prepare_machine
from medcil.training.loop import learn_task, recalibrate
from medcil.training.pace import measure_pace
from medcil.training.state import State, save_state, without_classes

ProgressWatch = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a version is made of: images, the earlier state, and settings."""

    table: ImageTable
    train: Indices
    sealed: Indices
    state: State
    parent: VersionFolder | None
    config: RunConfig
    asked: tuple[str, ...]
    """Keys that someone has set, which later updates do not choose again."""
    holdout_per_class: int
    rebalanced: str | None = None
    """What `medcil rebalance` changed, in words."""
    corrected: str | None = None
    """What `medcil relabel` or `medcil retire` changed, in words."""
    correction_key: str = ""
    """Keyed hash of what they changed."""
    keep_embeddings: bool = False
    weights: Mapping[str, Any] | None = None
    """What the network of a first version started from; None if it is not known."""
    started_from: Source | None = None
    """The version of another model whose frozen network this one has."""

    @property
    def n_old(self) -> int:
        return len(self.state.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.state.class_names + self.new_classes

    @property
    def new_classes(self) -> tuple[str, ...]:
        return tuple(name for name in self.table.class_names if name not in self.state.class_names)

    @property
    def known_counts(self) -> dict[str, int]:
        """Of known classes with more images here: how many they were learned from until now."""
        counts = dict(zip(self.state.class_names, self.state.inherent_counts.tolist(), strict=True))
        return {name: counts[name] for name in self.table.class_names if name in counts}

    def learner(self) -> State:
        """Return the earlier state with the views and augmentation of this version."""
        data, before, memory = self.config.data, self.state.preprocessing, self.state.memory
        shown = replace(before, views=data.views or 1, augmentation=data.augmentation or before.augmentation)
        names = [] if self.parent is None else [entry["file"] for entry in self.parent.exemplar_entries()]
        with_ids = Samples(memory.images, memory.labels, np.array(names, dtype=np.str_))
        return replace(self.state, preprocessing=shown, memory=with_ids)

    def samples(self, places: Indices) -> Samples:
        """Return images of the table; labels count the model's classes, ids are the places."""
        chosen = self.table.samples(self.state.preprocessing.side).select(torch.from_numpy(places))
        labels = [self.class_names.index(name) for name in self.table.class_names]
        in_model = torch.tensor(labels, dtype=torch.int64)
        return replace(chosen, labels=in_model[chosen.labels], ids=places.astype(np.str_))

    def request(self) -> dict[str, Any]:
        """Describe images and settings; a draft is continued only if they are equal."""
        return {
            "format": FORMAT,
            "parent": None if self.parent is None else self.parent.name,
            "parent_sha256": None if self.parent is None else self.parent.sha256,
            "settings": self.config.identity(),
            "started_from": self.started_from,
            "images": self.table.fingerprint(np.arange(len(self.table))),
            "sealed": [(self.table.sha256 or ())[i] for i in self.sealed.tolist()],
            "keep_embeddings": self.keep_embeddings,
            "correction": self.correction_key,
        }


def learn(draft: Draft, lesson: Lesson, watch: ProgressWatch) -> State:
    """Seal the hold-out and learn the images, unless the draft has learned them already."""
    seal(draft.version, lesson)
    if draft.version.state_path.exists():
        return draft.version.load_state()
    side = lesson.state.preprocessing.side
    train = lesson.samples(lesson.train)
    task = Task(lesson.new_classes, lesson.n_old, train, no_samples(side))
    is_new = lesson.parent is None and lesson.started_from is None
    if is_new and lesson.config.network.recalibrate_batch_norm:
        recalibrate(lesson.state, train, lesson.config)
    draft.training.root.mkdir(parents=True, exist_ok=True)
    journal = FileJournal(draft.training, 1, log_size_before=0)
    pace = _Pace(lesson.config.training.batch_size, watch)
    method = KeepFeatures(lesson.config.method) if lesson.keep_embeddings else lesson.config.method
    state = learn_task(lesson.learner(), task, method, lesson.config, journal=journal, watch=pace.count)
    write_json(draft.training.root / "pace.json", pace.measured())
    embeddings = method.of_classes if isinstance(method, KeepFeatures) else {}
    return store(draft, lesson, state, _learned(draft, lesson, state, train, embeddings))


def _learned(
    draft: Draft,
    lesson: Lesson,
    state: State,
    train: Samples,
    embeddings: Mapping[int, Float[Tensor, "n views features"]],
) -> Learned | None:
    """Record which images the statistics contain; None for a method that keeps none."""
    if not keeps_statistics(state.readout.kind):
        return None
    key, patients, places = draft.model.store, lesson.table.patients, lesson.train.tolist()
    key.create_key()
    images = [
        LearnedImage(
            image,
            lesson.class_names[label],
            hash_patient(patients[place], key) if patients is not None else "",
            draft.name,
            state.preprocessing.views,
        )
        for image, label, place in zip(hash_images(train, key), train.labels.tolist(), places, strict=True)
    ]
    before = Learned() if lesson.parent is None else Learned.read(lesson.parent)
    names = [lesson.table.names[place] for place in places]
    return before.plus(images, store_embeddings(images, names, train, embeddings, key))


def store(draft: Draft, lesson: Lesson, state: State, learned_images: Learned | None = None) -> State:
    """Write a new state, whose its images are, and which ones its statistics contain, beside the hold-out."""
    ids = [] if state.memory.ids is None else state.memory.ids.tolist()
    state = replace(state, memory=replace(state.memory, ids=None, groups=None))  # of patients, nothing
    learned = draft.part / "state"
    shutil.rmtree(learned, ignore_errors=True)  # of an attempt that ended just after writing it
    save_state(state, learned, draft.model.store)
    names = [entry["file"] for entry in read_json(learned / "manifest.json")["exemplars"]]
    if (people := _people(draft.version, lesson, dict(zip(names, ids, strict=True)))) is not None:
        write_json(draft.version.root / File.PEOPLE, people)
    if learned_images is not None:
        write_json(draft.version.root / File.LEARNED, learned_images.content())
    draft.version.root.mkdir(parents=True, exist_ok=True)
    learned.rename(draft.version.state_path)
    flush_folder(draft.version.root)
    # Always through the disk, so that a continued command cannot differ from an uninterrupted one.
    return draft.version.load_state()


PACES = ("images_per_second", "images_embedded_per_second")


class _Pace:
    """Measures how many images are trained on, and how many are embedded for statistics, in a second."""

    def __init__(self, batch_size: int, watch: ProgressWatch) -> None:
        self.batch_size, self.watch = batch_size, watch
        self.began = time.monotonic()
        self.n_steps = 0
        self.embedded: list[tuple[float, int]] = []

    def count(self, progress: Progress) -> None:
        if progress.is_embedding:
            self.embedded.append((time.monotonic(), progress.step))
        else:
            self.n_steps += progress.losses is None
        self.watch(progress)

    def measured(self) -> dict[str, float | None]:
        paces = {PACES[0]: self.n_steps * self.batch_size / (time.monotonic() - self.began)}
        if self.embedded:
            (began, _), (ended, n_embedded) = self.embedded[0], self.embedded[-1]
            paces[PACES[1]] = n_embedded / (ended - began)
        return {name: round(paces.get(name, 0), 2) or None for name in PACES}


def seal(version: VersionFolder, lesson: Lesson) -> None:
    """Write the hold-out: the sealed images of the parent, and the new ones."""
    if version.has(File.HOLDOUT):
        return
    entries = [] if lesson.parent is None else lesson.parent.holdout_entries()
    samples = lesson.samples(lesson.sealed)
    if len(samples):
        version.store.create_key()
        for pixels, label in zip(samples.read_all(), samples.labels.tolist(), strict=True):
            name = version.store.put(encode_png(pixels), "png")
            entries = [*entries, {"file": name, "class": lesson.class_names[label]}]
    write_json(version.root / File.HOLDOUT, {"format": FORMAT, "images": entries})


def provenance(draft: Draft, lesson: Lesson, state: State, *, promoted: bool) -> dict[str, Any]:
    """Compute the content of provenance.json, without paths and patients."""
    where = environment(lesson.config.execution)
    packages = {name: where["packages"][name] for name in RECORDED_PACKAGES}
    used, images = np.concatenate([lesson.train, lesson.sealed]), lesson.table.counts(lesson.train)
    parent, before = lesson.parent, {"weights": lesson.weights, "started_from": lesson.started_from}
    if parent is not None:
        before = {key: parent.provenance().get(key) for key in before}
    pace_path = draft.training.root / "pace.json"
    pace = read_json(pace_path) if pace_path.exists() else dict.fromkeys(PACES)
    return {
        "format": FORMAT,
        "version": draft.name,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "medcil": packages["medcil"],
        "packages": packages,
        "device": where["device"],
        "device_kind": where["device_kind"],
        "parent": None if parent is None else parent.name,
        "promoted": promoted,
        "classes_added": list(lesson.new_classes),
        "more_images": {name: n for name in lesson.known_counts if (n := images[name])},
        "images": images,
        "holdout": lesson.table.counts(lesson.sealed),
        "holdout_per_class": lesson.holdout_per_class,
        "rebalanced": lesson.rebalanced,
        "corrected": lesson.corrected,
        **before,
        "images_sha256": lesson.table.fingerprint(used) if len(used) else None,
        "asked": list(lesson.asked),
        "settings": lesson.config.identity(),
        "decisions": [asdict(decision) for decision in state.decisions],
        **pace,
    }


def _people(version: VersionFolder, lesson: Lesson, ids: Mapping[str, str]) -> dict[str, Any] | None:
    """Compute the content of people.json; `ids` says where each exemplar comes from.

    The id of an exemplar is its name in the parent, or the place of the image in the new data.
    """
    table, earlier = lesson.table, {} if lesson.parent is None else lesson.parent.people()
    if table.patients is None and not earlier:
        return None
    files: dict[str, list[str]] = defaultdict(list)
    owners: dict[str, set[str]] = defaultdict(set)
    sealed_now = {entry["file"] for entry in version.holdout_entries()}
    for patient, listed in earlier.items():
        for part, _, name in (file.partition("/") for file in listed):
            if part == "holdout" and name in sealed_now:
                files[patient].append(f"holdout/{name}")
            elif part != "holdout":
                owners[name].add(patient)
    trained: set[str] = set()
    if table.patients is not None and table.sha256 is not None:
        of_file: dict[str | None, set[str]] = defaultdict(set)  # copies of a file may have several patients
        for i in lesson.train.tolist():
            of_file[table.sha256[i]] |= {table.patients[i]} - {""}
            owners[str(i)] = of_file[table.sha256[i]]
        trained = set().union(*of_file.values())
        sealed = version.holdout_entries()[-len(lesson.sealed) :] if len(lesson.sealed) else []
        for entry, i in zip(sealed, lesson.sealed.tolist(), strict=True):
            if table.patients[i]:
                files[table.patients[i]].append(f"holdout/{entry['file']}")
    for name, source in ids.items():
        for patient in sorted(owners[source]):
            files[patient].append(f"exemplars/{name}")
    patients = {patient: files[patient] for patient in sorted(files)}
    return {"format": FORMAT, "patients": patients, "trained": sorted(trained)}


FIRST = "v1"


@dataclass(frozen=True)
class Watches:
    """Callbacks that report progress."""

    checking: Watch = unwatched
    settings: Any = field(default=lambda choices, lesson: None)
    """Called with the chosen settings, before training."""
    training: ProgressWatch = field(default=lambda progress: None)


@dataclass(frozen=True)
class Trained:
    """A new version: the contents of its files."""

    model: Path
    version: str
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    forgetting: dict[str, Any]
    """What the update cost; empty for the first version."""

    @classmethod
    def read(cls, model: ModelFolder, version: VersionFolder) -> "Trained":
        cost = version.forgetting() or {}
        return cls(model.root, version.name, version.metrics(), version.provenance(), cost)

    @property
    def promoted(self) -> bool:
        """Whether it became current; False if it forgot more than allowed."""
        return bool(self.provenance["promoted"])


def train(
    data: Path | str,
    out: Path | str,
    *,
    start: Path | str | None = None,
    eval: Path | str | None = None,
    holdout: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    exemplars: int | None = None,
    side: int | None = None,
    backbone: str | None = None,
    weights: str | None = None,
    settings: Sequence[str] = (),
    conflicts: str = REFUSE,
    keep_embeddings: bool = False,
    dry_run: bool = False,
    watches: Watches | None = None,
) -> Trained | Plan:
    """Check the images, choose settings, train, measure, and write the model folder `out`.

    With `start`, a model folder of `analytic`, nothing trains: the new model has the frozen network of that
    one and its settings, and none of its classes, so that `merge` can join the two.

    `holdout` images of each class are sealed (a fifth, at most 200); with `eval`, images to
    measure on, the default is none. `settings` are `key.subkey=value` as in a recipe. Interrupted, the
    same call goes on. `conflicts` decides about one picture in several classes: `refuse`, `skip`, or the
    class to keep it in. `keep_embeddings` stores the features of each image, for a method that keeps
    statistics: patients can then be erased, and images relabelled, without the images. `dry_run` writes
    nothing and returns the plan.
    """
    watches = watches or Watches()
    piece = requested(
        method=method,
        epochs=epochs,
        exemplars=exemplars,
        side=side,
        backbone=backbone,
        weights=weights,
        settings=settings,
    )
    model = ModelFolder(Path(out))
    draft = Draft(model, FIRST)
    refuse_within_data(model.root, Path(data))
    refuse_within_model(model.root.resolve().parent)
    with reading(model.root):
        check_new_model(draft)
    if not dry_run:
        check_writable(model.root)
    folder = None if dry_run else model.root
    read = partial(read_images, Path(data), conflicts=conflicts, folder=folder, watch=watches.checking)
    is_measured, seen = eval is not None, None
    if start is None:
        lesson, choices = _lesson(read, piece, holdout, is_measured=is_measured)
    else:
        other = ModelFolder(Path(start))
        seen = Seen(trained=Seen.by(other, other.version()).trained)
        lesson, choices = _lesson_from(other.version(), read, piece, holdout, seen, is_measured=is_measured)
    lesson = with_embeddings(lesson, keep_embeddings=keep_embeddings)
    measure = None if eval is None else eval_images(Path(eval), lesson, seen)
    if dry_run:
        return _plan(lesson, choices, is_frozen=start is not None)
    watches.settings(choices, lesson)
    learned = partial(learn, draft, lesson, watches.training)
    return write_first(draft, lesson.request(), lambda: write_version(draft, lesson, learned(), measure))


def write_first(draft: Draft, request: dict[str, Any], write: Callable[[], object]) -> Trained:
    """Write the first version of a model, unless it is listed already, and the model's index last."""
    model = draft.model
    with writing(model.root), model.locked():
        if not model.exists:
            draft.begin(request)
            write()
            model.write({FIRST: draft.version.publish(draft.place)}, FIRST)
        elif not draft.is_of(request):
            raise _is_a_model(model)
        draft.clean()
    return Trained.read(model, model.version(FIRST))


def _plan(lesson: Lesson, choices: list[Choice], *, is_frozen: bool) -> Plan:
    """Say what training would do; its time is estimated from a few steps on this machine."""
    config, n_images = lesson.config, len(lesson.train)
    phases = [phase for phase in outline(config.method) if phase.task == "first" and not is_frozen]
    epochs = (config.first_task.epochs or config.training.epochs) if phases else 0
    passes = sum(phase.epochs for phase in phases) / NOMINAL.epochs
    trained, embedded = measure_pace(
        lesson.state.network,
        crop=lesson.state.preprocessing.crop,
        batch_size=config.training.batch_size,
        execution=config.execution,
    )
    n_embedded = n_images * (config.data.views or 1) if keeps_statistics(config.method.readout) else 0
    return Plan(
        version=FIRST,
        parent=None,
        remarks=lesson.table.remarks,
        images=lesson.table.counts(lesson.train),
        known=None,
        holdout=lesson.table.counts(lesson.sealed),
        visible_losses=visible_losses(lesson.table, lesson.sealed, lesson.new_classes),
        choices=choices,
        epochs=epochs,
        images_per_epoch=n_images,
        seconds=passes * epochs * n_images / trained + n_embedded / embedded,
    )


def check_new_model(draft: Draft) -> None:
    """Refuse a finished model, a folder with other files, and versions that have lost their model.json; an
    unfinished model is continued."""
    model = draft.model
    if model.exists and not draft.is_begun:
        raise _is_a_model(model)
    if not model.root.is_dir():
        return
    names = {path.name for path in model.root.iterdir() if not path.match(f".*{TEMPORARY}")}
    if strangers := names - {"versions", "images", "tensors", ".lock", "model.json"}:
        raise RunConflict(f"{model.root} holds no model, but {min(strangers)!r}. Give a new folder as --out.")
    versions = sorted(path.name for path in model.versions_path.glob("v*"))
    if versions and not model.exists and not draft.is_begun:
        raise DamagedFile(
            f"{model.manifest_path} is missing beside {versions[0]}. Restore it, or give another --out."
        )


def _is_a_model(model: ModelFolder) -> RunConflict:
    return RunConflict(
        f"{model.root} is a model already. Give another --out, or add classes with `medcil update`."
    )


def _lesson(
    read: Callable[..., ImageTable], piece: Recipe, holdout: int | None, *, is_measured: bool
) -> tuple[Lesson, list[Choice]]:
    shorter: list[int] = []

    def choose_side(facts: Sequence[ImageFacts]) -> int:
        sides = sorted(min(fact.width, fact.height) for fact in facts) or [SIDES[0]]
        shorter.append(sides[len(sides) // 2])
        return side_to_train(shorter[0], piece)

    table = read(choose_side, version=FIRST, fewest_classes=2)
    side = shorter[0] if table.pixels is None or shorter else table.pixels.side
    per_class = (0 if is_measured else HOLDOUT) if holdout is None else holdout
    split = set_aside(table, per_class, seed=0)
    config, choices = settings_to_train(list(table.counts(split[0]).values()), side, piece)
    state = ready_to_learn(config, None)
    asked = tuple(asked_keys({}, (), piece))
    weights = origin_of(config.network.weights, config.network.backbone)
    return Lesson(table, *split, state, None, config, asked, per_class, weights=weights), choices


def with_embeddings(lesson: Lesson, *, keep_embeddings: bool) -> Lesson:
    """Refuse to keep embeddings for a method without statistics."""
    if keep_embeddings and not keeps_statistics(lesson.config.method.readout):
        raise InvalidInput(
            "--keep-embeddings: the method keeps no statistics. Leave it out, or choose `--method analytic`.",
            code="model.embeddings.unsupported",
        )
    return replace(lesson, keep_embeddings=keep_embeddings)


def _lesson_from(
    other: VersionFolder,
    read: Callable[..., ImageTable],
    piece: Recipe,
    holdout: int | None,
    seen: Seen,
    *,
    is_measured: bool,
) -> tuple[Lesson, list[Choice]]:
    """Describe a first version that starts from the network of another model, with none of its classes.

    Patients on whom that network was trained are not sealed.
    """
    state, facts = without_classes(analytic_state(other)), other.provenance()
    table = read(state.preprocessing.side, version=FIRST, fewest_classes=2)
    per_class = (0 if is_measured else HOLDOUT) if holdout is None else holdout
    split = set_aside(table, per_class, seed=0, seen=seen)
    config, choices = settings_to_start(facts["settings"], list(table.counts(split[0]).values()), piece)
    ready_to_learn(config, state)
    asked = tuple(asked_keys(facts["settings"], facts["asked"], piece))
    origin: dict[str, Any] = {"started_from": other.source, "weights": facts.get("weights")}
    return Lesson(table, *split, state, None, config, asked, per_class, **origin), choices


def analytic_state(version: VersionFolder) -> State:
    """Load a model of `analytic`; refuse one that keeps no statistics, with which nothing can be merged."""
    state, name = version.load_state(), version.provenance()["settings"]["method"]["name"]
    if name != "analytic" or not isinstance(state.readout, StatisticsReadout):
        raise InvalidInput(
            f"{version.root.parent.parent} keeps no statistics: its method is {name}. Give a model of "
            "`analytic`.\nIts network is frozen, and its classes are sums that can be added: "
            "`medcil train DIR --out MODEL --method analytic`.",
            code="model.merge.unsupported",
        )
    return state


def ready_to_learn(config: RunConfig, state: State | None) -> State:
    """Set up the machine, build the state unless there is one, and try the method on it."""
    prepare_machine(config.execution)
    kind = READOUTS[config.method.readout]
    if state and keeps_statistics(config.method.readout) and not isinstance(state.readout, kind):
        raise InvalidInput(
            "method: the model has no statistics of its classes, which this method keeps from the first task "
            "on. Choose another one, or train a model with it from the beginning.",
            code="method.statistics.missing",
        )
    state = state or build_state(config)
    try_out(config.method, state.network, crop=state.preprocessing.crop)
    return state


def eval_images(path: Path, lesson: Lesson, seen: Seen | None = None) -> Measure:
    """Read the images of `--eval`: of known classes, and not trained on."""
    class_names, side = lesson.class_names, lesson.state.preprocessing.side
    with reading(path):
        table = list_images(path, fewest_classes=1).loaded(side)
    in_model = {folded(name): c for c, name in enumerate(class_names)}
    unknown = [name for name in table.class_names if folded(name) not in in_model]
    if unknown:
        raise InvalidInput(
            f"The model does not know the class {unknown[0]!r} of --eval {path}. Rename the folder, or move "
            f"it away.\nThe model knows: {', '.join(class_names)}."
        )
    samples = table.samples(side)
    trained = {*(lesson.table.sha256 or ()), *pixel_hashes(lesson.state.memory)}
    hashes = zip(table.names, table.sha256 or (), pixel_hashes(samples), strict=True)
    if same := [name for name, *own in hashes if not trained.isdisjoint(own)]:
        raise InvalidInput(
            f"--eval {path} has {len(same)} images that are trained on ({same[0]}). Take them out of one."
        )
    now, earlier = lesson.table.patients or (), seen.trained if seen else frozenset()
    known = earlier | {folded(now[i]) for i in lesson.train.tolist() if now}
    if both := sum(bool(who) and folded(who) in known for who in table.patients or ()):
        n = f"{both} of {len(table)} images of --eval"
        warnings.warn(f"{n} are of patients who are trained on: figures are too high.", stacklevel=2)
    places = torch.tensor([in_model[folded(name)] for name in table.class_names])
    return Measure(Samples(samples.images, places[samples.labels]), table.names, "eval", table.groups)


def write_version(
    draft: Draft, lesson: Lesson, state: State, given_eval: Measure | None, limit: float | None = None
) -> bool:
    """Write all files beside the state; return whether the old classes lost no more than `limit` points.

    Calibrate on sealed images, else on those of `--eval`, else on exemplars.
    """
    version, execution = draft.version, lesson.config.execution
    sealed = sealed_or_exemplars(version, state, n_old=lesson.n_old or None)
    measure = given_eval or sealed
    best = measure if sealed.kind == "exemplars" else sealed
    calibration = calibrate(state, best.samples, execution, groups=best.groups, measured_on=best.kind)
    calibration.write(version.root / File.CALIBRATION)
    before = None if lesson.parent is None else lesson.state
    figures, cost = measured(measure, before, state, execution)
    passed = True
    if cost is not None:
        loss = loss_in_points(cost)
        passed = limit is None or (loss is not None and loss <= limit + 1e-9)
        cost["gate"] = {"max_forgetting": limit, "loss_in_points": loss, "passed": passed}
    facts = provenance(draft, lesson, state, promoted=passed)
    describe(version, facts, figures, cost)
    return passed


def describe(version: VersionFolder, facts: Content, figures: Content, cost: Content | None) -> None:
    """Write what was measured, the page and the model card."""
    write_json(version.root / File.METRICS, figures)
    if cost is not None:
        write_json(version.root / File.FORGETTING, cost)
    write_json(version.root / File.PROVENANCE, facts)
    write_bytes(version.root / File.REPORT, page(facts, figures, cost).encode())
    write_bytes(version.root / File.CARD, card(facts, figures, cost).encode())
