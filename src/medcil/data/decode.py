"""An image file becomes pixels: one place, strict about what it accepts."""

import io
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from medcil.errors import InvalidInput

FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP")
MAX_PIXELS = 89_000_000  # beyond, Pillow warns of a decompression bomb and goes on
EIGHT_BIT_MODES = ("RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "YCbCr")


def decode_image(file: Path | bytes, side: int, *, name: str | None = None) -> UInt8[Tensor, "3 side side"]:
    """Upright, 8-bit RGB, resized to side x side (bilinear, aspect ratio not kept, as in the benchmark)."""
    name = name or ("an image" if isinstance(file, bytes) else str(file))
    source = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InvalidInput(f"{name} is too large ({image.width} x {image.height} pixels); shrink it.")
            if image.mode not in EIGHT_BIT_MODES:
                # Pillow's convert("RGB") would clip 16-bit pixels to 255 without a word.
                raise InvalidInput(f"{name} has {image.mode} pixels; convert it to 8-bit RGB first.")
            image.draft("RGB", (side, side))  # JPEG only: decode at the nearest larger power-of-two scale
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "P":
                upright = upright.convert("RGBA")  # Pillow warns of a transparent palette otherwise
            upright = upright.convert("RGB")
            pixels = np.asarray(upright.resize((side, side), Image.Resampling.BILINEAR))
    except InvalidInput:
        raise
    except Exception as error:  # a damaged file makes Pillow raise errors of many kinds, struct.error for one
        raise InvalidInput(f"{name} cannot be read as an image ({error}); remove or replace it.") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def encode_png(pixels: UInt8[Tensor, "3 side side"]) -> bytes:
    """Lossless, and with nothing in the file but the pixels."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()
