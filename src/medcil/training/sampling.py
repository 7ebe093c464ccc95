"""All randomness of training, as a function of where it is used.

Every draw comes from a counter-based generator keyed by (seed, task, phase, epoch, purpose). No random state
is carried along, so a resumed run, a streamed one and one with other workers see the same batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from medcil.config import Augmentation, Sampler, TrainingConfig
from medcil.data.transforms import Preprocessing, draw_tones, draw_transforms, draw_turns
from medcil.methods.memory import herd
from medcil.methods.protocol import Part, Phase

DRAWS_PER_VISIT = 4
"""Of a class, in class-aware sampling."""
EXEMPLAR_SHARE = 0.25
"""SS-IL's: exemplars in each batch, as a share of its size, where they come in a stream of their own."""


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
        """A seed for PyTorch's generators: that of the layers, that of the noise."""
        return int(self.generator(purpose).integers(2**63))


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Which samples an epoch takes, in which batches, cropped and flipped how. The k-th drawn has row k."""

    order: Int[Tensor, "n"]
    top: Int[Tensor, "n"]
    left: Int[Tensor, "n"]
    flip: Bool[Tensor, "n"]
    transforms: Float[Tensor, "n 2 3"] | None
    """In place of top, left and flip, where images are resampled."""
    turns: Int[Tensor, "n"] | None
    """Quarter turns after crop and flip, where images are turned."""
    tones: Float[Tensor, "n 3 2"] | None
    """Factor and offset of each channel, where they change."""
    sizes: tuple[int, ...]
    """Of the batches, which follow each other in `order`."""

    @property
    def n_batches(self) -> int:
        return len(self.sizes)

    def slices(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(accumulate(self.sizes, initial=0))]


@dataclass(frozen=True, eq=False)
class EpochPlanner:
    """Plans the epochs of a phase: the samples it may draw, and how it draws and augments them."""

    samples: Int[Tensor, "m"]
    labels: Int[Tensor, "m"]
    sampler: Sampler
    n_old: int
    """Classes below are old."""
    batch_size: int
    slack: int
    """Pixels that a crop may move by."""
    exemplar_share: float | None = None
    """Exemplars in each batch of "two_stream", as a share of its size; None: enough to show each of them."""
    augmentation: Augmentation = "crop"

    def plan(self, key: Key) -> EpochPlan:
        order, sizes = self._draw(key)
        augmenting = key.generator(Purpose.AUGMENTATION)
        return EpochPlan(
            order=self.samples[torch.from_numpy(order)],
            top=torch.from_numpy(augmenting.integers(0, self.slack + 1, size=len(order))),
            left=torch.from_numpy(augmenting.integers(0, self.slack + 1, size=len(order))),
            flip=torch.from_numpy(augmenting.random(len(order)) < 0.5),
            transforms=draw_transforms(self.augmentation, len(order), augmenting),
            turns=draw_turns(self.augmentation, len(order), augmenting),
            tones=draw_tones(self.augmentation, len(order), augmenting),
            sizes=sizes,
        )

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

    def _draw(self, key: Key) -> "_Drawn":
        """Draw positions in `samples`. A lone sample is drawn twice, since batch norm needs two."""
        n_copies = 1 if len(self.samples) > 1 else 2
        pool = _Pool(
            np.arange(len(self.samples)).repeat(n_copies),
            self.labels.numpy().repeat(n_copies),
            self.n_old,
            self.batch_size,
            n_beside=max(1, round(self.batch_size * (self.exemplar_share or EXEMPLAR_SHARE))),
            shows_every_exemplar=self.exemplar_share is None,
        )
        return _SAMPLERS[self.sampler](pool, key.generator(Purpose.ORDER))


@dataclass(frozen=True, eq=False)
class _Pool:
    """What an epoch can draw from, and into batches of which size."""

    samples: Int[np.ndarray, "m"]
    labels: Int[np.ndarray, "m"]
    n_old: int
    batch_size: int
    n_beside: int
    """Exemplars in each batch, where they come in a stream of their own."""
    shows_every_exemplar: bool
    """Put more beside, where it takes more to see each of them once an epoch."""


_Drawn = tuple[Int[np.ndarray, "n"], tuple[int, ...]]
"""The samples in the order of their batches, and the sizes of these."""


def _plain(pool: _Pool, random: np.random.Generator) -> _Drawn:
    """Every sample once, in random order."""
    return _batched(random.permutation(pool.samples), pool.batch_size)


def _balanced(pool: _Pool, random: np.random.Generator) -> _Drawn:
    """Every exemplar once; every new class as often as new classes are large on average, with replacement.

    The benchmark's. A lone new class is not resampled.
    """
    is_new = pool.labels >= pool.n_old
    new_classes, counts = np.unique(pool.labels[is_new], return_counts=True)
    if len(new_classes) < 2:
        return _plain(pool, random)
    mean = round(counts.mean())
    members = (pool.samples[pool.labels == label] for label in new_classes)
    resampled = [random.choice(samples, mean, replace=True) for samples in members]
    return _batched(random.permutation(np.concatenate([pool.samples[~is_new], *resampled])), pool.batch_size)


def _class_aware(pool: _Pool, random: np.random.Generator) -> _Drawn:
    """Four draws of a class at each visit, all classes visited in a new random order in every cycle.

    A class's images come in random order, all of them before any comes again; as many draws as there are
    samples, as in the published loop.
    """
    n_draws = len(pool.samples)
    classes = np.unique(pool.labels)
    visits = _in_rounds(classes, -(-n_draws // DRAWS_PER_VISIT), random)
    labels = visits.repeat(DRAWS_PER_VISIT)[:n_draws]
    order = np.empty_like(pool.samples)
    for label in classes:
        is_drawn, members = labels == label, pool.samples[pool.labels == label]
        order[is_drawn] = _in_rounds(members, int(is_drawn.sum()), random)
    return _batched(order, pool.batch_size)


def _two_stream(pool: _Pool, random: np.random.Generator) -> _Drawn:
    """SS-IL's: every new sample once, and in each batch a fixed number of exemplars beside them.

    Exemplars come in random order, all of them before any comes again.
    """
    is_new = pool.labels >= pool.n_old
    new, exemplars = pool.samples[is_new], pool.samples[~is_new]
    if not len(new) or not len(exemplars):
        return _plain(pool, random)
    sizes = _equal_sizes(len(new), -(-len(new) // pool.batch_size))
    new_parts = np.split(random.permutation(new), np.cumsum(sizes)[:-1])
    n_beside = pool.n_beside
    if pool.shows_every_exemplar:
        n_beside = max(n_beside, -(-len(exemplars) // len(sizes)))
    old_parts = np.split(_in_rounds(exemplars, n_beside * len(sizes), random), len(sizes))
    parts = [part for pair in zip(new_parts, old_parts, strict=True) for part in pair]
    return np.concatenate(parts), tuple(size + n_beside for size in sizes)


_SAMPLERS: dict[Sampler, Callable[[_Pool, np.random.Generator], _Drawn]] = {
    "plain": _plain,
    "balanced": _balanced,
    "class_aware": _class_aware,
    "two_stream": _two_stream,
}


def _in_rounds(items: Int[np.ndarray, "m"], n: int, random: np.random.Generator) -> Int[np.ndarray, "n"]:
    """n draws: all items in random order, then all again in another, and so on."""
    n_rounds = -(-n // max(len(items), 1))
    return random.permuted(np.tile(items, (n_rounds, 1)), axis=1).ravel()[:n]


def _batched(order: Int[np.ndarray, "n"], batch_size: int) -> _Drawn:
    return order, _equal_sizes(len(order), min(-(-len(order) // batch_size), len(order) // 2))


def _equal_sizes(n: int, n_batches: int) -> tuple[int, ...]:
    """Equal, give or take one: no small last batch for batch norm to stumble on."""
    return tuple(np.diff(np.linspace(0, n, n_batches + 1).round().astype(int)).tolist())


KEPT_BACK = 0.1
"""Of a class's exemplars, as in BiC."""


def choose_part(
    part: Part,
    labels: Int[Tensor, "n"],
    key: Key,
    *,
    n_old: int,
    quota: int,
    embeddings: Callable[[int], Float[Tensor, "_ dim"]],
) -> Int[Tensor, "m"]:
    """Indices, in ascending order. `quota` is how many exemplars of each class the memory will keep."""
    if part == "all":
        return torch.arange(len(labels))
    if part == "new":
        return torch.nonzero(labels >= n_old).flatten()
    if part == "exemplars":
        classes = torch.unique(labels).tolist()
        memory = [_of_class(labels, c)[:quota] for c in classes if c < n_old]  # it may hold more than it will
        herds = [_of_class(labels, c)[herd(embeddings(c), quota).cpu()] for c in classes if c >= n_old]
        return torch.cat([*memory, *herds]).sort().values
    is_kept_back = torch.zeros(len(labels), dtype=torch.bool)
    # The same ones in every phase of a task.
    random = replace(key, phase=0).generator(Purpose.KEPT_BACK)
    is_kept_back[_kept_back(labels, random, quota)] = True
    return torch.nonzero(is_kept_back if part == "kept_back" else ~is_kept_back).flatten()


def _kept_back(labels: Int[Tensor, "n"], random: np.random.Generator, quota: int) -> Int[Tensor, "m"]:
    """As many of every class; none at all where that would take a class's only image."""
    classes, counts = torch.unique(labels, return_counts=True)
    size = min(max(1, round(KEPT_BACK * quota)), int(counts.min()) - 1) if quota and len(classes) else 0
    chosen = [torch.empty(0, dtype=torch.int64)]
    for label in classes.tolist():
        chosen.append(torch.from_numpy(random.permutation(_of_class(labels, label).numpy())[:size]))
    return torch.cat(chosen)


def _of_class(labels: Int[Tensor, "n"], label: int) -> Int[Tensor, "m"]:
    return torch.nonzero(labels == label).flatten()


def planner(
    phase: Phase,
    training: TrainingConfig,
    part: Int[Tensor, "m"],
    labels: Int[Tensor, "n"],
    *,
    n_old: int,
    preprocessing: Preprocessing,
) -> EpochPlanner:
    """Plans the phase's epochs, drawn from its part of the images with these labels."""
    return EpochPlanner(
        part,
        labels[part],
        sampler=phase.sampler or training.sampler,
        n_old=n_old,
        batch_size=training.batch_size,
        exemplar_share=training.exemplar_share,
        slack=preprocessing.slack,
        augmentation=preprocessing.augmentation,
    )
