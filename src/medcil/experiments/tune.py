"""Chooses α, λ_d and λ_k on images held out of training, never on the test set; the result is a recipe.

A trial is one run for each class order, in OUT/runs under the key of its recipe. What is finished is only
read, so that the same search again goes on where it stopped.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from filelock import FileLock, Timeout

from medcil.build import build_stream, parse_recipe, resolve
from medcil.config import RunConfig
from medcil.data.source import find_source, open_source, train_and_test
from medcil.data.stream import Stream
from medcil.errors import InvalidInput, MedcilError, RunConflict, RunLocked
from medcil.experiments.data_fingerprint import (
    Fingerprint,
    difference,
    fingerprint_of_images,
    fingerprint_of_weights,
    list_images,
)
from medcil.experiments.run import RunWatch, run_experiment
from medcil.experiments.suite_runs import run_key
from medcil.experiments.tune_report import recipe_text, table_text
from medcil.experiments.tune_search import SAMPLERS, Parameter, Suggest, Trial, Values, parameters
from medcil.methods.presets import alpha_from_counts
from medcil.recipe import differences, laid_over, leaves, nested
from medcil.storage.atomic import read_json, write_bytes, write_json
from medcil.storage.overwrite_guard import claim_output_folder
from medcil.storage.run_dir import RunDir

Objective = Literal["acc_balanced", "acc_micro", "last_balanced"]
Order = int | str | tuple[int | str, ...]
HELD_OUT = 0.2


@dataclass(frozen=True)
class Search:
    """What is chosen, on what, and by which measure."""

    recipe: RunConfig
    """Resolved; its own values are the first trial."""
    out: Path
    sampler: str = "optuna"
    objective: Objective = "acc_balanced"
    orders: tuple[Order, ...] = ()
    """Of the classes; none: the recipe's alone."""
    seed: int = 0

    @property
    def space(self) -> Mapping[str, Parameter]:
        return parameters(self.recipe.method)

    @property
    def all_orders(self) -> tuple[Order, ...]:
        return self.orders or (self.recipe.scenario.order,)

    @property
    def held_out(self) -> float:
        return self.recipe.data.held_out or HELD_OUT

    def config(self, values: Values, order: Order) -> RunConfig:
        """One run of a trial."""
        content = self.with_values(values).model_dump(mode="json")
        for key, value in (("data.held_out", self.held_out), ("scenario.order", order)):
            content = laid_over(content, nested(key, value))
        return resolve(parse_recipe(content))

    def with_values(self, values: Values) -> RunConfig:
        """The recipe with these values, tested on its test images."""
        content = laid_over(self.recipe.model_dump(mode="json"), {"data": {"held_out": None}})
        for key, value in values.items():
            content = laid_over(content, nested(key, value))
        return resolve(parse_recipe(content))

    def own_values(self) -> dict[str, float]:
        said = dict(leaves(self.recipe.method, "method."))
        return {key: float(said[key]) for key in self.space}

    def data_seen(self) -> Fingerprint:
        """Fingerprint the images and weights as the runs do; synthetic images are always the same."""
        config, root = self.config({}, self.all_orders[0]), self.recipe.data.root
        images = {} if root is None else fingerprint_of_images(config, list_images(config.data.name, root))
        return {**images, **fingerprint_of_weights(config)}

    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to go on."""
        return {
            "recipe": self.with_values({}).identity(),
            "data": self.data_seen(),
            "held_out": self.held_out,
            "orders": [list(order) if isinstance(order, tuple) else order for order in self.all_orders],
            "objective": self.objective,
            "sampler": self.sampler,
            "seed": self.seed,
        }


class Watch:
    """Who wants to know how a search goes; this one does not."""

    def begins(self, number: int, values: Values, order: Order) -> RunWatch:
        return lambda task, n_tasks, progress: None

    def ended(self, number: int, trial: Trial) -> None: ...


def tune(search: Search, n_trials: int, watch: Watch | None = None) -> dict[str, Any]:
    """So many trials, or what of them is not done; writes as it goes, and returns, what tuning.json holds."""
    suggest = SAMPLERS[search.sampler](search.space, search.seed)
    with _alone(search.out):
        return _go_on(search, n_trials, suggest, watch or Watch())


def _go_on(search: Search, n_trials: int, suggest: Suggest, watch: Watch) -> dict[str, Any]:
    record = _record_so_far(search)
    streams: dict[Order, Stream] = {}
    trials: list[Trial] = []
    for number in range(max(n_trials, len(record["trials"]))):
        if number == len(record["trials"]):
            values = suggest(trials) if trials else search.own_values()
            if values is None:
                break
            record["trials"].append({"number": number, "values": dict(values), "state": "unfinished"})
            _write(search, record)
        entry = record["trials"][number]
        if entry["state"] == "unfinished":
            _run_trial(search, entry, streams, watch)
            _write(search, record)
        trials.append(Trial(entry["values"], entry["score"]))
        watch.ended(number, trials[-1])
    if record["best"] is None:
        raise MedcilError(f"Every trial failed: {record['trials'][0]['why']}")
    return record


def tune_by_counts(search: Search) -> dict[str, Any]:
    """α from the number of training images of each class; nothing is trained, the weights stay."""
    key = next((key for key, parameter in search.space.items() if parameter.symbol == "α"), None)
    if key is None:
        raise InvalidInput("--sampler counts chooses α, which this method has not: choose optuna or grid.")
    with _alone(search.out):
        return _count(search, key)


def _count(search: Search, key: str) -> dict[str, Any]:
    record = _record_so_far(search)
    data = search.recipe.data.model_copy(update={"held_out": None})  # α is for all images there are
    source = open_source(find_source(data.name), data.root, side=data.side)
    _, train, _ = train_and_test(source, data, search.recipe.scenario.long_tail)
    counts = np.bincount(source.labels[train], minlength=len(source.class_names)).tolist()
    per_class = search.recipe.memory.quota(len(counts))
    chosen = {**search.own_values(), key: alpha_from_counts(counts, per_class)}
    record |= {"class_counts": counts, "exemplars_per_class": per_class, "chosen": chosen}
    _write(search, record)
    return record


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two searches would each write over what the other has tried."""
    claim_output_folder(folder, "tune")
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RunLocked(
            f"Another process is searching in {folder}. Wait for it, or give another --out."
        ) from None
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to ({error.strerror}). Give another --out.") from None
    try:
        yield
    finally:
        lock.release()


def _record_so_far(search: Search) -> dict[str, Any]:
    """tuning.json, or a new one. That of another search is left as it is."""
    path, identity = search.out / "tuning.json", search.identity()
    if not path.exists():
        for data in search.out.glob("runs/*/data.json"):  # of a search that has lost its record
            if what := difference(read_json(data), identity["data"]):
                raise RunConflict(f"{search.out} holds runs of other {what}. Give another --out.")
        symbols = {key: parameter.symbol for key, parameter in search.space.items()}
        head = {"format": 1, "search": identity, "parameters": symbols}
        return {**head, "trials": [], "best": None, "chosen": None}
    record: dict[str, Any] = read_json(path)
    changes = list(differences(record["search"], identity))
    if changes:
        raise RunConflict(
            f"{search.out} holds another search. Give another --out, or the options it was begun with.\n"
            + "\n".join(f"  {change}" for change in changes)
        )
    return record


def _run_trial(search: Search, entry: dict[str, Any], streams: dict[Order, Stream], watch: Watch) -> None:
    """Computes what is missing of a trial's runs, and writes into its entry how it went."""
    entry["runs"], entry["score"], entry["why"] = [], None, None
    for order in search.all_orders:
        config = search.config(entry["values"], order)
        key = run_key(config)
        folder = search.out / "runs" / key
        said = watch.begins(entry["number"], entry["values"], order)
        try:
            metrics = _finished_metrics(folder)
            if metrics is None:
                if order not in streams:
                    streams[order] = _held_out_stream(config)
                metrics = run_experiment(config, folder, stream=streams[order], watch=said)
        except MedcilError as error:
            if type(error) is not MedcilError:  # not of these values, but of the recipe or the folder
                raise
            entry |= {"state": "failed", "why": str(error).splitlines()[0]}
            return
        score = metrics[search.objective]
        entry["runs"].append({"order": order, "key": key, "path": f"runs/{key}", "score": score})
    entry["score"] = float(np.mean([run["score"] for run in entry["runs"]]))
    entry["state"] = "finished"


def _finished_metrics(folder: Path) -> dict[str, Any] | None:
    path = RunDir(folder).metrics_path
    metrics: dict[str, Any] = read_json(path) if path.exists() else {}
    return metrics if metrics.get("finished") else None


def _held_out_stream(config: RunConfig) -> Stream:
    stream = build_stream(config)
    counts = stream.test.class_counts(len(stream.class_names)).tolist()
    lacking = [name for name, n in zip(stream.class_names, counts, strict=True) if not n]
    if lacking:
        raise InvalidInput(
            f"No image of {', '.join(lacking)} can be held out, so that it would have no say: add images, "
            "leave the class out, or let the class counts choose α (--sampler counts)."
        )
    return stream


def _write(search: Search, record: dict[str, Any]) -> None:
    """tuning.json, tuning.md and, once there is a best trial, tuned.yaml."""
    finished = [trial for trial in record["trials"] if trial["state"] == "finished"]
    if finished:
        best = max(finished, key=lambda trial: (trial["score"], -trial["number"]))
        record |= {"best": best["number"], "chosen": best["values"]}
    if record["chosen"] is not None:
        content = search.with_values(record["chosen"]).model_dump(mode="json")
        recipe = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_bytes(search.out / "tuned.yaml", (recipe_text(record) + recipe).encode())
    write_bytes(search.out / "tuning.md", table_text(record).encode())
    write_json(search.out / "tuning.json", record)
