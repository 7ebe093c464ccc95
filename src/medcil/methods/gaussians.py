"""Gaussians: a method that also remembers each class as a normal distribution, and asks both.

medcil's own: docs/explanation/gaussians.md.

Training is the base method's. After each task every new class becomes a mean
of unit embeddings, with one covariance for all classes; those of old classes, whose images are gone, follow
the network by the map that takes its embeddings of the images at hand from what they were to what they are.
Means drawn back from drift: Yu et al., "Semantic Drift Compensation for Class-Incremental Learning", CVPR
2020. Linear discriminants on a network's embeddings: Hayes and Kanan, "Lifelong Machine Learning with Deep
Streaming Linear Discriminant Analysis", CVPR Workshops 2020.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from medcil.config import NonNegative
from medcil.methods.balanced import Balanced
from medcil.methods.protocol import Increment, Method, Phase
from medcil.models.network import Network
from medcil.readouts.gaussians import ClassGaussians

BALANCED = Balanced(distillation="kl", distillation_weight=1.0)


@dataclass(frozen=True)
class Gaussians:
    base: Method = BALANCED
    weight: NonNegative = 0.5  # λ: of the Gaussians' posterior, beside 1 for the classifier's
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.3  # of the covariance toward a sphere
    favor: float = 0.5  # δ: of old classes, in the logarithm of their odds

    def __post_init__(self) -> None:
        if self.base.readout != "classifier":
            raise ValueError("base must score by its classifier, beside which the Gaussians are asked")

    @property
    def readout(self) -> Literal["gaussians"]:
        return "gaussians"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        gaussians = increment.readout
        if not isinstance(gaussians, ClassGaussians):
            raise TypeError(f"the readout must be ClassGaussians, not {type(gaussians).__name__}")
        old = None if gaussians.is_empty else _unit_embeddings(increment)[0]
        yield from self.base.learn(network, increment)
        new, labels = _unit_embeddings(increment)
        is_new = labels >= increment.n_old
        if old is not None:
            gaussians.carry(old, new, labels)
        elif not increment.is_first:
            gaussians.add(*_of_exemplars(network, new[~is_new], labels[~is_new], increment.n_old))
        gaussians.add(new[is_new], labels[is_new])
        gaussians.prepare(
            weight=self.weight, shrinkage=self.shrinkage, favor=self.favor, n_old=increment.n_old
        )
        gaussians.to(network.classifier.scale)


def _unit_embeddings(increment: Increment) -> tuple[Float[Tensor, "n dim"], Int[Tensor, "n"]]:
    """Of all images at hand, by class, in double precision: thousands of products are summed."""
    of_classes = [F.normalize(increment.embeddings(c).double()) for c in range(increment.n_seen)]
    labels = [torch.full((len(units),), c) for c, units in enumerate(of_classes)]
    return torch.cat(of_classes), torch.cat(labels).to(of_classes[0].device)


def _of_exemplars(
    network: Network, units: Float[Tensor, "n dim"], labels: Int[Tensor, "n"], n_old: int
) -> tuple[Float[Tensor, "m dim"], Int[Tensor, "m"]]:
    """Old classes of a network that was trained without; one without exemplars is where its weights point."""
    lacking = torch.nonzero(torch.bincount(labels, minlength=n_old) == 0).flatten()
    weights = F.normalize(network.classifier.class_weights.detach().to(units))[lacking]
    return torch.cat([units, weights]), torch.cat([labels, lacking])
