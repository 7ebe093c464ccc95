"""Backbones: an image becomes an embedding. Any timm model, or CIFAR's ResNets."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import safetensors.torch
import timm
import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from medcil.errors import InvalidInput, nearest
from medcil.models.resnet_cifar import CifarResNet

CIFAR_RESNETS = {f"resnet{depth}_cifar": depth for depth in (8, 14, 20, 32)}


def create_backbone(name: str, *, last_relu: bool) -> nn.Module:
    """Random weights, no classifier. `num_features` is the embedding's dimension."""
    if name in CIFAR_RESNETS:
        return CifarResNet(CIFAR_RESNETS[name], last_relu=last_relu)
    if not timm.is_model(name):
        known = [*CIFAR_RESNETS, *timm.list_models()]
        raise InvalidInput(f"network.backbone: there is no model {name!r}. {nearest(name, known)}")
    try:
        model = timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:  # what follows the dot names no weights
        raise InvalidInput(f"network.backbone: {error} Leave out what follows the dot.") from None
    if isinstance(model, ResNet) and not last_relu:
        # Signed embeddings, as cosine classifiers want them. Other families are left as they are.
        block = list(cast(nn.Sequential, model.layer4))[-1]
        if not isinstance(block, (BasicBlock, Bottleneck)):
            raise InvalidInput(f"network.last_relu: that of {name} cannot be removed; set it to true.")
        setattr(block, "act3" if isinstance(block, Bottleneck) else "act2", nn.Identity())
    return model


def load_weights(backbone: nn.Module, weights: str, *, name: str) -> None:
    """Weights from a local safetensors file, or, only where it says `hub`, from timm's hub."""
    if weights == "hub":
        tensors = timm.create_model(name, pretrained=True, num_classes=0).state_dict()
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
    wanted = backbone.state_dict()
    counters = {key for key in wanted if key.endswith("num_batches_tracked")}
    missing = sorted(set(wanted) - set(tensors) - counters)
    misshapen = sorted(k for k in wanted if k in tensors and wanted[k].shape != tensors[k].shape)
    if missing or misshapen:
        raise InvalidInput(
            f"network.weights: {weights} does not fit {name} ({len(missing)} tensors missing, "
            f"{len(misshapen)} of another shape, e.g. {(missing + misshapen)[0]}). Give this backbone's own."
        )
    used = {key: value.to(wanted[key].dtype) for key, value in tensors.items() if key in wanted}
    backbone.load_state_dict(used, strict=False)


def recalibrate_batch_norm(backbone: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replaces every batch norm's running statistics by the average over these batches; weights stay.

    For weights whose statistics were taken on other images, which evaluation mode would believe.
    """
    backbone.eval()
    norms = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
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
