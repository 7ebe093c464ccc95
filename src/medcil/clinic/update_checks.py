"""What an update cannot do, said before any work."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medcil.clinic.labelled_images import Measure
from medcil.clinic.learning import Lesson
from medcil.config import RunConfig
from medcil.data.sources.folder import folded
from medcil.errors import InvalidInput
from medcil.recipe import leaves
from medcil.training.state import State

CHANGEABLE = ("data.views", "data.augmentation")
"""Of what says how images are treated: nothing that was learned depends on them."""


def refuse_settled(config: RunConfig, before: dict[str, Any]) -> None:
    """What the network's embeddings depend on; recorded as asked for, it would be a lie about the model."""
    if config.data.root is not None:
        raise InvalidInput("data.root has no part in an update: its images are the folder or table you name.")
    was, asked = dict(leaves(before)), dict(leaves(config.identity()))
    for key, value in asked.items():
        is_settled = key.split(".")[0] in ("data", "network") and key not in CHANGEABLE
        if is_settled and was.get(key, value) != value:
            raise InvalidInput(
                f"{key}={value}: it was settled as {was[key]} when the model was trained. Leave it out; "
                "for another one train a new model with `medcil train`."
            )


def refuse_known(new: Sequence[str], known: Sequence[str], data: Path) -> None:
    taken = set(map(folded, known))
    same = [name for name in new if folded(name) in taken]
    if same:
        raise InvalidInput(
            f"{data} has the class {same[0]!r}, which the model knows already: move that folder away and "
            "update with the others. If it is another class, give it another name; to learn a known class "
            "from more images, train a new model with `medcil train`.\n"
            f"The model knows: {', '.join(known)}."
        )


def warn_of_unrehearsed(state: State) -> None:
    counts = state.memory.class_counts(len(state.class_names)).tolist()
    lacking = [name for name, n in zip(state.class_names, counts, strict=True) if not n]
    if lacking:
        warnings.warn(
            f"The model keeps no exemplar of {', '.join(lacking)}: nothing rehearses what it knows of it, "
            "and the update will forget more of it than of the others.",
            stacklevel=2,
        )


def refuse_blind_gate(limit: float | None, given_eval: Measure | None, lesson: Lesson) -> None:
    if limit is None:
        return
    if not 0 <= limit <= 100:
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
