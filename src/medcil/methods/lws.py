"""LWS: a second stage, around another method, that learns how far to scale each class's logits.

Liu et al., "Long-Tailed Class Incremental Learning", ECCV 2022; learnable weight scaling is of Kang et al.,
"Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020. The published tables' row
is the one around PODNet.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from medcil.config import NonNegative
from medcil.methods import terms
from medcil.methods.bic import BiC
from medcil.methods.podnet import PODNet
from medcil.methods.protocol import Increment, Method, Phase
from medcil.models.network import Network
from medcil.readouts import ReadoutName

PODNET = PODNet(classification="cross_entropy", spatial=3.0, flat=1.0, finetune_share=0.0)
"""As in the published row; the second stage replaces its fine-tuning."""


@dataclass(frozen=True)
class LWS:
    base: Method = PODNET
    scaling_share: NonNegative = 0.1875  # of the epochs: 30 after 160; 0: none
    rate: NonNegative = 0.1
    readout: ReadoutName = "classifier"

    def __post_init__(self) -> None:
        if isinstance(self.base, BiC | LWS):
            raise ValueError("base calibrates the logits itself; choose a method that does not")
        if self.base.readout == "gaussians":
            raise ValueError("base has Gaussians, which LWS would not ask; put `gaussians` around `lws`")

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        classifier = network.classifier
        before = classifier.gains()  # replayed after an interruption, from the state before the task
        classifier.calibrations.clear()  # the first stage learns without scales
        yield from self.base.learn(network, increment)
        if self.scaling_share == 0:
            return
        sizes = enumerate(classifier.block_sizes)
        scales = [classifier.calibrate(block, size=size).gain for block, size in sizes]
        for block, scale in enumerate(scales):
            if block in before and before[block].shape == scale.shape:
                scale.data.copy_(before[block])  # it goes on from the scales of the task before
        yield Phase(
            "scale",
            {"classification": terms.cross_entropy()},
            {
                "classifier": classifier.columns_of_blocks()[-1] + network.scale_parameters(),
                "scales": scales,
            },
            sampler="class_aware",
            rates={"classifier": self.rate, "scales": self.rate / 10},
            training=increment.training.stage(self.scaling_share, schedule="cosine"),
        )
