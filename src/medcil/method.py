"""The vocabulary of methods: what a method sees, what it yields, what a loss term reads.

A method grows the network and yields training phases; the code between two yields runs between the two
phases. It never sees an image: only embeddings, counts and, inside a loss term, the outputs for a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from medcil.models.network import Network, Outputs


@dataclass(frozen=True, eq=False)
class Batch:
    """What a loss term may read of one training step."""

    labels: Int[Tensor, "batch"]
    out: Outputs
    n_old: int
    class_counts: Int[Tensor, "classes"]
    """Images per class as drawn in this phase: n_c."""
    inherent_counts: Int[Tensor, "classes"]
    """Images per class when the class was learned, kept for life: q_c."""
    class_weights: Float[Tensor, "classes dim"]
    run_old_network: Callable[[], Outputs] | None
    draw_noise: Callable[[], Float[Tensor, "classes dim"]]

    @cached_property
    def old(self) -> Outputs:
        """What the network before this task says of the same images; computed once, when first asked for."""
        if self.run_old_network is None:
            raise LookupError("there is no old network in the first task")
        return self.run_old_network()

    @cached_property
    def noise(self) -> Float[Tensor, "classes dim"]:
        """This step's standard normal draws."""
        return self.draw_noise()


LossTerm = Callable[[Batch], Float[Tensor, ""]]


@dataclass(frozen=True)
class Classification:
    """The loss term called "classification", which alone decides the prior that the logits carry."""

    loss: LossTerm
    log_prior: Callable[[Int[Tensor, "classes"], int], Float[Tensor, "classes"]]
    """(images per class as drawn, n_old) -> the log prior, up to a constant, left in the logits."""

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        return self.loss(batch)


@dataclass(frozen=True, eq=False)
class Phase:
    """Training, as data: which losses move which parameters on which samples."""

    name: str
    terms: Mapping[str, LossTerm]
    """Summed. The names are what `WithTerms` replaces and what the log shows; one is "classification"."""
    params: Mapping[str, Sequence[nn.Parameter]]
    """The parameters that move, by the name of their learning rate."""
    part: Literal["all", "new"] = "all"
    """New images and exemplars together, or the new images alone."""

    @property
    def classification(self) -> Classification:
        term = self.terms.get("classification")
        if not isinstance(term, Classification):
            raise TypeError(f'phase {self.name!r} needs a term "classification" made by medcil.terms')
        return term


@dataclass(frozen=True, eq=False)
class Increment:
    """What a method may know of the classes it is to learn: numbers and embeddings, no images."""

    n_old: int
    n_new: int
    embeddings: Callable[[int], Float[Tensor, "n dim"]]
    """Of a class, by the network as it is now: all images of a new class, the exemplars of an old one."""
    random: np.random.Generator
    """The same draws whenever this task is learned with this seed."""

    @property
    def is_first(self) -> bool:
        return self.n_old == 0


Scoring = Literal["classifier", "nearest_mean"]
"""Predict the class of the largest logit, or of the nearest mean of exemplars."""


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    @property
    def scoring(self) -> Scoring: ...

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]: ...


def every_parameter(network: Network) -> dict[str, list[nn.Parameter]]:
    classifier = [*network.classifier.blocks, network.classifier.scale]
    return {
        "backbone": list(network.backbone.parameters()),
        "classifier": classifier if network.spec().learn_scale else classifier[:-1],
    }


def new_class_weights(network: Network, increment: Increment) -> Float[Tensor, "new dim"]:
    """Weights to start the new classes with: imprinted, or uniform where there is nothing to imprint beside.

    Imprinting: the mean of a class's unit embeddings, as long as the old classes' weights are on average.
    In the first task U(±1/√dim), as in the benchmark.
    """
    classifier = network.classifier
    if increment.is_first:
        bound = classifier.dim**-0.5
        draws = increment.random.uniform(-bound, bound, size=(increment.n_new, classifier.dim))
        return torch.tensor(draws, dtype=torch.float32)
    length = torch.linalg.vector_norm(classifier.weight.detach(), dim=1).mean()
    labels = range(increment.n_old, increment.n_old + increment.n_new)
    means = torch.stack([F.normalize(increment.embeddings(label)).mean(dim=0) for label in labels])
    imprinted: Tensor = length * F.normalize(means)
    return imprinted


@dataclass(frozen=True)
class WithTerms:
    """A method with loss terms replaced (same name) or added (new name), in every phase after the first task.

    The first task has no old classes, which is what these terms are about.
    """

    base: Method
    terms: Mapping[str, LossTerm]

    @property
    def scoring(self) -> Scoring:
        return self.base.scoring

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        for phase in self.base.learn(network, increment):
            yield phase if increment.is_first else replace(phase, terms={**phase.terms, **self.terms})
