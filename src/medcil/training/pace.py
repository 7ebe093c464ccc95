"""How many images this machine takes in a second, measured before any training."""

import copy
import time

import torch
from torch import nn

from medcil.config import ExecutionConfig
from medcil.models.network import Network
from medcil.training.inference import choose_device

STEPS = 3


def measure_pace(
    network: Network, *, crop: int, batch_size: int, execution: ExecutionConfig
) -> tuple[float, float]:
    """Return the images that a copy of a network trains on, and those that it embeds, in a second.

    A few steps on noise are timed, after one that is not: reading and augmenting images is not counted.
    """
    device = choose_device(execution)
    network = copy.deepcopy(network).to(device).to(memory_format=torch.channels_last)
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, crop, crop, generator=noise).to(device)
    images = images.to(memory_format=torch.channels_last)
    return _timed(network.train(), images, execution), _timed(network.eval(), images, execution)


def _timed(network: nn.Module, images: torch.Tensor, execution: ExecutionConfig) -> float:
    is_cuda = images.is_cuda
    began = 0.0
    for step in range(1 + STEPS):
        if step == 1:
            began = time.monotonic()
        with (
            torch.set_grad_enabled(network.training),
            torch.autocast(
                images.device.type, torch.bfloat16, enabled=is_cuda and execution.precision == "auto"
            ),
        ):
            total = network(images).embedding.sum()
        if network.training:
            torch.autograd.grad(total, list(network.parameters()), allow_unused=True)
        if is_cuda:
            torch.cuda.synchronize()
    return STEPS * len(images) / (time.monotonic() - began)
