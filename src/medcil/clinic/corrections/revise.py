"""Subtract images from the statistics of an `analytic` model, or move them to another class, and solve again.

The network is frozen, so the classifier is then the one that the other images give.
"""

import copy
import math
from collections import defaultdict
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


def is_revisable(version: VersionFolder) -> bool:
    """Tell whether images can be subtracted: the statistics are separate, and each image is on record."""
    method = version.provenance()["settings"]["method"]
    if method["name"] != "analytic" or method["pooled"] or not version.has(File.LEARNED):
        return False
    readout, recorded = version.load_state().readout, Learned.read(version).counts()
    assert isinstance(readout, Ridge)
    counts = zip(version.class_names(), readout.counts.tolist(), strict=True)
    return all(recorded[name] == n for name, n in counts)


def first_task_trains(version: VersionFolder) -> bool:
    """Tell whether the network of an `analytic` model learned from the images of the first task."""
    facts = version.provenance()
    decided = {entry["key"]: entry["value"] for entry in facts.get("decisions", ())}
    return bool(decided.get("method.adapt", facts["settings"]["method"].get("adapt")) != "never")


def revise(state: State, moves: Sequence[Move], *, is_trained: bool) -> State:
    """Return the state as if the moved images had never been where they were; the network stays.

    `is_trained` says whether the classifier's weights of the first task's classes were trained; all others
    are means of features. The ridge ρ keeps its share λ of the first classes' mean variance.
    """
    readout, counts = copy.deepcopy(state.readout), state.inherent_counts.clone()
    assert isinstance(readout, Ridge)
    n_first = state.network.classifier.block_sizes[0]
    before = readout.mean_variance(n_first)
    _apply(readout, [move for move in moves if move.is_of_first_task])
    if after := readout.mean_variance(n_first):
        readout.ridge = readout.ridge * (after / before)
    _apply(readout, [move for move in moves if not move.is_of_first_task])
    for move in moves:
        counts[move.source] -= 1
        if move.target is not None:
            counts[move.target] += 1
    return solved(replace(state, readout=readout, inherent_counts=counts), n_trained=n_first * is_trained)


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


def deviation(state: State, moves: Sequence[Move], again: Sequence[Move]) -> float:
    """Return how much the classifier depends on rounding, as a share of its largest weight.

    The greater of two differences: between the classifiers after `moves` and after `again`, the same moves
    with features computed otherwise; and between the classifier of `state` and one after all was added back.
    """
    one, other = (_ridge_of(revise(state, each, is_trained=True)) for each in (moves, again))
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
