"""The vocabulary of methods: what a method sees, what it yields, what a loss term reads.

A method grows the network and yields training phases; the code between two yields runs between the two
phases. It never sees an image: only embeddings, counts and, inside a loss term, the outputs for a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Real
from torch import Tensor, nn

from medcil.config import Sampler, TrainingConfig
from medcil.models.network import Network, Outputs
from medcil.readouts.readout import ClassifierReadout, ImageFeatures, Readout


@dataclass(frozen=True, eq=False)
class Counts:
    """Images per class."""

    drawn: Real[Tensor, "classes"]
    """n_c: in an epoch of this phase on average, repetitions included."""
    at_hand: Int[Tensor, "classes"]
    """The new images and the exemplars there are, however often they are drawn."""
    inherent: Int[Tensor, "classes"]
    """q_c: when the class was learned, kept for life."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What a loss term may read of one training step."""

    labels: Int[Tensor, "batch"]
    out: Outputs
    counts: Counts
    task_sizes: tuple[int, ...]
    """Classes of each task, this one's last."""
    class_weights: Float[Tensor, "classes dim"]
    scale: Float[Tensor, ""]
    """η"""
    run_old_network: Callable[[], Outputs] | None
    normal: Callable[[Sequence[int]], Tensor]
    """Standard normal draws of a shape, other ones at every call; the same when a run is resumed."""
    turns: Int[Tensor, "batch"] | None = None
    """By how many quarter turns each image is turned, none to three; None unless the phase is turned."""

    @property
    def n_old(self) -> int:
        return sum(self.task_sizes[:-1])

    @cached_property
    def old(self) -> Outputs:
        """Outputs of the phase's teacher for the same images; computed once, when first read."""
        if self.run_old_network is None:
            raise LookupError("there is no old network in the first task")
        return self.run_old_network()


LossTerm = Callable[[Batch], Float[Tensor, ""]]
"""Must be a pure function of the batch. Under CUDA graphs, Python side effects run only once, at capture."""


@dataclass(frozen=True)
class Classification:
    """The loss term called "classification", which alone decides the prior that the logits carry."""

    loss: LossTerm
    log_prior: Callable[[Counts, int], Float[Tensor, "classes"]]
    """(images per class, n_old) -> the log prior, up to a constant, left in the logits."""

    def __call__(self, batch: Batch) -> Float[Tensor, ""]:
        return self.loss(batch)


Part = Literal["all", "new", "exemplars", "kept_back", "rest"]
"""Which images a phase may draw: new images and exemplars together; the new images alone; a herd of every
class, new ones included; a tenth of a herd of every class, kept back from training; all but those."""


Gradients = Literal["sum", "projected"]
"""How the terms' gradients become one. "sum": they are added up. "projected": the term called "reference" is
not minimized; where the sum g of the others points against its gradient r, ⟨g, r⟩ < 0, g becomes
g - (⟨g, r⟩ / ‖r‖²) r (A-GEM, Chaudhry et al., ICLR 2019)."""


@dataclass(frozen=True, eq=False)
class Phase:
    """Training, as data: which losses move which parameters on which samples."""

    name: str
    """The phase that learns the new classes' features is called "learn"; plug-ins look for it."""
    terms: Mapping[str, LossTerm]
    """Summed. The names are what `WithTerms` replaces and what the log shows; one is "classification"."""
    params: Mapping[str, Sequence[nn.Parameter]]
    """The parameters that move, by the name of their learning rate."""
    part: Part = "all"
    without: frozenset[str] = frozenset()
    """Patients or lesions (`ImageFeatures.groups`) whose images the phase does not draw."""
    sampler: Sampler | None = None
    """None: the recipe's."""
    training: TrainingConfig | None = None
    """None: the recipe's."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of this phase in place of the recipe's; those of other names than a recipe knows."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of terms, where not 1; they hold for a plug-in of the same name too."""
    log_prior: Callable[[Float[Tensor, "classes"], int], Float[Tensor, "classes"]] | None = None
    """(the log prior in the logits before the phase, n_old) -> the one after it, for a phase that moves too
    little to fit the prior of its own images. None: the one that its classification states."""
    teacher: Network | None = None
    """Whose outputs `Batch.old` has; None: the network before this task."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    gradients: Gradients = "sum"
    is_turned: bool = False
    """Turn every image by none to three quarter turns, drawn at random, which terms read in `Batch.turns`."""
    mixup: float = 0.0
    """α > 0: an image becomes share · itself + (1 - share) · the one before it in the batch, and so do the
    losses, with a share per batch from Beta(α, α) (Zhang et al., "mixup", ICLR 2018)."""
    alternate: "Phase | None" = None
    """Epochs 2, 4, ... train this one's terms and parameters instead, under the same optimizer; no other
    field of it counts. The prior in the scores is stated by the first of the two."""

    @property
    def classification(self) -> Classification:
        term = self.terms.get("classification")
        if not isinstance(term, Classification):
            raise TypeError(f'phase {self.name!r} needs a term "classification" made by medcil.methods.terms')
        return term

    def weighted(self, name: str, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return loss * self.weights[name] if name in self.weights else loss

    def in_epoch(self, epoch: int) -> "Phase":
        """What epoch `epoch`, counted from 0, trains."""
        return self.alternate if self.alternate is not None and epoch % 2 == 1 else self

    def all_params(self) -> dict[str, list[nn.Parameter]]:
        """Those of every epoch, each once."""
        parts = [self.params] if self.alternate is None else [self.params, self.alternate.params]
        found: dict[str, dict[int, nn.Parameter]] = {}
        for params in parts:
            for rate, parameters in params.items():
                found.setdefault(rate, {}).update((id(parameter), parameter) for parameter in parameters)
        return {rate: list(parameters.values()) for rate, parameters in found.items()}


@dataclass(frozen=True)
class Decision:
    """What a method chose by itself; in the log of the run, and in the state."""

    key: str
    """The key of the recipe that left it open, such as `method.adapt`."""
    value: str
    why: str
    """In a sentence, with the figures that decided."""


@dataclass(frozen=True, eq=False)
class Increment:
    """What a method may know of the classes it is to learn: numbers and embeddings, no images."""

    n_old: int
    n_new: int
    training: TrainingConfig
    """The recipe's, for this task; a phase may carry a changed one."""
    embeddings: Callable[[int], Float[Tensor, "n dim"]]
    """Of a class, by the network as it is now: all images of a new class, the exemplars of an old one."""
    random: np.random.Generator
    """The same draws whenever this task is learned with this seed."""
    readout: Readout = field(default_factory=ClassifierReadout)
    """As the task before left it, or an empty one; like the network, the method may change it in place."""
    features: Callable[[int], ImageFeatures] | None = None
    """Of the task's images of a class: what a readout with statistics reads, in every view."""
    known_labels: tuple[int, ...] = ()
    """The old classes of which the task has more images."""
    decide: Callable[[Decision], Decision] = lambda decision: decision
    """Records a decision; returns that of the first process, which all must follow."""
    is_started: bool = False
    """The network is that of another model, frozen there, and the readout remembers its features."""

    @property
    def is_first(self) -> bool:
        return self.n_old == 0 and not self.is_started

    @property
    def n_seen(self) -> int:
        return self.n_old + self.n_new

    @property
    def new_labels(self) -> range:
        return range(self.n_old, self.n_seen)


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are the method's hyper-parameters."""

    @property
    def readout(self) -> str:
        """The name of what turns the network's outputs into scores, from `medcil.readouts.READOUTS`."""
        ...

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]: ...


def random_weights(increment: Increment, *shape: int) -> Float[Tensor, "..."]:
    """U(±1/√dim), as in the benchmark; dim is the last of the shape."""
    bound = shape[-1] ** -0.5
    return torch.tensor(increment.random.uniform(-bound, bound, size=shape), dtype=torch.float32)


def new_class_weights(network: Network, increment: Increment) -> Float[Tensor, "new dim"]:
    """Weights to start the new classes with: imprinted, or random where there is nothing to imprint beside.

    Imprinting: the mean of a class's unit embeddings, as long as the old classes' weights are on average.
    A linear classifier is not imprinted, for its weights are no directions.
    """
    if increment.is_first or network.classifier.kind == "linear":
        return random_weights(increment, increment.n_new, network.classifier.dim)
    means = torch.stack([F.normalize(increment.embeddings(c)).mean(dim=0) for c in increment.new_labels])
    imprinted: Tensor = network.mean_weight_length() * F.normalize(means)
    return imprinted


@dataclass(frozen=True)
class WithTerms:
    """A method with loss terms replaced (same name), added (new name) or dropped.

    It reaches the phases of these names: by default "learn", in which features are learned, so that a second
    stage stays what its paper says. By default it leaves the first task alone, which has no old classes; for
    a method that trains in the first task only, choose that one.
    """

    base: Method
    terms: Mapping[str, LossTerm]
    drop: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("learn",)
    tasks: Literal["first", "later"] = "later"

    @property
    def readout(self) -> str:
        return self.base.readout

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        is_reached = increment.is_first == (self.tasks == "first")
        for phase in self.base.learn(network, increment):
            yield self._changed(phase) if is_reached and phase.name in self.phases else phase

    def _changed(self, phase: Phase) -> Phase:
        kept = {name: term for name, term in phase.terms.items() if name not in self.drop}
        alternate = None if phase.alternate is None else self._changed(phase.alternate)
        return replace(phase, terms={**kept, **self.terms}, alternate=alternate)
