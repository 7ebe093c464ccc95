"""iCaRL: distillation through sigmoids; the answer is the class of the nearest mean of exemplars.

Rebuffi, Kolesnikov, Sperl, Lampert, "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017.
`targets="softmax"` is the variant in the published tables, which classifies by cross-entropy on cosines;
`targets="sigmoid"` is the original, one binary problem for each class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medcil.methods import terms
from medcil.methods.protocol import Increment, LossTerm, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class ICaRL:
    targets: Literal["softmax", "sigmoid"] = "softmax"
    readout: ReadoutName = "nearest_mean"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        is_original = self.targets == "sigmoid"
        # New outputs learn their labels, old outputs the old network's sigmoids.
        parts: dict[str, LossTerm] = {
            "classification": terms.one_vs_rest() if is_original else terms.cross_entropy()
        }
        if not increment.is_first:
            parts["distillation"] = terms.sigmoid_distillation(
                reduction="per_class_seen" if is_original else "mean"
            )
        yield Phase("learn", parts, network.every_parameter())
