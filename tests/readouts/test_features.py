"""Which features of an image a readout of statistics keeps, against the network's own outputs."""

import math
from dataclasses import asdict, replace

import pytest
import torch

from medcil.models.network import Network, NetworkSpec, Outputs
from medcil.readouts import build_readout
from medcil.readouts.ridge import Ridge
from medcil.readouts.statistics import FeatureSpec, StatisticsReadout

PLAIN = FeatureSpec(scaled=False, constant=False)


def network_of(backbone: str) -> Network:
    network = NetworkSpec(backbone, last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.ones(2, network.classifier.dim))
    return network


def computed(
    spec: FeatureSpec, backbone: str = "resnet8_cifar", seed: int = 3
) -> tuple[StatisticsReadout, Outputs, torch.Tensor]:
    network, readout = network_of(backbone), Ridge()
    readout.choose_features(network, spec, seed=seed)
    with torch.no_grad():
        out = network(torch.randn(4, 3, 160, 160))
        return readout, out, readout.features(out)


def test_features_may_stay_as_they_are():
    _, out, features = computed(replace(PLAIN, stages=2))
    before = out.maps[-2].relu().mean(dim=(2, 3))
    torch.testing.assert_close(features, torch.cat([out.embedding, before], dim=1))


def test_a_power_is_of_features_that_are_never_negative():
    _, out, features = computed(replace(PLAIN, power=0.5, stages=2))
    last, before = (out.maps[i].relu().mean(dim=(2, 3)) for i in (-1, -2))
    assert (out.embedding < 0).any()
    torch.testing.assert_close(features, torch.cat([last, before], dim=1).sqrt())


@pytest.mark.parametrize("backbone", ["test_vit", "test_efficientnet"])
def test_features_of_other_backbones_have_no_power(backbone):
    readout, out, features = computed(replace(PLAIN, power=0.5), backbone)
    torch.testing.assert_close(features, out.embedding)
    assert readout.feature_spec.has_embedding


@pytest.mark.parametrize("constant", [False, True])
def test_random_features_can_be_alone(constant):
    spec = replace(PLAIN, n_random=30, random_alone=True, constant=constant)
    readout, out, features = computed(spec)
    torch.testing.assert_close(features[:, :30], (out.embedding @ readout.projection).relu())
    assert features.shape[1] == 30 + constant
    assert (features[:, 30:] == 1).all()


@pytest.mark.parametrize(
    ("draw", "deviation"), [("scaled_normal", 1 / 8), ("normal", 1.0), ("uniform", 1 / 8 / math.sqrt(3))]
)
def test_projections_are_drawn_as_published(draw, deviation):
    readout, _, _ = computed(replace(PLAIN, n_random=400, draw=draw))
    projection = readout.projection
    assert projection.shape == (64, 400)
    assert float(projection.std()) == pytest.approx(deviation, rel=0.02)
    assert float(projection.mean()) == pytest.approx(0, abs=deviation / 50)
    assert (projection.abs().max() <= 1 / 8) == (draw == "uniform")
    assert not projection.equal(computed(replace(PLAIN, n_random=400, draw=draw), seed=4)[0].projection)


@pytest.mark.parametrize(
    "spec",
    [
        FeatureSpec(),
        FeatureSpec(stages=2, n_random=7),
        replace(PLAIN, n_random=7, random_alone=True, draw="uniform"),
        replace(PLAIN, power=0.5),
    ],
    ids=str,
)
def test_a_stored_readout_computes_the_same_features(spec):
    readout, out, features = computed(spec)
    readout.add(features[:, None], 0)
    readout.solve()
    readout.finish_task(torch.zeros(1, 64), torch.zeros(1))
    again = build_readout(readout.spec())
    again.load_state_dict(readout.state_dict())
    assert again.feature_spec == readout.feature_spec
    assert torch.equal(again.features(out), features)


def test_a_model_folder_names_the_later_options_only_where_they_are_used():
    assert list(FeatureSpec(stages=2, n_random=7).stored()) == [
        "stages",
        "relu",
        "n_random",
        "companion",
        "companion_last_relu",
    ]
    every = FeatureSpec(scaled=False, power=0.5, constant=False, random_alone=True, draw="normal")
    assert every.stored() == asdict(every)
