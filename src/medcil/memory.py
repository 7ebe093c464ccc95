"""The memory: a few exemplars of every class, herded; a prefix of each herd is the smaller memory."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from medcil.data.samples import Samples


def herd(embeddings: Float[Tensor, "n dim"], size: int) -> Int[Tensor, "m"]:
    """Indices of min(size, n) samples, each bringing the mean of those chosen nearest to the class mean μ.

    iCaRL's greedy choice, argmin_i ||μ - (S + x_i) / k||, without replacement. With unit vectors x_i it is
    argmax_i <k μ - S, x_i>, S being the sum of the k - 1 chosen so far: one matrix-vector product per pick.
    """
    unit = F.normalize(embeddings)
    mean = unit.mean(dim=0)
    direction = mean.clone()  # k μ - S
    available = torch.zeros(len(unit), dtype=unit.dtype, device=unit.device)
    chosen = torch.empty(min(size, len(unit)), dtype=torch.int64, device=unit.device)
    for k in range(len(chosen)):
        best = torch.argmax(unit @ direction + available)
        chosen[k] = best
        available[best] = -torch.inf
        direction += mean - unit[best]
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
