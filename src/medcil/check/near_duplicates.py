"""Which pictures are nearly the same: copies saved again, resized, or a little brighter.

A 64-bit difference hash (is each of 8 x 8 places darker than its right neighbor?) finds candidates without
comparing all pairs: of six bands of bits, two hashes that differ in at most four bits share two whole bands,
so that only images with two equal bands are compared. Medical images of one kind are framed alike, and their
hashes collide by chance; a candidate counts only if the local contrast of the thumbnails agrees as well.
Contrast is measured within small windows, because the edge of a bright disk on black, which all fundus
pictures share, would outweigh everything inside it. Turned and mirrored copies are not found.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8, UInt64

MAX_DISTANCE = 4  # bits of 64
MIN_AGREEMENT = 0.85  # correlation of local contrast
BLANK = 2.0  # gray levels: a picture whose standard deviation is below shows nothing
BLOCK = 2048  # pairs compared at once
REACH = 4096  # comparisons per hash and pair of bands
MAX_ALIKE = 64  # of more pictures with one and the same hash, each is compared with the first only
MAX_PAIRS = 1_000_000  # candidates

N_BANDS = 6
WINDOW = 5  # pixels of a thumbnail of 32
NOISE = 2.0  # gray levels: contrast of this size is not blown up to that of an edge
TIE = 0.01  # gray levels

Thumbnails = UInt8[np.ndarray, "n 32 32"]
Hashes = UInt64[np.ndarray, "n"]
Pairs = Int64[np.ndarray, "pairs 2"]
Places = Int64[np.ndarray, "m"]


class Search(NamedTuple):
    pairs: Pairs
    """(i, j) with i < j, sorted."""
    cut_short: Int64[np.ndarray, "m"]
    """Pictures that so many others resemble that they were not compared with all of them."""


def near_pairs(thumbnails: Thumbnails) -> Search:
    """Blank pictures are like nothing."""
    shown = np.flatnonzero(~is_blank(thumbnails))
    if len(shown) < 2:
        return Search(np.empty((0, 2), np.int64), np.empty(0, np.int64))
    candidates = close_pairs(difference_hashes(thumbnails[shown]))
    pairs = shown[candidates.pairs]
    agrees = np.zeros(len(pairs), bool)
    for start in range(0, len(pairs), BLOCK):
        block = pairs[start : start + BLOCK]
        involved, places = np.unique(block, return_inverse=True)
        contrast = local_contrast(thumbnails[involved])
        left, right = contrast[places.reshape(block.shape)].swapaxes(0, 1)
        agrees[start : start + BLOCK] = np.einsum("pk,pk->p", left, right) >= MIN_AGREEMENT
    return Search(np.asarray(pairs[agrees]), shown[candidates.cut_short])


def is_blank(thumbnails: Thumbnails) -> Bool[np.ndarray, "n"]:
    return np.asarray(thumbnails.std(axis=(1, 2)) < BLANK)


def difference_hashes(thumbnails: Thumbnails) -> Hashes:
    side = thumbnails.shape[-1]
    small = _averages(8, side) @ thumbnails.astype(np.float32) @ _averages(9, side).T
    bits = small[:, :, 1:] - small[:, :, :-1] > TIE
    return np.packbits(bits.reshape(-1, 64), axis=1).view(np.uint64).ravel()


def _averages(n: int, side: int) -> Float32[np.ndarray, "n side"]:
    """Row i averages the i-th of n equal stretches of a line of pixels."""
    edges = np.linspace(0, side, n + 1)
    pixels = np.arange(side)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (overlap.clip(0) * n / side).astype(np.float32)


def close_pairs(hashes: Hashes) -> Search:
    """All that differ in at most MAX_DISTANCE bits, within the bounds above.

    Different hashes are compared once each, however many pictures have them.
    """
    different, inverse, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(sizes)[:-1])
    close, cut_short = _close_hashes(different)
    is_crowded = sizes > MAX_ALIKE
    is_crowded[cut_short] = True
    found = [_within(members[h]) for h in np.flatnonzero(sizes > 1)]
    of_single_pictures = (sizes[close] == 1).all(axis=1)
    found.append(np.array([alike[0] for alike in members], np.int64)[close[of_single_pictures]])
    n_found = sum(map(len, found))
    for first, second in close[~of_single_pictures].tolist():
        if n_found >= MAX_PAIRS:
            is_crowded[[first, second]] = True
            continue
        found.append(_between(members[first], members[second]))
        n_found += len(found[-1])
    pairs = np.sort(np.concatenate([np.empty((0, 2), np.int64), *found]), axis=1)[:MAX_PAIRS]
    return Search(pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))], np.flatnonzero(is_crowded[inverse]))


def _within(alike: Places) -> Pairs:
    """Of the pictures with one hash."""
    if len(alike) > MAX_ALIKE:
        return np.stack([np.full(len(alike) - 1, alike[0]), alike[1:]], axis=1)
    first, second = np.triu_indices(len(alike), 1)
    return np.stack([alike[first], alike[second]], axis=1)


def _between(some: Places, others: Int64[np.ndarray, "k"]) -> Pairs:
    """Of the pictures with two hashes; one represents many."""
    left, right = (places[:1] if len(places) > MAX_ALIKE else places for places in (some, others))
    return np.stack([np.repeat(left, len(right)), np.tile(right, len(left))], axis=1)


def _close_hashes(hashes: Hashes) -> Search:
    """Pairs of different hashes. A pair is kept under the first mask on which both agree, so only once."""
    found, cut_short = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
    n_found, masks = 0, list(_masks())
    for number, mask in enumerate(masks):
        order = np.lexsort((hashes, hashes & mask))
        keys = (hashes & mask)[order]
        for apart, left in _with_equal_keys(keys):
            if apart > REACH or n_found >= MAX_PAIRS:
                cut_short.append(order[left])
                break
            a, b = order[left], order[left + apart]
            differing = hashes[a] ^ hashes[b]
            is_new = np.bitwise_count(differing) <= MAX_DISTANCE
            a, b, differing = a[is_new], b[is_new], differing[is_new]
            is_new = ~_agree_on_any(differing, masks[:number])
            found.append(np.stack([a[is_new], b[is_new]], axis=1))
            n_found += int(is_new.sum())
    return Search(np.concatenate(found), np.unique(np.concatenate(cut_short)))


def _agree_on_any(differing: Hashes, masks: Sequence[np.uint64]) -> Bool[np.ndarray, "n"]:
    agree = np.zeros(len(differing), bool)
    for mask in masks:
        agree |= differing & mask == 0
    return agree


def _masks() -> Iterator[np.uint64]:
    """Each leaves the bits of as many bands as MAX_DISTANCE wrong bits must spare."""
    edges = np.linspace(0, 64, N_BANDS + 1).astype(int)
    bands = [(1 << int(end)) - (1 << int(start)) for start, end in pairwise(edges)]
    for spared in combinations(bands, N_BANDS - MAX_DISTANCE):
        yield np.uint64(sum(spared))


def _with_equal_keys(keys: Hashes) -> Iterator[tuple[int, Places]]:
    """In a sorted array: (1, positions whose next one has an equal key), (2, whose next but one has), ..."""
    left = np.arange(len(keys) - 1)
    for apart in range(1, len(keys)):
        left = left[left + apart < len(keys)]
        left = left[keys[left] == keys[left + apart]]
        if not len(left):
            return
        yield apart, left


def local_contrast(thumbnails: Thumbnails) -> Float32[np.ndarray, "n pixels"]:
    """Each pixel against its window, in standard deviations of the window; a unit vector per picture."""
    pixels = thumbnails.astype(np.float32)
    mean, mean_square = _window_means(pixels), _window_means(pixels**2)
    deviation = np.sqrt(np.maximum(mean_square - mean**2, 0))
    flat = ((pixels - mean) / (deviation + NOISE)).reshape(len(pixels), -1)
    flat = flat - flat.mean(axis=1, keepdims=True)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat / np.maximum(length, 1e-6))


def _window_means(pixels: Float32[np.ndarray, "n 32 32"]) -> Float32[np.ndarray, "n 32 32"]:
    margin, side = WINDOW // 2, pixels.shape[-1]
    padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin)), mode="edge")
    rows = np.sum([padded[:, i : i + side] for i in range(WINDOW)], axis=0)
    sums = np.sum([rows[:, :, i : i + side] for i in range(WINDOW)], axis=0)
    return np.asarray(sums / WINDOW**2)
