"""Several processes, on several GPUs or machines, that train one network together.

Every process computes the features of its share of a batch. The features of all shares are brought together,
and classifier and loss terms see the whole batch in every process. So a term means the same however many
processes there are, whether it is a mean, a sum or a mean over some of the samples; averaging the gradients
of separate losses, as is usual, would change all but the first. The gradients of the feature extractor are
then added up; those of the classifier are already the same everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from medcil.training.distributed_batch_norm import whole_batch_norm


class Ranks:
    """The processes of this run; alone, everything stays as it is given."""

    def __init__(self) -> None:
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.size = 1 if self.is_alone else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def is_shared(self, n: int) -> bool:
        """Fewer rows than two for each process are taken by all: batch norm needs two."""
        return n >= 2 * self.size

    def share(self, n: int) -> slice:
        """This process's part of n rows: equal, give or take one; or all of them."""
        if not self.is_shared(n):
            return slice(0, n)
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def gather(self, own: Float[Tensor, "own ..."], n: int) -> Float[Tensor, "n ..."]:
        """All n rows, of which this process has its share; gradients reach that share."""
        if self.is_alone or not self.is_shared(n):
            return own
        gathered: Tensor = _Gather.apply(own, n, self)
        return gathered

    def whole_batch_norm(self, n: int) -> AbstractContextManager[object]:
        """While it lasts, batch norm is over all n rows, not over this process's share."""
        if self.is_alone or not self.is_shared(n):
            return nullcontext()
        return whole_batch_norm(n)

    def add_gradients(self, parameters: Iterable[nn.Parameter], n: int) -> None:
        """Those of every process's share of n rows; where all took all rows, they are complete."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.is_alone or not gradients or not self.is_shared(n):
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def equalize(self, network: nn.Module) -> None:
        """Parameters as in the first process, batch-norm statistics as they are on average."""
        if self.is_alone:
            return
        for parameter in network.parameters():
            dist.broadcast(parameter.detach(), src=0)
        for buffer in network.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= self.size

    def first_says(self, value: Any) -> Any:
        """What the first process knows; the others' own opinion does not count."""
        if self.is_alone:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def wait(self) -> None:
        """Until all have come here."""
        if not self.is_alone:
            dist.barrier()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, n: int, ranks: Ranks) -> Tensor:
        context.share = ranks.share(n)
        sizes = [n * (r + 1) // ranks.size - n * r // ranks.size for r in range(ranks.size)]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Every process computes the same loss of the same rows: its own share's gradient is complete.
        return gradients[0][context.share], None, None


class Gathered(Sequence[Tensor]):
    """Brought together when one of them is first asked for: maps are large and seldom used."""

    def __init__(self, own: Sequence[Tensor], n: int, ranks: Ranks) -> None:
        self._own, self._n, self._ranks = own, n, ranks
        self._all: tuple[Tensor, ...] | None = None

    def _gathered(self) -> tuple[Tensor, ...]:
        if self._all is None:
            self._all = tuple(self._ranks.gather(tensor, self._n) for tensor in self._own)
        return self._all

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: Any) -> Any:
        return self._gathered()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._gathered())
