"""What a model says of images: a score for each class, and how like its classes an image is."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float

from medcil.config import ExecutionConfig
from medcil.data.samples import Samples
from medcil.training.feed import Feed
from medcil.training.inference import ScoringNetwork, choose_device
from medcil.training.state import State


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
