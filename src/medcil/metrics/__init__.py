"""What a run is measured by; docs/metrics.md says which published table used which."""

from medcil.metrics.classification import (
    accuracy,
    balanced_accuracy,
    confusion_matrix,
    macro_f1,
    old_new_accuracy,
    quadratic_kappa,
    recall,
)
from medcil.metrics.incremental import (
    METRICS,
    AccuracyMatrix,
    acc_balanced,
    acc_micro,
    acc_task,
    balanced_per_step,
    forgetting,
    forgetting_lo2ln,
    forgetting_per_step,
    forgetting_printed,
    mean_and_deviation,
    micro_per_step,
    summarize,
)

__all__ = [
    "METRICS",
    "AccuracyMatrix",
    "acc_balanced",
    "acc_micro",
    "acc_task",
    "accuracy",
    "balanced_accuracy",
    "balanced_per_step",
    "confusion_matrix",
    "forgetting",
    "forgetting_lo2ln",
    "forgetting_per_step",
    "forgetting_printed",
    "macro_f1",
    "mean_and_deviation",
    "micro_per_step",
    "old_new_accuracy",
    "quadratic_kappa",
    "recall",
    "summarize",
]
