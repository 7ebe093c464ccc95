"""PODNet: several proxies for each class, and distillation of what every stage sees, pooled.

Douillard, Cord, Ollion, Robert, Valle, "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental
Learning", ECCV 2020.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from medcil.config import NonNegative, PositiveInt
from medcil.methods import terms
from medcil.methods.protocol import Classification, Increment, LossTerm, Phase, random_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName

KMEANS_ROUNDS = 20


@dataclass(frozen=True)
class PODNet:
    n_proxies: PositiveInt = 10  # K
    classification: Literal["nca", "cross_entropy"] = "nca"
    margin: NonNegative = 0.0  # δ
    spatial: NonNegative = 5.0  # λ_c
    flat: NonNegative = 8.0  # λ_f
    finetune_share: NonNegative = 0.2  # of the epochs, afterwards; 0: none
    finetune_rate: NonNegative = 0.01
    finetune_scale: bool = False
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.require_stages()
        network.grow(self._new_proxies(network, increment))
        parts: dict[str, LossTerm] = {"classification": self._classification_term()}
        if increment.is_first:
            yield Phase("learn", parts, network.every_parameter())
            return
        # Both weights grow by √(|C| / |C_new|).
        growth = math.sqrt(increment.n_seen / increment.n_new)
        parts["pod_spatial"] = terms.pod_spatial(weight=self.spatial * growth)
        parts["pod_flat"] = terms.embedding_distillation(weight=self.flat * growth)
        yield Phase(
            "learn",
            parts,
            {
                "classifier": network.newest_classifier_parameters(),
                "backbone": list(network.backbone.parameters()),
            },
        )
        if self.finetune_share > 0:
            proxies = [column for columns in network.classifier.columns_of_blocks() for column in columns]
            yield Phase(
                "fine-tune",
                parts,
                {"classifier": proxies + (network.scale_parameters() if self.finetune_scale else [])},
                part="exemplars",
                sampler="plain",
                rates={"classifier": self.finetune_rate},
                training=increment.training.stage(self.finetune_share, schedule="milestones", milestones=()),
            )

    def _classification_term(self) -> Classification:
        return terms.nca(margin=self.margin) if self.classification == "nca" else terms.cross_entropy()

    def _new_proxies(self, network: Network, increment: Increment) -> Float[Tensor, "new proxies dim"]:
        """Imprinted: the centers of k-means on a class's unit embeddings, as long as the old ones are."""
        if increment.is_first:
            return random_weights(increment, increment.n_new, self.n_proxies, network.classifier.dim)
        units = [F.normalize(increment.embeddings(label)) for label in increment.new_labels]
        centers = torch.stack([_kmeans(unit, self.n_proxies, increment) for unit in units])
        proxies: Tensor = network.mean_weight_length() * F.normalize(centers, dim=2)
        return proxies


def _kmeans(
    points: Float[Tensor, "n dim"], n_centers: int, increment: Increment
) -> Float[Tensor, "proxies dim"]:
    """k-means++, then Lloyd's rounds; a center that no point is nearest to stays where it is."""
    centers = points[increment.random.integers(len(points))][None]
    while len(centers) < n_centers:
        distance = torch.cdist(points, centers).min(dim=1).values.square().cpu().double().numpy() + 1e-12
        chosen = increment.random.choice(len(points), p=distance / distance.sum())
        centers = torch.cat([centers, points[chosen][None]])
    for _ in range(KMEANS_ROUNDS):
        nearest = F.one_hot(torch.cdist(points, centers).argmin(dim=1), n_centers).to(points)
        sizes = nearest.sum(dim=0)[:, None]
        centers = torch.where(sizes > 0, nearest.T @ points / sizes.clamp(min=1), centers)
    return centers
