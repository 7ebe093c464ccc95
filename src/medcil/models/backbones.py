"""Backbones: from an image to the maps of its stages and an embedding. Any timm model, or CIFAR's ResNets.

timm takes as long to import as torch, so it is imported only when one of its models is needed.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from medcil.errors import InvalidInput, nearest

CIFAR_RESNETS = {f"resnet{depth}_cifar": depth for depth in (8, 14, 20, 32)}
LAYERS = ("layer1", "layer2", "layer3", "layer4")


class Backbone(nn.Module):
    """A ResNet as a chain of stages and a pooling. Any other model is a `TimmBackbone`.

    A stage ends before its last ReLU, which follows between the stages: PODNet compares these maps, and a new
    branch can start from one.
    """

    def __init__(self, stages: Iterable[nn.Module], pool: nn.Module, *, num_features: int, last_relu: bool):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.pool = pool
        self.num_features = num_features
        self.last_relu = last_relu

    @property
    def is_staged(self) -> bool:
        return len(self.stages) > 1

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> tuple[tuple[Float[Tensor, "batch ..."], ...], Float[Tensor, "batch dim"]]:
        """Return the map of each stage, before its ReLU, and the embedding."""
        maps: list[Tensor] = []
        for stage in self.stages:
            maps.append(stage(F.relu(maps[-1]) if maps else x))
        return tuple(maps), self.pool(F.relu(maps[-1]) if self.last_relu else maps[-1])

    def upper_stages(self, first: int) -> "Backbone":
        """Return the stages from `first` on, not copied. They read the map before them, after its ReLU."""
        return Backbone(
            self.stages[first:], self.pool, num_features=self.num_features, last_relu=self.last_relu
        )


class TimmBackbone(Backbone):
    """A model of another family: the maps of its stages can be read, but no branch can start from one."""

    def __init__(self, model: nn.Module, *, num_features: int) -> None:
        super().__init__([model], nn.Identity(), num_features=num_features, last_relu=False)

    def forward(
        self, x: Float[Tensor, "batch channel height width"]
    ) -> tuple[tuple[Float[Tensor, "batch ..."], ...], Float[Tensor, "batch dim"]]:
        (model,) = self.stages
        if not hasattr(model, "forward_intermediates"):
            embedding = model(x)
            return (embedding,), embedding
        features, maps = model.forward_intermediates(x)  # type: ignore[operator]
        return tuple(maps), model.forward_head(features)  # type: ignore[operator]


def create_backbone(name: str, *, last_relu: bool) -> Backbone:
    """Create a backbone with random weights and no classifier."""
    return in_stages(create_model(name), name=name, last_relu=last_relu)


def create_model(name: str) -> nn.Module:
    """Create a model of timm, or a ResNet of CIFAR, with random weights and no classifier."""
    if name in CIFAR_RESNETS:
        return CifarResNet(CIFAR_RESNETS[name])
    import timm

    if not timm.is_model(name):
        known = [*CIFAR_RESNETS, *timm.list_models()]
        raise InvalidInput(
            f"network.backbone: no model {name!r}. {nearest(name, known)}", code="network.backbone.unknown"
        )
    try:
        return timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:  # the part after the dot names no weights
        message = f"network.backbone: {error} Leave out the dot and what follows it."
        raise InvalidInput(message, code="network.backbone.invalid") from None


def in_stages(model: nn.Module, *, name: str, last_relu: bool) -> Backbone:
    """Cut a ResNet into its stages, and take another model as a whole."""
    # A head of several layers, where timm keeps one, decides the size of the embedding.
    num_features = int(getattr(model, "head_hidden_size", None) or model.num_features)  # type: ignore[arg-type]
    if isinstance(model, CifarResNet):
        return Backbone(model.stages(), model.pool, num_features=num_features, last_relu=last_relu)
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet

    if not isinstance(model, ResNet):
        return TimmBackbone(model, num_features=num_features)  # which keeps its last activation
    layers = [cast(nn.Sequential, getattr(model, layer)) for layer in LAYERS]
    for layer in layers:
        block = list(layer)[-1]
        if not isinstance(block, (BasicBlock, Bottleneck)):
            if last_relu:
                return TimmBackbone(model, num_features=num_features)
            raise InvalidInput(
                f"network.last_relu: the last ReLU of {name} cannot be removed. Set it to true.",
                code="network.last_relu.invalid",
            )
        setattr(block, "act3" if isinstance(block, Bottleneck) else "act2", nn.Identity())
    beginning = ("conv1", "bn1", "act1", "maxpool", "layer1")
    first = OrderedDict((part, cast(nn.Module, getattr(model, part))) for part in beginning)
    pool = cast(nn.Module, model.global_pool)
    return Backbone([nn.Sequential(first), *layers[1:]], pool, num_features=num_features, last_relu=last_relu)


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def recalibrate_batch_norm(backbone: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace every batch norm's running statistics by the average over these batches; weights stay.

    This is for weights that come with statistics of other images, which evaluation mode would use.
    """
    backbone.eval()
    norms = batch_norms(backbone)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average
        norm.train()
    with torch.no_grad():
        for images in batches:
            backbone(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


class _CifarBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, *, stride: int, last_relu: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.n_padding = channels - channels_in
        self.last_relu = last_relu

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        # Shortcut without parameters (option A): subsample, and pad the new channels with zeros.
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, self.n_padding // 2, self.n_padding - self.n_padding // 2))
        return F.relu(y + shortcut) if self.last_relu else y + shortcut


class CifarResNet(nn.Module):
    """The ResNet of the CIFAR experiments (He et al. 2016, section 4.2): 6n + 2 layers, 16-32-64 channels.

    Its three stages end before their last ReLU.
    """

    num_features = 64

    def __init__(self, depth: int) -> None:
        super().__init__()
        n_blocks = (depth - 2) // 6
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layers = nn.ModuleList()
        channels_in = 16
        for channels in (16, 32, 64):
            blocks: list[_CifarBlock] = []
            for i in range(n_blocks):
                stride = 2 if i == 0 and channels > 16 else 1
                blocks.append(_CifarBlock(channels_in, channels, stride=stride, last_relu=i < n_blocks - 1))
                channels_in = channels
            self.layers.append(nn.Sequential(*blocks))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def stages(self) -> list[nn.Module]:
        first, *rest = self.layers
        return [nn.Sequential(self.stem, first), *rest]
