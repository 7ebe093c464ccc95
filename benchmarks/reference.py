"""A training loop as the field writes it: JPEG files, a DataLoader with workers, float32, no graph."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from workload import grainy_picture

from medcil.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from medcil.training.state import State

QUALITY = 95


def write_pictures(
    folder: Path, n: int, *, size: tuple[int, int] = (600, 450), kind: str = "jpg"
) -> list[Path]:
    """Of HAM10000's size."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05d}.{kind}" for number in range(n)]

    def write(number: int) -> None:
        grainy_picture(*size, number).save(paths[number], quality=QUALITY)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(n)))
    return paths


class PictureFiles(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, paths: list[Path], *, side: int, crop: int, n_classes: int) -> None:
        self.paths = paths
        self.n_classes = n_classes
        self.transform = transforms.Compose(
            [
                transforms.Resize((side, side)),
                transforms.RandomCrop(crop),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), index % self.n_classes


class ReferenceLoop:
    """Cross-entropy and L1 distillation on the same ResNet-18.

    As the published benchmark's code has it: memory not pinned, new workers in every epoch (4 there).
    """

    def __init__(
        self, state: State, paths: list[Path], *, batch: int, workers: int, device: torch.device
    ) -> None:
        self.device = device
        self.network = copy.deepcopy(state.network).requires_grad_()
        self.old = copy.deepcopy(state.network).eval().to(device)
        self.n_old = len(state.class_names)
        self.network.grow(torch.randn(2, self.network.classifier.dim))
        self.network.to(device)
        parameters = [p for group in self.network.every_parameter().values() for p in group]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=5e-4)
        size = {"side": state.preprocessing.side, "crop": state.preprocessing.crop}
        self.loader = DataLoader(
            PictureFiles(paths, **size, n_classes=self.n_old + 2),
            batch_size=batch,
            shuffle=True,
            num_workers=workers,
        )

    def epoch(self) -> float:
        """Its seconds."""
        began, total = time.perf_counter(), 0.0
        self.network.train()
        for images, labels in self.loader:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            logits = self.network(images).logits
            with torch.no_grad():
                old_logits = self.old(images).logits
            loss = F.cross_entropy(logits, labels) + 0.1 * F.l1_loss(logits[:, : self.n_old], old_logits)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return time.perf_counter() - began
