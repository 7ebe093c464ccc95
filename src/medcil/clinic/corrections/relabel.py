"""Move images of a model of `analytic` from one class to another: a new version, without any training."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from medcil.clinic.corrections.features import find_features, list_any
from medcil.clinic.corrections.learned import Learned, hash_images, name_key
from medcil.clinic.corrections.new_version import (
    UntrainedVersion,
    find_class,
    lesson_without_images,
    write_correction,
)
from medcil.clinic.corrections.revise import first_task, first_task_trains, is_revisable, moves_of, revise
from medcil.clinic.model_dir import LabelledImage, ModelFolder, VersionFolder
from medcil.clinic.train import Trained
from medcil.data.samples import Samples
from medcil.data.sources.manifest import Row, read_manifest
from medcil.errors import InvalidInput, nearest
from medcil.storage.atomic import reading
from medcil.training.state import State


@dataclass(frozen=True, eq=False)
class CorrectionTable:
    """The rows of a table, and perhaps where their images are."""

    table: Path
    rows: list[tuple[int, Row]]
    images: Path | None

    def at(self, number: int) -> str:
        """Name a row as a spreadsheet counts it."""
        return f"Row {number} of {self.table.name}"


def relabel(
    model: Path | str,
    corrections: Path | str,
    *,
    images: Path | str | None = None,
    eval: Path | str | None = None,
) -> Trained:
    """Write a version in which the listed images are of other classes, and make it current.

    `corrections` is a table with the columns path and label. Paths are below `images`, a folder or archive;
    without it they are the names under which images were learned with embeddings kept. Sealed images that
    are listed change their class too. `eval` has images to measure on in place of the sealed ones.
    """
    table = Path(corrections)
    with reading(table):
        _, rows = read_manifest(table.read_bytes(), table.name, table)
    request = CorrectionTable(table, rows, None if images is None else Path(images))
    folder = ModelFolder(Path(model))
    return write_correction(
        folder.root, lambda parent: _described(parent, request, first=folder.first()), eval=eval
    )


def _described(parent: VersionFolder, request: CorrectionTable, *, first: str) -> UntrainedVersion:
    if not is_revisable(parent):
        raise InvalidInput(
            "Relabelling needs `analytic` with method.pooled: false, and images on record. Train again.",
            code="model.relabel.unsupported",
        )
    learned, state, samples = Learned.read(parent), parent.load_state(), _given(parent, request)
    wanted = _wanted(parent, request, learned, samples)
    entries = [
        entry for entry in learned.images if wanted.get(entry.image, entry.class_name) != entry.class_name
    ]
    sealed, hashes = parent.holdout_entries(), hash_images(parent.holdout(), parent.store)
    holdout: list[LabelledImage] = [
        {"file": entry["file"], "class": wanted.get(image, entry["class"])}
        for image, entry in zip(hashes, sealed, strict=True)
    ]
    changes = Counter((entry.class_name, wanted[entry.image]) for entry in entries)
    changes += Counter(
        (was["class"], now["class"])
        for was, now in zip(sealed, holdout, strict=True)
        if was["class"] != now["class"]
    )
    if not changes:
        raise InvalidInput(
            f"Nothing to change: the images are of these classes already. Check {request.table.name}.",
            code="model.relabel.unchanged",
        )
    found = find_features([parent], entries, samples)
    if found is None:
        raise InvalidInput(
            "No embedding of some images is kept. Give the images: `--images DIR`.",
            code="model.relabel.features",
        )
    names = state.class_names
    moves = [
        replace(move, target=names.index(wanted[entry.image]))
        for move, entry in zip(moves_of(entries, found.values, state, first=first), entries, strict=True)
    ]
    after = learned.relabelled(wanted)
    if emptied := [name for name in names if learned.counts()[name] and not after.counts()[name]]:
        raise InvalidInput(
            f"No image of {emptied[0]!r} would be left. Use `medcil retire` for it.",
            code="model.relabel.emptied",
        )
    words = ", ".join(f"{n} from {was} to {now}" for (was, now), n in sorted(changes.items()))
    key = parent.store.hashed("relabel", repr(sorted(wanted.items())).encode())
    settings = parent.provenance()["settings"]
    lesson = lesson_without_images(parent, settings, corrected=words, correction_key=key)
    n_first = first_task(parent, first)

    def state_after() -> State:
        before = _with_classes(lesson.learner(), parent, wanted)
        return revise(before, moves, first=n_first, is_trained=first_task_trains(parent))

    return UntrainedVersion(lesson, state_after, holdout, after)


def _with_classes(state: State, parent: VersionFolder, wanted: Mapping[str, str]) -> State:
    """Give exemplars their right classes."""
    memory = state.memory
    classes = [
        wanted.get(image, state.class_names[label])
        for image, label in zip(hash_images(memory, parent.store), memory.labels.tolist(), strict=True)
    ]
    labels = torch.tensor([state.class_names.index(name) for name in classes], dtype=torch.int64)
    return replace(state, memory=replace(memory, labels=labels))


def _given(parent: VersionFolder, request: CorrectionTable) -> Samples | None:
    """Read the images of the rows, in their order."""
    if request.images is None:
        return None
    table = list_any(request.images)
    places = {name: place for place, name in enumerate(table.names)}
    for number, row in request.rows:
        if row.path not in places:
            raise InvalidInput(
                f"{request.at(number)}: no image {row.path} in {request.images}. Correct the path.",
                code="model.relabel.path",
            )
    chosen = np.array([places[row.path] for _, row in request.rows], dtype=np.int64)
    side = parent.side()
    return table.loaded(side, chosen).samples(side)


def _wanted(
    parent: VersionFolder, request: CorrectionTable, learned: Learned, samples: Samples | None
) -> dict[str, str]:
    """Return the right class of each image, by its hash."""
    store = parent.store
    if samples is None:
        by_name = learned.images_by_name(store)
        images = [by_name.get(name_key(row.path, store), set()) for _, row in request.rows]
    else:
        images = [{image} for image in hash_images(samples, store)]
    known = {entry.image for entry in learned.images} | set(hash_images(parent.holdout(), store))
    wanted: dict[str, str] = {}
    for (number, row), found in zip(request.rows, images, strict=True):
        name = find_class(parent, row.label)
        if name is None:
            raise InvalidInput(
                f"{request.at(number)}: the model has no class {row.label!r}. "
                f"{nearest(row.label, parent.class_names())}",
                code="model.relabel.class",
            )
        if len(found) > 1:
            raise InvalidInput(
                f"{request.at(number)}: {len(found)} images have the name {row.path}. Give `--images DIR`.",
                code="model.relabel.ambiguous",
            )
        if not found & known:
            way = "Leave it out." if samples is not None else "Leave it out, or give `--images DIR`."
            raise InvalidInput(
                f"{request.at(number)}: {row.path} was not learned. {way}", code="model.relabel.image"
            )
        (image,) = found
        if wanted.setdefault(image, name) != name:
            raise InvalidInput(
                f"{request.at(number)}: {row.path} is listed with two classes. Keep one.",
                code="model.relabel.twice",
            )
    return wanted
