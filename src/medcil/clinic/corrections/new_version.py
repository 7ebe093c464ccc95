"""Write a version that differs from its parent by no training: what rebalance, relabel and retire share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medcil.build import RunConfig
from medcil.clinic.corrections.learned import Learned
from medcil.clinic.holdout import Seen
from medcil.clinic.model_dir import FORMAT, File, LabelledImage, ModelFolder, VersionFolder
from medcil.clinic.train import Lesson, Trained, eval_images, store
from medcil.clinic.update import NextVersion, write_next
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.data.sources.folder import folded
from medcil.recipe import parse
from medcil.storage.atomic import reading, write_json
from medcil.storage.overwrite_guard import check_writable
from medcil.training.environment import prepare_machine
from medcil.training.state import State


@dataclass(frozen=True, eq=False)
class UntrainedVersion:
    """A version without new images."""

    lesson: Lesson
    state: Callable[[], State]
    holdout: list[LabelledImage]
    learned: Learned | None


def write_correction(
    model: Path, describe: Callable[[VersionFolder], UntrainedVersion], *, eval: Path | str | None = None
) -> Trained:
    """Write the version that `describe` makes of its parent, and make it current."""
    folder = ModelFolder(model)
    folder.refuse_half_erased()
    with reading(folder.root):
        place = NextVersion.of(folder)
    correction = describe(place.parent)
    check_writable(folder.root)
    if place.is_listed and not place.draft.is_of(correction.lesson.request()):
        place = NextVersion.after_current(folder)
        correction = describe(place.parent)
    lesson = correction.lesson
    prepare_machine(lesson.config.execution)
    measure = None if eval is None else eval_images(Path(eval), lesson, Seen.by(folder, place.parent))
    return write_next(place, lesson, lambda: _written(place, correction), measure)


def _written(place: NextVersion, correction: UntrainedVersion) -> State:
    version = place.draft.version
    if not version.has(File.HOLDOUT):
        write_json(version.root / File.HOLDOUT, {"format": FORMAT, "images": correction.holdout})
    if version.state_path.exists():
        return version.load_state()
    return store(place.draft, correction.lesson, correction.state(), correction.learned)


def lesson_without_images(parent: VersionFolder, settings: dict[str, Any], **changes: Any) -> Lesson:
    """Describe a version of the parent's classes with these settings."""
    facts, nothing = parent.provenance(), np.empty(0, dtype=np.int64)
    config = parse(settings, RunConfig, source="the settings")
    table = ImageTable(MemoryFiles({}), (), nothing, (), sha256=())
    asked = changes.pop("asked", tuple(facts["asked"]))
    per_class = facts["holdout_per_class"]
    state = parent.load_state()
    return Lesson(table, nothing, nothing, state, parent, config, asked, per_class, **changes)


def record_of(parent: VersionFolder) -> Learned | None:
    return Learned.read(parent) if parent.has(File.LEARNED) else None


def find_class(version: VersionFolder, name: str) -> str | None:
    """Return the model's class of this name; case and encoding make no difference."""
    return {folded(known): known for known in version.class_names()}.get(folded(name))
