"""The paper's losses in a training loop that uses nothing else of medcil.

Three old classes, of which 20 exemplars each were kept, and two new ones, one common and one rare.
"""

import torch
from torch import Tensor, nn

from medcil.losses import cil_balanced_cross_entropy, distribution_margin

N_OLD = 3
CLASS_COUNTS = torch.tensor([20, 20, 20, 300, 60])  # images to train on now
INHERENT_COUNTS = torch.tensor([500, 120, 80, 300, 60])  # images when each class was new


class SomeoneElsesModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, len(CLASS_COUNTS), bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        embeddings = self.embed(images)
        return embeddings, self.head(embeddings)


def make_images() -> tuple[Tensor, Tensor]:
    labels = torch.repeat_interleave(torch.arange(len(CLASS_COUNTS)), CLASS_COUNTS)
    centers = torch.randn(len(CLASS_COUNTS), 16)
    return centers[labels] + torch.randn(len(labels), 16), labels


def main(epochs: int = 8) -> list[float]:
    torch.manual_seed(0)
    images, labels = make_images()
    model = SomeoneElsesModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    history = []
    for epoch in range(epochs):
        sums = torch.zeros(2)
        batches = torch.split(torch.randperm(len(labels)), 32)
        for batch in batches:
            embeddings, logits = model(images[batch])
            y = labels[batch]
            balanced = cil_balanced_cross_entropy(logits, y, CLASS_COUNTS, n_old=N_OLD, alpha=0.5)
            margin = distribution_margin(embeddings, model.head.weight, y, INHERENT_COUNTS, n_old=N_OLD)
            optimizer.zero_grad()
            (balanced + 0.3 * margin).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            sums += torch.stack([balanced, margin]).detach()
        classification, separation = (sums / len(batches)).tolist()
        history.append(classification + 0.3 * separation)
        print(f"epoch {epoch + 1}: classification {classification:.3f}, margin {separation:.3f}")
    return history


if __name__ == "__main__":
    main()
