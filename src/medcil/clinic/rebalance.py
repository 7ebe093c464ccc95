"""Choose β and λ of an analytic model again: a new version from the same statistics, without any training."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from medcil.build import RunConfig
from medcil.clinic.corrections.learned import Learned
from medcil.clinic.holdout import Seen
from medcil.clinic.model_dir import File, ModelFolder
from medcil.clinic.train import Lesson, Trained, eval_images, seal, store
from medcil.clinic.update import CHOSEN_AGAIN, NextVersion, write_next
from medcil.data.image_table import ImageTable, MemoryFiles
from medcil.errors import InvalidInput
from medcil.readouts.ridge import Ridge
from medcil.recipe import laid_over, parse
from medcil.storage.atomic import reading
from medcil.storage.overwrite_guard import check_writable
from medcil.training.environment import prepare_machine
from medcil.training.state import State

SYMBOLS = dict(zip(CHOSEN_AGAIN, "βλ", strict=True))


def rebalance(
    model: Path | str,
    *,
    balance: float | None = None,
    strength: float | None = None,
    eval: Path | str | None = None,
) -> Trained:
    """Solve the current version's classifier again with another β (`balance`), λ (`strength`), or both.

    The new version becomes current. `eval` has images to measure on in place of the sealed ones.
    """
    chosen = {k: v for k, v in (("balance", balance), ("strength", strength)) if v is not None}
    folder = ModelFolder(Path(model))
    folder.refuse_half_erased()
    with reading(folder.root):
        place = NextVersion.of(folder)
    lesson = _lesson(place, chosen)
    check_writable(folder.root)
    if place.is_listed and not place.draft.is_of(lesson.request()):
        place = NextVersion.after_current(folder)
        lesson = _lesson(place, chosen)
    prepare_machine(lesson.config.execution)
    measure = None if eval is None else eval_images(Path(eval), lesson, Seen.by(folder, place.parent))
    return write_next(place, lesson, partial(_solved_again, place, lesson), measure)


def _lesson(place: NextVersion, chosen: Mapping[str, float]) -> Lesson:
    """Describe the new version: no image, and other settings than the parent's."""
    state, facts = place.parent.load_state(), place.parent.provenance()
    before = facts["settings"]["method"]
    if before["name"] != "analytic" or not isinstance(state.readout, Ridge):
        raise InvalidInput(
            f"The model's method is {before['name']}. Only for `analytic` can β or λ be chosen again.",
            code="model.rebalance.unsupported",
        )
    if state.readout.is_pooled:
        raise InvalidInput(
            "The model has pooled statistics, whose β is settled. Train with method.pooled: false.",
            code="model.rebalance.pooled",
        )
    changed = {key: value for key, value in chosen.items() if value != before[key]}
    if not changed:
        raise InvalidInput(
            "Nothing to change: the model has this β and λ. Give another --balance or --strength.",
            code="model.rebalance.unchanged",
        )
    config = parse(laid_over(facts["settings"], {"method": changed}), RunConfig, source="the settings")
    nothing = np.empty(0, dtype=np.int64)
    table = ImageTable(MemoryFiles({}), (), nothing, (), sha256=())
    asked = tuple(sorted({*facts["asked"], *(f"method.{key}" for key in changed)}))
    what = ", ".join(f"{SYMBOLS[key]} {before[key]} → {value:g}" for key, value in changed.items())
    per_class = facts["holdout_per_class"]
    return Lesson(table, nothing, nothing, state, place.parent, config, asked, per_class, what)


def _solved_again(place: NextVersion, lesson: Lesson) -> State:
    seal(place.draft.version, lesson)
    if place.draft.version.state_path.exists():
        return place.draft.version.load_state()
    state, before = lesson.learner(), place.parent.provenance()["settings"]["method"]
    readout, method = copy.deepcopy(state.readout), lesson.config.identity()["method"]
    assert isinstance(readout, Ridge)
    readout.rebalance(
        method["balance"],
        None if method["strength"] == before["strength"] else method["strength"],
        n_first=state.network.classifier.block_sizes[0],
    )
    learned = Learned.read(place.parent) if place.parent.has(File.LEARNED) else None
    return store(place.draft, lesson, replace(state, readout=readout), learned)
