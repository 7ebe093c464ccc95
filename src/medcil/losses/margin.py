"""Margin losses: hold the embeddings of old classes away from new classes.

`vanilla_margin` is the paper's L_m (Eq. 8), `distribution_margin` its L_dm (Eq. 9 and 10), and
`margin_ranking` is UCIR's, which LO2LN uses too. In all of them `labels < n_old` marks the exemplars,
the sum over M_{t-1}, and ⟨·,·⟩ is the cosine.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from medcil.losses.classification import check_n_old
from medcil.losses.distillation import lengths, unit


def vanilla_margin(
    embeddings: Float[Tensor, "batch dim"],
    class_weights: Float[Tensor, "classes dim"],
    labels: Int[Tensor, "batch"],
    *,
    n_old: int,
    margin: float = 0.4,  # m, Eq. 8
    reduction: str = "sum",
) -> Float[Tensor, ""]:
    """L_m, Eq. 8: max{0, ⟨h_i, w_c⟩ - ⟨h_i, w_{y_i}⟩ + m} over old samples i and new classes c.

    `reduction="mean"` divides by (old samples in the batch) x (new classes).
    """
    check_n_old(n_old, len(class_weights))
    cosine = unit(embeddings) @ unit(class_weights).T
    excess = cosine[:, n_old:] - _own(cosine, labels)[:, None] + margin
    return _reduce(excess.relu(), (labels < n_old)[:, None], reduction)


def distribution_margin(
    embeddings: Float[Tensor, "batch dim"],
    class_weights: Float[Tensor, "classes dim"],
    labels: Int[Tensor, "batch"],
    inherent_counts: Real[Tensor, "classes"],
    *,
    n_old: int,
    margin: float = 0.4,  # m, Eq. 9
    noise: Float[Tensor, "classes dim"] | None = None,  # η, Eq. 10
    generator: torch.Generator | None = None,
    normalize_weights: bool = False,
    noise_scale: float | Literal["inverse_sqrt_dim"] = 1.0,
    reduction: str = "sum",
    detach_range: bool = False,
) -> Float[Tensor, ""]:
    """L_dm, Eq. 9, with ŵ_c = w_c + noise_scale η_c r̂_c, Eq. 10; the defaults are the printed equations.

    `inherent_counts` holds q_c, the original training images of every class seen so far. A class for
    which it is 0 is no rival and no anchor; without any rival the loss is 0. `noise` is standard normal
    and drawn with `generator` if not given. `reduction="mean"` divides the first term by (anchors) x
    (rivals) and the second by (anchors), anchors being the old samples in the batch.
    """
    check_n_old(n_old, len(class_weights))
    weights = unit(class_weights) if normalize_weights else class_weights
    spread = _spread(class_weights, inherent_counts, noise, generator, noise_scale)
    # Cosines as products divided by lengths: with many classes that is less work than weights of length 1.
    unit_embeddings, ranges = unit(embeddings), weights + spread
    weight_lengths, range_lengths = lengths(weights), lengths(ranges)
    has_images = inherent_counts > 0
    is_rival = has_images[n_old:]
    is_anchor = (labels < n_old) & has_images[labels] & is_rival.any()

    to_own_class = _own(unit_embeddings @ weights.T / weight_lengths, labels)  # ⟨h_i, w_{y_i}⟩
    excess = unit_embeddings @ ranges[n_old:].T / range_lengths[n_old:] - to_own_class[:, None] + margin
    apart = _reduce(excess.relu(), is_anchor[:, None] & is_rival, reduction)

    # Left open by the paper: whether ⟨ŵ_y, w_y⟩ is trained. If it is, a smaller ‖w_y‖ lowers the term.
    own_range = (ranges * weights).sum(dim=1) / (range_lengths * weight_lengths)
    own_range = own_range.detach() if detach_range else own_range
    compact = _reduce((own_range[labels] - to_own_class).relu(), is_anchor, reduction)
    return apart + compact


def margin_ranking(
    cosine: Float[Tensor, "batch classes"],
    labels: Int[Tensor, "batch"],
    *,
    n_old: int,
    n_rivals: int,  # K
    margin: float,
) -> Float[Tensor, ""]:
    """UCIR's margin ranking: max{0, margin - cos_y + cos_k}, k over the K new classes nearest to the sample.

    Mean over (old samples in the batch) x K, where K is at most the number of new classes.
    """
    check_n_old(n_old, cosine.shape[1])
    new = cosine[:, n_old:]
    rivals = new.topk(min(n_rivals, new.shape[1]), dim=1).values
    excess = margin - _own(cosine, labels)[:, None] + rivals
    return _reduce(excess.relu(), (labels < n_old)[:, None], "mean")


def _spread(
    class_weights: Float[Tensor, "classes dim"],
    inherent_counts: Real[Tensor, "classes"],
    noise: Float[Tensor, "classes dim"] | None,
    generator: torch.Generator | None,
    noise_scale: float | Literal["inverse_sqrt_dim"],
) -> Float[Tensor, "classes dim"]:
    """η_c r̂_c of Eq. 10, scaled."""
    # Left open by the paper: when η is drawn. ŵ_c carries no sample index, so one draw per class and batch.
    if noise is None:
        noise = torch.randn(
            class_weights.shape, generator=generator, dtype=class_weights.dtype, device=class_weights.device
        )
    # Left open by the paper: the length of η, about sqrt(dim) as printed. At dim 512 that turns ŵ_c of a
    # majority class into a random direction; the inverse makes ‖spread‖ about r̂_c in any dimension.
    scale = 1 / math.sqrt(class_weights.shape[1]) if noise_scale == "inverse_sqrt_dim" else noise_scale
    # Summed in float32 or better: half precision overflows beyond 65504 images.
    counts = inherent_counts.to(torch.promote_types(class_weights.dtype, torch.float32))
    total = counts.sum()
    ratios = counts / torch.where(total > 0, total, 1.0)  # r̂_c
    return scale * noise * ratios.to(class_weights.dtype)[:, None]


def _own(cosine: Float[Tensor, "batch classes"], labels: Int[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    return cosine.gather(1, labels[:, None]).squeeze(1)


def _reduce(values: Float[Tensor, "..."], mask: Bool[Tensor, "..."], reduction: str) -> Float[Tensor, ""]:
    """Sum or mean over the entries of the mask; 0, still with a gradient path, if it has none."""
    total = torch.where(mask, values, 0.0).sum()
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / mask.expand_as(values).sum().clamp(min=1)
    raise ValueError(f'Choose reduction "sum" or "mean". Got {reduction!r}.')
