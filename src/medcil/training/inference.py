"""Inference: embeddings, class means and scores of images."""

import copy

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
"""Of embeddings that are kept."""


def choose_device(execution: ExecutionConfig) -> torch.device:
    if execution.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(execution.device)


@torch.no_grad()
def embed(
    network: Network, feed: Feed, indices: Int[Tensor, "n"], *, flip: bool = False
) -> Float[Tensor, "n dim"]:
    """Embeddings of center crops. The network is left in evaluation mode."""
    return torch.cat(branch_embeddings(network, feed, indices, flip=flip), dim=1)


@torch.no_grad()
def branch_embeddings(
    network: Network, feed: Feed, indices: Int[Tensor, "n"], *, flip: bool
) -> list[Float[Tensor, "n _"]]:
    """The part of each branch."""
    network.eval()
    own = indices[feed.ranks.share(len(indices))]
    of_branches = [[torch.empty(0, dim, device=feed.device)] for dim in network.classifier.branch_dims]
    with feed.precision():
        for images in feed.evaluation_batches(own, flip=flip):
            for batches, embedding in zip(of_branches, network.features(images)[1], strict=True):
                batches.append(embedding)
    return [feed.ranks.gather(torch.cat(batches), len(indices)) for batches in of_branches]


class Embeddings:
    """By class, of the images at hand and by the network as it is; all together when one class is asked for.

    A pass for each of a thousand classes would take them in batches of a few.
    """

    def __init__(self, network: Network, feed: Feed) -> None:
        self.network = network
        self.feed = feed
        self._known: Float[Tensor, "n dim"] | None = None
        self._known_by: list[tuple[int, int]] = []

    def __call__(self, label: int) -> Float[Tensor, "n dim"]:
        labels = self.feed.samples.labels
        chosen = torch.nonzero(labels == label).flatten()
        if len(labels) * self.network.classifier.dim * 4 > MOST_BYTES:
            return embed(self.network, self.feed, chosen)
        if self._known is None or self._known_by != self._state_of_network():
            self._known = embed(self.network, self.feed, torch.arange(len(labels)))
            self._known_by = self._state_of_network()
        return self._known[chosen.to(self._known.device)]

    def forget(self) -> None:
        """To be called after training: a captured step leaves no mark on the tensors it changes."""
        self._known = None

    def _state_of_network(self) -> list[tuple[int, int]]:
        """Which tensors it is made of, and how often each was changed."""
        parts = (self.network.backbone, *self.network.branches)
        tensors = (tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
        return [(id(tensor), tensor._version) for tensor in tensors]


@torch.no_grad()
def class_means(network: Network, memory: Feed) -> Float[Tensor, "classes dim"]:
    """The unit mean of each class's exemplars and their mirror images.

    A class without exemplars gets the direction of its weights in the classifier, which moves with the
    network: a mean of zero would be nearer to no image than any other.
    """
    indices = torch.arange(len(memory.samples))
    plain, mirrored = (F.normalize(embed(network, memory, indices, flip=flip)) for flip in (False, True))
    members = F.one_hot(memory.labels, network.classifier.n_classes).T.to(plain)
    means = F.normalize(members @ (plain + mirrored))  # a product, unlike index_add, adds in one order
    has_exemplars = members.any(dim=1, keepdim=True)
    return torch.where(has_exemplars, means, F.normalize(network.classifier.class_weights.to(means)))


@torch.no_grad()
def readout_features(network: Network, readout: Readout, feed: Feed, label: int) -> ImageFeatures:
    """Compute what the readout reads of all images of a class, in every view that the state scores by."""
    indices = torch.nonzero(feed.samples.labels == label).flatten()
    network.eval()
    readout.eval()
    views = feed.preprocessing.views
    own = indices[feed.ranks.share(len(indices))]
    batches: list[Tensor] = []
    for images in feed.evaluation_batches(own, views=views):
        with feed.precision():
            out = network(views_of(images, views))
        features = readout.features(out)
        batches.append(features.reshape(views, -1, features.shape[1]).transpose(0, 1))
    values = feed.ranks.gather(torch.cat(batches), len(indices))
    groups = feed.samples.groups
    names = [f"image {i}" for i in indices.tolist()] if groups is None else groups[indices.numpy()].tolist()
    return ImageFeatures(values, names)


class ScoringNetwork(nn.Module):
    """A copy of a state's network and readout as one module, from images to scores."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.network = copy.deepcopy(state.network)
        self.readout = copy.deepcopy(state.readout)
        self.views = state.preprocessing.views
        self.eval()

    def forward(
        self, images: Float[Tensor, "batch 3 crop crop"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch dim"]]:
        """Scores, by the mean over the views; and embeddings, of the images as they are."""
        out = self.network(views_of(images, self.views))
        with torch.autocast(images.device.type, enabled=False):  # in full precision
            scores = self.readout.scores(out, views=self.views)
        return scores, out.embedding[: images.shape[0]]  # len would be a constant when exported


@torch.no_grad()
def predict_scores(state: State, samples: Samples, execution: ExecutionConfig) -> Float[Tensor, "n classes"]:
    """Scores of every class for every image; the prediction is the class of the largest."""
    device = choose_device(execution)
    model = ScoringNetwork(state).to(device).to(memory_format=torch.channels_last)
    scores = [torch.empty(0, len(state.class_names), device=device)]
    with Feed(samples, state.preprocessing, device, execution) as feed:
        own = torch.arange(len(samples))[feed.ranks.share(len(samples))]
        for images in feed.evaluation_batches(own, views=model.views):
            with feed.precision():
                scores.append(model(images)[0])
        return feed.ranks.gather(torch.cat(scores), len(samples)).cpu()


class Scorer:
    """A model on its device, for any number of images, a few hundred at a time."""

    def __init__(self, state: State, execution: ExecutionConfig | None = None) -> None:
        self.execution = execution or ExecutionConfig()
        self.preprocessing = state.preprocessing
        self.device = choose_device(self.execution)
        self.model = ScoringNetwork(state).to(self.device).to(memory_format=torch.channels_last)

    @torch.no_grad()
    def __call__(self, samples: Samples) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        """Scores, and likeness: the largest cosine between the image's embedding and a class mean."""
        means = self.model.readout.class_means
        scores = [torch.empty(0, len(means), device=self.device)]
        likeness = [torch.empty(0, device=self.device)]
        with Feed(samples, self.preprocessing, self.device, self.execution) as feed:
            for images in feed.evaluation_batches(torch.arange(len(samples)), views=self.model.views):
                with feed.precision():
                    of_classes, embedding = self.model(images)
                scores.append(of_classes)
                likeness.append((F.normalize(embedding.float()) @ means.T).amax(dim=1))
        return torch.cat(scores).double().cpu().numpy(), torch.cat(likeness).double().cpu().numpy()

    def answer(
        self, pixels: UInt8[np.ndarray, "n 3 side side"]
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        unlabelled = torch.zeros(len(pixels), dtype=torch.int64)
        return self(Samples(TensorImages(torch.from_numpy(pixels)), unlabelled))
