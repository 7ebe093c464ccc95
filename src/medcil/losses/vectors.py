"""Vectors to unit length, safely."""

import torch
from jaxtyping import Float
from torch import Tensor


def unit(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Rows of length 1. A zero row stays zero, with the gradient of a row of length 1 and not of 1 / eps."""
    return vectors / lengths(vectors)[:, None]


def lengths(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n"]:
    """To divide by: 1 for a zero row."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return torch.where(norms > 0, norms, 1.0)
