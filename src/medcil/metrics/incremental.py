"""Metrics of a whole run: functions of the recall of every class after every step.

a[t, i] is the accuracy on task i after step t, T the number of steps taken. Classes, tasks and steps without
a test image are left out of every mean. All values are fractions; docs/reference/metrics.md has the formulas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Real

from medcil.metrics.classification import known_mean, recall


@dataclass(frozen=True, eq=False)
class AccuracyMatrix:
    """Recall of each class after each step, classes in order of arrival, nan where not yet seen."""

    recall: Float[np.ndarray, "tasks classes"]
    support: Int[np.ndarray, "classes"]  # test images per class
    task_sizes: tuple[int, ...]  # classes per task

    def __post_init__(self) -> None:
        if not self.task_sizes or min(self.task_sizes) < 1:
            raise ValueError(f"every task needs at least one class: task_sizes = {self.task_sizes}")
        shape = (len(self.task_sizes), sum(self.task_sizes))
        if self.recall.shape != shape or self.support.shape != shape[1:]:
            raise ValueError(
                f"task_sizes {self.task_sizes} need a recall of shape {shape} and {shape[1]} supports, "
                f"not {self.recall.shape} and {self.support.shape}"
            )
        is_seen = np.arange(shape[1]) < np.cumsum(self.task_sizes)[:, None]
        if (np.isnan(self.recall) != ~(is_seen & (self.support > 0))).any():
            raise ValueError("recall must be nan exactly where a class is not yet seen or has no test image")
        if ((self.recall < 0) | (self.recall > 1)).any():
            raise ValueError("recall is a fraction between 0 and 1")

    @classmethod
    def from_confusions(
        cls, confusions: Sequence[Int[np.ndarray, "_ _"]], task_sizes: Sequence[int]
    ) -> "AccuracyMatrix":
        """Build the matrix from one confusion matrix per finished step; later tasks are left out."""
        if not 1 <= len(confusions) <= len(task_sizes):
            raise ValueError(f"{len(confusions)} confusion matrices for {len(task_sizes)} tasks")
        finished = tuple(task_sizes[: len(confusions)])
        support = confusions[-1].sum(axis=1)
        recalls = np.full((len(finished), sum(finished)), math.nan)
        for step, (confusion, n_seen) in enumerate(zip(confusions, np.cumsum(finished), strict=True)):
            if confusion.shape != (n_seen, n_seen):
                raise ValueError(f"step {step + 1} has seen {n_seen} classes, not {confusion.shape}")
            # Accuracies of different test sets cannot be compared.
            if (confusion.sum(axis=1) != support[:n_seen]).any():
                raise ValueError(f"step {step + 1} was tested on other images than the last step")
            recalls[step, :n_seen] = recall(confusion)
        return cls(recalls, support, finished)

    @classmethod
    def from_recalls(
        cls, recalls: Sequence[Sequence[float | None]], task_sizes: Sequence[int]
    ) -> "AccuracyMatrix":
        """Build the matrix from one row per finished step, None for a class without a test image."""
        finished = tuple(task_sizes[: len(recalls)])
        lengths = np.cumsum(finished).tolist()
        if [len(row) for row in recalls] != lengths:
            raise ValueError(f"{[len(row) for row in recalls]} recalls for {lengths} classes seen")
        rows = np.full((len(finished), sum(finished)), math.nan)
        for row, known in zip(rows, recalls, strict=True):
            row[: len(known)] = [math.nan if value is None else value for value in known]
        return cls(rows, (~np.isnan(rows[-1])).astype(np.int64), finished)


def micro_per_step(matrix: AccuracyMatrix) -> Float[np.ndarray, "tasks"]:
    """Accuracy over all test images of all classes seen."""
    return np.array([known_mean(row, matrix.support) for row in matrix.recall])


def balanced_per_step(matrix: AccuracyMatrix) -> Float[np.ndarray, "tasks"]:
    """Mean recall of all classes seen."""
    return np.array([known_mean(row) for row in matrix.recall])


def forgetting_per_step(matrix: AccuracyMatrix) -> Float[np.ndarray, "tasks"]:
    """How far the old tasks are below their best, on average; 0 in step 1. The curve of `forgetting`."""
    return _drop_per_step(_task_accuracy(matrix, matrix.task_sizes, np.ones_like(matrix.support)))


def acc_micro(matrix: AccuracyMatrix) -> float:
    """Mean over steps of the micro accuracy: Acc as the published tables have it."""
    return known_mean(micro_per_step(matrix))


def acc_task(matrix: AccuracyMatrix) -> float:
    """Acc as printed: 1/T Σ_t 1/t Σ_{i≤t} a[t, i], every task's accuracy taken over its images."""
    return _mean_over_tasks(matrix, matrix.support)


def acc_task_balanced(matrix: AccuracyMatrix) -> float:
    """`acc_task` with the mean recall of a task's classes as its accuracy."""
    return _mean_over_tasks(matrix, np.ones_like(matrix.support))


def _mean_over_tasks(matrix: AccuracyMatrix, weights: Real[np.ndarray, "classes"]) -> float:
    by_task = _task_accuracy(matrix, matrix.task_sizes, weights)
    return known_mean(np.array([known_mean(row) for row in by_task]))


def acc_balanced(matrix: AccuracyMatrix) -> float:
    """Mean over steps of the balanced accuracy."""
    return known_mean(balanced_per_step(matrix))


def forgetting(matrix: AccuracyMatrix) -> float:
    """1/T Σ_{t≥2} 1/(t-1) Σ_{i<t} (max_{i≤j<t} a[j, i] - a[t, i]), a the mean recall of the task's classes.

    Step 1 counts as 0 and T as all steps. Negative where old tasks got better.
    """
    return known_mean(forgetting_per_step(matrix))


def forgetting_printed(matrix: AccuracyMatrix) -> float:
    """Fgt as printed: `forgetting` with every task's accuracy taken over its images.

    The printed sum over the tasks before step 1 is empty and its factor 1/(t-1) undefined: counted as 0.
    """
    # max_{j∈[1,t-1]}: before step i the classes of task i cannot be answered, so a[j, i] = 0 ≤ a[i, i] for
    # j < i, and the maximum is that over i ≤ j < t.
    return known_mean(_drop_per_step(_task_accuracy(matrix, matrix.task_sizes, matrix.support)))


def forgetting_lo2ln(matrix: AccuracyMatrix) -> float:
    """`forgetting` with the class groups of LO2LN's evaluation: Fgt as the published tables have it.

    The groups are the tasks, save in the 3-2 protocol (three classes, then two at a time): there group i is
    the classes 2i and 2i+1, so the third class counts with the second task and the last class never.
    """
    first, *later = matrix.task_sizes
    is_3_2 = first == 3 and len(later) > 0 and set(later) == {2}
    group_sizes = (2,) * len(matrix.task_sizes) if is_3_2 else matrix.task_sizes
    return known_mean(_drop_per_step(_task_accuracy(matrix, group_sizes, np.ones_like(matrix.support))))


def _task_accuracy(
    matrix: AccuracyMatrix, group_sizes: Sequence[int], weights: Real[np.ndarray, "classes"]
) -> Float[np.ndarray, "tasks tasks"]:
    """a[t, i] for groups of classes that follow each other, nan for i > t."""
    n_steps = len(matrix.task_sizes)
    by_task = np.full((n_steps, n_steps), math.nan)
    ends = np.cumsum(group_sizes)
    for task, (end, size) in enumerate(zip(ends, group_sizes, strict=True)):
        classes = slice(end - size, end)
        for step in range(task, n_steps):
            by_task[step, task] = known_mean(matrix.recall[step, classes], weights[classes])
    return by_task


def _drop_per_step(by_task: Float[np.ndarray, "tasks tasks"]) -> Float[np.ndarray, "tasks"]:
    drops = [0.0]
    for step in range(1, len(by_task)):
        peak = np.fmax.reduce(by_task[:step, :step], axis=0)
        drops.append(known_mean(peak - by_task[step, :step]))
    return np.array(drops)


def last_micro(matrix: AccuracyMatrix) -> float:
    return float(micro_per_step(matrix)[-1])


def last_balanced(matrix: AccuracyMatrix) -> float:
    return float(balanced_per_step(matrix)[-1])


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (ddof 1) over class orders or seeds; one value has no deviation."""
    if not values:
        raise ValueError("no values to average")
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), deviation
