"""The presets: every one is a valid recipe, and its numbers are those of the published runs."""

from typing import Any, NamedTuple

import pytest

from medcil.build import RunConfig, parse_recipe, resolve
from medcil.config import TrainingConfig
from medcil.methods import METHODS, PRESETS
from medcil.methods.podnet import PODNet
from medcil.methods.protocol import Phase, WithTerms
from medcil.training.step import learning_rate_factor

from ..conformance.subjects import FROZEN
from .by_hand import phases_of, tiny_network


def config_of(method: str, preset: str, **sections: Any) -> RunConfig:
    recipe = {
        "data": {"name": "phantom"},
        "scenario": {"base": 3, "increment": 2},
        "method": {"name": method, "preset": preset},
        **sections,
    }
    return parse_recipe(recipe)


class Run(NamedTuple):
    """How each task after the first is trained; the first one's column, where it differs."""

    epochs: int
    batch_size: int
    backbone: float
    decays: tuple[int, ...] | None  # epochs after which the rates are multiplied by `decay`; None: a cosine
    sampler: str = "plain"
    first_backbone: float | None = None
    first_decays: tuple[int, ...] | None = None
    classifier: float = 0.1
    decay: float = 0.1
    weight_decay: float = 5e-4
    clamp: float | None = 5.0


CCH = Run(100, 32, 0.001, (40, 80))
HAM = CCH._replace(sampler="balanced")
EYE = Run(150, 128, 0.001, (50, 100), sampler="balanced", first_backbone=0.01)
CIFAR = Run(160, 128, 0.1, (80, 120), clamp=None)

RUNS: dict[tuple[str, str], Run] = {
    # Not in the published tables: the conditions of those that are.
    **{(name, "cch5000"): CCH for name in ("finetune", "replay", "bic", "ssil", "lws")},
    **{(name, "ham10000"): HAM for name in ("finetune", "replay", "bic", "ssil", "lws")},
    **{(name, "eyepacs"): EYE for name in ("finetune", "replay", "bic", "ssil", "lws")},
    ("icarl", "cch5000"): CCH._replace(clamp=None),
    ("icarl", "ham10000"): HAM._replace(clamp=None),
    ("icarl", "eyepacs"): EYE._replace(clamp=None),
    ("icarl", "original"): Run(
        70, 128, 2.0, (49, 63), classifier=2.0, decay=0.2, weight_decay=1e-5, clamp=None
    ),
    ("ucir", "cch5000"): CCH,
    ("ucir", "ham10000"): HAM,
    ("ucir", "eyepacs"): EYE,
    ("ucir", "original"): CIFAR,
    ("podnet", "cch5000"): Run(100, 32, 0.001, None, first_backbone=0.01),
    ("podnet", "ham10000"): Run(100, 32, 0.001, None, first_backbone=0.01, sampler="balanced"),
    ("podnet", "eyepacs"): Run(150, 128, 0.01, None, sampler="balanced"),
    ("podnet", "original"): Run(160, 128, 0.1, None),
    ("der", "cch5000"): CCH,
    ("der", "ham10000"): HAM,
    ("der", "eyepacs"): EYE._replace(decays=(10, 40, 80), first_decays=(50, 100)),
    ("der", "original"): CIFAR._replace(decays=(100, 120)),
    ("lo2ln", "cch5000"): Run(100, 32, 0.01, (10, 40, 80), first_backbone=0.001, first_decays=(40, 80)),
    ("lo2ln", "ham10000"): Run(
        100, 32, 0.01, (10, 40, 80), first_backbone=0.001, first_decays=(40, 80), sampler="balanced"
    ),
    ("lo2ln", "eyepacs"): Run(150, 128, 0.01, (10, 40, 80), first_decays=(50, 100), sampler="balanced"),
    ("lws", "podnet"): CIFAR,
    ("lws", "ucir"): CIFAR,
    # The paper's own: as UCIR, without the benchmark's sampler.
    ("balanced", "cch5000"): CCH,
    ("balanced", "ham10000"): Run(20, 32, 0.001, (8, 16), first_backbone=0.01),  # see reproduce.md
    ("balanced", "eyepacs"): EYE._replace(sampler="plain"),
    ("balanced", "aptos2019"): Run(30, 32, 0.001, (10, 20), first_backbone=0.01),  # see reproduce.md
    ("balanced", "cifar100"): CIFAR._replace(clamp=5.0),
    # Its own, see analytic.md.
    ("analytic", "ham10000"): Run(60, 32, 0.01, (24, 48)),
    ("analytic", "eyepacs"): Run(30, 32, 0.01, (12, 24)),
    ("analytic", "aptos2019"): Run(30, 32, 0.01, (12, 24)),
}
RUNS |= {
    ("simplecil", "aper"): Run(5, 128, 0.01, None, classifier=0.01, clamp=None),
    ("fecam", "original"): Run(200, 128, 0.1, None, clamp=None),
    **{("acil", name): Run(300, 256, 0.5, None, classifier=0.5, clamp=None) for name in ("original", "air")},
}
RUNS |= {("gaussians", preset): run for (method, preset), run in RUNS.items() if method == "balanced"}
WITHOUT_A_SCHEDULE = {("finetune", "joint"), ("fecam", "pretrained")}
WITHOUT_A_SCHEDULE |= {(name, "original") for name in ("simplecil", "slda", "ranpac")}
ALL = [(method, preset) for method, presets in PRESETS.items() for preset in presets]


def decays_of(training: TrainingConfig) -> tuple[int, ...] | None:
    """Epochs, counted from 1, after which the rates fall."""
    if training.schedule == "cosine":
        return None
    factors = [learning_rate_factor(training, epoch) for epoch in range(training.epochs)]
    return tuple(epoch for epoch in range(1, training.epochs) if factors[epoch] != factors[epoch - 1])


def test_gaussians_predict_in_the_symmetries_that_training_showed():
    views = {preset: config_of("gaussians", preset).data.views for preset in PRESETS["gaussians"]}
    assert {preset for preset, n in views.items() if n == 8} == {"ham10000", "aptos2019"}
    assert {n for n in views.values() if n != 8} == {None}
    assert all(config_of("balanced", preset).data.views is None for preset in PRESETS["balanced"])


def test_the_table_names_every_preset():
    assert set(ALL) == set(RUNS) | WITHOUT_A_SCHEDULE
    assert set(PRESETS) <= set(METHODS)


@pytest.mark.parametrize(("method", "preset"), ALL)
def test_every_preset_is_a_recipe_whose_method_can_be_built(method, preset):
    config = resolve(config_of(method, preset))
    built = config.method
    assert type(built.base if isinstance(built, WithTerms) else built) is METHODS[method]


@pytest.mark.parametrize(("method", "preset"), RUNS)
def test_every_task_is_trained_as_published(method, preset):
    config, run = config_of(method, preset), RUNS[method, preset]
    later = config.training_of_task(is_first=False)
    found = Run(
        epochs=later.epochs,
        batch_size=later.batch_size,
        backbone=later.learning_rates.backbone,
        decays=decays_of(later),
        sampler=later.sampler,
        classifier=later.learning_rates.classifier,
        decay=later.decay,
        weight_decay=later.weight_decay,
        clamp=later.gradient_clamp,
    )
    assert found == run._replace(first_backbone=None, first_decays=None)
    assert later.momentum == 0.9
    first = config.training_of_task(is_first=True)
    assert first.learning_rates.backbone == (run.first_backbone or run.backbone)
    assert decays_of(first) == (run.first_decays or run.decays)
    changed = {key: getattr(first, key) for key in ("learning_rates", "milestones")}
    assert later.changed(**changed) == first


def test_finetune_joint_is_the_upper_bound():
    assert config_of("finetune", "joint").scenario.cumulative


def method_and_phases(method: str, preset: str) -> tuple[Any, dict[str, Phase]]:
    config = config_of(method, preset)
    built = config.method
    if method in FROZEN:
        return built, {}
    n_proxies = getattr(getattr(built, "base", built), "n_proxies", 1)
    network = tiny_network(3, n_proxies=n_proxies)
    return built, phases_of(built, 3, 2, network=network, training=config.training)


@pytest.mark.parametrize(
    ("method", "preset", "phase", "epochs", "rate", "decays"),
    [
        ("podnet", "cch5000", "fine-tune", 20, 0.01, ()),
        ("podnet", "ham10000", "fine-tune", 20, 0.01, ()),
        ("podnet", "eyepacs", "fine-tune", 20, 0.05, ()),
        ("podnet", "original", "fine-tune", 20, 0.05, ()),
        ("der", "cch5000", "balance", 30, 0.1, (15,)),
        ("der", "ham10000", "balance", 30, 0.1, (15,)),
        ("der", "eyepacs", "balance", 30, 0.1, (15,)),
        ("der", "original", "warm-up", 10, 0.1, ()),
        ("der", "original", "balance", 30, 0.1, (15,)),
        ("lws", "podnet", "scale", 30, 0.1, None),
        ("lws", "ucir", "scale", 30, 0.1, None),
    ],
)
def test_second_stages_are_as_long_and_as_fast_as_published(method, preset, phase, epochs, rate, decays):
    _, phases = method_and_phases(method, preset)
    found = phases[phase]
    assert found.training is not None
    rates = {**found.training.learning_rates.model_dump(), **found.rates}
    assert (found.training.epochs, rates["classifier"]) == (epochs, rate)
    assert decays_of(found.training) == decays


@pytest.mark.parametrize(
    ("method", "preset", "expected"),
    [
        ("icarl", "ham10000", {"targets": "softmax", "readout": "nearest_mean"}),
        ("icarl", "original", {"targets": "sigmoid", "readout": "nearest_mean"}),
        (
            "ucir",
            "ham10000",
            {"lambda_base": 5, "adaptive": "seen", "ranking_margin": 0.5, "n_rivals": 2, "finetune_share": 0},
        ),
        ("ucir", "eyepacs", {"lambda_base": 5, "adaptive": "seen", "n_rivals": 1}),
        ("ucir", "original", {"lambda_base": 5, "adaptive": "old", "ranking_margin": 0.5, "n_rivals": 2}),
        ("podnet", "cch5000", {"n_proxies": 10, "margin": 0, "spatial": 5, "flat": 8}),
        ("podnet", "ham10000", {"spatial": 5, "flat": 8, "finetune_scale": False}),
        ("podnet", "eyepacs", {"margin": 0, "spatial": 3, "flat": 1, "finetune_scale": True}),
        ("podnet", "original", {"n_proxies": 10, "margin": 0.0, "spatial": 3, "flat": 1}),
        ("der", "ham10000", {"reset_classifier": False, "warm_up_share": 0, "temperature": 5}),
        ("der", "original", {"reset_classifier": True, "temperature": 5}),
        ("simplecil", "original", {"adapt": "never", "pretrained": False, "stages": 1, "scaled": False}),
        ("simplecil", "aper", {"adapt": "always", "pretrained": True, "stages": 1, "scaled": False}),
        ("slda", "original", {"adapt": "never", "shrinkage": 1e-4}),
        ("fecam", "original", {"power": 0.5, "shrinkage": 1, "shrinkage_others": 1, "times": 2}),
        ("fecam", "pretrained", {"power": 1, "shrinkage": 1, "shrinkage_others": 0, "times": 1}),
        ("ranpac", "original", {"adapt": "never", "random_features": 10_000}),
        ("acil", "original", {"random_features": 8192, "strength": 0.1, "balance": 0, "adapt": "always"}),
        ("acil", "air", {"random_features": 8192, "strength": 0.1, "balance": 1, "pooled": False}),
        ("balanced", "cch5000", {"alpha": 0.7}),
        ("balanced", "ham10000", {"alpha": 0.5}),
        ("balanced", "eyepacs", {"alpha": 0.3}),
    ],
)
def test_the_constants_of_the_methods(method, preset, expected):
    built, _ = method_and_phases(method, preset)
    assert {name: getattr(built, name) for name in expected} == expected


def test_lws_stands_around_podnet_and_around_ucir_as_in_its_paper():
    podnet, ucir = (method_and_phases("lws", preset)[0].base for preset in ("podnet", "ucir"))
    assert (podnet.n_proxies, podnet.classification, podnet.spatial, podnet.flat) == (
        10,
        "cross_entropy",
        3,
        1,
    )
    assert podnet.finetune_share == 0
    assert (ucir.lambda_base, ucir.n_rivals, ucir.ranking_margin) == (5, 2, 0.5)


@pytest.mark.parametrize("preset", ["cch5000", "ham10000", "eyepacs"])
def test_on_the_benchmark_lws_stands_around_the_benchmarks_podnet(preset):
    built, phases = method_and_phases("lws", preset)
    assert built.base == PODNet(finetune_share=0)
    assert list(phases) == ["learn", "scale"]


@pytest.mark.parametrize(
    ("method", "preset"), [("icarl", "original"), ("der", "original"), ("acil", "original"), ("acil", "air")]
)
def test_where_the_authors_had_a_linear_classifier_the_last_relu_stays(method, preset):
    network = config_of(method, preset).network
    assert (network.classifier, network.last_relu) == ("linear", True)


@pytest.mark.parametrize(("method", "preset"), ALL)
def test_all_others_have_cosines_without_the_last_relu(method, preset):
    config = config_of(method, preset)
    if method in FROZEN:
        kind = "linear" if method == "acil" else "cosine"
        last_relu = method != "analytic"
        assert (config.network.classifier, config.network.last_relu) == (kind, last_relu)
        assert config.memory.quota(7) == 0
        return
    if preset == "original" and method in ("icarl", "der"):
        assert config.memory.total == (2000 if method == "icarl" else None)
        return
    assert (config.network.classifier, config.network.last_relu) == ("cosine", False)
    assert (config.network.scale, config.network.learn_scale) == (1.0, True)
    assert config.memory.quota(7) == 20
