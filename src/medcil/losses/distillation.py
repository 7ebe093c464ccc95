"""Distillation from the previous model: on logits, on the embedding and on feature maps.

`logit_distillation` is the paper's L_kd (Eq. 11) and its usual alternatives. The others belong to the
baselines: `sigmoid_distillation` to iCaRL, `taskwise_distillation` to SS-IL, `embedding_distillation`
to UCIR and PODNet, `pod_spatial` to PODNet.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def logit_distillation(
    logits: Float[Tensor, "batch classes"],
    old_logits: Float[Tensor, "batch old"],
    *,
    kind: str = "l1",
    temperature: float = 2.0,
) -> Float[Tensor, ""]:
    """L_kd, Eq. 11: distance between the current and the previous model on the old classes.

    Every kind is a mean over the batch of, per sample: "l1" the sum over old classes of |p^t - p^{t-1}|;
    "l2" the Euclidean norm of that difference; "mse" the mean of its squares over old classes; "kl"
    T² KL(softmax(p^{t-1} / T) || softmax(p^t / T)) over old classes, the only one to use `temperature`.
    """
    current = _old_part(logits, old_logits)
    difference = current - old_logits
    match kind:
        # Left open by the paper: which norm ‖·‖ is. Of one number, as printed, it is the absolute value.
        case "l1":
            return difference.abs().sum(dim=1).mean()
        case "l2":
            # Its gradient is 0, and not 0 / 0, where the two models agree.
            norms: Tensor = torch.linalg.vector_norm(difference, dim=1)
            return norms.mean()
        case "mse":
            return difference.square().sum(dim=1).mean() / max(old_logits.shape[1], 1)
        case "kl":
            log_p = F.log_softmax(current / temperature, dim=1)
            old_log_p = F.log_softmax(old_logits / temperature, dim=1)
            return F.kl_div(log_p, old_log_p, reduction="batchmean", log_target=True) * temperature**2
    raise ValueError(f'Choose kind "l1", "l2", "mse" or "kl". Got {kind!r}.')


def sigmoid_distillation(
    logits: Float[Tensor, "batch classes"],
    old_logits: Float[Tensor, "batch old"],
    *,
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """iCaRL: binary cross-entropy of the old outputs, with the previous model's sigmoid as the target.

    `reduction="mean"` is over batch x old classes, as in the benchmark's iCaRL. "per_class_seen" divides
    the same sum by batch x all classes: the half for the old outputs of the original iCaRL's loss, whose
    other half is `one_vs_rest`.
    """
    current = _old_part(logits, old_logits)
    match reduction:
        case "mean":
            n_outputs = max(old_logits.shape[1], 1)
        case "per_class_seen":
            n_outputs = logits.shape[1]
        case _:
            raise ValueError(f'Choose reduction "mean" or "per_class_seen". Got {reduction!r}.')
    losses = F.binary_cross_entropy_with_logits(current, old_logits.sigmoid(), reduction="none")
    return losses.sum(dim=1).mean() / n_outputs


def taskwise_distillation(
    logits: Float[Tensor, "batch classes"],
    old_logits: Float[Tensor, "batch old"],
    *,
    task_sizes: Sequence[int],
    temperature: float = 2.0,
) -> Float[Tensor, ""]:
    """SS-IL: Σ_t T² KL(softmax(p^old_t / T) || softmax(p_t / T)) over the old tasks t, mean over the batch.

    `task_sizes` holds the number of classes of each old task, in order of arrival. Each task has its own
    softmax, so that the preference of the previous model for one task over another is not passed on.
    """
    current = _old_part(logits, old_logits)
    sizes = list(task_sizes)
    if sum(sizes) != old_logits.shape[1]:
        raise ValueError(
            f"Pass the sizes of the old tasks alone, all of them: {sizes} sum to {sum(sizes)}, "
            f"but the old logits cover {old_logits.shape[1]} classes."
        )
    total = current[:, :0].sum()
    for task, old_task in zip(torch.split(current, sizes, 1), torch.split(old_logits, sizes, 1), strict=True):
        total = total + logit_distillation(task, old_task, kind="kl", temperature=temperature)
    return total


def embedding_distillation(
    embedding: Float[Tensor, "batch dim"], old_embedding: Float[Tensor, "batch dim"]
) -> Float[Tensor, ""]:
    """1 - ⟨h_t, h_{t-1}⟩, mean over the batch: UCIR's less-forget constraint and PODNet's POD-flat.

    A zero embedding has cosine 0 with everything. The result is in float32 or better.
    """
    cosine = (unit(_precise(embedding)) * unit(_precise(old_embedding))).sum(dim=1)
    return (1 - cosine).mean()


def pod_spatial(
    maps: Sequence[Float[Tensor, "batch _ _ _"]], old_maps: Sequence[Float[Tensor, "batch _ _ _"]]
) -> Float[Tensor, ""]:
    """PODNet's POD-spatial: ‖u(a_t) - u(a_{t-1})‖, mean over the batch and then over the stages.

    One map [batch, channel, height, width] per stage. u is the unit vector of the sums of a² over the
    width and over the height, side by side. A zero map stays zero. The result is in float32 or better.
    """
    if not maps or len(maps) != len(old_maps):
        raise ValueError(
            "Pass the maps of the same stages, one at least, of both models. "
            f"Got {len(maps)} of the current one and {len(old_maps)} of the old one."
        )
    distances = [
        torch.linalg.vector_norm(_profile(new) - _profile(old), dim=1).mean()
        for new, old in zip(maps, old_maps, strict=True)
    ]
    return torch.stack(distances).mean()


def _profile(feature_map: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch _"]:
    """u of `pod_spatial`: the energy of each channel, by row and by column."""
    energy = _precise(feature_map).square()
    return unit(torch.cat([energy.sum(dim=3).flatten(1), energy.sum(dim=2).flatten(1)], dim=1))


def _old_part(
    logits: Float[Tensor, "batch classes"], old_logits: Float[Tensor, "batch old"]
) -> Float[Tensor, "batch old"]:
    n_old = old_logits.shape[1]
    if n_old > logits.shape[1]:
        raise ValueError(
            f"Pass the current logits first: they cover {logits.shape[1]} classes, the old ones {n_old}."
        )
    return logits[:, :n_old]


def _precise(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """float32 or better: in half precision a small 1 - cos rounds to 0, and squares of features overflow."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def unit(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Rows of length 1. A zero row stays zero, with the gradient of a row of length 1 and not of 1 / eps."""
    return vectors / lengths(vectors)[:, None]


def lengths(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n"]:
    """To divide by: 1 for a zero row."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return torch.where(norms > 0, norms, 1.0)
