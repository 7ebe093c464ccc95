"""How frequent each class is where the model is used: chosen by name, or from a file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.clinic.inference import OpenModel
from medcil.errors import InvalidInput, nearest

TABLES = (".csv", ".yaml", ".yml")
ROUNDING = 0.005
"""By so much shares may miss a sum of one, as they do when they were rounded."""


@dataclass(frozen=True)
class Prior:
    name: str
    """`uniform`, `training`, or the name of the file."""
    shares: tuple[float, ...]
    """Of each class of the model; together one."""


def choose_prior(model: OpenModel, wanted: str | Path) -> Prior:
    """`uniform`: all alike. `training`: as among the images the model learned from. Else a file of shares."""
    n = len(model.class_names)
    if str(wanted) == "uniform":
        return Prior("uniform", (1 / n,) * n)
    if str(wanted) == "training":
        total = sum(model.training_counts or ())
        if model.training_counts is None or not total:
            raise InvalidInput(
                f"{model.name} does not say how many images each class was learned from: give the model "
                "folder, or a file of shares."
            )
        return Prior("training", tuple(count / total for count in model.training_counts))
    path = Path(wanted)
    if not path.is_file():
        raise InvalidInput(
            f"The prior {str(wanted)!r} is neither `uniform` nor `training`, and no file of that name is "
            f"there: write one with a share for each class ({', '.join(TABLES)})."
        )
    return Prior(path.name, _checked(_read(path), model.class_names, path))


def _read(path: Path) -> dict[str, Any]:
    """class: share, as it is written."""
    import yaml  # here, for most have no file

    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _rows(text, path)
        # Names as they are written: YAML would take a class called `no` for false, and `010` for eight.
        content = yaml.load(text, Loader=yaml.BaseLoader)  # makes strings and nothing else
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"{path} cannot be read ({reason}): write `class: share`, a line for each."
        ) from None
    if not isinstance(content, Mapping):
        raise InvalidInput(f"{path} holds no shares: write `class: share`, a line for each.")
    return dict(content)


def _rows(text: str, path: Path) -> dict[str, Any]:
    from medcil.data.sources.tables import csv_rows

    shares: dict[str, Any] = {}
    rows = [[cell.strip() for cell in row] for row in csv_rows(text.encode(), str(path)) if any(row)]
    if rows and len(rows[0]) == 2 and _number(rows[0][1]) is None:  # a header
        rows = rows[1:]
    for row in rows:
        if len(row) != 2 or row[0] in shares:
            problem = "is there twice" if len(row) == 2 else "has not two cells"
            raise InvalidInput(
                f"{path}: the row {','.join(row)!r} {problem}: write class,share, once for each."
            )
        shares[row[0]] = row[1]
    return shares


def _checked(shares: dict[str, Any], class_names: tuple[str, ...], path: Path) -> tuple[float, ...]:
    for name in shares:
        if name not in class_names:
            raise InvalidInput(f"{path}: the model knows no class {name!r}. {nearest(name, class_names)}")
    numbers = []
    for name in class_names:
        if name not in shares:
            raise InvalidInput(f"{path} has no share for {name!r}: add it, or 0 where it never occurs.")
        number = _number(shares[name])
        if number is None or not (math.isfinite(number) and number >= 0):
            raise InvalidInput(
                f"{path}: the share of {name!r} is {shares[name]!r}: write a number from 0 to 1."
            )
        numbers.append(number)
    total = math.fsum(numbers)
    if abs(total - 1) > ROUNDING:
        percent = " Are these percent? Divide by 100." if abs(total - 100) <= 100 * ROUNDING else ""
        raise InvalidInput(f"{path}: the shares sum to {total:g}, not to 1: mend them.{percent}")
    return tuple(number / total for number in numbers)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
