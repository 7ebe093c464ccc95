"""Rank any runs: those that differ in class order or seed alone are one row of a table.

Runs on other data, with other steps or another memory are ranked in a table of their own.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput, MedcilError
from medcil.experiments.suite import Suite, order_name
from medcil.recipe import load_yaml
from medcil.report.markup import asset
from medcil.report.results import Order, PlacedRun, Results, first_line
from medcil.report.runs import ARCHIVE, RunRecord, RunSource, read_archive, read_run, settings_of

Recipe = frozenset[tuple[str, str]]
"""Keys of a recipe and their values."""


@dataclass(frozen=True)
class Entry:
    """A finished run."""

    record: RunRecord
    protocol: str
    """What must be equal for numbers to be comparable, as JSON."""
    recipe: Recipe
    """Its settings without class order and seed."""
    order: Order
    seed: int


def build_leaderboard(paths: Sequence[Path], out: Path) -> Results:
    """Rank the finished runs; list the others as left out."""
    entries, left_out = [], []
    for source in find_runs(paths):
        path = source if isinstance(source, Path) else source.path
        try:
            entry = _entry(read_run(source))
        except MedcilError as error:  # one damaged run does not take the others' table with it
            left_out.append(f"{path.name}: {first_line(error, path.parent)}")
            continue
        if entry.record.is_finished:
            entries.append(entry)
        else:
            left_out.append(f"{path.name}: unfinished, so not ranked.")
    if not entries:
        reasons = "\n".join(left_out)
        raise InvalidInput(f"None of these runs is finished: wait for one, or name others.\n{reasons}")
    settings, rows = _protocol_names(entries), _row_names(entries)
    seeds = sorted({entry.seed for entry in entries})
    placed: dict[tuple[str, str], dict[Order, PlacedRun]] = {}
    for entry, row in zip(entries, rows, strict=True):
        place = placed.setdefault((row, settings[entry.protocol]), {})
        relative = Path(os.path.relpath(entry.record.path, out)).as_posix()
        run = PlacedRun(entry.order, relative, entry.record, seed=entry.seed if len(seeds) > 1 else None)
        if run.name in place:
            left_out.append(f"{relative}: the same class order, seed and recipe as {place[run.name].path}.")
        else:
            place[run.name] = run
    own = {
        "title": f"{len(entries)} runs on {', '.join(sorted({e.record.dataset for e in entries}))}",
        "orders": sorted({entry.order for entry in entries}, key=str),
        "seeds": seeds,
        "common": {},
        "settings": {name: {} for name in settings.values()},
        "rows": {name: {} for name in rows},
    }
    shown = load_yaml(asset("leaderboard.yaml"), source="leaderboard.yaml")
    suite = Suite.model_validate(shown | own)
    runs = {
        place: tuple(by_name[name] for name in sorted(by_name, key=str)) for place, by_name in placed.items()
    }
    return Results("leaderboard", out, suite, runs, left_out=tuple(left_out), is_ranked=True)


def find_runs(paths: Sequence[Path]) -> list[RunSource]:
    """Find the run directories and the lines of runs.jsonl in these folders, each once."""
    runs: dict[Path, RunSource] = {}
    for path in paths:
        if not path.is_dir():
            raise InvalidInput(
                f"There is no folder {path}. Give run directories, or folders that hold some.",
                code="run.directory.missing",
            )
        inside = [path] if (path / "config.yaml").is_file() else [f.parent for f in path.rglob("config.yaml")]
        archived = [
            run for file in sorted(filter(Path.is_file, path.rglob(ARCHIVE))) for run in read_archive(file)
        ]
        if not inside and not archived:
            raise InvalidInput(
                f"No runs in {path}: it holds neither a config.yaml nor a {ARCHIVE}. Give another folder.",
                code="run.directory.empty",
            )
        runs |= {folder.resolve(): folder for folder in sorted(inside)}
        runs |= {run.path.resolve(): run for run in archived}
    return list(runs.values())


def _entry(run: RunRecord) -> Entry:
    # Unset keys are ignored, so that a key added to recipes later does not separate older runs.
    recipe = {key: value for key, value in settings_of(run).items() if value is not None}
    order, seed = order_name(recipe.pop("scenario.order", 0)), recipe.pop("seed", 0)
    try:
        protocol = json.dumps(_protocol(run), sort_keys=True)
        return Entry(
            run, protocol, frozenset((key, _text(value)) for key, value in recipe.items()), order, int(seed)
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"Run this experiment again: {run.path} holds files that do not fit together.\n{error!r}"
        ) from None


def _text(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _protocol(run: RunRecord) -> dict[str, Any]:
    """Collect what must be equal for numbers to be comparable: images, arrival of classes, memory."""
    data, scenario, memory = (run.config.get(name) or {} for name in ("data", "scenario", "memory"))
    tested = [sum(row) for row in run.last.confusion or ()]  # or unknown
    return {
        "data": run.dataset,
        "split": [data.get(key) for key in ("split", "split_share", "split_seed", "held_out")],
        "classes": sorted(map(list, zip_longest(run.class_names, run.inherent_counts, tested)), key=str),
        "steps": run.task_sizes,
        "long_tail": scenario.get("long_tail"),
        "memory": [memory.get(key) for key in ("per_class", "total")],
    }


def _protocol_names(entries: Sequence[Entry]) -> dict[str, str]:
    """Name each protocol: `ham10000 3-2-2`, if needed with its memory, then with a number."""
    names: dict[str, str] = {}
    for protocol in dict.fromkeys(entry.protocol for entry in entries):
        content = json.loads(protocol)
        sizes, (per_class, total) = content["steps"], content["memory"]
        steps = "-".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}-{sizes[1]}-…"
        name = f"{content['data']} {steps}"
        if name in names.values():
            name += f", {total} exemplars" if total else f", {per_class} exemplars per class"
        names[protocol] = _numbered(name, names.values())
    return names


def _numbered(name: str, taken: Iterable[str]) -> str:
    """Add the first number to a name that makes it unique."""
    taken = set(taken)
    return next(each for n in count(1) if (each := f"{name} ({n})" if n > 1 else name) not in taken)


def _row_names(entries: Sequence[Entry]) -> list[str]:
    """Name rows by the labels of their runs; rows that share a label are told apart by their recipes."""
    names: dict[tuple[str, Recipe], str] = {}
    by_protocol: dict[str, dict[Recipe, list[RunRecord]]] = {}
    for entry in entries:
        by_protocol.setdefault(entry.protocol, {}).setdefault(entry.recipe, []).append(entry.record)
    for protocol, records in by_protocol.items():
        labels = {recipe: _label(runs) for recipe, runs in records.items()}
        taken: list[str] = []
        for recipe, label in labels.items():
            difference = _told_apart(recipe, [other for other in labels if labels[other] == label])
            taken.append(_numbered(f"{label} ({difference})" if difference else label, taken))
            names[protocol, recipe] = taken[-1]
    return [names[entry.protocol, entry.recipe] for entry in entries]


def _label(records: Sequence[RunRecord]) -> str:
    """Return the common label, or the method's name where the labels differ."""
    method = (records[0].config.get("method") or {}).get("name")
    is_common = len({record.label for record in records}) == 1 or method is None
    return records[0].label if is_common else str(method)


def _told_apart(recipe: Recipe, namesakes: Sequence[Recipe]) -> str:
    """Name the fewest keys that tell a recipe from those with the same label."""
    recipes = [dict(other) for other in namesakes]
    keys = {key for other in recipes for key in other}
    # Options of the method first, then the shortest.
    candidates = sorted(keys, key=lambda key: (not key.startswith("method."), len(key), key))
    telling: list[str] = []

    def n_kinds(keys: Sequence[str]) -> int:
        return len({tuple(other.get(key) for key in keys) for other in recipes})

    while n_kinds(telling) < len(recipes):
        telling.append(max(candidates, key=lambda key: n_kinds([*telling, key])))
    own = dict(recipe)
    return ", ".join(f"{key.removeprefix('method.')} = {own[key]}" for key in telling if key in own)
