"""What a method does, without training it: its phases, and what plug-ins change in them."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from medcil.config import Sampler, TrainingConfig
from medcil.errors import InvalidInput
from medcil.methods.protocol import Increment, Method, Part, Phase, WithTerms
from medcil.models.network import Network, NetworkSpec
from medcil.readouts import READOUTS
from medcil.readouts.readout import ImageFeatures

NOMINAL = TrainingConfig(epochs=100)
"""The recipe that a method is asked to fit its phases to."""


@dataclass(frozen=True)
class PhaseOutline:
    task: Literal["first", "later"]
    phase: str
    terms: tuple[str, ...]
    part: Part
    sampler: Sampler | None
    """None: the recipe's."""
    epochs: int
    """Where the recipe has 100."""
    moves: tuple[str, ...]
    """The learning rates whose parameters move, in any of its epochs."""
    alternate_terms: tuple[str, ...] = ()
    """Of epochs 2, 4, ...; empty: all epochs are alike."""

    @property
    def all_terms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.terms, *self.alternate_terms]))


def summary(method: type) -> str:
    """The first line of its file."""
    return (sys.modules[method.__module__].__doc__ or "").partition("\n")[0]


def choices(method: type, key: str) -> str:
    """The words that a hyper-parameter may be; empty where it is a number."""
    if key == "readout":
        return ", ".join(name for name, readout in READOUTS.items() if not readout.needs_method)
    hint = get_type_hints(method).get(key)
    alternatives = [hint] if get_origin(hint) is Literal else list(get_args(hint))
    words = [str(word) for part in alternatives if get_origin(part) is Literal for word in get_args(part)]
    is_number_too = any(get_origin(part) is not Literal for part in alternatives)
    return f"or {', '.join(words)}" if words and is_number_too else ", ".join(words)


def outline(method: Method) -> list[PhaseOutline]:
    """The phases of a first task of two classes and of a second one of two more, on a network of no use."""
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not changed
        torch.manual_seed(0)
        network = NetworkSpec("resnet8_cifar", last_relu=False, learn_scale=True).build()
        return [
            _outlined(phase, is_first=n_old == 0)
            for n_old in (0, 2)
            for phase in method.learn(network, _increment(method, network, n_old))
        ]


def try_out(method: Method, network: Network, *, crop: int) -> None:
    """Refuse images that the network cannot take, and a network that the method cannot continue with.

    It runs two black images and the beginning of a task, which is cheap, before anything is written.
    """
    network = copy.deepcopy(network).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            network(torch.zeros(2, 3, crop, crop))
        except Exception as error:  # every architecture has its own way to say no
            raise InvalidInput(
                f"network.backbone: {network.spec().backbone} cannot take images of {crop} x {crop} pixels; "
                f"choose another data.crop or backbone.\n{error}"
            ) from None
        try:
            increment = _increment(method, network, network.classifier.n_classes, crop=crop)
            next(iter(method.learn(network, increment)), None)
        except ValueError as error:  # another method has made the network what it is
            raise InvalidInput(
                f"method: it cannot go on with this network ({error}). Choose another one, or train a model "
                "with it from the beginning."
            ) from None


def plugin_reach(method: Method) -> list[str]:
    """Say in a sentence per phase what the plug-ins of a method change in the tasks that they reach."""
    if not isinstance(method, WithTerms):
        return []
    terms_of: dict[str, list[str]] = {}
    for phase in outline(method.base):
        if phase.task == method.tasks:
            terms_of.setdefault(phase.phase, []).extend(phase.all_terms)
    where = "the first task" if method.tasks == "first" else "every task after the first"
    sentences = []
    for name, terms in terms_of.items():
        dropped = [f"{term} dropped" for term in method.drop if term in terms and term not in method.terms]
        changes = [f"{term} {'replaced' if term in terms else 'added'}" for term in method.terms] + dropped
        is_reached = name in method.phases and changes
        what = ", ".join(changes) if is_reached else "nothing changed"
        sentences.append(f"{what} in phase {name} of {where}.")
    return sentences


def check_reach(
    method: Method, drop: Sequence[str], phases: Sequence[str], tasks: Literal["first", "later"] = "later"
) -> None:
    """Refuse names of terms and phases that plug-ins would not change anything in."""
    reached = [found for found in outline(method) if found.task == tasks]
    if not reached and tasks == "later":
        raise InvalidInput(
            "method.plugins: this method trains in the first task only. Write method.plugins.tasks: first.",
            code="config.plugins.unreachable",
        )
    if not reached:
        raise InvalidInput(
            "method.plugins: this method does not train at all. Leave them out.",
            code="config.plugins.untrained",
        )
    known = ", ".join(dict.fromkeys(found.phase for found in reached))
    if not phases:
        raise InvalidInput(f"method.plugins.phases is empty: choose from {known}, or leave it out.")
    for phase in phases:
        if phase not in {found.phase for found in reached}:
            wrong = f"{'in' if tasks == 'first' else 'after'} the first task there is no phase {phase!r}"
            raise InvalidInput(f"method.plugins.phases: {wrong}; choose from {known}.")
    terms = list(
        dict.fromkeys(term for found in reached if found.phase in phases for term in found.all_terms)
    )
    for name in drop:
        if name == "classification":
            instead = "replace it by method.plugins.classification"
            raise InvalidInput(f"method.plugins.drop: every phase needs its classification; {instead}.")
        if name not in terms:
            wrong = f"there is no term {name!r} in phase {', '.join(phases)}"
            raise InvalidInput(f"method.plugins.drop: {wrong}; there are {', '.join(terms)}.")


def _increment(method: Method, network: Network, n_old: int, *, crop: int = 32) -> Increment:
    def embeddings(label: int) -> Float[Tensor, "n dim"]:
        generator = torch.Generator().manual_seed(label)
        return torch.randn(4, network.classifier.dim, generator=generator)

    readout = READOUTS[method.readout]()

    def features(label: int) -> ImageFeatures:
        images = torch.randn(4, 3, crop, crop, generator=torch.Generator().manual_seed(label))
        return ImageFeatures(
            readout.features(network(images)).detach()[:, None], [f"{label}-{i}" for i in range(4)]
        )

    return Increment(
        n_old=n_old,
        n_new=2,
        training=NOMINAL,
        embeddings=embeddings,
        random=np.random.default_rng(n_old),
        readout=readout,
        features=features,
    )


def _outlined(phase: Phase, *, is_first: bool) -> PhaseOutline:
    training = phase.training or NOMINAL
    own_sampler = training.sampler if training.sampler != NOMINAL.sampler else None
    return PhaseOutline(
        task="first" if is_first else "later",
        phase=phase.name,
        terms=tuple(phase.terms),
        part=phase.part,
        sampler=phase.sampler or own_sampler,
        epochs=training.epochs,
        moves=tuple(sorted(rate for rate, parameters in phase.all_params().items() if parameters)),
        alternate_terms=() if phase.alternate is None else tuple(phase.alternate.terms),
    )
