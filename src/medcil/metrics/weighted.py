"""Figures of one evaluation under weights of its images, for many weightings at once.

Ones give the estimate; how often each image was drawn gives a bootstrap's. Every result therefore has a
leading axis `draws`. Where a value is undefined (no image to compute it from) it is nan.
"""

import math

import numpy as np
from jaxtyping import Bool, Float, Int, Real

Weights = Real[np.ndarray, "draws n"]
Confusions = Real[np.ndarray, "draws classes classes"]
PerDraw = Float[np.ndarray, "draws"]
PerClass = Float[np.ndarray, "draws classes"]


def weighted_confusions(
    labels: Int[np.ndarray, "n"], predictions: Int[np.ndarray, "n"], weights: Weights, n_classes: int
) -> Float[np.ndarray, "draws classes classes"]:
    """Rows true, columns predicted."""
    cells = labels.astype(np.int64) * n_classes + predictions.astype(np.int64)
    found, places = np.unique(cells, return_inverse=True)
    membership = np.zeros((len(cells), len(found)))
    membership[np.arange(len(cells)), places] = 1
    confusions = np.zeros((len(weights), n_classes**2))
    confusions[:, found] = weights.astype(np.float64) @ membership
    return confusions.reshape(-1, n_classes, n_classes)


def class_rates(confusions: Confusions) -> dict[str, PerClass]:
    """Each class against all others: sensitivity, specificity, and the two predictive values."""
    hits = np.diagonal(confusions, axis1=1, axis2=2)
    true, said = confusions.sum(axis=2), confusions.sum(axis=1)
    total = confusions.sum(axis=(1, 2))[:, None]
    right_rejections = total - true - said + hits
    return {
        "sensitivity": _ratio(hits, true),
        "specificity": _ratio(right_rejections, total - true),
        "ppv": _ratio(hits, said),
        "npv": _ratio(right_rejections, total - said),
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
    true, said = confusions.sum(axis=2), confusions.sum(axis=1)
    by_chance = np.einsum("bi,bj,ij->b", true, said, costs)
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
    """The bin of each image, about equally many in each; equal confidences share one."""
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
    """Of each bin: the images in it, their mean confidence, the share that is right."""
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
