"""How fast the network alone can be: the least that a training step of a method must compute."""

import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from measuring import captured, seconds_of
from torch import nn

from medcil.config import TrainingConfig
from medcil.methods.protocol import Batch, Counts, Increment, Method, Phase
from medcil.models.network import Network, Outputs
from medcil.training.cuda_graph import Beside
from medcil.training.state import State
from medcil.training.step import set_moving

POINTS = 32  # random embeddings for methods that start new classes from some


class Ceiling:
    """Forward, cross-entropy and backward of what the method's phase "learn" moves, on one resident batch.

    And the old network's forward beside it, as the product runs it, where the method's terms ask for it. No
    optimizer, no augmentation, no other loss; on a GPU one captured graph.
    """

    def __init__(self, state: State, method: Method, n_new: int, *, batch: int, device: torch.device) -> None:
        self.device = device
        self.network = copy.deepcopy(state.network).to(device).to(memory_format=torch.channels_last)
        self.old = copy.deepcopy(self.network).eval().requires_grad_(requires_grad=False)
        if device.type == "cuda":  # rounded once, as the product does
            for module in self.old.modules():
                if type(module) is nn.Conv2d:
                    module.to(torch.bfloat16)
        self.beside = Beside(device)
        n_old, crop = len(state.class_names), state.preprocessing.crop
        self.phase = _phase_learn(self.network, method, n_old, n_new, device)
        images = torch.randn(batch, 3, crop, crop, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(n_old + n_new, (batch,), device=device)
        # Of even and of odd epochs, where these differ.
        self.phases = [self.phase.in_epoch(parity) for parity in range(2 if self.phase.alternate else 1)]
        self.passes = []
        for phase in self.phases:
            set_moving(self.network, phase)
            once = partial(self._pass, phase, runs_old=self._asks_for_old(phase))
            self.passes.append((phase, captured(once, device)))

    def pass_seconds(self, repeats: int) -> float:
        """Of one batch; the mean of both kinds of epochs, where there are two."""
        seconds = 0.0
        for phase, once in self.passes:
            set_moving(self.network, phase)  # for the plain call; a graph keeps what it was captured with
            seconds += seconds_of(lambda once=once: [once() for _ in range(repeats)], self.device) / repeats
        return seconds / len(self.passes)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def _pass(self, phase: Phase, *, runs_old: bool) -> None:
        for parameters in phase.params.values():
            for parameter in parameters:
                parameter.grad = None
        images_are_there = self.beside.mark()
        with self._precision():
            out = self.network(self.images)
        if runs_old:
            self.beside.run(images_are_there, self._old_outputs)
        F.cross_entropy(out.logits, self.labels).backward()

    @torch.no_grad()
    def _old_outputs(self) -> Outputs:
        with self._precision():
            return self.old(self.images)

    @torch.no_grad()
    def _asks_for_old(self, phase: Phase) -> bool:
        asked = []

        def run_old_network() -> Outputs:
            asked.append(True)
            return self._old_outputs()

        with self._precision():
            out = self.network(self.images)
        classifier = self.network.classifier
        some = torch.full((classifier.n_classes,), 10, device=self.device)
        batch = Batch(
            labels=self.labels,
            out=out,
            counts=Counts(some, some, some),
            task_sizes=classifier.block_sizes,
            class_weights=classifier.class_weights,
            scale=classifier.scale,
            run_old_network=run_old_network,
            normal=lambda shape: torch.randn(shape, device=classifier.scale.device),
        )
        for term in phase.terms.values():
            term(batch)
        return bool(asked)


def _phase_learn(network: Network, method: Method, n_old: int, n_new: int, device: torch.device) -> Phase:
    """As `learn_task` gets it, but that new classes start from random embeddings."""
    increment = Increment(
        n_old=n_old,
        n_new=n_new,
        training=TrainingConfig(),
        embeddings=lambda label: torch.randn(POINTS, network.classifier.dim, device=device),
        random=np.random.default_rng(0),
    )
    return next(phase for phase in method.learn(network, increment) if phase.name == "learn")
