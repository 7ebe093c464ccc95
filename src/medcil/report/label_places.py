"""Where the numbers beside points go, so that none covers another or a marker: the same every time."""

from collections.abc import Sequence
from math import cos, hypot, pi, sin
from typing import NamedTuple

import numpy as np

# All lengths in points, for print of 7.
DIGIT, HEIGHT = 4.9, 5.4  # of bold digits
MARKER = 3.0  # from the middle of a marker to its edge
GAP = 1.5  # around a number
ROUNDING = 1e-6  # what touches does not overlap
FURTHER = (11.0, 14.0, 18.0, 23.0, 29.0, 36.0, 44.0, 53.0, 63.0, 74.0)  # from a point to its number's middle
DIRECTIONS = 24
WORSE = 1000  # a number that cannot be read, or belongs to nothing, than lines that cross
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


class Offset(NamedTuple):
    """From a point to the middle of its number."""

    x: float
    y: float
    is_led: bool = False
    """So far away that a line has to lead there."""


def label_places(points: Sequence[tuple[float, float]], n_digits: Sequence[int], room: Box) -> list[Offset]:
    """Point by point the first place that is free, nearer ones first; if none is, the least covered one."""
    taken = np.array([_box(x, y, MARKER, MARKER) for x, y in points])
    places = []
    for i, n in enumerate(n_digits):
        found = [(offset, _ink(points[i], offset, n)) for offset in _offsets(n)]
        trouble = []
        for offset, ink in found:
            number, *line = _overlaps(ink, taken).sum(axis=1).tolist()
            is_lost = not _holds(room, ink[0]) or not (offset.is_led or _is_nearest(points, i, offset))
            trouble.append(WORSE * (number + is_lost) + sum(line))
        offset, ink = found[trouble.index(min(trouble))]
        places.append(offset)
        taken = np.concatenate([taken, ink])
    return places


def _offsets(n_digits: int) -> list[Offset]:
    """Beside the marker, to the right first; then in rings around it."""
    x, y = MARKER + GAP + DIGIT * n_digits / 2, MARKER + GAP + HEIGHT / 2
    beside = [(x, 0.0), (-x, 0.0), (0.0, y), (0.0, -y), (x, y), (-x, y), (x, -y), (-x, -y)]
    angles = [2 * pi * i / DIRECTIONS for i in range(DIRECTIONS)]
    rings = [(far * cos(angle), far * sin(angle)) for far in FURTHER for angle in angles]
    return [Offset(*each) for each in beside] + [Offset(*each, is_led=True) for each in rings]


def _ink(point: tuple[float, float], offset: Offset, n_digits: int) -> np.ndarray:
    """Boxes: what a number covers with the gap around it, then the line that leads to it as a row of dots."""
    x, y = point
    boxes = [_box(x + offset.x, y + offset.y, GAP + DIGIT * n_digits / 2, GAP + HEIGHT / 2)]
    if offset.is_led:
        length = hypot(offset.x, offset.y)
        shares = [far / length for far in range(int(MARKER) + 2, int(length))]
        boxes += [_box(x + share * offset.x, y + share * offset.y, 0.5, 0.5) for share in shares]
    return np.array(boxes)


def _box(x: float, y: float, half_width: float, half_height: float) -> Box:
    return x - half_width, y - half_height, x + half_width, y + half_height


def _overlaps(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Of each box with each of the others."""
    one, other = some[:, None], others[None]
    shared = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    both: np.ndarray = (shared > ROUNDING).all(axis=-1)
    return both


def _holds(room: Box, box: np.ndarray) -> bool:
    return bool((box[:2] >= room[:2]).all() and (box[2:] <= room[2:]).all())


def _is_nearest(points: Sequence[tuple[float, float]], i: int, offset: Offset) -> bool:
    """No other point: without a line a number is taken for that of the point next to it."""
    x, y = points[i][0] + offset.x, points[i][1] + offset.y
    far = hypot(offset.x, offset.y) - ROUNDING
    return all(far <= hypot(x - other[0], y - other[1]) for other in points)
