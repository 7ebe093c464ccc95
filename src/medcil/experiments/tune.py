"""Choose α, λ_d and λ_k on images held out of training, never on the test set; the result is a recipe.

A trial is one run for each class order, in OUT/runs under the key of its recipe. The study is an Optuna
journal, OUT/study.journal, of completed trials. The next values are a function of the seed and of the trials
before, and finished runs are only read: an interrupted search resumes as if it had not been interrupted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml

from medcil.build import RunConfig, build_stream, method_settings, parse_recipe, resolve
from medcil.data.sources import open_dataset
from medcil.data.stream import Stream
from medcil.errors import InvalidInput, MedcilError, RunConflict, needs_extra
from medcil.experiments.plan import run_key
from medcil.experiments.run import (
    Fingerprint,
    RunWatch,
    difference,
    fingerprint_of_images,
    fingerprint_of_weights,
    run_experiment,
)
from medcil.recipe import differences, leaves, place_of, with_values
from medcil.storage.atomic import locked_folder, read_json, sha256, write_bytes
from medcil.storage.overwrite_guard import claim_output_folder
from medcil.storage.run_dir import RunDir

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Values = dict[str, float]
"""Key of a recipe -> value."""
Order = int | str | tuple[int | str, ...]
HELD_OUT = 0.2
STUDY = "tune"
STARTUP = 5
"""Random trials before the sampler models the objective."""
HEAD = "Chosen by medcil tune."


@dataclass(frozen=True)
class Parameter:
    symbol: str
    low: float
    high: float
    is_logarithmic: bool
    grid: tuple[float, ...]
    """The paper's values."""

    @property
    def distribution(self) -> "BaseDistribution":
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.is_logarithmic)

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
    runs: Sequence[Mapping[str, Any]] = ()
    why: str | None = None


@dataclass(frozen=True)
class BestValues:
    """The values chosen, and a sentence about how."""

    values: Values
    explanation: str
    trials: Sequence[Trial]


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
        method = method_settings(self.recipe.method)
        plugins = method.get("plugins") or {}
        where, own = place_of("balanced", method) or ("", {})
        dropped = plugins.get("drop") or ()
        classification, margin = plugins.get("classification"), plugins.get("margin")
        candidates = {
            "method.plugins.classification.alpha": (
                ALPHA,
                (classification or {}).get("kind") == "cil_balanced",
            ),
            f"{where}.alpha": (ALPHA, own and classification is None),
            "method.plugins.margin.weight": (MARGIN_WEIGHT, margin is not None),
            f"{where}.margin_weight": (MARGIN_WEIGHT, own and margin is None and "margin" not in dropped),
            f"{where}.distillation_weight": (DISTILLATION_WEIGHT, own and "distillation" not in dropped),
        }
        space = {key: parameter for key, (parameter, is_free) in candidates.items() if is_free}
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

    def config(self, values: Values, order: Order | None = None) -> RunConfig:
        """Build a recipe with these values: the result, or with an order a run on held-out images."""
        changes: dict[str, Any] = {"data.held_out": None, **values}
        if order is not None:
            changes |= {"data.held_out": self.held_out, "scenario.order": order}
        return resolve(parse_recipe(with_values(self.recipe.model_dump(mode="json"), changes)))

    def fingerprint(self) -> Fingerprint:
        """Identify the images and weights as the runs do; synthetic images are always the same."""
        config = self.config({}, self.all_orders[0])
        if (data := config.data).root is None:
            return fingerprint_of_weights(config)
        table = open_dataset(data.name, data.root, side=data.side)
        return {**fingerprint_of_images(config, table), **fingerprint_of_weights(config)}

    def identity(self) -> dict[str, Any]:
        """What must stay the same for a search to resume."""
        return {
            "recipe": self.config({}).identity(),
            "data": self.fingerprint(),
            "held_out": self.held_out,
            "orders": [list(order) if isinstance(order, tuple) else order for order in self.all_orders],
            "objective": self.objective,
            "sampler": self.sampler,
            "seed": self.seed,
        }


Begins = Callable[[int, Values, Order], RunWatch]
"""Called when a run of a trial begins; returns what watches the run."""
Ended = Callable[[int, Trial], None]
"""Called with each trial, also those of an earlier call."""


def tune(
    search: Search,
    n_trials: int,
    *,
    begins: Begins = lambda number, values, order: lambda task, n_tasks, progress: None,
    ended: Ended = lambda number, trial: None,
) -> BestValues:
    """Complete `n_trials` trials, earlier ones included; keep tuning.md and tuned.yaml up to date."""
    space = search.space  # refuses other methods before anything is written
    with needs_extra("tune"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    claim_output_folder(search.out, "tune")
    with locked_folder(search.out):
        study, streams = _open_study(search), dict[Order, Stream]()
        trials = [Trial(**trial.user_attrs) for trial in study.trials]
        for number, trial in enumerate(trials):
            ended(number, trial)
        while len(trials) < n_trials and (values := suggest(search, trials)) is not None:
            watch_run = partial(begins, len(trials), values)
            trials.append(_run_trial(search, values, study.user_attrs["search"]["data"], streams, watch_run))
            study.add_trial(_optuna_trial(trials[-1], space))
            if any(trial.score is not None for trial in trials):
                _write(search, _best(search, trials))
            ended(len(trials) - 1, trials[-1])
        if all(trial.score is None for trial in trials):
            raise MedcilError(f"Every trial failed: {trials[0].why}", code="tune.trials.failed")
        best = _best(search, trials)
        _write(search, best)
        return best


def suggest(search: Search, trials: Sequence[Trial]) -> Values | None:
    """Suggest the next values; None if there are no more.

    `grid`: every combination of the paper's values, in a random order, so that the first ones are spread.
    `optuna`: a tree-structured Parzen estimator, random at first.
    """
    space = search.space
    if not trials:
        own = dict(leaves(method_settings(search.recipe.method), "method."))
        return {key: float(own[key]) for key in space}
    if search.sampler == "grid":
        points = [
            dict(zip(space, point, strict=True)) for point in product(*(p.grid for p in space.values()))
        ]
        tried = [trial.values for trial in trials]
        order = np.random.RandomState(search.seed).permutation(len(points))
        return next((points[i] for i in order if points[i] not in tried), None)
    import optuna

    # A seed for each trial: a search that resumes suggests the same values.
    seed = int(sha256(f"{search.seed} {len(trials)}".encode())[:8], 16)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials([_optuna_trial(trial, space) for trial in trials])
    params = study.ask({key: p.distribution for key, p in space.items()}).params
    return {key: p.rounded(params[key]) for key, p in space.items()}


def _optuna_trial(trial: Trial, space: Mapping[str, Parameter]) -> "FrozenTrial":
    """Convert a trial; the sampler does not learn from values outside the range (a weight of 0)."""
    from optuna.trial import TrialState, create_trial

    is_inside = all(p.low <= trial.values[key] <= p.high for key, p in space.items())
    return create_trial(
        state=TrialState.FAIL if trial.score is None else TrialState.COMPLETE,
        value=trial.score,
        params=trial.values if is_inside else {},
        distributions={key: p.distribution for key, p in space.items()} if is_inside else {},
        user_attrs=asdict(trial),
    )


def _open_study(search: Search) -> "Study":
    """Open the journal, or a new one; refuse that of another search."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path, identity = search.out / "study.journal", search.identity()
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        write_bytes(path, content[: content.rfind(b"\n") + 1])  # half a line, left by a crash
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    if STUDY not in optuna.get_all_study_names(storage):
        optuna.create_study(storage=storage, study_name=STUDY, direction="maximize")
    study = optuna.load_study(storage=storage, study_name=STUDY)
    if "search" not in study.user_attrs:
        study.set_user_attr("search", identity)
    if changes := list(differences(study.user_attrs["search"], identity)):
        raise RunConflict(
            f"{search.out} holds another search. Give another --out, or the options of that search.\n"
            + "\n".join(f"  {change}" for change in changes),
            code="tune.search.mismatch",
        )
    return study


def _run_trial(
    search: Search,
    values: Values,
    data: Fingerprint,
    streams: dict[Order, Stream],
    begins: Callable[[Order], RunWatch],
) -> Trial:
    """Compute the runs of a trial that are not finished on this data."""
    runs: list[dict[str, Any]] = []
    for order in search.all_orders:
        config = search.config(values, order)
        key = run_key(config)
        run, watch = RunDir(search.out / "runs" / key), begins(order)
        try:
            metrics = read_json(run.metrics_path) if run.metrics_path.exists() else {"finished": False}
            is_same_data = not run.data_path.exists() or difference(read_json(run.data_path), data) is None
            if not (metrics["finished"] and is_same_data):  # of other data: it is refused there
                streams[order] = streams.get(order) or _held_out_stream(config)
                metrics = run_experiment(config, run.root, stream=streams[order], watch=watch)
        except MedcilError as error:
            if type(error) is not MedcilError:  # an error of the recipe or the folder, not of these values
                raise
            return Trial(values, None, runs, str(error).splitlines()[0])
        runs.append({"order": order, "key": key, "score": metrics[search.objective]})
    return Trial(values, float(np.mean([run["score"] for run in runs])), runs)


def _held_out_stream(config: RunConfig) -> Stream:
    stream = build_stream(config)
    counts = stream.test.class_counts(len(stream.class_names)).tolist()
    lacking = [name for name, n in zip(stream.class_names, counts, strict=True) if not n]
    if lacking:
        raise InvalidInput(
            f"No image of {', '.join(lacking)} can be held out. Add images, or leave the class out.",
            code="tune.held_out.missing",
        )
    return stream


# What a search writes.


def _best(search: Search, trials: Sequence[Trial]) -> BestValues:
    """Choose the first of the best trials."""
    best, own = max(trials, key=lambda trial: trial.score or 0.0), trials[0]
    orders = ", ".join(map(str, search.all_orders))
    recipe = "" if own.score is None else f" (the recipe's own values: {100 * own.score:.1f}%)"
    explanation = (
        f"{_text(search, best.values)}: the best of {len(trials)} trials ({search.sampler}, seed "
        f"{search.seed}) by {search.objective} on {100 * search.held_out:g}% of the training images, "
        f"held out; class order {orders}: {100 * (best.score or 0.0):.1f}%{recipe}. The test images were not "
        "read. The best score of many is too optimistic: run this recipe for an unbiased one."
    )
    return BestValues(best.values, explanation, list(trials))


def _text(search: Search, values: Values) -> str:
    return ", ".join(f"{parameter.symbol} = {values[key]:g}" for key, parameter in search.space.items())


def _write(search: Search, best: BestValues) -> None:
    """Write tuned.yaml, and tuning.md: a Markdown table of the trials, the best one in bold."""
    content = search.config(best.values).model_dump(mode="json")
    recipe = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    comment = wrap(f"{HEAD} {best.explanation}", width=116, break_long_words=False)
    write_bytes(search.out / "tuned.yaml", ("".join(f"# {line}\n" for line in comment) + recipe).encode())
    orders = [f"order {order}" for order in search.all_orders]
    symbols = [parameter.symbol for parameter in search.space.values()]
    columns = ["trial", *symbols, *orders, search.objective, "runs"]
    rows = [columns, ["---"] * len(columns)]
    for number, trial in enumerate(best.trials):
        scores = [f"{100 * run['score']:.1f}" for run in trial.runs]
        scores += [""] * (len(orders) - len(scores))
        result = f"failed: {trial.why}" if trial.score is None else f"{100 * trial.score:.1f}"
        cells = [str(number), *(f"{trial.values[key]:g}" for key in search.space), *scores, result]
        if trial.values is best.values:
            cells = [f"**{cell}**" for cell in cells]
        rows.append([*cells, " ".join(f"[{run['key']}](runs/{run['key']})" for run in trial.runs)])
    table = ["| " + " | ".join(row) + " |" for row in rows]
    lines = ["# Tuning", "", *wrap(best.explanation, width=118), "", *table]
    write_bytes(search.out / "tuning.md", ("\n".join(lines) + "\n").encode())
