"""Find pictures that are nearly the same: copies saved again, resized, or a little brighter.

Two pictures are near duplicates if their 64-bit difference hashes (is each of 8 x 8 places darker than its
right neighbor?) differ in at most four bits, and if the local contrast of their thumbnails agrees. The hash
alone is not enough: medical images of one kind are framed alike, so hashes collide by chance. Contrast is
measured within small windows, because the edge of a bright disk on black, which all fundus pictures share,
would outweigh everything inside it. Turned and mirrored copies are not found.

Every hash is compared with every other, which takes less time than decoding the images.
"""

from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float16, Float32, Int64, UInt8, UInt64
from scipy.ndimage import uniform_filter

MAX_DISTANCE = 4  # bits of 64
MIN_AGREEMENT = 0.85  # correlation of local contrast
BLANK = 2.0  # gray levels: a picture with a smaller standard deviation shows nothing
BLOCK = 1024  # pictures on each side of a comparison of all with all
MAX_PAIRS = 1_000_000  # then the search ends

WINDOW = 5  # pixels of a thumbnail of 32
NOISE = 2.0  # gray levels: contrast of this size is not blown up to that of an edge
TIE = 0.01  # gray levels

Thumbnails = UInt8[np.ndarray, "n 32 32"]


class NearPairs(NamedTuple):
    pairs: Int64[np.ndarray, "pairs 2"]
    """(i, j) with i < j, sorted."""
    cut_short: Int64[np.ndarray, "m"]
    """Pictures that were not compared with all others, because the search ended before."""


def near_pairs(thumbnails: Thumbnails) -> NearPairs:
    """Search for near duplicates. Blank pictures have none."""
    shown = np.flatnonzero(~is_blank(thumbnails))
    hashes, contrast = difference_hashes(thumbnails[shown]), local_contrast(thumbnails[shown])
    pairs, cut_short = [np.empty((0, 2), np.int64)], shown[:0]
    n_pairs = 0
    for first, second in combinations_with_replacement(range(0, len(shown), BLOCK), 2):
        if n_pairs >= MAX_PAIRS:
            cut_short = shown[first:]
            break
        close = close_hashes(hashes[first : first + BLOCK], hashes[second : second + BLOCK])
        if first == second:
            close = np.triu(close, 1)
        rows, columns = (np.flatnonzero(close.any(axis=axis)) for axis in (1, 0))
        if not len(rows):
            continue
        left, right = (contrast[i].astype(np.float32) for i in (first + rows, second + columns))
        agree = close[np.ix_(rows, columns)] & (left @ right.T >= MIN_AGREEMENT)
        i, j = np.nonzero(agree)
        pairs.append(np.stack([shown[first + rows[i]], shown[second + columns[j]]], axis=1))
        n_pairs += len(i)
    joined = np.concatenate(pairs)
    return NearPairs(joined[np.lexsort((joined[:, 1], joined[:, 0]))], cut_short)


def is_blank(thumbnails: Thumbnails) -> Bool[np.ndarray, "n"]:
    return np.asarray(thumbnails.std(axis=(1, 2)) < BLANK)


def close_hashes(left: UInt64[np.ndarray, "n"], right: UInt64[np.ndarray, "m"]) -> Bool[np.ndarray, "n m"]:
    return np.asarray(np.bitwise_count(left[:, None] ^ right) <= MAX_DISTANCE)


def difference_hashes(thumbnails: Thumbnails) -> UInt64[np.ndarray, "n"]:
    side = thumbnails.shape[-1]
    small = _averages(8, side) @ thumbnails.astype(np.float32) @ _averages(9, side).T
    bits = small[:, :, 1:] - small[:, :, :-1] > TIE
    return np.packbits(bits.reshape(-1, 64), axis=1).view(np.uint64).ravel()


def _averages(n: int, side: int) -> Float32[np.ndarray, "n side"]:
    """Return a matrix whose row i averages the i-th of n equal stretches of a line of pixels."""
    edges = np.linspace(0, side, n + 1)
    pixels = np.arange(side)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (overlap.clip(0) * n / side).astype(np.float32)


def local_contrast(thumbnails: Thumbnails) -> Float16[np.ndarray, "n pixels"]:
    """Measure each pixel in standard deviations from the mean of its window; scale to unit vectors."""
    contrast = np.empty((len(thumbnails), 32 * 32), np.float16)
    for start in range(0, len(thumbnails), BLOCK):
        pixels = thumbnails[start : start + BLOCK].astype(np.float32)
        mean, mean_square = (
            uniform_filter(values, WINDOW, mode="nearest", axes=(1, 2)) for values in (pixels, pixels**2)
        )
        deviation = np.sqrt(np.maximum(mean_square - mean**2, 0))
        flat = ((pixels - mean) / (deviation + NOISE)).reshape(len(pixels), -1)
        flat = flat - flat.mean(axis=1, keepdims=True)
        length = np.linalg.norm(flat, axis=1, keepdims=True)
        contrast[start : start + BLOCK] = flat / np.maximum(length, 1e-6)
    return contrast
