"""ACIL: ridge regression on random features of a network that is frozen after the first task; also AIR.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection",
NeurIPS 2022. AIR (`balance: 1`, the preset `air`), where all classes weigh the same: Fang et al., "AIR:
Analytic Imbalance Rectifier for Continual Learning", 2024.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from medcil.config import NonNegative, Positive, PositiveInt
from medcil.methods.frozen import EMBEDDING, FrozenNetwork, readout_of
from medcil.methods.protocol import Increment, Phase
from medcil.models.network import Network
from medcil.readouts.ridge import Ridge


@dataclass(frozen=True)
class ACIL(FrozenNetwork):
    adapt: Literal["always", "never"] = "always"
    random_features: PositiveInt = 2048  # the size of the buffer
    strength: Positive = 0.1  # γ: the ridge, where the weights of the classes are 1 on average
    balance: NonNegative = 0.0  # β: 0 counts images alike (ACIL), 1 counts classes alike (AIR)
    pooled: bool = True  # one matrix for all classes; with a balance above 0 no class can change later

    @property
    def readout(self) -> Literal["ridge"]:
        return "ridge"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        ridge = readout_of(increment, Ridge)
        spec = replace(EMBEDDING, n_random=self.random_features, random_alone=True, draw="uniform")
        features = yield from self.remember_task(
            network, increment, ridge, spec, balance=self.balance, is_pooled=self.pooled
        )
        weights = ridge.statistics.weights(self.balance)  # π, of which γ is that of the mean 1
        strength = self.strength * float(weights[weights > 0].mean())
        if increment.is_first:
            ridge.choose_on_part(features, ridges=(strength,), random=increment.random, and_sharpness=True)
        ridge.ridge.fill_(strength)
        ridge.solve()
