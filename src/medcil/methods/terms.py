"""Loss terms: which part of a batch each loss reads. A recipe's words and a method's vocabulary."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from medcil import losses
from medcil.config import Fraction, NonNegative, Positive, PositiveInt
from medcil.losses.classification import inverse_effective_number
from medcil.methods.protocol import Batch, Classification, Counts, LossTerm

DistillationKind = Literal["l1", "l2", "mse", "kl"]
Reduction = Literal["sum", "mean"]
Beta = Annotated[float, Field(ge=0, lt=1)]


def cross_entropy(*, temperature: Positive = 1.0) -> Classification:
    return Classification(
        lambda batch: F.cross_entropy(batch.out.logits / temperature, batch.labels),
        # The fitted posterior is that of the logits divided by T.
        lambda counts, n_old: temperature * _log_counts(counts, n_old),
    )


def cil_balanced(*, alpha: Fraction = 0.5) -> Classification:
    """L_cbc; with alpha = 1 the logit-balanced loss."""

    def log_prior(counts: Counts, n_old: int) -> Float[Tensor, "classes"]:
        # cross_entropy(p + log(γ n)) fits p + log(γ n) to the posterior under the prior n: p carries -log γ.
        is_old = torch.arange(len(counts.drawn), device=counts.drawn.device) < n_old
        return -torch.log(torch.where(is_old, alpha, 1.0))

    return Classification(
        lambda batch: losses.cil_balanced_cross_entropy(
            batch.out.logits, batch.labels, batch.counts.drawn, n_old=batch.n_old, alpha=alpha
        ),
        log_prior,
    )


def logit_balanced() -> Classification:
    return cil_balanced(alpha=1.0)


def focal(*, focusing: NonNegative = 1.0) -> Classification:
    return Classification(
        lambda batch: losses.focal(batch.out.logits, batch.labels, focusing=focusing), _log_counts
    )


def class_balanced_focal(*, beta: Beta = 0.999, focusing: NonNegative = 1.0) -> Classification:
    """Weighted by the images at hand, whatever the sampler does, as in LO2LN."""

    def log_prior(counts: Counts, n_old: int) -> Float[Tensor, "classes"]:
        # A sample of class c weighs (1 - β) / (1 - β^n_c), so class c counts as often as drawn times that.
        n = counts.at_hand.clamp(min=1).to(torch.float32)
        return _log_counts(counts, n_old) + inverse_effective_number(n, beta).log()

    return Classification(
        lambda batch: losses.class_balanced_focal(
            batch.out.logits, batch.labels, batch.counts.at_hand, beta=beta, focusing=focusing
        ),
        log_prior,
    )


def nca(*, margin: NonNegative = 0.0) -> Classification:
    """PODNet's; δ is `margin`."""
    return Classification(
        lambda batch: losses.nca(batch.out.logits, batch.labels, margin=batch.scale * margin), _log_counts
    )


def separated_softmax() -> Classification:
    """SS-IL's. Nothing compares old logits with new ones, so each side carries the prior among its own."""

    def log_prior(counts: Counts, n_old: int) -> Float[Tensor, "classes"]:
        return torch.cat([p.log_softmax(dim=0) for p in _log_counts(counts, n_old).tensor_split([n_old])])

    return Classification(
        lambda batch: losses.separated_softmax(batch.out.logits, batch.labels, n_old=batch.n_old), log_prior
    )


def one_vs_rest() -> Classification:
    """Original iCaRL's sigmoids, for the new classes."""
    return Classification(
        lambda batch: losses.one_vs_rest(batch.out.logits, batch.labels, n_old=batch.n_old), _log_counts
    )


def turned_classes() -> Classification:
    """Cross-entropy of the auxiliary classifier, for which class y turned k times has the label 4 y + k."""
    return Classification(
        lambda batch: F.cross_entropy(_auxiliary_logits(batch), 4 * batch.labels + _turns(batch)), _log_counts
    )


def auxiliary_cross_entropy() -> LossTerm:
    """DER's: the newest branch alone tells the new classes apart, and from all old ones as one class."""

    return lambda batch: F.cross_entropy(
        _auxiliary_logits(batch), (batch.labels - batch.n_old + 1).clamp(min=0)
    )


def newest_branch(*, beta: Beta, focusing: NonNegative) -> LossTerm:
    """LO2LN's auxiliary loss: all classes by the newest branch alone, on unscaled cosines."""

    def loss(batch: Batch) -> Float[Tensor, ""]:
        columns = batch.class_weights[:, -batch.out.newest.shape[1] :]
        cosine = F.normalize(batch.out.newest) @ F.normalize(columns).T
        return losses.class_balanced_focal(
            cosine, batch.labels, batch.counts.at_hand, beta=beta, focusing=focusing
        )

    return loss


def distillation(
    *, kind: DistillationKind, weight: NonNegative = 1.0, temperature: Positive = 2.0
) -> LossTerm:
    """λ_k L_kd"""
    return lambda batch: (
        weight
        * losses.logit_distillation(batch.out.logits, batch.old.logits, kind=kind, temperature=temperature)
    )


def sigmoid_distillation(*, reduction: Literal["mean", "per_class_seen"] = "mean") -> LossTerm:
    """iCaRL's"""
    return lambda batch: losses.sigmoid_distillation(batch.out.logits, batch.old.logits, reduction=reduction)


def taskwise_distillation(*, temperature: Positive = 2.0) -> LossTerm:
    """SS-IL's"""
    return lambda batch: losses.taskwise_distillation(
        batch.out.logits, batch.old.logits, task_sizes=batch.task_sizes[:-1], temperature=temperature
    )


def embedding_distillation(*, weight: NonNegative = 1.0) -> LossTerm:
    """UCIR's less-forget constraint, PODNet's POD-flat"""
    return lambda batch: weight * losses.embedding_distillation(batch.out.embedding, batch.old.embedding)


def supervised_contrastive(*, weight: NonNegative = 1.0, temperature: Positive = 0.1) -> LossTerm:
    return lambda batch: (
        weight * losses.supervised_contrastive(batch.out.embedding, batch.labels, temperature=temperature)
    )


def pod_spatial(*, weight: NonNegative) -> LossTerm:
    return lambda batch: weight * losses.pod_spatial(batch.out.maps, batch.old.maps)


def distribution_margin(
    *,
    weight: NonNegative = 0.1,
    margin: NonNegative = 0.4,
    normalize_weights: bool = False,
    noise_scale: NonNegative | Literal["inverse_sqrt_dim"] = 1.0,
    reduction: Reduction = "sum",
    detach_range: bool = True,
) -> LossTerm:
    """λ_d L_dm"""
    return lambda batch: (
        weight
        * losses.distribution_margin(
            batch.out.embedding,
            batch.class_weights,
            batch.labels,
            batch.counts.inherent,
            n_old=batch.n_old,
            margin=margin,
            noise=batch.normal(batch.class_weights.shape),
            normalize_weights=normalize_weights,
            noise_scale=noise_scale,
            reduction=reduction,
            detach_range=detach_range,
        )
    )


def vanilla_margin(
    *, weight: NonNegative = 0.1, margin: NonNegative = 0.4, reduction: Reduction = "sum"
) -> LossTerm:
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


def margin_ranking(
    *, weight: NonNegative = 1.0, margin: NonNegative = 0.5, n_rivals: PositiveInt = 2
) -> LossTerm:
    return lambda batch: (
        weight
        * losses.margin_ranking(
            batch.out.cosine, batch.labels, n_old=batch.n_old, n_rivals=n_rivals, margin=margin
        )
    )


def _auxiliary_logits(batch: Batch) -> Float[Tensor, "batch outputs"]:
    if batch.out.auxiliary_logits is None:
        raise LookupError("the network has no auxiliary classifier")
    return batch.out.auxiliary_logits


def _turns(batch: Batch) -> Int[Tensor, "batch"]:
    if batch.turns is None:
        raise LookupError("the phase is not turned")
    return batch.turns


def _log_counts(counts: Counts, n_old: int) -> Float[Tensor, "classes"]:
    """Cross-entropy fits the posterior under the prior it is trained on; never drawn counts as once."""
    return torch.where(counts.drawn > 0, counts.drawn, 1).to(torch.float32).log()


PLUGINS: dict[str, dict[str, Callable[..., LossTerm]]] = {
    "classification": {
        "cross_entropy": cross_entropy,
        "focal": focal,
        "class_balanced_focal": class_balanced_focal,
        "logit_balanced": logit_balanced,
        "cil_balanced": cil_balanced,
    },
    "margin": {
        "ranking": margin_ranking,
        "vanilla": vanilla_margin,
        "distribution": distribution_margin,
    },
    "embedding": {"cosine": embedding_distillation, "contrastive": supervised_contrastive},
}
"""What a recipe can plug into a method: term -> kind -> function, whose arguments are the options."""
