"""Operating points and abstention, with what the sealed hold-out can say for them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from medcil.clinic.calibration import low_threshold
from medcil.errors import InvalidInput, nearest
from medcil.metrics.intervals import independent_images, wilson

TIE = 1e-9
"""Probabilities that differ by less are the same: an image in another batch may differ in its last bit."""


@dataclass(frozen=True)
class OperatingPoint:
    """A class is flagged from this probability on, whether or not another class is more probable."""

    class_name: str
    wanted: float
    threshold: float
    supported: float
    """The sensitivity on further images is at least this, on average over hold-outs of this size."""
    caught: int
    n_own: int
    n_patients: int | None
    independent_own: float
    """As many images there are if a patient's are all alike."""
    rejected: int
    n_other: int
    independent_other: float

    def sentence(self) -> str:
        low, high = wilson(self.caught / self.n_own * self.independent_own, self.independent_own)
        said = (
            f"{self.class_name} is flagged from a probability of {self.threshold:.3g} on: {self.caught} of "
            f"{self.n_own} of its hold-out images"
        )
        said += f", of {self.n_patients} patients" if self.n_patients else ""
        said += f" ({_percent(low)} to {_percent(high)})"
        if self.n_other:
            rejected = self.rejected / self.n_other
            low, high = wilson(rejected * self.independent_other, self.independent_other)
            said += f", specificity {_percent(rejected)} ({_percent(low)} to {_percent(high)})"
        if self.supported < self.wanted:
            needed = math.ceil(self.wanted / (1 - self.wanted) - 1e-9)
            said += (
                f". {f'{self.n_patients} patients' if self.n_patients else f'{self.n_own} images'} support a "
                f"sensitivity of {self.supported:.3g} at most, not {self.wanted:g}; that takes {needed}"
            )
        return f"{said}."


def operating_points(
    probabilities: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, "n"],
    class_names: Sequence[str],
    wanted: Mapping[str, float],
    groups: Sequence[str] | None = None,
) -> list[OperatingPoint]:
    """For each class asked for, the highest threshold that the hold-out supports."""
    points = []
    for name, sensitivity in wanted.items():
        check_sensitivity(name, sensitivity, class_names)
        c = class_names.index(name)
        own, other = probabilities[labels == c, c], probabilities[labels != c, c]
        if not len(own):
            raise InvalidInput(
                f"The hold-out has no image of {name!r}, so no threshold can be chosen for it: leave it out "
                "of --sensitivity, or train with --holdout."
            )
        own_groups, other_groups = _of(groups, labels == c), _of(groups, labels != c)
        lowest, missed = low_threshold(own, own_groups, 1 - sensitivity)
        threshold = max(0.0, lowest - TIE)
        points.append(
            OperatingPoint(
                class_name=name,
                wanted=sensitivity,
                threshold=threshold,
                supported=1 - missed,
                caught=int((own >= threshold).sum()),
                n_own=len(own),
                n_patients=None if own_groups is None else len(set(own_groups)),
                independent_own=independent_images(len(own), own_groups),
                rejected=int((other < threshold).sum()),
                n_other=len(other),
                independent_other=independent_images(len(other), other_groups),
            )
        )
    return points


def check_sensitivity(name: str, sensitivity: float, class_names: Sequence[str]) -> None:
    if name not in class_names:
        raise InvalidInput(f"The model knows no class {name!r}. {nearest(name, class_names)}")
    if not 0 < sensitivity < 1:
        raise InvalidInput(
            f"The sensitivity of {name!r} is {sensitivity:g}: give a share between 0 and 1, such as 0.95."
        )


def abstention_sentence(
    probabilities: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, "n"],
    below: float,
    groups: Sequence[str] | None = None,
) -> str:
    """What abstaining does to the hold-out."""
    if not len(labels):
        return "There is no hold-out to measure the abstention on."
    is_right = probabilities.argmax(axis=1) == labels
    answered = probabilities.max(axis=1) >= below
    n_right, n = int(is_right[answered].sum()), int(answered.sum())
    silent = len(labels) - n
    said = f"Below a probability of {below:g} no class is given: {silent} of {len(labels)} hold-out images"
    if not n:
        return f"{said}."
    independent = independent_images(n, _of(groups, answered))
    low, high = wilson(n_right / n * independent, independent)
    return (
        f"{said}. Of the others {_percent(n_right / n)} are right ({_percent(low)} to {_percent(high)}), of "
        f"all {_percent(float(is_right.mean()))}."
    )


def _of(groups: Sequence[str] | None, chosen: Bool[np.ndarray, "n"]) -> list[str] | None:
    return None if groups is None else [groups[i] for i in np.flatnonzero(chosen).tolist()]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
