"""Recipes: what is accepted, what is refused and in which words, what makes two runs the same."""

import math
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from medcil.build import RunConfig
from medcil.config import LearningConfig, MemoryConfig, usable_cores
from medcil.errors import InvalidInput
from medcil.methods.ucir import UCIR
from medcil.recipe import differences, laid_over, leaves, override, parse, read_recipe

RECIPE = {
    "data": {"name": "phantom", "side": 32, "crop": 28},
    "scenario": {"base": 3, "increment": 2},
    "method": {"name": "finetune"},
}

# Another valid value for every leaf of a configuration.
ANOTHER = {
    "seed": 1,
    "label": "mine",
    "memory.per_class": 5,
    "memory.total": 100,
    "training.epochs": 7,
    "training.batch_size": 8,
    "training.learning_rates.classifier": 0.5,
    "training.learning_rates.backbone": 0.5,
    "training.sampler": "balanced",
    "training.exemplar_share": 0.5,
    "training.batch_norm": "frozen",
    "training.schedule": "cosine",
    "training.milestones": [0.5],
    "training.decay": 0.5,
    "training.momentum": 0.5,
    "training.weight_decay": 0.5,
    "training.gradient_clamp": None,
    "first_task.epochs": 3,
    "first_task.learning_rates": {"classifier": 0.2},
    "first_task.milestones": [0.5],
    "first_task.sampler": "plain",
    "execution.device": "cpu",
    "execution.threads": 2,
    "execution.resident": "no",
    "execution.workers": 2,
    "execution.precision": "float32",
    "execution.processes": 2,
    "execution.capture": False,
    "execution.checkpoint_every": 5,
    "data.name": "ham10000",
    "data.root": "/elsewhere",
    "data.side": 40,
    "data.crop": 24,
    "data.augmentation": "fundus",
    "data.views": 8,
    "data.normalization": "weights",
    "data.split": "groups",
    "data.split_share": 0.25,
    "data.split_seed": 1,
    "data.held_out": 0.2,
    "scenario.base": 2,
    "scenario.increment": 1,
    "scenario.steps": [3, 2, 1, 1],
    "scenario.order": 2,
    "scenario.long_tail": {"ratio": 0.01},
    "scenario.cumulative": True,
    "method.name": "replay",
    "method.readout": "nearest_mean",
    "network.backbone": "resnet32_cifar",
    "network.weights": "weights.safetensors",
    "network.classifier": "linear",
    "network.last_relu": True,
    "network.recalibrate_batch_norm": True,
    "network.scale": 4.0,
    "network.learn_scale": False,
}
WHERE_IT_IS_COMPUTED = {key for key in ANOTHER if key.startswith("execution.")} | {"data.root"}


def config(*changes: str) -> RunConfig:
    return parse(override(RECIPE, changes), RunConfig, source="recipe")


def with_value(key, value) -> RunConfig:
    setting = f"{key}={yaml.safe_dump(value, default_flow_style=True)}"
    # Steps take the place of base and increment.
    return config(*(["scenario={}"] if key == "scenario.steps" else []), setting)


def first_line(error) -> str:
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(
    ("mistyped", "right"),
    [
        ("sceanrio", "scenario"),
        ("traning.epochs", "training"),
        ("data.sied", "side"),
        ("training.epoch", "epochs"),
        ("training.learning_rates.bakbone", "backbone"),
        ("first_task.learning_rates.clasifier", "classifier"),
        ("execution.worker", "workers"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(mistyped, right):
    with pytest.raises(InvalidInput) as error:
        config(f"{mistyped}=1")
    unknown = mistyped.split(".")[0] if mistyped.startswith("traning") else mistyped
    assert f"unknown key {unknown!r}. Did you mean {right!r}?" in first_line(error)


def test_a_key_like_no_other_is_answered_with_all():
    with pytest.raises(InvalidInput, match=r"'memory\.zzz'\. Known: per_class, total\."):
        config("memory.zzz=1")


def test_every_problem_has_a_line():
    with pytest.raises(InvalidInput) as error:
        config("training.epochs=0", "training.epoch=1", "data.side=many")
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("key", ["data", "scenario", "method", "data.name", "scenario.base"])
def test_a_missing_key_is_named(key):
    content = override(RECIPE, ())
    *parents, last = key.split(".")
    for parent in parents:
        content[parent] = dict(content[parent])
        section = content[parent]
    del (section if parents else content)[last]
    with pytest.raises(InvalidInput, match=rf"^a\.yaml: the key '{key}' is missing: add it"):
        parse(content, RunConfig, source="a.yaml")


@pytest.mark.parametrize(
    "setting",
    [
        "training.epochs=many",
        "training.epochs=0",
        "training.epochs=1.5",
        "training.batch_size=1",
        "training.learning_rates.backbone=-1",
        "training.learning_rates.backbone=.nan",
        "training.momentum=1",
        "training.decay=1.5",
        "training.schedule=linear",
        "training=5",
        "execution.device=tpu",
        "execution.workers=-1",
        "seed=-1",
        "network.scale=0",
        "data.split=patients",
        "data.split_share=1",
        "data.split_share=0",
        "data.split_seed=-1",
        "data.augmentation=none",
        "data.views=3",
        "data.views=many",
        "scenario.long_tail.ratio=0",
        "scenario.long_tail.ratio=1.5",
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(setting):
    key, value = setting.split("=")
    with pytest.raises(InvalidInput) as error:
        config(setting)
    assert first_line(error).startswith(f"recipe: {key}")
    assert f"(got {yaml.safe_load(value)!r})" in first_line(error)


def test_a_number_of_views_that_cannot_be_is_answered_with_those_that_can():
    with pytest.raises(InvalidInput, match=r"^recipe: data\.views: Input should be 1, 2, 4 or 8 \(got 3\)$"):
        config("data.views=3")


def test_a_crop_larger_than_the_image_is_refused():
    with pytest.raises(InvalidInput, match=r"crop 33 is larger than side 32: lower crop or raise side"):
        config("data.crop=33")
    assert config("data.crop=32").data.crop == 32


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (["scenario={steps: [3, 2, 1, 1]}"], (None, None, (3, 2, 1, 1))),
        (["scenario.base=null", "scenario.increment=null", "scenario.steps=[7]"], (None, None, (7,))),
        (["scenario.steps=null"], (3, 2, None)),
        (["scenario={base: 4, increment: 1}"], (4, 1, None)),
    ],
)
def test_tasks_are_cut_by_steps_or_by_base_and_increment(settings, sizes):
    scenario = config(*settings).scenario
    assert (scenario.base, scenario.increment, scenario.steps) == sizes


@pytest.mark.parametrize(
    "scenario",
    ["{steps: [3, 4], base: 3, increment: 2}", "{steps: [3, 4], base: 3}", "{steps: [7], increment: 1}"],
)
def test_tasks_are_not_cut_in_two_ways_at_once(scenario):
    with pytest.raises(InvalidInput, match="steps and also base or increment: keep the one or the other"):
        config(f"scenario={scenario}")


def test_an_order_is_a_number_a_seed_or_all_classes():
    orders = {"2": 2, "seed-1993": "seed-1993", "[b, a]": ("b", "a"), "[1, 0]": (1, 0), "[b, 0]": ("b", 0)}
    for text, order in orders.items():
        assert config(f"scenario.order={text}").scenario.order == order


def test_a_long_tail_needs_its_ratio():
    tail = config("scenario.long_tail={ratio: 0.1, seed: 3}").scenario.long_tail
    assert (tail.ratio, tail.seed) == (0.1, 3)
    with pytest.raises(InvalidInput, match=r"unknown key 'scenario\.long_tail\.rato'. Did you mean 'ratio'"):
        config("scenario.long_tail={ratio: 0.1, rato: 0.1}")


def test_only_one_memory_policy_can_be_chosen():
    with pytest.raises(InvalidInput, match="both per_class and total: keep one"):
        config("memory.per_class=20", "memory.total=100")


@pytest.mark.parametrize("method", ["5", "[ucir]", "{alpha: 0.5}", "{name: 5}"])
def test_a_method_needs_a_name(method):
    with pytest.raises(InvalidInput, match="method"):
        config(f"method={method}")


def test_a_word_names_a_method():
    assert config("method=ucir").method == UCIR()
    assert RunConfig.model_validate({**RECIPE, "method": "ucir"}).method == UCIR()


def test_the_quota_is_per_class_or_a_share_of_the_total():
    assert [MemoryConfig().quota(n) for n in (1, 7)] == [20, 20]
    assert [MemoryConfig(per_class=5).quota(n) for n in (1, 7)] == [5, 5]
    assert [MemoryConfig(total=100).quota(n) for n in (1, 3, 7, 101)] == [100, 33, 14, 0]


def test_settings_reach_nested_keys_and_leave_the_recipe_alone():
    content = {"training": {"epochs": 1, "decay": 0.5}}
    changed = override(content, ["training.epochs=2", "training.learning_rates.backbone=1e-3", "seed=3"])
    assert changed == {
        "training": {"epochs": 2, "decay": 0.5, "learning_rates": {"backbone": "1e-3"}},
        "seed": 3,
    }
    assert content == {"training": {"epochs": 1, "decay": 0.5}}


def test_a_number_in_scientific_notation_is_a_number():
    assert config("training.learning_rates.backbone=1e-3").training.learning_rates.backbone == 0.001


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("null", None), ("[1, 2]", [1, 2]), ("{a: 1}", {"a": 1}), ("a=b", "a=b"), ("", None)],
)
def test_settings_are_read_as_yaml(text, value):
    assert override({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_the_last_setting_wins():
    assert override({}, ["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize(
    ("lower", "upper", "together"),
    [
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 3}}, {"a": 1, "b": {"c": 3, "d": 2}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": 5}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"base": {"name": "podnet", "flat": 1}}, {"base": {"name": "ucir"}}, {"base": {"name": "ucir"}}),
        ({"margin": {"kind": "a", "weight": 1}}, {"margin": {"kind": "b"}}, {"margin": {"kind": "b"}}),
        (
            {"base": {"name": "podnet", "flat": 1}},
            {"base": {"name": "podnet", "spatial": 2}},
            {"base": {"name": "podnet", "flat": 1, "spatial": 2}},
        ),
        ({"memory": {"per_class": 20}}, {"memory": {"total": 100}}, {"memory": {"total": 100}}),
        ({"memory": {"total": 100}}, {"memory": {"per_class": 20}}, {"memory": {"per_class": 20}}),
        ({"memory": {"total": 100}}, {"memory": {"total": 9}}, {"memory": {"total": 9}}),
    ],
)
def test_one_content_lies_over_another(lower, upper, together):
    before = repr((lower, upper))
    assert laid_over(lower, upper) == together
    assert repr((lower, upper)) == before


@pytest.mark.parametrize("setting", ["training.epochs", "=5", " =5", "", "a=[1", "a=2020-13-45"])
def test_a_malformed_setting_is_quoted(setting):
    with pytest.raises(InvalidInput) as error:
        override({}, [setting])
    assert repr(setting) in first_line(error)


def test_a_recipe_is_read_from_a_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    assert read_recipe(path) == RECIPE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [1", "is not valid YAML"),
        (b"a: 2020-13-45", "is not valid YAML"),
        (b"\x89PNG\xff\xfe\x00", "is not valid YAML"),
        (b"", "holds no settings"),
        (b"- a\n- b\n", "holds no settings"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, words):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as error:
        read_recipe(path)
    assert words in first_line(error)
    assert str(path) in first_line(error)


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a: 1\nb:\n  epochs: 20\n  c: &x {d: 1}\n  epochs: 40\n")
    with pytest.raises(InvalidInput) as error:
        read_recipe(path)
    assert f"{path}, line 5: duplicate key 'epochs', first in line 3" in first_line(error)
    with pytest.raises(InvalidInput, match="duplicate key 'b'"):
        override({}, ["a={b: 1, b: 2}"])


def test_a_merged_mapping_may_repeat_a_key(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a, x: 4}\n")
    assert read_recipe(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 4, "y": 2}}


def test_an_absent_recipe_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="There is no recipe"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="There is no recipe file"):
        read_recipe(tmp_path)


def test_there_is_another_value_for_every_key():
    assert set(ANOTHER) == set(dict(leaves(config().model_dump(mode="json"))))


@pytest.mark.parametrize("key", sorted(ANOTHER))
def test_only_where_it_is_computed_does_not_matter_to_what_a_run_is(key):
    is_same = with_value(key, ANOTHER[key]).identity() == config().identity()
    assert is_same == (key in WHERE_IT_IS_COMPUTED)


def test_a_weights_file_is_known_by_its_name_wherever_it_lies():
    here, there, other = (
        with_value("network.weights", path).identity()
        for path in ("/here/a.safetensors", "there/a.safetensors", "/here/b.safetensors")
    )
    assert here == there != other


def test_a_configuration_written_out_says_the_same_when_read():
    before = config(
        "scenario={steps: [3, 4], order: [b, 5, 4, 3, 2, 1, 0], long_tail: {ratio: 0.1}}",
        "first_task.learning_rates={classifier: 1}",
    )
    again = parse(yaml.safe_load(yaml.safe_dump(before.model_dump(mode="json"))), RunConfig, source="again")
    assert again == before


def test_differences_name_each_leaf():
    old = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 1}, "gone": 1}
    new = {"a": 1, "b": {"c": 4, "d": 3}, "e": None, "come": [1]}
    assert list(differences(old, new)) == [
        "b.c: 2 -> 4",
        "come: None -> [1]",
        "e: {'f': 1} -> None",
        "gone: 1 -> None",
    ]
    assert list(differences(old, old)) == []


@pytest.mark.parametrize("key", sorted(set(ANOTHER) - WHERE_IT_IS_COMPUTED))
def test_differences_of_identities_name_the_changed_key(key):
    before = with_value(key, [4, 3]) if key == "scenario.steps" else config()
    changes = list(differences(before.identity(), with_value(key, ANOTHER[key]).identity()))
    assert len(changes) == 1
    assert changes[0].startswith(f"{key}: ")


@settings(deadline=None)
@given(epochs=st.none() | st.integers(1, 9), milestones=st.none() | st.lists(st.floats(0.1, 1), max_size=3))
def test_the_first_task_differs_in_what_it_sets(epochs, milestones):
    first_task = {"epochs": epochs, "milestones": milestones}
    training = {"epochs": 50, "batch_norm": "frozen"}
    learning = LearningConfig.model_validate({"training": training, "first_task": first_task})
    first, later = (learning.training_of_task(is_first=is_first) for is_first in (True, False))
    assert later == learning.training
    assert first.epochs == (50 if epochs is None else epochs)
    assert first.milestones == (later.milestones if milestones is None else tuple(milestones))
    assert first.learning_rates == later.learning_rates
    assert first.batch_size == later.batch_size
    assert (first.batch_norm, later.batch_norm) == (None, "frozen")


def test_the_first_task_can_have_learning_rates_of_its_own():
    learning = config("first_task.learning_rates={classifier: 0.2, backbone: 0.3}")
    rates = learning.training_of_task(is_first=True).learning_rates
    assert (rates.classifier, rates.backbone) == (0.2, 0.3)
    rates = learning.training_of_task(is_first=False).learning_rates
    assert math.isclose(rates.classifier, 0.1)


def test_the_first_task_can_have_a_sampler_of_its_own():
    learning = config("training.sampler=balanced", "first_task.sampler=plain")
    samplers = [learning.training_of_task(is_first=is_first).sampler for is_first in (True, False)]
    assert samplers == ["plain", "balanced"]


@pytest.mark.parametrize("path", [(), ("training",), ("training", "learning_rates"), ("data",)])
def test_a_configuration_cannot_be_changed(path):
    section = config()
    for name in path:
        section = getattr(section, name)
    field = next(iter(type(section).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section, field, 1)


@pytest.mark.parametrize("settings", [["method.n_rivals=1"], ["method=ucir", "method.n_rivals=1"]])
def test_a_word_keeps_naming_the_method_when_its_options_are_set(settings):
    assert override({"method": "ucir"}, settings)["method"] == {"name": "ucir", "n_rivals": 1}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000\n", None),
        ("50000 100000\n", 1),
        ("100000 100000\n", 1),
        ("99900000 100000\n", None),
        ("", None),
    ],
)
def test_a_quota_bounds_the_cores(tmp_path, content, expected):
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path / "cpu.max") == (expected or len(os.sched_getaffinity(0)))


def test_without_a_container_all_that_the_process_is_bound_to_count(tmp_path):
    every = os.sched_getaffinity(0)
    assert usable_cores(tmp_path / "absent") == len(every)
    os.sched_setaffinity(0, {min(every)})
    try:
        assert usable_cores(tmp_path / "absent") == 1
    finally:
        os.sched_setaffinity(0, every)
