"""Distillation on logits: the paper's L_kd (Eq. 11) and its usual alternatives."""

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
    n_old = old_logits.shape[1]
    if n_old > logits.shape[1]:
        raise ValueError(
            f"Pass the current logits first: they cover {logits.shape[1]} classes, the old ones {n_old}."
        )
    current = logits[:, :n_old]
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
            return difference.square().sum(dim=1).mean() / max(n_old, 1)
        case "kl":
            log_p = F.log_softmax(current / temperature, dim=1)
            old_log_p = F.log_softmax(old_logits / temperature, dim=1)
            return F.kl_div(log_p, old_log_p, reduction="batchmean", log_target=True) * temperature**2
    raise ValueError(f'Choose kind "l1", "l2", "mse" or "kl". Got {kind!r}.')
