"""Columns of a manifest become subgroups: what they say of each image, with numbers in ranges."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

AGES = (20, 40, 60, 80)
MOST_VALUES = 12
"""Beyond, a column of words tells images apart rather than groups of them; so it does with more values than
half as many as there are images, and then they may be names."""
MOST_NUMBERS = 6
"""Beyond, numbers are put into ranges."""
UNKNOWN = "unknown"


def subgroups(columns: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """By column, the subgroup of each image; and a sentence about each column that makes none."""
    found: dict[str, list[str]] = {}
    notes = []
    for name, cells in columns.items():
        is_number = _is_number(cells)
        ranged = _ranged(name, cells) if is_number else [cell.strip() for cell in cells]
        values = [value or UNKNOWN for value in ranged]
        distinct = set(values)
        if not is_number and len(distinct) > min(MOST_VALUES, max(2, len(cells) // 2)):
            notes.append(
                f"The column {name!r} has {len(distinct)} different values: no subgroups are made of it."
            )
        elif len(distinct - {UNKNOWN}) > 1:
            found[name] = values
    return found, notes


def in_order(values: Iterable[str]) -> list[str]:
    """Each subgroup once: ranges and numbers by size, words by the alphabet, the unknown last."""

    def place(value: str) -> tuple[int, float, str]:
        if value == UNKNOWN:
            return 2, 0.0, value
        number = -math.inf if value.startswith("below ") else _number(value.split()[0])
        return (1, 0.0, value) if number is None else (0, number, value)

    return sorted(set(values), key=place)


def _is_number(cells: Sequence[str]) -> bool:
    """Numbers, of which there are too many to look at each."""
    known = {cell.strip() for cell in cells} - {"", UNKNOWN}
    return len(known) > MOST_NUMBERS and all(_number(cell) is not None for cell in known)


def _ranged(name: str, cells: Sequence[str]) -> list[str]:
    numbers = [_number(cell) for cell in cells]
    known = np.array([number for number in numbers if number is not None])
    edges = (
        AGES if "age" in name.split("_") else tuple(np.unique(np.quantile(known, [0.25, 0.5, 0.75])).tolist())
    )
    names = [f"below {edges[0]:g}"]
    names += [f"{low:g} to below {high:g}" for low, high in pairwise(edges)]
    names += [f"{edges[-1]:g} and more"]
    return ["" if n is None else names[int(np.searchsorted(edges, n, side="right"))] for n in numbers]


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
