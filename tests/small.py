"""Small things that many tests need: a few images, a tiny network, a short training."""

import torch

from medcil.config import LearningConfig
from medcil.data.preprocess import Preprocessing
from medcil.data.samples import Samples, TensorImages
from medcil.data.stream import Task
from medcil.engine.draws import EpochPlan, Key, plan_epoch
from medcil.engine.state import State, initial_state
from medcil.models.network import NetworkSpec

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
        "execution": {"device": "cpu"},
    }
    return LearningConfig.model_validate({**defaults, **sections})


def plain_epoch(n: int, key: Key, *, batch_size: int) -> EpochPlan:
    """Every one of n samples once."""
    labels = torch.zeros(n, dtype=torch.int64)
    return plan_epoch(
        torch.arange(n), labels, key, sampler="plain", n_old=0, batch_size=batch_size, slack=SIDE - CROP
    )
