"""A network that grows by classes and branches, and can be built again from its spec."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medcil.errors import InvalidInput
from medcil.models.network import Network, NetworkSpec

from ..small import CROP, SMALLEST, SPEC

DIM = 64
STAGES = 3  # of CIFAR's ResNets
SHARED = pytest.mark.parametrize("shared_stages", range(STAGES))


def images(n=3, seed=0):
    return torch.randn(n, 3, CROP, CROP, generator=torch.Generator().manual_seed(seed))


def shuffled(module: torch.nn.Module, seed=1) -> None:
    """Gives every parameter and statistic another value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))


def branching(shared_stages: int, n_branches: int = 1, spec: NetworkSpec = SMALLEST) -> Network:
    """Two classes, then branches that all differ."""
    network = spec.build().eval()
    network.grow(torch.randn(2, DIM, generator=torch.Generator().manual_seed(0)))
    for i in range(n_branches):
        network.add_branch(shared_stages=shared_stages)
        shuffled(network.newest_branch, seed=i)
    return network.eval()


def read_again(spec: NetworkSpec) -> NetworkSpec:
    content = json.loads(json.dumps(asdict(spec)))
    tuples = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return NetworkSpec(**{**content, **tuples})


def shapes_of(network: Network) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def test_growing_keeps_what_the_network_says_of_old_classes():
    network = SPEC.build().eval()
    network.grow(torch.randn(3, DIM))
    before = network(images())
    network.grow(torch.randn(2, DIM))
    after = network(images())
    assert network.n_classes == 5
    assert torch.equal(after.embedding, before.embedding)
    torch.testing.assert_close(after.logits[:, :3], before.logits)


def test_a_network_without_branches_is_its_own_newest_branch():
    network = SMALLEST.build().eval()
    network.grow(torch.randn(2, DIM))
    out = network(images())
    maps, embedding = network.backbone(images())
    assert network.newest_branch is network.backbone
    assert out.newest is out.embedding
    assert torch.equal(out.embedding, embedding)
    assert len(out.maps) == STAGES
    assert all(torch.equal(*pair) for pair in zip(out.maps, maps, strict=True))
    assert out.auxiliary_logits is None


@SHARED
def test_a_new_branch_begins_as_a_copy_of_the_newest(shared_stages):
    network = branching(shared_stages)
    network.add_branch(shared_stages=shared_stages)
    out = network.eval()(images())
    first, second, third = out.embedding.split(DIM, dim=1)
    assert torch.equal(third, second)
    assert torch.equal(out.newest, third)
    assert not torch.equal(second, first)
    older, newest = network.branches
    assert network.newest_branch is newest
    assert older.state_dict().keys() == newest.state_dict().keys()
    assert len(newest.stages) == STAGES - shared_stages
    theirs = {p.data_ptr() for p in older.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in newest.parameters())


@SHARED
def test_a_first_branch_says_what_the_network_said(shared_stages):
    network = SMALLEST.build().eval()
    shuffled(network)
    network.grow(torch.randn(3, DIM))
    before = network(images())
    network.add_branch(shared_stages=shared_stages)
    after = network(images())
    assert torch.equal(after.embedding, before.embedding.repeat(1, 2))
    torch.testing.assert_close(after.cosine, before.cosine)
    torch.testing.assert_close(after.logits, before.logits)


@SHARED
def test_the_embedding_is_that_of_every_branch_side_by_side(shared_stages):
    network = branching(shared_stages, n_branches=2)
    out = network(images())
    maps, first = network.backbone(images())
    shared = maps[shared_stages - 1].clamp(min=0) if shared_stages else images()
    expected = [first, *(branch(shared)[1] for branch in network.branches)]
    assert torch.equal(out.embedding, torch.cat(expected, dim=1))
    assert torch.equal(out.newest, expected[-1])
    assert out.embedding.shape == (3, 3 * DIM) == (3, network.classifier.dim)


@SHARED
@pytest.mark.parametrize("last_relu", [True, False])
def test_a_branch_is_the_upper_part_of_a_whole_backbone(shared_stages, last_relu):
    """Its stages, put behind the backbone's shared ones, say the same."""
    spec = NetworkSpec("resnet8_cifar", last_relu=last_relu, learn_scale=True)
    network = branching(shared_stages, spec=spec)
    whole = spec.build().eval().backbone
    shared, own = network.backbone.stages[:shared_stages], network.branches[0].stages
    for stage, source in zip(whole.stages, [*shared, *own], strict=True):
        stage.load_state_dict(source.state_dict())
    torch.testing.assert_close(network(images()).newest, whole(images())[1])


@SHARED
def test_a_branch_changes_its_own_part_of_the_embedding_alone(shared_stages):
    network = branching(shared_stages, n_branches=2)
    before = network(images())
    shuffled(network.newest_branch, seed=9)
    after = network(images())
    assert torch.equal(after.embedding[:, : 2 * DIM], before.embedding[:, : 2 * DIM])
    assert not torch.equal(after.newest, before.newest)
    assert all(torch.equal(*pair) for pair in zip(after.maps, before.maps, strict=True))


@SHARED
def test_a_branch_hears_of_the_stages_it_shares_and_of_no_other(shared_stages):
    network = branching(shared_stages)
    before = network(images())
    for stage in network.backbone.stages[shared_stages:]:
        shuffled(stage, seed=5)
    assert torch.equal(network(images()).newest, before.newest)
    assert not torch.equal(network(images()).embedding[:, :DIM], before.embedding[:, :DIM])
    for stage in network.backbone.stages[:shared_stages]:
        shuffled(stage, seed=5)
    assert torch.equal(network(images()).newest, before.newest) == (shared_stages == 0)


def test_branches_share_the_same_stages():
    network = branching(1)
    with pytest.raises(ValueError, match="share 1 stages"):
        network.add_branch(shared_stages=2)
    assert len(network.branches) == 1


def test_classes_that_come_with_a_branch_read_all_branches():
    network = branching(1)
    weights = torch.randn(2, 2 * DIM)
    network.grow(weights)
    out = network(images())
    h, w = out.embedding.double(), weights.double()
    expected = (h @ w.T) / h.norm(dim=1, keepdim=True) / w.norm(dim=1)
    torch.testing.assert_close(out.cosine[:, 2:].double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["resnet8_cifar", "test_resnet"])
def test_a_resnet_tells_how_many_stages_it_has(name):
    network = NetworkSpec(name, last_relu=False, learn_scale=True).build()
    assert network.require_stages() == (4 if name == "test_resnet" else 3)


@pytest.mark.parametrize(("name", "last_relu"), [("test_efficientnet", False), ("skresnet18", True)])
def test_where_stages_are_needed_a_backbone_without_them_is_refused(name, last_relu):
    network = NetworkSpec(name, last_relu=last_relu, learn_scale=True).build()
    with pytest.raises(InvalidInput) as error:
        network.require_stages()
    first_line = str(error.value).splitlines()[0]
    assert first_line.startswith("network.backbone: ")
    assert name in first_line
    assert "for example resnet18" in first_line


def test_a_backbone_without_stages_can_have_branches_of_its_own():
    network = NetworkSpec("test_efficientnet", last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.randn(2, network.classifier.dim))
    pixels = torch.randn(2, 3, 32, 32)
    before = network(pixels)
    network.add_branch(shared_stages=0)
    assert torch.equal(network.eval()(pixels).embedding, before.embedding.repeat(1, 2))


def test_the_auxiliary_classifier_reads_the_newest_branch_alone():
    network = branching(0)
    weights = torch.randn(3, DIM)
    plain = network(images())
    network.add_auxiliary(weights)
    out = network(images())
    h, w = out.newest.double(), weights.double()
    expected = (h @ w.T) / h.norm(dim=1, keepdim=True) / w.norm(dim=1)  # the scale is 1 here
    torch.testing.assert_close(out.auxiliary_logits.double(), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(out.logits, plain.logits)
    network.add_auxiliary(torch.randn(2, DIM))
    assert network(images()).auxiliary_logits.shape == (3, 2)


def test_the_auxiliary_classifier_is_of_the_networks_kind():
    spec = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=False, scale=3.0, classifier="linear")
    network = branching(0, spec=spec)
    weights = torch.randn(3, DIM)
    auxiliary = network.add_auxiliary(weights)
    out = network(images())
    torch.testing.assert_close(out.auxiliary_logits, out.newest @ weights.T, atol=1e-4, rtol=1e-4)
    assert auxiliary.scale.item() == 3.0


def test_the_auxiliary_classifier_is_no_part_of_the_spec():
    network = branching(1)
    plain, names = network.spec(), network.state_dict().keys()
    network.add_auxiliary(torch.randn(3, DIM))
    assert network.spec() == plain
    assert network.state_dict().keys() > names
    network.auxiliary = None
    assert network.state_dict().keys() == names == plain.build().state_dict().keys()


@pytest.mark.parametrize("block_sizes", [(), (3,), (3, 2, 1)])
def test_a_spec_survives_json_and_builds_the_same_network(block_sizes):
    spec = NetworkSpec(
        "resnet20_cifar", True, False, 4.0, block_sizes=block_sizes, calibration_sizes=(0,) * len(block_sizes)
    )
    network = spec.build()
    assert network.spec() == spec
    again = read_again(network.spec()).build()
    assert shapes_of(again) == shapes_of(network)
    again.load_state_dict(network.state_dict())
    assert again.spec() == spec
    torch.testing.assert_close(again.eval()(images()), network.eval()(images()))


def any_network(data: st.DataObject) -> Network:
    """Grown step by step, as methods do it: classes and branches in any order, then calibrations."""
    kind = data.draw(st.sampled_from(["cosine", "linear"]))
    n_proxies = data.draw(st.integers(1, 3)) if kind == "cosine" else 1
    last_relu, learn_scale = data.draw(st.tuples(st.booleans(), st.booleans()))
    network = NetworkSpec("resnet8_cifar", last_relu, learn_scale, 2.5, classifier=kind).build()
    shared_stages = data.draw(st.integers(0, STAGES - 1))
    for step in data.draw(st.lists(st.sampled_from(["classes", "branch"]), max_size=4)):
        if step == "classes":
            network.grow(torch.randn(data.draw(st.integers(1, 3)), n_proxies, network.classifier.dim))
        elif len(network.branches) < 2:
            network.add_branch(shared_stages=shared_stages)
            shuffled(network.newest_branch, seed=len(network.branches))
    for block, size in enumerate(network.classifier.block_sizes):
        n_numbers = data.draw(st.sampled_from([0, 1, size]))
        if n_numbers:
            shuffled(network.classifier.calibrate(block, size=n_numbers), seed=block)
    return network


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_network_is_built_again_from_its_spec_and_its_tensors(data):
    network = any_network(data)
    spec = network.spec()
    assert read_again(spec) == spec
    again = read_again(spec).build()
    assert shapes_of(again) == shapes_of(network)
    again.load_state_dict(network.state_dict())
    assert again.spec() == spec
    expected, actual = network.eval()(images()), again.eval()(images())
    for name in ("embedding", "newest", "cosine", "logits"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
    # And goes on growing alike.
    for n in (network, again):
        n.add_branch(shared_stages=spec.shared_stages)
        n.grow(torch.ones(1, n.classifier.n_proxies, n.classifier.dim))
    assert torch.equal(again.eval()(images()).logits, network.eval()(images()).logits)
    assert again.spec() == network.spec()


def test_the_spec_follows_growth():
    network = SPEC.build()
    for size in (3, 2):
        network.grow(torch.randn(size, 4, DIM))
    assert network.spec().block_sizes == (3, 2)
    assert network.spec().n_proxies == 4
    assert network.spec().n_branches == 0
    network.add_branch(shared_stages=2)
    network.classifier.calibrate(1, size=2)
    assert network.spec().n_branches == 1
    assert network.spec().shared_stages == 2
    assert network.spec().calibration_sizes == (0, 2)
    assert network.spec().build().state_dict().keys() == network.state_dict().keys()


def test_logits_are_full_precision_under_autocast():
    network = branching(1, spec=SPEC)
    network.add_auxiliary(torch.randn(3, DIM))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = network(images())
    assert {tensor.dtype for tensor in out[1:]} == {torch.float32}
    cosine, _ = network.classifier(out.embedding)
    assert torch.equal(out.cosine, cosine)
