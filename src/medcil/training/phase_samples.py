"""Which of the images at hand a phase may draw, and how it draws them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from medcil.config import TrainingConfig
from medcil.data.transforms import Preprocessing
from medcil.methods.memory import herd
from medcil.methods.protocol import Part, Phase
from medcil.training.sampling import EpochPlanner, Key, Purpose

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
