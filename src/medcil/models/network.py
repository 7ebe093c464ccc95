"""A backbone with a growing classifier, and the description from which it can be built again."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medcil.models.backbones import create_backbone
from medcil.models.classifier import CosineClassifier


class Outputs(NamedTuple):
    embedding: Float[Tensor, "batch dim"]  # h
    cosine: Float[Tensor, "batch classes"]  # <h, w>
    logits: Float[Tensor, "batch classes"]  # p = η <h, w>


@dataclass(frozen=True)
class NetworkSpec:
    """All that is needed to build a network of the same shape; JSON in a model folder."""

    backbone: str
    last_relu: bool
    learn_scale: bool
    scale: float = 1.0
    block_sizes: tuple[int, ...] = ()

    def build(self) -> "Network":
        backbone = create_backbone(self.backbone, last_relu=self.last_relu)
        network = Network(self, backbone)
        for size in self.block_sizes:
            network.grow(torch.zeros(size, network.classifier.dim))
        return network


class Network(nn.Module):
    def __init__(self, spec: NetworkSpec, backbone: nn.Module) -> None:
        super().__init__()
        self._spec = spec
        self.backbone = backbone
        dim = int(backbone.num_features)  # type: ignore[arg-type]  # timm's contract, kept by ours
        self.classifier = CosineClassifier(dim, scale=spec.scale, learn_scale=spec.learn_scale)

    @property
    def n_classes(self) -> int:
        return self.classifier.n_classes

    def grow(self, new_weights: Float[Tensor, "new dim"]) -> None:
        """Adds classes whose classifier weights start as given."""
        self.classifier.grow(new_weights)

    def spec(self) -> NetworkSpec:
        sizes = tuple(len(block) for block in self.classifier.blocks)
        return NetworkSpec(
            self._spec.backbone, self._spec.last_relu, self._spec.learn_scale, self._spec.scale, sizes
        )

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Outputs:
        embedding = self.backbone(images).float()
        with torch.autocast(
            embedding.device.type, enabled=False
        ):  # cosines decide by their small differences
            cosine, logits = self.classifier(embedding)
        return Outputs(embedding, cosine, logits)
