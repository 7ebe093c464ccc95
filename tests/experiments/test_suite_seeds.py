"""Seeds and named pairs of a suite: which runs they are, and what cannot be meant."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from medcil.build import parse_recipe, resolve
from medcil.errors import InvalidInput
from medcil.experiments.plan import run_key, runs_of_suite
from medcil.experiments.suite import Place, Suite, known_suites, load_suite

TABLE_4 = known_suites()["ablation-components"]
OWN = {
    "title": "mine",
    "metrics": {"Acc": "acc_micro"},
    "common": {"data": {"name": "phantom"}, "method": "balanced"},
    "settings": {
        "3-2": {"scenario": {"base": 3, "increment": 2}},
        "5-2": {"scenario": {"base": 5, "increment": 2, "order": "seed-1"}},
    },
    "rows": {"a": {}, "b": {"memory": {"per_class": 5}}},
}


def merged(*pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, the later over the earlier: enough where all rows are of one method."""
    result: dict[str, Any] = {}
    for piece in pieces:
        for key, value in piece.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def keys_by_hand(content: Mapping[str, Any], seed: int | None = None) -> dict[tuple[str, str, int], str]:
    """From the file itself, for the suite's places."""
    changed = {} if seed is None else {"seed": seed}
    return {
        (row, setting, order): run_key(
            resolve(
                parse_recipe(
                    merged(content["common"], piece, own, {"scenario": {"order": order}}, changed),
                    source="by hand",
                )
            )
        )
        for setting, piece in content["settings"].items()
        for row, own in content["rows"].items()
        for order in content["orders"]
    }


def test_without_seeds_the_runs_are_those_of_the_file_as_it_is_written():
    planned = runs_of_suite(load_suite("ablation-margin"))
    listed = {tuple(place.as_list()): run.key for run in planned for place in run.places}
    assert listed == keys_by_hand(yaml.safe_load(known_suites()["ablation-margin"].read_text()))
    assert all(len(place) == 3 for place in listed)


def test_every_place_has_a_run_with_each_seed_and_shares_it_with_suites_of_that_seed():
    content = yaml.safe_load(TABLE_4.read_text())
    runs = runs_of_suite(Suite.model_validate(content | {"seeds": [1, 0]}))
    assert len(runs) == 4 * 3 * 2
    assert [run.places[0].seed for run in runs[:4]] == [1, 0, 1, 0]
    found = {tuple(place.as_list()): run.key for run in runs for place in run.places}
    for seed in (0, 1):
        own = {place[:3]: key for place, key in found.items() if place[3] == seed}
        assert own == keys_by_hand(content, seed)
    assert {run.config.seed for run in runs} == {0, 1}


def test_a_setting_with_its_own_order_has_its_runs_with_each_seed():
    suite = Suite.model_validate(OWN | {"seeds": [7, 3]})
    assert suite.places("a", "5-2") == [Place("a", "5-2", "seed-1", 7), Place("a", "5-2", "seed-1", 3)]
    assert len(runs_of_suite(suite)) == 2 * (3 + 1) * 2


def test_a_seed_that_tells_runs_apart_cannot_be_set():
    suite = Suite.model_validate(OWN)
    assert {run.config.seed for run in runs_of_suite(suite, ["seed=4"])} == {4}
    with pytest.raises(InvalidInput, match=r"--set changes seed, .* --seeds"):
        runs_of_suite(Suite.model_validate(OWN | {"seeds": [0, 1]}), ["seed=4"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [0, 1, 0]}, "seeds: 0 appears twice. Name each once."),
        ({"seeds": []}, "seeds: Tuple should have at least 1 item"),
        ({"seeds": [0, -1]}, r"seeds.1: Input should be greater than or equal to 0 \(got -1\)"),
        ({"seeds": [0], "common": {"seed": 0}}, "`seeds` sets every run's seed"),
        ({"seeds": [0], "settings": {"3-2": {"seed": 1}}}, "`seeds` sets every run's seed"),
        ({"seeds": [0], "rows": {"a": {}, "b": {"seed": 1}}}, "`seeds` sets every run's seed"),
        ({"seeds": [0], "vary": {"seed": [0, 1]}}, "`seeds` sets every run's seed"),
        ({"compare": [["a", "c"]]}, "compare: there is no 'c'. Known: a, b."),
        ({"compare": [["balanced", "a"]]}, "compare: there is no 'balanced'"),
        ({"compare": [["a", "b"], ["a", "b"]]}, "compare: 'a minus b' appears twice"),
        ({"compare": [["a", "a"]]}, "compare: 'a' appears twice. Name each once."),
        ({"compare": [["a"]]}, "compare.0.1' is missing: add it"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_the_first_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN | changes))
    with pytest.raises(InvalidInput) as refusal:
        load_suite(str(path))
    first, *_ = str(refusal.value).splitlines()
    assert re.search(said, first), first


def test_a_pair_may_be_named_both_ways_and_with_varied_rows():
    varied = OWN | {"rows": {"a": {}}, "vary": {"memory.per_class": [5, 10]}}
    five, ten = "a, memory.per_class = 5", "a, memory.per_class = 10"
    suite = Suite.model_validate(varied | {"compare": [[five, ten], [ten, five]]})
    assert suite.compare == ((five, ten), (ten, five))


def test_seeds_and_pairs_in_the_docs_are_those_of_table_4():
    page = (Path(__file__).parents[2] / "docs/reference/suites.md").read_text()
    shown = yaml.safe_load(page.split("```yaml\n")[2].split("```")[0])
    assert {*shown} == {"orders", "seeds", "compare"}
    assert shown == {key: yaml.safe_load(TABLE_4.read_text())[key] for key in shown}
