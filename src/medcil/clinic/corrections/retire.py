"""Withdraw a class from a model of `analytic`: a new version without its statistics, and no training."""

from pathlib import Path

from medcil.clinic.corrections.new_version import (
    UntrainedVersion,
    find_class,
    lesson_without_images,
    record_of,
    write_correction,
)
from medcil.clinic.corrections.revise import (
    first_task,
    first_task_trains,
    has_separate_statistics,
    without_class,
)
from medcil.clinic.model_dir import ModelFolder, VersionFolder
from medcil.clinic.train import Trained
from medcil.errors import InvalidInput, nearest

FEWEST = 2
"""Classes that a model has."""


def retire(model: Path | str, class_name: str) -> Trained:
    """Write a version of the model without this class, and make it current; earlier versions keep the class.

    The classifier is the one that was solved without the class. Sealed images and exemplars of the class are
    not listed any more. The network stays as it is.
    """
    folder = ModelFolder(Path(model))
    return write_correction(folder.root, lambda parent: _described(parent, class_name, folder.first()))


def _described(parent: VersionFolder, class_name: str, first: str) -> UntrainedVersion:
    name, known = find_class(parent, class_name), parent.class_names()
    if name is None:
        raise InvalidInput(
            f"The model knows no class {class_name!r}. {nearest(class_name, known)}",
            code="model.class.unknown",
        )
    if not has_separate_statistics(parent):
        raise InvalidInput(
            "Only `analytic` with method.pooled: false can retire a class. Train a new model without it.",
            code="model.retire.unsupported",
        )
    if len(known) <= FEWEST:
        raise InvalidInput(
            f"Without {name!r} one class would be left. Add another one with `medcil update` first.",
            code="model.retire.last",
        )
    words, settings = f"{name} retired", parent.provenance()["settings"]
    lesson = lesson_without_images(parent, settings, corrected=words, correction_key=words)
    learned, is_trained, label = record_of(parent), first_task_trains(parent), known.index(name)
    n_first = first_task(parent, first)
    if learned is not None:
        theirs = {entry.image for entry in learned.images if entry.class_name == name}
        learned = learned.without(theirs, parent.store)
    return UntrainedVersion(
        lesson,
        lambda: without_class(lesson.learner(), label, first=n_first, is_trained=is_trained),
        [entry for entry in parent.holdout_entries() if entry["class"] != name],
        learned,
    )
