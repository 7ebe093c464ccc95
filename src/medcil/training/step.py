"""One training step: the same code whether it is called or captured once and replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from medcil.config import TrainingConfig
from medcil.methods.protocol import Batch, Counts, Phase
from medcil.models.network import Network
from medcil.training.checkpoint import Journal, Watch
from medcil.training.feed import Drawn, Feed
from medcil.training.old_network import OldNetwork, batch_outputs
from medcil.training.sampling import EpochPlanner, Key


@dataclass(frozen=True, eq=False)
class Assignment:
    """What stays the same while one task is learned; `key` says where in it we are."""

    key: Key
    n_old: int
    old_network: OldNetwork | None
    feed: Feed
    inherent_counts: Int[Tensor, "classes"]
    quota: int
    """Exemplars of each class that the memory will keep."""
    training: TrainingConfig
    checkpoint_every: int | None
    journal: Journal
    watch: Watch

    def in_phase(self, index: int) -> "Assignment":
        return replace(self, key=replace(self.key, phase=index))

    def in_epoch(self, index: int) -> "Assignment":
        return replace(self, key=replace(self.key, epoch=index))


@dataclass(frozen=True, eq=False)
class Course:
    """What stays the same during one phase. Its tensors keep their place, where captured steps find them."""

    assignment: Assignment
    network: Network
    phase: Phase
    training: TrainingConfig
    optimizer: torch.optim.Optimizer
    planner: EpochPlanner
    counts: Counts
    noise: torch.Generator
    n_drawn: int
    """Images of an epoch."""
    sums: dict[str, Float[Tensor, ""]]
    """Of each loss term over the images of the epoch so far."""


def begin_course(
    assignment: Assignment,
    network: Network,
    phase: Phase,
    training: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    planner: EpochPlanner,
) -> Course:
    labels, device, n_classes = assignment.feed.samples.labels, assignment.feed.device, network.n_classes
    drawn = planner.class_counts(assignment.key, epochs=training.epochs, n_classes=n_classes)
    at_hand = torch.bincount(labels, minlength=n_classes)
    names = [*phase.terms, *(phase.alternate.terms if phase.alternate else ())]
    return Course(
        assignment=assignment,
        network=network,
        phase=phase,
        training=training,
        optimizer=optimizer,
        planner=planner,
        counts=Counts(drawn.to(device), at_hand.to(device), assignment.inherent_counts),
        noise=torch.Generator(device),
        n_drawn=round(float(drawn.double().sum())),
        sums={name: torch.zeros((), device=device) for name in names},
    )


def train_step(course: Course, parity: int, size: int) -> None:
    """Trains on the next batch, of this size, in an even or an odd epoch.

    It asks no tensor for its value and makes none whose size depends on one, so that it can be captured.
    """
    phase = course.phase.in_epoch(parity)
    batch = _batch(course, course.assignment.feed.take(size))
    losses = {name: course.phase.weighted(name, term(batch)) for name, term in phase.terms.items()}
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
    """Leave the gradients of the summed losses in the parameters."""
    torch.stack(losses).sum().backward(retain_graph=keep_graph)  # type: ignore[no-untyped-call]
    course.assignment.feed.ranks.add_gradients(course.network.extractor_parameters(), size)


def _take_projected_gradients(
    course: Course, losses: dict[str, Tensor], moving: list[nn.Parameter], size: int
) -> None:
    """Leave A-GEM's gradients: without what points against the gradient of the term "reference"."""
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
    # Before the new network runs: the old one waits only for what has been given to the device so far.
    run_old_network = assignment.old_network.asked_about(drawn) if assignment.old_network else None
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
        normal=partial(_normal, class_weights, course.noise),
    )


@torch.no_grad()
def example_batch(course: Course) -> Batch:
    """Two black images in each process, to see what terms read. The network is left in evaluation mode."""
    feed = course.assignment.feed
    course.network.eval()
    crop, n = feed.preprocessing.crop, 2 * feed.ranks.size
    labels = torch.zeros(n, dtype=torch.int64, device=feed.device)
    images = torch.zeros(2, 3, crop, crop, device=feed.device, dtype=course.network.classifier.scale.dtype)
    return _batch(course, Drawn(images, labels, labels, labels.bool()))


def _normal(like: Tensor, generator: torch.Generator, shape: Sequence[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, device=like.device, dtype=like.dtype)
