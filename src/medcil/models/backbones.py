"""Backbones: an image becomes the maps of its stages and an embedding. Any timm model, or CIFAR's ResNets.

timm, whose import takes as long as that of torch, is imported where one of its models is asked for.
"""

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from medcil.errors import InvalidInput, nearest
from medcil.models.resnet_cifar import CifarResNet

CIFAR_RESNETS = {f"resnet{depth}_cifar": depth for depth in (8, 14, 20, 32)}
LAYERS = ("layer1", "layer2", "layer3", "layer4")


class Backbone(nn.Module):
    """Stages, one after the other, then a pooling: a ResNet; any other model is a `TimmBackbone`.

    A ResNet's stages end before their last ReLU, which comes between them: what PODNet compares, and what
    a new branch can start from.
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
        """The map of each stage before its ReLU, and the embedding."""
        maps: list[Tensor] = []
        for stage in self.stages:
            maps.append(stage(F.relu(maps[-1]) if maps else x))
        return tuple(maps), self.pool(F.relu(maps[-1]) if self.last_relu else maps[-1])

    def upper_stages(self, first: int) -> "Backbone":
        """The stages from `first` on, not copied; its input is the map before them, after its ReLU."""
        return Backbone(
            self.stages[first:], self.pool, num_features=self.num_features, last_relu=self.last_relu
        )


class TimmBackbone(Backbone):
    """A model of another family: the maps of its stages can be read, but nothing can start from one."""

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
    """Random weights, no classifier."""
    return _in_stages(_create_model(name), name=name, last_relu=last_relu)


def _create_model(name: str) -> nn.Module:
    if name in CIFAR_RESNETS:
        return CifarResNet(CIFAR_RESNETS[name])
    import timm

    if not timm.is_model(name):
        known = [*CIFAR_RESNETS, *timm.list_models()]
        raise InvalidInput(f"network.backbone: there is no model {name!r}. {nearest(name, known)}")
    try:
        return timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:  # what follows the dot names no weights
        raise InvalidInput(f"network.backbone: {error} Leave out what follows the dot.") from None


def _in_stages(model: nn.Module, *, name: str, last_relu: bool) -> Backbone:
    # timm's contract, kept by ours; where a head of several layers stays, it decides the embedding's size.
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
            raise InvalidInput(f"network.last_relu: that of {name} cannot be removed; set it to true.")
        setattr(block, "act3" if isinstance(block, Bottleneck) else "act2", nn.Identity())
    beginning = ("conv1", "bn1", "act1", "maxpool", "layer1")
    first = OrderedDict((part, cast(nn.Module, getattr(model, part))) for part in beginning)
    pool = cast(nn.Module, model.global_pool)
    return Backbone([nn.Sequential(first), *layers[1:]], pool, num_features=num_features, last_relu=last_relu)


def load_weights(backbone: Backbone, weights: str, *, name: str) -> None:
    """Weights from a local safetensors file, or, only where it says `hub`, from timm's hub."""
    if weights == "hub":
        import timm

        try:
            tensors = timm.create_model(name, pretrained=True, num_classes=0).state_dict()
        except RuntimeError as error:
            raise InvalidInput(
                f"network.weights: the hub has none for {name} ({error}). Give a safetensors file."
            ) from None
        except OSError as error:
            raise InvalidInput(
                f"network.weights: the hub cannot be reached ({str(error).splitlines()[0]}). Give a "
                "safetensors file."
            ) from None
    else:
        path = Path(weights)
        if not path.is_file():
            raise InvalidInput(
                f"network.weights: there is no file {path}. Give a safetensors file, or `hub`."
            )
        try:
            tensors = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise InvalidInput(f"network.weights: {path} is not a safetensors file ({error}).") from None
        except OSError as error:
            raise InvalidInput(
                f"network.weights: {path} cannot be read ({error}); make it readable."
            ) from None
    model = _create_model(name)
    wanted = model.state_dict()
    counters = {key for key in wanted if key.endswith("num_batches_tracked")}
    missing = sorted(set(wanted) - set(tensors) - counters)
    misshapen = sorted(k for k in wanted if k in tensors and wanted[k].shape != tensors[k].shape)
    if missing or misshapen:
        raise InvalidInput(
            f"network.weights: {weights} does not fit {name} ({len(missing)} tensors missing, "
            f"{len(misshapen)} of another shape, e.g. {(missing + misshapen)[0]}). Give this backbone's own."
        )
    used = {key: value.to(wanted[key].dtype) for key, value in tensors.items() if key in wanted}
    model.load_state_dict(used, strict=False)
    backbone.load_state_dict(_in_stages(model, name=name, last_relu=backbone.last_relu).state_dict())


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def recalibrate_batch_norm(backbone: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replaces every batch norm's running statistics by the average over these batches; weights stay.

    For weights whose statistics were taken on other images, which evaluation mode would believe.
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
