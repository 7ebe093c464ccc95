"""Vectors to unit length, safely."""

import torch
from jaxtyping import Float
from torch import Tensor


def unit(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Rows of length 1. A zero row stays zero, with the gradient of a row of length 1 and not of 1 / eps."""
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / torch.where(norms > 0, norms, 1.0)
