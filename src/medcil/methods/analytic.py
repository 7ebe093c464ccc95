"""Analytic: a network that learns the first classes, then is frozen; classes are statistics of its features.

medcil's own: docs/explanation/analytic.md. The readout is a class-balanced ridge regression in closed form on
several stages of the adapted network and of a copy of the network from before. No exemplar is needed, and the
result does not depend on the order in which classes arrive. Relatives: Zhuang et al., "ACIL", NeurIPS 2022;
McDonnell et al., "RanPAC", NeurIPS 2023; Fang et al., "AIR", 2024.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from medcil.config import NonNegative, Positive, PositiveInt
from medcil.methods import terms
from medcil.methods.frozen import FINETUNE, readout_of, remember_task
from medcil.methods.protocol import Increment, LossTerm, Method, Phase, random_weights
from medcil.methods.trial import AdaptationTrial
from medcil.models.network import Network
from medcil.readouts.ridge import STRENGTHS, Ridge
from medcil.readouts.statistics import FeatureSpec


@dataclass(frozen=True)
class Analytic:
    base: Method = FINETUNE  # how the first task trains
    turned_labels: Literal["no", "instead", "beside"] = "no"  # each class four times, once a quarter turn
    mixup: NonNegative = 0.0  # α of the mixtures that the first task trains on
    adapt: Literal["always", "never", "auto"] = "always"  # never: the network stays as it came; auto: a trial
    stages: PositiveInt = 2  # the features of so many last stages
    pretrained: bool = True  # and of those of the network as it was before the first task
    random_features: Annotated[int, Field(ge=0)] = 0  # and so many of their random projections, after a ReLU
    balance: Annotated[float, Field(ge=0)] = 0.5  # β: 0 counts images alike, 1 counts classes alike
    strength: Positive | Literal["leave_one_out"] = 0.01  # λ, or chosen on the first task (Ridge.tune)
    pooled: bool = False  # one sum of second moments for all classes: smaller, but no class can change later

    @property
    def readout(self) -> Literal["ridge"]:
        return "ridge"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        ridge, adapts = readout_of(increment, Ridge), self.adapt == "always"
        strengths = STRENGTHS if self.strength == "leave_one_out" else (self.strength,)
        spec = FeatureSpec(stages=self.stages, n_random=self.random_features)
        if increment.is_first and self.adapt == "auto":
            trial = AdaptationTrial(network, increment, spec, self.pretrained, self.balance, strengths)
            adapts = yield from trial.run(lambda: self._phases(network, increment))
        features = yield from remember_task(
            network,
            increment,
            ridge,
            spec,
            phases=self._phases(network, increment) if adapts else None,
            with_companion=self.pretrained and adapts,
            balance=self.balance,
            is_pooled=self.pooled,
        )
        if increment.is_first:
            ridge.tune(features, strengths=strengths)
        ridge.solve()

    def _phases(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for phase in self.base.learn(network, increment):
            mixed = replace(phase, mixup=self.mixup)
            yield mixed if self.turned_labels == "no" else self._turned(mixed, network, increment)

    def _turned(self, phase: Phase, network: Network, increment: Increment) -> Phase:
        """Learn turned classes with an auxiliary classifier, instead of the classes or beside them.

        Which way an image was turned is one more thing to learn: the features become richer, and the ridge
        reads no more than these.
        """
        head = network.auxiliary or network.add_auxiliary(
            random_weights(increment, 4 * increment.n_new, network.newest_branch.num_features)
        )
        of_head = [parameter for parameter in head.parameters() if parameter.requires_grad]
        turned: dict[str, LossTerm] = {"classification": terms.turned_classes()}
        if self.turned_labels == "beside":
            turned = {"turned": terms.turned_classes().loss}
            of_head += phase.params["classifier"]
        params = {**phase.params, "classifier": of_head}
        return replace(phase, terms={**phase.terms, **turned}, params=params, is_turned=True)
