"""Which pictures are nearly the same: copies saved again, resized, or a little brighter.

A 64-bit difference hash (is each of 8 x 8 places darker than its right neighbor?) finds candidates without
comparing all pairs: of six bands of bits, two hashes that differ in at most four bits share two whole bands,
so that only images with two equal bands are compared. Medical images of one kind are framed alike, and their
hashes collide by chance; a candidate counts only if the local contrast of the thumbnails agrees as well.
Contrast is measured within small windows, because the edge of a bright disk on black, which all fundus
pictures share, would outweigh everything inside it. Turned and mirrored copies are not found.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8, UInt64

MAX_DISTANCE = 4  # bits of 64
MIN_AGREEMENT = 0.85  # correlation of local contrast
BLANK = 2.0  # gray levels: a picture whose standard deviation is below shows nothing
BLOCK = 2048  # pairs compared at once
REACH = 4096  # comparisons per image and pair of bands: a bound where thousands of pictures hash alike

N_BANDS = 6
WINDOW = 5  # pixels of a thumbnail of 32
NOISE = 2.0  # gray levels: contrast of this size is not blown up to that of an edge
TIE = 0.01  # gray levels

Thumbnails = UInt8[np.ndarray, "n 32 32"]
Hashes = UInt64[np.ndarray, "n"]
Pairs = Int64[np.ndarray, "pairs 2"]


def near_pairs(thumbnails: Thumbnails) -> Pairs:
    """(i, j) with i < j, sorted; blank pictures are like nothing."""
    shown = np.flatnonzero(~is_blank(thumbnails))
    if len(shown) < 2:
        return np.empty((0, 2), np.int64)
    pairs = shown[close_pairs(difference_hashes(thumbnails[shown]))]
    agrees = np.zeros(len(pairs), bool)
    for start in range(0, len(pairs), BLOCK):
        block = pairs[start : start + BLOCK]
        involved, places = np.unique(block, return_inverse=True)
        contrast = local_contrast(thumbnails[involved])
        left, right = contrast[places.reshape(block.shape)].swapaxes(0, 1)
        agrees[start : start + BLOCK] = np.einsum("pk,pk->p", left, right) >= MIN_AGREEMENT
    return np.asarray(pairs[agrees])


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


def close_pairs(hashes: Hashes) -> Pairs:
    """All (i, j), i < j, that differ in at most MAX_DISTANCE bits; REACH bounds the search."""
    found = [np.empty(0, np.int64)]
    for mask in _masks():
        order = np.lexsort((hashes, hashes & mask))
        for left, right in _with_equal_keys((hashes & mask)[order]):
            a, b = order[left], order[right]
            close = np.bitwise_count(hashes[a] ^ hashes[b]) <= MAX_DISTANCE
            first, second = np.minimum(a, b)[close], np.maximum(a, b)[close]
            found.append(first * len(hashes) + second)
    codes = np.unique(np.concatenate(found))
    return np.stack([codes // len(hashes), codes % len(hashes)], axis=1)


def _masks() -> Iterator[np.uint64]:
    """Each leaves the bits of as many bands as MAX_DISTANCE wrong bits must spare."""
    edges = np.linspace(0, 64, N_BANDS + 1).astype(int)
    bands = [(1 << int(end)) - (1 << int(start)) for start, end in pairwise(edges)]
    for spared in combinations(bands, N_BANDS - MAX_DISTANCE):
        yield np.uint64(sum(spared))


def _with_equal_keys(
    keys: Hashes,
) -> Iterator[tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "m"]]]:
    """Positions with equal keys in a sorted array: those one apart, then two apart, and so on."""
    left = np.arange(len(keys) - 1)
    for apart in range(1, REACH + 1):
        left = left[left + apart < len(keys)]
        left = left[keys[left] == keys[left + apart]]
        if not len(left):
            return
        yield left, left + apart


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
