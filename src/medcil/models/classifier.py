"""The classifier: p = η s(h, w) (Eq. 1). It grows by rows with every task, by columns with every branch."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from medcil.config import ClassifierKind
from medcil.errors import InvalidInput


class Correction(nn.Module):
    """gain · z + shift on the logits z of one task's classes, per class or one pair for all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, logits: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch classes"]:
        return self.gain * logits + self.shift


class Classifier(nn.Module):
    """Weights in blocks, `blocks[task][branch]`, so that a method can move some and freeze others.

    A class has one or several proxies w_k. Its similarity to an embedding is the mean of the proxies'
    cosines, weighted by their own softmax: s = sum_k softmax_k(cos_k) cos_k (PODNet's local similarity). With
    one proxy this is the cosine. The kind "linear" replaces η s by <h, w>.
    """

    def __init__(
        self, dim: int, *, kind: ClassifierKind, n_proxies: int, scale: float, learn_scale: bool
    ) -> None:
        super().__init__()
        self.kind = kind
        self.n_proxies = n_proxies
        self.branch_dims = [dim]
        self.blocks = nn.ModuleList()
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)  # η
        self.calibrations = nn.ModuleDict()  # number of the block -> its Correction; files have this name

    @property
    def dim(self) -> int:
        return sum(self.branch_dims)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(len(columns[0]) // self.n_proxies for columns in self.columns_of_blocks())

    @property
    def n_classes(self) -> int:
        return sum(self.block_sizes)

    @property
    def weight(self) -> Float[Tensor, "rows dim"]:
        """One row per proxy, class after class."""
        rows = [torch.cat(list[Tensor](columns), dim=1) for columns in self.columns_of_blocks()]
        return torch.cat(rows) if rows else self.scale.new_empty(0, self.dim)

    @property
    def class_weights(self) -> Float[Tensor, "classes dim"]:
        """Mean of each class's proxies."""
        weight = self.weight
        return weight.reshape(-1, self.n_proxies, self.dim).mean(dim=1) if self.n_proxies > 1 else weight

    def columns_of_blocks(self) -> list[list[nn.Parameter]]:
        return [list(block.parameters()) for block in self.blocks]

    def grow(self, new_weights: Float[Tensor, "new dim"] | Float[Tensor, "new proxies dim"]) -> None:
        """Add a block of new classes. The first block decides the number of proxies per class."""
        weights = new_weights[:, None] if new_weights.ndim == 2 else new_weights
        if not len(self.blocks):
            self.n_proxies = weights.shape[1]
        if weights.shape[1] != self.n_proxies:
            raise ValueError(f"classes have {self.n_proxies} proxies, but {weights.shape[1]} are given")
        if self.kind == "linear" and self.n_proxies > 1:
            raise InvalidInput(
                "network.classifier: linear has one proxy per class; this method needs several. Use cosine.",
                code="network.classifier.invalid",
            )
        columns = torch.split(weights.flatten(0, 1).detach().to(self.scale), self.branch_dims, dim=1)
        self.blocks.append(nn.ParameterList(_parameters(columns)))

    def keep_classes(self, labels: Int[Tensor, "kept"]) -> None:
        """Drop the rows of the other classes. Blocks stay, even empty ones."""
        if len(self.calibrations):
            raise ValueError("a classifier with corrections keeps its classes")
        first = 0
        for block, size in zip(self.blocks, self.block_sizes, strict=True):
            own = labels[(labels >= first) & (labels < first + size)] - first
            rows = (own[:, None] * self.n_proxies + torch.arange(self.n_proxies)).flatten()
            for columns in block.parameters():
                columns.data = columns.data[rows]
            first += size

    def clear(self) -> None:
        """Remove all classes, with their corrections."""
        self.blocks, self.calibrations = nn.ModuleList(), nn.ModuleDict()

    def widen(self, dim: int) -> None:
        """Add columns for another branch, copied from the newest, as the branch is a copy of the newest."""
        self.branch_dims.append(dim)
        for block in self.blocks:
            columns = list(block.parameters())
            if self.kind == "linear":
                columns[-1].data /= 2  # so that <h, w> does not change; cosines do not change anyway
            block.extend(_parameters([columns[-1].detach()]))  # type: ignore[operator]  # a ParameterList

    def calibrate(self, block: int, *, size: int) -> Correction:
        """Give a task's logits a new correction, which changes nothing before it is trained."""
        self.calibrations[str(block)] = Correction(size).to(self.scale)
        return self.calibrations[str(block)]  # type: ignore[return-value]

    def forward(
        self, embedding: Float[Tensor, "batch dim"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes"]]:
        """Return similarities and logits."""
        weight = self.weight
        cosine = F.normalize(embedding) @ F.normalize(weight).T
        if self.n_proxies > 1:
            proxies = cosine.reshape(cosine.shape[0], self.n_classes, self.n_proxies)
            cosine = (proxies.softmax(dim=2) * proxies).sum(dim=2)
        logits = embedding @ weight.T if self.kind == "linear" else self.scale * cosine
        return cosine, self._corrected(logits) if len(self.calibrations) else logits

    def _corrected(self, logits: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch classes"]:
        parts = list(torch.split(logits, list(self.block_sizes), dim=1))
        for block, correction in self.calibrations.items():
            parts[int(block)] = correction(parts[int(block)])
        return torch.cat(parts, dim=1)

    def gains(self) -> dict[int, nn.Parameter]:
        """Return block -> gain, for blocks with a correction."""
        return {int(block): module.gain for block, module in self.calibrations.items()}  # type: ignore[misc]

    def calibration_sizes(self) -> tuple[int, ...]:
        """Return the size of each block's correction; 0 without one."""
        gains = self.gains()
        return tuple(len(gains.get(block, ())) for block in range(len(self.blocks)))


def _parameters(columns: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(column.clone()) for column in columns]
