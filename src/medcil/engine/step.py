"""One training step: the same code whether it is called or captured once and replayed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from medcil.config import TrainingConfig
from medcil.engine.draws import EpochPlan, Key
from medcil.engine.feed import Feed
from medcil.engine.lesson import Lesson
from medcil.engine.ranks import Gathered
from medcil.method import Batch, Counts, Phase
from medcil.models.network import Network, Outputs


@dataclass(frozen=True, eq=False)
class Course:
    """What stays the same during one phase. Its tensors keep their place, where captured steps find them."""

    lesson: Lesson
    network: Network
    phase: Phase
    training: TrainingConfig
    optimizer: torch.optim.Optimizer
    plan: Callable[[Key], EpochPlan]
    counts: Counts
    noise: torch.Generator
    sums: dict[str, Float[Tensor, ""]]
    """Of each loss term over the images of the epoch so far."""


def begin_course(
    lesson: Lesson,
    network: Network,
    phase: Phase,
    training: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    plan: Callable[[Key], EpochPlan],
) -> Course:
    labels, device = lesson.feed.samples.labels, lesson.feed.device
    # As drawn in the phase's first epoch, which stands for all.
    drawn, at_hand = (
        torch.bincount(of, minlength=network.n_classes).to(device)
        for of in (labels[plan(lesson.key).order], labels)
    )
    names = [*phase.terms, *(phase.alternate.terms if phase.alternate else ())]
    return Course(
        lesson=lesson,
        network=network,
        phase=phase,
        training=training,
        optimizer=optimizer,
        plan=plan,
        counts=Counts(drawn, at_hand, lesson.inherent_counts),
        noise=torch.Generator(device),
        sums={name: torch.zeros((), device=device) for name in names},
    )


def train_step(course: Course, parity: int, size: int) -> None:
    """Trains on the next batch, of this size, in an even or an odd epoch.

    It asks no tensor for its value and makes none whose size depends on one, so that it can be captured.
    """
    phase = course.phase.in_epoch(parity)
    images, labels = course.lesson.feed.take(size)
    batch = _batch(course, images, labels)
    losses = {name: course.phase.weighted(name, term(batch)) for name, term in phase.terms.items()}
    course.optimizer.zero_grad(set_to_none=True)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    course.lesson.feed.ranks.add_gradients(course.network.extractor_parameters())
    if course.training.gradient_clamp is not None:
        moving = [parameter for params in phase.params.values() for parameter in params]
        nn.utils.clip_grad_value_(moving, course.training.gradient_clamp)
    course.optimizer.step()
    for name, loss in losses.items():
        course.sums[name] += loss.detach() * size


def _batch(course: Course, images: Float[Tensor, "own 3 crop crop"], labels: Int[Tensor, "batch"]) -> Batch:
    lesson, classifier = course.lesson, course.network.classifier
    images_are_there = lesson.beside.mark()
    out = _outputs(lesson.feed, course.network, images, len(labels))
    class_weights = classifier.class_weights
    run_old_network = None
    if lesson.old_network is not None:
        run = partial(_outputs_for_good, lesson.feed, lesson.old_network, images, len(labels))
        run_old_network = partial(lesson.beside.run, images_are_there, run)
    return Batch(
        labels=labels,
        out=out,
        counts=course.counts,
        task_sizes=classifier.block_sizes,
        class_weights=class_weights,
        scale=classifier.scale,
        run_old_network=run_old_network,
        draw_noise=partial(_normal, class_weights, course.noise),
    )


def _outputs(feed: Feed, network: Network, images: Float[Tensor, "own 3 crop crop"], n: int) -> Outputs:
    """For the n images of a batch, of which this process has its share."""
    with feed.precision():
        maps, embeddings = network.features(images)
    if feed.ranks.is_alone:
        return network.classify(maps, embeddings)
    out = network.classify((), [feed.ranks.gather(embedding, n) for embedding in embeddings])
    return out._replace(maps=Gathered(maps, n, feed.ranks))


@torch.no_grad()
def _outputs_for_good(
    feed: Feed, network: Network, images: Float[Tensor, "own 3 crop crop"], n: int
) -> Outputs:
    return _outputs(feed, network, images, n)


def _normal(like: Float[Tensor, "classes dim"], generator: torch.Generator) -> Float[Tensor, "classes dim"]:
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
