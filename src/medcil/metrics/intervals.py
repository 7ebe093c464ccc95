"""Confidence intervals: Wilson's for a share, and the bootstrap over images or patients."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

Z_95 = 1.959963984540054
"""95% of the standard normal distribution is between -z and z."""
MOST_NUMBERS = 4_000_000
"""Largest number of weights in memory at once."""


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share; (0, 1) of nothing."""
    if n <= 0:
        return 0.0, 1.0
    share = successes / n
    center = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    # At the ends rounding must not push the share itself out of its interval.
    return max(0.0, min(center - half, share)), min(1.0, max(center + half, share))


def independent_images(images: int, groups: Sequence[str] | None) -> float:
    """Return the effective number of images, (Σ m)² / Σ m² for m images of each patient (Kish).

    How alike they really are cannot be told from a few; so intervals are rather too wide than too narrow.
    """
    return images**2 / sum(m**2 for m in Counter(groups).values()) if groups else float(images)


def share_interval(hits: Bool[np.ndarray, "n"], groups: Sequence[str] | None) -> tuple[float, float]:
    """Wilson's interval of the share of hits, for as many images as are independent."""
    independent = independent_images(len(hits), groups)
    return wilson(int(hits.sum()) / max(len(hits), 1) * independent, independent)


def interval_of_mean(
    values: Float[np.ndarray, "n"], lows: Float[np.ndarray, "n"], highs: Float[np.ndarray, "n"]
) -> tuple[float, float]:
    """Combine independent intervals into that of the mean (MOVER): the squares of their lengths add up."""
    below, above = (np.linalg.norm(values - ends) / len(values) for ends in (lows, highs))
    return float(values.mean() - below), float(values.mean() + above)


def groups_at(groups: Sequence[str] | None, chosen: np.ndarray) -> tuple[str, ...] | None:
    """Select the groups of some images, by index or by mask; None if groups are unknown."""
    return None if groups is None else tuple(np.asarray(groups, dtype=object)[chosen])


def resamplings(
    n: int, groups: Sequence[str] | None, *, draws: int, seed: int = 0
) -> Iterator[Int[np.ndarray, "block n"]]:
    """Count how often each of n images is drawn with replacement: image by image, or whole groups.

    Blocks of draws, so that many images fit into memory; the same seed gives the same draws.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    owner = np.arange(n) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    n_owners = int(owner.max()) + 1 if n else 0
    block = max(1, MOST_NUMBERS // max(n, 1))
    while draws > 0 and n:
        now = min(block, draws)
        picked = generator.integers(n_owners, size=(now, n_owners))
        picked += np.arange(now)[:, None] * n_owners
        counts = np.bincount(picked.ravel(), minlength=now * n_owners).reshape(now, n_owners)
        yield counts[:, owner]
        draws -= now


def percentiles(values: Float[np.ndarray, "draws"]) -> tuple[float, float]:
    """Return the middle 95% of the draws, without undefined ones; nan if none is left."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
