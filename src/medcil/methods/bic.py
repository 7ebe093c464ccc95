"""BiC: the logits of new classes are corrected by two numbers, learned on a few images kept back.

Wu et al., "Large Scale Incremental Learning", CVPR 2019.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from medcil.config import NonNegative, Positive
from medcil.methods import terms
from medcil.methods.protocol import Increment, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class BiC:
    temperature: Positive = 2.0  # T
    correction_share: Positive = 2.0  # of the epochs
    correction_rate: NonNegative = 0.1
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        if increment.is_first:
            yield Phase("learn", {"classification": terms.cross_entropy()}, network.every_parameter())
            return
        mix = increment.n_old / increment.n_seen  # λ
        yield Phase(
            "learn",
            {
                "classification": terms.cross_entropy(),
                "distillation": terms.distillation(kind="kl", temperature=self.temperature),
            },
            network.every_parameter(),
            part="rest",
            weights={"classification": 1 - mix, "distillation": mix / self.temperature**2},  # without T²
        )
        newest = len(network.classifier.blocks) - 1
        correction = network.classifier.calibrate(newest, size=1)  # α, β
        yield Phase(
            "correct",
            {"classification": terms.cross_entropy()},
            {"correction": list(correction.parameters())},
            part="kept_back",
            sampler="plain",
            rates={"correction": self.correction_rate},
            training=increment.training.stage(
                self.correction_share,
                weight_decay=0.0,  # it would pull α away from 1
            ),
            log_prior=_balanced_between_old_and_new,
        )


def _balanced_between_old_and_new(before: Float[Tensor, "classes"], n_old: int) -> Float[Tensor, "classes"]:
    """Keep the log prior within the old and within the new classes, and make the means of both 0.

    Two numbers, fitted to as many images of every class, remove the bias between old and new classes, but
    not the imbalance among either.
    """
    return torch.cat([block - block.mean() for block in before.tensor_split([n_old])])
