"""Plan a sweep: the runs of a suite, those selected of them, and where their images are.

Everything that can be wrong with a request is reported here, before anything is written.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from medcil.build import RunConfig, build_state, parse_recipe, resolve, with_preset
from medcil.data.cache import is_cache, open_cache, prepare
from medcil.data.image_table import ImageTable, hash_files, without_ids
from medcil.data.sources import find_dataset, list_images
from medcil.errors import InvalidInput, RunConflict, RunLocked, nearest
from medcil.experiments.launcher import parallel_runs
from medcil.experiments.run import Fingerprint, difference, fingerprint_of_images, fingerprint_of_weights
from medcil.experiments.suite import Place, Request, Suite, cells, load_suite
from medcil.models.weights import find_weights
from medcil.recipe import leaves, read_recipe, with_values
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

ImageSize = tuple[str, int]
"""A dataset and the side of its images."""


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the places in the suite that show it."""

    key: str
    config: RunConfig
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """`balanced · 3-2 · order 0`, the first of its places."""
        place = self.places[0]
        return f"{place.row} · {place.setting} · order {place.order_and_seed}"

    @property
    def images(self) -> ImageSize | None:
        """The dataset and side of its images; None: they are synthetic."""
        data = self.config.data
        return None if find_dataset(data.name).is_synthetic else (data.name, data.side)


@dataclass(frozen=True)
class Root:
    """The images of a dataset at one size."""

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
    roots: Mapping[ImageSize, Root]
    """The images of unfinished runs."""
    left_out: tuple[str, ...]
    """A sentence for each dataset without images."""

    @property
    def shown(self) -> list[PlannedRun]:
        """The runs in the tables: the selected ones, and others of the suite that are finished."""
        selected = {run.key for run in self.runs}
        results = self.request.results
        return [run for run in self.all_runs if run.key in selected or results.is_finished(run.key)]

    @property
    def unfinished(self) -> list[PlannedRun]:
        return [run for run in self.runs if not self.request.results.is_finished(run.key)]

    @property
    def _processes(self) -> int:
        return max(run.config.execution.processes for run in self.runs)

    def _n_gpus(self) -> int:
        on_gpu = any(choose_device(run.config.execution).type == "cuda" for run in self.runs)
        return torch.cuda.device_count() if on_gpu else 0

    def gpus_to_share(self) -> Sequence[str]:
        """The GPUs of which each run gets one; empty with a single GPU, or if a run needs several."""
        return visible_gpus() if self._n_gpus() > 1 and self._processes == 1 else ()

    def parallel_runs(self) -> int:
        threads = max(run.config.execution.threads or THREADS for run in self.runs)
        return parallel_runs(n_gpus=-(-self._n_gpus() // self._processes), threads=threads)

    def write_recipe(self, run: PlannedRun) -> Path:
        """Write the recipe as it is computed: with its threads and the location of images and weights."""
        changes: dict[str, Any] = {"execution.threads": run.config.execution.threads or THREADS}
        if run.images and (root := self.roots.get(run.images)):
            changes["data.root"] = str(root.folder.absolute())
        weights = run.config.network.weights
        if weights is not None and Path(weights).is_file():
            changes["network.weights"] = str(Path(weights).absolute())
        content = with_values(run.config.model_dump(mode="json"), changes)
        path = self.request.results.recipe(run.key)
        write_bytes(path, yaml.safe_dump(content, sort_keys=False).encode())
        return path


def plan_sweep(request: Request) -> SweepPlan:
    """Select the runs of a request and find their images; write nothing."""
    suite = load_suite(request.suite)
    _check_folder(request, suite)
    all_runs = runs_of_suite(suite, _settings(request))
    images = images_of(request, {run.images[0] for run in all_runs if run.images})
    selected = _select(request, all_runs)
    unfinished = [run for run in selected if not request.results.is_finished(run.key)]
    roots = find_roots(request, images, [run.images for run in unfinished if run.images])
    lacking = {run.key: run.images[0] for run in unfinished if run.images and run.images not in roots}
    left_out = tuple(
        f"{name} is left out: give its images with --data {name}=DIR."
        for name in dict.fromkeys(lacking.values())
    )
    runs = tuple(run for run in selected if run.key not in lacking)
    if not runs:
        raise InvalidInput(
            "\n".join(["No run has its images. Give their location with --data.", *left_out]),
            code="suite.images.missing",
        )
    for run in runs:
        if not _has_weights(run.config):
            raise InvalidInput(
                f"network.weights: no such file: {run.config.network.weights}. Give one with --weights.",
                code="suite.weights.missing",
            )
    _check_same_images(request, images, all_runs)
    return SweepPlan(request, suite, runs, tuple(all_runs), roots, left_out)


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
    for place, recipe in cells(suite):
        own, changed = (dict(leaves(with_preset(recipe, s))) for s in ((), settings))
        for key, option in options.items():
            if changed.get(key) != own.get(key):  # one run would pass for several
                raise InvalidInput(
                    f"--set changes {key}, which distinguishes the runs of this suite. Select them with "
                    f"{option}, or write a suite with other values.",
                    code="suite.setting.conflict",
                )
        config = resolve(parse_recipe(recipe, settings, source=f"{suite.title}, {place.row}"))
        key = run_key(config)
        places = planned[key].places if key in planned else ()
        planned[key] = PlannedRun(key, config, (*places, place))
    return list(planned.values())


def run_key(config: RunConfig) -> str:
    """Hash a resolved recipe: equal runs have equal keys, wherever they are computed."""
    # Unset keys are left out, so that a key that recipes gain later does not rename earlier runs.
    values = {key: value for key, value in leaves(config.identity()) if value is not None}
    content = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


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
    names = dict.fromkeys(name for place in places for name in (place.row, place.setting))
    for pattern in request.only:
        if not _like(pattern, names):
            raise InvalidInput(
                f"--only {pattern!r} matches no row or setting. {nearest(pattern, names)}",
                code="suite.pattern.unknown",
            )
    _check_names("order", request.orders, [str(place.order) for place in places])
    _check_names("seed", request.seeds, [str(place.seed) for place in places if place.seed is not None])
    rows = _matching(request.only, {place.row for place in places})
    settings = _matching(request.only, {place.setting for place in places})
    orders = request.orders or [str(place.order) for place in places]
    seeds = request.seeds or [str(place.seed) for place in places]
    wanted = set(product(rows, settings, orders, seeds))
    selected = [
        run
        for run in runs
        if any((p.row, p.setting, str(p.order), str(p.seed)) in wanted for p in run.places)
    ]
    if not selected:
        raise InvalidInput(
            "--only, --orders and --seeds select no run. Give fewer of them.", code="suite.selection.empty"
        )
    return selected


def _check_names(kind: str, names: Sequence[str], available: Sequence[str]) -> None:
    for name in names:
        if name not in available:
            raise InvalidInput(
                f"--{kind}s: the suite has no {kind} {name!r}. {nearest(name, dict.fromkeys(available))}",
                code="suite.selection.unknown",
            )


def _matching(patterns: Sequence[str], names: Set[str]) -> Set[str]:
    """Find the names that any pattern matches; all of them if the patterns are about something else."""
    return {name for pattern in patterns for name in _like(pattern, names)} or names


def _like(pattern: str, names: Collection[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name.lower(), pattern.lower())]


# Their images.


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
    """Find the datasets in one path: what is named after each in a folder, or the path itself for all."""
    entries = {entry.name.partition(".")[0]: entry for entry in sorted(path.glob("*"), reverse=True)}
    named = {name: entries[name] for name in datasets if name in entries and len(datasets) > 1}
    return named or dict.fromkeys(datasets, path)


def find_roots(
    request: Request, images: Mapping[str, Path], wanted: Iterable[ImageSize]
) -> dict[ImageSize, Root]:
    """Find the images of each dataset and side; those without any are not in the result."""
    roots = {}
    for dataset, side in dict.fromkeys(wanted):
        store, path = request.results.store(dataset, side), images.get(dataset)
        if path is not None and is_cache(path):
            table = open_cache(path, verify="sizes")
            if (table.dataset, table.side) != (dataset, side):
                raise InvalidInput(
                    f"{path} holds {table.dataset} with side {table.side}, not {dataset} with side {side}. "
                    "Give the images themselves, or other prepared images.",
                    code="suite.store.invalid",
                )
            roots[dataset, side] = Root(path, source=None)
        elif path is not None or is_cache(store):
            roots[dataset, side] = Root(store, source=None if is_cache(store) else path)
    return roots


def prepare_images(plan: SweepPlan, watch: Callable[[int, int], None]) -> None:
    """Decode the images once, or the rest of them; wait while another sweep does so."""
    for (dataset, side), root in plan.roots.items():
        while root.source is not None and not is_cache(root.folder):
            try:
                prepare(list_images(root.source, dataset), root.folder, side=side, watch=watch)
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


def _check_same_images(request: Request, images: Mapping[str, Path], runs: Sequence[PlannedRun]) -> None:
    """Refuse stores and finished runs of other images or weights than those given; read each file once."""
    results = request.results
    finished = [run for run in runs if results.is_finished(run.key)]
    recorded = [(run, path) for run in finished if (path := RunDir(results.run(run.key)).data_path).exists()]
    sizes = {run.images for run in runs if run.images and run.images[0] in images}
    stores = {results.store(*size): size[0] for size in sizes if not is_cache(images[size[0]])}
    stores = {folder: name for folder, name in stores.items() if is_cache(folder)}
    needed = {*stores.values(), *(run.config.data.name for run, _ in recorded)}
    tables = {name: hashed_images(name, path) for name, path in images.items() if name in needed}
    for folder, name in stores.items():
        if _entries(open_cache(folder, verify="sizes")) != _entries(tables[name]):
            raise RunConflict(
                f"{folder} was prepared from other images than {images[name]}. Delete it, or give another "
                "--out.",
                code="suite.store.mismatch",
            )
    fingerprints: dict[str, Fingerprint] = {}
    for run, path in recorded:
        name = run.config.data.name
        now = fingerprint_of_weights(run.config) if _has_weights(run.config) else {}
        if name in tables:
            split = run.config.model_dump_json(include={"data": True, "scenario": {"long_tail"}})
            if split not in fingerprints:
                fingerprints[split] = fingerprint_of_images(run.config, tables[name])
            now |= fingerprints[split]
        if what := difference(read_json(path), now):
            raise RunConflict(
                f"{request.out} holds runs of other {what} of {name}. Give another --out.",
                code="suite.runs.mismatch",
            )


def _entries(table: ImageTable) -> list[tuple[Any, ...]]:
    """List the name, label and hash of every image."""
    return list(zip(table.names, table.labels.tolist(), table.sha256 or (), strict=True))


def hashed_images(dataset: str, root: Path) -> ImageTable:
    """List a dataset's images with the sha256 of each file, as a run sees them once they are prepared."""
    table = open_cache(root, verify="sizes") if is_cache(root) else without_ids(list_images(root, dataset))
    published_as = dataset if find_dataset(dataset).has_published_split else None
    return replace(table, sha256=table.sha256 or hash_files(table), published_as=published_as)


def _has_weights(config: RunConfig) -> bool:
    try:
        return config.network.weights is None or bool(
            find_weights(config.network.weights, config.network.backbone)
        )
    except InvalidInput:
        return False
