"""Decide what happens to one picture that is in several classes."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from medcil.data.wording import listed_below
from medcil.errors import InvalidInput

REFUSE, SKIP = "refuse", "skip"


def without_conflicts(
    sha256s: Sequence[str],
    labels: Int[np.ndarray, "n"],
    class_names: Sequence[str],
    names: Sequence[str],
    rule: str,
) -> Int[np.ndarray, "m"]:
    """Return the indices of the images to use.

    Files of the same content in several classes are an error under `refuse`; under `skip` none of them is
    used; under the name of a class its copies are used, and a picture that is not in that class is an error.
    """
    if rule not in (REFUSE, SKIP, *class_names):
        raise InvalidInput(
            f"--conflicts {rule}: no such class. Give refuse, skip, or one of {', '.join(class_names)}.",
            code="data.conflicts.unknown",
        )
    copies = defaultdict(list)
    for index, sha256 in enumerate(sha256s):
        copies[sha256].append(index)
    dropped, unsolved = set[int](), list[str]()
    for same in copies.values():
        classes = {class_names[labels[index]] for index in same}
        if len(classes) == 1:
            continue
        if rule == SKIP or rule in classes:
            dropped |= {index for index in same if class_names[labels[index]] != rule}
        else:
            unsolved.append(", ".join(f"{names[index]} ({class_names[labels[index]]})" for index in same))
    if unsolved:
        first = (
            f"{len(unsolved)} pictures are in several classes: remove the wrong ones, or give --conflicts "
            "skip or a class."
        )
        raise InvalidInput(listed_below(first, unsolved), code="data.conflicts.unsolved")
    kept = np.array([index for index in range(len(labels)) if index not in dropped], dtype=np.int64)
    emptied = set(labels.tolist()) - set(labels[kept].tolist())
    if emptied:
        raise InvalidInput(
            f"All images of {class_names[min(emptied)]!r} are in another class too. Remove the wrong ones.",
            code="data.conflicts.empty",
        )
    return kept
