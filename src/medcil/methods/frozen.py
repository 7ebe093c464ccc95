"""Frozen networks: what methods share that train in the first task at most, and remember statistics."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F

from medcil.config import PositiveInt
from medcil.methods.finetune import Finetune
from medcil.methods.protocol import Increment, Method, Phase
from medcil.models.network import Network
from medcil.readouts.readout import ImageFeatures
from medcil.readouts.statistics import FeatureSpec, StatisticsReadout

AnyReadout = TypeVar("AnyReadout", bound=StatisticsReadout)
Learning = Generator[Phase, None, dict[int, ImageFeatures]]
"""Training, which returns the features of the images of a first task, by class."""

FINETUNE = Finetune()
EMBEDDING = FeatureSpec(constant=False)


@dataclass(frozen=True)
class FrozenNetwork:
    """Which features of the network a method remembers. Its subclasses say what they solve from them."""

    base: Method = FINETUNE  # how the first task trains, if it does
    adapt: Literal["always", "never"] = "never"  # never: the network stays as it came
    stages: PositiveInt = 1  # the features of so many last stages
    pretrained: bool = False  # and of those of the network as it was before the first task
    scaled: bool = False  # each stage's features to length √dim

    def remember_task(
        self,
        network: Network,
        increment: Increment,
        readout: StatisticsReadout,
        spec: FeatureSpec = EMBEDDING,
        *,
        balance: float = 0.0,
        is_pooled: bool = True,
        keeps_features: bool = False,
    ) -> Learning:
        """Train as `adapt` says, and add the task's images to the readout."""
        return remember_task(
            network,
            increment,
            readout,
            replace(spec, stages=self.stages, scaled=self.scaled),
            phases=self.base.learn(network, increment) if self.adapt == "always" else None,
            with_companion=self.pretrained and self.adapt == "always",
            balance=balance,
            is_pooled=is_pooled,
            keeps_features=keeps_features,
        )


def remember_task(
    network: Network,
    increment: Increment,
    readout: StatisticsReadout,
    spec: FeatureSpec,
    *,
    phases: Iterable[Phase] | None,
    with_companion: bool,
    balance: float,
    is_pooled: bool,
    keeps_features: bool = False,
) -> Learning:
    """Choose the features and train the phases in the first task; add the images of every task.

    It also returns the features of later tasks' images if it keeps them.
    """
    if increment.is_first:
        seed = int(increment.random.integers(2**31))
        readout.choose_features(
            network, spec, with_companion=with_companion, seed=seed, balance=balance, is_pooled=is_pooled
        )
    if increment.is_first and phases is not None:
        yield from phases
        return remember(increment, readout)
    features = remember(increment, readout, keeps_features=keeps_features)
    if not increment.n_new:
        return features
    if readout.feature_spec.has_embedding:
        network.grow(F.normalize(readout.sums[increment.n_old :, : network.classifier.dim]).float())
    else:
        units = [F.normalize(increment.embeddings(label)) for label in increment.new_labels]
        network.grow(torch.stack([of_class.mean(dim=0) for of_class in units]))
    return features


def remember(
    increment: Increment, readout: StatisticsReadout, *, keeps_features: bool = False
) -> dict[int, ImageFeatures]:
    """Add the images of the task to the statistics, class by class. Return the features of a first task."""
    if increment.features is None:
        raise TypeError("statistics need the features of images")
    of_classes: dict[int, ImageFeatures] = {}
    for label in (*increment.known_labels, *increment.new_labels):
        features = increment.features(label)
        readout.add(features.values, label)
        if increment.is_first or keeps_features:
            of_classes[label] = features
    return of_classes


def readout_of(increment: Increment, kind: type[AnyReadout]) -> AnyReadout:
    if not isinstance(increment.readout, kind):
        raise TypeError(f"the readout must be {kind.__name__}, not {type(increment.readout).__name__}")
    return increment.readout
