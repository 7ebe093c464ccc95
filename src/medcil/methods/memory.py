"""The memory: a few exemplars of every class, herded; a prefix of each herd is the smaller memory."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from medcil.data.samples import Samples


def herd(embeddings: Float[Tensor, "n dim"], size: int) -> Int[Tensor, "m"]:
    """Choose min(size, n) samples, each bringing the mean of those chosen nearest to the class mean μ.

    iCaRL's greedy choice, argmin_i ||μ - (S + x_i) / k||, without replacement. With unit vectors x_i it is
    argmax_i <k μ - S, x_i>, S being the sum of the k - 1 chosen so far. Each choice is a pass over all
    embeddings, for its similarities to them.
    """
    per_length = 1 / torch.linalg.vector_norm(embeddings, dim=1).clamp(min=1e-12)
    mean = per_length @ embeddings / max(len(embeddings), 1)  # μ
    to_mean = embeddings @ mean * per_length  # <μ, x_i>
    scores = to_mean.clone()  # <k μ - S, x_i>
    chosen = torch.empty(min(size, len(embeddings)), dtype=torch.int64, device=embeddings.device)
    for k in range(len(chosen)):
        index = scores.argmax()
        chosen[k] = index
        similarity = embeddings @ (embeddings[index] * per_length[index]) * per_length
        scores += to_mean - similarity
        scores[index] = -torch.inf
    return chosen


def renew_memory(
    memory: Samples,
    new: Samples,
    embeddings: Callable[[int], Float[Tensor, "n dim"]],
    *,
    n_old: int,
    n_new: int,
    quota: int,
) -> Samples:
    """Keep the first `quota` exemplars of each old class, and a herd of each new class.

    `embeddings(label)` are those of `new.of_class(label)`; without a quota none are computed. The exemplars'
    pixels are copied, so that the new images can be released.
    """
    kept = [torch.nonzero(memory.labels == label).flatten()[:quota] for label in range(n_old)]
    herds = [
        torch.nonzero(new.labels == label).flatten()[herd(embeddings(label), quota).cpu()]
        for label in range(n_old, n_old + n_new if quota else n_old)
    ]
    none = torch.empty(0, dtype=torch.int64)
    return (memory.select(torch.cat([none, *kept])) + new.select(torch.cat([none, *herds]))).copied()
