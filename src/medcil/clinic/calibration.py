"""Turn a model's scores into calibrated probabilities and thresholds. Numbers only: no network, no torch.

The scores of a model carry a log prior. Without it they are evidence: log p(image | class) up to a constant,
if the network is neither over- nor underconfident. A temperature, fitted on images that were never trained
on, corrects the confidence; then Bayes' rule gives the probabilities under any prior:

    p(class | image)  ∝  prior(class) · exp(evidence / temperature)

Docs: docs/explanation/probabilities.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int, Real

from medcil.errors import DamagedFile, InvalidInput, nearest
from medcil.metrics.intervals import independent_images, wilson
from medcil.storage.atomic import read_json, write_json

if TYPE_CHECKING:  # numbers only: an exported model is used without torch
    from medcil.config import ExecutionConfig
    from medcil.data.samples import Samples
    from medcil.training.state import State

FORMAT = 1
BOUNDS = (0.01, 100.0)
"""The range of temperatures that is searched."""
SPREAD = 1.0
"""Standard deviation of the prior on the log temperature: a factor of e."""
SHRUNK = 0.05
"""A note is written if the prior moves the log temperature by more than this."""


@dataclass(frozen=True)
class Unlike:
    """The rule that calls an image unlike anything known: its likeness is below the threshold."""

    threshold: float | None
    """None if nothing could be measured: then no image is called so."""
    false_alarms: float | None
    """At most this share of new images of any known class is called so, on average."""
    measured_on: str
    """`hold-out`, `eval` (the images of `--eval`), or `exemplars`: these were trained on, and there are more
    false alarms than stated."""


@dataclass(frozen=True)
class Calibration:
    temperature: float
    class_prior_in_scores: tuple[float, ...]
    """The log prior in the scores, by class."""
    unlike: Unlike
    n_images: int
    notes: tuple[str, ...] = ()
    """What too few images could not support, in sentences."""

    def evidence(self, scores: Real[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
        plain = scores.astype(np.float64) - np.array(self.class_prior_in_scores)
        return np.asarray(plain / self.temperature)

    def probabilities(
        self, scores: Real[np.ndarray, "n classes"], prior: Sequence[float]
    ) -> Float[np.ndarray, "n classes"]:
        """Return the probabilities under a prior; a class with prior 0 gets probability 0."""
        with np.errstate(divide="ignore"):
            log_prior = np.log(np.asarray(prior, dtype=np.float64))
        return softmax(self.evidence(scores) + log_prior)

    def is_unlike(self, likeness: Float[np.ndarray, "n"]) -> np.ndarray:
        threshold = -math.inf if self.unlike.threshold is None else self.unlike.threshold
        return np.asarray(likeness < threshold)

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "temperature": self.temperature,
            "class_prior_in_scores": list(self.class_prior_in_scores),
            "unlike": dict(vars(self.unlike)),
            "images": self.n_images,
            "notes": list(self.notes),
        }

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, content: Any, source: str) -> "Calibration":
        try:
            if isinstance(content["format"], int) and content["format"] > FORMAT:
                raise InvalidInput(f"{source} was written by a newer medcil: update medcil.")
            calibration = cls(
                temperature=float(content["temperature"]),
                class_prior_in_scores=tuple(float(value) for value in content["class_prior_in_scores"]),
                unlike=Unlike(**content["unlike"]),
                n_images=int(content.get("images", 0)),
                notes=tuple(content.get("notes", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"{source} is damaged ({error!r}); restore it.") from None
        numbers = (calibration.temperature, *calibration.class_prior_in_scores)
        maybe = (calibration.unlike.threshold, calibration.unlike.false_alarms)
        is_sound = all(number is None or isinstance(number, int | float) for number in maybe)
        numbers += tuple(number for number in maybe if is_sound and number is not None)
        if not is_sound or not all(map(math.isfinite, numbers)) or calibration.temperature <= 0:
            raise DamagedFile(f"{source} is damaged (a number in it makes no sense); restore it.")
        return calibration


def uncalibrated(temperature: float, log_prior: Sequence[float], *notes: str) -> Calibration:
    """Return the calibration of a model without images to measure on."""
    return Calibration(temperature, tuple(log_prior), Unlike(None, None, "nothing"), 0, notes)


def softmax(logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def balanced_weights(labels: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Weight images so that every class present counts the same; the weights sum to the number of images."""
    counts = np.bincount(labels)
    return np.asarray(len(labels) / ((counts > 0).sum() * counts[labels]))


def fit_temperature(
    evidence: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, "n"], *, reference: float
) -> tuple[float, float]:
    """Return the temperature to use, and the one fitted without the prior.

    The first minimizes the negative log likelihood, with classes weighted alike, plus a penalty for the
    distance from the reference: a few images hardly move it, hundreds decide alone.
    """
    weights, rows = balanced_weights(labels), np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        logits = evidence / math.exp(log_temperature)
        highest = logits.max(axis=1)
        normalizer = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
        return float(weights @ (normalizer - logits[rows, labels]))

    def doubted_loss(log_temperature: float) -> float:
        return loss(log_temperature) + 0.5 * ((log_temperature - math.log(reference)) / SPREAD) ** 2

    return math.exp(_minimize(doubted_loss)), math.exp(_minimize(loss))


def _minimize(loss: Callable[[float], float]) -> float:
    """Minimize over the log temperatures: a grid, then ternary search around its best point."""
    grid = np.linspace(math.log(BOUNDS[0]), math.log(BOUNDS[1]), 185)
    best = int(np.argmin([loss(float(point)) for point in grid]))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    for _ in range(60):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return (low + high) / 2


def low_threshold(
    values: Float[np.ndarray, "n"], groups: Sequence[str] | None, rate: float
) -> tuple[float, float]:
    """Return the highest threshold that a new value falls below with at most this probability, and the rate
    it keeps. The rate is higher than requested if even the lowest value exceeds it.

    A new value is below the k-th smallest of n with probability at most k / (n + 1). Images of one patient
    are not independent: then n counts patients, and each of a patient's m images counts 1 / m, which holds
    for an
    image of a new patient (hierarchical conformal prediction).
    """
    counts = Counter(groups or range(len(values)))
    weights = np.array([1 / counts[who] for who in groups or range(len(values))])
    order = np.argsort(values, kind="stable")
    rates = (np.cumsum(weights[order]) - weights[order] + 1) / (len(counts) + 1)
    is_kept = rates <= rate + 1e-12  # in the last digit a sum of thirds may exceed it
    last = max(0, int(is_kept.sum()) - 1)
    return float(values[order[last]]), float(min(rate, rates[last]) if is_kept[last] else rates[last])


def likeness_threshold(
    likeness: Float[np.ndarray, "n"],
    labels: Int[np.ndarray, "n"],
    false_alarms: float,
    groups: Sequence[str] | None = None,
) -> tuple[float | None, float | None]:
    """Return the threshold, and the false-alarm rate that it keeps in every class.

    The lowest threshold of all classes keeps all their rates, however frequent each class is.
    """
    if not len(labels):
        return None, None
    places = [np.flatnonzero(labels == c).tolist() for c in np.unique(labels)]
    found = [
        low_threshold(likeness[own], None if groups is None else [groups[i] for i in own], false_alarms)
        for own in places
    ]
    return min(threshold for threshold, _ in found), max(false_alarms, *(rate for _, rate in found))


def calibrate(
    state: "State",
    samples: "Samples",
    execution: "ExecutionConfig | None" = None,
    *,
    groups: Sequence[str] | None = None,
    measured_on: str = "hold-out",
    false_alarms: float = 0.05,
) -> Calibration:
    """Fit the temperature, and the threshold of "unlike anything known", on labelled images.

    `groups` names the patient of each image, if patients are known. `measured_on` is `hold-out`, `eval`, or
    `exemplars` if only images remain that were trained on; the notes then say so.
    """
    if not 0 < false_alarms < 1:
        raise InvalidInput(f"false_alarms is {false_alarms:g}: give a share between 0 and 1, such as 0.05.")
    labels = samples.labels.numpy()
    from medcil.training.inference import Scorer

    scores, likeness = Scorer(state, execution)(samples)
    prior = state.readout.log_prior.double().numpy()
    reference = state.readout.temperature
    found = calibrated(
        scores, likeness, labels, prior, reference=reference, false_alarms=false_alarms, groups=groups
    )
    if not len(labels):
        return found
    notes = list(found.notes)
    absent = [name for c, name in enumerate(state.class_names) if not (labels == c).any()]
    if absent:
        notes.append(
            f"There was no image of {', '.join(absent)} to calibrate on: how often it is falsely called "
            "unlike anything known was not measured."
        )
    if measured_on == "exemplars":
        notes.append(
            "Calibrated on exemplars, which were trained on: confidence is too high, and more images "
            "are falsely called unlike anything known than stated."
        )
    return replace(found, unlike=replace(found.unlike, measured_on=measured_on), notes=tuple(notes))


def calibrated(
    scores: Float[np.ndarray, "n classes"],
    likeness: Float[np.ndarray, "n"],
    labels: Int[np.ndarray, "n"],
    log_prior: Float[np.ndarray, "classes"],
    *,
    reference: float,
    false_alarms: float,
    groups: Sequence[str] | None = None,
) -> Calibration:
    """Fit a calibration to scores and likenesses."""
    if not len(labels):
        note = "There were no images to calibrate on: probabilities are as the network gives them."
        return uncalibrated(reference, log_prior.tolist(), note)
    evidence, notes = scores - log_prior, []
    temperature, alone = fit_temperature(evidence, labels, reference=reference)
    if abs(np.log(alone / temperature)) > SHRUNK:
        notes.append(
            f"{len(labels)} images are few to fit a temperature: {alone:.3g}, which they alone speak for, "
            f"was drawn to {temperature:.3g}."
        )
    if _speaks_against_prior(scores, evidence, labels, reference=reference):
        notes.append(
            "These images speak against the class frequencies that the scores are said to carry: "
            "probabilities under a prior of one's own deserve caution."
        )
    threshold, stated = likeness_threshold(likeness, labels, false_alarms, groups)
    if stated is not None and stated > false_alarms:
        fewest, unit = round(1 / stated) - 1, "images" if groups is None else "patients"
        notes.append(
            f"The fewest {unit} of a class, {fewest}, do not suffice for a false-alarm rate of "
            f"{false_alarms:g}: it is up to {stated:.3g}."
        )
    unlike = Unlike(threshold, stated, "hold-out")
    return Calibration(temperature, tuple(log_prior.tolist()), unlike, len(labels), tuple(notes))


def _speaks_against_prior(
    scores: Float[np.ndarray, "n classes"],
    evidence: Float[np.ndarray, "n classes"],
    labels: Int[np.ndarray, "n"],
    *,
    reference: float,
) -> bool:
    """Tell whether the scores explain the labels better with their prior than without it, by more than two
    standard errors, with classes weighted alike."""
    losses = []
    for logits in (evidence, scores):
        temperature, _ = fit_temperature(logits, labels, reference=reference)
        of_truth = softmax(logits / temperature)[np.arange(len(labels)), labels]
        losses.append(-np.log(np.maximum(of_truth, np.finfo(np.float64).tiny)))
    worse = balanced_weights(labels) * (losses[0] - losses[1])
    return len(labels) > 1 and bool(worse.mean() > 2 * worse.std(ddof=1) / np.sqrt(len(labels)))


TIE = 1e-9
"""Smaller differences in probability are rounding: the batch an image is in may change its last bit."""


@dataclass(frozen=True)
class OperatingPoint:
    """The probability from which a class is flagged, even if another class is more probable."""

    class_name: str
    wanted: float
    threshold: float
    supported: float
    """The sensitivity on new images is at least this, on average over hold-outs of this size."""
    caught: int
    n_own: int
    n_patients: int | None
    independent_own: float
    """The effective number of images if all of a patient's are alike."""
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
    """Return the highest threshold that the hold-out supports for each class."""
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
    """Describe what abstaining does on the hold-out."""
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
