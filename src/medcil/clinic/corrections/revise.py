"""Subtract images from the statistics of an `analytic` model, or move them to another class, and solve again.

The network is frozen, so the classifier is then the one that the other images give.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from medcil.clinic.corrections.learned import Features, Learned, LearnedImage
from medcil.clinic.model_dir import File, VersionFolder
from medcil.readouts.ridge import Ridge, solve_ridge
from medcil.training.state import State

Counts = Float[Tensor, "classes"]
"""Images of each class."""


@dataclass(frozen=True, eq=False)
class Move:
    """An image that leaves a class, for another one or for good."""

    features: Float[Tensor, "views features"]
    source: int
    target: int | None
    is_of_first_task: bool


def moves_of(
    images: Sequence[LearnedImage], features: Features, state: State, *, first: str, target: int | None = None
) -> list[Move]:
    """Move images to another class, or out of the statistics; `first` is the model's first version."""
    names = state.class_names
    return [
        Move(features[entry.image], names.index(entry.class_name), target, entry.version == first)
        for entry in images
    ]


def has_separate_statistics(version: VersionFolder) -> bool:
    method = version.provenance()["settings"]["method"]
    return bool(method["name"] == "analytic" and not method["pooled"])


def is_revisable(version: VersionFolder) -> bool:
    """Tell whether images can be subtracted: the statistics are separate, and each image is on record."""
    if not has_separate_statistics(version) or not version.has(File.LEARNED):
        return False
    readout, recorded = version.load_state().readout, Learned.read(version).counts()
    assert isinstance(readout, Ridge)
    counts = zip(version.class_names(), readout.counts.tolist(), strict=True)
    return all(recorded[name] == n for name, n in counts)


def first_task_trains(version: VersionFolder) -> bool:
    """Tell whether the network of a model with statistics learned from the images of the first task."""
    facts = version.provenance()
    if facts.get("started_from"):  # the network of another model
        return False
    decided = {entry["key"]: entry["value"] for entry in facts.get("decisions", ())}
    return bool(decided.get("method.adapt", facts["settings"]["method"].get("adapt")) != "never")


def first_task(version: VersionFolder, first: str) -> Counts:
    """Count the images of each class that the first version added; none where they did not choose ρ."""
    if version.provenance().get("started_from"):
        return torch.zeros(len(version.class_names()), dtype=torch.float64)
    entries = Counter(e.class_name for e in Learned.read(version).images if e.version == first)
    return torch.tensor([entries[name] for name in version.class_names()], dtype=torch.float64)


def revise(state: State, moves: Sequence[Move], *, first: Counts, is_trained: bool) -> State:
    """Return the state as if the moved images had never been where they were; the network stays.

    `first` counts the images of the first task, and `is_trained` says whether the classifier's weights of its
    classes were trained; all others are means of features.
    """
    readout, counts, left = copy.deepcopy(state.readout), state.inherent_counts.clone(), first.clone()
    assert isinstance(readout, Ridge)
    before = _mean_variance(readout, first)
    _apply(readout, moves)
    for move in moves:
        counts[move.source] -= 1
        left[move.source] -= int(move.is_of_first_task)
        if move.target is not None:
            counts[move.target] += 1
            left[move.target] += int(move.is_of_first_task)
    _keep_share(readout, before, left)
    n_trained = state.network.classifier.block_sizes[0] * is_trained
    return solved(replace(state, readout=readout, inherent_counts=counts), n_trained=n_trained)


def _mean_variance(readout: Ridge, first: Counts) -> float:
    """Return tr / d of Σ_c π_c A_c over the images of the first task, of which λ is a share.

    An image's trace is taken to be the mean of its class: features are scaled to one length.
    """
    n_features = readout.sums.shape[1]
    diagonal = torch.arange(1, n_features + 1).cumsum(0) - 1
    traces = readout.moments[:, diagonal].mean(dim=1) / readout.counts.clamp(min=1)
    weights = torch.where(first > 0, first.clamp(min=1) ** (1 - readout.balance), 0.0)
    return float(weights @ traces)


def _keep_share(readout: Ridge, before: float, first: Counts) -> None:
    """Let ρ keep its share λ of the mean variance, which was `before`."""
    after = _mean_variance(readout, first)
    if before and after:
        readout.ridge = readout.ridge * (after / before)


def _apply(readout: Ridge, moves: Sequence[Move]) -> None:
    """Sum up alike moves first: the statistics of a class are large."""
    alike = defaultdict[tuple[int, int | None, int], list[Move]](list)
    for move in moves:
        alike[move.source, move.target, len(move.features)].append(move)
    for (source, target, _), of_kind in alike.items():
        features = torch.stack([move.features for move in of_kind])
        readout.remove(features, source)
        if target is not None:
            readout.add(features, target)


def without_class(state: State, label: int, *, first: Counts, is_trained: bool) -> State:
    """Return the state as if the class had never been learned; the labels after it shift."""
    readout, network = copy.deepcopy(state.readout), copy.deepcopy(state.network)
    assert isinstance(readout, Ridge)
    kept = torch.tensor([c for c in range(len(state.class_names)) if c != label])
    before = _mean_variance(readout, first)
    readout.keep_classes(kept)
    network.classifier.keep_classes(kept)
    _keep_share(readout, before, first[kept])
    memory = state.memory.select(torch.nonzero(state.memory.labels != label).flatten())
    left = replace(
        state,
        readout=readout,
        network=network,
        memory=replace(memory, labels=memory.labels - (memory.labels > label).long()),
        class_names=tuple(name for c, name in enumerate(state.class_names) if c != label),
        inherent_counts=state.inherent_counts[kept],
    )
    return solved(left, n_trained=network.classifier.block_sizes[0] * is_trained)


def solved(state: State, *, n_trained: int) -> State:
    """Compute everything that follows from the statistics; the weights of the first classes were trained."""
    readout, network = copy.deepcopy(state.readout), copy.deepcopy(state.network)
    assert isinstance(readout, Ridge)
    readout.solve()
    readout.finish_task(state.readout.class_means, readout.log_prior)
    means = F.normalize(readout.sums[:, : network.classifier.dim]).float()
    first = 0
    for columns in network.classifier.columns_of_blocks():
        end = first + len(columns[0])
        if first >= n_trained:
            columns[0].data = means[first:end].clone()
        first = end
    return replace(state, readout=readout, network=network)


def deviation(state: State, moves: Sequence[Move], again: Sequence[Move], first: Counts) -> float:
    """Return how much the classifier depends on rounding, as a share of its largest weight.

    The greater of two differences: between the classifiers after `moves` and after `again`, the same moves
    with features computed otherwise; and between the classifier of `state` and one after all was added back.
    """
    one, other = (_ridge_of(revise(state, each, first=first, is_trained=True)) for each in (moves, again))
    restored, before = copy.deepcopy(one), _ridge_of(state)
    for move in moves:
        if move.target is not None:
            restored.remove(move.features[None], move.target)
        restored.add(move.features[None], move.source)
    restored.ridge = before.ridge
    pairs = [(_weights(one), _weights(other)), (_weights(before), _weights(restored))]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def _ridge_of(state: State) -> Ridge:
    assert isinstance(state.readout, Ridge)
    return state.readout


def _weights(ridge: Ridge) -> Float[Tensor, "features classes"]:
    return solve_ridge(ridge.statistics, balance=float(ridge.balance), ridge=float(ridge.ridge))


def digits(deviation: float) -> int:
    """Return to how many decimal digits two classifiers agree; they are stored with about seven."""
    return 7 if deviation < 1e-7 else max(0, math.floor(-math.log10(deviation)))
