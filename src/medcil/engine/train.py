"""The one loop that trains."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from medcil.config import LearningConfig, TrainingConfig
from medcil.data.samples import Samples
from medcil.data.stream import Task
from medcil.engine.draws import Key, Purpose, draw_noise, plan_epoch
from medcil.engine.feed import Feed
from medcil.engine.journal import Checkpoint, Journal, NoJournal
from medcil.engine.predict import choose_device, class_means, embed, precision
from medcil.engine.state import State
from medcil.errors import MedcilError
from medcil.memory import renew_memory
from medcil.method import Batch, Increment, Method, Phase
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
    """What stays the same while one task is learned."""

    key: Key
    n_old: int
    old_network: Network | None
    feed: Feed
    inherent_counts: Tensor
    training: TrainingConfig
    checkpoint_every: int
    journal: Journal
    watch: Watch


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
    device = choose_device(config.execution)
    network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
    n_new_images = torch.bincount(task.train.labels - task.n_old, minlength=task.n_new)
    lesson = Lesson(
        key=Key(config.seed, task=task.n_old),
        n_old=task.n_old,
        old_network=_frozen_copy(network) if task.n_old else None,
        feed=Feed(task.train + state.memory, state.preprocessing, device, config.execution),
        inherent_counts=torch.cat([state.inherent_counts, n_new_images]).to(device),
        training=config.training_of_task(is_first=task.n_old == 0),
        checkpoint_every=config.execution.checkpoint_every,
        journal=journal or NoJournal(),
        watch=watch,
    )
    increment = Increment(
        n_old=task.n_old,
        n_new=task.n_new,
        embeddings=partial(_embeddings_of_class, network, lesson.feed),
        random=lesson.key.generator(Purpose.NEW_CLASSES),
    )
    log_prior = torch.empty(0)
    for index, phase in enumerate(method.learn(network, increment)):
        network.to(device)
        class_counts = _train_phase(replace(lesson, key=replace(lesson.key, phase=index)), network, phase)
        log_prior = phase.classification.log_prior(class_counts, task.n_old)
    memory = renew_memory(
        state.memory,
        task.train,
        increment.embeddings,
        n_old=task.n_old,
        n_new=task.n_new,
        quota=config.memory.quota(task.n_seen),
    )
    memory_feed = Feed(memory, state.preprocessing, device, config.execution)
    return State(
        network=_frozen_copy(network).cpu(),
        memory=memory,
        class_names=state.class_names + task.class_names,
        class_means=class_means(network, memory_feed, task.n_seen).cpu(),
        inherent_counts=lesson.inherent_counts.cpu(),
        log_prior_in_scores=log_prior.cpu() if method.scoring == "classifier" else torch.zeros(task.n_seen),
        scoring=method.scoring,
        preprocessing=state.preprocessing,
    )


def _train_phase(lesson: Lesson, network: Network, phase: Phase) -> Tensor:
    """Trains the network in place; returns how many images of each class an epoch draws."""
    labels = lesson.feed.samples.labels
    chosen = (
        torch.arange(len(labels)) if phase.part == "all" else torch.nonzero(labels >= lesson.n_old).flatten()
    )
    class_counts = torch.bincount(labels[chosen], minlength=network.n_classes).to(lesson.feed.device)
    _set_moving(network, phase)
    training = lesson.training
    optimizer = torch.optim.SGD(
        [
            {"params": list(params), "rate": getattr(training.learning_rates, name)}
            for name, params in phase.params.items()
        ],
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    start = 0
    checkpoint = lesson.journal.latest(lesson.key.phase)
    if checkpoint is not None:
        _restore(checkpoint, network, optimizer)
        start = checkpoint.epoch
    for epoch in range(start, training.epochs):
        in_epoch = replace(lesson, key=replace(lesson.key, epoch=epoch))
        factor = learning_rate_factor(training, epoch)
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        losses = _train_epoch(in_epoch, network, optimizer, phase, chosen, class_counts)
        lesson.journal.log(
            {
                "phase": phase.name,
                "epoch": epoch + 1,
                "epochs": training.epochs,
                "learning_rate": training.learning_rates.classifier * factor,
                "losses": losses,
                "total": sum(losses.values()),
            }
        )
        if (epoch + 1) % lesson.checkpoint_every == 0 or epoch + 1 == training.epochs:
            lesson.journal.save(lesson.key.phase, Checkpoint(epoch + 1, _tensors(network, optimizer)))
    return class_counts


def _train_epoch(
    lesson: Lesson,
    network: Network,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    chosen: Tensor,
    class_counts: Tensor,
) -> dict[str, float]:
    """One pass; returns each loss term's mean over the images."""
    device = lesson.feed.device
    moving = [parameter for params in phase.params.values() for parameter in params]
    plan = plan_epoch(
        chosen,
        lesson.key,
        batch_size=lesson.training.batch_size,
        slack=lesson.feed.preprocessing.slack,
    )
    sums = {name: torch.zeros((), device=device) for name in phase.terms}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(lesson.key.integer(Purpose.LAYERS))
        for step, (images, labels) in enumerate(lesson.feed.training_batches(plan)):
            with precision(device):
                out = network(images)
            batch = Batch(
                labels=labels,
                out=out,
                n_old=lesson.n_old,
                class_counts=class_counts,
                inherent_counts=lesson.inherent_counts,
                class_weights=network.classifier.weight,
                run_old_network=_run_old(lesson.old_network, images) if lesson.old_network else None,
                draw_noise=partial(_noise_on, lesson.key, step, network.classifier.weight),
            )
            losses = {name: term(batch) for name, term in phase.terms.items()}
            optimizer.zero_grad(set_to_none=True)
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            if lesson.training.gradient_clamp is not None:
                nn.utils.clip_grad_value_(moving, lesson.training.gradient_clamp)
            optimizer.step()
            for name, loss in losses.items():
                sums[name] += loss.detach() * len(labels)
            lesson.watch(
                Progress(phase.name, lesson.key.epoch, lesson.training.epochs, step + 1, plan.n_batches)
            )
    means = {name: (total / len(plan.order)).item() for name, total in sums.items()}
    if not all(math.isfinite(value) for value in means.values()):
        raise MedcilError(
            f"Training diverged in epoch {lesson.key.epoch + 1}: a loss is not finite ({means}). "
            "Lower training.learning_rates."
        )
    lesson.watch(
        Progress(phase.name, lesson.key.epoch, lesson.training.epochs, plan.n_batches, plan.n_batches, means)
    )
    return means


def learning_rate_factor(training: TrainingConfig, epoch: int) -> float:
    """What the learning rates are multiplied by in this epoch, counted from 0."""
    if training.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / training.epochs))
    passed = sum(epoch >= max(1, round(milestone * training.epochs)) for milestone in training.milestones)
    return float(training.decay**passed)


def recalibrate(state: State, samples: Samples, config: LearningConfig) -> None:
    """Gives the state's network the batch-norm statistics of these images, in place."""
    device = choose_device(config.execution)
    feed = Feed(samples, state.preprocessing, device, config.execution)
    batches = feed.evaluation_batches(torch.arange(len(samples)))
    recalibrate_batch_norm(state.network.to(device).backbone, batches)
    state.network.cpu()


def _embeddings_of_class(network: Network, feed: Feed, label: int) -> Tensor:
    return embed(network, feed, torch.nonzero(feed.samples.labels == label).flatten())


def _run_old(network: Network, images: Tensor) -> Callable[[], Outputs]:
    @torch.no_grad()
    def run() -> Outputs:
        with precision(images.device):
            out: Outputs = network(images)
        return out

    return run


def _noise_on(key: Key, step: int, weight: Tensor) -> Tensor:
    return draw_noise(key, step, (weight.shape[0], weight.shape[1])).to(weight.device)


def _frozen_copy(network: Network) -> Network:
    frozen = copy.deepcopy(network).eval()
    return frozen.requires_grad_(requires_grad=False)


def _set_moving(network: Network, phase: Phase) -> None:
    """Parameters learn if the phase names them; a module is in training mode if one of its own learns.

    So a frozen backbone's batch norm uses and keeps its statistics without any method having to say so.
    """
    moving = {id(parameter) for params in phase.params.values() for parameter in params}
    for parameter in network.parameters():
        parameter.requires_grad_(id(parameter) in moving)

    def visit(module: nn.Module, *, inherited: bool) -> None:
        parameters = list(module.parameters())
        # A module without parameters (dropout, say) follows the one it stands in.
        module.training = any(id(p) in moving for p in parameters) if parameters else inherited
        for child in module.children():
            visit(child, inherited=module.training)

    visit(network, inherited=False)


def _tensors(network: Network, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        if state["momentum_buffer"] is not None:
            tensors[f"momentum.{index}"] = state["momentum_buffer"]
    return tensors


def _restore(checkpoint: Checkpoint, network: Network, optimizer: torch.optim.Optimizer) -> None:
    parts: dict[str, dict[str, Tensor]] = {"network": {}, "momentum": {}}
    for name, tensor in checkpoint.tensors.items():
        kind, _, rest = name.partition(".")
        parts[kind][rest] = tensor
    network.load_state_dict(parts["network"])
    content = optimizer.state_dict()
    content["state"] = {int(i): {"momentum_buffer": tensor} for i, tensor in parts["momentum"].items()}
    optimizer.load_state_dict(content)
