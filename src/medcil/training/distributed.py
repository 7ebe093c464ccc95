"""Train one network with several processes, on several GPUs or machines.

Each process computes the features of its share of a batch. The shares are gathered, so that classifier and
loss terms see the whole batch in every process: a term means the same for any number of processes, whether it
is a mean, a sum or a mean over some of the samples. (Averaging the gradients of separate losses, as is usual,
would change all but the first kind.) The gradients of the feature extractor are then summed; those of the
classifier are already equal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Instead(TorchFunctionMode):
    """Replace functions of PyTorch inside a `with` block, also where other libraries call them."""

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.replacements.get(function, function)(*arguments, **(options or {}))


class Ranks:
    """The processes of this run. A single process gets everything back unchanged."""

    def __init__(self) -> None:
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.size = 1 if self.is_alone else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Is this the process that writes?"""
        return self.rank == 0

    def is_shared(self, n: int) -> bool:
        """Are n rows divided? Batch norm needs two per process; fewer are computed by every process."""
        return n >= 2 * self.size

    def share(self, n: int) -> slice:
        """Return this process's part of n rows, or all rows if they are not divided."""
        if not self.is_shared(n):
            return slice(0, n)
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def gather(self, own: Float[Tensor, "own ..."], n: int) -> Float[Tensor, "n ..."]:
        """Concatenate the shares of all processes. Gradients flow back to this process's own share.

        Every process computes the same loss from the same rows, so the gradient of its share is complete.
        """
        if self.is_alone or not self.is_shared(n):
            return own
        padded = own.new_zeros(-(-n // self.size), *own.shape[1:])
        padded[: len(own)] = own.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        sizes = [n * (r + 1) // self.size - n * r // self.size for r in range(self.size)]
        shares = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        shares[self.rank] = own
        return torch.cat(shares)

    def whole_batch_norm(self, n: int) -> AbstractContextManager[object]:
        """Inside this context batch norm uses all n images, not only this process's share.

        Backbones have layers of many kinds, and all of them call `F.batch_norm`.
        """
        if self.is_alone or not self.is_shared(n):
            return nullcontext()
        return Instead({F.batch_norm: partial(_batch_norm, n)})

    def add_gradients(self, parameters: Iterable[nn.Parameter], n: int) -> None:
        """Sum the gradients over the shares of n rows. If every process had all rows, they are complete."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.is_alone or not gradients or not self.is_shared(n):
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))

    def equalize(self, network: nn.Module) -> None:
        """Copy the parameters of the first process to all, and average the batch-norm statistics."""
        if self.is_alone:
            return
        for parameter in network.parameters():
            dist.broadcast(parameter.detach(), src=0)
        for buffer in network.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= self.size

    def from_first(self, value: Any) -> Any:
        """Return the first process's value in every process."""
        if self.is_alone:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until every process has called this."""
        if not self.is_alone:
            dist.barrier()


def _batch_norm(
    n_images: int,
    rows: Float[Tensor, "own channels *place"],
    running_mean: Float[Tensor, "channels"] | None,
    running_variance: Float[Tensor, "channels"] | None,
    weight: Float[Tensor, "channels"] | None = None,
    bias: Float[Tensor, "channels"] | None = None,
    training: bool = False,  # noqa: FBT001, FBT002  # as F.batch_norm has it
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize by the mean and variance over all rows, as one process would, with gradients through both."""
    if not training:
        return F.batch_norm(rows, running_mean, running_variance, weight, bias, False, momentum, eps)  # noqa: FBT003
    exact = rows if rows.dtype == torch.float64 else rows.float()
    over = [axis for axis in range(rows.dim()) if axis != 1]
    n = n_images * (rows.numel() // (rows.shape[0] * rows.shape[1]))  # values per channel, over all shares
    each = (1, -1, *(1 for _ in over[1:]))  # broadcasts over the channel axis
    mean = _sum_of_all(exact.sum(over)) / n
    centered = exact - mean.view(each)
    variance = _sum_of_all(centered.square().sum(over)) / n
    if running_mean is not None and running_variance is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_variance.lerp_((variance * n / (n - 1)).to(running_variance.dtype), momentum)
    factor = (variance + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    normalized = centered * factor.view(each)
    normalized = normalized if bias is None else normalized + bias.view(each)
    return normalized.to(rows.dtype)


class _SumOfAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor) -> Tensor:
        total = own.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        # The sum reaches the loss through the rows of every process.
        return _sum_of_all(gradients[0])


def _sum_of_all(own: Float[Tensor, "channels"]) -> Float[Tensor, "channels"]:
    """Sum over all processes; gradients are summed as well."""
    return cast(Tensor, _SumOfAll.apply(own))
