"""The cosine classifier (Eq. 1): p = η <h, w>, growing by a block of rows per task."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class CosineClassifier(nn.Module):
    """One block of class weights per task, so that a method can move the new rows and hold the old ones."""

    def __init__(self, dim: int, *, scale: float, learn_scale: bool) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ParameterList()
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)  # η

    @property
    def n_classes(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def weight(self) -> Float[Tensor, "classes dim"]:
        return torch.cat(list(self.blocks)) if len(self.blocks) else self.scale.new_empty(0, self.dim)

    def grow(self, new_weights: Float[Tensor, "new dim"]) -> None:
        self.blocks.append(nn.Parameter(new_weights.detach().to(self.scale).clone()))

    def forward(
        self, embedding: Float[Tensor, "batch dim"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes"]]:
        cosine = F.normalize(embedding) @ F.normalize(self.weight).T
        return cosine, self.scale * cosine
