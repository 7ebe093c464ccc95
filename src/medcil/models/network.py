"""A backbone with a growing classifier, and the description from which it can be built again."""

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
    maps: Sequence[Float[Tensor, "batch ..."]]  # of the first backbone's stages
    embedding: Float[Tensor, "batch dim"]  # h; of all branches, side by side
    newest: Float[Tensor, "batch branch"]  # the newest branch's part of it
    cosine: Float[Tensor, "batch classes"]  # <h, w>
    logits: Float[Tensor, "batch classes"]  # p = η <h, w>
    auxiliary_logits: Float[Tensor, "batch _"] | None  # of the auxiliary classifier, where there is one
    images: Float[Tensor, "batch 3 height width"] | None = None  # for a readout with a network of its own


@dataclass(frozen=True)
class NetworkSpec:
    """All that is needed to build a network of the same shape; JSON in a model folder."""

    backbone: str
    last_relu: bool
    learn_scale: bool
    scale: float = 1.0
    classifier: ClassifierKind = "cosine"
    n_proxies: int = 1
    block_sizes: tuple[int, ...] = ()
    """Classes of each task."""
    calibration_sizes: tuple[int, ...] = ()
    """Numbers in the calibration of each task's logits; 0 for none."""
    n_branches: int = 0
    """Copies of the upper stages beside the backbone."""
    shared_stages: int = 0
    """The backbone's stages that all branches share."""

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
        """Serves training only: it is no part of the spec."""

    @property
    def n_classes(self) -> int:
        return self.classifier.n_classes

    @property
    def newest_branch(self) -> Backbone:
        """The backbone itself in a network without branches."""
        return self.branches[-1] if len(self.branches) else self.backbone  # type: ignore[return-value]

    def require_stages(self) -> int:
        """How many the backbone has; refuses one that a method cannot look into, before any training."""
        if not self.backbone.is_staged:
            raise InvalidInput(
                f"network.backbone: this method needs the stages of a ResNet, which {self._spec.backbone} "
                "does not have; choose, for example, resnet18."
            )
        return len(self.backbone.stages)

    def every_parameter(self) -> dict[str, list[nn.Parameter]]:
        """By the name of their learning rate; branches are not among them."""
        return {"backbone": list(self.backbone.parameters()), "classifier": self.classifier_parameters()}

    def classifier_parameters(self) -> list[nn.Parameter]:
        weights = [column for columns in self.classifier.columns_of_blocks() for column in columns]
        return weights + self.scale_parameters()

    def newest_classifier_parameters(self) -> list[nn.Parameter]:
        """The weights of the newest task's classes, and the scale; old classes' weights are held."""
        return self.classifier.columns_of_blocks()[-1] + self.scale_parameters()

    def scale_parameters(self) -> list[nn.Parameter]:
        """The classifier's scale, where it is learned."""
        return [self.classifier.scale] if self._spec.learn_scale else []

    def mean_weight_length(self) -> Float[Tensor, ""]:
        """Of the classifier's weights."""
        lengths: Tensor = torch.linalg.vector_norm(self.classifier.weight.detach(), dim=1)
        return lengths.mean()

    def grow(self, new_weights: Float[Tensor, "new dim"] | Float[Tensor, "new proxies dim"]) -> None:
        """Adds classes whose classifier weights start as given."""
        self.classifier.grow(new_weights)

    def add_branch(self, *, shared_stages: int) -> None:
        """Another extractor, a copy of the newest one, on top of the stages that all share."""
        if len(self.branches) and shared_stages != self._shared_stages:
            raise ValueError(f"the branches there are share {self._shared_stages} stages")
        self._shared_stages = shared_stages
        newest = self.newest_branch
        upper = newest if len(self.branches) else newest.upper_stages(shared_stages)
        self.branches.append(copy.deepcopy(upper))
        self.classifier.widen(newest.num_features)

    def add_auxiliary(self, weights: Float[Tensor, "outputs branch"]) -> Classifier:
        """A classifier that reads the newest branch alone, in place of one already there."""
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
        """What `features` uses: of the backbone and of its branches."""
        return [*self.backbone.parameters(), *self.branches.parameters()]

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Outputs:
        return self.classify(*self.features(images))._replace(images=images)

    def features(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Sequence[Float[Tensor, "batch ..."]], list[Float[Tensor, "batch _"]]]:
        """The maps of the first backbone's stages, and the embedding of each branch."""
        maps, embedding = self.backbone(images)
        shared = F.relu(maps[self._shared_stages - 1]) if self._shared_stages else images
        return maps, [_full(embedding), *(_full(branch(shared)[1]) for branch in self.branches)]

    def classify(
        self, maps: Sequence[Float[Tensor, "batch ..."]], embeddings: list[Float[Tensor, "batch _"]]
    ) -> Outputs:
        with torch.autocast(
            embeddings[0].device.type, enabled=False
        ):  # cosines decide by their small differences
            together = torch.cat(embeddings, dim=1) if len(embeddings) > 1 else embeddings[0]
            cosine, logits = self.classifier(together)
            auxiliary = self.auxiliary(embeddings[-1])[1] if self.auxiliary is not None else None
        return Outputs(maps, together, embeddings[-1], cosine, logits, auxiliary)


def _full(embedding: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """float32 or better."""
    return embedding.to(torch.promote_types(embedding.dtype, torch.float32))
