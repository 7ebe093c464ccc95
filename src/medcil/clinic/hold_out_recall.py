"""How well a model recognizes images it was not trained on, class by class, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from medcil.clinic.labelled_images import Measure
from medcil.clinic.model_dir import FORMAT, VersionFolder
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples
from medcil.metrics.classification import accuracy, balanced_accuracy, confusion_matrix, defined
from medcil.metrics.intervals import Z_95, independent_images, wilson
from medcil.training.inference import predict_scores
from medcil.training.state import State

OPTIMISTIC = "measured on training exemplars: optimistic"


def predicted(state: State, samples: Samples, execution: ExecutionConfig) -> Int[np.ndarray, "n"]:
    if not len(samples):
        return np.empty(0, dtype=np.int64)
    return np.asarray(predict_scores(state, samples, execution).argmax(dim=1).numpy())


def sealed_or_exemplars(version: VersionFolder, state: State, *, n_old: int | None = None) -> Measure:
    """The version's hold-out; where it has none of the (old) classes, the exemplars: they were trained on."""
    entries = version.holdout_entries()
    if any(entry["class"] in state.class_names[:n_old] for entry in entries):
        names = tuple(entry["file"] for entry in entries)
        return Measure(version.holdout(), names, "hold-out", version.holdout_groups())
    names = tuple(f"exemplar {number}" for number in range(1, len(state.memory) + 1))
    return Measure(state.memory, names, "exemplars")


def metrics(
    measure: Measure, predictions: Int[np.ndarray, "n"], class_names: Sequence[str]
) -> dict[str, Any]:
    """The content of metrics.json. What cannot be known is null."""
    labels = measure.samples.labels.numpy()
    confusion = confusion_matrix(labels, predictions, len(class_names))
    return {
        "format": FORMAT,
        "measured_on": measure.kind,
        "images": len(measure.samples),
        "accuracy": defined(accuracy(confusion)),
        "balanced_accuracy": defined(balanced_accuracy(confusion)),
        "classes": [
            {"name": name, **share((predictions == c)[labels == c], measure.groups_where(labels == c))}
            for c, name in enumerate(class_names)
        ],
        "confusion": confusion.tolist(),
    }


def share(is_right: Bool[np.ndarray, "_"], groups: Sequence[str] | None) -> dict[str, Any]:
    """A recall with Wilson's 95% interval; null where there is no image."""
    images, right = len(is_right), int(is_right.sum())
    patients = None if groups is None else len(set(groups))
    if not images:
        return {"images": 0, "patients": patients, "right": 0, "recall": None, "low": None, "high": None}
    recall, independent = right / images, independent_images(images, groups)
    low, high = wilson(recall * independent, independent)
    counts = {"images": images, "patients": patients, "right": right}
    return {**counts, "recall": recall, "low": low, "high": high}


@dataclass(frozen=True)
class Change:
    """Of a share measured twice on the same images, with its 95% interval."""

    change: float
    low: float
    high: float


def paired_change(images: float, lost: float, gained: float) -> Change:
    """Of the share that is right, where so many images were right before only, and so many after only.

    The interval of Agresti and Min for matched pairs: half an image is added to each of the four cells. It
    needs no resampling, and is honest for few images and where nothing changed.
    """
    change, center = (gained - lost) / images, (gained - lost) / (images + 2)
    half = Z_95 * math.sqrt(lost + gained + 1 - (gained - lost) ** 2 / (images + 2)) / (images + 2)
    return Change(change, max(min(center - half, change), -1.0), min(max(center + half, change), 1.0))


def mean_change(changes: Sequence[Change]) -> Change:
    """Of independent classes: each interval's distances stand in for its deviations (MOVER)."""
    n = len(changes)
    mean = sum(one.change for one in changes) / n
    below = math.sqrt(sum((one.change - one.low) ** 2 for one in changes)) / n
    above = math.sqrt(sum((one.high - one.change) ** 2 for one in changes)) / n
    return Change(mean, max(mean - below, -1.0), min(mean + above, 1.0))


def of_classes(measure: Measure, n_classes: int) -> Measure:
    """The images of the first so many classes."""
    chosen = torch.nonzero(measure.samples.labels < n_classes).flatten()
    names = tuple(measure.names[i] for i in chosen.tolist())
    groups = measure.groups_where((measure.samples.labels < n_classes).numpy())
    return Measure(measure.samples.select(chosen), names, measure.kind, groups)
