"""All randomness of training, as a function of where it is used.

Every draw comes from a counter-based generator keyed by (seed, task, phase, epoch, purpose). No random state
is carried along, so a resumed run, a streamed one and one with other workers see the same batches.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Purpose(IntEnum):
    NETWORK = 0
    NEW_CLASSES = 1
    ORDER = 2
    AUGMENTATION = 3
    NOISE = 4
    LAYERS = 5


@dataclass(frozen=True)
class Key:
    """A place in a run."""

    seed: int
    task: int = 0
    phase: int = 0
    epoch: int = 0

    def generator(self, purpose: Purpose, index: int = 0) -> np.random.Generator:
        entropy = [self.seed, self.task, self.phase, self.epoch, int(purpose), index]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    def integer(self, purpose: Purpose) -> int:
        """A seed for the layers that draw from PyTorch's own generator."""
        return int(self.generator(purpose).integers(2**63))


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Which samples an epoch takes, in which batches, cropped and flipped how. The k-th drawn has row k."""

    order: Int[Tensor, "n"]
    top: Int[Tensor, "n"]
    left: Int[Tensor, "n"]
    flip: Bool[Tensor, "n"]
    n_batches: int

    def slices(self) -> list[slice]:
        """Batches of equal size, give or take one: no small last batch for batch norm to stumble on."""
        bounds = np.linspace(0, len(self.order), self.n_batches + 1).round().astype(int).tolist()
        return [slice(a, b) for a, b in pairwise(bounds)]


def plan_epoch(samples: Int[Tensor, "m"], key: Key, *, batch_size: int, slack: int) -> EpochPlan:
    """Every sample once, in random order; a lone sample twice, since batch norm needs two."""
    chosen = samples.numpy() if len(samples) > 1 else np.repeat(samples.numpy(), 2)
    order = key.generator(Purpose.ORDER).permutation(chosen)
    augmentation = key.generator(Purpose.AUGMENTATION)
    return EpochPlan(
        order=torch.from_numpy(order),
        top=torch.from_numpy(augmentation.integers(0, slack + 1, size=len(order))),
        left=torch.from_numpy(augmentation.integers(0, slack + 1, size=len(order))),
        flip=torch.from_numpy(augmentation.random(len(order)) < 0.5),
        n_batches=min(-(-len(order) // batch_size), len(order) // 2),
    )


def draw_noise(key: Key, step: int, shape: tuple[int, int]) -> Float[Tensor, "classes dim"]:
    return torch.from_numpy(key.generator(Purpose.NOISE, step).standard_normal(shape, dtype=np.float32))
