"""Images on their way to the network: kept on the device as bytes where they fit, otherwise streamed.

Both ways give the same batches to the last bit.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from medcil.config import ExecutionConfig
from medcil.data.augmentation import transformed
from medcil.data.samples import Samples
from medcil.data.transforms import Preprocessing, crop_and_flip
from medcil.processors import usable_cores
from medcil.training.device_window import MovingWindow, WholeWindow, Window
from medcil.training.distributed import Ranks
from medcil.training.sampling import EpochPlan

EVALUATION_BATCH = 256


class Feed:
    """Batches of samples on a device. Use it in a `with` block, which ends the threads that read images."""

    def __init__(
        self, samples: Samples, preprocessing: Preprocessing, device: torch.device, execution: ExecutionConfig
    ) -> None:
        self.samples = samples
        self.preprocessing = preprocessing
        self.device = device
        self.execution = execution
        self.ranks = Ranks()
        self.labels = samples.labels.to(device)
        is_resident = _fits(samples, device) if execution.resident == "auto" else execution.resident
        workers = execution.workers or max(1, usable_cores() // self.ranks.size)
        kind = WholeWindow if is_resident else MovingWindow
        self.window: Window = kind(samples.images, device, workers=workers)
        self._epochs: dict[int, _Rows] = {}  # by their length

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        self.window.close()

    @property
    def is_half_precision(self) -> bool:
        """bfloat16 where the hardware is made for it; on the CPU full precision, bit for bit repeatable."""
        return self.device.type == "cuda" and self.execution.precision != "float32"

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_half_precision)

    def begin(self, plan: EpochPlan) -> None:
        """The batches to come are this plan's. Its numbers lie where those of an equally long one lay."""
        own = [
            torch.arange(part.start, part.stop)[self.ranks.share(len(plan.order[part]))]
            for part in plan.slices()
        ]
        places = torch.zeros(len(plan.order), dtype=torch.int64, device=self.device)
        places[torch.cat(own).to(self.device)] = self.window.load([plan.order[rows] for rows in own])
        indices = plan.order.to(self.device)
        rows = _Rows(
            indices=indices,
            places=places,
            labels=self.labels[indices],
            top=plan.top.to(self.device),
            left=plan.left.to(self.device),
            flip=plan.flip.to(self.device),
            transforms=self._here(plan.transforms),
            turns=self._here(plan.turns),
            tones=self._here(plan.tones),
            cursor=torch.zeros((), dtype=torch.int64, device=self.device),
        )
        self._rows = self._epochs.setdefault(len(plan.order), rows)
        self._rows.become(rows)

    def _here(self, numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers.to(self.device)

    def ready(self, step: int) -> None:
        """To be called before each batch is taken."""
        self.window.ready(step)

    @property
    def shows_images_whole(self) -> bool:
        """Every image is only ever seen whole: as it is, or mirrored."""
        return self.preprocessing.slack == 0 and self.preprocessing.augmentation == "crop"

    def take(self, size: int) -> "Drawn":
        """The next batch. The device alone knows which that is, so a captured step takes the next one."""
        rows, crop = self._rows, self.preprocessing.crop
        of_batch = rows.cursor + torch.arange(size, device=self.device)
        own = of_batch[self.ranks.share(size)]
        if rows.transforms is None:
            places = (rows.places[own], rows.top[own], rows.left[own], rows.flip[own])
            turns = None if rows.turns is None else rows.turns[own]
            crops = crop_and_flip(self.window.pixels, *places, crop=crop, turns=turns)
        else:
            tones = None if rows.tones is None else rows.tones[own]
            crops = transformed(
                self.window.pixels, rows.places[own], rows.transforms[own], crop=crop, tones=tones
            )
        drawn = Drawn(
            self._to_network(crops), rows.labels[of_batch], rows.indices[of_batch], rows.flip[of_batch]
        )
        rows.cursor.add_(size)
        return drawn

    def evaluation_batches(
        self, indices: Int[Tensor, "n"], *, flip: bool = False, views: int = 1
    ) -> Iterator[Float[Tensor, "batch 3 crop crop"]]:
        """Center crops in the order given, mirrored or not; fewer at once where each has several views."""
        if not len(indices):
            return
        crop, offset = self.preprocessing.crop, self.preprocessing.slack // 2
        # Of equal size, give or take one: a small last one would spoil batch-norm statistics taken on them.
        batches = torch.tensor_split(indices, -(-len(indices) * views // EVALUATION_BATCH))
        places = torch.split(self.window.load(batches), [len(batch) for batch in batches])
        for step, positions in enumerate(places):
            self.window.ready(step)
            corner = torch.full_like(positions, offset)
            mirrored = torch.full_like(positions, flip, dtype=torch.bool)
            crops = crop_and_flip(self.window.pixels, positions, corner, corner, mirrored, crop=crop)
            yield self._to_network(crops)

    def _to_network(self, crops: UInt8[Tensor, "n 3 crop crop"]) -> Float[Tensor, "n 3 crop crop"]:
        return self.preprocessing.normalize(crops).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A batch; of its images, where several processes train together, this one's share."""

    images: Float[Tensor, "own 3 crop crop"]
    labels: Int[Tensor, "batch"]
    indices: Int[Tensor, "batch"]
    """Among the samples."""
    flip: Bool[Tensor, "batch"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """An epoch's plan on the device; the k-th image drawn has row k."""

    indices: Int[Tensor, "n"]
    places: Int[Tensor, "n"]
    labels: Int[Tensor, "n"]
    top: Int[Tensor, "n"]
    left: Int[Tensor, "n"]
    flip: Bool[Tensor, "n"]
    transforms: Float[Tensor, "n 2 3"] | None
    turns: Int[Tensor, "n"] | None
    tones: Float[Tensor, "n 3 2"] | None
    cursor: Int[Tensor, ""]
    """The first row of the next batch."""

    def become(self, other: "_Rows") -> None:
        """Takes the other's values in its own memory, which captured steps read."""
        for own, new in zip(vars(self).values(), vars(other).values(), strict=True):
            if own is not None:
                own.copy_(new)


def _fits(samples: Samples, device: torch.device) -> bool:
    """A good part of the device's free memory remains for the network."""
    needed = len(samples) * 3 * samples.images.side**2
    if device.type == "cuda":
        return needed < 0.5 * torch.cuda.mem_get_info(device)[0]
    return needed < 0.25 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
