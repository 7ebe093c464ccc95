"""The paper's method: L_all = L_cbc + λ_d L_dm + λ_k L_kd (Eq. 12).

Hao et al., "Addressing Imbalance for Class Incremental Learning in Medical Image Classification", 2024.
A recipe replaces any of the three losses through `method.plugins`; a weight of 0 leaves the loss out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medcil.config import Fraction, NonNegative, Positive, Sampler
from medcil.methods import terms
from medcil.methods.protocol import Increment, LossTerm, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class Balanced:
    alpha: Fraction = 0.5  # α, Eq. 6
    margin_weight: NonNegative = 0.1  # λ_d
    margin_size: NonNegative = 0.4  # m, Eq. 9
    distillation_weight: NonNegative = 0.1  # λ_k
    distillation: terms.DistillationKind = "l1"  # ‖·‖ of Eq. 11
    temperature: Positive = 2.0  # of the distillation "kl"
    # Of later tasks; None: the recipe's. The paper does not say how batches are drawn; drawn like all images,
    # there is often less than one exemplar in a batch for the loss to weigh.
    sampler: Sampler | None = "two_stream"
    first_task: Literal["cross_entropy", "logit_balanced"] = "cross_entropy"
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        if increment.is_first:
            # Algorithm 1 covers t >= 2 only; the benchmark's first step is plain cross-entropy.
            plain = self.first_task == "cross_entropy"
            first = terms.cross_entropy() if plain else terms.logit_balanced()
            yield Phase("learn", {"classification": first}, network.every_parameter())
            return
        losses: dict[str, LossTerm] = {"classification": terms.cil_balanced(alpha=self.alpha)}  # L_cbc, Eq. 7
        if self.margin_weight > 0:  # λ_d L_dm, Eq. 9
            losses["margin"] = terms.distribution_margin(weight=self.margin_weight, margin=self.margin_size)
        if self.distillation_weight > 0:  # λ_k L_kd, Eq. 11
            losses["distillation"] = terms.distillation(
                weight=self.distillation_weight, kind=self.distillation, temperature=self.temperature
            )
        yield Phase("learn", losses, network.every_parameter(), sampler=self.sampler)
