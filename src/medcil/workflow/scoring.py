"""What a model says of images: a score for each class, and how like its classes an image is."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float

from medcil.config import ExecutionConfig
from medcil.data.samples import Samples
from medcil.engine.feed import Feed
from medcil.engine.predict import choose_device, class_scores
from medcil.engine.state import State


class Scorer:
    """A model on its device, for any number of images, a few hundred at a time."""

    def __init__(self, state: State, execution: ExecutionConfig | None = None) -> None:
        self.execution = execution or ExecutionConfig()
        self.preprocessing, self.scoring = state.preprocessing, state.scoring
        self.device = choose_device(self.execution)
        network = copy.deepcopy(state.network).to(self.device)
        self.network = network.to(memory_format=torch.channels_last).eval()
        self.means = state.class_means.to(self.device)

    @torch.no_grad()
    def __call__(self, samples: Samples) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, "n"]]:
        """Scores, and likeness: the largest cosine between the image's embedding and a class mean."""
        feed = Feed(samples, self.preprocessing, self.device, self.execution)
        scores = [torch.empty(0, len(self.means), device=self.device)]
        likeness = [torch.empty(0, device=self.device)]
        for images in feed.evaluation_batches(torch.arange(len(samples))):
            with feed.precision():
                out = self.network(images)
            scores.append(class_scores(out, self.means, self.scoring))
            likeness.append((F.normalize(out.embedding.float()) @ self.means.T).amax(dim=1))
        return torch.cat(scores).double().cpu().numpy(), torch.cat(likeness).double().cpu().numpy()
