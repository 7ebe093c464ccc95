"""Metrics of one evaluation: functions of confusion matrices, rows true, columns predicted.

Functions with a leading axis `draws` compute a metric under many weightings of the images at once: ones give
the estimate, how often each image was drawn gives a bootstrap's. An undefined value is nan.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Real


def defined(value: float) -> float | None:
    """Replace nan by None, as JSON needs it."""
    return None if math.isnan(value) else float(value)


def known_mean(values: Float[np.ndarray, "n"], weights: Real[np.ndarray, "n"] | None = None) -> float:
    """Average the entries that are not nan; nan if no weight is left."""
    is_defined = ~np.isnan(values)
    used = np.ones(int(is_defined.sum())) if weights is None else weights[is_defined]
    total = float(used.sum())
    return float(values[is_defined] @ used) / total if total > 0 else math.nan


def confusion_matrix(
    labels: Int[np.ndarray, "n"], predictions: Int[np.ndarray, "n"], n_classes: int
) -> Int[np.ndarray, "classes classes"]:
    if labels.shape != predictions.shape:
        raise ValueError(f"{labels.size} labels but {predictions.size} predictions")
    for name, indices in (("label", labels), ("prediction", predictions)):
        outside = indices[(indices < 0) | (indices >= n_classes)]
        if outside.size:
            raise ValueError(f"{name} {outside[0]} is not one of the {n_classes} classes 0..{n_classes - 1}")
    ones = np.ones((1, len(labels)))
    return np.asarray(weighted_confusions(labels, predictions, ones, n_classes)[0], dtype=np.int64)


def recall(confusion: Int[np.ndarray, "classes classes"]) -> Float[np.ndarray, "classes"]:
    """Return the fraction of each class's images that is recognized; nan for a class with no test image."""
    return np.asarray(class_rates(confusion[None])["sensitivity"][0])


def accuracy(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """Micro accuracy: the fraction of all images that is right."""
    return float(mean_accuracy(confusion[None])[0])


def balanced_accuracy(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """The mean recall of the classes that have test images."""
    return known_mean(recall(confusion))


def macro_f1(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """The mean F1 of the classes that occur among the labels or the predictions."""
    # F1 = 2 TP / (2 TP + FP + FN), and the denominator is row sum + column sum.
    return known_mean(_ratio(2 * confusion.diagonal(), confusion.sum(axis=0) + confusion.sum(axis=1)))


def quadratic_kappa(confusion: Int[np.ndarray, "classes classes"], original_labels: Sequence[int]) -> float:
    """Cohen's kappa with quadratic weights; `original_labels[k]` is the label class k has in the dataset.

    The weights measure the distance between two grades, so they follow the order of the original
    labels, not the order in which the classes arrived. nan where no disagreement is possible.
    """
    n_classes = len(confusion)
    if len(original_labels) != n_classes or len(set(original_labels)) != n_classes:
        raise ValueError(f"{n_classes} classes need {n_classes} different original labels: {original_labels}")
    order = np.argsort(np.asarray(original_labels))
    return float(cohen_kappa(confusion[np.ix_(order, order)][None], quadratic=True)[0])


def old_new_accuracy(
    confusion: Int[np.ndarray, "classes classes"], n_old: int
) -> tuple[float | None, float | None]:
    """Micro accuracy over the images of the first `n_old` classes, and over those of the others.

    None where there is no such class, or none of its images.
    """
    if not 0 <= n_old <= len(confusion):
        raise ValueError(f"n_old = {n_old} of {len(confusion)} classes")
    right, support = confusion.diagonal(), confusion.sum(axis=1)

    def micro(classes: slice) -> float | None:
        n_images = int(support[classes].sum())
        return int(right[classes].sum()) / n_images if n_images else None

    return micro(slice(n_old)), micro(slice(n_old, None))


Weights = Real[np.ndarray, "draws n"]
Confusions = Real[np.ndarray, "draws classes classes"]
PerDraw = Float[np.ndarray, "draws"]
PerClass = Float[np.ndarray, "draws classes"]


def weighted_confusions(
    labels: Int[np.ndarray, "n"], predictions: Int[np.ndarray, "n"], weights: Weights, n_classes: int
) -> Float[np.ndarray, "draws classes classes"]:
    """Return a weighted confusion matrix for each draw; rows true, columns predicted."""
    cells = labels.astype(np.int64) * n_classes + predictions.astype(np.int64)
    occupied, places = np.unique(cells, return_inverse=True)
    membership = np.zeros((len(cells), len(occupied)))
    membership[np.arange(len(cells)), places] = 1
    confusions = np.zeros((len(weights), n_classes**2))
    confusions[:, occupied] = weights.astype(np.float64) @ membership
    return confusions.reshape(-1, n_classes, n_classes)


def class_rates(confusions: Confusions) -> dict[str, PerClass]:
    """Compute sensitivity, specificity and both predictive values of each class against all others."""
    hits = np.diagonal(confusions, axis1=1, axis2=2)
    true, predicted = confusions.sum(axis=2), confusions.sum(axis=1)
    total = confusions.sum(axis=(1, 2))[:, None]
    right_rejections = total - true - predicted + hits
    return {
        "sensitivity": _ratio(hits, true),
        "specificity": _ratio(right_rejections, total - true),
        "ppv": _ratio(hits, predicted),
        "npv": _ratio(right_rejections, total - predicted),
    }


def mean_accuracy(confusions: Confusions) -> PerDraw:
    return _ratio(np.trace(confusions, axis1=1, axis2=2), confusions.sum(axis=(1, 2)))


def mean_sensitivity(confusions: Confusions) -> PerDraw:
    """The balanced accuracy: the mean over the classes that have images."""
    sensitivity = class_rates(confusions)["sensitivity"]
    known = ~np.isnan(sensitivity)
    return _ratio(np.where(known, sensitivity, 0).sum(axis=1), known.sum(axis=1))


def cohen_kappa(confusions: Confusions, *, quadratic: bool = False) -> PerDraw:
    """Agreement beyond chance; quadratic: mistakes cost their squared distance in the order of classes."""
    rank = np.arange(confusions.shape[1])
    distance = np.abs(rank[:, None] - rank[None, :])
    costs = distance**2 if quadratic else (distance > 0)
    true, predicted = confusions.sum(axis=2), confusions.sum(axis=1)
    by_chance = np.einsum("bi,bj,ij->b", true, predicted, costs)
    # κ = 1 - Σ w O / Σ w E, E the product of the margins over the total
    observed = np.einsum("bij,ij->b", confusions, costs) * confusions.sum(axis=(1, 2))
    return 1 - _ratio(observed, by_chance)


def auroc(is_positive: Bool[np.ndarray, "n"], scores: Real[np.ndarray, "n"], weights: Weights) -> PerDraw:
    """How often a positive image scores above a negative one; a tie counts half."""
    if not len(scores):
        return np.full(len(weights), math.nan)
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-math.inf))  # of each run of equal scores
    drawn = weights[:, order].astype(np.float64)
    positive = np.add.reduceat(drawn * is_positive[order], starts, axis=1)
    negative = np.add.reduceat(drawn * ~is_positive[order], starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative
    won = (positive * (below + negative / 2)).sum(axis=1)
    return _ratio(won, positive.sum(axis=1) * negative.sum(axis=1))


def equal_mass_bins(confidence: Float[np.ndarray, "n"], n_bins: int) -> Int[np.ndarray, "n"]:
    """Assign images to bins of about equal size; equal confidences share a bin."""
    n = len(confidence)
    rank = np.searchsorted(np.sort(confidence), confidence, side="left")
    return np.asarray(rank * n_bins // max(n, 1), dtype=np.int64)


def calibration_error(
    confidence: Float[np.ndarray, "n"],
    is_right: Bool[np.ndarray, "n"],
    weights: Weights,
    *,
    n_bins: int = 15,
) -> PerDraw:
    """ECE: how far the confidence is from the accuracy, on average over bins of equal mass.

    The bins are those of the images themselves, whatever their weights.
    """
    if not len(confidence):
        return np.full(len(weights), math.nan)
    membership = np.eye(n_bins)[equal_mass_bins(confidence, n_bins)]
    gaps = np.abs(weights.astype(np.float64) @ (membership * (confidence - is_right)[:, None]))
    return _ratio(gaps.sum(axis=1), weights.sum(axis=1).astype(np.float64))


def reliability_curve(
    confidence: Float[np.ndarray, "n"], is_right: Bool[np.ndarray, "n"], *, n_bins: int = 15
) -> list[dict[str, float]]:
    """Return for each bin its images, their mean confidence and their accuracy."""
    bins = equal_mass_bins(confidence, n_bins)
    return [
        {
            "images": int((bins == b).sum()),
            "confidence": float(confidence[bins == b].mean()),
            "accuracy": float(is_right[bins == b].mean()),
        }
        for b in np.unique(bins)
    ]


def brier_score(
    labels: Int[np.ndarray, "n"], probabilities: Float[np.ndarray, "n classes"], weights: Weights
) -> PerDraw:
    """The squared distance of the probabilities from the truth, 0 at best and 2 at worst."""
    truth = np.eye(probabilities.shape[1])[labels]
    errors = ((probabilities - truth) ** 2).sum(axis=1)
    return _ratio(weights @ errors, weights.sum(axis=1).astype(np.float64))


def _ratio(
    above: Real[np.ndarray, "*shape"], below: Real[np.ndarray, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    above, below = np.broadcast_arrays(above, below)
    result = np.full(above.shape, math.nan)
    np.divide(above, below, out=result, where=below > 0)
    return result
