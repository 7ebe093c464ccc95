"""Plan a sweep: the runs of a suite, those selected of them, and where their images are.

Everything that can be wrong with a request is reported here, before anything is written.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml

from medcil.build import build_state, parse_recipe, resolve, with_preset
from medcil.config import RunConfig
from medcil.data.cache import is_cache, open_cache, prepare
from medcil.data.image_table import ImageTable, hash_files, without_ids
from medcil.data.sources import find_dataset, list_images, recognized_name
from medcil.errors import InvalidInput, RunConflict, RunLocked, nearest
from medcil.experiments.launchers.local import parallel_runs
from medcil.experiments.results_folder import Request
from medcil.experiments.run import Fingerprint, difference, fingerprint_of_images, fingerprint_of_weights
from medcil.experiments.suite import Cell, Place, Suite, cells, load_suite
from medcil.recipe import leaves, read_recipe
from medcil.storage.atomic import read_json, write_bytes
from medcil.storage.overwrite_guard import check_output_folder
from medcil.storage.run_dir import RunDir
from medcil.training.environment import visible_gpus
from medcil.training.inference import choose_device

THREADS = 1
"""Threads of a run by default. Sums depend on their number, so it is the same on every machine; parallel runs
use the other cores."""
STORE_POLL = 2.0
"""Seconds between two looks at a store that another process prepares."""
NO_IMAGES = "No run has its images. Give their location with --data."

Entries = list[tuple[str, int, str | None]]
"""Name, label and sha256 of images."""


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the places in the suite that show it."""

    key: str
    config: RunConfig
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Root:
    """The images of a dataset at one size."""

    dataset: str
    side: int
    folder: Path
    """The prepared store that runs read."""
    source: Path | None
    """What it is prepared from; None: it exists."""


@dataclass(frozen=True)
class SweepPlan:
    request: Request
    suite: Suite
    runs: tuple[PlannedRun, ...]
    """The selected runs that have images."""
    all_runs: tuple[PlannedRun, ...]
    """All of the suite."""
    roots: Mapping[tuple[str, int], Root]
    """(dataset, side) -> the images of unfinished runs."""
    left_out: tuple[str, ...]
    """A sentence for each dataset without images."""

    @property
    def shown(self) -> list[PlannedRun]:
        """The runs in the tables: the selected ones, and others of the suite that are finished."""
        selected = {run.key for run in self.runs}
        return [run for run in self.all_runs if run.key in selected or self._is_finished(run)]

    @property
    def unfinished(self) -> list[PlannedRun]:
        return [run for run in self.runs if not self._is_finished(run)]

    def state_of(self, run: PlannedRun) -> str:
        """`finished`, `begun` or `to do`."""
        if self._is_finished(run):
            return "finished"
        return "begun" if self.request.results.run(run.key).exists() else "to do"

    def _is_finished(self, run: PlannedRun) -> bool:
        return self.request.results.is_finished(run.key)

    @property
    def _processes(self) -> int:
        return max((run.config.execution.processes for run in self.runs), default=1)

    def _n_gpus(self) -> int:
        executions = [run.config.execution for run in self.runs]
        on_gpu = any(choose_device(execution).type == "cuda" for execution in executions)
        return torch.cuda.device_count() if on_gpu else 0

    def gpus_to_share(self) -> Sequence[str]:
        """The GPUs of which each run gets one; empty with a single GPU, or if a run needs several."""
        return visible_gpus() if self._n_gpus() > 1 and self._processes == 1 else ()

    def parallel_runs(self) -> int:
        threads = max(self.recipe_of(run).execution.threads or 1 for run in self.runs)
        return parallel_runs(n_gpus=-(-self._n_gpus() // self._processes), threads=threads)

    def recipe_of(self, run: PlannedRun) -> RunConfig:
        """The recipe as it is computed: with the location of its images and weights, and its threads."""
        config = run.config
        changes: dict[str, Any] = {}
        if root := self.roots.get((config.data.name, config.data.side)):
            changes["data"] = config.data.model_copy(update={"root": root.folder.absolute()})
        if config.execution.threads is None:
            changes["execution"] = config.execution.model_copy(update={"threads": THREADS})
        if config.network.weights not in (None, "hub"):
            weights = str(Path(str(config.network.weights)).absolute())
            changes["network"] = config.network.model_copy(update={"weights": weights})
        return config.model_copy(update=changes)

    def write_recipe(self, run: PlannedRun) -> Path:
        path = self.request.results.recipe(run.key)
        content = yaml.safe_dump(self.recipe_of(run).model_dump(mode="json"), sort_keys=False)
        write_bytes(path, content.encode())
        return path


def plan_sweep(request: Request) -> SweepPlan:
    """Select the runs of a request and find their images; write nothing."""
    suite = load_suite(request.suite)
    _check_folder(request, suite)
    all_runs = runs_of_suite(suite, _settings(request))
    selected = _select(request, all_runs)
    unfinished = [run for run in selected if not request.results.is_finished(run.key)]
    images = images_of(request, {run.config.data.name for run in all_runs if _needs_files(run)})
    check_prepared(request, images, [(run.config.data.name, run.config.data.side) for run in all_runs])
    wanted = [(run.config.data.name, run.config.data.side) for run in unfinished if _needs_files(run)]
    roots, left_out = find_roots(request, images, wanted)
    lacking = {
        run.key
        for run in unfinished
        if _needs_files(run) and (run.config.data.name, run.config.data.side) not in roots
    }
    runs = tuple(run for run in selected if run.key not in lacking)
    if not runs:
        raise InvalidInput("\n".join([NO_IMAGES, *left_out]), code="suite.images.missing")
    for run in runs:
        if not _has_weights(run.config):
            raise InvalidInput(
                f"network.weights: no such file: {run.config.network.weights}. Give one with --weights.",
                code="suite.weights.missing",
            )
    _check_finished(request, [run for run in all_runs if request.results.is_finished(run.key)], images)
    return SweepPlan(request, suite, runs, tuple(all_runs), roots, tuple(left_out))


def check_networks(plan: SweepPlan) -> None:
    """Build each network of the unfinished runs with its weights, before images are prepared."""
    networks: set[str] = set()
    for config in (run.config for run in plan.unfinished):
        network = config.network.model_dump_json()
        if network not in networks:
            build_state(config)
            networks.add(network)


# The runs of a suite.


def runs_of_suite(suite: Suite, settings: Sequence[str] = ()) -> list[PlannedRun]:
    """List the runs of a suite, equal ones once, with `key=value` settings over each recipe."""
    planned: dict[str, PlannedRun] = {}
    options = {"scenario.order": "--orders"} | dict.fromkeys(suite.vary, "--only")
    options |= {"seed": "--seeds"} if suite.seeds else {}
    for cell in cells(suite):
        _check_place(cell, settings, options)
        config = resolve(parse_recipe(cell.recipe, settings, source=f"{suite.title}, {cell.place.row}"))
        key = run_key(config)
        places = planned[key].places if key in planned else ()
        planned[key] = PlannedRun(key, config, (*places, cell.place))
    return list(planned.values())


def run_key(config: RunConfig) -> str:
    """Hash a resolved recipe: equal runs have equal keys, wherever they are computed."""
    # Unset keys are left out, so that a key that recipes gain later does not rename earlier runs.
    values = {key: value for key, value in leaves(config.identity()) if value is not None}
    content = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _check_place(cell: Cell, settings: Sequence[str], options: Mapping[str, str]) -> None:
    """Refuse a setting that moves a run away from its place: one run would pass for several."""
    own, changed = (dict(leaves(with_preset(cell.recipe, s))) for s in ((), settings))
    for key, option in options.items():
        if changed.get(key) != own.get(key):
            raise InvalidInput(
                f"--set changes {key}, which distinguishes the runs of this suite. Select them with {option}"
                ", or write a suite with other values.",
                code="suite.setting.conflict",
            )


# Which of them.


def _settings(request: Request) -> list[str]:
    """Write `--weights` and `--device` as settings of a recipe."""
    settings = list(request.settings)
    if request.weights is not None:
        settings.append(f"network.weights={json.dumps(request.weights)}")
    if request.device != "auto":
        settings.append(f"execution.device={request.device}")
    return settings


def _select(request: Request, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Select the runs at a place whose row, setting, order and seed are all requested."""
    places = [place for run in runs for place in run.places]
    _check_selection(request, places)
    rows = _matching(request.only, {place.row for place in places})
    settings = _matching(request.only, {place.setting for place in places})
    selected = [
        run
        for run in runs
        if any(
            place.row in rows
            and place.setting in settings
            and (not request.orders or str(place.order) in request.orders)
            and (not request.seeds or str(place.seed) in request.seeds)
            for place in run.places
        )
    ]
    if not selected:
        raise InvalidInput(
            "--only, --orders and --seeds select no run. Give fewer of them.", code="suite.selection.empty"
        )
    return selected


def _check_selection(request: Request, places: Sequence[Place]) -> None:
    orders = [str(place.order) for place in places]
    seeds = [str(place.seed) for place in places if place.seed is not None]
    if request.seeds and not seeds:
        raise InvalidInput(
            "--seeds: the suite has no seeds. Write `seeds: [0, 1]` into its file, or omit --seeds.",
            code="suite.seeds.missing",
        )
    for kind, names, available in (("order", request.orders, orders), ("seed", request.seeds, seeds)):
        for name in names:
            if name not in available:
                hint = nearest(name, dict.fromkeys(available))
                raise InvalidInput(
                    f"--{kind}s: the suite has no {kind} {name!r}. {hint}", code="suite.selection.unknown"
                )
    labels = list(dict.fromkeys(name for place in places for name in (place.row, place.setting)))
    for pattern in request.only:
        if not _like(pattern, labels):
            raise InvalidInput(
                f"--only {pattern!r} matches no row or setting. {nearest(pattern, labels)}",
                code="suite.pattern.unknown",
            )


def _matching(patterns: Sequence[str], names: Set[str]) -> Set[str]:
    """Find the names that any pattern matches; all of them if the patterns are about something else."""
    return {name for pattern in patterns for name in _like(pattern, names)} or names


def _like(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name.lower(), pattern.lower())]


# Their images.


def _needs_files(run: PlannedRun) -> bool:
    return not find_dataset(run.config.data.name).is_synthetic


def images_of(request: Request, datasets: Collection[str]) -> dict[str, Path]:
    """Map datasets (those of the suite that have files) to the locations that `--data` gives."""
    images: dict[str, Path] = {}
    for text in request.data:
        name, equals, place = text.partition("=")
        is_named = bool(equals) and not Path(text).exists()
        if is_named and name not in datasets:
            hint = nearest(name, datasets) if datasets else "It needs no images."
            raise InvalidInput(
                f"--data {text}: the suite has no dataset {name!r}. {hint}", code="suite.data.unknown"
            )
        path = Path(place if is_named else text)
        if not path.exists():
            raise InvalidInput(
                f"--data {text}: no such file or folder: {path}. Give the images of a dataset.",
                code="suite.data.missing",
            )
        if not datasets:
            raise InvalidInput(
                f"--data {text}: the suite needs no images. Omit it.", code="suite.data.unused"
            )
        images |= {name: path} if is_named else _shared(path, datasets)
    return images


def _shared(path: Path, datasets: Collection[str]) -> Mapping[str, Path]:
    """Find the datasets in one path: a folder with an entry named after each, or files that they share."""
    if len(datasets) == 1:
        return dict.fromkeys(datasets, path)
    entries = sorted(path.iterdir(), reverse=True) if path.is_dir() else []
    by_name = {entry.name.partition(".")[0]: entry for entry in entries}
    if images := {name: by_name[name] for name in datasets if name in by_name}:
        return images
    recognized = open_cache(path, verify="sizes").dataset if is_cache(path) else recognized_name(path)
    if recognized not in datasets:
        raise InvalidInput(
            f"--data {path} is not recognized as any of {', '.join(sorted(datasets))}. "
            "Write --data NAME=DIR for each.",
            code="suite.data.ambiguous",
        )
    # CIFAR-100 and its long tail are read from the same files.
    files = find_dataset(recognized).files_needed
    return {
        name: path
        for name in datasets
        if name == recognized or find_dataset(name).files_needed == files != ""
    }


def find_roots(
    request: Request, images: Mapping[str, Path], wanted: Iterable[tuple[str, int]]
) -> tuple[dict[tuple[str, int], Root], list[str]]:
    """Find the images of each (dataset, side); return a sentence for each dataset that has none."""
    roots, left_out = {}, []
    for dataset, side in dict.fromkeys(wanted):
        store, path = request.results.store(dataset, side), images.get(dataset)
        if path is not None and is_cache(path):
            _check_store(path, dataset, side)
            roots[dataset, side] = Root(dataset, side, path, source=None)
        elif is_cache(store):
            roots[dataset, side] = Root(dataset, side, store, source=None)
        elif path is not None:
            roots[dataset, side] = Root(dataset, side, store, source=path)
        else:
            left_out.append(f"{dataset} is left out: give its images with --data {dataset}=DIR.")
    return roots, list(dict.fromkeys(left_out))


def check_prepared(request: Request, images: Mapping[str, Path], wanted: Iterable[tuple[str, int]]) -> None:
    """Refuse images other than those that the stores here were prepared from: every file is read once."""
    listed: dict[str, Entries] = {}
    for dataset, side in dict.fromkeys(wanted):
        folder, path = request.results.store(dataset, side), images.get(dataset)
        if path is None or is_cache(path) or not is_cache(folder):
            continue
        if dataset not in listed:
            listed[dataset] = _entries(list_images(path, dataset))
        if _entries(open_cache(folder, verify="sizes")) != listed[dataset]:
            raise RunConflict(
                f"{folder} was prepared from other images than {path}. Delete it, or give another --out.",
                code="suite.store.mismatch",
            )


def _entries(table: ImageTable) -> Entries:
    """Name, label and hash of every image."""
    hashes = table.sha256 or hash_files(table)
    return list(zip(table.names, table.labels.tolist(), hashes, strict=True))


def _check_store(path: Path, dataset: str, side: int) -> None:
    table = open_cache(path, verify="sizes")
    prepared = table.side or side
    if (table.dataset, prepared) != (dataset, side):
        raise InvalidInput(
            f"{path} holds {table.dataset} with side {prepared}, not {dataset} with side {side}. "
            "Give the images themselves, or other prepared images.",
            code="suite.store.invalid",
        )


def prepare_root(root: Root, watch: Callable[[int, int], None]) -> None:
    """Decode the images once, or the rest of them; wait while another sweep does so."""
    while root.source is not None:
        try:
            prepare(list_images(root.source, root.dataset), root.folder, side=root.side, watch=watch)
            return
        except RunLocked:
            time.sleep(STORE_POLL)


# What exists already.


def _check_folder(request: Request, suite: Suite) -> None:
    """Refuse a folder of something else, or of another suite whose file has the same name."""
    folder = request.folder
    check_output_folder(folder, "bench")
    used = folder / "suite.yaml"
    if used.is_file() and (folder / "runs.json").is_file():
        title = read_recipe(used).get("title")
        if title != suite.title:
            raise RunConflict(
                f"{folder} holds the results of another suite, {title!r}. Rename this suite's file, give "
                "another --out, or delete the folder (its runs are kept).",
                code="suite.folder.conflict",
            )


def _check_finished(request: Request, finished: Sequence[PlannedRun], images: Mapping[str, Path]) -> None:
    """Refuse to show finished runs of other images or weights than those of this request."""
    sources: dict[Path, ImageTable] = {}
    fingerprints: dict[str, Fingerprint] = {}
    for run in finished:
        data, path = run.config.data, RunDir(request.results.run(run.key)).data_path
        if not path.exists():
            continue
        now = fingerprint_of_weights(run.config) if _has_weights(run.config) else {}
        if data.name in images:
            split = run.config.model_dump_json(include={"data": True, "scenario": {"long_tail"}})
            if split not in fingerprints:
                root, store = images[data.name], request.results.store(data.name, data.side)
                if is_cache(store) and not is_cache(root):  # `check_prepared` found them equal
                    root = store
                sources[root] = sources.get(root) or hashed_images(data.name, root)
                fingerprints[split] = fingerprint_of_images(run.config, sources[root])
            now |= fingerprints[split]
        if what := difference(read_json(path), now):
            raise RunConflict(
                f"{request.out} holds runs of other {what} of {data.name}. Give another --out.",
                code="suite.runs.mismatch",
            )


def hashed_images(dataset: str, root: Path) -> ImageTable:
    """List a dataset's images with the sha256 of each file, as a run sees them once they are prepared."""
    table = open_cache(root, verify="sizes") if is_cache(root) else without_ids(list_images(root, dataset))
    published_as = dataset if find_dataset(dataset).has_published_split else None
    return replace(table, sha256=table.sha256 or hash_files(table), published_as=published_as)


def _has_weights(config: RunConfig) -> bool:
    weights = config.network.weights
    return weights in (None, "hub") or Path(str(weights)).is_file()
