"""Metrics of one evaluation: functions of one confusion matrix, rows true, columns predicted.

Where a value is undefined (no test image to compute it from) it is nan.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Real


def defined(value: float) -> float | None:
    """As it is written to a file: None in place of nan, which JSON does not have."""
    return None if math.isnan(value) else float(value)


def known_mean(values: Float[np.ndarray, "n"], weights: Real[np.ndarray, "n"] | None = None) -> float:
    """The (weighted) mean of the entries that are not nan; nan where no weight is left."""
    known = ~np.isnan(values)
    kept = np.ones(int(known.sum())) if weights is None else weights[known]
    total = float(kept.sum())
    return float(values[known] @ kept) / total if total > 0 else math.nan


def confusion_matrix(
    labels: Int[np.ndarray, "n"], predictions: Int[np.ndarray, "n"], n_classes: int
) -> Int[np.ndarray, "classes classes"]:
    if labels.shape != predictions.shape:
        raise ValueError(f"{labels.size} labels but {predictions.size} predictions")
    for name, indices in (("label", labels), ("prediction", predictions)):
        outside = indices[(indices < 0) | (indices >= n_classes)]
        if outside.size:
            raise ValueError(f"{name} {outside[0]} is not one of the {n_classes} classes 0..{n_classes - 1}")
    # int64 first: a product of narrow labels would overflow.
    cells = labels.astype(np.int64) * n_classes + predictions.astype(np.int64)
    return np.bincount(cells, minlength=n_classes**2).reshape(n_classes, n_classes)


def recall(confusion: Int[np.ndarray, "classes classes"]) -> Float[np.ndarray, "classes"]:
    """Per class, the fraction of its images that is recognized; nan for a class with no test image."""
    support = confusion.sum(axis=1)
    fractions = np.full(len(confusion), math.nan)
    np.divide(confusion.diagonal(), support, out=fractions, where=support > 0)
    return fractions


def accuracy(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """Micro accuracy: the fraction of all images that is right."""
    n_images = int(confusion.sum())
    return float(np.trace(confusion)) / n_images if n_images else math.nan


def balanced_accuracy(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """The mean recall of the classes that have test images."""
    return known_mean(recall(confusion))


def macro_f1(confusion: Int[np.ndarray, "classes classes"]) -> float:
    """The mean F1 of the classes that occur among the labels or the predictions."""
    # F1 = 2 TP / (2 TP + FP + FN), and the denominator is row sum + column sum.
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    f1 = np.full(len(confusion), math.nan)
    np.divide(2 * confusion.diagonal(), occurrences, out=f1, where=occurrences > 0)
    return known_mean(f1)


def quadratic_kappa(confusion: Int[np.ndarray, "classes classes"], original_labels: Sequence[int]) -> float:
    """Cohen's kappa with quadratic weights; `original_labels[k]` is the label class k has in the dataset.

    The weights measure the distance between two grades, so they follow the order of the original
    labels, not the order in which the classes arrived. nan where no disagreement is possible.
    """
    n_classes = len(confusion)
    if len(original_labels) != n_classes or len(set(original_labels)) != n_classes:
        raise ValueError(f"{n_classes} classes need {n_classes} different original labels: {original_labels}")
    order = np.argsort(np.asarray(original_labels))
    observed = confusion[np.ix_(order, order)].astype(np.float64)
    rank = np.arange(n_classes)
    weights = (rank[:, None] - rank[None, :]) ** 2
    n_images = observed.sum()
    if n_images == 0:
        return math.nan
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / n_images
    by_chance = float((weights * expected).sum())
    # κ = 1 - Σ w O / Σ w E
    return 1 - float((weights * observed).sum()) / by_chance if by_chance > 0 else math.nan


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
