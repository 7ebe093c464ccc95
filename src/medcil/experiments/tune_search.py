"""Which values of α, λ_d and λ_k to try next, from those tried so far.

A suggestion is a function of the seed and of the trials before it, so that a search that was interrupted goes
on as if it had not been.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from medcil.errors import InvalidInput
from medcil.recipe import place_of

Values = Mapping[str, float]
"""Key of a recipe -> value"""
Suggest = Callable[[Sequence["Trial"]], Values | None]
"""The next values to try; None where there are no more."""

STARTUP = 5
"""Trials before the model of the objective has a say."""


@dataclass(frozen=True)
class Parameter:
    symbol: str
    low: float
    high: float
    is_logarithmic: bool
    grid: tuple[float, ...]
    """The paper's values."""

    def rounded(self, value: float) -> float:
        """As a person would write it; within the range, whose ends are such numbers."""
        return float(f"{value:.2g}") if self.is_logarithmic else round(value, 2)


ALPHA = Parameter("α", 0.05, 1.0, is_logarithmic=False, grid=(0.1, 0.3, 0.5, 0.7, 0.9))
MARGIN_WEIGHT = Parameter("λ_d", 0.01, 1.0, is_logarithmic=True, grid=(0.1, 0.2, 0.3, 0.4, 0.5))
DISTILLATION_WEIGHT = Parameter("λ_k", 0.01, 1.0, is_logarithmic=True, grid=(0.1, 0.25, 0.5, 0.75, 1.0))


@dataclass(frozen=True)
class Trial:
    values: Values
    score: float | None
    """None: it failed."""


def parameters(method: Mapping[str, Any]) -> dict[str, Parameter]:
    """Key of a recipe -> what can be chosen there, for a method with all its settings written out."""
    plugins = method.get("plugins") or {}
    at, own = place_of("balanced", method) or ("", {})
    classification, margin = plugins.get("classification"), plugins.get("margin")
    dropped = plugins.get("drop") or ()
    found: dict[str, Parameter] = {}
    if classification is not None:
        if classification["kind"] == "cil_balanced":
            found["method.plugins.classification.alpha"] = ALPHA
    elif own.get("classification") == "cil_balanced":
        found[f"{at}.alpha"] = ALPHA
    if margin is not None:
        found["method.plugins.margin.weight"] = MARGIN_WEIGHT
    elif own.get("margin", "none") != "none" and "margin" not in dropped:
        found[f"{at}.margin_weight"] = MARGIN_WEIGHT
    if own.get("distillation", "none") != "none" and "distillation" not in dropped:
        found[f"{at}.distillation_weight"] = DISTILLATION_WEIGHT
    if not found:
        raise InvalidInput(
            f"method: {method['name']} as it is set has neither α, λ_d nor λ_k to choose: tune `balanced`, "
            "or plug its losses in, as with --set method.plugins.classification=cil_balanced."
        )
    return found


def by_optuna(space: Mapping[str, Parameter], seed: int) -> Suggest:
    """A tree-structured Parzen estimator of the trials so far; random values before there are some."""
    try:
        import optuna
    except ImportError:
        raise InvalidInput(
            "--sampler optuna needs optuna, which is not installed: run pip install 'medcil[tune]', or "
            "choose --sampler grid."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.FloatDistribution(p.low, p.high, log=p.is_logarithmic)
        for key, p in space.items()
    }

    def suggest(trials: Sequence[Trial]) -> Values:
        sampler = optuna.samplers.TPESampler(seed=_seed_of(seed, len(trials)), n_startup_trials=STARTUP)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in trials:
            if all(p.low <= trial.values[key] <= p.high for key, p in space.items()):
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState.COMPLETE
                        if trial.score is not None
                        else optuna.trial.TrialState.FAIL,
                        params=dict(trial.values),
                        distributions=distributions,
                        value=trial.score,
                    )
                )
        asked = study.ask(distributions).params
        return {key: p.rounded(asked[key]) for key, p in space.items()}

    return suggest


def by_grid(space: Mapping[str, Parameter], seed: int) -> Suggest:
    """Every combination of the paper's values, in a drawn order: the first ones are spread over the grid."""
    points = [dict(zip(space, point, strict=True)) for point in product(*(p.grid for p in space.values()))]
    drawn = [points[i] for i in np.random.RandomState(seed).permutation(len(points))]

    def suggest(trials: Sequence[Trial]) -> Values | None:
        tried = [dict(trial.values) for trial in trials]
        return next((point for point in drawn if point not in tried), None)

    return suggest


Sampler = Callable[[Mapping[str, Parameter], int], Suggest]
SAMPLERS: dict[str, Sampler] = {"optuna": by_optuna, "grid": by_grid}


def _seed_of(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "little")
