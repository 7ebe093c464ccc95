"""Replay: cross-entropy on the new images and on the exemplars together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from medcil.methods import terms
from medcil.methods.protocol import Increment, Part, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class Replay:
    readout: ReadoutName = "classifier"
    part: ClassVar[Part] = "all"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        losses = {"classification": terms.cross_entropy()}
        yield Phase("learn", losses, network.every_parameter(), part=self.part)
