"""`method.plugins`: loss terms that a recipe puts into any method."""

import inspect

import pytest
import torch

from medcil.build import PLUGINS, build_method, method_settings, parse_recipe, resolve
from medcil.errors import InvalidInput
from medcil.methods import METHODS
from medcil.methods.outline import outline
from medcil.methods.protocol import Batch, Classification, Counts, LossTerm, WithTerms
from medcil.methods.ucir import UCIR
from medcil.models.network import Outputs

from ..conformance.subjects import FROZEN
from ..errors.raises import raises

RECIPE = {
    "data": {"name": "phantom", "side": 12, "crop": 8},
    "scenario": {"base": 3, "increment": 2},
    "method": {"name": "ucir"},
}
WHOLE_MARGIN = {
    "kind": "distribution",
    "weight": 0.1,
    "margin": 0.4,
    "normalize_weights": False,
    "noise_scale": 1.0,
    "reduction": "sum",
    "detach_range": True,
}


def plugged(**plugins):
    return build_method({"name": "ucir", "plugins": plugins})


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    embedding, weights = torch.randn(6, 5, generator=generator), torch.randn(4, 5, generator=generator)
    cosine = torch.nn.functional.normalize(embedding) @ torch.nn.functional.normalize(weights).T
    counts = torch.tensor([3, 5, 40, 80])
    known = {"maps": (), "embedding": embedding, "cosine": cosine, "logits": 4 * cosine}
    absent = {name: None for name in Outputs._fields if name not in known}
    return Batch(
        labels=torch.tensor([0, 1, 2, 3, 3, 2]),
        out=Outputs(**known, **absent),
        counts=Counts(counts, counts, counts),
        task_sizes=(2, 2),
        class_weights=weights,
        scale=torch.tensor(4.0),
        run_old_network=lambda: Outputs(**known | {"embedding": embedding.flip(0)}, **absent),
        normal=torch.ones,
    )


def loss_of(term: LossTerm) -> float:
    return float(term(batch()))


@pytest.mark.parametrize("settings", [None, {}, {"classification": None, "margin": None, "drop": []}])
def test_plugins_that_change_nothing_leave_the_bare_method(settings):
    assert build_method({"name": "ucir", "plugins": settings}) == UCIR()


def test_plugins_surround_the_method():
    method = plugged(classification="cil_balanced", margin="distribution", drop=["ranking"])
    assert isinstance(method, WithTerms)
    assert (method.base, method.drop, method.phases) == (UCIR(), ("ranking",), ("learn",))
    assert isinstance(method.terms["classification"], Classification)
    assert [found.terms for found in outline(method)] == [
        ("classification",),
        ("classification", "less_forget", "margin"),
    ]


def test_the_fields_of_the_method_keep_their_values():
    method = build_method({"name": "ucir", "n_rivals": 1, "plugins": {"classification": "focal"}})
    assert isinstance(method, WithTerms)
    assert method.base == UCIR(n_rivals=1)


def test_options_reach_the_term():
    for margin in ({"kind": "vanilla"}, {"kind": "ranking"}, {"kind": "distribution"}):
        single, double = (plugged(margin={**margin, "weight": w}).terms["margin"] for w in (0.25, 0.5))
        assert loss_of(double) == pytest.approx(2 * loss_of(single))
        assert loss_of(single) > 0
    half, whole, whole_by_name = (
        loss_of(plugged(classification=kind).terms["classification"])
        for kind in ("cil_balanced", {"kind": "cil_balanced", "alpha": 1}, "logit_balanced")
    )
    assert half != whole == whole_by_name


@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, kinds in PLUGINS.items() for kind in kinds])
def test_every_kind_is_written_with_all_its_options(key, kind):
    method = plugged(**{key: kind})
    written = method_settings(method)["plugins"][key]
    assert written["kind"] == kind
    assert list(written)[1:] == list(inspect.signature(PLUGINS[key][kind]).parameters)
    again = build_method(method_settings(method))
    assert method_settings(again) == method_settings(method)
    assert loss_of(again.terms[key]) == loss_of(method.terms[key])


def test_a_method_that_trains_in_the_first_task_only_takes_no_plugins():
    with raises("config.plugins.unreachable", "first task"):
        build_method({"name": "analytic", "plugins": {"margin": "distribution"}})


@pytest.mark.parametrize("name", sorted(METHODS.keys() - FROZEN))
def test_every_method_takes_plugins(name):
    method = build_method({"name": name, "plugins": {"classification": "focal", "margin": "distribution"}})
    later = next(found for found in outline(method) if found.task == "later" and found.phase == "learn")
    assert {"classification", "margin"} <= set(later.terms)
    assert method.readout == METHODS[name]().readout


def test_the_resolved_recipe_holds_every_option():
    settings = ["method.plugins.margin.kind=distribution", "method.plugins.margin.weight=0.3"]
    resolved = resolve(parse_recipe(RECIPE, settings))
    assert resolved.method.plugins == {
        "classification": None,
        "margin": {**WHOLE_MARGIN, "weight": 0.3},
        "embedding": None,
        "drop": [],
        "phases": ["learn"],
    }
    assert resolve(resolved) == resolved
    short = resolve(parse_recipe(RECIPE, ["method.plugins.margin=distribution"]))
    assert short.method.plugins["margin"] == WHOLE_MARGIN
    assert resolve(parse_recipe(RECIPE)).method == UCIR()


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ("focal", r"^method\.plugins: write, for example, `plugins: .*\(got 'focal'\)"),
        ({"margn": "vanilla"}, r"unknown key 'method\.plugins\.margn'. Did you mean 'margin'\?"),
        ({5: "vanilla"}, r"unknown key 'method\.plugins\.5'"),
        (
            {"margin": "vanila"},
            r"method\.plugins\.margin\.kind: there is no margin 'vanila'. Did you mean 'vanilla'",
        ),
        ({"classification": "none"}, r"no classification 'none'. Known: cil_balanced, class_balanced_focal"),
        ({"margin": {"weight": 1}}, r"method\.plugins\.margin has no kind: .*\(got \{'weight': 1\}\)"),
        ({"margin": 5}, r"method\.plugins\.margin has no kind"),
        ({"margin": ["vanilla"]}, r"method\.plugins\.margin has no kind"),
        (
            {"margin": {"kind": "vanilla", "wieght": 1}},
            r"unknown key 'method\.plugins\.margin\.wieght' of vanilla. Did you mean 'weight'\?",
        ),
        ({"margin": {"kind": "vanilla", "n_rivals": 1}}, r"unknown key 'method\.plugins\.margin\.n_rivals'"),
        ({"margin": {"kind": "vanilla", "reduction": "max"}}, r"margin\.reduction: .*'sum' or 'mean'"),
        ({"drop": "ranking"}, r"method\.plugins\.drop: write a list of names"),
        ({"drop": [5]}, r"method\.plugins\.drop: write a list of names"),
        ({"drop": ["classification"]}, r"method\.plugins\.drop: every phase needs its classification"),
        (
            {"drop": ["rankings"]},
            r"no term 'rankings' in phase learn; there are classification, less_forget, ranking",
        ),
        ({"margin": "vanilla", "phases": "learn"}, r"method\.plugins\.phases: write a list of names"),
        ({"margin": "vanilla", "phases": []}, r"method\.plugins\.phases is empty"),
        ({"margin": "vanilla", "phases": ["fine-tune"]}, r"there is no phase 'fine-tune'; choose from learn"),
        ({"phases": ["lern"]}, r"there is no phase 'lern'"),
    ],
)
def test_a_wrong_plugin_is_refused(plugins, message):
    with pytest.raises(InvalidInput, match=message):
        build_method({"name": "ucir", "plugins": plugins})


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "kind", "option", "wrong"),
    [
        ("classification", "cil_balanced", "alpha", (0, -0.1, 1.1, NAN, INFINITE, "half", None)),
        ("classification", "focal", "focusing", (-1, NAN, INFINITE)),
        ("classification", "class_balanced_focal", "beta", (-0.1, 1, NAN)),
        ("classification", "class_balanced_focal", "focusing", (-1, NAN, INFINITE)),
        ("margin", "ranking", "weight", (-1, NAN, INFINITE)),
        ("margin", "ranking", "margin", (-1, NAN, INFINITE)),
        ("margin", "ranking", "n_rivals", (0, -1, 1.5, NAN)),
        ("margin", "vanilla", "weight", (-1, NAN, INFINITE)),
        ("margin", "vanilla", "margin", (-1, NAN, INFINITE)),
        ("margin", "distribution", "weight", (-1, NAN, INFINITE, [1])),
        ("margin", "distribution", "margin", (-1, NAN, INFINITE)),
        ("margin", "distribution", "noise_scale", (-1, NAN, INFINITE, "inverse_sqrt_dimension")),
        ("margin", "distribution", "detach_range", ("perhaps", 2)),
        ("embedding", "cosine", "weight", (-1, NAN, INFINITE)),
    ],
)
def test_a_value_out_of_range_is_refused(key, kind, option, wrong):
    for value in wrong:
        with pytest.raises(InvalidInput, match=rf"^method\.plugins\.{key}\.{option}: .*\(got "):
            plugged(**{key: {"kind": kind, option: value}})


def test_what_a_term_itself_refuses_is_told_with_its_place(monkeypatch):
    def picky(*, weight: float = 1.0) -> LossTerm:
        raise ValueError(f"weight must be even, but is {weight}")

    monkeypatch.setitem(PLUGINS["margin"], "picky", picky)
    with pytest.raises(InvalidInput, match=r"^method\.plugins\.margin: weight must be even, but is 3\.0"):
        plugged(margin={"kind": "picky", "weight": 3})


def test_plugins_have_no_place_where_every_step_is_a_first_task():
    with pytest.raises(InvalidInput, match=r"^method\.plugins: in a cumulative scenario"):
        resolve(parse_recipe(RECIPE, ["scenario.cumulative=true", "method.plugins.margin=vanilla"]))
    assert resolve(parse_recipe(RECIPE, ["scenario.cumulative=true"])).scenario.cumulative


def test_a_run_with_plugins_is_called_by_them():
    method = {"name": "ucir", "plugins": {"classification": "cil_balanced", "margin": "distribution"}}
    assert resolve(parse_recipe({**RECIPE, "method": method})).label == "ucir + cil_balanced + distribution"
    assert resolve(parse_recipe(RECIPE)).label == "ucir"


@pytest.mark.parametrize(
    ("method", "label"),
    [
        ({"name": "lws"}, "lws(podnet)"),
        ({"name": "lws", "base": "ucir"}, "lws(ucir)"),
        ({"name": "lws", "base": "replay", "plugins": {"margin": "vanilla"}}, "lws(replay) + vanilla"),
        ("ssil", "ssil"),
    ],
)
def test_a_run_is_called_by_its_method_and_by_the_one_within(method, label):
    assert resolve(parse_recipe({**RECIPE, "method": method})).label == label
    assert resolve(parse_recipe({**RECIPE, "method": method, "label": "mine"})).label == "mine"
