"""Classification losses under imbalance, and those of the baselines.

`cil_balanced_cross_entropy` is the paper's L_cbc (Eq. 2 to 7); `focal` and `class_balanced_focal`
are the losses of LO2LN (focal loss, weighted by the effective number of images per class). `nca` is
PODNet's, `separated_softmax` SS-IL's, and `one_vs_rest` one half of the original iCaRL's.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor


def cil_balanced_cross_entropy(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    class_counts: Real[Tensor, "classes"],
    *,
    n_old: int,
    alpha: float,
) -> Float[Tensor, ""]:
    """L_cbc, Eq. 7: cross-entropy after adding log(γ_c n_c) to the logit of each class.

    `class_counts` holds n_c, the images per class in the data trained on (exemplars included); any
    multiple of it, such as the frequency r_c, gives the same loss. `alpha` is γ_c of the old classes;
    `alpha=1` is the logit-balanced loss, Eq. 3. A class with count 0 takes no part in the softmax, and
    a sample labelled with one is left out of the mean.
    """
    # Differs from the paper: α = 0 is inside its interval, but makes every old sample's loss infinite.
    if not 0 < alpha <= 1:
        raise ValueError(
            f"Choose alpha in (0, 1]; 1 is the logit-balanced loss, less favors old classes. Got {alpha}."
        )
    check_n_old(n_old, logits.shape[1])
    has_images = class_counts > 0
    is_old = torch.arange(logits.shape[1], device=logits.device) < n_old
    # Eq. 7 with numerator and denominator times r_y is γ_y r_y exp(p_y) / sum_j γ_j r_j exp(p_j), a softmax
    # of p + log(γ r); the number of images in r_c = n_c / |D_t| cancels.
    counts = _positive_counts(class_counts, logits.dtype)
    log_prior = torch.where(is_old, alpha * counts, counts).log()
    # Left open by the paper: r_c = 0. Its limit takes the class out of the softmax. An unadjusted logit
    # would not be well defined: beside adjusted ones it means n_c = 1 with counts and r_c = 1 with
    # frequencies, two different losses.
    adjusted = torch.where(has_images, logits + log_prior.to(logits.dtype), -math.inf)
    is_counted = has_images[labels]
    losses = torch.where(is_counted, F.cross_entropy(adjusted, labels, reduction="none"), 0.0)
    return losses.sum() / is_counted.sum().clamp(min=1)


def focal(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    *,
    focusing: float,
) -> Float[Tensor, ""]:
    """Focal loss -(1 - p_y)^focusing log p_y, mean over the batch; `focusing=0` is cross-entropy."""
    return _focal_per_sample(logits, labels, focusing).mean()


def class_balanced_focal(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    class_counts: Real[Tensor, "classes"],
    *,
    beta: float,
    focusing: float,
) -> Float[Tensor, ""]:
    """Focal loss weighted per class by the inverse effective number of images, mean over the batch.

    w_c = (1 - β) / (1 - β^n_c), scaled so that the weights of the classes with images average 1. The
    weight of a class without images is 0; it stays in the softmax. `beta=0` weighs all classes alike.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"Choose beta in [0, 1); 0 weighs all classes alike. Got {beta}.")
    has_images = class_counts > 0
    counts = _positive_counts(class_counts, logits.dtype)
    inverse_number = torch.where(has_images, inverse_effective_number(counts, beta), 0.0)
    # An all-zero weight vector stays zero: without images there is nothing to weigh.
    total = torch.where(has_images.any(), inverse_number.sum(), 1.0)
    weights = (inverse_number * (has_images.sum() / total)).to(logits.dtype)
    # Mean over the batch and not over the weights: so it is in LO2LN.
    return (weights[labels] * _focal_per_sample(logits, labels, focusing)).mean()


def inverse_effective_number(counts: Float[Tensor, "classes"], beta: float) -> Float[Tensor, "classes"]:
    """(1 - β) / (1 - β^n) for n of 1 or more."""
    # 1 - β^n as -expm1(n log β): the difference itself loses its digits when β is near 1 and n small.
    log_beta = math.log(beta) if beta > 0 else -math.inf
    return (1 - beta) / -torch.expm1(counts * log_beta)


def nca(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    *,
    margin: Float[Tensor, ""] | float = 0.0,  # η δ
) -> Float[Tensor, ""]:
    """PODNet's NCA: max{0, -log(exp(z_y - margin) / Σ_{c≠y} exp(z_c))}, mean over the batch.

    z = η s are the scaled similarities, and `margin` is in their units: η δ, through which a trained η
    may get its gradient. Other than in a softmax, the sum leaves out the own class: without a margin, a
    sample costs nothing from p_y = 1/2 on. With one class there is no other one, and the loss is 0.
    """
    rest = torch.where(_is_label(logits, labels), torch.finfo(logits.dtype).min, logits).logsumexp(dim=1)
    own = logits.gather(1, labels[:, None]).squeeze(1)
    return (rest - own + margin).relu().mean()


def separated_softmax(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    *,
    n_old: int,
) -> Float[Tensor, ""]:
    """SS-IL: cross-entropy of old samples over the old classes, of new samples over the new ones.

    Mean over all samples of the batch. No sample moves a logit of the other group, so that many new
    images cannot push the few exemplars' classes down. `n_old=0` is cross-entropy.
    """
    check_n_old(n_old, logits.shape[1])
    is_old = torch.arange(logits.shape[1], device=logits.device) < n_old
    is_own_group = (labels < n_old)[:, None] == is_old
    return F.cross_entropy(torch.where(is_own_group, logits, -math.inf), labels)


def one_vs_rest(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    *,
    n_old: int,
) -> Float[Tensor, ""]:
    """The original iCaRL's half for the new outputs: binary cross-entropy with one-hot targets.

    Summed over the new classes and divided by batch x all classes, so that together with
    `sigmoid_distillation(..., reduction="per_class_seen")` it is the mean over all outputs. The targets
    of an old sample are all 0. `n_old=0` is the mean binary cross-entropy.
    """
    check_n_old(n_old, logits.shape[1])
    targets = _is_label(logits, labels)[:, n_old:].to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(logits[:, n_old:], targets, reduction="none")
    return losses.sum(dim=1).mean() / logits.shape[1]


def check_n_old(n_old: int, n_classes: int) -> None:
    """Refuse a number of old classes that slices would silently read as another one."""
    if not 0 <= n_old <= n_classes:
        raise ValueError(f"n_old must be from 0 to the number of classes, {n_classes}. Got {n_old}.")


def _focal_per_sample(
    logits: Float[Tensor, "batch classes"], labels: Int[Tensor, "batch"], focusing: float
) -> Float[Tensor, "batch"]:
    if not focusing >= 0:
        raise ValueError(f"Choose focusing of 0 (cross-entropy) or more. Got {focusing}.")
    log_p = F.log_softmax(logits, dim=1)
    # log(1 - p_y) from the other classes: where p_y rounds to 1, the power (1 - p_y)^focusing has an
    # infinite slope for focusing < 1, and infinity times log p_y = 0 is not a number.
    log_rest = torch.where(_is_label(logits, labels), torch.finfo(log_p.dtype).min, log_p).logsumexp(dim=1)
    return -(focusing * log_rest).exp() * log_p.gather(1, labels[:, None]).squeeze(1)


def _is_label(
    logits: Float[Tensor, "batch classes"], labels: Int[Tensor, "batch"]
) -> Bool[Tensor, "batch classes"]:
    return torch.arange(logits.shape[1], device=logits.device) == labels[:, None]


def _positive_counts(class_counts: Real[Tensor, "classes"], dtype: torch.dtype) -> Float[Tensor, "classes"]:
    """n_c in float32 or better, for half precision overflows beyond 65504 images; 1 in place of 0."""
    return torch.where(class_counts > 0, class_counts, 1).to(torch.promote_types(dtype, torch.float32))
