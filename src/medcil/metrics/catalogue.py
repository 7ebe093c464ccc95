"""Every metric of a run: its function, what tables call it, what it means. A new metric is one entry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from medcil.metrics import classification, incremental
from medcil.metrics.classification import defined
from medcil.metrics.incremental import AccuracyMatrix, forgetting_per_step


@dataclass(frozen=True)
class Metric:
    function: Callable[[AccuracyMatrix], float]
    title: str
    meaning: str
    is_lower_better: bool = False
    needs_counts: bool = False
    """Every image counts the same, so that recalls alone do not tell it."""


METRICS: dict[str, Metric] = {
    "acc_balanced": Metric(
        incremental.acc_balanced,
        "Balanced accuracy, average over steps",
        "mean over steps of the mean recall of all classes seen so far, so that every class counts the same",
    ),
    "last_balanced": Metric(
        incremental.last_balanced,
        "Balanced accuracy, last step",
        "mean recall of all classes after the last step",
    ),
    "acc_micro": Metric(
        incremental.acc_micro,
        "Micro accuracy, average over steps",
        "mean over steps of the share of all test images of all classes seen so far that is recognized",
        needs_counts=True,
    ),
    "last_micro": Metric(
        incremental.last_micro,
        "Micro accuracy, last step",
        "share of all test images that is recognized after the last step",
        needs_counts=True,
    ),
    "acc_task": Metric(
        incremental.acc_task,
        "Task accuracy, average over steps",
        "mean over steps and, within a step, over tasks of the share of a task's test images that is "
        "recognized (the formula printed in the paper)",
        needs_counts=True,
    ),
    "acc_task_balanced": Metric(
        incremental.acc_task_balanced,
        "Balanced task accuracy, average over steps",
        "mean over steps and, within a step, over tasks of the mean recall of a task's classes",
    ),
    "forgetting": Metric(
        incremental.forgetting,
        "Forgetting",
        "mean over steps of what the old tasks have lost since each was known best, where a task's accuracy "
        "is the mean recall of its classes; lower is better",
        is_lower_better=True,
    ),
    "forgetting_printed": Metric(
        incremental.forgetting_printed,
        "Forgetting, as printed in the paper",
        "mean over steps of what the old tasks have lost since each was known best, where within a task "
        "every image counts the same (the formula printed in the paper); lower is better",
        is_lower_better=True,
        needs_counts=True,
    ),
    "forgetting_lo2ln": Metric(
        incremental.forgetting_lo2ln,
        "Forgetting, with LO2LN's grouping of classes",
        "as `forgetting`, with the grouping of classes behind the published tables where the steps are 3, 2, "
        "2; lower is better",
        is_lower_better=True,
    ),
}


def of_recalls(
    recalls: Sequence[Sequence[float | None]], task_sizes: Sequence[int]
) -> dict[str, float | None]:
    """Compute what follows from recalls alone; None where undefined."""
    matrix = AccuracyMatrix.from_recalls(recalls, task_sizes)
    return {
        name: defined(metric.function(matrix)) for name, metric in METRICS.items() if not metric.needs_counts
    }


def summarize(
    confusions: Sequence[Int[np.ndarray, "_ _"]],
    *,
    task_sizes: Sequence[int],
    class_names: Sequence[str],
    original_labels: Sequence[int],
) -> dict[str, Any]:
    """Compute all metrics of a run, or of its first steps, ready for JSON: fractions, None where undefined.

    `class_names` and `original_labels` name all classes of all tasks in order of arrival.
    """
    matrix = AccuracyMatrix.from_confusions(confusions, task_sizes)
    summary: dict[str, Any] = {name: defined(metric.function(matrix)) for name, metric in METRICS.items()}
    summary["steps"] = []
    for index, (confusion, drop) in enumerate(zip(confusions, forgetting_per_step(matrix), strict=True)):
        n_seen = len(confusion)
        n_old = n_seen - task_sizes[index]
        old, new = classification.old_new_accuracy(confusion, n_old)
        step = {
            "step": index + 1,
            "classes": list(class_names[:n_seen]),
            "forgetting": defined(drop),
            "n_old": n_old,
            "micro": defined(classification.accuracy(confusion)),
            "balanced": defined(classification.balanced_accuracy(confusion)),
            "recall": [defined(value) for value in classification.recall(confusion)],
            "macro_f1": defined(classification.macro_f1(confusion)),
            "old": old,
            "new": new,
            "kappa": defined(classification.quadratic_kappa(confusion, original_labels[:n_seen])),
            "confusion": confusion.tolist(),
        }
        summary["steps"].append(step)
    return summary
