"""The memory: a few exemplars of every class, herded; a prefix of each herd is the smaller memory."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from medcil.data.samples import Samples

AT_ONCE = 4
"""Choices that share a pass over the embeddings."""
CANDIDATES = 64
"""Among which they are looked for."""


def herd(embeddings: Float[Tensor, "n dim"], size: int) -> Int[Tensor, "m"]:
    """Indices of min(size, n) samples, each bringing the mean of those chosen nearest to the class mean μ.

    iCaRL's greedy choice, argmin_i ||μ - (S + x_i) / k||, without replacement. With unit vectors x_i it is
    argmax_i <k μ - S, x_i>, S being the sum of the k - 1 chosen so far. Each choice costs a pass over all
    embeddings, for its similarities to them. Several likely choices share one pass; of these, as many count
    as turn out to be right.
    """
    per_length = 1 / torch.linalg.vector_norm(embeddings, dim=1).clamp(min=1e-12)
    mean = per_length @ embeddings / max(len(embeddings), 1)  # μ
    to_mean = embeddings @ mean * per_length  # <μ, x_i>
    scores = to_mean.clone()  # <k μ - S, x_i>
    chosen: list[int] = []
    n_wanted = min(size, len(embeddings))
    while len(chosen) < n_wanted:
        likely = _likely_choices(embeddings, per_length, to_mean, scores)[: n_wanted - len(chosen)]
        units = embeddings[likely] * per_length[likely, None]
        similarity = embeddings @ units.T * per_length[:, None]
        for column, index in enumerate(likely):
            if column > 0 and int(scores.argmax()) != index:  # the first one is always right
                break
            chosen.append(index)
            scores += to_mean - similarity[:, column]
            scores[chosen] = -torch.inf
    return torch.tensor(chosen, dtype=torch.int64, device=embeddings.device)


def _likely_choices(
    embeddings: Float[Tensor, "n dim"],
    per_length: Float[Tensor, "n"],
    to_mean: Float[Tensor, "n"],
    scores: Float[Tensor, "n"],
) -> list[int]:
    """The next few, if there were only those that score best now."""
    best = scores.topk(min(CANDIDATES, len(scores))).indices
    units = embeddings[best] * per_length[best, None]
    similarity, scores_of_best = units @ units.T, scores[best]
    chosen: list[int] = []
    for _ in range(min(AT_ONCE, len(best))):
        chosen.append(int(scores_of_best.argmax()))
        scores_of_best = scores_of_best + to_mean[best] - similarity[:, chosen[-1]]
        scores_of_best[chosen] = -torch.inf
    return [int(index) for index in best[chosen]]


def renew_memory(
    memory: Samples,
    new: Samples,
    embeddings: Callable[[int], Float[Tensor, "n dim"]],
    *,
    n_old: int,
    n_new: int,
    quota: int,
) -> Samples:
    """The memory after a task: of each old class the first `quota` exemplars, of each new class a herd.

    `embeddings(label)` are those of `new.of_class(label)`. The exemplars' pixels are copied, so the new
    images themselves may go away.
    """
    kept = [torch.nonzero(memory.labels == label).flatten()[:quota] for label in range(n_old)]
    herds = [
        torch.nonzero(new.labels == label).flatten()[herd(embeddings(label), quota).cpu()]
        for label in range(n_old, n_old + n_new)
    ]
    none = torch.empty(0, dtype=torch.int64)
    return (memory.select(torch.cat([none, *kept])) + new.select(torch.cat([none, *herds]))).copied()
