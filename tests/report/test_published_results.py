"""The folders under results/: recipes still mean the runs that were made, tables are those of the runs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from medcil.experiments.plan import runs_of_suite
from medcil.experiments.suite import load_suite
from medcil.metrics.catalogue import of_recalls
from medcil.recipe import differences
from medcil.report.results import read_results
from medcil.report.runs import read_archive, read_run
from medcil.report.suite import write_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SUITES = sorted(path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("suite.yaml"))
TABLES = [name for name in SUITES if "/" not in name]
STUDIES = sorted(path.stem for path in (ROOT / "recipes/study").glob("*.yaml"))
NOT_KEPT = {
    ("ham10000-4", "kl, mixup .4"),
    ("ham10000-5", "strong, 40 epochs, mixup .2"),
    ("ham10000-8", "distillation on exemplars"),
    ("ham10000-8", "distillation on exemplars by L1"),
    ("ham10000-8", "weight by the share of old classes"),
}
"""Rows that ran with a change of the code, whose patch is in their folder, or with an option that is gone."""
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
    return {
        tuple(place[:3]): run.content["config"]
        for run in read_archive(RESULTS / name / "runs.jsonl")
        for place in run.content["places"]
    }


def drawn_by(identity: dict) -> str:
    return identity["method"].get("sampler") or identity["training"]["sampler"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_recipe_of_the_study_is_what_was_run(name):
    planned = {
        tuple(place[:3]): run.config.identity()
        for run in runs_of_suite(load_suite(str(ROOT / f"recipes/study/{name}.yaml")))
        for place in run.places
    }
    records = {
        place: config
        for place, config in recorded(f"study/{name}").items()
        if (name, place[0]) not in NOT_KEPT
    }
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


@pytest.mark.parametrize("name", TABLES)
def test_a_suite_is_what_its_table_was_made_of(name):
    runs = read_archive(RESULTS / name / "runs.jsonl")
    (changes,) = {tuple(run.content["set"]) for run in runs}
    planned = {run.key: run.places for run in runs_of_suite(load_suite(name), list(changes))}
    for run in runs:
        places = {(place.row, place.setting, place.order) for place in planned[run.content["key"]]}
        assert {tuple(place[:3]) for place in run.content["places"]} <= places


@pytest.mark.parametrize("name", SUITES)
def test_tables_drawn_again_have_the_same_numbers(name, tmp_path):
    written = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    results = replace(read_results(RESULTS / name), folder=tmp_path)
    write_tables(results)
    drawn = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert lines_of_tables(drawn) == lines_of_tables(written)
    assert len(re.findall(r"\d", written)) > 80


def lines_of_tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_every_line_of_results_is_a_finished_run_with_its_metrics():
    """Metrics that are younger than a run are computed from its recalls: they must be those of its recipe."""
    files = sorted(RESULTS.rglob("runs.jsonl"))
    runs = [run for file in files for run in read_archive(file)]
    assert len(runs) > 700
    for run in runs:
        assert read_run(run).is_finished
        metrics = run.content["metrics"]
        computed = of_recalls([step["recall"] for step in metrics["steps"]], metrics["task_sizes"])
        written = {name: metrics[name] for name in computed if name in metrics}
        assert {"acc_balanced", "forgetting", "forgetting_lo2ln"} <= set(written)
        assert {name: computed[name] for name in written} == pytest.approx(written, abs=1e-12)
