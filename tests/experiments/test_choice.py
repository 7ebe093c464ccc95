"""Which runs of a suite `--only`, `--orders` and `--seeds` ask for."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from medcil.errors import InvalidInput
from medcil.experiments.plan import plan_sweep
from medcil.experiments.suite import Request
from medcil.experiments.sweep import sweep

from .tiny_suite import SameProcess, ended_with, pretend, runs_of, write_suite

SUITE = """
title: Three rows in three settings
metrics: {Acc: acc_micro}
orders: [0, 1]
seeds: [0, 1]
common: {data: {name: phantom}}
settings:
  3-2: {scenario: {base: 3, increment: 2}}
  3-1: {scenario: {base: 3, increment: 1}}
  balanced 5-2: {scenario: {base: 5, increment: 2, order: seed-7}, memory: {per_class: 5}}
rows:
  UCIR: {method: ucir}
  balanced: {method: balanced}
  balanced 2: {method: balanced, training: {epochs: 2}}
"""
ROWS, SETTINGS = {"UCIR", "balanced", "balanced 2"}, {"3-2", "3-1", "balanced 5-2"}
PLACES = {
    (row, setting, order, seed)
    for row in ROWS
    for setting in SETTINGS
    for order in (("seed-7",) if setting == "balanced 5-2" else (0, 1))
    for seed in (0, 1)
}
LIKE: dict[str, tuple[set[str], set[str]]] = {
    "UCIR": ({"UCIR"}, set()),
    "Balanced": ({"balanced"}, set()),
    "balanced ?": ({"balanced 2"}, set()),
    "3-2": (set(), {"3-2"}),
    "3-*": (set(), {"3-2", "3-1"}),
    "balanced*": ({"balanced", "balanced 2"}, {"balanced 5-2"}),
    "*2": ({"balanced 2"}, {"3-2", "balanced 5-2"}),
    "*": (ROWS, SETTINGS),
}
"""Pattern -> the rows and the settings like it, read off by hand."""


@pytest.fixture
def grid(tmp_path: Path) -> Request:
    return Request(str(write_suite(tmp_path, SUITE, name="grid")), tmp_path / "out")


def asked(request: Request) -> set[tuple[object, ...]]:
    return {tuple(place) for run in plan_sweep(request).runs for place in run.places}


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_the_rows_named_in_the_settings_named(grid, n):
    for patterns in combinations(LIKE, n):
        rows = set().union(*(LIKE[pattern][0] for pattern in patterns)) or ROWS
        settings = set().union(*(LIKE[pattern][1] for pattern in patterns)) or SETTINGS
        expected = {place for place in PLACES if place[0] in rows and place[1] in settings}
        assert asked(replace(grid, only=patterns)) == expected, patterns
        assert asked(replace(grid, only=patterns[::-1])) == expected, patterns


def test_a_row_a_setting_an_order_and_a_seed_leave_one_run(grid):
    one = replace(grid, only=("ucir", "3-1"), orders=("1",), seeds=("0",))
    assert asked(one) == {("UCIR", "3-1", 1, 0)}


def test_what_is_like_a_row_and_a_setting_chooses_both(grid):
    assert asked(replace(grid, only=("*",))) == PLACES
    assert asked(replace(grid, only=("*", "balanced"))) == PLACES
    assert asked(replace(grid, only=("BALANCED *",))) == {
        ("balanced 2", "balanced 5-2", "seed-7", 0),
        ("balanced 2", "balanced 5-2", "seed-7", 1),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"only": ("balanced", "3-3")},
            r"^--only '3-3' matches no row or setting\. Did you mean '3-[12]'\?$",
        ),
        (
            {"only": ("balancd", "3-2")},
            r"^--only 'balancd' matches no row or setting\. Did you mean 'balanced'\?$",
        ),
        (
            {"only": ("UCIR", "x*")},
            r"^--only 'x\*' matches no row or setting\. Known: 3-1, 3-2, UCIR, balanced, ",
        ),
        ({"only": ("UCIR", "3-2"), "orders": ("seed-7",)}, "select no run"),  # an order of another setting
    ],
)
def test_a_choice_of_nothing_is_refused_before_anything_is_written(grid, given, message):
    with pytest.raises(InvalidInput, match=message):
        plan_sweep(replace(grid, **given))
    assert not grid.out.exists()


def test_a_run_at_two_places_is_asked_for_by_either_and_shown_at_both(tmp_path):
    text = SUITE.replace("balanced 2: {method: balanced, training: {epochs: 2}}", "again: {method: ucir}")
    request = Request(str(write_suite(tmp_path, text)), tmp_path / "out", orders=("0",), seeds=("0",))
    both = {("UCIR", "3-2", 0, 0), ("again", "3-2", 0, 0)}
    assert asked(replace(request, only=("UCIR", "3-2"))) == both
    assert asked(replace(request, only=("again", "3-2"))) == both


def test_runs_of_other_choices_are_shown_once_they_are_finished(grid):
    request = replace(grid, orders=("0",), seeds=("0",))
    first = {("balanced", "3-2", 0, 0), ("balanced", "3-1", 0, 0)}
    second = {("UCIR", "3-1", 0, 0), ("balanced", "3-1", 0, 0)}
    launcher = SameProcess(pretend)
    for only, shown in ((("balanced", "3-*"), first), (("ucir", "balanced", "3-1"), first | second)):
        sweep(plan_sweep(replace(request, only=only)), launcher)
        runs = runs_of(request.out, "grid")
        assert {tuple(place) for run in runs for place in run["places"]} == shown
        assert {run["state"] for run in runs} == {"finished"}
        assert len(launcher.started) == len(shown)


def test_runs_asked_for_are_shown_before_they_are_finished(grid):
    def interrupt(job: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(plan_sweep(replace(grid, only=("UCIR", "3-2"))), SameProcess(interrupt))
    shown = {tuple(place): run["state"] for run in runs_of(grid.out, "grid") for place in run["places"]}
    assert shown == {("UCIR", "3-2", order, seed): "unfinished" for order in (0, 1) for seed in (0, 1)}


def test_the_command_takes_a_row_and_a_setting(tmp_path, capsys):
    images = tmp_path / "cifar" / "cifar-100-python"
    images.mkdir(parents=True)
    for name in ("train", "test", "meta"):
        (images / name).touch()
    given = ["bench", "cifar100", "--data", images.parent, "--out", tmp_path / "out", "--dry-run"]
    for only, n in (
        (["balanced", "50-10 LT"], 1),
        (["balanced", "50-* LT"], 2),
        (["50-10 LT", "50-5 LT"], 8),
    ):
        assert ended_with([*given, *(part for pattern in only for part in ("--only", pattern))]) == 0
        assert f"{n} runs · {n} to compute" in capsys.readouterr().out
