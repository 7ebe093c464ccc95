"""What is said of a method without training it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from medcil.errors import InvalidInput
from medcil.methods import METHODS, terms
from medcil.methods.analytic import Analytic
from medcil.methods.lo2ln import LO2LN
from medcil.methods.lws import LWS
from medcil.methods.outline import PhaseOutline, check_reach, choices, outline, plugin_reach, summary, try_out
from medcil.methods.podnet import PODNet
from medcil.methods.protocol import Increment, Phase, WithTerms, new_class_weights
from medcil.methods.ucir import UCIR
from medcil.models.network import Network, NetworkSpec

from ..conformance.subjects import FROZEN, UNTRAINED


@dataclass(frozen=True)
class Stages:
    """Every kind of phase there is."""

    how: float | Literal["auto"] = "auto"
    kind: Literal["a", "b"] = "a"
    share: float = 0.3
    readout: str = "classifier"

    def learn(self, network: Network, increment: Increment) -> Iterator[Phase]:
        if not increment.is_first:
            network.add_branch(shared_stages=0)
        network.grow(new_class_weights(network, increment))
        plain = {"classification": terms.cross_entropy()}
        params = network.every_parameter()
        if increment.is_first:
            yield Phase("learn", plain, params)
            return
        ranked = Phase("learn", {**plain, "ranking": terms.margin_ranking()}, params)
        yield replace(
            ranked, alternate=Phase("learn", {**plain, "auxiliary": terms.auxiliary_cross_entropy()}, {})
        )
        training = increment.training
        yield Phase(
            "fine-tune",
            plain,
            {"classifier": params["classifier"], "backbone": []},
            part="exemplars",
            sampler="class_aware",
            training=training.changed(epochs=training.share_of_epochs(self.share)),
        )
        yield Phase("check", plain, params, training=training.changed(sampler="balanced"))


LATER = [
    PhaseOutline(
        task="later",
        phase="learn",
        terms=("classification", "ranking"),
        part="all",
        sampler=None,
        epochs=100,
        moves=("backbone", "classifier"),
        alternate_terms=("classification", "auxiliary"),
    ),
    PhaseOutline(
        task="later",
        phase="fine-tune",
        terms=("classification",),
        part="exemplars",
        sampler="class_aware",
        epochs=30,
        moves=("classifier",),
    ),
    PhaseOutline(
        task="later",
        phase="check",
        terms=("classification",),
        part="all",
        sampler="balanced",
        epochs=100,
        moves=("backbone", "classifier"),
    ),
]


def test_the_phases_of_a_method_are_outlined():
    first, *later = outline(Stages())
    assert (first.task, first.phase, first.terms) == ("first", "learn", ("classification",))
    assert later == LATER
    assert later[0].all_terms == ("classification", "ranking", "auxiliary")


def test_the_outline_of_a_method_with_plugins_shows_them():
    method = WithTerms(Stages(), {"margin": terms.vanilla_margin()}, drop=("ranking",))
    assert outline(method)[0] == outline(Stages())[0]
    assert [found.terms for found in outline(method) if found.task == "later"] == [
        ("classification", "margin"),
        ("classification",),
        ("classification",),
    ]
    assert outline(method)[1].alternate_terms == ("classification", "auxiliary", "margin")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_an_outline_with_a_phase_to_plug_into(name):
    found = outline(METHODS[name]())
    later = {outlined.phase for outlined in found if outlined.task == "later"}
    first = {outlined.phase for outlined in found if outlined.task == "first"}
    assert ("learn" in first) == (name not in UNTRAINED)
    assert ("learn" in later) == (name not in FROZEN)
    assert all(outlined.terms[0] == "classification" and outlined.moves for outlined in found)
    assert outline(METHODS[name]()) == found


def test_an_outline_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    outline(Stages())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("changes", "of_phases"),
    [
        (
            {"terms": {"classification": terms.focal(), "margin": terms.vanilla_margin()}},
            ["classification replaced, margin added", "nothing changed", "nothing changed"],
        ),
        (
            {"terms": {}, "drop": ("ranking",), "phases": ("learn", "fine-tune")},
            ["ranking dropped", "nothing changed", "nothing changed"],
        ),
        (
            {"terms": {"ranking": terms.margin_ranking()}, "phases": ("learn", "fine-tune", "check")},
            ["ranking replaced", "ranking added", "ranking added"],
        ),
        (
            {"terms": {"classification": terms.focal()}, "phases": ("learn", "fine-tune", "check")},
            ["classification replaced"] * 3,
        ),
    ],
)
def test_the_reach_of_plugins_is_told(changes, of_phases):
    assert plugin_reach(WithTerms(Stages(), **changes)) == [
        f"{what} in phase {phase} of every task after the first."
        for what, phase in zip(of_phases, ("learn", "fine-tune", "check"), strict=True)
    ]


def a_network(backbone="resnet8_cifar", **options) -> Network:
    return NetworkSpec(backbone, last_relu=False, learn_scale=True, **options).build()


def test_a_method_that_reads_features_is_tried_on_images_of_the_right_size():
    """A ViT takes one size alone."""
    network = NetworkSpec("vit_tiny_patch16_224", last_relu=True, learn_scale=True).build()
    try_out(Analytic(adapt="never"), network, crop=224)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_trying_out_a_method_changes_neither_the_network_nor_the_random_numbers(name):
    network = a_network()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    try_out(METHODS[name](), network, crop=10)
    assert torch.equal(torch.rand(4), expected)
    after = network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert network.training
    assert network.n_classes == 0


@pytest.mark.parametrize(
    ("method", "options", "crop", "message"),
    [
        (LO2LN(), {"backbone": "test_efficientnet"}, 32, "test_efficientnet has no stages"),
        (
            PODNet(),
            {"backbone": "test_efficientnet"},
            32,
            "test_efficientnet has no stages",
        ),
        (LWS(), {"classifier": "linear"}, 10, "network.classifier: linear has one proxy"),
        (
            UCIR(),
            {"backbone": "vit_tiny_patch16_224"},
            16,
            "network.backbone: vit_tiny_patch16_224 cannot take images of 16 x 16 pixels; choose another",
        ),
    ],
)
def test_trying_out_refuses_what_would_fail_later(method, options, crop, message):
    with pytest.raises(InvalidInput) as error:
        try_out(method, a_network(**options), crop=crop)
    assert message in str(error.value).splitlines()[0]


def test_there_is_nothing_to_tell_of_a_method_without_plugins():
    assert plugin_reach(Stages()) == []


@pytest.mark.parametrize(
    ("drop", "phases", "message"),
    [
        (
            ["rankin"],
            ["learn"],
            "no term 'rankin' in phase learn; there are classification, ranking, auxiliary.",
        ),
        (["ranking"], ["fine-tune", "check"], "no term 'ranking' in phase fine-tune, check"),
        (["classification"], ["learn"], "replace it by method.plugins.classification"),
        ([], ["lern"], "no phase 'lern'; choose from learn, fine-tune, check."),
        ([], ["learn", "finetune"], "no phase 'finetune'"),
        ([], [], "is empty: choose from learn, fine-tune, check"),
    ],
)
def test_names_that_reach_nothing_are_refused(drop, phases, message):
    with pytest.raises(InvalidInput) as error:
        check_reach(Stages(), drop, phases)
    assert message in str(error.value)


def test_names_that_reach_something_are_accepted():
    check_reach(Stages(), ["auxiliary"], ["learn", "check"])


def test_the_words_a_hyper_parameter_may_be():
    found = {key: choices(Stages, key) for key in ("how", "kind", "share", "missing")}
    assert found == {"how": "or auto", "kind": "a, b", "share": "", "missing": ""}


def test_the_summary_is_the_first_line_of_the_file():
    assert summary(Stages) == "What is said of a method without training it."
