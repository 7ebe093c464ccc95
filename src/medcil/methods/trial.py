"""A trial: does a network gain from learning its first classes? Judged on patients that it does not train on.

A network has seen the images that it learned from, so scores of these say nothing about it. A quarter of the
patients of every class is kept back. The network learns from the others. Then both, the network as it came
and the adapted one, are scored on the patients kept back, as they would be used: by a ridge regression on the
features of all images but the patient's own.
"""

import copy
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from medcil.data.splits import group_split
from medcil.methods.frozen import readout_of
from medcil.methods.protocol import Decision, Increment, Phase
from medcil.metrics.classification import balanced_accuracy, confusion_matrix
from medcil.models.network import Network
from medcil.readouts.readout import ImageFeatures
from medcil.readouts.ridge import Ridge, leave_one_group_out
from medcil.readouts.statistics import FeatureSpec

KEPT_BACK = 0.25
"""Share of each class's images, by patient or lesion where these are known."""


@dataclass(frozen=True)
class AdaptationTrial:
    """Of a network before its first task."""

    network: Network
    increment: Increment
    spec: FeatureSpec
    with_companion: bool
    """Whether the adapted network's features have those of the network as it came beside them."""
    balance: float
    strengths: Sequence[float]

    def run(self, phases: Callable[[], Iterator[Phase]]) -> Generator[Phase, None, bool]:
        """Yield phases that train on some patients; return whether to adapt.

        The network, and the random draws to come, end as they were.
        """
        network, increment = self.network, self.increment
        original, draws = copy.deepcopy(network), increment.random.bit_generator.state
        groups = {label: self._features(label).groups for label in increment.new_labels}
        kept_back = _kept_back(groups, seed=int(increment.random.integers(2**31)))
        self._choose_features(with_companion=False)
        as_it_came = self._score(kept_back)
        self._choose_features(with_companion=self.with_companion)
        for phase in phases():
            yield replace(phase, without=kept_back)
        adapted = self._score(kept_back)
        network.become(original)
        increment.random.bit_generator.state = draws
        n_images = sum(group in kept_back for of_class in groups.values() for group in of_class)
        why = (
            f"balanced accuracy {adapted:.1%} adapted, {as_it_came:.1%} as it came, each group left out, "
            f"on {n_images:,} images of {len(kept_back):,} groups that it was not trained on"
        )
        value = "always" if adapted > as_it_came else "never"
        return increment.decide(Decision("method.adapt", value, why)).value == "always"

    def _choose_features(self, *, with_companion: bool) -> None:
        readout_of(self.increment, Ridge).choose_features(
            self.network, self.spec, with_companion=with_companion, balance=self.balance
        )

    def _features(self, label: int) -> ImageFeatures:
        if self.increment.features is None:
            raise TypeError("a trial needs the features of images")
        return self.increment.features(label)

    def _score(self, kept_back: frozenset[str]) -> float:
        features = {label: self._features(label) for label in self.increment.new_labels}
        return leave_one_out_accuracy(features, kept_back, balance=self.balance, strengths=self.strengths)


def _kept_back(groups: Mapping[int, Sequence[str]], *, seed: int) -> frozenset[str]:
    labels = np.repeat(list(groups), [len(of_class) for of_class in groups.values()])
    names = [group for of_class in groups.values() for group in of_class]
    is_kept_back = group_split(labels, names, share=KEPT_BACK, seed=seed)
    return frozenset(name for name, is_one in zip(names, is_kept_back, strict=True) if is_one)


def leave_one_out_accuracy(
    features: Mapping[int, ImageFeatures],
    scored: Collection[str],
    *,
    balance: float,
    strengths: Sequence[float],
) -> float:
    """Compute the balanced accuracy on some groups of a ridge regression on all images but a group's own."""
    ridge = Ridge(n_features=next(iter(features.values())).values.shape[2])
    ridge.balance = ridge.balance.new_tensor(balance)
    for label, of_class in features.items():
        ridge.add(of_class.values, label)
    ridge.tune(features, strengths=strengths)
    labels = np.repeat(list(features), [len(of_class.groups) for of_class in features.values()])
    groups = [group for of_class in features.values() for group in of_class.groups]
    places = [place for place, group in enumerate(groups) if group in scored]
    values = torch.cat([of_class.values for of_class in features.values()])[places]
    (scores,) = leave_one_group_out(
        ridge.statistics,
        values,
        torch.from_numpy(labels[places]).to(values.device),
        [groups[place] for place in places],
        balance=balance,
        ridges=[float(ridge.ridge)],
    )
    predictions = scores.argmax(dim=1).cpu().numpy()
    return float(balanced_accuracy(confusion_matrix(labels[places], predictions, len(ridge.counts))))
