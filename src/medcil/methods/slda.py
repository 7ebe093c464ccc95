"""SLDA: linear discriminants from the mean of each class and one covariance; the network stays as it came.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops
2020.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from medcil.methods.frozen import FrozenNetwork, readout_of
from medcil.methods.protocol import Increment, Phase
from medcil.models.network import Network
from medcil.readouts.discriminants import LinearDiscriminants


@dataclass(frozen=True)
class SLDA(FrozenNetwork):
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 1e-4  # ε: (1 - ε) Σ + ε I

    @property
    def readout(self) -> Literal["linear_discriminants"]:
        return "linear_discriminants"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        discriminants = readout_of(increment, LinearDiscriminants)
        yield from self.remember_task(network, increment, discriminants)
        discriminants.shrinkage.fill_(self.shrinkage)
        discriminants.solve()
