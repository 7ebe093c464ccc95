"""Inference: embeddings, class means and scores of images."""

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.transforms import views_of
from medcil.models.network import Network
from medcil.readouts import Readout
from medcil.readouts.readout import ImageFeatures
from medcil.training.feed import Feed
from medcil.training.state import State

MOST_BYTES = 2**30
"""Embeddings of all images are cached up to this size."""


def choose_device(execution: ExecutionConfig) -> torch.device:
    if execution.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(execution.device)


@torch.no_grad()
def embed(
    network: Network, feed: Feed, indices: Int[Tensor, "n"], *, flip: bool = False
) -> Float[Tensor, "n dim"]:
    """Compute embeddings of center crops. Leaves the network in evaluation mode."""
    return torch.cat(branch_embeddings(network, feed, indices, flip=flip), dim=1)


@torch.no_grad()
def branch_embeddings(
    network: Network, feed: Feed, indices: Int[Tensor, "n"], *, flip: bool
) -> list[Float[Tensor, "n _"]]:
    """Compute the embedding of each branch."""
    network.eval()
    own = indices[feed.ranks.share(len(indices))]
    of_branches = [[torch.empty(0, dim, device=feed.device)] for dim in network.classifier.branch_dims]
    with feed.precision():
        for images in feed.evaluation_batches(own, flip=flip):
            for batches, embedding in zip(of_branches, network.features(images)[1], strict=True):
                batches.append(embedding)
    return [feed.ranks.gather(torch.cat(batches), len(indices)) for batches in of_branches]


class Embeddings:
    """Embeddings of the images of one class, by the network as it is now.

    The first call embeds the images of all classes: one pass per class would mean tiny batches.
    """

    def __init__(self, network: Network, feed: Feed) -> None:
        self.network = network
        self.feed = feed
        self._cache: Float[Tensor, "n dim"] | None = None
        self._cached_from: list[tuple[int, int]] = []

    def __call__(self, label: int) -> Float[Tensor, "n dim"]:
        labels = self.feed.samples.labels
        of_class = torch.nonzero(labels == label).flatten()
        if len(labels) * self.network.classifier.dim * 4 > MOST_BYTES:
            return embed(self.network, self.feed, of_class)
        if self._cache is None or self._cached_from != self._network_version():
            self._cache = embed(self.network, self.feed, torch.arange(len(labels)))
            self._cached_from = self._network_version()
        return self._cache[of_class.to(self._cache.device)]

    def clear(self) -> None:
        """Call this after training: a captured step changes tensors without changing their version."""
        self._cache = None

    def _network_version(self) -> list[tuple[int, int]]:
        """List the network's tensors, and how often each was changed."""
        parts = (self.network.backbone, *self.network.branches)
        tensors = (tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
        return [(id(tensor), tensor._version) for tensor in tensors]


@torch.no_grad()
def class_means(network: Network, memory: Feed) -> Float[Tensor, "classes dim"]:
    """Compute the unit mean of each class's exemplars and their mirror images.

    A class without exemplars gets the direction of its classifier weights, which follows the network. A mean
    of zero would never be the nearest.
    """
    indices = torch.arange(len(memory.samples))
    plain, mirrored = (F.normalize(embed(network, memory, indices, flip=flip)) for flip in (False, True))
    members = F.one_hot(memory.labels, network.classifier.n_classes).T.to(plain)
    means = F.normalize(members @ (plain + mirrored))  # unlike index_add, a product adds in a fixed order
    has_exemplars = members.any(dim=1, keepdim=True)
    return torch.where(has_exemplars, means, F.normalize(network.classifier.class_weights.to(means)))


@torch.no_grad()
def readout_features(
    network: Network,
    readout: Readout,
    feed: Feed,
    n_images: int,
    label: int,
    *,
    watch: Callable[[int], None] = lambda done: None,
) -> ImageFeatures:
    """Compute the readout's features of those of the first `n_images` of a feed that are of a class.

    They are of every view that the state scores by. `watch` is told how many images are done.
    """
    indices = torch.nonzero(feed.samples.labels[:n_images] == label).flatten()
    network.eval()
    readout.eval()
    views = feed.preprocessing.views
    own = indices[feed.ranks.share(len(indices))]
    batches: list[Tensor] = []
    for images in feed.evaluation_batches(own, views=views):
        watch(sum(map(len, batches)))
        with feed.precision():
            out = network(views_of(images, views))
        features = readout.features(out)
        batches.append(features.reshape(views, -1, features.shape[1]).transpose(0, 1))
    watch(len(indices))
    values = feed.ranks.gather(torch.cat(batches), len(indices))
    return ImageFeatures(values, feed.samples.group_names()[indices.numpy()].tolist())


class ScoringNetwork(nn.Module):
    """One module from images to scores: a copy of a state's network and readout."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.network = copy.deepcopy(state.network)
        self.readout = copy.deepcopy(state.readout)
        self.views = state.preprocessing.views
        self.eval()

    def forward(
        self, images: Float[Tensor, "batch 3 crop crop"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        """Return scores, averaged over the views, and the embeddings of the plain images."""
        out = self.network(views_of(images, self.views))
        with torch.autocast(images.device.type, enabled=False):  # in full precision
            scores = self.readout.scores(out, views=self.views)
        return scores, out.embedding[: images.shape[0]]  # len would be a constant when exported


class Scorer:
    """A model on its device. Several processes that train together divide the images."""

    def __init__(self, state: State, execution: ExecutionConfig | None = None) -> None:
        self.execution = execution or ExecutionConfig()
        self.preprocessing = state.preprocessing
        self.device = choose_device(self.execution)
        self.model = ScoringNetwork(state).to(self.device).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def scores_and_likeness(self, samples: Samples) -> tuple[Float[Tensor, "n classes"], Float[Tensor, "n"]]:
        """Score images. Likeness is the largest cosine between the image's embedding and a class mean."""
        means = self.model.readout.class_means
        scores = [torch.empty(0, len(means), device=self.device)]
        likeness = [torch.empty(0, device=self.device)]
        with Feed(samples, self.preprocessing, self.device, self.execution) as feed:
            own = torch.arange(len(samples))[feed.ranks.share(len(samples))]
            for images in feed.evaluation_batches(own, views=self.model.views):
                with feed.precision():
                    of_classes, embedding = self.model(images)
                scores.append(of_classes)
                likeness.append((F.normalize(embedding.to(means)) @ means.T).amax(dim=1))
            parts = [feed.ranks.gather(torch.cat(part), len(samples)).cpu() for part in (scores, likeness)]
        return parts[0], parts[1]

    def __call__(self, samples: Samples) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        scores, likeness = self.scores_and_likeness(samples)
        return scores.double().numpy(), likeness.double().numpy()

    def answer(
        self, pixels: UInt8[np.ndarray, "n 3 side side"]
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        unlabelled = torch.zeros(len(pixels), dtype=torch.int64)
        return self(Samples(TensorImages(torch.from_numpy(pixels)), unlabelled))


def predict_scores(state: State, samples: Samples, execution: ExecutionConfig) -> Float[Tensor, "n classes"]:
    """Score every class for every image; the prediction is the class with the largest score."""
    return Scorer(state, execution).scores_and_likeness(samples)[0]
