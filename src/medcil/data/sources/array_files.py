"""Images in arrays, read like files."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
from jaxtyping import UInt8
from PIL import Image


@dataclass(frozen=True, eq=False)
class ArrayFiles:
    """Images in memory as files: `train/000007.png` is encoded, without loss, when it is read."""

    arrays: Mapping[str, UInt8[np.ndarray, "n ..."]]

    def names(self) -> Sequence[str]:
        return [f"{part}/{i:06d}.png" for part, images in self.arrays.items() for i in range(len(images))]

    def read(self, name: str) -> bytes:
        path, buffer = PurePosixPath(name), io.BytesIO()
        pixels = self.arrays[path.parent.name][int(path.stem)]
        # Without compression it is fast, and the bytes do not depend on the version of a compressor.
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
        return buffer.getvalue()
