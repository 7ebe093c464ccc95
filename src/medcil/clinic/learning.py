"""What training and updating share: from images and a state to a version, whole and in its place."""

import datetime
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medcil.build import build_method
from medcil.clinic.calibrate import calibrate
from medcil.clinic.draft import Draft
from medcil.clinic.labelled_images import Given, Indices, Measure, samples_of_new
from medcil.clinic.model_dir import FORMAT, VersionFolder
from medcil.clinic.patients import people
from medcil.clinic.settings import Asked
from medcil.config import RunConfig
from medcil.data.decoding.tensors import encode_png
from medcil.data.samples import Samples, no_samples
from medcil.data.stream import Task
from medcil.storage.atomic import flush_folder, read_json, read_verified, sha256, write_bytes, write_json
from medcil.training.checkpoint import FileJournal, Progress
from medcil.training.environment import RECORDED_PACKAGES, environment
from medcil.training.loop import learn_task, recalibrate
from medcil.training.state import State, load_state, save_state

ProgressWatch = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a version is made of."""

    given: Given
    train: Indices
    sealed: Indices
    state: State
    """Before."""
    parent: VersionFolder | None
    config: RunConfig
    asked: Asked
    holdout_per_class: int
    parent_sha256: str | None = None
    """Of what the state was read from."""

    @property
    def n_old(self) -> int:
        return len(self.state.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.state.class_names + self.given.class_names

    def learner(self) -> State:
        """The state, with images shown from now on as this version asks for it."""
        data, before = self.config.data, self.state.preprocessing
        shown = replace(before, views=data.views or 1, augmentation=data.augmentation or before.augmentation)
        return replace(self.state, preprocessing=shown)

    def request(self) -> dict[str, Any]:
        """What must be the same for a draft to be continued."""
        return {
            "format": FORMAT,
            "parent": None if self.parent is None else self.parent.name,
            "parent_sha256": self.parent_sha256,
            "settings": self.settings(),
            "images": self.given.fingerprint(np.arange(len(self.given))),
            "sealed": [self.given.sha256s[i] for i in self.sealed.tolist()],
        }

    def settings(self) -> dict[str, Any]:
        """With every default, and with no path of this machine."""
        return self.config.identity()


def learn(draft: Draft, lesson: Lesson, watch: ProgressWatch) -> State:
    """The state after the new classes, from the draft where it is learned already; and its hold-out."""
    _seal(draft.version, lesson)
    if draft.version.state_path.exists():
        return load_state(draft.version.state_path)
    side = lesson.state.preprocessing.side
    train = samples_of_new(lesson.given, lesson.train, side, n_old=lesson.n_old)
    task = Task(lesson.given.class_names, lesson.n_old, train, no_samples(side))
    if lesson.parent is None and lesson.config.network.recalibrate_batch_norm:
        recalibrate(lesson.state, train, lesson.config)
    draft.training.root.mkdir(parents=True, exist_ok=True)
    journal = FileJournal(draft.training, 1, log_size_before=0)
    pace = _Pace(lesson.config, watch)
    state = learn_task(
        lesson.learner(), task, build_method(lesson.config.method), lesson.config, journal=journal, watch=pace
    )
    write_json(draft.training.root / "pace.json", {"images_per_second": pace.images_per_second()})
    patients = people(draft.version, lesson.parent, lesson.given, lesson.train, lesson.sealed, train, state)
    learned = draft.part / "state"
    shutil.rmtree(learned, ignore_errors=True)  # where the last attempt ended just after it was written
    save_state(state, learned)
    if patients is not None:
        write_json(draft.version.people_path, {"format": FORMAT, **patients.of(learned)})
    learned.rename(draft.version.state_path)
    flush_folder(draft.version.root)
    # Through the disk in any case, so that a continued command cannot differ from an uninterrupted one.
    return load_state(draft.version.state_path)


class _Pace:
    """Passes progress on, and counts the images of this process."""

    def __init__(self, config: RunConfig, watch: ProgressWatch) -> None:
        self.batch, self.watch = config.training.batch_size, watch
        self.steps, self.began = 0, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        self.steps += progress.losses is None
        self.watch(progress)

    def images_per_second(self) -> float | None:
        seconds = time.monotonic() - self.began
        return round(self.steps * self.batch / seconds, 2) if self.steps and seconds > 0 else None


def _seal(version: VersionFolder, lesson: Lesson) -> None:
    """The hold-out: the old classes' as it was, the new ones' under random names."""
    folder = version.holdout_path
    if (folder / "manifest.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    entries = [] if lesson.parent is None else lesson.parent.holdout_entries()
    for entry in entries:
        assert lesson.parent is not None
        content = read_verified(lesson.parent.holdout_path / entry["file"], entry["sha256"])
        write_bytes(folder / entry["file"], content)
    samples = samples_of_new(lesson.given, lesson.sealed, lesson.state.preprocessing.side, n_old=lesson.n_old)
    entries = [*entries, *_written(folder, samples, lesson.class_names)] if len(samples) else entries
    write_json(folder / "manifest.json", {"format": FORMAT, "images": entries})


def _written(folder: Path, samples: Samples, class_names: tuple[str, ...]) -> list[dict[str, Any]]:
    entries = []
    for pixels, label in zip(samples.read_all(), samples.labels.tolist(), strict=True):
        content, name = encode_png(pixels), f"{secrets.token_hex(8)}.png"
        write_bytes(folder / name, content)
        entries.append({"file": name, "sha256": sha256(content), "class": class_names[label]})
    return entries


def calibrate_on(
    draft: Draft, lesson: Lesson, state: State, sealed: Measure, given_eval: Measure | None
) -> None:
    """On sealed images; where there are none, rather on those of `--eval` than on exemplars."""
    measure = given_eval if given_eval is not None and sealed.kind == "exemplars" else sealed
    calibrate(
        state,
        measure.samples,
        lesson.config.execution,
        groups=measure.groups,
        measured_on=measure.kind,
    ).write(draft.version.calibration_path)


def provenance(draft: Draft, lesson: Lesson, *, promoted: bool) -> dict[str, Any]:
    """When, from what and how. No path, no patient."""
    where = environment(lesson.config.execution)
    packages = {name: where["packages"][name] for name in RECORDED_PACKAGES}
    pace_path = draft.training.root / "pace.json"
    pace = read_json(pace_path) if pace_path.exists() else {"images_per_second": None}
    return {
        "format": FORMAT,
        "version": draft.name,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "medcil": packages["medcil"],
        "packages": packages,
        "device": where["device"],
        "device_kind": where["device_kind"],
        "parent": None if lesson.parent is None else lesson.parent.name,
        "promoted": promoted,
        "classes_added": list(lesson.given.class_names),
        "images": lesson.given.counts(lesson.train),
        "holdout": lesson.given.counts(lesson.sealed),
        "holdout_per_class": lesson.holdout_per_class,
        "images_sha256": lesson.given.fingerprint(np.concatenate([lesson.train, lesson.sealed])),
        "asked": lesson.asked.to_keep(),
        "settings": lesson.settings(),
        **pace,
    }
