"""DER: a new extractor for every task beside the old ones, which are held; then a balanced classifier.

Yan, Xie, He, "DER: Dynamically Expandable Representation for Class Incremental Learning", CVPR 2021.
The paper's channel masks and pruning are in no public code, the published tables' among it, and not here:
they would be a term "sparsity" of the phase "learn" and code after it, on `network.newest_branch`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from medcil.config import NonNegative, Positive
from medcil.methods import terms
from medcil.methods.protocol import Increment, LossTerm, Phase, new_class_weights, random_weights
from medcil.models.classifier import Classifier
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class DER:
    warm_up_share: NonNegative = 0.0  # of the epochs, before the classifier is drawn again; 0: none
    reset_classifier: bool = False
    balance_share: NonNegative = 0.3  # of the epochs; 0: none
    balance_rate: NonNegative = 0.1
    temperature: Positive = 5.0  # δ
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        plain = {"classification": terms.cross_entropy()}
        if increment.is_first:
            network.grow(new_class_weights(network, increment))
            yield Phase("learn", plain, network.every_parameter())
            return
        network.add_branch(shared_stages=0)
        network.grow(new_class_weights(network, increment))
        auxiliary = network.add_auxiliary(  # the new classes, and all old ones as one
            random_weights(increment, 1 + increment.n_new, network.newest_branch.num_features)
        )
        losses: dict[str, LossTerm] = {**plain, "auxiliary": terms.auxiliary_cross_entropy()}
        moving = {
            "backbone": list(network.newest_branch.parameters()),
            "classifier": network.classifier_parameters()
            + [parameter for parameter in auxiliary.parameters() if parameter.requires_grad],
        }
        training = increment.training
        if self.warm_up_share > 0:
            short = training.stage(self.warm_up_share, schedule="milestones", milestones=())
            yield Phase("warm-up", losses, moving, training=short)
            if self.reset_classifier:
                _draw_anew(network.classifier, increment)
                _draw_anew(auxiliary, increment)
        yield Phase("learn", losses, moving)
        if self.balance_share > 0:
            if self.reset_classifier:
                _draw_anew(network.classifier, increment)
            yield Phase(
                "balance",
                {"classification": terms.cross_entropy(temperature=self.temperature)},
                {"classifier": network.classifier_parameters()},
                part="exemplars",
                sampler="plain",
                rates={"classifier": self.balance_rate},
                training=training.stage(self.balance_share, schedule="milestones", milestones=(0.5,)),
            )


@torch.no_grad()
def _draw_anew(classifier: Classifier, increment: Increment) -> None:
    for columns in classifier.columns_of_blocks():
        rows = random_weights(increment, len(columns[0]), classifier.dim)
        for weights, drawn in zip(columns, rows.chunk(len(columns), dim=1), strict=True):
            weights.copy_(drawn)
