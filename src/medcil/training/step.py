"""One training step, called or captured and replayed alike, and its optimizer."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from medcil.config import TrainingConfig
from medcil.methods.protocol import Batch, Counts, Phase
from medcil.models.backbones import batch_norms
from medcil.models.network import Network
from medcil.training.checkpoint import Checkpoint, Journal, Watch
from medcil.training.feed import Drawn, Feed
from medcil.training.old_network import OldNetwork, batch_outputs
from medcil.training.sampling import EpochPlanner, Key


@dataclass(frozen=True, eq=False)
class Assignment:
    """What is constant while one task is learned, except the phase in `key`, and its teacher."""

    key: Key
    n_old: int
    old_network: OldNetwork | None
    feed: Feed
    inherent_counts: Int[Tensor, "classes"]
    quota: int
    """Exemplars per class that the memory will keep."""
    training: TrainingConfig
    checkpoint_every: int | None
    journal: Journal
    watch: Watch


class Course:
    """What is constant during one phase. Its tensors keep their addresses, which captured steps use."""

    def __init__(
        self,
        assignment: Assignment,
        network: Network,
        phase: Phase,
        training: TrainingConfig,
        optimizer: torch.optim.Optimizer,
        planner: EpochPlanner,
    ) -> None:
        self.assignment = assignment
        self.network = network
        self.phase = phase
        self.training = training
        self.optimizer = optimizer
        self.planner = planner
        feed, n_classes = assignment.feed, network.n_classes
        drawn = planner.class_counts(assignment.key, epochs=training.epochs, n_classes=n_classes)
        at_hand = feed.samples.class_counts(n_classes)
        self.counts = Counts(drawn.to(feed.device), at_hand.to(feed.device), assignment.inherent_counts)
        self.noise = torch.Generator(feed.device)
        self.n_drawn = round(float(drawn.double().sum()))
        """Images that an epoch draws."""
        names = [*phase.terms, *(phase.alternate.terms if phase.alternate else ())]
        self.sums = {name: torch.zeros((), device=feed.device) for name in names}
        """Sum of each loss term over the images of the epoch so far."""


def train_step(course: Course, parity: int, size: int) -> None:
    """Train on the next `size` images, in an even or an odd epoch.

    It reads no value of a tensor, and no shape depends on one, so that it can be captured.
    """
    phase = course.phase.in_epoch(parity)
    drawn = course.assignment.feed.take(size)
    batch = _batch(course, drawn)
    losses = {name: course.phase.weighted(name, term(batch)) for name, term in phase.terms.items()}
    if drawn.share is not None:
        others = replace(
            batch,
            labels=batch.labels.roll(1),
            turns=None if batch.turns is None else batch.turns.roll(1),
        )
        for name, term in phase.terms.items():
            of_others = course.phase.weighted(name, term(others))
            losses[name] = drawn.share * losses[name] + (1 - drawn.share) * of_others
    course.optimizer.zero_grad(set_to_none=True)
    moving = [parameter for params in phase.params.values() for parameter in params]
    if course.phase.gradients == "projected":
        _take_projected_gradients(course, losses, moving, size)
    else:
        _take_gradients(course, list(losses.values()), size)
    if course.training.gradient_clamp is not None:
        nn.utils.clip_grad_value_(moving, course.training.gradient_clamp)
    course.optimizer.step()
    for name, loss in losses.items():
        course.sums[name] += loss.detach() * size


def _take_gradients(course: Course, losses: list[Tensor], size: int, *, keep_graph: bool = False) -> None:
    """Put the gradients of the summed losses into the parameters."""
    torch.stack(losses).sum().backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    course.assignment.feed.ranks.add_gradients(course.network.extractor_parameters(), size)


def _take_projected_gradients(
    course: Course, losses: dict[str, Tensor], moving: list[nn.Parameter], size: int
) -> None:
    """Put A-GEM's gradients into the parameters: nothing points against the gradient of "reference"."""
    _take_gradients(course, [losses["reference"]], size, keep_graph=True)
    reference = [torch.zeros_like(p) if p.grad is None else p.grad for p in moving]
    course.optimizer.zero_grad(set_to_none=True)
    _take_gradients(course, [loss for name, loss in losses.items() if name != "reference"], size)
    pairs = [(p.grad, r) for p, r in zip(moving, reference, strict=True) if p.grad is not None]
    dot = torch.stack([(g * r).sum() for g, r in pairs]).sum()
    square = torch.stack([r.square().sum() for r in reference]).sum()
    share = (dot / torch.where(square > 0, square, 1.0)).clamp(max=0)
    for parameter, r in zip(moving, reference, strict=True):
        parameter.grad = (0 if parameter.grad is None else parameter.grad) - share * r


def _batch(course: Course, drawn: Drawn) -> Batch:
    assignment, classifier = course.assignment, course.network.classifier
    # Before the new network runs: the old one waits only for the work that the device has so far.
    run_old_network = assignment.old_network.outputs_of(drawn) if assignment.old_network else None
    out = batch_outputs(assignment.feed, course.network, drawn)
    class_weights = classifier.class_weights
    return Batch(
        labels=drawn.labels,
        out=out,
        counts=course.counts,
        task_sizes=classifier.block_sizes,
        class_weights=class_weights,
        scale=classifier.scale,
        run_old_network=run_old_network,
        normal=lambda shape: torch.randn(
            tuple(shape), generator=course.noise, device=class_weights.device, dtype=class_weights.dtype
        ),
        turns=drawn.turns if course.phase.is_turned else None,
    )


@torch.no_grad()
def example_batch(course: Course) -> Batch:
    """Build a batch of two black images per process, to observe what terms read.

    Leaves the network in evaluation mode.
    """
    feed = course.assignment.feed
    course.network.eval()
    crop, n = feed.preprocessing.crop, 2 * feed.ranks.size
    labels = torch.zeros(n, dtype=torch.int64, device=feed.device)
    images = torch.zeros(2, 3, crop, crop, device=feed.device, dtype=course.network.classifier.scale.dtype)
    return _batch(course, Drawn(images, labels, labels, labels.bool()))


def build_optimizer(phase: Phase, training: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimizer of all parameters that the phase moves. A group keeps its base rate as "rate"."""
    rates = {**training.learning_rates.model_dump(), **phase.rates}
    groups = [
        {"params": params, "name": name, "rate": rates[name]} for name, params in phase.all_params().items()
    ]
    is_on_gpu = any(parameter.is_cuda for group in groups for parameter in group["params"])
    if is_on_gpu:  # one kernel for all parameters; rates are tensors, which captured steps read again
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
    """Start momentum at zero, which gives the same first step.

    The fused kernel needs momentum for all parameters or none, and alternating epochs move different ones.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Set every group's rate to its base rate times the factor; return the rates by group name."""
    rates = {group["name"]: group["rate"] * factor for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rates[group["name"]])
        else:
            group["lr"] = rates[group["name"]]
    return rates


def learning_rate_factor(training: TrainingConfig, epoch: int) -> float:
    """Return the schedule's factor in this epoch, counted from 0."""
    if training.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / training.epochs))
    passed = sum(epoch >= max(1, round(milestone * training.epochs)) for milestone in training.milestones)
    return float(training.decay**passed)


def set_moving(network: Network, phase: Phase, *, holds_batch_norm: bool = False) -> None:
    """Make the phase's parameters learn, and put a module in training mode if one of its parameters learns.

    So the batch norm of a frozen backbone keeps its statistics without any code in the method. With
    `holds_batch_norm` every batch norm keeps its statistics.
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
        if tensor.shape == parameter.shape:  # keep the parameter's memory layout
            tensor = torch.empty_like(parameter).copy_(tensor)
        states.setdefault(int(index), {})[name] = tensor
    network.load_state_dict(weights)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
