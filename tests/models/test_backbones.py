"""Backbones by name, their weights from files, and batch norm's statistics against direct sums."""

import socket

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import nn

from medcil.errors import InvalidInput
from medcil.models.backbones import Backbone, create_backbone, recalibrate_batch_norm
from medcil.models.network import NetworkSpec
from medcil.models.weights import load_weights

from ..errors.raises import raises


def noise(n=4, side=32, seed=0):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def as_after_training(module: nn.Module) -> None:
    """A fresh residual branch may end in a batch norm that multiplies by zero; statistics are 0 and 1."""
    generator = torch.Generator().manual_seed(5)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, 1.0, 0.1, generator=generator)
            nn.init.normal_(norm.bias, generator=generator)
            nn.init.normal_(norm.running_mean, 0.0, 0.1, generator=generator)
            nn.init.uniform_(norm.running_var, 0.5, 1.5, generator=generator)


def cifar_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a file of a CIFAR ResNet calls the tensors of its stages."""
    return {
        name.replace("stages.0.0.", "stem.")
        .replace("stages.0.1.", "layers.0.")
        .replace("stages.", "layers."): t
        for name, t in state.items()
    }


def straightforward_cifar(
    state: dict[str, torch.Tensor], x: torch.Tensor, n_blocks: int, *, last_relu: bool, training: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """He et al.'s section 4.2 in plain functions: the map before each stage's last ReLU, the embedding."""

    def norm(x, name):
        mean, var = (state[f"{name}.running_{kind}"].clone() for kind in ("mean", "var"))
        return F.batch_norm(x, mean, var, state[f"{name}.weight"], state[f"{name}.bias"], training=training)

    x = F.relu(norm(F.conv2d(x, state["stem.0.weight"], padding=1), "stem.1"))
    maps = []
    for stage in range(3):
        for block in range(n_blocks):
            name, stride = f"layers.{stage}.{block}", 2 if stage > 0 and block == 0 else 1
            y = F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = F.conv2d(F.relu(norm(y, f"{name}.bn1")), state[f"{name}.conv2.weight"], padding=1)
            y = norm(y, f"{name}.bn2")
            if stride == 2:
                n_zeros = y.shape[1] // 4  # on either side of the channels there were
                y[:, n_zeros:-n_zeros] += x[:, :, ::2, ::2]
            else:
                y += x
            if block == n_blocks - 1:
                maps.append(y)
            x = F.relu(y)
    return maps, (x if last_relu else maps[-1]).mean(dim=(2, 3))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def names_in_timm(backbone: Backbone) -> dict[str, torch.Tensor]:
    """The tensors of a staged ResNet by the names they have in timm."""
    names = {}
    for name, tensor in backbone.state_dict().items():
        _, stage, rest = name.split(".", 2)
        names[rest if stage == "0" else f"layer{int(stage) + 1}.{rest}"] = tensor
    return names


@pytest.fixture
def small_weights():
    """Of timm's smallest residual network, by the names in its files."""
    torch.manual_seed(1)
    return timm.create_model("test_resnet", num_classes=5).state_dict()


RESNETS = [("resnet18", 512), ("resnet26", 2048), ("test_resnet", 96), ("resnet20_cifar", 64)]
MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
LAST_RELU = pytest.mark.parametrize("last_relu", [True, False], ids=["ReLU", "signed"])


@pytest.mark.parametrize(("name", "dim"), RESNETS)
def test_without_the_last_relu_embeddings_are_signed(name, dim):
    torch.manual_seed(0)
    for last_relu in (True, False):
        backbone = create_backbone(name, last_relu=last_relu)
        as_after_training(backbone)
        with torch.no_grad():
            _, embedding = backbone.eval()(noise())
        assert embedding.shape == (4, dim)
        assert backbone.num_features == dim
        assert bool((embedding < 0).any()) == (not last_relu)


@pytest.mark.parametrize("name", [name for name, _ in RESNETS])
def test_only_the_last_relu_is_missing(name):
    """Its maps are those of the whole network before the last ReLU: pooling their positive part agrees."""
    torch.manual_seed(0)
    whole, without = (create_backbone(name, last_relu=last_relu).eval() for last_relu in (True, False))
    as_after_training(whole)
    without.load_state_dict(whole.state_dict())
    with torch.no_grad():
        maps, embedding = without(noise())
        torch.testing.assert_close(maps[-1].relu().mean(dim=(2, 3)), whole(noise())[1])
        torch.testing.assert_close(maps[-1].mean(dim=(2, 3)), embedding)


@pytest.mark.parametrize(("name", "n_stages"), [("resnet18", 4), ("test_resnet", 4), ("resnet20_cifar", 3)])
@LAST_RELU
def test_maps_are_those_of_every_stage_before_its_relu(name, n_stages, last_relu):
    backbone = create_backbone(name, last_relu=last_relu).eval()
    as_after_training(backbone)
    with torch.no_grad():
        maps, _ = backbone(noise(side=64))
    assert backbone.is_staged
    assert len(maps) == len(backbone.stages) == n_stages
    assert all((of_stage < 0).any() for of_stage in maps)
    sides = [of_stage.shape[-1] for of_stage in maps]
    assert sides == [sides[0] >> stage for stage in range(n_stages)]


@pytest.mark.parametrize("name", ["test_resnet", "resnet10t", "resnet18", "resnet26"])
@MODES
@LAST_RELU
def test_a_resnet_in_stages_says_what_timm_says(tmp_path, name, training, last_relu):
    """Basic blocks, bottlenecks, both (test_resnet), a deep stem; read from a file of timm's names."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0)
    as_after_training(model)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    backbone = create_backbone(name, last_relu=last_relu)
    load_weights(backbone, str(tmp_path / "weights.safetensors"), name=name)

    if not last_relu:
        block = model.layer4[-1]
        assert isinstance(block.act3 if hasattr(block, "act3") else block.act2, nn.ReLU)
        setattr(block, "act3" if hasattr(block, "act3") else "act2", nn.Identity())
    images = noise(4)
    embedding, expected = backbone.train(training)(images)[1], model.train(training)(images)
    assert torch.equal(embedding, expected)
    # In training mode both also took the same statistics, and learn the same.
    for e in (embedding, expected):
        e.square().sum().backward()
    for mine, timms in ((backbone.buffers(), model.buffers()), (backbone.parameters(), model.parameters())):
        assert all(torch.equal(*pair) for pair in zip(mine, timms, strict=True))
    gradients = [[p.grad for p in m.parameters()] for m in (backbone, model)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(("name", "n_blocks"), [("resnet8_cifar", 1), ("resnet20_cifar", 3)])
@MODES
@LAST_RELU
def test_a_cifar_resnet_in_stages_says_what_plain_functions_say(
    tmp_path, name, n_blocks, training, last_relu
):
    torch.manual_seed(0)
    source = create_backbone(name, last_relu=last_relu)
    as_after_training(source)
    stored = cifar_names(source.state_dict())
    safetensors.torch.save_file(stored, tmp_path / "weights.safetensors")
    backbone = create_backbone(name, last_relu=last_relu)
    load_weights(backbone, str(tmp_path / "weights.safetensors"), name=name)
    with torch.no_grad():
        maps, embedding = backbone.train(training)(noise(6, side=16))
        expected_maps, expected = straightforward_cifar(
            stored, noise(6, side=16), n_blocks, last_relu=last_relu, training=training
        )
    torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=1e-5)
    for of_stage, expected_map in zip(maps, expected_maps, strict=True):
        torch.testing.assert_close(of_stage, expected_map, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["resnet18", "resnet20_cifar"])
@LAST_RELU
def test_upper_stages_go_on_where_the_lower_ones_end(name, last_relu):
    backbone = create_backbone(name, last_relu=last_relu).eval()
    as_after_training(backbone)
    with torch.no_grad():
        maps, embedding = backbone(noise())
        for first in range(1, len(maps)):
            upper = backbone.upper_stages(first)
            upper_maps, again = upper(maps[first - 1].relu())
            assert torch.equal(again, embedding)
            assert len(upper_maps) == len(maps) - first
            assert upper.stages[0] is backbone.stages[first]


@pytest.mark.parametrize("name", ["skresnet18", "resnest14d", "res2net50_26w_4s"])
def test_a_last_relu_that_cannot_be_removed_is_refused(name):
    with raises("network.last_relu.invalid"):
        create_backbone(name, last_relu=False)
    backbone = create_backbone(name, last_relu=True).eval()
    assert not backbone.is_staged
    (model,) = backbone.stages
    with torch.no_grad():
        assert torch.equal(backbone(noise(2, side=64))[1], model(noise(2, side=64)))


@pytest.mark.parametrize(("name", "n_millions"), [("resnet20_cifar", 0.27), ("resnet32_cifar", 0.46)])
def test_cifar_resnets_have_the_published_size(name, n_millions):
    backbone = create_backbone(name, last_relu=True)
    n_parameters = sum(parameter.numel() for parameter in backbone.parameters())
    assert n_parameters / 1e6 == pytest.approx(n_millions, abs=0.01)
    n_layers = sum(isinstance(module, nn.Conv2d) for module in backbone.modules()) + 1
    assert name == f"resnet{n_layers}_cifar"


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_convnext"])
def test_stages_of_any_timm_model_are_read_and_the_embedding_is_its_own(name):
    backbone = create_backbone(name, last_relu=False).eval()
    images = noise(2, side=160)
    with torch.no_grad():
        maps, embedding = backbone(images)
        assert torch.equal(embedding, backbone.stages[0](images))
    assert embedding.shape == (2, backbone.num_features)
    assert len(maps) > 3
    assert all(m.ndim == 4 and len(m) == 2 for m in maps)
    assert not backbone.is_staged


@pytest.mark.parametrize(("name", "dim"), [("mobilenetv3_small_050", 1024), ("vgg11", 4096)])
def test_where_layers_of_the_head_stay_an_embedding_is_as_wide_as_these_make_it(name, dim):
    network = NetworkSpec(name, last_relu=False, learn_scale=True).build().eval()
    network.grow(torch.ones(2, network.classifier.dim))
    with torch.no_grad():
        out = network(noise(2))
    assert out.embedding.shape == (2, network.classifier.dim) == (2, dim)
    assert out.logits.shape == (2, 2)


@pytest.mark.parametrize(
    ("mistyped", "right"),
    [("resnet_18", "resnet18"), ("resnet32_cifr", "resnet32_cifar"), ("efficientnetb0", "efficientnet_b0")],
)
def test_an_unknown_backbone_is_answered_with_the_nearest(mistyped, right):
    with raises("network.backbone.unknown", f"Did you mean '{right}'?"):
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


@pytest.mark.parametrize("name", ["resnet20_cifar", "resnet200"])
def test_weights_that_the_hub_does_not_have_are_refused(name, no_network):
    backbone = create_backbone("resnet8_cifar", last_relu=False)  # it does not come to matter which
    with raises("network.weights.unavailable", name):
        load_weights(backbone, "hub", name=name)


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
    timm_names = names_in_timm(backbone)
    assert set(timm_names) == set(small_weights) - {"fc.weight", "fc.bias"}
    for name, tensor in timm_names.items():
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
    with raises("network.weights.mismatch", "test_resnet", name):
        load_weights(backbone, str(path), name="test_resnet")
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 a pickle in a zip"])
def test_a_file_that_holds_no_weights_is_refused(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with raises("network.weights.invalid"):
        load_weights(create_backbone("resnet20_cifar", last_relu=False), str(path), name="resnet20_cifar")


def test_an_absent_file_of_weights_is_refused(tmp_path):
    backbone = create_backbone("resnet20_cifar", last_relu=False)
    for path in (tmp_path, tmp_path / "none.safetensors"):
        with raises("network.weights.missing"):
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


def test_a_family_without_readable_stages_is_one_stage():
    backbone = create_backbone("test_nfnet", last_relu=False).eval()
    with torch.no_grad():
        (only,), embedding = backbone(noise(2, 32))
    assert torch.equal(only, embedding)
