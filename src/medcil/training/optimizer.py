"""The optimizer of a phase: parameters, learning rates, module modes, and its tensors in a checkpoint."""

import math

import torch
from torch import Tensor, nn

from medcil.config import TrainingConfig
from medcil.methods.protocol import Phase
from medcil.models.backbones import batch_norms
from medcil.models.network import Network
from medcil.training.checkpoint import Checkpoint


def build_optimizer(phase: Phase, training: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimizer of all parameters that the phase moves; a group has its rate under "rate"."""
    rates = {**training.learning_rates.model_dump(), **phase.rates}
    groups = [
        {"params": params, "name": name, "rate": rates[name]} for name, params in phase.all_params().items()
    ]
    is_on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    if is_on_gpu:  # one kernel for all parameters; a rate in a tensor, so that a captured step can follow it
        for group in groups:
            group["lr"] = torch.zeros((), device="cuda")
    if phase.optimizer == "adamw":
        return torch.optim.AdamW(
            groups, weight_decay=training.weight_decay, fused=is_on_gpu, capturable=is_on_gpu
        )
    optimizer = torch.optim.SGD(
        groups, momentum=training.momentum, weight_decay=training.weight_decay, fused=is_on_gpu
    )
    if is_on_gpu and training.momentum:
        make_momentum(optimizer)
    return optimizer


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Of zeros, which give the same first step; one kernel for all takes them from all parameters or none,
    and epochs of two kinds move different ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """By the name of their group."""
    rates = {group["name"]: group["rate"] * factor for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rates[group["name"]])
        else:
            group["lr"] = rates[group["name"]]
    return rates


def learning_rate_factor(training: TrainingConfig, epoch: int) -> float:
    """Return the factor of all learning rates in this epoch, counted from 0."""
    if training.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / training.epochs))
    passed = sum(epoch >= max(1, round(milestone * training.epochs)) for milestone in training.milestones)
    return float(training.decay**passed)


def set_moving(network: Network, phase: Phase, *, holds_batch_norm: bool = False) -> None:
    """Parameters learn if the phase names them; a module is in training mode if one of its own learns.

    So a frozen backbone's batch norm uses and keeps its statistics without any method having to say so.
    With `holds_batch_norm` every batch norm does, also those that learn.
    """
    moving = {id(parameter) for params in phase.params.values() for parameter in params}
    for parameter in network.parameters():
        parameter.requires_grad_(id(parameter) in moving)

    def visit(module: nn.Module, *, inherited: bool) -> None:
        parameters = list(module.parameters())
        # A module without parameters (dropout, say) follows the one that contains it.
        module.training = any(id(p) in moving for p in parameters) if parameters else inherited
        for child in module.children():
            visit(child, inherited=module.training)

    visit(network, inherited=False)
    if holds_batch_norm:
        for norm in batch_norms(network):
            norm.training = False


def checkpoint_tensors(network: Network, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                tensors[f"optimizer.{index}.{name}"] = value
    return tensors


def restore(checkpoint: Checkpoint, network: Network, optimizer: torch.optim.Optimizer) -> None:
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights: dict[str, Tensor] = {}
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in checkpoint.tensors.items():
        kind, _, name = key.partition(".")
        if kind == "network":
            weights[name] = tensor
            continue
        index, _, name = name.partition(".")
        parameter = params[int(index)]
        if tensor.shape == parameter.shape:  # in the parameter's own memory layout, as it was before
            tensor = torch.empty_like(parameter).copy_(tensor)
        states.setdefault(int(index), {})[name] = tensor
    network.load_state_dict(weights)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
