"""What a call of `medcil bench` has to do: the runs of a suite that are asked for, and their images."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml

from medcil.build import build_state
from medcil.config import RunConfig
from medcil.data.cache import is_store
from medcil.data.source import Source
from medcil.errors import InvalidInput, RunConflict, nearest
from medcil.experiments.data_fingerprint import (
    Fingerprint,
    difference,
    fingerprint_of_images,
    fingerprint_of_weights,
    list_images,
)
from medcil.experiments.launchers.local import bearable
from medcil.experiments.suite import Place, Suite, load_suite
from medcil.experiments.suite_data import Root, check_prepared, find_roots, given_images, needs_files
from medcil.experiments.suite_runs import PlannedRun, plan, with_root
from medcil.experiments.sweep_request import Request
from medcil.recipe import read_recipe
from medcil.storage.atomic import read_json, write_bytes
from medcil.storage.overwrite_guard import check_output_folder
from medcil.storage.run_dir import RunDir
from medcil.training.environment import visible_gpus
from medcil.training.inference import choose_device

THREADS = 1
"""Of a run, unless a setting says otherwise. Sums depend on their number, so it is the same on every machine;
as many runs as there are cores fill them."""


@dataclass(frozen=True)
class Work:
    request: Request
    suite: Suite
    asked: tuple[PlannedRun, ...]
    """What this call is about."""
    planned: tuple[PlannedRun, ...]
    """All of the suite."""
    roots: Mapping[tuple[str, int], Root]
    """(dataset, side) -> where its images are, for those that unfinished runs need"""
    left_out: tuple[str, ...]

    @property
    def listed(self) -> list[PlannedRun]:
        """Those asked for and the suite's other runs that are finished by now: what its tables show."""
        keys = {run.key for run in self.asked}
        return [run for run in self.planned if run.key in keys or self.request.results.is_finished(run.key)]

    @property
    def unfinished(self) -> list[PlannedRun]:
        return [run for run in self.asked if not self.request.results.is_finished(run.key)]

    def state_of(self, run: PlannedRun) -> str:
        """`finished`, `begun` or `to do`."""
        results = self.request.results
        if results.is_finished(run.key):
            return "finished"
        return "begun" if results.run(run.key).exists() else "to do"

    def n_gpus(self) -> int:
        """This machine's, if the runs use them."""
        executions = [run.config.execution for run in self.asked]
        on_gpu = any(choose_device(execution).type == "cuda" for execution in executions)
        return torch.cuda.device_count() if on_gpu else 0

    def gpus_to_share(self) -> Sequence[str]:
        """Those of which each run gets one; none where there is no choice, or where a run needs several."""
        return visible_gpus() if self.n_gpus() > 1 and self.processes == 1 else ()

    @property
    def processes(self) -> int:
        """Of a run, at most."""
        return max((run.config.execution.processes for run in self.asked), default=1)

    def bearable(self) -> int:
        """Runs that this machine bears at once."""
        threads = max(self.recipe_of(run).execution.threads or 1 for run in self.asked)
        return bearable(n_gpus=-(-self.n_gpus() // self.processes), threads=threads)

    def recipe_of(self, run: PlannedRun) -> RunConfig:
        """As it is computed: with the place of its images, and so many threads."""
        config, data = run.config, run.config.data
        if (data.name, data.side) in self.roots:
            config = with_root(config, self.roots[data.name, data.side].folder.absolute())
        changes: dict[str, Any] = {}
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


def check_networks(work: Work) -> None:
    """Build each network of the unfinished runs once, with its weights: minutes before images are decoded."""
    networks: set[str] = set()
    for config in (run.config for run in work.unfinished):
        network = config.network.model_dump_json()
        if network not in networks:
            build_state(config)
            networks.add(network)


def choose_work(request: Request) -> Work:
    """Everything that can be wrong with a request shows here, before anything is written."""
    suite = load_suite(request.suite)
    check_output_folder(request.folder, "bench")
    _check_title(request, suite)
    planned = plan(suite, _settings(request))
    chosen = _chosen(request, planned)
    _check_choice(request, planned, chosen)
    unfinished = [run for run in chosen if not request.results.is_finished(run.key)]
    wanted = [(run.config.data.name, run.config.data.side) for run in unfinished]
    known = {run.config.data.name for run in planned if needs_files(run.config.data.name)}
    given = given_images(request, known)
    check_prepared(request, given, [(run.config.data.name, run.config.data.side) for run in planned])
    roots, left_out = find_roots(request, given, [pair for pair in wanted if needs_files(pair[0])])
    lacking = {run.key for run in unfinished if not _has_images(run, roots)}
    asked = tuple(run for run in chosen if run.key not in lacking)
    if not asked:
        raise InvalidInput("\n".join(["No run has its images: give their place with --data.", *left_out]))
    for run in asked:
        _check_weights(run.config)
    _check_finished(request, [run for run in planned if request.results.is_finished(run.key)], given)
    return Work(request, suite, asked, tuple(planned), roots, tuple(left_out))


def _check_title(request: Request, suite: Suite) -> None:
    """A suite is known by its file's name; another of the same name would take the place of its results."""
    used = request.folder / "suite.yaml"
    if not used.is_file() or not (request.folder / "runs.json").is_file():
        return
    title = read_recipe(used).get("title")
    if title != suite.title:
        raise RunConflict(
            f"{request.folder} holds the results of another suite, {title!r}: rename the file of this one, "
            "give another --out, or delete the folder (its runs are kept)."
        )


def _settings(request: Request) -> list[str]:
    """`--weights` and `--device` in the words of a recipe."""
    settings = list(request.settings)
    if request.weights is not None:
        settings.append(f"network.weights={json.dumps(request.weights)}")
    if request.device != "auto":
        settings.append(f"execution.device={request.device}")
    return settings


def _chosen(request: Request, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Runs at a place whose row, setting, order and seed are all asked for."""
    rows = _named(request.only, {place.row for run in planned for place in run.places})
    settings = _named(request.only, {place.setting for run in planned for place in run.places})

    def is_chosen(place: Place) -> bool:
        return (
            place.row in rows
            and place.setting in settings
            and (str(place.order) in request.orders or not request.orders)
            and (str(place.seed) in request.seeds or not request.seeds)
        )

    return [run for run in planned if any(map(is_chosen, run.places))]


def _named(patterns: Sequence[str], names: Set[str]) -> Set[str]:
    """The names like any of the patterns; all of them where the patterns are about something else."""
    return {name for name in names if any(_is_like(name, pattern) for pattern in patterns)} or names


def _is_like(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def _check_choice(request: Request, planned: Sequence[PlannedRun], chosen: Sequence[PlannedRun]) -> None:
    places = [place for run in planned for place in run.places]
    orders = [str(place.order) for place in places]
    seeds = [str(place.seed) for place in places if place.seed is not None]
    if request.seeds and not seeds:
        raise InvalidInput(
            "--seeds: the suite names no seeds. Write `seeds: [0, 1]` into its file, or leave --seeds out."
        )
    for what, asked, there in (("order", request.orders, orders), ("seed", request.seeds, seeds)):
        for name in asked:
            if name not in there:
                known = nearest(name, dict.fromkeys(there))
                raise InvalidInput(f"--{what}s: the suite has no {what} {name!r}. {known}")
    names = list(dict.fromkeys(name for place in places for name in (place.row, place.setting)))
    for pattern in request.only:
        if not any(_is_like(name, pattern) for name in names):
            raise InvalidInput(f"--only {pattern!r} is no row or setting. {nearest(pattern, names)}")
    if not chosen:
        raise InvalidInput("--only, --orders and --seeds leave no run: choose fewer of them.")


def _has_images(run: PlannedRun, roots: Mapping[tuple[str, int], Root]) -> bool:
    data = run.config.data
    return not needs_files(data.name) or (data.name, data.side) in roots


def _check_finished(request: Request, finished: Sequence[PlannedRun], given: Mapping[str, Path]) -> None:
    """Refuse to show finished runs of other images or weights beside those that are given now."""
    sources: dict[Path, Source] = {}
    known: dict[str, Fingerprint] = {}
    for run in finished:
        data, path = run.config.data, RunDir(request.results.run(run.key)).data_path
        if not path.exists():
            continue
        now = fingerprint_of_weights(run.config) if _has_weights(run.config) else {}
        if data.name in given:
            source = run.config.model_dump_json(include={"data": True, "scenario": {"long_tail"}})
            if source not in known:
                root, store = given[data.name], request.results.store(data.name, data.side)
                if is_store(store) and not is_store(root):  # `check_prepared` found them equal
                    root = store
                sources[root] = sources.get(root) or list_images(data.name, root)
                known[source] = fingerprint_of_images(run.config, sources[root])
            now |= known[source]
        what = difference(read_json(path), now)
        if what is not None:
            raise RunConflict(f"{request.out} holds runs of other {what} of {data.name}: give another --out.")


def _has_weights(config: RunConfig) -> bool:
    """Or else it is finished and asks for none: they may have gone since."""
    weights = config.network.weights
    return weights in (None, "hub") or Path(str(weights)).is_file()


def _check_weights(config: RunConfig) -> None:
    if not _has_weights(config):
        raise InvalidInput(
            f"network.weights: there is no file {config.network.weights}. Give one with --weights."
        )
