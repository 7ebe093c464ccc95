"""Loss terms: which part of a batch each loss reads. A recipe's words and a method's vocabulary."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil import losses
from medcil.method import Classification, LossTerm

DistillationKind = Literal["l1", "l2", "mse", "kl"]
Reduction = Literal["sum", "mean"]


def cross_entropy() -> Classification:
    return Classification(lambda batch: F.cross_entropy(batch.out.logits, batch.labels), _log_counts)


def cil_balanced(*, alpha: float) -> Classification:
    """L_cbc; with alpha = 1 the logit-balanced loss."""

    def log_prior(class_counts: Int[Tensor, "classes"], n_old: int) -> Float[Tensor, "classes"]:
        # cross_entropy(p + log(γ n)) fits p + log(γ n) to the posterior under the prior n: p carries -log γ.
        is_old = torch.arange(len(class_counts), device=class_counts.device) < n_old
        return -torch.log(torch.where(is_old, alpha, 1.0))

    return Classification(
        lambda batch: losses.cil_balanced_cross_entropy(
            batch.out.logits, batch.labels, batch.class_counts, n_old=batch.n_old, alpha=alpha
        ),
        log_prior,
    )


def focal(*, focusing: float) -> Classification:
    return Classification(
        lambda batch: losses.focal(batch.out.logits, batch.labels, focusing=focusing), _log_counts
    )


def class_balanced_focal(*, beta: float, focusing: float) -> Classification:
    def log_prior(class_counts: Int[Tensor, "classes"], n_old: int) -> Float[Tensor, "classes"]:
        # A sample of class c weighs (1 - β) / (1 - β^n_c), so class c counts n_c times that.
        n = class_counts.clamp(min=1).to(torch.float32)
        return torch.log(n * (1 - beta) / (1 - beta**n))

    return Classification(
        lambda batch: losses.class_balanced_focal(
            batch.out.logits, batch.labels, batch.class_counts, beta=beta, focusing=focusing
        ),
        log_prior,
    )


def distillation(*, weight: float, kind: DistillationKind, temperature: float = 2.0) -> LossTerm:
    """λ_k L_kd"""
    return lambda batch: (
        weight
        * losses.logit_distillation(batch.out.logits, batch.old.logits, kind=kind, temperature=temperature)
    )


def distribution_margin(
    *,
    weight: float,
    margin: float = 0.4,
    normalize_weights: bool = False,
    noise_scale: float | Literal["inverse_sqrt_dim"] = 1.0,
    reduction: Reduction = "sum",
    detach_range: bool = False,
) -> LossTerm:
    """λ_d L_dm"""
    return lambda batch: (
        weight
        * losses.distribution_margin(
            batch.out.embedding,
            batch.class_weights,
            batch.labels,
            batch.inherent_counts,
            n_old=batch.n_old,
            margin=margin,
            noise=batch.noise,
            normalize_weights=normalize_weights,
            noise_scale=noise_scale,
            reduction=reduction,
            detach_range=detach_range,
        )
    )


def vanilla_margin(*, weight: float, margin: float = 0.4, reduction: Reduction = "sum") -> LossTerm:
    return lambda batch: (
        weight
        * losses.vanilla_margin(
            batch.out.embedding,
            batch.class_weights,
            batch.labels,
            n_old=batch.n_old,
            margin=margin,
            reduction=reduction,
        )
    )


def margin_ranking(*, weight: float, margin: float, n_rivals: int) -> LossTerm:
    return lambda batch: (
        weight
        * losses.margin_ranking(
            batch.out.cosine, batch.labels, n_old=batch.n_old, n_rivals=n_rivals, margin=margin
        )
    )


def _log_counts(class_counts: Int[Tensor, "classes"], n_old: int) -> Float[Tensor, "classes"]:
    """Cross-entropy fits the posterior under the prior it is trained on; never drawn counts as once."""
    return class_counts.clamp(min=1).to(torch.float32).log()
