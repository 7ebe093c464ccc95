"""A suite's cells as runs: each with its resolved recipe, and the key by which all suites know it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.build import parse_recipe, resolve, with_preset
from medcil.config import RunConfig
from medcil.errors import InvalidInput
from medcil.experiments.suite import Cell, Place, Suite, cells
from medcil.recipe import leaves


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the places in the suite that show it."""

    key: str
    config: RunConfig
    places: tuple[Place, ...]


def run_key(config: RunConfig) -> str:
    """Of a resolved recipe: equal for equal runs, wherever they are computed and whatever asked for them."""
    # What is unset has no say, so that a key which recipes learn later leaves the runs before it their names.
    said = {key: value for key, value in leaves(config.identity()) if value is not None}
    content = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def plan(suite: Suite, settings: Sequence[str] = ()) -> list[PlannedRun]:
    """The runs of a suite, each once, with `key=value` settings over all."""
    planned: dict[str, PlannedRun] = {}
    chosen_by = {"scenario.order": "--orders"} | dict.fromkeys(suite.vary, "--only")
    chosen_by |= {"seed": "--seeds"} if suite.seeds else {}
    for cell in cells(suite):
        _check_place(cell, settings, chosen_by)
        config = resolve(parse_recipe(cell.recipe, settings, source=f"{suite.title}, {cell.place.row}"))
        key = run_key(config)
        places = planned[key].places if key in planned else ()
        planned[key] = PlannedRun(key, config, (*places, cell.place))
    return list(planned.values())


def _check_place(cell: Cell, settings: Sequence[str], chosen_by: Mapping[str, str]) -> None:
    """A setting must not make a run another than its place says: one run would pass for several."""
    own, changed = (dict(leaves(with_preset(cell.recipe, given))) for given in ((), settings))
    for key, remedy in chosen_by.items():
        if changed.get(key) != own.get(key):
            raise InvalidInput(
                f"--set changes {key}, by which this suite tells its runs apart: choose among them with "
                f"{remedy}, or write a suite with other values."
            )


def with_root(config: RunConfig, root: Path) -> RunConfig:
    changed: dict[str, Any] = {"data": config.data.model_copy(update={"root": root})}
    return config.model_copy(update=changed)
