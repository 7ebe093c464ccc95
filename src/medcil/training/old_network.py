"""Outputs of the network before this task: computed for each batch, or once for all images and looked up.

The outputs for an image never change. If every image is seen uncropped, plain or mirrored (`data.crop` equals
`data.side`), they can be computed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medcil.methods.protocol import Batch, LossTerm
from medcil.models.network import Network, Outputs
from medcil.training.cuda_graph import Beside
from medcil.training.feed import Drawn, Feed
from medcil.training.inference import MOST_BYTES, branch_embeddings

LEAST_EPOCHS = 4
"""Fewer epochs are not worth two passes over all images."""


class OldNetwork:
    def __init__(self, network: Network, feed: Feed) -> None:
        self.network = network
        self.feed = feed
        self.beside = Beside(feed.device)
        self.looks_up = False
        self.embeddings: list[Float[Tensor, "2 n _"]] = []
        """For each branch, the embeddings of all images, plain and mirrored, to look up."""
        if feed.is_half_precision:
            # Round the weights of convolutions and products once; autocast would do it in every step.
            for module in (*self.network.backbone.modules(), *self.network.branches.modules()):
                if type(module) in (nn.Conv2d, nn.Linear):  # a subclass may compute with its weights
                    module.to(torch.bfloat16)

    def outputs_of(self, drawn: Drawn) -> Callable[[], Outputs]:
        """Return a function that computes the outputs, on a GPU beside the work given after this call."""
        if self.looks_up:
            return partial(self._look_up, drawn)
        return partial(self.beside.run, self.beside.mark(), partial(self._run, drawn))

    @torch.no_grad()
    def _run(self, drawn: Drawn) -> Outputs:
        return batch_outputs(self.feed, self.network, drawn)

    @torch.no_grad()
    def _look_up(self, drawn: Drawn) -> Outputs:
        mirrored = drawn.flip.long()
        embeddings = [of_branch[mirrored, drawn.indices] for of_branch in self.embeddings]
        return self.network.classify((), embeddings)

    def remember(self, terms: Sequence[LossTerm], example: Callable[[], Batch], *, epochs: int) -> None:
        """Look outputs up from now on, if that is possible, saves time, and suffices for these terms."""
        self.looks_up = False
        n_bytes = 2 * len(self.feed.samples) * self.network.classifier.dim * 4
        if not self.feed.shows_images_whole or epochs < LEAST_EPOCHS or n_bytes > MOST_BYTES:
            return
        self.looks_up = _read_embeddings_only(terms, example())
        if self.embeddings or not self.looks_up:
            return
        everything = torch.arange(len(self.feed.samples))
        views = [branch_embeddings(self.network, self.feed, everything, flip=flip) for flip in (False, True)]
        self.embeddings = [torch.stack(of_branch) for of_branch in zip(*views, strict=True)]


def batch_outputs(feed: Feed, network: Network, drawn: Drawn) -> Outputs:
    """Compute the outputs for a whole batch, of which this process has its share."""
    n = len(drawn.labels)
    with feed.precision(), feed.ranks.whole_batch_norm(n):
        maps, embeddings = network.features(drawn.images)
    if feed.ranks.is_alone:
        return network.classify(maps, embeddings)
    out = network.classify((), [feed.ranks.gather(embedding, n) for embedding in embeddings])
    return out._replace(maps=LazyMaps(maps, lambda: [feed.ranks.gather(part, n) for part in maps]))


@torch.no_grad()
def _read_embeddings_only(terms: Sequence[LossTerm], example: Batch) -> bool:
    """Do these terms read the old network's outputs, but none of its maps?"""
    parts_read: set[str] = set()

    def answer() -> Outputs:
        parts_read.add("outputs")
        if example.run_old_network is None:
            raise LookupError("there is no old network in the first task")
        out = example.run_old_network()

        def read_maps() -> Sequence[Tensor]:
            parts_read.add("maps")
            return out.maps

        return out._replace(maps=LazyMaps(out.maps, read_maps))

    batch = replace(example, run_old_network=answer)
    for term in terms:
        term(batch)
    return parts_read == {"outputs"}


class LazyMaps(Sequence[Tensor]):
    """Maps that a function returns when one of them is first read: they are large and seldom used."""

    def __init__(self, like: Sequence[Tensor], read: Callable[[], Sequence[Tensor]]) -> None:
        self._length, self._read = len(like), cache(read)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]
