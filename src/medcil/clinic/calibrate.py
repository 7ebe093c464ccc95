"""Fits a calibration on images that the model was not trained on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from medcil.clinic.calibration import (
    SHRUNK,
    Calibration,
    Unlike,
    balanced_weights,
    fit_temperature,
    likeness_threshold,
    softmax,
    uncalibrated,
)
from medcil.clinic.scoring import Scorer
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples
from medcil.errors import InvalidInput
from medcil.training.state import State

__all__ = ["Calibration", "Unlike", "calibrate"]


def calibrate(
    state: State,
    samples: Samples,
    execution: ExecutionConfig | None = None,
    *,
    groups: Sequence[str] | None = None,
    measured_on: str = "hold-out",
    false_alarms: float = 0.05,
) -> Calibration:
    """The temperature, and what counts as unlike anything known; labels of the samples count its classes.

    `groups` says whose image each is, where patients are known.
    `measured_on` is `hold-out`, `eval`, or `exemplars` where only images remain that were trained on; the
    notes then say so.
    """
    if not 0 < false_alarms < 1:
        raise InvalidInput(f"false_alarms is {false_alarms:g}: give a share between 0 and 1, such as 0.05.")
    labels = samples.labels.numpy()
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
    """Of scores that are at hand."""
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
    """Whether the scores, classes counted alike, explain the labels better with their prior than without it,
    by more than two standard errors."""
    losses = []
    for logits in (evidence, scores):
        temperature, _ = fit_temperature(logits, labels, reference=reference)
        of_truth = softmax(logits / temperature)[np.arange(len(labels)), labels]
        losses.append(-np.log(np.maximum(of_truth, np.finfo(np.float64).tiny)))
    worse = balanced_weights(labels) * (losses[0] - losses[1])
    return len(labels) > 1 and bool(worse.mean() > 2 * worse.std(ddof=1) / np.sqrt(len(labels)))
