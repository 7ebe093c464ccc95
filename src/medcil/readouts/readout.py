"""Readouts: from the outputs of a network to one score per class.

A readout is a module with its own buffers, so a state stores it and an export includes it. It states the log
prior that its scores carry. A new readout is a subclass and a line in `medcil.readouts.READOUTS`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from medcil.models.network import Outputs


class ImageFeatures(NamedTuple):
    """Features of some images, for a readout that keeps statistics."""

    values: Float[Tensor, "n views features"]
    groups: Sequence[str]
    """The patient or lesion of each image; a group of its own where unknown."""


class Readout(nn.Module):
    """Scores the classes from a network's outputs."""

    kind: ClassVar[str]
    """Name in `READOUTS`."""
    temperature: ClassVar[float] = 1.0
    """Divides the scores before a softmax if no images are left to fit a temperature on."""
    needs_method: ClassVar[bool] = False
    """Only a method made for it collects its statistics; a recipe cannot choose it for another method."""

    class_means: Float[Tensor, "classes dim"]
    """Unit means of the exemplars' embeddings. They tell whether an image is like any class."""
    log_prior: Float[Tensor, "classes"]
    """To predict under another prior, subtract this from the scores and add that prior's logarithm."""

    def __init__(self, n_classes: int = 0, dim: int = 0) -> None:
        """Create buffers of zeros, which a state's tensors replace."""
        super().__init__()
        self.register_buffer("class_means", torch.zeros(n_classes, dim))
        self.register_buffer("log_prior", torch.zeros(n_classes))

    def spec(self) -> dict[str, Any]:
        """Return the JSON from which `build_readout` builds this shape again."""
        n_classes, dim = self.class_means.shape
        return {"kind": self.kind, "n_classes": n_classes, "dim": dim}

    @property
    def has_features(self) -> bool:
        """Whether it is decided what is remembered of an image, by this model or by another one."""
        return False

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        """Store the means of the new memory, and the log prior that the logits carry after training."""
        self.class_means, self.log_prior = class_means, log_prior

    def features(self, out: Outputs) -> Float[Tensor, "batch features"]:
        """Compute the features that the readout keeps statistics of."""
        return out.embedding

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        """Score images from the outputs of several views: all images in the first view, then in the next."""
        raise NotImplementedError


class ClassifierReadout(Readout):
    """The classifier's logits: η cos(h, w), or <h, w>."""

    kind = "classifier"

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        return mean_over_views(out.logits, views)


class NearestMean(Readout):
    """iCaRL's nearest mean of exemplars: the negative squared distance of unit vectors, up to a constant."""

    kind = "nearest_mean"
    temperature = 0.1

    def finish_task(
        self, class_means: Float[Tensor, "classes dim"], log_prior: Float[Tensor, "classes"]
    ) -> None:
        super().finish_task(class_means, torch.zeros_like(log_prior))

    def scores(self, out: Outputs, *, views: int = 1) -> Float[Tensor, "batch classes"]:
        return mean_over_views(2 * F.normalize(out.embedding) @ self.class_means.T, views)


def mean_over_views(values: Float[Tensor, "n classes"], views: int) -> Float[Tensor, "batch classes"]:
    return values.reshape(views, -1, values.shape[1]).mean(dim=0)
