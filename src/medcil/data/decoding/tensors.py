"""An image file becomes a tensor of pixels. What files are accepted, and why not: upright.py."""

import io
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional

from medcil.data.decoding.dicom import read_upright_dicom
from medcil.data.decoding.image import read_upright, resized_planes

EXACT_SIDE = 1024
"""Far below the 2 ** 13 up to which PyTorch's weights suffice."""


def decode_image(file: Path | bytes, side: int, *, name: str | None = None) -> UInt8[Tensor, "3 side side"]:
    """Upright, 8-bit RGB, resized to side x side (bilinear, aspect ratio not kept, as in the benchmark)."""
    return resized(read_upright(file, side=side, name=name), side)


def decode_dicom(content: bytes, side: int, name: str) -> UInt8[Tensor, "3 side side"]:
    """Like any other image; what is no DICOM file is refused."""
    return resized(read_upright_dicom(content, name), side)


def resized(image: Image.Image, side: int) -> UInt8[Tensor, "3 side side"]:
    """An RGB image as Pillow's bilinear filter resizes it, bit for bit, by whoever does that faster."""
    is_power_of_two = side & (side - 1) == 0
    if is_power_of_two and max(image.size) <= side <= EXACT_SIDE:
        # Enlarged to a power of two, every weight is a multiple of 1 / (2 side): Pillow's 22 bits and
        # PyTorch's 14 both hold it exactly, and both then round the same sums in the same way.
        small = torch.from_numpy(np.array(image)[None]).permute(0, 3, 1, 2)  # channels last: half the time
        return functional.interpolate(small, size=side, mode="bilinear", antialias=True)[0].contiguous()
    return torch.from_numpy(resized_planes(image, side))


def encode_png(pixels: UInt8[Tensor, "3 side side"]) -> bytes:
    """Lossless, and with nothing in the file but the pixels."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.save(buffer, "PNG", compress_level=1)  # an eighth larger than usual, written five times as fast
    return buffer.getvalue()
