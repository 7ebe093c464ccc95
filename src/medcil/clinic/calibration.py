"""From a model's scores to probabilities that mean what they say. Numbers only: no network, no torch.

The scores of a model carry a log prior. Without it they are evidence: log p(image | class) up to a constant,
were the network neither over- nor underconfident. A temperature, fitted on images that were never trained on,
sees to that; then Bayes' rule gives the probabilities under any prior:

    p(class | image)  ∝  prior(class) · exp(evidence / temperature)

Docs: docs/explanation/probabilities.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Real

from medcil.errors import DamagedFile, InvalidInput
from medcil.storage.atomic import read_json, write_json

FORMAT = 1
BOUNDS = (0.01, 100.0)
"""Temperatures that are considered."""
SPREAD = 1.0
"""Standard deviation, in log temperature, of what is believed before any image is seen: a factor of e."""
SHRUNK = 0.05
"""A temperature that this belief moves by more than so much is said to be shrunk."""


@dataclass(frozen=True)
class Unlike:
    """When an image is called unlike anything known: where its likeness is below the threshold."""

    threshold: float | None
    """None where nothing could be measured: no image is called so."""
    false_alarms: float | None
    """At most this share of further images of any class that is known are called so, on average."""
    measured_on: str
    """`hold-out`; `eval`, the images of `--eval`; or `exemplars`, which were trained on: then there are more
    false alarms than stated."""


@dataclass(frozen=True)
class Calibration:
    temperature: float
    class_prior_in_scores: tuple[float, ...]
    """Log prior that the scores carry, by class."""
    unlike: Unlike
    n_images: int
    notes: tuple[str, ...] = ()
    """Sentences about what the images did not suffice for."""

    def evidence(self, scores: Real[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
        plain = scores.astype(np.float64) - np.array(self.class_prior_in_scores)
        return np.asarray(plain / self.temperature)

    def probabilities(
        self, scores: Real[np.ndarray, "n classes"], prior: Sequence[float]
    ) -> Float[np.ndarray, "n classes"]:
        """Under a prior of one's own; a class with a share of zero gets none."""
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
    """Where there is no image to measure on."""
    return Calibration(temperature, tuple(log_prior), Unlike(None, None, "nothing"), 0, notes)


def softmax(logits: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def balanced_weights(labels: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Of each image, so that every class that is there counts the same; together as many as the images."""
    counts = np.bincount(labels)
    return np.asarray(len(labels) / ((counts > 0).sum() * counts[labels]))


def fit_temperature(
    evidence: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, "n"], *, reference: float
) -> tuple[float, float]:
    """The temperature to use, and the one that the images alone speak for.

    The first minimizes the negative log likelihood, classes weighted alike and so under a uniform prior, plus
    what a temperature far from the reference costs: a few images hardly move it, hundreds decide alone.
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
    """Over the log temperatures: a grid finds the valley, then thirds are cut off down to its bottom."""
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
    """The highest threshold below which a further value lies with a probability of at most this rate; and the
    rate that it keeps to, more than this one where even the lowest value is.

    A further one of n values is below the k-th smallest of them with a probability of at most k / (n + 1). A
    patient's images are not independent of each other: then n counts patients, and each image of m of a
    patient counts 1 / m, which holds for an image of a further patient (hierarchical conformal prediction).
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
    """The threshold, and the share of false alarms that it keeps to among the images of any class.

    The lowest of the classes' thresholds keeps to all of their rates, however frequent each class is.
    """
    if not len(labels):
        return None, None
    places = [np.flatnonzero(labels == c).tolist() for c in np.unique(labels)]
    found = [
        low_threshold(likeness[own], None if groups is None else [groups[i] for i in own], false_alarms)
        for own in places
    ]
    return min(threshold for threshold, _ in found), max(false_alarms, *(rate for _, rate in found))
