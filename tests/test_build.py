"""Names in a recipe become things, or an error that says what to do."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from medcil.build import (
    build_method,
    build_stream,
    class_order,
    load_recipe,
    method_settings,
    parse_recipe,
    resolve,
)
from medcil.config import RunConfig
from medcil.data.datasets import find_dataset
from medcil.errors import InvalidInput
from medcil.method import Increment, Method, Phase
from medcil.methods import METHODS, PRESETS
from medcil.methods.balanced import Balanced
from medcil.methods.finetune import Finetune
from medcil.models.network import Network

RECIPE = {
    "data": {"name": "phantom", "side": 12, "crop": 8},
    "scenario": {"base": 3, "increment": 2},
    "method": {"name": "balanced"},
}
GENTLE = {
    "method": {"alpha": 0.7, "margin_weight": 0.2},
    "training": {"epochs": 70, "learning_rates": {"classifier": 2.0, "backbone": 1.0}},
    "memory": {"total": 2000},
    "first_task": {"epochs": 5},
}


@dataclass(frozen=True)
class Around:
    """A method with a method in it."""

    base: Method = Balanced(alpha=0.9)  # noqa: RUF009  # a frozen one
    share: float = 0.5
    scoring: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        yield from self.base.learn(network, increment)


@pytest.fixture
def _around(monkeypatch):
    monkeypatch.setitem(METHODS, "around", Around)


@pytest.fixture
def _presets(monkeypatch):
    presets = {"gentle": GENTLE, "harsh": {"method": {"alpha": 0.1}}}
    monkeypatch.setitem(PRESETS, "balanced", presets)
    monkeypatch.setitem(PRESETS, "finetune", {"gentle": {"training": {"epochs": 3}}})
    monkeypatch.delitem(PRESETS, "replay", raising=False)


def config(**changes) -> RunConfig:
    return RunConfig.model_validate({**RECIPE, **changes})


def test_a_method_is_built_from_its_fields():
    assert build_method({"name": "balanced", "alpha": 0.7, "margin": "none"}) == Balanced(
        alpha=0.7, margin="none"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "balnced"}, r"no method 'balnced'. Did you mean 'balanced'\?"),
        ({"name": "balanced", "alhpa": 1}, r"unknown key 'method.alhpa' of balanced. Did you mean 'alpha'\?"),
        ({"name": "balanced", "alpha": 2}, r"alpha must lie in \(0, 1\]"),
        ({"name": "balanced", "margin": "large"}, r"method.margin"),
        ({"name": "balanced", "detach_range": "perhaps"}, r"method.detach_range"),
    ],
)
def test_a_wrong_method_is_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        build_method(settings)


def test_the_resolved_recipe_holds_every_default_of_its_method():
    resolved = resolve(config())
    assert resolved.label == "balanced"
    assert resolved.method["alpha"] == Balanced().alpha
    assert resolve(resolved) == resolved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": {"base": 3, "increment": 2, "order": 3}}, "has orders 0..2, not 3"),
        ({"scenario": {"base": 3, "increment": 2, "order": [0, 1]}}, "must name each of 0..6"),
        ({"scenario": {"base": 9, "increment": 2}}, "only 7 classes"),
        ({"memory": {"total": 6}}, "less than 7 classes"),
        ({"data": {"name": "phantm"}}, "Did you mean 'phantom'"),
    ],
)
def test_an_impossible_scenario_is_refused(changes, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(config(**changes))


def test_a_stream_follows_the_order_of_the_recipe():
    stream = build_stream(config(scenario={"base": 4, "increment": 2, "order": [6, 5, 4, 3, 2, 1, 0]}))
    names = find_dataset("phantom").class_names
    assert stream.sizes == (4, 2, 1)
    assert [task.class_names for task in stream.tasks()] == [names[:2:-1], names[2:0:-1], names[:1]]
    assert class_order(config(), find_dataset("phantom")) == find_dataset("phantom").orders[0]


@pytest.mark.usefixtures("_around")
@pytest.mark.parametrize(
    ("base", "built"),
    [
        ("finetune", Finetune()),
        ({"name": "finetune"}, Finetune()),
        ({"name": "balanced", "beta": "0.5"}, Balanced(beta=0.5)),
        ({"name": "around", "base": "finetune"}, Around(base=Finetune())),
    ],
)
def test_a_method_can_hold_a_method(base, built):
    method = build_method({"name": "around", "base": base, "share": 1})
    assert method == Around(base=built, share=1.0)
    assert build_method(method_settings(method)) == method


@pytest.mark.usefixtures("_around")
def test_a_method_held_by_default_is_written_out():
    settings = method_settings(build_method({"name": "around"}))
    assert list(settings) == ["name", "base", "share", "scoring"]
    assert settings["base"] == method_settings(Balanced(alpha=0.9))
    assert settings["base"]["name"] == "balanced"


@pytest.mark.usefixtures("_around")
@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("balnced", r"method\.base\.name: there is no method 'balnced'. Did you mean 'balanced'\?"),
        ({"alpha": 0.5}, r"method\.base has no name"),
        (5, r"method\.base has no name"),
        ({"name": 5}, r"method\.base\.name: there is no method 5"),
        ({"name": "balanced", "alhpa": 1}, r"unknown key 'method\.base\.alhpa'.*Did you mean 'alpha'\?"),
        ({"name": "balanced", "n_rivals": "many"}, r"method\.base\.n_rivals: .*\(got 'many'\)"),
        ({"name": "balanced", "alpha": float("nan")}, r"method\.base\.alpha: .*finite number"),
        ({"name": "around", "base": {"name": "finetune", "x": 1}}, r"unknown key 'method\.base\.base\.x'"),
        ({"name": "balanced", "plugins": {"drop": ["margin"]}}, r"unknown key 'method\.base\.plugins'"),
        ({"name": "balanced", "preset": "gentle"}, r"unknown key 'method\.base\.preset'"),
    ],
)
def test_a_wrong_method_in_a_method_is_named_by_its_path(base, message):
    with pytest.raises(InvalidInput, match=message):
        build_method({"name": "around", "base": base})


def test_the_settings_of_a_method_outside_the_table_are_refused():
    with pytest.raises(LookupError, match="Around is not in"):
        method_settings(Around())


@pytest.mark.usefixtures("_presets")
def test_a_preset_in_a_recipe_lies_beneath_it():
    content = {**RECIPE, "method": {"name": "balanced", "preset": "gentle", "alpha": 0.4}}
    content["training"] = {"learning_rates": {"classifier": 0.3}}
    found = parse_recipe(content, ["training.epochs=8"])
    assert (found.method["alpha"], found.method["margin_weight"]) == (0.4, 0.2)
    rates = found.training.learning_rates
    assert (found.training.epochs, rates.classifier, rates.backbone) == (8, 0.3, 1.0)
    assert (found.memory.total, found.first_task.epochs) == (2000, 5)


@pytest.mark.usefixtures("_presets")
def test_a_preset_of_a_setting_lies_over_the_recipe_and_beneath_the_settings():
    content = {
        **RECIPE,
        "method": {"name": "balanced", "alpha": 0.4, "beta": 0.5},
        "memory": {"per_class": 5},
    }
    content["training"] = {"epochs": 9, "decay": 0.5}
    found = parse_recipe(content, ["method.margin_weight=0.3", "method.preset=gentle", "seed=4"])
    assert dict(found.method) == {
        "name": "balanced",
        "preset": "gentle",
        "alpha": 0.7,
        "beta": 0.5,
        "margin_weight": 0.3,
    }
    assert (found.training.epochs, found.training.decay, found.seed) == (70, 0.5, 4)
    assert (found.memory.per_class, found.memory.total) == (None, 2000)


@pytest.mark.usefixtures("_presets")
@pytest.mark.parametrize(
    ("settings", "preset", "alpha", "epochs"),
    [
        ([], "gentle", 0.7, 70),
        (["method.name=balanced"], "gentle", 0.7, 70),
        (["method.preset=gentle"], "gentle", 0.7, 70),
        (["method.preset=harsh"], "harsh", 0.1, 100),
        (["method={name: balanced, preset: harsh}"], "harsh", 0.1, 100),
        (["method.preset=null"], None, None, 100),
        (["method={name: balanced}"], None, None, 100),
        (["method=balanced"], None, None, 100),
        (["method=finetune"], None, None, 100),
        (["method.name=finetune"], None, None, 100),
        (["method.name=finetune", "method.preset=gentle"], "gentle", None, 3),
        (["method={name: finetune, preset: gentle}", "training.epochs=4"], "gentle", None, 4),
        (["method.name=replay"], None, None, 100),
    ],
)
def test_only_the_preset_named_last_counts(settings, preset, alpha, epochs):
    content = {**RECIPE, "method": {"name": "balanced", "preset": "gentle"}}
    found = parse_recipe(content, settings)
    assert (found.method.get("preset"), found.method.get("alpha")) == (preset, alpha)
    assert found.training.epochs == epochs
    assert found.memory.total == (2000 if alpha == 0.7 else None)
    assert resolve(found).method.get("preset") == preset


@pytest.mark.usefixtures("_presets")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.preset=gentl"], r"method\.preset: balanced has no preset 'gentl'. Did you mean 'gentle'\?"),
        (["method.preset=xyz"], r"balanced has no preset 'xyz'. Known: gentle, harsh\."),
        (["method.preset=[gentle]"], r"balanced has no preset \['gentle'\]"),
        (["method.name=replay", "method.preset=gentle"], r"replay has no presets: leave the key out"),
        (["method.name=balancd", "method.preset=gentle"], r"Did you mean 'balanced'\?"),
        (["method={preset: gentle}"], r"method has no name"),
        (["method=5", "method.preset=gentle"], r"method has no name"),
    ],
)
def test_an_unknown_preset_is_refused(settings, message):
    with pytest.raises(InvalidInput, match=message):
        parse_recipe(RECIPE, settings)


@pytest.mark.usefixtures("_presets")
def test_a_configuration_that_names_an_unknown_preset_is_not_resolved():
    with pytest.raises(InvalidInput, match="balanced has no preset 'gentl'"):
        resolve(config(method={"name": "balanced", "preset": "gentl"}))


@pytest.mark.usefixtures("_presets", "_around")
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["method.preset=gentle"],
        ["method.preset=gentle", "method.alpha=0.2", "memory.per_class=7", "first_task.epochs=null"],
        ["method.preset=gentle", "method.plugins.classification=focal"],
        ["method.preset=plugged"],
        ["method.preset=plugged", "method.plugins=null"],
        ["method.preset=plugged", "method.plugins.margin=none", "method.plugins.drop=[]"],
        ["method.preset=plugged", "method.plugins.margin=ranking"],
        ["method.name=around", "method.preset=nested"],
        ["method.name=around", "method.preset=nested", "method.base=finetune"],
    ],
)
def test_a_resolved_recipe_is_the_same_run_again(tmp_path, monkeypatch, settings):
    plugged = {
        "method": {"plugins": {"margin": {"kind": "vanilla", "weight": 0.3}, "drop": ["distillation"]}}
    }
    monkeypatch.setitem(PRESETS, "balanced", {"gentle": GENTLE, "plugged": plugged})
    nested = {"method": {"base": {"name": "balanced", "alpha": 0.2}}}
    monkeypatch.setitem(PRESETS, "around", {"nested": nested})
    before = resolve(parse_recipe(RECIPE, settings))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(before.model_dump(mode="json")))
    again = resolve(load_recipe(path))
    assert again == before
    assert again.identity() == before.identity()
    has_preset = any("preset" in setting for setting in settings)
    assert list(again.method)[:2] == (["name", "preset"] if has_preset else ["name", "classification"])


def test_a_recipe_in_a_file_is_a_recipe_in_a_dictionary(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    assert load_recipe(path, ["seed=4"]) == parse_recipe(RECIPE, ["seed=4"])
    with pytest.raises(InvalidInput, match=r"^.*recipe\.yaml: unknown key 'sed'"):
        load_recipe(path, ["sed=4"])


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in PRESETS for preset in PRESETS[name]])
def test_every_preset_fits_its_method(name, preset):
    assert not {"name", "preset"} & set(PRESETS[name][preset].get("method", {}))
    resolved = resolve(parse_recipe({**RECIPE, "method": {"name": name, "preset": preset}}))
    for key, value in PRESETS[name][preset].get("method", {}).items():
        if not isinstance(value, dict):
            assert resolved.method[key] == value
