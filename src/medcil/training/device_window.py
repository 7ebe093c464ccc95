"""Where on the device the images of the coming batches lie: all of them, or a window that moves along.

A batch is taken from `pixels` at the places that `load` gave for it, after `ready` was called for it. Both
kinds of window keep `pixels` where it is, so that a captured step finds it there.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from medcil.data.samples import ImageSource
from medcil.training.cuda_graph import stream_on

HALF_BYTES = 256 * 2**20
"""Of a moving window: some forty batches of 32 images of 256 x 256."""
PART_BYTES = 16 * 2**20
"""That one of several readers reads at once."""

Indices = Int[Tensor, "_"]
Batches = Sequence[Indices]


class Window(Protocol):
    pixels: UInt8[Tensor, "m 3 side side"]

    def load(self, batches: Batches) -> Int[Tensor, "n"]:
        """Makes these batches the coming ones; where their images will lie, one after the other."""
        ...

    def ready(self, step: int) -> None:
        """Batch `step` may be used by what is now given to the device; to be called for each, in order."""
        ...

    def close(self) -> None:
        """End the threads that read."""
        ...


class WholeWindow:
    """All images are there."""

    def __init__(self, images: ImageSource, device: torch.device, *, workers: int) -> None:
        self.pixels = _room_for(len(images), images, device)

        def fill(part: Indices) -> None:
            self.pixels[part[0] : part[-1] + 1] = images.read(part).to(device)

        # In parts, so that on the way to a GPU never all of them are in main memory.
        parts = torch.split(torch.arange(len(images)), _n_images(PART_BYTES, images))
        with ThreadPoolExecutor(workers, "read") as readers:
            for done in [readers.submit(fill, part) for part in parts if len(part)]:
                done.result()

    def load(self, batches: Batches) -> Int[Tensor, "n"]:
        return _joined(batches).to(self.pixels.device)

    def ready(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class MovingWindow:
    """Two halves: while one is trained on, threads read the next chunk of batches into the other.

    On a GPU they pass through pinned memory and are copied there beside the computation.
    """

    def __init__(self, images: ImageSource, device: torch.device, *, workers: int) -> None:
        self.images = images
        self.device = device
        self.workers = workers
        self.readers = ThreadPoolExecutor(workers, "read")
        self.fetching = ThreadPoolExecutor(1, "fetch")  # one chunk after the other
        self.copying = stream_on(device)
        self.chunks: list[Indices] = []
        self.chunk_at: dict[int, int] = {}
        """By the number of a batch, the chunk that begins with it."""
        self.arriving: Future[torch.cuda.Event | None] | None = None
        self._make_room(max(1, min(len(images), _n_images(HALF_BYTES, images))))

    def load(self, batches: Batches) -> Int[Tensor, "n"]:
        if self.arriving is not None:  # of an epoch that was broken off
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
        self.fetching.shutdown()  # first: what it still fetches is read by the others
        self.readers.shutdown()

    def _begin(self, chunk: int) -> int:
        """Of the half that a chunk is read into."""
        return chunk % 2 * self.half

    def _make_room(self, half: int) -> None:
        """For batches of this size; what was there is lost."""
        if half <= getattr(self, "half", 0):
            return
        self.half = half
        self.pixels = _room_for(2 * half, self.images, self.device)
        self.staged = self.pixels
        if self.copying is not None:
            self.staged = _room_for(2 * half, self.images, torch.device("cpu")).pin_memory()

    def _fetch(self, chunk: int) -> None:
        # What was given to the device until now may still read the half that is to be filled.
        free = None if self.copying is None else torch.cuda.current_stream(self.device).record_event()
        self.arriving = self.fetching.submit(self._arrive, chunk, free)

    def _arrive(self, chunk: int, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        indices = self.chunks[chunk]
        half = slice(self._begin(chunk), self._begin(chunk) + len(indices))
        if self.copying is not None:
            self.copying.synchronize()  # so that nothing is copied any more from what is to be filled
        parts = (torch.tensor_split(tensor, self.workers) for tensor in (indices, self.staged[half]))
        reading = [self.readers.submit(self._read, *part) for part in zip(*parts, strict=True)]
        wait(reading)  # none writes any more when an error of another is raised
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
    """On a GPU a pixel's channels lie together, which makes cropping twice as fast there."""
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    shape = (n, 3, images.side, images.side)
    return torch.empty(shape, dtype=torch.uint8, device=device, memory_format=layout)


def _joined(parts: Sequence[Int[Tensor, "_"]]) -> Int[Tensor, "n"]:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
