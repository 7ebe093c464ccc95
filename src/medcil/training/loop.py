"""The one loop that trains."""

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from medcil.config import LearningConfig
from medcil.data.samples import Samples
from medcil.data.stream import Task
from medcil.data.transforms import TURNS_FREELY
from medcil.errors import InvalidInput, MedcilError
from medcil.methods.memory import renew_memory
from medcil.methods.protocol import Counts, Decision, Increment, Method, Phase
from medcil.models.backbones import recalibrate_batch_norm
from medcil.models.network import Network
from medcil.readouts import READOUTS, Readout
from medcil.readouts.readout import ImageFeatures
from medcil.training.checkpoint import EMBEDDING, Checkpoint, Journal, Progress, Watch, check_finite
from medcil.training.cuda_graph import Replayed
from medcil.training.feed import Feed
from medcil.training.inference import Embeddings, choose_device, class_means, readout_features
from medcil.training.old_network import OldNetwork
from medcil.training.sampling import EpochPlan, EpochPlanner, Key, Purpose, choose_part
from medcil.training.state import State
from medcil.training.step import (
    Assignment,
    Course,
    build_optimizer,
    checkpoint_tensors,
    example_batch,
    learning_rate_factor,
    restore,
    set_learning_rates,
    set_moving,
    train_step,
)

CHECKPOINT_SECONDS = 10.0
"""Least time between two checkpoints: on a GPU an epoch can be shorter than writing one."""


def learn_task(
    state: State,
    task: Task,
    method: Method,
    config: LearningConfig,
    *,
    journal: Journal | None = None,
    watch: Watch = lambda progress: None,
) -> State:
    """Learn the classes of a task and return the state after it. `state` does not change."""
    if task.n_old != len(state.class_names):
        raise ValueError(
            f"the task follows {task.n_old} classes, but the state knows {len(state.class_names)}"
        )
    device = choose_device(config.execution)
    network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
    counts = task.train.class_counts(task.n_seen)
    counts[: task.n_old] += state.inherent_counts
    with Feed(task.train + state.memory, state.preprocessing, device, config.execution) as feed:
        assignment = Assignment(
            key=Key(config.seed, task=task.n_old),
            n_old=task.n_old,
            old_network=OldNetwork(_frozen_copy(network), feed) if task.n_old else None,
            feed=feed,
            inherent_counts=counts.to(device),
            quota=config.memory.quota(task.n_seen),
            training=config.training_of_task(is_first=task.n_old == 0),
            checkpoint_every=config.execution.checkpoint_every,
            journal=journal or Journal(),
            watch=watch,
        )
        return _learned(state, task, method, network, assignment)


def _learned(state: State, task: Task, method: Method, network: Network, assignment: Assignment) -> State:
    embeddings = Embeddings(network, assignment.feed)
    kind = READOUTS[method.readout]
    readout = copy.deepcopy(state.readout) if type(state.readout) is kind else kind()
    readout.to(assignment.feed.device)
    decisions: list[Decision] = []

    def decide(decision: Decision) -> Decision:
        decisions.append(assignment.feed.ranks.from_first(decision))
        assignment.journal.note({"decision": asdict(decisions[-1])})
        return decisions[-1]

    increment = Increment(
        n_old=task.n_old,
        n_new=task.n_new,
        training=assignment.training,
        embeddings=embeddings,
        random=assignment.key.generator(Purpose.NEW_CLASSES),
        readout=readout,
        features=_features(network, readout, assignment, len(task.train)),
        known_labels=tuple(torch.unique(task.train.labels[task.train.labels < task.n_old]).tolist()),
        decide=decide,
        is_started=readout.has_features and not task.n_old,
    )
    try:
        log_prior = _train_phases(assignment, network, method.learn(network, increment), embeddings)
    finally:
        assignment.journal.finish()
    network.auxiliary = None  # an auxiliary classifier serves training only

    memory = renew_memory(
        state.memory, task.train, embeddings, n_old=task.n_old, n_new=task.n_new, quota=assignment.quota
    )
    feed = assignment.feed
    with Feed(memory, state.preprocessing, feed.device, feed.execution) as memory_feed:
        readout.cpu().finish_task(class_means(network, memory_feed).cpu(), log_prior)
    return State(
        network=_frozen_copy(network).cpu(),
        memory=memory,
        class_names=state.class_names + task.class_names,
        readout=readout,
        inherent_counts=assignment.inherent_counts.cpu(),
        preprocessing=state.preprocessing,
        decisions=(*state.decisions, *decisions),
    )


def _features(
    network: Network, readout: Readout, assignment: Assignment, n_images: int
) -> Callable[[int], ImageFeatures]:
    """Compute the readout's features of a class of the first `n_images`; progress is told in images."""
    done: dict[int, int] = {}

    def watch(label: int, n_done: int) -> None:
        done[label] = n_done
        n = sum(done.values())
        losses: dict[str, float] | None = {} if n == n_images else None
        assignment.watch(Progress(EMBEDDING, 0, 0, 1, n, n_images, losses))

    def features(label: int) -> ImageFeatures:
        return readout_features(
            network, readout, assignment.feed, n_images, label, watch=partial(watch, label)
        )

    return features


def _train_phases(
    assignment: Assignment, network: Network, phases: Iterable[Phase], embeddings: Embeddings
) -> Float[Tensor, "classes"]:
    """Train the phases one after the other. Return the log prior that the logits then carry."""
    log_prior = torch.zeros(len(assignment.inherent_counts))
    for index, phase in enumerate(phases):
        # Refuses a term without a log prior before hours of training.
        classification, _ = phase.classification, phase.in_epoch(1).classification
        if phase.gradients == "projected" and "reference" not in phase.terms:
            raise TypeError(f'phase {phase.name!r} projects gradients and needs a term "reference"')
        augmentation = assignment.feed.preprocessing.augmentation
        if phase.is_turned and augmentation in TURNS_FREELY:
            raise InvalidInput(
                f"data.augmentation: {augmentation} turns images by any angle, so quarter turns cannot be "
                "labels. Choose crop, resized_crop or dihedral.",
                code="config.augmentation.turns",
            )
        if phase.mixup and not assignment.feed.ranks.is_alone:
            raise InvalidInput(
                "execution.processes: mixup needs the whole batch in one process. Set it to 1.",
                code="config.processes.mixup",
            )
        in_phase = replace(assignment, key=replace(assignment.key, phase=index))
        counts = _train_phase(in_phase, network, phase, embeddings)
        embeddings.clear()
        if counts is not None and phase.log_prior is not None:
            log_prior = phase.log_prior(log_prior, assignment.n_old)
        elif counts is not None:
            log_prior = classification.log_prior(counts, assignment.n_old).cpu()
    return log_prior


def _train_phase(
    assignment: Assignment, network: Network, phase: Phase, embeddings: Embeddings
) -> Counts | None:
    """Train the network in place. Return the images per class, or None if the phase has no image."""
    key, labels, ranks = assignment.key, assignment.feed.samples.labels, assignment.feed.ranks
    ranks.equalize(network)
    # Before a checkpoint is restored: herding uses the network as it is when the phase begins.
    part = ranks.from_first(
        choose_part(
            phase.part, labels, key, n_old=assignment.n_old, quota=assignment.quota, embeddings=embeddings
        )
    )
    if phase.without:
        names = assignment.feed.samples.group_names()[part.numpy()]
        part = part[torch.from_numpy(~np.isin(names, sorted(phase.without)))]
    training = phase.training or assignment.training
    if phase.teacher is not None:
        teacher = OldNetwork(_frozen_copy(phase.teacher), assignment.feed)
        assignment = replace(assignment, old_network=teacher)
    optimizer = build_optimizer(phase, training)
    checkpoint = assignment.journal.latest(key.phase)
    if checkpoint is not None:
        restore(checkpoint, network, optimizer)
    if not len(part):
        if checkpoint is None:
            assignment.journal.save(key.phase, Checkpoint(0, checkpoint_tensors(network, optimizer)))
        return None
    planner = EpochPlanner(
        part,
        labels[part],
        sampler=phase.sampler or training.sampler,
        n_old=assignment.n_old,
        batch_size=training.batch_size,
        exemplar_share=training.exemplar_share,
        slack=assignment.feed.preprocessing.slack,
        augmentation=assignment.feed.preprocessing.augmentation,
        is_turned=phase.is_turned,
        mixup=phase.mixup,
    )
    course = Course(assignment, network, phase, training, optimizer, planner)
    if assignment.old_network is not None:
        terms = [*phase.terms.values(), *phase.in_epoch(1).terms.values()]
        # Outputs of turned and of mixed images are not looked up.
        epochs = 0 if phase.is_turned or phase.mixup else training.epochs
        assignment.old_network.remember(terms, partial(example_batch, course), epochs=epochs)
    step = Replayed(
        partial(train_step, course),
        f"Phase {phase.name!r}",
        assignment.feed.device,
        capture=assignment.feed.execution.capture,
        generators=(course.noise,),
    )
    _train_epochs(course, step, first=checkpoint.epoch if checkpoint else 0)
    return course.counts


def _train_epochs(course: Course, step: Callable[[int, int], None], *, first: int) -> None:
    assignment, training, optimizer = course.assignment, course.training, course.optimizer
    saved = time.monotonic()
    for epoch in range(first, training.epochs):
        rates = set_learning_rates(optimizer, learning_rate_factor(training, epoch))
        losses = _train_epoch(replace(assignment.key, epoch=epoch), course, step)
        assignment.feed.ranks.equalize(course.network)
        assignment.journal.log(
            {
                "phase": course.phase.name,
                "phase_number": assignment.key.phase + 1,
                "epoch": epoch + 1,
                "epochs": training.epochs,
                "learning_rates": rates,
                "losses": losses,
                "total": sum(losses.values()),
            }
        )
        every = assignment.checkpoint_every
        is_due = (epoch + 1) % every == 0 if every else time.monotonic() > saved + CHECKPOINT_SECONDS
        if is_due or epoch + 1 == training.epochs:
            tensors = checkpoint_tensors(course.network, optimizer)
            check_finite(tensors)  # here, so that every process raises, not only the one that writes
            assignment.journal.save(assignment.key.phase, Checkpoint(epoch + 1, tensors))
            saved = time.monotonic()


def _train_epoch(key: Key, course: Course, step: Callable[[int, int], None]) -> dict[str, float]:
    """Train for one epoch. Return each loss term's mean over the images."""
    assignment, device = course.assignment, course.assignment.feed.device
    plan = course.planner.plan(key)
    if len(plan.order) != course.n_drawn:  # a captured step reads buffers of a fixed length
        raise RuntimeError("a sampler draws another number of samples than in the phase's first epoch")
    holds_batch_norm = course.training.batch_norm == "frozen"
    set_moving(course.network, course.phase.in_epoch(key.epoch), holds_batch_norm=holds_batch_norm)
    for total in course.sums.values():
        total.zero_()
    course.noise.manual_seed(key.integer(Purpose.NOISE))
    assignment.feed.begin(plan)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key.integer(Purpose.LAYERS) - assignment.feed.ranks.rank)
        for number, size in enumerate(plan.sizes):
            assignment.feed.ready(number)
            step(key.epoch % 2 if course.phase.alternate else 0, size)
            assignment.watch(_progress(key, course, plan, number + 1))
    # Nothing else in an epoch waits for the device.
    names = list(course.phase.in_epoch(key.epoch).terms)
    totals = torch.stack([course.sums[name] for name in names]) / len(plan.order)
    means = dict(zip(names, totals.tolist(), strict=True))
    if not all(math.isfinite(value) for value in means.values()):
        raise MedcilError(
            f"Training diverged in epoch {key.epoch + 1}: a loss is not finite. Lower "
            f"training.learning_rates.\n{means}",
            code="run.training.diverged",
        )
    assignment.watch(_progress(key, course, plan, len(plan.sizes), means))
    return means


def _progress(
    key: Key, course: Course, plan: EpochPlan, step: int, losses: dict[str, float] | None = None
) -> Progress:
    name, epochs = course.phase.name, course.training.epochs
    return Progress(name, key.phase + 1, key.epoch, epochs, step, len(plan.sizes), losses)


def recalibrate(state: State, samples: Samples, config: LearningConfig) -> None:
    """Replace the batch-norm statistics of the state's network, in place, by those of these images."""
    device = choose_device(config.execution)
    with Feed(samples, state.preprocessing, device, config.execution) as feed:
        batches = feed.evaluation_batches(torch.arange(len(samples)))
        recalibrate_batch_norm(state.network.to(device).backbone, batches)
    state.network.cpu()


def _frozen_copy(network: Network) -> Network:
    return copy.deepcopy(network).eval().requires_grad_(requires_grad=False)
