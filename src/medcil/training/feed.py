"""Batches on the device: images stay there as bytes if they fit, otherwise they are streamed.

Both ways give the same batches to the last bit.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from medcil.config import ExecutionConfig, usable_cores
from medcil.data.samples import ImageSource, Samples
from medcil.data.transforms import Preprocessing, crop_and_flip, transformed
from medcil.training.cuda_graph import stream_on
from medcil.training.distributed import Ranks
from medcil.training.sampling import EpochPlan

EVALUATION_BATCH = 256


class Feed:
    """Serves batches of samples on a device. Use it in a `with` block, which ends the reading threads."""

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
        kind: type[WholeWindow | MovingWindow] = WholeWindow if is_resident else MovingWindow
        self.window: WholeWindow | MovingWindow = kind(samples.images, device, workers=workers)
        self._epochs: dict[tuple[int, tuple[str, ...]], _Epoch] = {}  # by length and what is drawn
        self._cursor = torch.zeros((), dtype=torch.int64, device=device)  # first row of the next batch

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        self.window.close()

    @property
    def is_half_precision(self) -> bool:
        """Is bfloat16 used? Only on GPUs; on the CPU full precision repeats bit for bit."""
        return self.device.type == "cuda" and self.execution.precision != "float32"

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_half_precision)

    def begin(self, plan: EpochPlan) -> None:
        """Start an epoch. Reuses the buffers of plans of the same length, so captured graphs stay valid."""
        own = [
            torch.arange(part.start, part.stop)[self.ranks.share(len(plan.order[part]))]
            for part in plan.slices()
        ]
        places = torch.zeros(len(plan.order), dtype=torch.int64, device=self.device)
        places[torch.cat(own).to(self.device)] = self.window.load([plan.order[rows] for rows in own])
        rows = plan.to(self.device)
        epoch = _Epoch(**vars(rows), places=places, labels=self.labels[rows.order])
        self._epoch = self._epochs.setdefault((len(plan.order), tuple(plan.tensors())), epoch)
        for name, tensor in self._epoch.tensors().items():
            tensor.copy_(epoch.tensors()[name])
        self._cursor.zero_()

    def ready(self, step: int) -> None:
        """Wait until the images of batch `step` are on the device. Call this before each `take`."""
        self.window.ready(step)

    @property
    def shows_images_whole(self) -> bool:
        """Does the network see every image uncropped, plain or mirrored only?"""
        return self.preprocessing.slack == 0 and self.preprocessing.augmentation == "crop"

    def take(self, size: int) -> "Drawn":
        """Take the next batch. Its number is a tensor on the device, so a captured step can advance it."""
        rows = self._epoch.at(self._cursor + torch.arange(size, device=self.device))
        images = self._to_network(self._crops(rows.at(self.ranks.share(size))))
        # A slice, because an index of no dimension would be read by the CPU.
        share = None if rows.shares is None else rows.shares[:1].squeeze(0)
        if share is not None:
            images = share * images + (1 - share) * images.roll(1, dims=0)
        self._cursor.add_(size)
        return Drawn(images, rows.labels, rows.order, rows.flip, rows.turns, share)

    def _crops(self, rows: "_Epoch") -> UInt8[Tensor, "n 3 crop crop"]:
        pixels, crop = self.window.pixels, self.preprocessing.crop
        if rows.transforms is None:
            return crop_and_flip(
                pixels, rows.places, rows.top, rows.left, rows.flip, crop=crop, turns=rows.turns
            )
        return transformed(pixels, rows.places, rows.transforms, crop=crop, tones=rows.tones)

    def evaluation_batches(
        self, indices: Int[Tensor, "n"], *, flip: bool = False, views: int = 1
    ) -> Iterator[Float[Tensor, "batch 3 crop crop"]]:
        """Yield center crops in the order of `indices`; images of several views come in smaller batches."""
        if not len(indices):
            return
        crop, offset = self.preprocessing.crop, self.preprocessing.slack // 2
        # Sizes differ by at most one: a small last batch would spoil batch-norm statistics taken on them.
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
    """A batch. With several processes, the images are this process's share."""

    images: Float[Tensor, "own 3 crop crop"]
    labels: Int[Tensor, "batch"]
    indices: Int[Tensor, "batch"]
    """Indices into the feed's samples."""
    flip: Bool[Tensor, "batch"]
    turns: Int[Tensor, "batch"] | None = None
    share: Float[Tensor, ""] | None = None
    """Of each image itself, where it is mixed with the one before it."""


@dataclass(frozen=True, eq=False)
class _Epoch(EpochPlan):
    """An epoch on the device; the k-th image drawn has row k."""

    places: Int[Tensor, "n"]
    """Positions in the window."""
    labels: Int[Tensor, "n"]


def _fits(samples: Samples, device: torch.device) -> bool:
    """Do the images leave enough of the device's memory to the network?"""
    needed = len(samples) * 3 * samples.images.side**2
    if device.type == "cuda":
        return needed < 0.5 * torch.cuda.mem_get_info(device)[0]
    return needed < 0.25 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


HALF_BYTES = 256 * 2**20
"""Size of one half of a moving window: forty batches of 32 images of 256 x 256."""
PART_BYTES = 16 * 2**20
"""Size of what one thread reads at once."""

Indices = Int[Tensor, "_"]
Batches = Sequence[Indices]


class WholeWindow:
    """All images on the device."""

    pixels: UInt8[Tensor, "m 3 side side"]

    def __init__(self, images: ImageSource, device: torch.device, *, workers: int) -> None:
        self.pixels = _room_for(len(images), images, device)

        def fill(part: Indices) -> None:
            self.pixels[part[0] : part[-1] + 1] = images.read(part).to(device)

        # In parts, so that main memory never holds all images on their way to a GPU.
        parts = torch.split(torch.arange(len(images)), _n_images(PART_BYTES, images))
        with ThreadPoolExecutor(workers, "read") as readers:
            for done in [readers.submit(fill, part) for part in parts if len(part)]:
                done.result()

    def load(self, batches: Batches) -> Int[Tensor, "n"]:
        """Start an epoch of these batches; return the positions of their images in `pixels`, in order."""
        return _joined(batches).to(self.pixels.device)

    def ready(self, step: int) -> None:
        """Make batch `step` ready for whatever the device is given next. Call this for each, in order."""

    def close(self) -> None:
        """End the threads that read."""


class MovingWindow:
    """Two halves on the device: training uses one while threads read the next batches into the other.

    To a GPU, images pass through pinned memory and are copied during the computation.
    """

    pixels: UInt8[Tensor, "m 3 side side"]

    def __init__(self, images: ImageSource, device: torch.device, *, workers: int) -> None:
        self.images = images
        self.device = device
        self.workers = workers
        self.readers = ThreadPoolExecutor(workers, "read")
        self.fetching = ThreadPoolExecutor(1, "fetch")  # one chunk after the other
        self.copying = stream_on(device)
        self.chunks: list[Indices] = []
        self.chunk_at: dict[int, int] = {}
        """Number of a batch -> the chunk that begins with it."""
        self.arriving: Future[torch.cuda.Event | None] | None = None
        self._make_room(max(1, min(len(images), _n_images(HALF_BYTES, images))))

    def load(self, batches: Batches) -> Int[Tensor, "n"]:
        if self.arriving is not None:  # from an epoch that did not finish
            wait([self.arriving])
        self._make_room(max((len(batch) for batch in batches), default=0))
        self.chunk_at, places = {}, []
        chunks: list[list[Indices]] = []
        room = 0
        for number, batch in enumerate(batches):
            if len(batch) > room:
                self.chunk_at[number] = len(chunks)
                chunks.append([])
                room = self.half
            start = self._begin(len(chunks) - 1) + self.half - room
            places.append(torch.arange(start, start + len(batch)))
            chunks[-1].append(batch)
            room -= len(batch)
        self.chunks = [torch.cat(parts) for parts in chunks]
        if self.chunks:
            self._fetch(0)
        return _joined(places).to(self.device)

    def ready(self, step: int) -> None:
        chunk = self.chunk_at.get(step)
        if chunk is None or self.arriving is None:
            return
        arrived = self.arriving.result()
        self.arriving = None
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        if chunk + 1 < len(self.chunks):
            self._fetch(chunk + 1)

    def close(self) -> None:
        self.fetching.shutdown()  # first: it still waits for the readers
        self.readers.shutdown()

    def _begin(self, chunk: int) -> int:
        """Return where the half begins that a chunk is read into."""
        return chunk % 2 * self.half

    def _make_room(self, half: int) -> None:
        """Enlarge both halves to this many images, if they are smaller; their content is lost."""
        if half <= getattr(self, "half", 0):
            return
        self.half = half
        self.pixels = _room_for(2 * half, self.images, self.device)
        self.staged = self.pixels
        if self.copying is not None:
            self.staged = _room_for(2 * half, self.images, torch.device("cpu")).pin_memory()

    def _fetch(self, chunk: int) -> None:
        # Work that the device has already been given may still read the half that is filled next.
        free = None if self.copying is None else torch.cuda.current_stream(self.device).record_event()
        self.arriving = self.fetching.submit(self._arrive, chunk, free)

    def _arrive(self, chunk: int, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        indices = self.chunks[chunk]
        half = slice(self._begin(chunk), self._begin(chunk) + len(indices))
        if self.copying is not None:
            self.copying.synchronize()  # the last copy may still read this half of the pinned memory
        parts = (torch.tensor_split(tensor, self.workers) for tensor in (indices, self.staged[half]))
        reading = [self.readers.submit(self._read, *part) for part in zip(*parts, strict=True)]
        wait(reading)  # so that no thread still writes when the error of another is raised
        for done in reading:
            done.result()
        if self.copying is None or free is None:
            return None
        with torch.cuda.stream(self.copying):
            self.copying.wait_event(free)
            self.pixels[half].copy_(self.staged[half], non_blocking=True)
            arrived: torch.cuda.Event = self.copying.record_event()
        return arrived

    def _read(self, indices: Int[Tensor, "n"], into: UInt8[Tensor, "n 3 side side"]) -> None:
        if len(indices):
            into.copy_(self.images.read(indices))


def _n_images(n_bytes: int, images: ImageSource) -> int:
    return max(1, n_bytes // (3 * images.side**2))


def _room_for(n: int, images: ImageSource, device: torch.device) -> UInt8[Tensor, "n 3 side side"]:
    """Allocate images. On a GPU a pixel's channels are adjacent, which makes cropping twice as fast there."""
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    shape = (n, 3, images.side, images.side)
    return torch.empty(shape, dtype=torch.uint8, device=device, memory_format=layout)


def _joined(parts: Sequence[Int[Tensor, "_"]]) -> Int[Tensor, "n"]:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
