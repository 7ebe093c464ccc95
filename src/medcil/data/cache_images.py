"""The pixels of a prepared store as a source of images."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from medcil.data.cache_plan import map_pixels, pixel_path


class StoreImages:
    """An image source over a store's pixels. Safe in threads; in another process it maps the files anew."""

    def __init__(self, folder: Path, side: int, counts: tuple[int, ...]) -> None:
        self._folder = folder
        self._side = side
        self._counts = counts
        self._starts = np.cumsum((0, *counts))
        self._maps: dict[int, UInt8[np.ndarray, "rows 3 side side"]] = {}

    def __reduce__(self) -> tuple[type["StoreImages"], tuple[Path, int, tuple[int, ...]]]:
        return StoreImages, (self._folder, self._side, self._counts)

    @property
    def side(self) -> int:
        return self._side

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: Int[Tensor, "n"]) -> UInt8[Tensor, "n 3 side side"]:
        places = indices.cpu().numpy()
        if len(places) and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"there are {len(self)} images, and one of {places.tolist()} is none of them")
        chunks = np.searchsorted(self._starts, places, side="right") - 1
        rows = places - self._starts[chunks]
        images = torch.empty(len(places), 3, self.side, self.side, dtype=torch.uint8)
        copies = images.numpy()
        for place, (chunk, row) in enumerate(zip(chunks.tolist(), rows.tolist(), strict=True)):
            copies[place] = self._mapped(chunk)[row]
        return images

    def _mapped(self, chunk: int) -> UInt8[np.ndarray, "rows 3 side side"]:
        if chunk not in self._maps:
            path = pixel_path(self._folder, chunk)
            self._maps[chunk] = map_pixels(path, self._counts[chunk], self.side)
        return self._maps[chunk]
