"""Choose β and λ of an analytic model again: a new version from the same statistics, without any training."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from medcil.clinic.corrections.new_version import (
    UntrainedVersion,
    lesson_without_images,
    record_of,
    write_correction,
)
from medcil.clinic.model_dir import VersionFolder
from medcil.clinic.train import Lesson, Trained
from medcil.clinic.update import CHOSEN_AGAIN
from medcil.errors import InvalidInput
from medcil.readouts.ridge import Ridge
from medcil.recipe import laid_over
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
    return write_correction(Path(model), lambda parent: _described(parent, chosen), eval=eval)


def _described(parent: VersionFolder, chosen: Mapping[str, float]) -> UntrainedVersion:
    """Describe the new version: no image, and other settings than the parent's."""
    state, facts = parent.load_state(), parent.provenance()
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
    settings = laid_over(facts["settings"], {"method": changed})
    asked = tuple(sorted({*facts["asked"], *(f"method.{key}" for key in changed)}))
    what = ", ".join(f"{SYMBOLS[key]} {before[key]} → {value:g}" for key, value in changed.items())
    lesson = lesson_without_images(parent, settings, asked=asked, rebalanced=what)
    is_same_strength = lesson.config.identity()["method"]["strength"] == before["strength"]
    return UntrainedVersion(
        lesson,
        lambda: _solved_again(lesson, keep_strength=is_same_strength),
        parent.holdout_entries(),
        record_of(parent),
    )


def _solved_again(lesson: Lesson, *, keep_strength: bool) -> State:
    state, method = lesson.learner(), lesson.config.identity()["method"]
    readout = copy.deepcopy(state.readout)
    assert isinstance(readout, Ridge)
    readout.rebalance(
        method["balance"],
        None if keep_strength else method["strength"],
        n_first=state.network.classifier.block_sizes[0],
    )
    return replace(state, readout=readout)
