"""The cosine classifier against arithmetic; a network that grows, and can be built again from its spec."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.models.classifier import CosineClassifier
from medcil.models.network import NetworkSpec

from ..small import CROP, SPEC


def images(n=3, seed=0):
    return torch.randn(n, 3, CROP, CROP, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    scale=st.floats(0.1, 20),
    block_sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_logits_are_the_scale_times_the_cosines(seed, scale, block_sizes):
    generator = torch.Generator().manual_seed(seed)
    classifier = CosineClassifier(5, scale=scale, learn_scale=True)
    for size in block_sizes:
        classifier.grow(torch.randn(size, 5, generator=generator))
    embedding = 3 * torch.randn(4, 5, generator=generator)
    cosine, logits = classifier(embedding)
    assert cosine.shape == logits.shape == (4, sum(block_sizes))
    rows = [row for block in classifier.blocks for row in block.tolist()]
    for i, h in enumerate(embedding.tolist()):
        for c, w in enumerate(rows):
            inner = sum(a * b for a, b in zip(h, w, strict=True))
            expected = inner / math.hypot(*h) / math.hypot(*w)
            assert cosine[i, c].item() == pytest.approx(expected, abs=1e-5)
            assert logits[i, c].item() == pytest.approx(scale * expected, abs=1e-4)


def test_a_classifier_without_classes_has_no_logits():
    cosine, logits = CosineClassifier(5, scale=1.0, learn_scale=False)(torch.randn(4, 5))
    assert cosine.shape == logits.shape == (4, 0)


@pytest.mark.parametrize("learn_scale", [True, False])
def test_the_scale_is_learned_or_held(learn_scale):
    classifier = CosineClassifier(5, scale=2.0, learn_scale=learn_scale)
    assert classifier.scale.requires_grad == learn_scale
    assert classifier.scale.item() == 2.0


def test_growing_copies_the_weights_given():
    classifier = CosineClassifier(2, scale=1.0, learn_scale=True)
    weights = torch.ones(3, 2, requires_grad=True)
    classifier.grow(weights)
    with torch.no_grad():
        weights.zero_()
    assert torch.equal(classifier.weight, torch.ones(3, 2))
    assert classifier.blocks[0].is_leaf
    assert classifier.n_classes == 3


def test_growing_keeps_what_the_network_says_of_old_classes():
    network = SPEC.build().eval()
    network.grow(torch.randn(3, 64))
    before = network(images())
    network.grow(torch.randn(2, 64))
    after = network(images())
    assert network.n_classes == 5
    assert torch.equal(after.embedding, before.embedding)
    torch.testing.assert_close(after.logits[:, :3], before.logits)


@pytest.mark.parametrize("block_sizes", [(), (3,), (3, 2, 1)])
def test_a_spec_survives_json_and_builds_the_same_network(block_sizes):
    spec = NetworkSpec("resnet20_cifar", True, False, 4.0, block_sizes)
    network = spec.build()
    assert network.spec() == spec
    content = json.loads(json.dumps(asdict(network.spec())))
    again = NetworkSpec(**{**content, "block_sizes": tuple(content["block_sizes"])}).build()
    shapes, shapes_again = (
        {name: tensor.shape for name, tensor in n.state_dict().items()} for n in (network, again)
    )
    assert shapes_again == shapes
    again.load_state_dict(network.state_dict())
    assert again.spec() == spec
    torch.testing.assert_close(again.eval()(images()), network.eval()(images()))


def test_the_spec_follows_growth():
    network = SPEC.build()
    for size in (3, 2):
        network.grow(torch.randn(size, 64))
    assert network.spec().block_sizes == (3, 2)
    assert network.spec().build().state_dict().keys() == network.state_dict().keys()


def test_logits_are_full_precision_under_autocast():
    network = SPEC.build().eval()
    network.grow(torch.randn(3, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = network(images())
    assert {tensor.dtype for tensor in out} == {torch.float32}
    cosine, _ = network.classifier(out.embedding)
    assert torch.equal(out.cosine, cosine)
