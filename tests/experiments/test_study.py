"""Recipes of studies and tables still mean the runs that were recorded, whatever the defaults are now."""

import json
from pathlib import Path

import pytest
import yaml

from medcil.experiments.suite import load_suite
from medcil.experiments.suite_runs import plan
from medcil.metrics import of_recalls
from medcil.recipe import differences

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/results/study"
TABLES = ROOT / "docs/results/tables"
STUDIES = sorted(path.stem for path in (ROOT / "recipes/study").glob("*.yaml"))
NOT_KEPT = {("ham10000-4", "kl, mixup .4"), ("ham10000-5", "strong, 40 epochs, mixup .2")}
"""Rows that ran with a change of the code; the patch lies with their records."""
EVERY_EXEMPLAR = {
    "ham10000-5",
    "ham10000-6",
    "ham10000-7",
    "ham10000-8",
    "ham10000-first-step",
    "aptos2019-1",
}
"""Run since a batch without `exemplar_share` holds a quarter of exemplars or more."""
LEARNED_LATER = ("training.exemplar_share", "method.sampler", "data.held_out")


def recorded(name: str) -> dict[tuple[str, str, int], dict]:
    runs = json.loads((RECORDS / name / "runs.json").read_text())["runs"]
    return {
        tuple(place[:3]): yaml.safe_load((RECORDS / "runs" / run["key"] / "config.yaml").read_text())
        for run in runs
        for place in run["places"]
    }


def drawn_by(identity: dict) -> str:
    return identity["method"].get("sampler") or identity["training"]["sampler"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_recipe_of_the_study_is_what_was_run(name):
    planned = {
        tuple(place[:3]): run.config.identity()
        for run in plan(load_suite(str(ROOT / f"recipes/study/{name}.yaml")))
        for place in run.places
    }
    records = {place: config for place, config in recorded(name).items() if (name, place[0]) not in NOT_KEPT}
    assert {place[0] for place in records} == {place[0] for place in planned}
    for place, config in records.items():
        now = planned[place]
        for section in ("seed", "data", "scenario", "network", "memory", "training", "first_task", "method"):
            then = {section: config[section]}
            changed = [
                line
                for line in differences(then, {section: now[section]})
                if not line.startswith((*LEARNED_LATER, "data.root", "network.weights"))
            ]
            assert changed == []
        assert drawn_by(now) == drawn_by(config)
        if drawn_by(now) == "two_stream":
            unset = None if name in EVERY_EXEMPLAR else 0.25
            assert now["training"]["exemplar_share"] == (config["training"].get("exemplar_share") or unset)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in TABLES.glob("*/runs.json")))
def test_a_suite_is_what_its_table_was_made_of(name):
    record = json.loads((TABLES / name / "runs.json").read_text())
    planned = {run.key: run.places for run in plan(load_suite(name), record["set"])}
    for run in record["runs"]:
        places = {(place.row, place.setting, place.order) for place in planned[run["key"]]}
        assert {tuple(place[:3]) for place in run["places"]} <= places
        assert (TABLES / "runs" / run["key"] / "metrics.json").exists()


def test_recalls_of_recorded_runs_give_the_metrics_that_were_recorded():
    """So that one which is younger than a run can be computed for it as well."""
    paths = [*RECORDS.glob("runs/*/metrics.json"), *TABLES.glob("runs/*/metrics.json")]
    assert len(paths) > 100
    for path in paths:
        metrics = json.loads(path.read_text())
        found = of_recalls([step["recall"] for step in metrics["steps"]], metrics["task_sizes"])
        written = {name: metrics[name] for name in found if name in metrics}
        assert {"acc_balanced", "forgetting", "forgetting_lo2ln"} <= set(written)
        assert {name: found[name] for name in written} == written
