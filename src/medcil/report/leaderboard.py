"""Rank any runs: those that differ in class order or seed alone are one row of a table.

Runs on other data, with other steps or another memory are ranked in a table of their own.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from medcil.errors import DamagedFile, InvalidInput, MedcilError
from medcil.experiments.suite import FigureSpec, Suite
from medcil.recipe import leaves
from medcil.report.runs import ARCHIVE, MACHINE_KEYS, RunRecord, RunSource, read_archive, read_run
from medcil.report.suite.results import Order, PlacedRun, Results, first_line

Identity = tuple[tuple[str, str], ...]
"""Recipe keys and their values."""

COLUMNS = {
    "Balanced": "acc_balanced",
    "Balanced, last step": "last_balanced",
    "Acc": "acc_micro",
    "Fgt": "forgetting",
}
NAME = "leaderboard"
ABOUT = "Every table has images, steps and a memory of its own; none is ranked against another."
FIGURES = tuple(
    FigureSpec(kind="curves", title=f"{title} at each step", file=metric, metric=metric)
    for title, metric in (
        ("Balanced accuracy", "balanced"),
        ("Micro accuracy", "micro"),
        ("Forgetting", "forgetting"),
    )
)


@dataclass(frozen=True)
class Entry:
    """A run, its protocol, and its recipe without class order and seed."""

    record: RunRecord
    protocol: str
    identity: Identity
    order: str
    seed: str


def build_leaderboard(paths: Sequence[Path], out: Path) -> Results:
    """Rank the finished runs; list the others as left out."""
    entries, left_out = [], []
    for source in find_runs(paths):
        name = source.name if isinstance(source, Path) else source.path.name
        if isinstance(source, Path) and not (source / "metrics.json").is_file():
            left_out.append(f"{name}: no step is finished yet.")
            continue
        try:
            entry = _entry(read_run(source))
        except MedcilError as error:  # one damaged run does not take the others' table with it
            left_out.append(f"{name}: {first_line(error, out)}")
            continue
        if entry.record.is_finished:
            entries.append(entry)
        else:
            left_out.append(f"{name}: unfinished, so not ranked.")
    if not entries:
        reasons = "\n".join(left_out)
        raise InvalidInput(f"None of these runs is finished: wait for one, or name others.\n{reasons}")
    settings, rows = _protocol_names(entries), _row_names(entries)
    over_seeds = [name for protocol, name in settings.items() if _varies_in_seed_alone(entries, protocol)]
    has_seeds = len({entry.seed for entry in entries}) > 1
    placed: dict[tuple[str, str], dict[Order, PlacedRun]] = {}
    for entry, row in zip(entries, rows, strict=True):
        place = placed.setdefault((row, settings[entry.protocol]), {})
        path = Path(os.path.relpath(entry.record.path, out)).as_posix()
        run = PlacedRun(entry.order, path, entry.record, seed=entry.seed if has_seeds else None)
        if run.name in place:
            left_out.append(f"{path}: the same class order, seed and recipe as {place[run.name].path}.")
        else:
            place[run.name] = run
    suite = Suite(
        title=f"{len(entries)} runs on {', '.join(sorted({e.record.dataset for e in entries}))}",
        about=ABOUT,
        metrics=COLUMNS,
        orders=tuple(sorted({entry.order for entry in entries})),
        common={},
        settings={name: {} for name in settings.values()},
        rows={name: {} for name in rows},
        figures=FIGURES,
    )
    runs = {place: tuple(found[name] for name in sorted(found, key=str)) for place, found in placed.items()}
    return Results(
        NAME, out, suite, runs, left_out=tuple(left_out), is_ranked=True, over_seeds=tuple(over_seeds)
    )


def find_runs(paths: Sequence[Path]) -> list[RunSource]:
    """Find the run directories and the lines of runs.jsonl in these folders, each once."""
    runs: dict[Path, RunSource] = {}
    for path in paths:
        if not path.is_dir():
            raise InvalidInput(
                f"No such folder: {path}. Name run directories, or folders that hold some.",
                code="run.directory.missing",
            )
        inside = [path] if (path / "config.yaml").is_file() else [f.parent for f in path.rglob("config.yaml")]
        archived = [run for file in sorted(path.rglob(ARCHIVE)) for run in read_archive(file)]
        if not inside and not archived:
            raise InvalidInput(
                f"No runs in {path}: it holds neither a config.yaml nor a {ARCHIVE}. Give another folder.",
                code="run.directory.empty",
            )
        sources: list[tuple[Path, RunSource]] = [(folder, folder) for folder in sorted(inside)]
        for place, source in [*sources, *((run.path, run) for run in archived)]:
            runs.setdefault(place.resolve(), source)
    return list(runs.values())


def _entry(run: RunRecord) -> Entry:
    # Unset keys are ignored, so that a key added to recipes later does not separate older runs.
    settings = {key: _spelled(value) for key, value in leaves(run.config) if value is not None}
    if settings.get("network.weights"):
        settings["network.weights"] = Path(settings["network.weights"]).name
    identity = {
        key: value
        for key, value in settings.items()
        if key not in ("seed", "scenario.order") and not key.startswith(MACHINE_KEYS)
    }
    try:
        protocol = json.dumps(_protocol(run), sort_keys=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"Run this experiment again: {run.path} holds files that do not fit together.\n{error!r}"
        ) from None
    return Entry(
        record=run,
        protocol=protocol,
        identity=tuple(sorted(identity.items())),
        order=settings.get("scenario.order", "0"),
        seed=settings.get("seed", "0"),
    )


def _spelled(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _protocol(run: RunRecord) -> dict[str, Any]:
    """Collect what must be equal for numbers to be comparable: images, arrival of classes, memory."""
    sections = {name: run.config.get(name) or {} for name in ("data", "scenario", "memory")}
    tested: list[int | None] = [sum(row) for row in run.last.confusion or ()]
    counts = zip(run.class_names, run.inherent_counts, tested or [None] * len(run.class_names), strict=True)
    return {
        "data": run.dataset,
        "split": [sections["data"].get(key) for key in ("split", "split_share", "split_seed", "held_out")],
        "classes": sorted(map(list, counts), key=str),
        "steps": run.task_sizes,
        "long_tail": sections["scenario"].get("long_tail"),
        "memory": [sections["memory"].get(key) for key in ("per_class", "total")],
    }


def _protocol_names(entries: Sequence[Entry]) -> dict[str, str]:
    """Name each protocol: `ham10000 3-2-2`, if needed with its memory, then with a number."""
    names: dict[str, str] = {}
    for entry in entries:
        if entry.protocol in names:
            continue
        found = json.loads(entry.protocol)
        name = f"{found['data']} {_steps(found['steps'])}"
        if name in names.values():
            per_class, total = found["memory"]
            name += f", {total} exemplars" if total else f", {per_class} exemplars per class"
        names[entry.protocol] = _numbered(name, names.values())
    return names


def _steps(sizes: Sequence[int]) -> str:
    """Abbreviate the sizes of tasks: `3-2-2`, `50-5-…`."""
    return "-".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}-{sizes[1]}-…"


def _numbered(name: str, taken: Iterable[str]) -> str:
    """Add the first number to a name that makes it unique."""
    taken = set(taken)
    return next(each for n in count(1) if (each := f"{name} ({n})" if n > 1 else name) not in taken)


def _varies_in_seed_alone(entries: Sequence[Entry], protocol: str) -> bool:
    own = [entry for entry in entries if entry.protocol == protocol]
    return len({entry.order for entry in own}) == 1 < len({entry.seed for entry in own})


def _row_names(entries: Sequence[Entry]) -> list[str]:
    """Name rows by the labels of their runs; rows that share a label are told apart by their recipes."""
    names: dict[tuple[str, Identity], str] = {}
    for protocol in dict.fromkeys(entry.protocol for entry in entries):
        labels: dict[Identity, list[RunRecord]] = {}
        for entry in entries:
            if entry.protocol == protocol:
                labels.setdefault(entry.identity, []).append(entry.record)
        own = {identity: _label(records) for identity, records in labels.items()}
        for identity, name in own.items():
            difference = _told_apart(identity, [other for other, known in own.items() if known == name])
            full = f"{name} ({difference})" if difference else name
            names[protocol, identity] = _numbered(full, [names[key] for key in names if key[0] == protocol])
    return [names[entry.protocol, entry.identity] for entry in entries]


def _label(records: Sequence[RunRecord]) -> str:
    """Return the common label, or the method's name where the labels differ."""
    labels = {record.label for record in records}
    method = (records[0].config.get("method") or {}).get("name")
    return records[0].label if len(labels) == 1 or method is None else str(method)


def _told_apart(identity: Identity, namesakes: Sequence[Identity]) -> str:
    """Name the fewest keys that tell a recipe from those with the same label."""
    recipes = [dict(other) for other in namesakes]
    keys = sorted({key for recipe in recipes for key in recipe}, key=lambda key: (len(key), key))
    keys.sort(key=lambda key: not key.startswith("method."))  # what is said of the method first
    chosen: list[str] = []
    while _n_kinds(recipes, chosen) < len(recipes):
        chosen.append(max(keys, key=lambda key: _n_kinds(recipes, [*chosen, key])))
    own = dict(identity)
    return ", ".join(f"{key.removeprefix('method.')} = {own[key]}" for key in chosen if key in own)


def _n_kinds(recipes: Sequence[dict[str, str]], keys: Sequence[str]) -> int:
    return len({tuple(recipe.get(key) for key in keys) for recipe in recipes})
