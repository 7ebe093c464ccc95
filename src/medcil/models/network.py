"""Network: a backbone, its branches and a growing classifier; NetworkSpec rebuilds its shape."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from medcil.config import ClassifierKind
from medcil.errors import InvalidInput
from medcil.models.backbones import Backbone, create_backbone
from medcil.models.classifier import Classifier


class Outputs(NamedTuple):
    maps: Sequence[Float[Tensor, "batch ..."]]  # of the stages of the backbone, without its branches
    embedding: Float[Tensor, "batch dim"]  # h: all branches, concatenated
    newest: Float[Tensor, "batch branch"]  # the newest branch's part of h
    cosine: Float[Tensor, "batch classes"]  # <h, w>
    logits: Float[Tensor, "batch classes"]  # p = η <h, w>
    auxiliary_logits: Float[Tensor, "batch _"] | None  # None without an auxiliary classifier
    images: Float[Tensor, "batch 3 height width"] | None = None  # for a readout with its own network


@dataclass(frozen=True)
class NetworkSpec:
    """Everything needed to build a network of the same shape; JSON in a model folder."""

    backbone: str
    last_relu: bool
    learn_scale: bool
    scale: float = 1.0
    classifier: ClassifierKind = "cosine"
    n_proxies: int = 1
    block_sizes: tuple[int, ...] = ()
    """Number of classes of each task."""
    calibration_sizes: tuple[int, ...] = ()
    """Size of the correction of each task's logits; 0 without one."""
    n_branches: int = 0
    """Number of copies of the upper stages beside the backbone."""
    shared_stages: int = 0
    """Number of backbone stages that all branches share."""

    def build(self) -> "Network":
        network = Network(self, create_backbone(self.backbone, last_relu=self.last_relu))
        for _ in range(self.n_branches):
            network.add_branch(shared_stages=self.shared_stages)
        for size in self.block_sizes:
            network.grow(torch.zeros(size, self.n_proxies, network.classifier.dim))
        for block, size in enumerate(self.calibration_sizes):
            if size:
                network.classifier.calibrate(block, size=size)
        return network


class Network(nn.Module):
    def __init__(self, spec: NetworkSpec, backbone: Backbone) -> None:
        super().__init__()
        self._spec = spec
        self._shared_stages = spec.shared_stages
        self.backbone = backbone
        self.branches = nn.ModuleList()
        self.classifier = Classifier(
            backbone.num_features,
            kind=spec.classifier,
            n_proxies=spec.n_proxies,
            scale=spec.scale,
            learn_scale=spec.learn_scale,
        )
        self.auxiliary: Classifier | None = None
        """Used in training only, so not part of the spec."""

    @property
    def n_classes(self) -> int:
        return self.classifier.n_classes

    @property
    def newest_branch(self) -> Backbone:
        """The backbone itself if there are no branches."""
        return self.branches[-1] if len(self.branches) else self.backbone  # type: ignore[return-value]

    def require_stages(self) -> int:
        """Return the number of stages; refuse a backbone without stages, before any training."""
        if not self.backbone.is_staged:
            raise InvalidInput(
                f"network.backbone: {self._spec.backbone} has no stages, which this method needs. Choose a "
                "ResNet, for example resnet18.",
                code="network.backbone.unsupported",
            )
        return len(self.backbone.stages)

    def every_parameter(self) -> dict[str, list[nn.Parameter]]:
        """Return parameters by the name of their learning rate, without those of branches."""
        return {"backbone": list(self.backbone.parameters()), "classifier": self.classifier_parameters()}

    def classifier_parameters(self) -> list[nn.Parameter]:
        weights = [column for columns in self.classifier.columns_of_blocks() for column in columns]
        return weights + self.scale_parameters()

    def newest_classifier_parameters(self) -> list[nn.Parameter]:
        """Return the weights of the newest task's classes, and the scale if it is learned."""
        return self.classifier.columns_of_blocks()[-1] + self.scale_parameters()

    def scale_parameters(self) -> list[nn.Parameter]:
        """Return the classifier's scale if it is learned."""
        return [self.classifier.scale] if self._spec.learn_scale else []

    def mean_weight_length(self) -> Float[Tensor, ""]:
        """Return the mean length of the classifier's weights."""
        lengths: Tensor = torch.linalg.vector_norm(self.classifier.weight.detach(), dim=1)
        return lengths.mean()

    def become(self, other: "Network") -> None:
        """Take a copy of the parts of another network of the same kind."""
        other = copy.deepcopy(other)
        self.backbone, self.branches, self.classifier = other.backbone, other.branches, other.classifier
        self.auxiliary, self._shared_stages = other.auxiliary, other._shared_stages

    def grow(self, new_weights: Float[Tensor, "new dim"] | Float[Tensor, "new proxies dim"]) -> None:
        """Add classes with these classifier weights."""
        self.classifier.grow(new_weights)

    def add_branch(self, *, shared_stages: int) -> None:
        """Add a branch, a copy of the newest one, on top of the stages that all branches share."""
        if len(self.branches) and shared_stages != self._shared_stages:
            raise ValueError(f"the other branches share {self._shared_stages} stages")
        self._shared_stages = shared_stages
        newest = self.newest_branch
        upper = newest if len(self.branches) else newest.upper_stages(shared_stages)
        self.branches.append(copy.deepcopy(upper))
        self.classifier.widen(newest.num_features)

    def add_auxiliary(self, weights: Float[Tensor, "outputs branch"]) -> Classifier:
        """Add a classifier that reads the newest branch only; it replaces an earlier one."""
        self.auxiliary = Classifier(
            self.newest_branch.num_features,
            kind=self._spec.classifier,
            n_proxies=1,
            scale=self._spec.scale,
            learn_scale=self._spec.learn_scale,
        ).to(self.classifier.scale)
        self.auxiliary.grow(weights)
        return self.auxiliary

    def spec(self) -> NetworkSpec:
        return replace(
            self._spec,
            n_proxies=self.classifier.n_proxies,
            block_sizes=self.classifier.block_sizes,
            calibration_sizes=self.classifier.calibration_sizes(),
            n_branches=len(self.branches),
            shared_stages=self._shared_stages,
        )

    def extractor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the backbone and its branches."""
        return [*self.backbone.parameters(), *self.branches.parameters()]

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Outputs:
        return self.classify(*self.features(images))._replace(images=images)

    def features(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Sequence[Float[Tensor, "batch ..."]], list[Float[Tensor, "batch _"]]]:
        """Return the maps of the backbone's stages, and the embedding of each branch."""
        maps, embedding = self.backbone(images)
        shared = F.relu(maps[self._shared_stages - 1]) if self._shared_stages else images
        return maps, [_full(embedding), *(_full(branch(shared)[1]) for branch in self.branches)]

    def classify(
        self, maps: Sequence[Float[Tensor, "batch ..."]], embeddings: list[Float[Tensor, "batch _"]]
    ) -> Outputs:
        # In full precision: small differences of cosines decide.
        with torch.autocast(embeddings[0].device.type, enabled=False):
            together = torch.cat(embeddings, dim=1) if len(embeddings) > 1 else embeddings[0]
            cosine, logits = self.classifier(together)
            auxiliary = self.auxiliary(embeddings[-1])[1] if self.auxiliary is not None else None
        return Outputs(maps, together, embeddings[-1], cosine, logits, auxiliary)


def _full(embedding: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """Convert to float32; keep float64."""
    return embedding.to(torch.promote_types(embedding.dtype, torch.float32))
