"""How long an update takes and what memory it needs, before anything is begun."""

from dataclasses import dataclass

import torch
from torch import nn

from medcil.build import build_method
from medcil.clinic.learning import Lesson
from medcil.methods.outline import NOMINAL, outline
from medcil.training.state import State

OLD_NETWORK = 4 / 3
"""A forward pass of the old network beside a forward and a backward pass of the new one."""
LIBRARIES = 400e6
"""Bytes that Python and PyTorch take before any image."""


@dataclass(frozen=True)
class Estimate:
    images_per_epoch: int
    epochs: int
    seconds: float | None
    """On a machine like the one that trained the parent; None where its pace is not known."""
    memory_bytes: int


def estimate(lesson: Lesson) -> Estimate:
    assert lesson.parent is not None
    epochs = lesson.config.training.epochs
    n_images = len(lesson.train) + len(lesson.state.memory)
    facts = lesson.parent.provenance()
    pace = facts["images_per_second"]
    if pace and facts["parent"] is None:  # the first classes were learned without an old network
        pace /= OLD_NETWORK
    return Estimate(
        images_per_epoch=n_images,
        epochs=epochs,
        seconds=_passes(lesson) * epochs * n_images / pace if pace else None,
        memory_bytes=_memory(lesson.state, n_images, lesson.config.training.batch_size),
    )


def _passes(lesson: Lesson) -> float:
    """All phases together, as a multiple of the epochs; those on fewer images count whole."""
    phases = outline(build_method(lesson.config.method))
    return sum(found.epochs for found in phases if found.task == "later") / NOMINAL.epochs


def _memory(state: State, n_images: int, batch_size: int) -> int:
    """Pixels, two networks with gradients and momentum for one of them, and what a backward pass keeps."""
    pixels = n_images * 3 * state.preprocessing.side**2
    parameters = 4 * 4 * sum(tensor.numel() for tensor in state.network.parameters())
    return int(LIBRARIES + pixels + parameters + batch_size * _activations(state))


@torch.no_grad()
def _activations(state: State) -> int:
    """Bytes of one image's outputs of all layers."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not list(module.children()):
            sizes.append(4 * output.numel())

    hooks = [module.register_forward_hook(note) for module in state.network.modules()]
    crop = state.preprocessing.crop
    state.network.eval()(torch.zeros(1, 3, crop, crop))
    for hook in hooks:
        hook.remove()
    return sum(sizes)
