"""A balanced dataset gets a long tail: class sizes that fall exponentially."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def long_tail_counts(n_max: int, n_classes: int, *, ratio: float) -> tuple[int, ...]:
    """int(n_max · ratio^(i / (C - 1))) for i = 0 .. C - 1: from n_max down to ratio · n_max."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}, but the last class is a share of the first: 0 < ratio <= 1")
    return tuple(int(n_max * ratio ** (i / max(n_classes - 1, 1))) for i in range(n_classes))


def long_tail(
    labels: Int[np.ndarray, "n"], *, ratio: float, seed: int, order: Sequence[int] | None = None
) -> Int[np.ndarray, "m"]:
    """Indices of the images that stay, ascending.

    The largest class sets n_max. Classes shrink in the order of their index, or in the order given; a class
    that is smaller than its share already stays whole. The choice: numpy's legacy generator with this seed
    shuffles class after class, by index, and the first ones stay, as in the usual long-tailed CIFAR.
    """
    sizes = np.bincount(labels)
    ranks = range(len(sizes)) if order is None else order
    if sorted(ranks) != list(range(len(sizes))):
        raise ValueError(f"order {list(ranks)} must name each of 0..{len(sizes) - 1} exactly once")
    counts = dict(zip(ranks, long_tail_counts(int(sizes.max()), len(sizes), ratio=ratio), strict=True))
    generator = np.random.RandomState(seed)
    kept = []
    for c in range(len(sizes)):
        members = np.flatnonzero(labels == c)
        generator.shuffle(members)
        kept.append(members[: counts[c]])
    return np.sort(np.concatenate(kept))
