"""Turn a model's scores into calibrated probabilities and thresholds. Numbers only: no network, no torch.

The scores of a model carry a log prior. Without it they are evidence: log p(image | class) up to a constant,
if the network is neither over- nor underconfident. A temperature, fitted on images that were never trained
on, corrects the confidence; then Bayes' rule gives the probabilities under any prior:

    p(class | image)  ∝  prior(class) · exp(evidence / temperature)

Docs: docs/explanation/probabilities.md.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from jaxtyping import Bool, Float, Int, Real
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from medcil.errors import DamagedFile, InvalidInput, known_classes
from medcil.metrics.intervals import groups_at, share_interval
from medcil.storage.atomic import write_json

if TYPE_CHECKING:  # numbers only: an exported model is used without torch
    from medcil.config import ExecutionConfig
    from medcil.data.samples import Samples
    from medcil.training.state import State

FORMAT = 1
BOUNDS = (0.01, 100.0)
"""The range of temperatures that is searched."""
SPREAD = 1.0
"""Standard deviation of the prior on the log temperature: a factor of e."""


@dataclass(frozen=True)
class Unlike:
    """The rule for "unlike anything known": the likeness is below the threshold."""

    threshold: FiniteFloat | None
    """None if nothing could be measured: then no image is called so."""
    false_alarms: FiniteFloat | None
    """At most this share of new images of any known class is called so, on average."""
    measured_on: str
    """`hold-out`, `eval` (the images of `--eval`), or `exemplars`: these were trained on, and there are more
    false alarms than stated."""


@dataclass(frozen=True)
class Calibration:
    temperature: Annotated[FiniteFloat, Field(gt=0)]
    class_prior_in_scores: tuple[FiniteFloat, ...]
    """The log prior in the scores, by class."""
    unlike: Unlike
    images: int = 0
    notes: tuple[str, ...] = ()
    """Limits of the calibration, in sentences."""

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
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, content: Any, source: str) -> "Calibration":
        try:
            if content["format"] > FORMAT:
                raise InvalidInput(f"{source} was written by a newer medcil: update medcil.")
            return TypeAdapter(cls).validate_python(content)
        except (KeyError, TypeError, ValidationError) as error:
            reason = str(error).replace("\n", " ")
            raise DamagedFile(f"{source} is damaged; restore it.\n{reason}") from None


def uncalibrated(temperature: float, log_prior: Sequence[float], *notes: str) -> Calibration:
    """Return the calibration of a model without images to measure on."""
    return Calibration(temperature, tuple(log_prior), Unlike(None, None, "nothing"), notes=notes)


def softmax(logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def fit_temperature(
    evidence: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, "n"], *, reference: float
) -> float:
    """Minimize the negative log likelihood, with classes weighted alike, plus a penalty for the distance from
    the reference: a few images hardly move it, hundreds decide alone."""
    from scipy.optimize import minimize_scalar  # not above: `predict` starts without it
    from scipy.special import logsumexp

    counts, rows = np.bincount(labels), np.arange(len(labels))
    weights = len(labels) / ((counts > 0).sum() * counts[labels])

    def loss(log_temperature: float) -> float:
        logits = evidence / math.exp(log_temperature)
        distance = (log_temperature - math.log(reference)) / SPREAD
        return float(weights @ (logsumexp(logits, axis=1) - logits[rows, labels]) + distance**2 / 2)

    # A grid, then a search around its best point.
    grid = np.linspace(math.log(BOUNDS[0]), math.log(BOUNDS[1]), 185)
    best = int(np.argmin([loss(float(point)) for point in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return math.exp(minimize_scalar(loss, bounds=around, method="bounded", options={"xatol": 1e-10}).x)


def low_threshold(
    values: Float[np.ndarray, "n"], groups: Sequence[str] | None, rate: float
) -> tuple[float, float]:
    """Return the highest threshold that a new value falls below with at most this probability, and the rate
    it keeps. The rate is higher than requested if even the lowest value exceeds it.

    A new value is below the k-th smallest of n with probability at most k / (n + 1). Images of one patient
    are not independent: then n counts patients, and each of a patient's m images counts 1 / m, which holds
    for an image of a new patient (hierarchical conformal prediction).
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
    owns = [labels == c for c in np.unique(labels)]
    thresholds = [low_threshold(likeness[own], groups_at(groups, own), false_alarms) for own in owns]
    return min(threshold for threshold, _ in thresholds), max(false_alarms, *(rate for _, rate in thresholds))


def calibrate(
    state: "State",
    samples: "Samples",
    execution: "ExecutionConfig | None" = None,
    *,
    groups: Sequence[str] | None = None,
    measured_on: str = "hold-out",
) -> Calibration:
    """Fit the temperature, and the threshold of "unlike anything known", on labelled images.

    `groups` names the patient of each image, if patients are known. `measured_on` is `hold-out`, `eval`, or
    `exemplars` if only images remain that were trained on; the notes then say so.
    """
    from medcil.training.inference import Scorer

    labels = samples.labels.numpy()
    scores, likeness = Scorer(state, execution)(samples)
    calibration = calibrated(
        scores,
        likeness,
        labels,
        state.readout.log_prior.double().numpy(),
        reference=state.readout.temperature,
        groups=groups,
        measured_on=measured_on,
    )
    if not len(labels):
        return calibration
    notes = list(calibration.notes)
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
    return replace(calibration, notes=tuple(notes))


def calibrated(
    scores: Float[np.ndarray, "n classes"],
    likeness: Float[np.ndarray, "n"],
    labels: Int[np.ndarray, "n"],
    log_prior: Float[np.ndarray, "classes"],
    *,
    reference: float,
    false_alarms: float = 0.05,
    groups: Sequence[str] | None = None,
    measured_on: str = "hold-out",
) -> Calibration:
    """Fit a calibration to scores and likenesses."""
    if not len(labels):
        note = "There were no images to calibrate on: probabilities are as the network gives them."
        return uncalibrated(reference, log_prior.tolist(), note)
    evidence, notes = scores - log_prior, list[str]()
    temperature = fit_temperature(evidence, labels, reference=reference)
    threshold, stated = likeness_threshold(likeness, labels, false_alarms, groups)
    if stated is not None and stated > false_alarms:
        fewest, unit = round(1 / stated) - 1, "images" if groups is None else "patients"
        notes.append(
            f"The fewest {unit} of a class, {fewest}, do not suffice for a false-alarm rate of "
            f"{false_alarms:g}: it is up to {stated:.3g}."
        )
    unlike = Unlike(threshold, stated, measured_on)
    return Calibration(temperature, tuple(log_prior.tolist()), unlike, len(labels), tuple(notes))


TIE = 1e-9
"""Smaller differences in probability are rounding: the batch an image is in may change its last bit."""


@dataclass(frozen=True)
class OperatingPoint:
    """The probability from which a class is flagged, even if another class is more probable."""

    class_name: str
    threshold: float
    sentence: str
    """What the threshold does to the hold-out."""


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
        own, own_groups = probabilities[labels == c, c], groups_at(groups, labels == c)
        if not len(own):
            raise InvalidInput(
                f"The hold-out has no image of {name!r}, so no threshold can be chosen for it: leave it out "
                "of --sensitivity, or train with --holdout."
            )
        lowest, missed = low_threshold(own, own_groups, 1 - sensitivity)
        threshold = max(0.0, lowest - TIE)
        n_patients = "" if own_groups is None else f"{len(set(own_groups))} patients"
        text = (
            f"{name} is flagged from a probability of {threshold:.3g} on: {int((own >= threshold).sum())} of "
            f"{len(own)} of its hold-out images{n_patients and f', of {n_patients}'} "
            f"({_range(own >= threshold, own_groups)})"
        )
        rejected = probabilities[labels != c, c] < threshold
        if len(rejected):
            text += (
                f", specificity {rejected.mean():.0%} ({_range(rejected, groups_at(groups, labels != c))})"
            )
        if 1 - missed < sensitivity:
            needed = math.ceil(sensitivity / (1 - sensitivity) - 1e-9)
            text += (
                f". {n_patients or f'{len(own)} images'} support a sensitivity of {1 - missed:.3g} at most, "
                f"not {sensitivity:g}; that takes {needed}"
            )
        points.append(OperatingPoint(name, threshold, f"{text}."))
    return points


def check_sensitivity(name: str, sensitivity: float, class_names: Sequence[str]) -> None:
    if name not in class_names:
        raise InvalidInput(f"The model knows no class {name!r}. {known_classes(name, class_names)}")
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
    text = (
        f"Below a probability of {below:g} no class is given: {int((~answered).sum())} of {len(labels)} "
        "hold-out images."
    )
    if not answered.any():
        return text
    return (
        f"{text} Of the others {is_right[answered].mean():.0%} are right "
        f"({_range(is_right[answered], groups_at(groups, answered))}), of all {is_right.mean():.0%}."
    )


def _range(hits: Bool[np.ndarray, "n"], groups: Sequence[str] | None) -> str:
    """Write Wilson's interval of a share."""
    low, high = share_interval(hits, groups)
    return f"{low:.0%} to {high:.0%}"
