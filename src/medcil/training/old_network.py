"""What the network before this task says of the images of a batch: run beside the new one, or remembered.

Its answer to an image does not change. Where every image is only ever seen whole, plain or mirrored
(`data.crop` equal to `data.side`), all answers are computed once and looked up from then on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from medcil.methods.protocol import Batch, LossTerm
from medcil.models.network import Network, Outputs
from medcil.training.cuda_graph import Beside
from medcil.training.distributed import Gathered
from medcil.training.feed import Drawn, Feed
from medcil.training.inference import MOST_BYTES, branch_embeddings

LEAST_EPOCHS = 4
"""To be worth two passes over all images."""


class OldNetwork:
    def __init__(self, network: Network, feed: Feed) -> None:
        self.network = network
        self.feed = feed
        self.beside = Beside(feed.device)
        self.looks_up = False
        self.remembered: list[Float[Tensor, "2 n _"]] = []
        """The embeddings of each branch, of all images as they are and mirrored."""
        if feed.is_half_precision:
            self._halve_weights()

    def _halve_weights(self) -> None:
        """Rounds once what autocast would round in every step: weights of products before the classifier."""
        for module in (*self.network.backbone.modules(), *self.network.branches.modules()):
            if type(module) in (nn.Conv2d, nn.Linear):  # others may compute with their weights first
                module.to(torch.bfloat16)

    def asked_about(self, drawn: Drawn) -> Callable[[], Outputs]:
        """For a batch that has just been drawn: runs as soon as it is called, beside what came before."""
        if self.looks_up:
            return partial(self._look_up, drawn)
        return partial(self.beside.run, self.beside.mark(), partial(self._run, drawn))

    @torch.no_grad()
    def _run(self, drawn: Drawn) -> Outputs:
        return batch_outputs(self.feed, self.network, drawn)

    @torch.no_grad()
    def _look_up(self, drawn: Drawn) -> Outputs:
        mirrored = drawn.flip.long()
        embeddings = [of_branch[mirrored, drawn.indices] for of_branch in self.remembered]
        return self.network.classify((), embeddings)

    def remember(self, terms: Sequence[LossTerm], example: Callable[[], Batch], *, epochs: int) -> None:
        """From now on, where it is possible, worth it, and enough for what these terms ask."""
        self.looks_up = False
        n_bytes = 2 * len(self.feed.samples) * self.network.classifier.dim * 4
        if not self.feed.shows_images_whole or epochs < LEAST_EPOCHS or n_bytes > MOST_BYTES:
            return
        self.looks_up = _ask_for_embeddings_only(terms, example())
        if self.remembered or not self.looks_up:
            return
        everything = torch.arange(len(self.feed.samples))
        views = [branch_embeddings(self.network, self.feed, everything, flip=flip) for flip in (False, True)]
        self.remembered = [torch.stack(of_branch) for of_branch in zip(*views, strict=True)]


def batch_outputs(feed: Feed, network: Network, drawn: Drawn) -> Outputs:
    """For all images of a batch, of which this process has its share."""
    n = len(drawn.labels)
    with feed.precision(), feed.ranks.whole_batch_norm(n):
        maps, embeddings = network.features(drawn.images)
    if feed.ranks.is_alone:
        return network.classify(maps, embeddings)
    out = network.classify((), [feed.ranks.gather(embedding, n) for embedding in embeddings])
    return out._replace(maps=Gathered(maps, n, feed.ranks))


@torch.no_grad()
def _ask_for_embeddings_only(terms: Sequence[LossTerm], example: Batch) -> bool:
    """Whether they read anything of the old network's outputs, and not its maps."""
    noted: set[str] = set()

    def answer() -> Outputs:
        noted.add("outputs")
        if example.run_old_network is None:
            raise LookupError("there is no old network in the first task")
        out = example.run_old_network()
        return out._replace(maps=_Noted(out.maps, noted))

    batch = replace(example, run_old_network=answer)
    for term in terms:
        term(batch)
    return noted == {"outputs"}


class _Noted(Sequence[Tensor]):
    """Maps that tell when one is read."""

    def __init__(self, maps: Sequence[Tensor], noted: set[str]) -> None:
        self._maps, self._noted = maps, noted

    def __len__(self) -> int:
        return len(self._maps)

    def __getitem__(self, index: Any) -> Any:
        self._noted.add("maps")
        return self._maps[index]
