"""FeCAM: the Mahalanobis distance to each class, by a covariance of its own; frozen after the first task.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual
Learning", NeurIPS 2023.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from medcil.config import NonNegative, Positive
from medcil.methods.frozen import EMBEDDING, FrozenNetwork, readout_of
from medcil.methods.protocol import Increment, Phase
from medcil.models.network import Network
from medcil.readouts.discriminants import MahalanobisDistances


@dataclass(frozen=True)
class FeCAM(FrozenNetwork):
    adapt: Literal["always", "never"] = "always"
    power: Positive = 0.5  # Tukey's λ, of features that are never negative; 1 leaves them as they are
    shrinkage: NonNegative = 1.0  # a₁: toward the mean variance
    shrinkage_others: NonNegative = 1.0  # a₂: of the other entries toward their mean
    times: Literal[1, 2] = 2  # how often the covariance is shrunk

    @property
    def readout(self) -> Literal["mahalanobis"]:
        return "mahalanobis"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        distances = readout_of(increment, MahalanobisDistances)
        spec = replace(EMBEDDING, power=self.power)
        yield from self.remember_task(network, increment, distances, spec, is_pooled=False)
        # Shrinking by a₁ twice adds a₁ V₁, then a₁ (1 + a₁) V₁.
        for place, a in enumerate((self.shrinkage, self.shrinkage_others)):
            distances.shrinkage[place] = (1 + a) ** self.times - 1
        distances.solve()
