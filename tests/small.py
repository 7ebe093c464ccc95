"""Small things that many tests need: a few images, a tiny network, a short training."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from medcil.config import Augmentation, LearningConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.methods import terms
from medcil.methods.protocol import Classification, Increment, Phase, new_class_weights
from medcil.models.network import Network, NetworkSpec
from medcil.readouts import READOUTS, Readout
from medcil.training.feed import Feed
from medcil.training.sampling import EpochPlan, EpochPlanner, Key
from medcil.training.state import State, initial_state

SIDE, CROP = 10, 8
PREPROCESSING = Preprocessing(side=SIDE, crop=CROP)
SPEC = NetworkSpec(backbone="resnet20_cifar", last_relu=False, learn_scale=True)
SMALLEST = NetworkSpec(backbone="resnet8_cifar", last_relu=False, learn_scale=True)


def random_images(n: int, *, side: int = SIDE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, side, side), dtype=torch.uint8, generator=generator)


def random_samples(counts: list[int], *, first_label: int = 0, seed: int = 0) -> Samples:
    """So many images of each class, class after class."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) + first_label
    return Samples(TensorImages(random_images(sum(counts), seed=seed)), labels)


def new_state(*, seed: int = 0, spec: NetworkSpec = SPEC) -> State:
    return initial_state(spec, PREPROCESSING, seed=seed)


def readout_of(
    class_means: torch.Tensor, log_prior: torch.Tensor | None = None, *, kind: str = "classifier"
) -> Readout:
    readout = READOUTS[kind](*class_means.shape)
    readout.class_means = class_means
    readout.log_prior = torch.zeros(len(class_means)) if log_prior is None else log_prior
    return readout


def with_readout(state: State, **tensors: torch.Tensor) -> State:
    """The same but for `class_means` or `log_prior` of its readout."""
    readout = copy.deepcopy(state.readout)
    for name, tensor in tensors.items():
        setattr(readout, name, tensor)
    return replace(state, readout=readout)


def task_of(counts: list[int], *, n_old: int = 0, seed: int = 0) -> Task:
    """New classes with so many training images, and as many test images."""
    names = tuple(f"class {n_old + i}" for i in range(len(counts)))
    train, test = (random_samples(counts, first_label=n_old, seed=2 * seed + i) for i in range(2))
    return Task(class_names=names, n_old=n_old, train=train, test=test)


def short_training(**sections: object) -> LearningConfig:
    """Two epochs on the CPU, at most four exemplars per class; sections given replace these."""
    defaults: dict[str, object] = {
        "memory": {"per_class": 4},
        "training": {"epochs": 2, "batch_size": 8},
        "execution": {"device": "cpu", "checkpoint_every": 1},
    }
    return LearningConfig.model_validate({**defaults, **sections})


def plain_epoch(
    n: int,
    key: Key,
    *,
    batch_size: int,
    slack: int = SIDE - CROP,
    augmentation: Augmentation = "crop",
    is_turned: bool = False,
    mixup: float = 0.0,
) -> EpochPlan:
    """Every one of n samples once."""
    return EpochPlanner(
        torch.arange(n),
        torch.zeros(n, dtype=torch.int64),
        sampler="plain",
        n_old=0,
        batch_size=batch_size,
        slack=slack,
        augmentation=augmentation,
        is_turned=is_turned,
        mixup=mixup,
    ).plan(key)


def training_batches(feed: Feed, plan: EpochPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels, batch after batch, as training takes them."""
    feed.begin(plan)
    for step, size in enumerate(plan.sizes):
        feed.ready(step)
        drawn = feed.take(size)
        yield drawn.images, drawn.labels


@dataclass(frozen=True)
class Scripted:
    """A method made of a function that yields phases, once the new classes are there."""

    script: Callable[[Network, Increment], Iterator[Phase]]
    readout: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        network.grow(new_class_weights(network, increment))
        yield from self.script(network, increment)


def steep(factor: float) -> Classification:
    """Its gradient with respect to the class weights is the factor, everywhere."""
    return Classification(lambda batch: factor * batch.class_weights.sum(), terms.cross_entropy().log_prior)


def content_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


class Interrupted(Exception):
    """What a test stops learning with."""


def herd_by_hand(rows: torch.Tensor, size: int) -> list[int]:
    """iCaRL's argmin ||μ - (S + x_i) / k||, without replacement."""
    units = [row / row.norm() for row in rows.double()]
    mean = sum(units, torch.zeros(rows.shape[1])) / max(len(units), 1)
    picked: list[int] = []
    while len(picked) < min(size, len(units)):
        total = sum((units[i] for i in picked), torch.zeros_like(mean))
        rest = [i for i in range(len(units)) if i not in picked]
        k = len(picked) + 1
        picked.append(min(rest, key=lambda i: float((mean - (total + units[i]) / k).norm())))
    return picked
