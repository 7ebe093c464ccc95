"""RanPAC: ridge regression on random features of a network, and every task chooses the ridge again.

McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", NeurIPS 2023.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from medcil.config import PositiveInt
from medcil.methods.frozen import EMBEDDING, FrozenNetwork, readout_of
from medcil.methods.protocol import Increment, Phase
from medcil.models.network import Network
from medcil.readouts.ridge import Ridge

RIDGES = tuple(10.0**exponent for exponent in range(-8, 9))
"""λ"""


@dataclass(frozen=True)
class RanPAC(FrozenNetwork):
    random_features: PositiveInt = 2048  # M

    @property
    def readout(self) -> Literal["ridge"]:
        return "ridge"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        ridge = readout_of(increment, Ridge)
        spec = replace(EMBEDDING, n_random=self.random_features, random_alone=True, draw="normal")
        features = yield from self.remember_task(network, increment, ridge, spec, keeps_features=True)
        ridge.choose_on_part(
            features, ridges=RIDGES, random=increment.random, and_sharpness=increment.is_first
        )
        ridge.solve()
