"""Which images a phase trains on, and in which batches each epoch draws them.

Every draw comes from a counter-based generator keyed by (seed, task, phase, epoch, purpose). No random state
is passed from epoch to epoch, so the batches are the same after a resume, when streaming, and with any number
of workers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from medcil.config import Augmentation, Sampler
from medcil.data.transforms import draw_tones, draw_transforms, draw_turns, turned_transforms
from medcil.methods.memory import herd
from medcil.methods.protocol import Part

DRAWS_PER_VISIT = 4
"""Images that class-aware sampling draws each time it visits a class."""
EXEMPLAR_SHARE = 0.25
"""Exemplars beside each batch of "two_stream", as a share of its size, as in SS-IL."""
KEPT_BACK = 0.1
"""Share of a class's exemplars that is kept back, as in BiC."""


class Purpose(IntEnum):
    NETWORK = 0
    NEW_CLASSES = 1
    ORDER = 2
    AUGMENTATION = 3
    NOISE = 4
    LAYERS = 5
    KEPT_BACK = 6


@dataclass(frozen=True)
class Key:
    """A place in a run."""

    seed: int
    task: int = 0
    phase: int = 0
    epoch: int = 0

    def generator(self, purpose: Purpose) -> np.random.Generator:
        entropy = [self.seed, self.task, self.phase, self.epoch, int(purpose), 0]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))

    def integer(self, purpose: Purpose) -> int:
        """Return a seed for one of PyTorch's generators."""
        return int(self.generator(purpose).integers(2**63))


Plan = TypeVar("Plan", bound="EpochPlan")


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The samples of an epoch, batch after batch, with their crops and augmentations: one row per draw."""

    order: Int[Tensor, "n"]
    top: Int[Tensor, "n"]
    left: Int[Tensor, "n"]
    flip: Bool[Tensor, "n"]
    transforms: Float[Tensor, "n 2 3"] | None
    """Affine maps, for augmentations that resample; they replace top, left and flip."""
    turns: Int[Tensor, "n"] | None
    """Quarter turns after crop and flip or the transformation, where images are turned."""
    tones: Float[Tensor, "n 3 2"] | None
    """Factor and offset of each channel, for augmentations that change colors."""
    shares: Float[Tensor, "n"] | None
    """The share of the image itself where two are mixed, the same for all of a batch."""
    sizes: tuple[int, ...]
    """Batch sizes; the batches follow each other in `order`."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "EpochPlan":
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def at(self: Plan, rows: Int[Tensor, "k"] | slice) -> Plan:
        """Return the plan of some rows alone."""
        chosen: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors().items()}
        return replace(self, **chosen)

    def slices(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(accumulate(self.sizes, initial=0))]


@dataclass(frozen=True, eq=False)
class EpochPlanner:
    """Plans the epochs of a phase: the samples it may draw, and how it draws and augments them."""

    samples: Int[Tensor, "m"]
    labels: Int[Tensor, "m"]
    sampler: Sampler
    n_old: int
    """Labels below it are old classes."""
    batch_size: int
    slack: int
    """Pixels that a crop can move by."""
    exemplar_share: float | None = None
    """Exemplars beside each batch of "two_stream"; None: EXEMPLAR_SHARE, or more to show every exemplar."""
    augmentation: Augmentation = "crop"
    is_turned: bool = False
    """Turn every image, whatever the augmentation."""
    mixup: float = 0.0
    """α of the Beta distribution of the shares; 0: images are not mixed."""

    def plan(self, key: Key) -> EpochPlan:
        order, sizes = self._draw(key)
        n, random = len(order), key.generator(Purpose.AUGMENTATION)
        top, left = (torch.from_numpy(random.integers(0, self.slack + 1, size=n)) for _ in range(2))
        flip = torch.from_numpy(random.random(n) < 0.5)
        transforms = draw_transforms(self.augmentation, n, random)
        turns = draw_turns(n, random) if self.augmentation == "dihedral" else None
        tones = draw_tones(self.augmentation, n, random)
        if self.is_turned and turns is None:
            turns = draw_turns(n, random)
            transforms = None if transforms is None else turned_transforms(transforms, turns)
        shares = None
        if self.mixup:
            of_batches = random.beta(self.mixup, self.mixup, size=len(sizes)).astype(np.float32)
            shares = torch.from_numpy(of_batches.repeat(sizes))
        order_of_samples = self.samples[torch.from_numpy(order)]
        return EpochPlan(order_of_samples, top, left, flip, transforms, turns, tones, shares, sizes)

    def class_counts(self, key: Key, *, epochs: int, n_classes: int) -> Float[Tensor, "classes"]:
        """Count the images of each class that an epoch draws, on average over all epochs.

        "plain" and "balanced" draw the same numbers in every epoch. The others may pass a class over in one
        epoch, so the order of each epoch is drawn, without its crops and augmentations.
        """
        n_drawn = 1 if self.sampler in ("plain", "balanced") else epochs
        total = torch.zeros(n_classes, dtype=torch.int64)
        for epoch in range(n_drawn):
            order, _ = self._draw(replace(key, epoch=epoch))
            total += torch.bincount(self.labels[torch.from_numpy(order)], minlength=n_classes)
        return (total.double() / n_drawn).float()

    def _draw(self, key: Key) -> "_Draw":
        if len(self.samples) == 1:  # a lone sample is drawn twice, since batch norm needs two
            return np.zeros(2, dtype=np.int64), (2,)
        return _SAMPLERS[self.sampler](self, self.labels.numpy(), key.generator(Purpose.ORDER))


_Draw = tuple[Int[np.ndarray, "n"], tuple[int, ...]]
"""Positions in `EpochPlanner.samples`, batch after batch, and the sizes of the batches."""


def _plain(planner: EpochPlanner, labels: Int[np.ndarray, "m"], random: np.random.Generator) -> _Draw:
    """Draw every sample once, in random order."""
    return _batched(random.permutation(len(labels)), planner.batch_size)


def _balanced(planner: EpochPlanner, labels: Int[np.ndarray, "m"], random: np.random.Generator) -> _Draw:
    """Draw every exemplar once, and from each new class the mean number of images, with replacement.

    This is the benchmark's sampler. A lone new class is not resampled.
    """
    is_new = labels >= planner.n_old
    new_classes, counts = np.unique(labels[is_new], return_counts=True)
    if len(new_classes) < 2:
        return _plain(planner, labels, random)
    mean = round(counts.mean())
    members = (np.flatnonzero(labels == label) for label in new_classes)
    resampled = [random.choice(samples, mean, replace=True) for samples in members]
    order = random.permutation(np.concatenate([np.flatnonzero(~is_new), *resampled]))
    return _batched(order, planner.batch_size)


def _class_aware(planner: EpochPlanner, labels: Int[np.ndarray, "m"], random: np.random.Generator) -> _Draw:
    """Draw four images at each visit of a class; each cycle visits all classes in a new random order.

    A class shows all of its images, in random order, before it repeats one. There are as many draws as
    samples, as in the published loop.
    """
    n_draws = len(labels)
    classes = np.unique(labels)
    visits = _in_rounds(classes, -(-n_draws // DRAWS_PER_VISIT), random)
    drawn_labels = visits.repeat(DRAWS_PER_VISIT)[:n_draws]
    order = np.empty(n_draws, dtype=np.int64)
    for label in classes:
        is_drawn = drawn_labels == label
        order[is_drawn] = _in_rounds(np.flatnonzero(labels == label), int(is_drawn.sum()), random)
    return _batched(order, planner.batch_size)


def _two_stream(planner: EpochPlanner, labels: Int[np.ndarray, "m"], random: np.random.Generator) -> _Draw:
    """Draw every new sample once, and beside each batch a fixed number of exemplars, as in SS-IL.

    All exemplars are shown, in random order, before one repeats.
    """
    new, exemplars = np.flatnonzero(labels >= planner.n_old), np.flatnonzero(labels < planner.n_old)
    if not len(new) or not len(exemplars):
        return _plain(planner, labels, random)
    sizes = _equal_sizes(len(new), -(-len(new) // planner.batch_size))
    new_parts = np.split(random.permutation(new), np.cumsum(sizes)[:-1])
    n_beside = max(1, round(planner.batch_size * (planner.exemplar_share or EXEMPLAR_SHARE)))
    if planner.exemplar_share is None:
        n_beside = max(n_beside, -(-len(exemplars) // len(sizes)))
    old_parts = np.split(_in_rounds(exemplars, n_beside * len(sizes), random), len(sizes))
    parts = [part for pair in zip(new_parts, old_parts, strict=True) for part in pair]
    return np.concatenate(parts), tuple(size + n_beside for size in sizes)


_SAMPLERS: dict[Sampler, Callable[[EpochPlanner, Int[np.ndarray, "m"], np.random.Generator], _Draw]] = {
    "plain": _plain,
    "balanced": _balanced,
    "class_aware": _class_aware,
    "two_stream": _two_stream,
}


def _in_rounds(items: Int[np.ndarray, "m"], n: int, random: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Draw n times: all items in random order, then all again in another order, and so on."""
    n_rounds = -(-n // max(len(items), 1))
    return random.permuted(np.tile(items, (n_rounds, 1)), axis=1).ravel()[:n]


def _batched(order: Int[np.ndarray, "n"], batch_size: int) -> _Draw:
    return order, _equal_sizes(len(order), min(-(-len(order) // batch_size), len(order) // 2))


def _equal_sizes(n: int, n_batches: int) -> tuple[int, ...]:
    """Split into sizes that differ by at most one: a small last batch would upset batch norm."""
    return tuple(np.diff(np.linspace(0, n, n_batches + 1).round().astype(int)).tolist())


def choose_part(
    part: Part,
    labels: Int[Tensor, "n"],
    key: Key,
    *,
    n_old: int,
    quota: int,
    embeddings: Callable[[int], Float[Tensor, "_ dim"]],
) -> Int[Tensor, "m"]:
    """Return the indices of a phase's images, ascending. The memory will keep `quota` exemplars per class."""
    if part == "all":
        return torch.arange(len(labels))
    if part == "new":
        return torch.nonzero(labels >= n_old).flatten()
    if part == "exemplars":
        classes = torch.unique(labels).tolist()
        memory = [_of_class(labels, c)[:quota] for c in classes if c < n_old]  # may hold more now
        herds = [_of_class(labels, c)[herd(embeddings(c), quota).cpu()] for c in classes if c >= n_old]
        return torch.cat([*memory, *herds]).sort().values
    is_kept_back = torch.zeros(len(labels), dtype=torch.bool)
    # Phase 0: all phases of a task keep the same images back.
    random = replace(key, phase=0).generator(Purpose.KEPT_BACK)
    is_kept_back[_kept_back(labels, random, quota)] = True
    return torch.nonzero(is_kept_back if part == "kept_back" else ~is_kept_back).flatten()


def _kept_back(labels: Int[Tensor, "n"], random: np.random.Generator, quota: int) -> Int[Tensor, "m"]:
    """Draw equally many images of every class; none at all if that would take a class's only image."""
    classes, counts = torch.unique(labels, return_counts=True)
    size = min(max(1, round(KEPT_BACK * quota)), int(counts.min()) - 1) if quota and len(classes) else 0
    chosen = [torch.empty(0, dtype=torch.int64)]
    for label in classes.tolist():
        chosen.append(torch.from_numpy(random.permutation(_of_class(labels, label).numpy())[:size]))
    return torch.cat(chosen)


def _of_class(labels: Int[Tensor, "n"], label: int) -> Int[Tensor, "m"]:
    return torch.nonzero(labels == label).flatten()
