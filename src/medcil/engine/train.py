"""The one loop that trains."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from medcil.config import LearningConfig, TrainingConfig
from medcil.data.samples import Samples
from medcil.data.stream import Task
from medcil.engine.draws import EpochPlan, Key, Purpose, draw_noise
from medcil.engine.feed import Feed
from medcil.engine.journal import Checkpoint, Journal, NoJournal
from medcil.engine.optimize import (
    build_optimizer,
    checkpoint_tensors,
    learning_rate_factor,
    restore,
    set_learning_rates,
    set_moving,
)
from medcil.engine.parts import choose_part, planner
from medcil.engine.predict import choose_device, class_means, embed, precision
from medcil.engine.state import State
from medcil.errors import MedcilError
from medcil.memory import renew_memory
from medcil.method import Batch, Counts, Increment, Method, Phase
from medcil.models.backbones import recalibrate_batch_norm
from medcil.models.network import Network, Outputs


@dataclass(frozen=True)
class Progress:
    """Where training is, for whoever watches."""

    phase: str
    epoch: int
    epochs: int
    step: int
    steps: int
    losses: dict[str, float] | None = None
    """Of the whole epoch, once it is finished."""


Watch = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Lesson:
    """What stays the same while one task is learned; `key` says where in it we are."""

    key: Key
    n_old: int
    old_network: Network | None
    feed: Feed
    inherent_counts: Int[Tensor, "classes"]
    quota: int
    """Exemplars of each class that the memory will keep."""
    training: TrainingConfig
    checkpoint_every: int
    journal: Journal
    watch: Watch

    def in_phase(self, index: int) -> "Lesson":
        return replace(self, key=replace(self.key, phase=index))

    def in_epoch(self, index: int) -> "Lesson":
        return replace(self, key=replace(self.key, epoch=index))


def learn_task(
    state: State,
    task: Task,
    method: Method,
    config: LearningConfig,
    *,
    journal: Journal | None = None,
    watch: Watch = lambda progress: None,
) -> State:
    """The state after learning the task's classes. The state given is left as it is."""
    if task.n_old != len(state.class_names):
        raise ValueError(
            f"the task follows {task.n_old} classes, but the state knows {len(state.class_names)}"
        )
    device = choose_device(config.execution)
    network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
    lesson = _lesson(state, task, config, _frozen_copy(network), journal or NoJournal(), watch)
    increment = Increment(
        n_old=task.n_old,
        n_new=task.n_new,
        training=lesson.training,
        embeddings=partial(_embeddings_of_class, network, lesson.feed),
        random=lesson.key.generator(Purpose.NEW_CLASSES),
    )
    log_prior = torch.zeros(task.n_seen)
    for index, phase in enumerate(method.learn(network, increment)):
        # A term that cannot serve is refused before hours of training.
        classification, _ = phase.classification, phase.in_epoch(1).classification
        counts = _train_phase(lesson.in_phase(index), network, phase, increment.embeddings)
        if counts is not None:
            log_prior = classification.log_prior(counts, task.n_old).cpu()
    network.auxiliary = None  # an auxiliary classifier serves training only

    memory = renew_memory(
        state.memory,
        task.train,
        increment.embeddings,
        n_old=task.n_old,
        n_new=task.n_new,
        quota=lesson.quota,
    )
    memory_feed = Feed(memory, state.preprocessing, device, config.execution)
    return State(
        network=_frozen_copy(network).cpu(),
        memory=memory,
        class_names=state.class_names + task.class_names,
        class_means=class_means(network, memory_feed, task.n_seen).cpu(),
        inherent_counts=lesson.inherent_counts.cpu(),
        log_prior_in_scores=log_prior if method.scoring == "classifier" else torch.zeros(task.n_seen),
        scoring=method.scoring,
        preprocessing=state.preprocessing,
    )


def _lesson(
    state: State, task: Task, config: LearningConfig, old_network: Network, journal: Journal, watch: Watch
) -> Lesson:
    device = choose_device(config.execution)
    new_counts = task.train.class_counts(task.n_seen)[task.n_old :]
    return Lesson(
        key=Key(config.seed, task=task.n_old),
        n_old=task.n_old,
        old_network=old_network if task.n_old else None,
        feed=Feed(task.train + state.memory, state.preprocessing, device, config.execution),
        inherent_counts=torch.cat([state.inherent_counts, new_counts]).to(device),
        quota=config.memory.quota(task.n_seen),
        training=config.training_of_task(is_first=task.n_old == 0),
        checkpoint_every=config.execution.checkpoint_every,
        journal=journal,
        watch=watch,
    )


@dataclass(frozen=True, eq=False)
class Course:
    """What stays the same during one phase."""

    phase: Phase
    training: TrainingConfig
    optimizer: torch.optim.Optimizer
    plan: Callable[[Key], EpochPlan]
    counts: Counts


def _train_phase(
    lesson: Lesson, network: Network, phase: Phase, embeddings: Callable[[int], Float[Tensor, "_ dim"]]
) -> Counts | None:
    """Trains the network in place; returns the images per class, None where there are none to train on."""
    key, labels = lesson.key, lesson.feed.samples.labels
    # Before a checkpoint is loaded: a herd is chosen by the network as the phase finds it.
    part = choose_part(phase.part, labels, key, n_old=lesson.n_old, quota=lesson.quota, embeddings=embeddings)
    training = phase.training or lesson.training
    optimizer = build_optimizer(phase, training)
    checkpoint = lesson.journal.latest(key.phase)
    if checkpoint is not None:
        restore(checkpoint, network, optimizer)
    if not len(part):
        if checkpoint is None:
            lesson.journal.save(key.phase, Checkpoint(0, checkpoint_tensors(network, optimizer)))
        return None
    preprocessing = lesson.feed.preprocessing
    plan = planner(phase, training, part, labels, n_old=lesson.n_old, preprocessing=preprocessing)
    course = Course(phase, training, optimizer, plan, _counts(lesson, network.n_classes, plan(key)))
    for epoch in range(checkpoint.epoch if checkpoint else 0, training.epochs):
        factor = learning_rate_factor(training, epoch)
        set_learning_rates(optimizer, factor)
        losses = _train_epoch(lesson.in_epoch(epoch), network, course)
        lesson.journal.log(
            {
                "phase": phase.name,
                "epoch": epoch + 1,
                "epochs": training.epochs,
                "learning_rates": {group["name"]: group["lr"] for group in optimizer.param_groups},
                "losses": losses,
                "total": sum(losses.values()),
            }
        )
        if (epoch + 1) % lesson.checkpoint_every == 0 or epoch + 1 == training.epochs:
            tensors = checkpoint_tensors(network, optimizer)
            lesson.journal.save(key.phase, Checkpoint(epoch + 1, tensors))
    return course.counts


def _counts(lesson: Lesson, n_classes: int, first_epoch: EpochPlan) -> Counts:
    """As drawn in the phase's first epoch, which stands for all."""
    labels, device = lesson.feed.samples.labels, lesson.feed.device
    drawn, at_hand = (torch.bincount(of, minlength=n_classes) for of in (labels[first_epoch.order], labels))
    return Counts(drawn.to(device), at_hand.to(device), lesson.inherent_counts)


def _train_epoch(lesson: Lesson, network: Network, course: Course) -> dict[str, float]:
    """One pass; returns each loss term's mean over the images."""
    device, training, key = lesson.feed.device, course.training, lesson.key
    phase = course.phase.in_epoch(key.epoch)
    plan = course.plan(key)
    set_moving(network, phase)
    moving = [parameter for params in phase.params.values() for parameter in params]
    sums = {name: torch.zeros((), device=device) for name in phase.terms}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key.integer(Purpose.LAYERS))
        for step, (images, labels) in enumerate(lesson.feed.training_batches(plan)):
            batch = _batch(lesson, network, course.counts, step, images, labels)
            losses = {name: course.phase.weighted(name, term(batch)) for name, term in phase.terms.items()}
            course.optimizer.zero_grad(set_to_none=True)
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            if training.gradient_clamp is not None:
                nn.utils.clip_grad_value_(moving, training.gradient_clamp)
            course.optimizer.step()
            for name, loss in losses.items():
                sums[name] += loss.detach() * len(labels)
            lesson.watch(Progress(course.phase.name, key.epoch, training.epochs, step + 1, plan.n_batches))
    return _finish_epoch(lesson, course, plan, sums)


def _batch(
    lesson: Lesson,
    network: Network,
    counts: Counts,
    step: int,
    images: Float[Tensor, "batch 3 crop crop"],
    labels: Int[Tensor, "batch"],
) -> Batch:
    with precision(images.device):
        out = network(images)
    class_weights = network.classifier.class_weights
    return Batch(
        labels=labels,
        out=out,
        counts=counts,
        task_sizes=network.classifier.block_sizes,
        class_weights=class_weights,
        scale=network.classifier.scale,
        run_old_network=partial(_run, lesson.old_network, images) if lesson.old_network else None,
        draw_noise=partial(_noise_like, class_weights, lesson.key, step),
    )


def _finish_epoch(
    lesson: Lesson, course: Course, plan: EpochPlan, sums: dict[str, Float[Tensor, ""]]
) -> dict[str, float]:
    """The only place in an epoch that waits for the device."""
    means = {name: (total / len(plan.order)).item() for name, total in sums.items()}
    epoch, epochs = lesson.key.epoch, course.training.epochs
    if not all(math.isfinite(value) for value in means.values()):
        raise MedcilError(
            f"Training diverged in epoch {epoch + 1}: a loss is not finite. Lower training.learning_rates.\n"
            f"{means}"
        )
    lesson.watch(Progress(course.phase.name, epoch, epochs, plan.n_batches, plan.n_batches, means))
    return means


def recalibrate(state: State, samples: Samples, config: LearningConfig) -> None:
    """Gives the state's network the batch-norm statistics of these images, in place."""
    device = choose_device(config.execution)
    feed = Feed(samples, state.preprocessing, device, config.execution)
    batches = feed.evaluation_batches(torch.arange(len(samples)))
    recalibrate_batch_norm(state.network.to(device).backbone, batches)
    state.network.cpu()


def _embeddings_of_class(network: Network, feed: Feed, label: int) -> Float[Tensor, "n dim"]:
    return embed(network, feed, torch.nonzero(feed.samples.labels == label).flatten())


@torch.no_grad()
def _run(network: Network, images: Float[Tensor, "batch 3 crop crop"]) -> Outputs:
    with precision(images.device):
        out: Outputs = network(images)
    return out


def _noise_like(weight: Float[Tensor, "classes dim"], key: Key, step: int) -> Float[Tensor, "classes dim"]:
    noise = draw_noise(key, step, (weight.shape[0], weight.shape[1]))
    return noise.pin_memory().to(weight.device, non_blocking=True) if weight.is_cuda else noise


def _frozen_copy(network: Network) -> Network:
    return copy.deepcopy(network).eval().requires_grad_(requires_grad=False)
