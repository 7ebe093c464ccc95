"""UCIR: embeddings may not turn, old samples keep a margin to new classes, old class weights are held.

Hou, Pan, Loy, Wang, Lin, "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from medcil.config import NonNegative, PositiveInt
from medcil.methods import terms
from medcil.methods.protocol import Increment, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts import ReadoutName


@dataclass(frozen=True)
class UCIR:
    lambda_base: NonNegative = 5.0  # λ_base
    adaptive: Literal["seen", "old"] = "seen"  # |C| in λ: the tables' variant, or the authors'
    ranking_weight: NonNegative = 1.0
    ranking_margin: NonNegative = 0.5  # m
    n_rivals: PositiveInt = 2  # K
    finetune_share: NonNegative = 0.0  # of the epochs, afterwards; 0: none
    finetune_rate: NonNegative = 0.01
    readout: ReadoutName = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        plain = {"classification": terms.cross_entropy()}
        if increment.is_first:
            yield Phase("learn", plain, network.every_parameter())
            return
        n_before = increment.n_seen if self.adaptive == "seen" else increment.n_old
        less_forget = self.lambda_base * math.sqrt(n_before / increment.n_new)  # λ = λ_base √(|C| / |C_new|)
        yield Phase(
            "learn",
            {
                **plain,
                "less_forget": terms.embedding_distillation(weight=less_forget),  # L_dis^G
                "ranking": terms.margin_ranking(  # L_mr
                    weight=self.ranking_weight, margin=self.ranking_margin, n_rivals=self.n_rivals
                ),
            },
            {
                "backbone": list(network.backbone.parameters()),
                "classifier": network.newest_classifier_parameters(),
            },
        )
        if self.finetune_share > 0:
            yield Phase(
                "fine-tune",
                plain,
                {"classifier": network.classifier_parameters()},
                part="exemplars",
                sampler="plain",
                rates={"classifier": self.finetune_rate},
                training=increment.training.stage(
                    self.finetune_share, schedule="milestones", milestones=(0.5,)
                ),
            )
