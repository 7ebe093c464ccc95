"""Analytic: a network that learns the first classes, then is frozen; classes are statistics of its features.

medcil's own: docs/explanation/analytic.md. The readout is a class-balanced ridge regression in closed form on
several stages of the adapted network and of a copy of the network from before. No exemplar is needed, and the
result does not depend on the order in which classes arrive. Relatives: Zhuang et al., "ACIL", NeurIPS 2022;
McDonnell et al., "RanPAC", NeurIPS 2023; Fang et al., "AIR", 2024.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from medcil.config import Positive, PositiveInt
from medcil.methods.finetune import Finetune
from medcil.methods.protocol import Increment, Method, Phase, new_class_weights
from medcil.models.network import Network
from medcil.readouts.ridge import STRENGTHS, Ridge

FINETUNE = Finetune()


@dataclass(frozen=True)
class Analytic:
    base: Method = FINETUNE  # how the first task trains
    adapt: bool = True  # False: the network stays as it came
    stages: PositiveInt = 2  # the features of so many last stages
    pretrained: bool = True  # and of those of the network as it was before the first task
    balance: Annotated[float, Field(ge=0, le=1)] = 0.5  # β: 0 counts images alike, 1 counts classes alike
    strength: Positive | None = None  # λ; None: chosen on the first task, without images of the same patient

    @property
    def readout(self) -> Literal["ridge"]:
        return "ridge"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        ridge, features = increment.readout, increment.features
        if not isinstance(ridge, Ridge) or features is None:
            raise TypeError("the readout must be Ridge, with features to read")
        if increment.is_first:
            ridge.choose(network, stages=self.stages, with_companion=self.pretrained and self.adapt)
        if increment.is_first and self.adapt:
            yield from self.base.learn(network, increment)
        else:
            network.grow(new_class_weights(network, increment))
        of_classes = {label: features(label) for label in increment.new_labels}
        for label, of_class in of_classes.items():
            ridge.add(of_class.values, label)
        if increment.is_first:
            strengths = STRENGTHS if self.strength is None else (self.strength,)
            ridge.tune(of_classes, balance=self.balance, strengths=strengths)
        ridge.solve()
