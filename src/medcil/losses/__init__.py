"""Losses as pure functions of tensors, for our methods and for anyone's own training loop.

None of them keeps state, knows a network or looks at tensor values from Python, so each can be
captured in a CUDA graph. Classes are ordered old first: class c is old when c < n_old.
"""

from medcil.losses.classification import (
    cil_balanced_cross_entropy,
    class_balanced_focal,
    focal,
    nca,
    one_vs_rest,
    separated_softmax,
)
from medcil.losses.contrastive import supervised_contrastive
from medcil.losses.distillation import (
    embedding_distillation,
    logit_distillation,
    pod_spatial,
    sigmoid_distillation,
    taskwise_distillation,
)
from medcil.losses.margin import distribution_margin, margin_ranking, vanilla_margin

__all__ = [
    "cil_balanced_cross_entropy",
    "class_balanced_focal",
    "distribution_margin",
    "embedding_distillation",
    "focal",
    "logit_distillation",
    "margin_ranking",
    "nca",
    "one_vs_rest",
    "pod_spatial",
    "separated_softmax",
    "sigmoid_distillation",
    "supervised_contrastive",
    "taskwise_distillation",
    "vanilla_margin",
]
