"""Batch norm over the whole batch, of which every process has a share."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from medcil.training.patched_functions import Instead


def whole_batch_norm(n: int) -> Instead:
    """While it lasts, whatever normalizes by a batch does so by all n images of it.

    Backbones come with layers of many kinds, all of which call `F.batch_norm`.
    """
    return Instead({F.batch_norm: partial(_batch_norm, n)})


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
    """What one process would compute: mean and variance over all rows, with the gradient through both."""
    if not training:
        return F.batch_norm(rows, running_mean, running_variance, weight, bias, False, momentum, eps)  # noqa: FBT003
    exact = rows if rows.dtype == torch.float64 else rows.float()
    over = [axis for axis in range(rows.dim()) if axis != 1]
    n = n_images * (rows.numel() // (rows.shape[0] * rows.shape[1]))  # values of a channel, in all shares
    each = (1, -1, *(1 for _ in over[1:]))  # the channel's axis, for broadcasting
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
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        # The sum reaches the loss through the rows of every process.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def _sum_of_all(own: Float[Tensor, "channels"]) -> Float[Tensor, "channels"]:
    total: Tensor = _SumOfAll.apply(own)
    return total
