"""LWS: a second stage, around another method, that learns how far to scale each class's logits.

Liu et al., "Long-Tailed Class Incremental Learning", ECCV 2022; learnable weight scaling is of Kang et al.,
"Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020. The published tables' row
is the one around PODNet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from medcil import terms
from medcil.config import NonNegative
from medcil.method import Increment, Method, Phase, Scoring
from medcil.methods.podnet import PODNet
from medcil.models.network import Network

PODNET = PODNet(finetune_share=0.0)  # the second stage stands in place of its fine-tuning


@dataclass(frozen=True)
class LWS:
    base: Method = PODNET
    scaling_share: NonNegative = 0.1875  # of the epochs: 30 after 160
    rate: NonNegative = 0.1
    scoring: Scoring = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        classifier, training = network.classifier, increment.training
        classifier.calibrations.clear()  # the first stage learns without scales
        yield from self.base.learn(network, increment)
        sizes = enumerate(classifier.block_sizes)
        scales = [classifier.calibrate(block, size=size).gain for block, size in sizes]
        yield Phase(
            "scale",
            {"classification": terms.cross_entropy()},
            {"classifier": classifier.columns_of_blocks()[-1], "calibration": scales},
            sampler="class_aware",
            training=training.changed(
                epochs=training.share_of_epochs(self.scaling_share),
                learning_rates={"classifier": self.rate, "calibration": self.rate / 10},
                schedule="cosine",
            ),
        )
