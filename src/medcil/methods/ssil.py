"""SS-IL: old and new classes each under a softmax of their own, so that neither gains on the other.

Ahn et al., "SS-IL: Separated Softmax for Incremental Learning", ICCV 2021.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from medcil.config import Positive
from medcil.methods import terms
from medcil.methods.protocol import Increment, LossTerm, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class SSIL:
    temperature: Positive = 2.0  # τ
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        if increment.is_first:
            yield Phase("learn", {"classification": terms.cross_entropy()}, network.every_parameter())
            return
        parts: dict[str, LossTerm] = {
            "classification": terms.separated_softmax(),
            "distillation": terms.taskwise_distillation(temperature=self.temperature),
        }
        # One exemplar to four new images in every batch, whether or not an epoch then shows them all.
        training = increment.training.changed(exemplar_share=increment.training.exemplar_share or 0.25)
        yield Phase("learn", parts, network.every_parameter(), sampler="two_stream", training=training)
