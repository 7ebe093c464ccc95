"""Backbones by name, their weights from files, and batch norm's statistics against direct sums."""

import socket

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from medcil.errors import InvalidInput
from medcil.models.backbones import create_backbone, load_weights, recalibrate_batch_norm


def noise(n=4, side=32, seed=0):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def small_weights():
    """Of timm's smallest residual network, by the names in its files."""
    torch.manual_seed(1)
    return timm.create_model("test_resnet", num_classes=5).state_dict()


@pytest.mark.parametrize(
    ("name", "dim"), [("resnet18", 512), ("resnet26", 2048), ("test_resnet", 96), ("resnet20_cifar", 64)]
)
def test_without_the_last_relu_embeddings_are_signed(name, dim):
    torch.manual_seed(0)
    for last_relu in (True, False):
        backbone = create_backbone(name, last_relu=last_relu)
        # As after training: a fresh residual branch may end in a batch norm that multiplies by zero.
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.1)
                nn.init.normal_(module.bias)
        with torch.no_grad():
            embedding = backbone.eval()(noise())
        assert embedding.shape == (4, dim)
        assert backbone.num_features == dim
        assert bool((embedding < 0).any()) == (not last_relu)


@pytest.mark.parametrize("name", ["resnet18", "resnet26", "resnet20_cifar"])
def test_only_the_last_relu_is_missing(name):
    """Its maps are those of the whole network before the last ReLU: pooling their positive part agrees."""
    torch.manual_seed(0)
    whole, without = (create_backbone(name, last_relu=last_relu).eval() for last_relu in (True, False))
    without.load_state_dict(whole.state_dict())
    maps = []
    last = without.blocks if name == "resnet20_cifar" else without.layer4
    last.register_forward_hook(lambda module, inputs, output: maps.append(output))
    with torch.no_grad():
        without(noise())
        torch.testing.assert_close(maps[0].relu().mean(dim=(2, 3)), whole(noise()))


@pytest.mark.parametrize("name", ["skresnet18", "resnest14d", "res2net50_26w_4s"])
def test_a_last_relu_that_cannot_be_removed_is_refused(name):
    with pytest.raises(InvalidInput, match=r"last_relu"):
        create_backbone(name, last_relu=False)
    assert isinstance(create_backbone(name, last_relu=True), nn.Module)


@pytest.mark.parametrize(("name", "n_millions"), [("resnet20_cifar", 0.27), ("resnet32_cifar", 0.46)])
def test_cifar_resnets_have_the_published_size(name, n_millions):
    backbone = create_backbone(name, last_relu=True)
    n_parameters = sum(parameter.numel() for parameter in backbone.parameters())
    assert n_parameters / 1e6 == pytest.approx(n_millions, abs=0.01)
    n_layers = sum(isinstance(module, nn.Conv2d) for module in backbone.modules()) + 1
    assert name == f"resnet{n_layers}_cifar"


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_convnext", "test_nfnet"])
def test_any_timm_name_makes_a_backbone(name):
    backbone = create_backbone(name, last_relu=False).eval()
    with torch.no_grad():
        assert backbone(noise(2, side=160)).shape == (2, backbone.num_features)


@pytest.mark.parametrize(
    ("mistyped", "right"),
    [("resnet_18", "resnet18"), ("resnet32_cifr", "resnet32_cifar"), ("efficientnetb0", "efficientnet_b0")],
)
def test_an_unknown_backbone_is_answered_with_the_nearest(mistyped, right):
    with pytest.raises(InvalidInput, match=rf"there is no model '{mistyped}'\. Did you mean '{right}'\?"):
        create_backbone(mistyped, last_relu=False)


@pytest.mark.parametrize("name", ["resnet18.no_such_tag", "hf-hub:timm/resnet18.a1_in1k", "../resnet18", ""])
def test_what_is_no_name_is_refused(name, no_network):
    with pytest.raises(InvalidInput, match=r"network\.backbone"):
        create_backbone(name, last_relu=False)


def test_nothing_is_fetched_unless_asked_for(no_network, tmp_path, small_weights):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(small_weights, path)
    for name in ("test_resnet", "resnet18.a1_in1k", "resnet20_cifar"):
        create_backbone(name, last_relu=False)
    load_weights(create_backbone("test_resnet", last_relu=False), str(path), name="test_resnet")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_counters", [True, False])
def test_weights_come_from_a_file_in_any_precision(tmp_path, small_weights, dtype, has_counters):
    path = tmp_path / "weights.safetensors"
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in small_weights.items()
        if has_counters or not name.endswith("num_batches_tracked")
    }
    safetensors.torch.save_file(stored, path)
    backbone = create_backbone("test_resnet", last_relu=False)
    load_weights(backbone, str(path), name="test_resnet")
    for name, tensor in backbone.state_dict().items():
        if name in stored:
            assert tensor.dtype == small_weights[name].dtype
            assert torch.equal(tensor, stored[name].to(tensor.dtype))


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_weights_of_another_backbone_are_refused(tmp_path, small_weights, change):
    path = tmp_path / "weights.safetensors"
    name = next(iter(small_weights))
    first = small_weights.pop(name)
    if change == "misshapen":
        small_weights[name] = first[:1].clone()
    safetensors.torch.save_file(small_weights, path)
    backbone = create_backbone("test_resnet", last_relu=False)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(InvalidInput, match=rf"does not fit test_resnet .*e\.g\. {name}"):
        load_weights(backbone, str(path), name="test_resnet")
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 a pickle in a zip"])
def test_a_file_that_holds_no_weights_is_refused(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="is not a safetensors file"):
        load_weights(create_backbone("resnet20_cifar", last_relu=False), str(path), name="resnet20_cifar")


def test_an_absent_file_of_weights_is_refused(tmp_path):
    backbone = create_backbone("resnet20_cifar", last_relu=False)
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(InvalidInput, match="there is no file"):
            load_weights(backbone, str(path), name="resnet20_cifar")


def test_recalibrated_statistics_are_those_of_the_images():
    backbone = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    with torch.no_grad():
        backbone[0].running_mean.fill_(9.0)
        backbone[2].momentum = 0.3
    weights = {name: p.clone() for name, p in backbone.named_parameters()}
    batches = [3 + 2 * noise(5, side=4, seed=seed) for seed in range(3)]
    recalibrate_batch_norm(backbone, batches)

    means = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in batches]).mean(dim=0)
    variances = torch.stack([batch.var(dim=(0, 2, 3)) for batch in batches]).mean(dim=0)
    torch.testing.assert_close(backbone[0].running_mean, means)
    torch.testing.assert_close(backbone[0].running_var, variances)

    eps = backbone[0].eps
    normalized = [
        (b - b.mean(dim=(0, 2, 3), keepdim=True))
        / (b.var(dim=(0, 2, 3), keepdim=True, correction=0) + eps).sqrt()
        for b in batches
    ]
    seen = [backbone[1](b).detach() for b in normalized]
    torch.testing.assert_close(
        backbone[2].running_mean, torch.stack([b.mean(dim=(0, 2, 3)) for b in seen]).mean(dim=0)
    )
    for name, parameter in backbone.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_recalibration_leaves_momentum_and_evaluation_mode_as_they_were():
    backbone = create_backbone("resnet20_cifar", last_relu=False).eval()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [0.01 * (i + 1) for i in range(len(norms))]
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    recalibrate_batch_norm(backbone, [noise(4, side=8)])
    assert [norm.momentum for norm in norms] == momenta
    assert not any(module.training for module in backbone.modules())


def test_recalibration_draws_nothing():
    """Dropout must not be at work, even in a network that has never been put in evaluation mode."""
    statistics = []
    for seed in range(2):
        torch.manual_seed(seed)
        backbone = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(3)).train()
        recalibrate_batch_norm(backbone, [noise(4, side=4)])
        statistics.append(backbone[1].running_mean.clone())
    assert torch.equal(*statistics)
