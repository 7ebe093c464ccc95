"""SimpleCIL: the cosine to the mean features of each class; APER where the first task adapts the network.

Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models", IJCV 2024. APER
(`adapt: always, pretrained: true`, the preset `aper`) has the features of the pretrained and of the adapted
network side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medcil.methods.frozen import FrozenNetwork, readout_of
from medcil.methods.protocol import Increment, Phase
from medcil.models.network import Network
from medcil.readouts.discriminants import CosinePrototypes


@dataclass(frozen=True)
class SimpleCIL(FrozenNetwork):
    @property
    def readout(self) -> Literal["cosine_prototypes"]:
        return "cosine_prototypes"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        prototypes = readout_of(increment, CosinePrototypes)
        yield from self.remember_task(network, increment, prototypes)
        prototypes.solve()
