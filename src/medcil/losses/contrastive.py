"""Supervised contrastive loss: embeddings of one class come close, those of others move apart."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def supervised_contrastive(
    embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, "batch"], *, temperature: float
) -> Float[Tensor, ""]:
    """Mean over the samples i that have others P_i of their class in the batch, with unit vectors z, of

    -1/|P_i| Σ_{p in P_i} log(exp(<z_i, z_p> / τ) / Σ_{a ≠ i} exp(<z_i, z_a> / τ))

    Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, Eq. 2. Without a pair the loss is 0.
    """
    if not temperature > 0:
        raise ValueError(f"Choose a temperature above 0. Got {temperature}.")
    units = F.normalize(embeddings)
    is_self = torch.eye(len(units), dtype=torch.bool, device=units.device)
    similarities = (units @ units.T / temperature).masked_fill(is_self, -math.inf)
    log_shares = similarities.log_softmax(dim=1).masked_fill(is_self, 0.0)
    is_pair = (labels[:, None] == labels) & ~is_self
    n_pairs = is_pair.sum(dim=1)
    of_samples = -torch.where(is_pair, log_shares, 0.0).sum(dim=1) / n_pairs.clamp(min=1)
    return of_samples.sum() / (n_pairs > 0).sum().clamp(min=1)
