"""A suite's cells as runs: each with its resolved recipe, and the key by which all suites know it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.build import parse_recipe, resolve
from medcil.config import RunConfig
from medcil.recipe import leaves
from medcil.suite import Suite, cells


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the places in the suite that show it."""

    key: str
    config: RunConfig
    places: tuple[tuple[str, str, int | str], ...]  # (row, setting, order)


def run_key(config: RunConfig) -> str:
    """Of a resolved recipe: equal for equal runs, wherever they are computed and whatever asked for them."""
    # What is unset has no say, so that a key which recipes learn later leaves the runs before it their names.
    said = {key: value for key, value in leaves(config.identity()) if value is not None}
    content = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def plan(suite: Suite, roots: Mapping[str, Path], settings: Sequence[str] = ()) -> list[PlannedRun]:
    """The runs of a suite, each once: images from `roots` (by dataset), `key=value` settings over all."""
    planned: dict[str, PlannedRun] = {}
    for cell in cells(suite):
        config = resolve(parse_recipe(cell.recipe, settings, source=f"{suite.title}, {cell.row}"))
        if config.data.name in roots:
            config = with_root(config, roots[config.data.name])
        key, place = run_key(config), (cell.row, cell.setting, cell.order)
        places = planned[key].places if key in planned else ()
        planned[key] = PlannedRun(key, config, (*places, place))
    return list(planned.values())


def with_root(config: RunConfig, root: Path) -> RunConfig:
    changed: dict[str, Any] = {"data": config.data.model_copy(update={"root": root})}
    return config.model_copy(update=changed)
