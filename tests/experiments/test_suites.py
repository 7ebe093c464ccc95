"""The suites that come with medcil: every row is the published run it stands for, and the figures beside it
are the paper's."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from medcil.build import RunConfig, arrangement, method_settings, parse_recipe, resolve
from medcil.data.sources import DATASETS
from medcil.data.splits import long_tail
from medcil.errors import InvalidInput
from medcil.experiments.plan import PlannedRun, run_key, runs_of_suite
from medcil.experiments.suite import Place, Suite, cells, known_suites, load_suite
from medcil.methods.presets import PRESETS
from medcil.methods.protocol import Method
from medcil.metrics.catalogue import METRICS
from medcil.metrics.incremental import AccuracyMatrix, mean_and_deviation
from medcil.recipe import differences, leaves

RUNS = {
    "cch5000": 6 * 2 * 3,
    "ham10000": 6 * 2 * 3,
    "eyepacs": 6 * 3,
    "aptos2019": 6 * 3,
    "ham10000-lesions": 7 * 2 * 3,
    "ablation-components": 4 * 3 * 2,
    "ablation-classification": 5 * 3,
    "ablation-margin": 3 * 3,
    "integration": 8 * 3 * 2,
    "cifar100": 4 * 4,
    "sensitivity-lambda": 5 * 5 * 3,
    "sensitivity-alpha": 5 * 4 * 3,
    "tsne": 3,
    "gaussians-ham10000": 5 * 2 * 3,
    "gaussians-aptos2019": 5 * 3,
    "analytic-ham10000": 4 * 3 * 2,
    "analytic-aptos2019": 3,
    "eyepacs-patients": 7 * 3,
}
OURS = ("analytic-ham10000", "analytic-aptos2019", "eyepacs-patients")
"""Beside the paper's tables: images of another size or split, or one schedule for all."""
PAPERS = [name for name in RUNS if name not in OURS]
ON_HAM10000 = [
    "ham10000",
    "ham10000-lesions",
    "ablation-components",
    "ablation-classification",
    "ablation-margin",
    "integration",
    "sensitivity-lambda",
    "gaussians-ham10000",
]
LO2LN_GROUPS = "Fgt, LO2LN's groups"


@pytest.fixture(scope="module")
def suites() -> dict[str, Suite]:
    return {name: load_suite(name) for name in RUNS}


@pytest.fixture(scope="module")
def plans(suites: dict[str, Suite]) -> dict[str, list[PlannedRun]]:
    return {name: runs_of_suite(suite) for name, suite in suites.items()}


def run_of(plans: dict[str, list[PlannedRun]], suite: str, row: str, setting: str, order: int) -> PlannedRun:
    """With seed 0, named by the suite or by its recipes."""
    either = {Place(row, setting, order), Place(row, setting, order, 0)}
    (found,) = [run for run in plans[suite] if either & {*run.places}]
    return found


def test_these_are_all_suites_but_the_quick_one():
    assert set(known_suites()) == {*RUNS, "smoke"}


@pytest.mark.parametrize("name", RUNS)
def test_every_place_of_a_table_is_a_run_of_its_own(plans, suites, name):
    assert len(plans[name]) == RUNS[name]
    assert all(len(run.places) == 1 for run in plans[name])
    assert {place[:2] for run in plans[name] for place in run.places} == {
        (row.name, setting) for row in suites[name].expanded_rows() for setting in suites[name].settings
    }


@pytest.mark.parametrize("name", RUNS)
def test_every_method_is_built_and_every_metric_and_step_metric_is_known(plans, suites, name):
    for run in plans[name]:
        assert isinstance(run.config.method, Method)
    assert set(suites[name].metrics.values()) <= set(METRICS)
    assert "acc_balanced" in suites[name].metrics.values()
    for figure in suites[name].figures:
        known = {"curves": {"micro", "balanced", "forgetting"}, "tsne": {None}, "confusion": {None}}
        assert figure.metric in known.get(figure.kind, set(METRICS))
        assert (figure.order is not None) == (figure.kind in ("tsne", "confusion"))
    assert len({figure.file for figure in suites[name].figures}) == len(suites[name].figures)


# What a suite may leave to the defaults: nothing that its rows' losses, stages or splits read.
UNSAID = {
    "label",
    "scenario.cumulative",
    "data.split_share",
    "data.split_seed",
    *(f"method.{key}" for key in ("temperature", "margin_weight", "margin_size")),
    *(f"method.{key}" for key in ("finetune_rate", "base.finetune_rate", "base.finetune_scale")),
    *(f"method.plugins.{key}" for key in ("drop", "phases")),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_suite_hides_nothing(suites, name):
    for _, recipe in cells(suites[name]):
        assert not {"label", "preset"} & {*recipe, *recipe["method"]}
        said = {key for key, _ in leaves(recipe)}
        resolved = leaves(resolve(parse_recipe(recipe)).identity())
        assert {key for key, value in resolved if value is not None} - said <= UNSAID


# What each row of a suite is: the preset of its method, and what the suite changes of it on purpose.
CIFAR100 = {"UCIR": "original", "PODNet": "original", "LWS": "podnet", "balanced": "cifar100"}
CROSS_ENTROPY = {"plugins": {"classification": "cross_entropy"}}
# UCIR's own weight: its mean over the batch is far smaller than the sum of the other margins.
RANKING = {"plugins": {"margin": {"kind": "ranking", "weight": 1.0, "margin": 0.4}}}
CHANGED: dict[tuple[str, str], dict[str, Any]] = {
    ("ablation-components", "CE + L_kd"): {"margin_weight": 0, **CROSS_ENTROPY},
    ("ablation-components", "+ L_dm"): CROSS_ENTROPY,
    ("ablation-components", "+ L_cbc"): {"margin_weight": 0},
    ("ablation-classification", "CE"): CROSS_ENTROPY,
    ("ablation-classification", "Focal"): {"plugins": {"classification": "focal"}},
    ("ablation-classification", "CB Focal"): {"plugins": {"classification": "class_balanced_focal"}},
    ("ablation-classification", "logit-balanced"): {"alpha": 1.0},
    ("ablation-margin", "without margin"): {"margin_weight": 0},
    ("ablation-margin", "margin ranking"): RANKING,
    ("tsne", "without margin"): {"margin_weight": 0},
    ("tsne", "margin ranking"): RANKING,
    **{
        ("integration", f"{base} + {name}"): {"plugins": plugins}
        for base in ("iCaRL", "UCIR")
        for name, plugins in {
            "L_dm": {"margin": {"kind": "distribution", "weight": 0.1, "margin": 0.4}},
            "L_cbc": {"classification": {"kind": "cil_balanced", "alpha": 0.5}},
            "L_cbc + L_dm": {
                "classification": "cil_balanced",
                "margin": {"kind": "distribution", "weight": 0.1},
            },
        }.items()
    },
    **{
        ("sensitivity-lambda", f"balanced, λ_d = {d}, λ_k = {k}"): {
            "margin_weight": d,
            "distillation_weight": k,
        }
        for d in (0.1, 0.2, 0.3, 0.4, 0.5)
        for k in (0.1, 0.25, 0.5, 0.75, 1.0)
    },
    **{
        (f"gaussians-{name}", "balanced, eight views, old classes favored"): {"weight": 0.0}
        for name in ("ham10000", "aptos2019")
    },
    **{("sensitivity-alpha", f"balanced, α = {a}"): {"alpha": a} for a in (0.1, 0.3, 0.5, 0.7, 0.9)},
}
CHANGED_TRAINING = {("ham10000-lesions", "joint"): {"sampler": "plain"}}
METHOD_OF = {
    "joint": "replay",
    "iCaRL": "icarl",
    "UCIR": "ucir",
    "PODNet": "podnet",
    "DER": "der",
    "LO2LN": "lo2ln",
    "LWS": "lws",
    "Gaussians": "gaussians",
    "Gaussians, eight views": "gaussians",
    "balanced, eight views, old classes favored": "gaussians",
}


def preset_for(method: str, dataset: str) -> str:
    """On the stand-in for EyePACS Table 3's protocol, where the method has none of its own for it."""
    return "eyepacs" if dataset == "aptos2019" and dataset not in PRESETS[method] else dataset


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_is_its_preset_but_for_what_it_changes_on_purpose(suites, name):
    for place, written in cells(suites[name]):
        method: dict[str, Any] = {"name": METHOD_OF.get(place.row.split(" + ")[0], "balanced")}
        recipe = {key: written[key] for key in ("seed", "data", "scenario", "network", "memory")}
        if name != "cifar100":
            dataset = written["data"]["name"]
            method["preset"] = preset_for(method["name"], dataset)
        else:
            method["preset"] = CIFAR100[place.row]
        method |= CHANGED.get((name, place.row), {})
        recipe["training"] = CHANGED_TRAINING.get((name, place.row), {})
        expected = resolve(parse_recipe({**recipe, "method": method})).identity()
        found = resolve(parse_recipe(written)).identity()
        for identity in (expected, found):
            kept = {k: v for k, v in identity["method"].items() if k != "preset" and v is not None}
            identity["method"] = kept
        assert list(differences(expected, found)) == []


def test_every_change_on_purpose_is_of_a_row_there_is(suites):
    for name, row in [*CHANGED, *CHANGED_TRAINING]:
        assert row in [row.name for row in suites[name].expanded_rows()]


@pytest.mark.parametrize("name", PAPERS)
def test_data_and_network_are_the_benchmarks(plans, name):
    for run in plans[name]:
        data, network = run.config.data, run.config.network
        of_method = PRESETS[method_settings(run.config.method)["name"]].get(data.name, {}).get("data", {})
        assert data.augmentation == of_method.get("augmentation", DATASETS[data.name].augmentation)
        sizes = {"ham10000": (256, 224), "cch5000": (256, 224)} | dict.fromkeys(
            ("eyepacs", "aptos2019"), (512, 512)
        )
        if "aptos2019" in PRESETS[method_settings(run.config.method)["name"]]:
            sizes["aptos2019"] = (512, 460)  # quarter turns want room for crops
        assert (data.side, data.crop) == sizes.get(data.name, (32, 32))
        by_lesion = "groups" if run.places[0].setting == "3-2, by lesion" else None
        assert data.split == (by_lesion or ("images" if data.name == "aptos2019" else "benchmark"))
        assert run.config.memory.quota(10) == 20
        is_cifar = data.name.startswith("cifar100")
        assert network.backbone == ("resnet32_cifar" if is_cifar else "resnet18.tv_in1k")
        assert network.weights == (None if is_cifar else "hub")


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_full_method_is_one_run_in_all_suites_that_show_it(plans, order):
    places = [
        ("ham10000", "balanced", "3-2"),
        ("ham10000-lesions", "balanced", "3-2, by image"),
        ("ablation-components", "+ L_cbc + L_dm", "3-2"),
        ("ablation-classification", "CIL-balanced", "3-2"),
        ("ablation-margin", "distribution margin", "3-2"),
        ("sensitivity-lambda", "balanced, λ_d = 0.1, λ_k = 1.0", "3-2"),
        ("sensitivity-alpha", "balanced, α = 0.5", "HAM10000 3-2"),
        ("gaussians-ham10000", "balanced", "3-2"),
    ]
    assert len({run_of(plans, suite, row, setting, order).key for suite, row, setting in places}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ablation-components", "+ L_dm", "3-2"), ("ablation-classification", "CE", "3-2")),
        (("ablation-components", "+ L_cbc", "3-2"), ("ablation-margin", "without margin", "3-2")),
        (("ham10000", "iCaRL", "3-1"), ("integration", "iCaRL", "3-1")),
        (("ham10000", "UCIR", "3-1"), ("integration", "UCIR", "3-1")),
        (("cch5000", "balanced", "4-2"), ("sensitivity-alpha", "balanced, α = 0.7", "CCH5000 4-2")),
        (("eyepacs", "balanced", "3-1"), ("sensitivity-alpha", "balanced, α = 0.3", "EyePACS 3-1")),
        (("aptos2019", "balanced", "3-1"), ("sensitivity-alpha", "balanced, α = 0.3", "APTOS 2019 3-1")),
        (("aptos2019", "balanced", "3-1"), ("gaussians-aptos2019", "balanced", "3-1")),
        (("ham10000", "balanced", "3-1"), ("gaussians-ham10000", "balanced", "3-1")),
        (("cch5000", "balanced", "4-1"), ("tsne", "distribution margin", "4-1")),
    ],
)
def test_runs_that_are_the_same_in_two_suites_are_one(plans, one, other):
    assert run_of(plans, *one, 0).key == run_of(plans, *other, 0).key


@pytest.mark.parametrize("order", [0, 1, 2])
def test_split_by_image_the_rows_are_those_of_table_2_and_by_lesion_only_the_split_is_another(plans, order):
    rows = {run.places[0].row for run in plans["ham10000-lesions"]}
    table_2 = {run.places[0].row for run in plans["ham10000"]}
    assert rows == {"joint", *table_2}
    for row in rows:
        by_image, by_lesion = (
            run_of(plans, "ham10000-lesions", row, f"3-2, by {kind}", order) for kind in ("image", "lesion")
        )
        assert by_image.config.scenario.cumulative == (row == "joint")
        if row != "joint":
            assert by_image.key == run_of(plans, "ham10000", row, "3-2", order).key
        changed = list(differences(by_image.config.identity(), by_lesion.config.identity()))
        assert changed == ["data.split: 'benchmark' -> 'groups'"]


def test_the_split_by_lesion_is_that_of_the_recipe_of_lesions(plans):
    recipe = yaml.safe_load((Path(__file__).parents[2] / "recipes/ham10000-3-2-lesions.yaml").read_text())
    data = run_of(plans, "ham10000-lesions", "joint", "3-2, by lesion", 0).config.data
    split = {key: value for key, value in recipe["data"].items() if key.startswith("split")}
    assert split == {"split": data.split, "split_share": data.split_share, "split_seed": data.split_seed}


@pytest.mark.parametrize("name", ["ablation-components", "integration"])
def test_tables_4_and_7_have_two_seeds_that_change_nothing_else(plans, name):
    runs = {run.places[0]: run.config.identity() for run in plans[name]}
    assert {place.seed for place in runs} == {0, 1}
    for place, identity in runs.items():
        assert identity["seed"] == place.seed
        assert {**identity, "seed": 0} == runs[place._replace(seed=0)]


def test_all_others_are_runs_of_their_own(plans):
    """279 places on HAM10000; those that stand in several suites are named above."""
    keys = Counter(run.key for name in ON_HAM10000 for run in plans[name])
    # 3 orders each: the full method in seven suites, ten pairs.
    assert sorted(keys.values(), reverse=True)[: 3 * 11 + 1] == [7] * 3 + [2] * 30 + [1]


def test_a_key_that_recipes_learn_later_leaves_runs_their_names_until_it_is_set(plans, monkeypatch):
    run = plans["ham10000"][0]
    before = run.config.identity()
    for value, is_same in ((None, True), (0.2, False)):
        later = {**before, "data": {**before["data"], "learned_later": value}}
        monkeypatch.setattr(RunConfig, "identity", lambda self, later=later: later)
        assert (run_key(run.config) == run.key) == is_same


def test_a_run_in_several_views_has_a_name_of_its_own(plans):
    run = plans["ham10000"][0]
    for views, is_same in ((None, True), (8, False)):
        seen = run.config.model_copy(update={"data": run.config.data.model_copy(update={"views": views})})
        assert (run_key(seen) == run.key) == is_same


def test_the_long_tail_is_the_ordered_one_and_each_setting_of_cifar_has_its_order(plans):
    found = {(run.places[0][1], run.config.data.name, run.config.scenario.order) for run in plans["cifar100"]}
    assert found == {
        ("50-10 Conv", "cifar100", "seed-1993"),
        ("50-10 LT", "cifar100lt", 0),
        ("50-5 Conv", "cifar100", "seed-1993"),
        ("50-5 LT", "cifar100lt", 0),
    }
    assert all(run.places[0][2] == run.config.scenario.order for run in plans["cifar100"])


def as_printed(text: str) -> list[tuple[float, ...]]:
    """`93.0 0.2 & 6.8 1.0`"""
    return [tuple(float(number) for number in cell.split()) for cell in text.split("&")]


# Row: its figures in the order of the printed table.
PRINTED = {
    "cch5000": (
        [("4-2", "Acc"), ("4-2", "Fgt"), ("4-1", "Acc"), ("4-1", "Fgt")],
        {
            "iCaRL": "93.0 0.2 & 6.8 1.0 & 91.1 1.8 & 9.0 3.3",
            "UCIR": "93.9 0.3 & 4.4 0.9 & 92.0 1.0 & 5.5 2.6",
            "PODNet": "92.0 0.3 & 5.2 0.4 & 89.2 0.5 & 6.0 1.2",
            "DER": "93.0 0.5 & 6.4 1.4 & 91.0 1.7 & 5.6 1.9",
            "LO2LN": "94.6 0.4 & 4.0 0.8 & 94.5 0.8 & 3.9 2.0",
            "balanced": "95.5 0.2 & 2.3 0.7 & 95.2 0.2 & 2.1 1.5",
        },
    ),
    "ham10000": (
        [("3-2", "Acc"), ("3-2", LO2LN_GROUPS), ("3-1", "Acc"), ("3-1", "Fgt")],
        {
            "iCaRL": "76.3 3.1 & 20.1 12.6 & 68.3 2.8 & 25.3 4.5",
            "UCIR": "79.1 1.4 & 16.8 9.5 & 74.1 3.1 & 16.3 9.1",
            "PODNet": "75.6 2.2 & 20.5 2.1 & 66.3 2.3 & 17.3 4.8",
            "DER": "76.2 2.8 & 24.8 10.9 & 66.9 4.5 & 24.7 4.8",
            "LO2LN": "82.0 1.3 & 12.8 3.3 & 78.1 3.4 & 10.1 3.9",
            "balanced": "85.0 3.1 & 8.0 3.5 & 80.9 2.9 & 5.2 2.5",
        },
    ),
    "eyepacs": (
        [("3-1", "Acc"), ("3-1", "Fgt")],
        {
            "iCaRL": "64.4 3.3 & 17.8 4.6",
            "UCIR": "70.2 7.6 & 15.4 11.4",
            "PODNet": "63.3 5.4 & 22.8 4.9",
            "DER": "58.7 9.4 & 30.2 6.9",
            "LO2LN": "81.9 2.5 & -0.2 0.8",
            "balanced": "82.8 2.8 & -0.5 0.7",
        },
    ),
    "ablation-components": (
        [("3-2", "Acc"), ("3-2", LO2LN_GROUPS)],
        {
            "CE + L_kd": "67.6 1.6 & 30.4 11.9",
            "+ L_dm": "80.2 2.8 & 8.6 4.0",
            "+ L_cbc": "83.6 2.9 & 13.1 6.0",
            "+ L_cbc + L_dm": "85.0 3.1 & 8.0 3.5",
        },
    ),
    "ablation-classification": (
        [("3-2", "Acc"), ("3-2", LO2LN_GROUPS)],
        {
            "CE": "80.2 2.8 & 8.6 4.0",
            "Focal": "81.5 2.4 & 12.6 5.2",
            "CB Focal": "82.9 3.1 & 14.5 6.3",
            "logit-balanced": "83.1 3.0 & 14.2 6.0",
            "CIL-balanced": "85.0 3.1 & 8.0 3.5",
        },
    ),
    "ablation-margin": (
        [("3-2", "Acc"), ("3-2", LO2LN_GROUPS)],
        {
            "without margin": "83.6 2.9 & 13.1 6.0",
            "margin ranking": "83.9 2.4 & 12.6 5.1",
            "distribution margin": "85.0 3.1 & 8.0 3.5",
        },
    ),
    "integration": (
        [("3-1", "Acc"), ("3-1", "Fgt")],
        {
            "iCaRL": "68.3 2.8 & 25.3 4.5",
            "iCaRL + L_dm": "69.2 3.1 & 23.7 8.1",
            "iCaRL + L_cbc": "70.8 2.8 & 21.9 6.5",
            "iCaRL + L_cbc + L_dm": "71.6 2.4 & 19.6 7.3",
            "UCIR": "74.1 3.1 & 16.3 9.1",
            "UCIR + L_dm": "75.7 4.6 & 13.9 8.2",
            "UCIR + L_cbc": "76.4 3.4 & 2.1 4.0",
            "UCIR + L_cbc + L_dm": "77.1 4.6 & 1.5 6.0",
        },
    ),
    "cifar100": (
        [("50-10 Conv", "Acc"), ("50-10 LT", "Acc"), ("50-5 Conv", "Acc"), ("50-5 LT", "Acc")],
        {
            "UCIR": "61.2 & 42.7 & 58.7 & 42.2",
            "PODNet": "63.2 & 44.1 & 61.2 & 44.0",
            "LWS": "64.6 & 44.4 & 62.6 & 44.4",
            "balanced": "65.8 & 48.2 & 63.9 & 47.5",
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_published_figures_are_the_papers(suites, name):
    columns, rows = PRINTED.get(name, ([], {}))
    published = {
        (row, setting, column): figures
        for row, settings in suites[name].published.items()
        for setting, cell in settings.items()
        for column, figures in cell.items()
    }
    assert published == {
        (row, *column): figures
        for row, text in rows.items()
        for column, figures in zip(columns, as_printed(text), strict=True)
    }
    tables = ["cch5000", "ham10000", "eyepacs", "ablation-components", "ablation-classification"]
    tables += ["ablation-margin", "integration", "cifar100"]
    if name in PRINTED:
        assert suites[name].number == f"Table {tables.index(name) + 1}"
        assert list(rows) == list(suites[name].rows)


@pytest.mark.parametrize("name", ["cch5000", "ham10000", "eyepacs"])
def test_the_baselines_figures_follow_from_the_released_runs_by_the_columns_own_metric(
    suites, shared_data, name
):
    suite = suites[name]
    content = json.loads((shared_data / "lo2ln_released_runs.json").read_text())
    matrices: dict[tuple[str, str], list[AccuracyMatrix]] = {}
    for run in content["runs"]:
        if run["dataset"] == name:
            support = np.array(content["test_counts"][name])[run["class_order"]]
            recall = np.full((len(run["steps"]), len(support)), np.nan)
            for step, measured in enumerate(run["steps"]):
                recall[step, : len(measured["per_class"])] = measured["per_class"]
            matrix = AccuracyMatrix(recall, support, tuple(run["sizes"]))
            matrices.setdefault((run["method"], run["protocol"]), []).append(matrix)
    for row in set(suite.rows) - {"balanced"}:
        for setting, columns in suite.published[row].items():
            for column, figures in columns.items():
                metric = METRICS[suite.metrics[column]].function
                runs = [100 * metric(matrix) for matrix in matrices[METHOD_OF[row], setting]]
                assert len(runs) == 3
                # Released recalls have three digits.
                assert mean_and_deviation(runs) == pytest.approx(figures, abs=0.11)


def test_the_figures_of_the_paper_are_all_there(suites):
    figures = [figure for suite in suites.values() for figure in suite.figures if figure.number]
    numbers = Counter(str(figure.number).partition(",")[0].removeprefix("Figure ") for figure in figures)
    assert numbers == Counter(["3a", "3b", "3c", "4a", "4b", "4c", "5", "5", "6a", "6b", "7a", "7b"])


def test_the_pairs_of_table_4_bring_in_one_loss_each(suites):
    alone, dm, cbc, both = suites["ablation-components"].rows
    assert suites["ablation-components"].compare == ((dm, alone), (cbc, alone), (both, dm), (both, cbc))


def test_the_pairs_of_table_7_are_every_plug_in_with_its_method(suites):
    suite = suites["integration"]
    with_plugins = [row for row in suite.rows if " + " in row]
    assert len(with_plugins) == 6
    assert list(suite.compare) == [(row, row.partition(" + ")[0]) for row in with_plugins]


def test_a_published_figure_of_an_unknown_column_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "title: mine\nmetrics: {Acc: acc_micro}\ncommon: {data: {name: phantom}, method: balanced}\n"
        "settings: {3-2: {scenario: {base: 3, increment: 2}}}\nrows: {balanced: {}}\n"
        "published: {balanced: {3-2: {Ac: [1.0]}}}\n"
    )
    with pytest.raises(InvalidInput, match=r"published.balanced.3-2: there is no 'Ac'.*Acc"):
        load_suite(str(path))


OWN = {
    "title": "mine",
    "metrics": {"Acc": "acc_micro"},
    "common": {"data": {"name": "phantom"}, "method": "balanced"},
    "settings": {"3-2": {"scenario": {"base": 3, "increment": 2}}, "5-2": {"scenario": {"order": "seed-1"}}},
    "rows": {"balanced": {}},
}


def figure(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "title": "t", "file": "f", **options}


def tradeoff(**options: Any) -> dict[str, Any]:
    return figure("tradeoff", **{"x": "Acc", "y": "Acc", **options})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"figures": [figure("curves", file="../f")]}, r"figures\.0\.file: .*'\.\./f'"),
        ({"figures": [figure("curves", file="..")]}, r"figures\.0\.file: .*'\.\.'"),
        ({"figures": [figure("curves"), figure("confusion")]}, "figures: file: 'f' appears twice"),
        ({"figures": [figure("curves", metric="mikro")]}, "curves cannot show 'mikro'. Did you mean 'micro'"),
        ({"figures": [figure("heatmap", metric="micro")]}, "heatmap cannot show 'micro'.*acc_micro"),
        ({"figures": [figure("tsne", metric="micro")]}, "tsne cannot show 'micro'. Leave it out"),
        ({"figures": [figure("tsne", order=3)]}, "figures.f.order, 3-2: there is no 3. Known: 0, 1, 2"),
        ({"figures": [figure("tsne", order=0)]}, "figures.f.order, 5-2: there is no 0. Known: seed-1"),
        ({"figures": [tradeoff(x="Ac")]}, "figures.f.x: there is no 'Ac'. Did you mean 'Acc'"),
        ({"figures": [tradeoff(y="acc_balanced")]}, "figures.f.y: there is no 'acc_balanced'. Known: Acc"),
        ({"figures": [tradeoff(y="")]}, "figures.f.y: there is no ''. Known: Acc"),
        ({"figures": [figure("tradeoff", x="Acc")]}, "y is missing. Add it: the column of the table"),
        ({"figures": [figure("tradeoff", y="Acc")]}, "x is missing. Add it: the column of the table"),
        ({"figures": [tradeoff(metric="acc_micro")]}, "tradeoff cannot show 'acc_micro'. Leave it out"),
        ({"figures": [tradeoff(rows=["balance"])]}, "figures.f.rows: there is no 'balance'.*'balanced'"),
        ({"figures": [figure("curves", x="Acc")]}, "x: a figure of kind curves has no such key"),
        ({"vary": {"method.alpha": []}}, "vary.method.alpha: .*at least 1 item"),
        ({"orders": [0, 1, 0]}, "orders: 0 appears twice"),
    ],
)
def test_what_a_suite_cannot_mean_is_refused_when_it_is_read(tmp_path, changes, said):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN | changes))
    with pytest.raises(InvalidInput, match=said):
        load_suite(str(path))


def test_a_suite_may_show_an_order_of_one_setting(tmp_path):
    path = tmp_path / "mine.yaml"
    figures = [figure("tsne", order=0, settings=["3-2"]), figure("line", file="a.b-c_1", metric="last_micro")]
    path.write_text(yaml.safe_dump(OWN | {"figures": figures}))
    assert [each.file for each in load_suite(str(path)).figures] == ["f", "a.b-c_1"]
    path.rename(tmp_path / "...yaml")
    with pytest.raises(InvalidInput, match=r"'\.\.' is not a valid file name"):
        load_suite(str(tmp_path / "...yaml"))


def test_the_suite_in_the_docs_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/suites.md").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    assert len(runs_of_suite(load_suite(str(path)))) == 2 * 2 * 3


def images_seen(config: RunConfig) -> int:
    """Training images of a run's first stages: over the tasks, epochs times new images and exemplars."""
    dataset = DATASETS[config.data.name]
    counts = dataset.published_counts
    if "train" in counts:
        per_class = list(counts["train"])
    elif "total" in counts:
        per_class = [round((1 - config.data.split_share) * n) for n in counts["total"]]
    else:
        per_class = [dataset.published_sizes["train"] // len(dataset.class_names)] * len(dataset.class_names)
    if (tail := config.scenario.long_tail) is not None:
        labels = np.repeat(np.arange(len(per_class)), per_class)
        left = labels[long_tail(labels, ratio=tail.ratio, seed=tail.seed)]
        per_class = np.bincount(left, minlength=len(per_class)).tolist()
    order, sizes = arrangement(config, dataset)
    arriving = [per_class[c] for c in order]
    total = 0
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        begin = 0 if config.scenario.cumulative else end - size
        memory = sum(min(n, config.memory.quota(begin)) for n in arriving[:begin])
        epochs = config.training_of_task(is_first=begin == 0).epochs
        total += epochs * (sum(arriving[begin:end]) + memory)
    return total


def test_the_docs_name_every_suite_with_its_runs_and_images(plans):
    page = (Path(__file__).parents[2] / "docs/reference/suites.md").read_text()
    rows = [[part.strip(" `") for part in line.split("|")] for line in page.splitlines() if line[:3] == "| `"]
    everything = plans | {"smoke": runs_of_suite(load_suite("smoke"))}
    assert {name: n for _, name, _, _, n, *_ in rows} == {
        name: str(len(runs)) for name, runs in everything.items()
    }
    images = {run.key: images_seen(run.config) for name in PAPERS for run in plans[name]}
    for _, name, _, factors, n, shown, *_ in rows:
        assert math.prod(int(factor) for factor in factors.split(" x ")) == int(n)
        millions = sum(images.get(run.key, 0) for run in everything[name]) / 1e6
        assert name in ("smoke", *OURS) or shown.startswith(f"{millions:.1f} M")
    on_ham10000 = {run.key for name in ON_HAM10000 for run in plans[name]}
    prose = " ".join(page.split())
    assert f"{len(images)} runs and {sum(images.values()) / 1e6:.0f} M training images" in prose
    assert f"{sum(RUNS[name] for name in ON_HAM10000)} places and {len(on_ham10000)} runs" in prose
