"""Images on their way to the network: kept on the device as bytes where they fit, otherwise streamed.

Both ways give the same batches to the last bit.
"""

import os
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from medcil.config import ExecutionConfig
from medcil.data.augment import transformed
from medcil.data.preprocess import Preprocessing, crop_and_flip
from medcil.data.samples import ImageSource, Samples
from medcil.engine.draws import EpochPlan

EVALUATION_BATCH = 256


class Feed:
    def __init__(
        self, samples: Samples, preprocessing: Preprocessing, device: torch.device, execution: ExecutionConfig
    ) -> None:
        self.samples = samples
        self.preprocessing = preprocessing
        self.device = device
        self.workers = execution.workers
        self.labels = samples.labels.to(device)
        is_resident = _fits(samples, device) if execution.resident == "auto" else execution.resident
        self.pixels = samples.read_all().to(device) if is_resident else None

    def training_batches(
        self, plan: EpochPlan
    ) -> Iterator[tuple[Float[Tensor, "batch 3 crop crop"], Int[Tensor, "batch"]]]:
        order, top, left, flip = (t.to(self.device) for t in (plan.order, plan.top, plan.left, plan.flip))
        slices = plan.slices()
        stored = self._stored([plan.order[part] for part in slices])
        transforms = None if plan.transforms is None else plan.transforms.to(self.device)
        crop = self.preprocessing.crop
        for part, (pixels, positions) in zip(slices, stored, strict=True):
            if transforms is None:
                crops = crop_and_flip(pixels, positions, top[part], left[part], flip[part], crop=crop)
            else:
                crops = transformed(pixels, positions, transforms[part], crop=crop)
            yield self._to_network(crops), self.labels[order[part]]

    def evaluation_batches(
        self, indices: Int[Tensor, "n"], *, flip: bool = False
    ) -> Iterator[Float[Tensor, "batch 3 crop crop"]]:
        """Center crops in the order given, mirrored or not."""
        if not len(indices):
            return
        crop, offset = self.preprocessing.crop, self.preprocessing.slack // 2
        # Of equal size, give or take one: a small last one would spoil batch-norm statistics taken on them.
        batches = torch.tensor_split(indices, -(-len(indices) // EVALUATION_BATCH))
        for pixels, positions in self._stored(list(batches)):
            place = torch.full_like(positions, offset)
            mirrored = torch.full_like(positions, flip, dtype=torch.bool)
            yield self._to_network(crop_and_flip(pixels, positions, place, place, mirrored, crop=crop))

    def _stored(
        self, batches: list[Int[Tensor, "_"]]
    ) -> Iterator[tuple[UInt8[Tensor, "m 3 side side"], Int[Tensor, "batch"]]]:
        """For each batch a stack of stored images, and where in it the batch's images lie."""
        if self.pixels is not None:
            sizes = [len(indices) for indices in batches]
            for positions in torch.split(torch.cat(batches).to(self.device), sizes):  # one copy per epoch
                yield self.pixels, positions
            return
        loader: DataLoader[UInt8[Tensor, "3 side side"]] = DataLoader(
            _ByIndex(self.samples.images),
            batch_sampler=[indices.tolist() for indices in batches],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # so that PyTorch's own random state stays as it is
        )
        for pixels in loader:
            yield pixels.to(self.device, non_blocking=True), torch.arange(len(pixels), device=self.device)

    def _to_network(self, crops: UInt8[Tensor, "n 3 crop crop"]) -> Float[Tensor, "n 3 crop crop"]:
        return self.preprocessing.normalize(crops).contiguous(memory_format=torch.channels_last)


class _ByIndex(Dataset[UInt8[Tensor, "3 side side"]]):
    def __init__(self, images: ImageSource) -> None:
        self.images = images

    def __getitem__(self, index: int) -> UInt8[Tensor, "3 side side"]:
        return self.images.read(torch.tensor([index]))[0]


def _fits(samples: Samples, device: torch.device) -> bool:
    """A good part of the device's free memory remains for the network."""
    needed = len(samples) * 3 * samples.images.side**2
    if device.type == "cuda":
        return needed < 0.5 * torch.cuda.mem_get_info(device)[0]
    return needed < 0.25 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
