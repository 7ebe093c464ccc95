"""Choose α, λ_d and λ_k on images held out of training, never on the test set; the result is a recipe.

A trial is one run for each class order, in OUT/runs under the key of its recipe. The study is an Optuna
journal, OUT/study.journal, of completed trials. The next values are a function of the seed and of the trials
before, and finished runs are only read: an interrupted search resumes as if it had not been interrupted.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any, Literal

import numpy as np
import yaml

from medcil.build import build_stream, parse_recipe, resolve
from medcil.config import RunConfig
from medcil.data.sources import open_dataset
from medcil.data.splits import train_and_test
from medcil.data.stream import Stream
from medcil.errors import InvalidInput, MedcilError, RunConflict
from medcil.experiments.plan import run_key
from medcil.experiments.run import (
    Fingerprint,
    RunWatch,
    difference,
    fingerprint_of_images,
    fingerprint_of_weights,
    run_experiment,
)
from medcil.methods.presets import alpha_from_counts
from medcil.recipe import differences, laid_over, leaves, nested, place_of
from medcil.storage.atomic import locked_folder, read_json, write_bytes
from medcil.storage.overwrite_guard import claim_output_folder
from medcil.storage.run_dir import RunDir

Values = Mapping[str, float]
"""Key of a recipe -> value."""
Order = int | str | tuple[int | str, ...]
HELD_OUT = 0.2
STUDY = "tune"
STARTUP = 5
"""Random trials before the sampler models the objective."""
HEAD, TITLE = "Chosen by medcil tune.", "# Tuning"


@dataclass(frozen=True)
class Parameter:
    symbol: str
    low: float
    high: float
    is_logarithmic: bool
    grid: tuple[float, ...]
    """The paper's values."""

    def rounded(self, value: float) -> float:
        """Round a value as a person would write it; the ends of the range are such numbers."""
        return float(f"{value:.2g}") if self.is_logarithmic else round(value, 2)


ALPHA = Parameter("α", 0.05, 1.0, is_logarithmic=False, grid=(0.1, 0.3, 0.5, 0.7, 0.9))
MARGIN_WEIGHT = Parameter("λ_d", 0.01, 1.0, is_logarithmic=True, grid=(0.1, 0.2, 0.3, 0.4, 0.5))
DISTILLATION_WEIGHT = Parameter("λ_k", 0.01, 1.0, is_logarithmic=True, grid=(0.1, 0.25, 0.5, 0.75, 1.0))


@dataclass(frozen=True)
class Trial:
    """A completed trial; `runs` holds the order, key and score of each of its runs."""

    values: Values
    score: float | None
    """None: a run failed."""
    runs: tuple[Mapping[str, Any], ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class Choice:
    """The values chosen, and a sentence about how."""

    values: Values
    explanation: str
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class Search:
    """What to choose, on which data, and by which measure."""

    recipe: RunConfig
    """Resolved; its own values are the first trial."""
    out: Path
    sampler: str = "optuna"
    objective: Literal["acc_balanced", "acc_micro", "last_balanced"] = "acc_balanced"
    orders: tuple[Order, ...] = ()
    """Class orders; empty: that of the recipe."""
    seed: int = 0

    @property
    def space(self) -> dict[str, Parameter]:
        """Map the keys of the recipe that can be chosen to their ranges."""
        method = self.recipe.method
        plugins = method.get("plugins") or {}
        where, own = place_of("balanced", method) or ("", {})
        classification, margin = plugins.get("classification"), plugins.get("margin")
        dropped = plugins.get("drop") or ()
        space: dict[str, Parameter] = {}
        if classification is not None:
            if classification["kind"] == "cil_balanced":
                space["method.plugins.classification.alpha"] = ALPHA
        elif "alpha" in own and own.get("classification", "cil_balanced") == "cil_balanced":
            space[f"{where}.alpha"] = ALPHA
        if margin is not None:
            space["method.plugins.margin.weight"] = MARGIN_WEIGHT
        elif "margin_weight" in own and own.get("margin") != "none" and "margin" not in dropped:
            space[f"{where}.margin_weight"] = MARGIN_WEIGHT
        if own.get("distillation", "none") != "none" and "distillation" not in dropped:
            space[f"{where}.distillation_weight"] = DISTILLATION_WEIGHT
        if not space:
            raise InvalidInput(
                f"method: {method['name']} has neither α, λ_d nor λ_k to choose. Tune `balanced`, or plug "
                "its losses in: --set method.plugins.classification=cil_balanced.",
                code="tune.parameters.missing",
            )
        return space

    @property
    def all_orders(self) -> tuple[Order, ...]:
        return self.orders or (self.recipe.scenario.order,)

    @property
    def held_out(self) -> float:
        return self.recipe.data.held_out or HELD_OUT

    def config(self, values: Values, order: Order) -> RunConfig:
        """Build the recipe of one run of a trial."""
        content = self.with_values(values).model_dump(mode="json")
        for key, value in (("data.held_out", self.held_out), ("scenario.order", order)):
            content = laid_over(content, nested(key, value))
        return resolve(parse_recipe(content))

    def with_values(self, values: Values) -> RunConfig:
        """Build the recipe with these values, evaluated on its test images."""
        content = laid_over(self.recipe.model_dump(mode="json"), {"data": {"held_out": None}})
        for key, value in values.items():
            content = laid_over(content, nested(key, value))
        return resolve(parse_recipe(content))

    def own_values(self) -> dict[str, float]:
        values = dict(leaves(self.recipe.method, "method."))
        return {key: float(values[key]) for key in self.space}

    def fingerprint(self) -> Fingerprint:
        """Identify the images and weights as the runs do; synthetic images are always the same."""
        config, root = self.config({}, self.all_orders[0]), self.recipe.data.root
        weights = fingerprint_of_weights(config)
        if root is None:
            return weights
        source = open_dataset(config.data.name, root, side=config.data.side)
        return {**fingerprint_of_images(config, source), **weights}

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a search to resume."""
        return {
            "recipe": self.with_values({}).identity(),
            "data": self.fingerprint(),
            "held_out": self.held_out,
            "orders": [list(order) if isinstance(order, tuple) else order for order in self.all_orders],
            "objective": self.objective,
            "sampler": self.sampler,
            "seed": self.seed,
        }


class Watch:
    """Follows a search; this one ignores it."""

    def begins(self, number: int, values: Values, order: Order) -> RunWatch:
        return lambda task, n_tasks, progress: None

    def ended(self, number: int, trial: Trial) -> None: ...


def tune(search: Search, n_trials: int, watch: Watch | None = None) -> Choice:
    """Complete so many trials, those before included; keep tuning.md and tuned.yaml up to date."""
    space, optuna, watch = search.space, _import_optuna(), watch or Watch()
    with _locked(search.out):
        study = _open_study(search, optuna)
        streams: dict[Order, Stream] = {}
        trials = [_recorded(trial.user_attrs) for trial in study.trials]
        for number, trial in enumerate(trials):
            watch.ended(number, trial)
        while len(trials) < n_trials and (values := suggest(search, trials, optuna)) is not None:
            trials.append(_run_trial(search, len(trials), values, streams, watch))
            study.add_trial(_optuna_trial(trials[-1], space, optuna))
            _write(search, _choice(search, trials))
            watch.ended(len(trials) - 1, trials[-1])
        choice = _choice(search, trials)
        if choice is None:
            raise MedcilError(f"Every trial failed: {trials[0].why}", code="tune.trials.failed")
        _write(search, choice)
        return choice


def suggest(search: Search, trials: Sequence[Trial], optuna: ModuleType) -> Values | None:
    """Suggest the next values; None if there are no more.

    `grid`: every combination of the paper's values, in a random order, so that the first ones are spread.
    `optuna`: a tree-structured Parzen estimator, random at first.
    """
    space, number = search.space, len(trials)
    if not trials:
        return search.own_values()
    if search.sampler == "grid":
        points = [
            dict(zip(space, point, strict=True)) for point in product(*(p.grid for p in space.values()))
        ]
        order = np.random.RandomState(search.seed).permutation(len(points))
        tried = [dict(trial.values) for trial in trials]
        return next((points[i] for i in order if points[i] not in tried), None)
    digest = hashlib.sha256(f"{search.seed} {number}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials([_optuna_trial(trial, space, optuna) for trial in trials])
    params = study.ask(_distributions(space, optuna)).params
    return {key: p.rounded(params[key]) for key, p in space.items()}


def tune_by_counts(search: Search) -> Choice:
    """Choose α from the training images of each class; train nothing and keep the weights."""
    key = next((key for key, parameter in search.space.items() if parameter.symbol == "α"), None)
    if key is None:
        raise InvalidInput(
            "--sampler counts chooses α, but this method has none. Use optuna or grid.",
            code="tune.alpha.missing",
        )
    with _locked(search.out):
        data = search.recipe.data.model_copy(update={"held_out": None})  # α is for all images
        source = open_dataset(data.name, data.root, side=data.side)
        _, train, _ = train_and_test(source, data, search.recipe.scenario.long_tail)
        counts = np.bincount(source.labels[train], minlength=len(source.class_names)).tolist()
        per_class = search.recipe.memory.quota(len(counts))
        values = {**search.own_values(), key: alpha_from_counts(counts, per_class)}
        choice = Choice(
            values,
            f"{_text(search, values)}: α by the rule of thumb 2 (m / q)^(1/3), with m = {per_class} "
            f"exemplars and on average q = {np.mean(counts):,.0f} training images per class; the "
            "weights are those of the recipe. Nothing was trained.",
        )
        _write(search, choice)
        return choice


def _import_optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise InvalidInput(
            "A search needs Optuna, which is not installed. Run pip install 'medcil[tune]', or use "
            "--sampler counts.",
            code="dependency.optuna.missing",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distributions(space: Mapping[str, Parameter], optuna: ModuleType) -> dict[str, Any]:
    float_range = optuna.distributions.FloatDistribution
    return {key: float_range(p.low, p.high, log=p.is_logarithmic) for key, p in space.items()}


def _optuna_trial(trial: Trial, space: Mapping[str, Parameter], optuna: ModuleType) -> Any:
    """Convert a trial; the sampler does not learn from values outside the range (a weight of 0)."""
    is_inside = all(p.low <= trial.values[key] <= p.high for key, p in space.items())
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        state=states.FAIL if trial.score is None else states.COMPLETE,
        value=trial.score,
        params=dict(trial.values) if is_inside else {},
        distributions=_distributions(space, optuna) if is_inside else {},
        user_attrs={"values": dict(trial.values), "score": trial.score, "runs": trial.runs, "why": trial.why},
    )


def _recorded(attributes: Mapping[str, Any]) -> Trial:
    return Trial(attributes["values"], attributes["score"], tuple(attributes["runs"]), attributes["why"])


def _open_study(search: Search, optuna: ModuleType) -> Any:
    """Open the journal, or a new one; refuse that of another search."""
    path, identity = search.out / "study.journal", search.identity()
    is_new = not path.exists()
    if not is_new and not (content := path.read_bytes()).endswith(b"\n"):
        write_bytes(path, content[: content.rfind(b"\n") + 1])  # half a line, left by a crash
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    if is_new:
        study = optuna.create_study(storage=storage, study_name=STUDY, direction="maximize")
    else:
        study = optuna.load_study(storage=storage, study_name=STUDY)
    if "search" not in study.user_attrs:
        for data in search.out.glob("runs/*/data.json"):  # of a search whose journal was deleted
            if what := difference(read_json(data), identity["data"]):
                raise RunConflict(
                    f"{search.out} holds runs of other {what}. Give another --out.", code="tune.data.mismatch"
                )
        study.set_user_attr("search", identity)
    changes = list(differences(study.user_attrs["search"], identity))
    if changes:
        raise RunConflict(
            f"{search.out} holds another search. Give another --out, or the options of that search.\n"
            + "\n".join(f"  {change}" for change in changes),
            code="tune.search.mismatch",
        )
    return study


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    claim_output_folder(folder, "tune")
    with locked_folder(folder):
        yield


def _run_trial(
    search: Search, number: int, values: Values, streams: dict[Order, Stream], watch: Watch
) -> Trial:
    """Compute the runs of a trial that are not finished."""
    runs: list[Mapping[str, Any]] = []
    for order in search.all_orders:
        config = search.config(values, order)
        key = run_key(config)
        folder = search.out / "runs" / key
        watch_run = watch.begins(number, values, order)
        try:
            metrics = _finished_metrics(folder)
            if metrics is None:
                if order not in streams:
                    streams[order] = _held_out_stream(config)
                metrics = run_experiment(config, folder, stream=streams[order], watch=watch_run)
        except MedcilError as error:
            if type(error) is not MedcilError:  # an error of the recipe or the folder, not of these values
                raise
            return Trial(values, None, tuple(runs), str(error).splitlines()[0])
        runs.append({"order": order, "key": key, "score": metrics[search.objective]})
    return Trial(values, float(np.mean([run["score"] for run in runs])), tuple(runs))


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
            f"No image of {', '.join(lacking)} can be held out. Add images, leave the class out, or use "
            "--sampler counts.",
            code="tune.held_out.missing",
        )
    return stream


# What a search writes.


def _choice(search: Search, trials: Sequence[Trial]) -> Choice | None:
    """Choose the first of the best trials; None if all failed."""
    finished = [trial for trial in trials if trial.score is not None]
    if not finished:
        return None
    best, own = max(finished, key=lambda trial: trial.score or 0.0), trials[0]
    orders = ", ".join(map(str, search.all_orders))
    recipe = "" if own.score is None else f" (the recipe's own values: {100 * own.score:.1f}%)"
    explanation = (
        f"{_text(search, best.values)}: the best of {len(trials)} trials ({search.sampler}, seed "
        f"{search.seed}) by {search.objective} on {100 * search.held_out:g}% of the training images, "
        f"held out; class order {orders}: {100 * (best.score or 0.0):.1f}%{recipe}. The test images were not "
        "read. The best score of many is too optimistic: run this recipe for an unbiased one."
    )
    return Choice(best.values, explanation, tuple(trials))


def _text(search: Search, values: Values) -> str:
    return ", ".join(f"{parameter.symbol} = {values[key]:g}" for key, parameter in search.space.items())


def _write(search: Search, choice: Choice | None) -> None:
    """Write tuned.yaml and, after trials, tuning.md."""
    if choice is None:
        return
    content = search.with_values(choice.values).model_dump(mode="json")
    recipe = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    comment = wrap(f"{HEAD} {choice.explanation}", width=116, break_long_words=False)
    write_bytes(search.out / "tuned.yaml", ("".join(f"# {line}\n" for line in comment) + recipe).encode())
    write_bytes(search.out / "tuning.md", _table(search, choice).encode())


def _table(search: Search, choice: Choice) -> str:
    """Write a Markdown table of the trials, the best one in bold."""
    lines = [TITLE, "", *wrap(choice.explanation, width=118)]
    orders = [f"order {order}" for order in search.all_orders]
    symbols = [parameter.symbol for parameter in search.space.values()]
    columns = ["trial", *symbols, *orders, search.objective, "runs"]
    rows = [columns, ["---"] * len(columns)]
    for number, trial in enumerate(choice.trials):
        scores = [f"{100 * run['score']:.1f}" for run in trial.runs]
        scores += [""] * (len(orders) - len(scores))
        result = f"failed: {trial.why}" if trial.score is None else f"{100 * trial.score:.1f}"
        cells = [str(number), *(f"{trial.values[key]:g}" for key in search.space), *scores, result]
        if trial.values is choice.values:
            cells = [f"**{cell}**" for cell in cells]
        rows.append([*cells, " ".join(f"[{run['key']}](runs/{run['key']})" for run in trial.runs)])
    table = ["", *("| " + " | ".join(row) + " |" for row in rows)] if choice.trials else []
    return "\n".join([*lines, *table]) + "\n"
