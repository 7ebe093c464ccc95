"""An image file becomes an upright RGB image: one place, strict about what it accepts, and without torch.

Tables: docs/reference/data-formats.md.
"""

import io
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image, ImageChops, ImageCms, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from medcil.errors import InvalidInput

SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "TIFF": rb"II[*+]\x00|MM\x00[*+]",
    "BMP": rb"BM",
    "WEBP": rb"(?s:RIFF....WEBP)",
}
CUT_OFF = "the file ends before the image does"
JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
DECLARED_SIZE = {"BMP": (2, 0), "WEBP": (4, 8)}
"""Where a file states its size, and how many bytes it does not count."""
MAX_PIXELS = 89_000_000  # beyond, Pillow warns of a decompression bomb and goes on
GRAY_DEPTHS = (8, 10, 12, 14, 16)
DEEP_GRAY = ("I;16", "I;16L", "I;16B", "I", "F")
UPRIGHT = dict(enumerate((0, 3, 1, 5, 4, 6, 2), start=2))  # EXIF orientation -> Image.Transpose
TOO_LARGE = f"it has more than {MAX_PIXELS:,} pixels: shrink it"
FILTERS_LOCK = threading.Lock()


@dataclass(frozen=True)
class ImageFacts:
    """What a file says of itself, and what is wrong with it. The size is that of the upright image."""

    format: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0
    problems: tuple[str, ...] = ()
    """Each a reason for which decoding refuses the file."""


def read_upright(content: bytes, *, side: int | None = None, name: str = "an image") -> Image.Image:
    """Decode an image file to 8-bit RGB, turned as EXIF says; `side` is as for `examine_pixels`."""
    facts, picture = examine_pixels(content, side=side)
    if picture is None:
        kind = "a DICOM image" if facts.format == "DICOM" else "an image"
        raise InvalidInput(
            f"{name} cannot be read as {kind} ({facts.problems[0]}); remove or replace it.",
            code="image.file.damaged",
        )
    return picture


def resized_planes(image: Image.Image, side: int) -> UInt8[np.ndarray, "3 side side"]:
    """Resize an RGB image to side x side: bilinear, aspect ratio not kept, as in the benchmark."""
    large = image.resize((side, side), Image.Resampling.BILINEAR)
    # Pillow takes the channels apart faster than an array is transposed.
    planes = bytearray().join([large.tobytes("raw", channel) for channel in "RGB"])
    return np.frombuffer(planes, np.uint8).reshape(3, side, side)


def examine(content: bytes) -> ImageFacts:
    """Return the facts in the header; whether all of the pixels are sound, only decoding tells."""
    return examine_pixels(content, decode=False)[0]


def examine_pixels(
    content: bytes, *, side: int | None = None, decode: bool = True
) -> tuple[ImageFacts, Image.Image | None]:
    """Decode the pixels. Return the facts, and the upright RGB image where there is no problem.

    With a side, a large JPEG is decoded at a half, a quarter or an eighth of its size, where that is still
    enough for side x side.
    """
    if is_dicom(content):
        from medcil.data.dicom import examine_dicom  # it builds on this module

        return examine_dicom(content, decode=decode)
    facts, problems, picture = ImageFacts(), list[str](), None
    try:
        facts = ImageFacts(_format(content))
        problems += filter(None, [_end_problem(content, facts.format)])
        with _opened(content, facts.format) as image:
            width, height = image.size
            facts = ImageFacts(facts.format, image.mode, width, height)
            problems += _header_problems(image, len(content))
            # Pillow decodes a whole PNG to learn that it has no EXIF.
            if not problems and (facts.format != "PNG" or b"eXIf" in content or b":Orientation" in content):
                # Of a TIFF, Pillow tells the upright size.
                is_turned = _orientation(image) >= 5 and facts.format != "TIFF"
                facts = replace(facts, width=height, height=width) if is_turned else facts
            if decode and not problems:
                if side is not None:
                    image.draft("RGB", (side, side))  # JPEG only
                picture = _upright(image)
    except Exception as error:
        problems.append(_reason(error))
    return replace(facts, problems=tuple(dict.fromkeys(problems))), picture


def is_dicom(content: bytes) -> bool:
    return content[128:132] == b"DICM"


def gray_levels(values: Num[np.ndarray, "height width"]) -> UInt8[np.ndarray, "height width"]:
    """Convert gray levels to 8 bits.

    White is the largest number of 8, 10, 12, 14 or 16 bits, the fewest that hold the file's largest value,
    so that 12-bit data does not turn black. Floats up to 1 have their white at 1.
    """
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):  # NaN compares false
        raise ValueError(f"its values, {low:g} to {high:g}, are no gray levels: write them as 16-bit gray")
    if values.dtype.kind == "f":
        values = np.rint(values * 65535 if high <= 1 else values)
        high = 65535 if high <= 1 else high
    white = next(2**bits - 1 for bits in GRAY_DEPTHS if high <= 2**bits - 1)
    levels = ((2 * 255 * np.arange(white + 1) + white) // (2 * white)).astype(np.uint8)
    return np.asarray(levels[values.astype(np.uint16)])


def _format(content: bytes) -> str:
    for image_format, signature in SIGNATURES.items():
        if re.match(signature, content):
            return image_format
    raise ValueError(f"it is none of {', '.join(SIGNATURES)}, DICOM")


def _opened(content: bytes, image_format: str) -> ImageFile.ImageFile:
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # a switch of the whole process that others like to turn on
    is_jpeg = image_format == "JPEG"
    # Of a JPEG, Pillow warns of nothing but its EXIF, and catching warnings takes as long as opening it.
    with nullcontext() if is_jpeg and b"Exif" not in content else _pillow_warnings_as_errors():
        if is_jpeg:
            # Image.open would take the previews and gain maps that phones append for further frames.
            return JpegImageFile(io.BytesIO(content))
        return Image.open(io.BytesIO(content), formats=(image_format,))


@contextmanager
def _pillow_warnings_as_errors() -> Iterator[None]:
    with FILTERS_LOCK, warnings.catch_warnings():  # the filters belong to the process
        warnings.filterwarnings("error", module=r"PIL\.")
        # Scanners give too many values for tags that do not change the pixels.
        warnings.filterwarnings("ignore", message="Metadata Warning", module=r"PIL\.")
        yield


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its header is damaged"  # Pillow's own words hold a memory address
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        return TOO_LARGE
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _frames(image: ImageFile.ImageFile) -> int:
    if not getattr(image, "is_animated", False):
        return 1
    with _pillow_warnings_as_errors():
        return int(getattr(image, "n_frames", 1))


def _orientation(image: ImageFile.ImageFile) -> int:
    if isinstance(image, JpegImageFile) and not {"exif", "xmp"} & image.info.keys():
        return 1
    with _pillow_warnings_as_errors():
        orientation = image.getexif().get(0x0112, 1)
    return orientation if orientation in UPRIGHT else 1  # some cameras write 0


def _upright(image: ImageFile.ImageFile) -> Image.Image:
    """Decode all pixels to 8-bit RGB, turned as EXIF says."""
    is_deep_color = ";16" in str(image.tile) and image.mode not in DEEP_GRAY  # loading empties the tiles
    with _pillow_warnings_as_errors() if isinstance(image, TiffImageFile) else nullcontext():
        image.load()  # of a TIFF, also the rest of the tags
    rgb = _rgb(image)
    if is_deep_color and np.asarray(rgb).max() < 64:  # Pillow keeps the upper eight bits
        raise ValueError("its 16-bit colors use less than a quarter of their range: write them as 8-bit")
    turn = UPRIGHT.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(Image.Transpose(turn))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode in DEEP_GRAY:
        levels = gray_levels(np.asarray(image))
        # White is zero there; up to eight bits Pillow handles it itself.
        is_inverted = isinstance(image, TiffImageFile) and image.tag_v2.get(262) == 0
        return Image.fromarray(255 - levels if is_inverted else levels).convert("RGB")
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        return ImageChops.invert(image).convert("RGB")  # Pillow takes every CMYK JPEG for Adobe's inverted
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return ImageCms.buildTransform(*profiles, "LAB", "RGB").apply(image)
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        black = Image.new("RGB", rgba.size)
        black.paste(rgba, mask=rgba.getchannel("A"))
        return black
    return image.convert("RGB")


def _header_problems(image: ImageFile.ImageFile, size: int) -> Iterator[str]:
    if image.width * image.height > MAX_PIXELS:
        yield TOO_LARGE
    if (frames := _frames(image)) > 1:
        yield f"it holds {frames} images: write the one that is meant to a file of its own"
    elif isinstance(image, TiffImageFile) and (problem := _tiff_problem(image, size)):
        yield problem


def _end_problem(content: bytes, image_format: str) -> str | None:
    """Return why a file is not whole, as far as its decoder would pass over it and fill the rest with gray.

    Pillow checks the checksums of a PNG, but for that of its last chunk. A TIFF is checked once it is open.
    """
    try:
        if image_format == "JPEG":
            return _jpeg_problem(content)
        if image_format == "PNG":
            with _opened(content, "PNG") as image:
                image.verify()
            return None if PNG_END in content else CUT_OFF
        if image_format in DECLARED_SIZE:
            place, rest = DECLARED_SIZE[image_format]
            return CUT_OFF if struct.unpack_from("<I", content, place)[0] + rest > len(content) else None
    except struct.error:  # a number was to be read beyond the end
        return CUT_OFF
    return None


def _jpeg_problem(content: bytes) -> str | None:
    """Walk from segment to segment up to the end mark; phones write more after it."""
    position, has_restarts, has_scan = 2, False, False
    while True:
        lead, marker = struct.unpack_from("BB", content, position)
        if lead != 0xFF:
            return "it has stray bytes between its segments"
        if marker == 0xD9:
            return None if has_scan else "it holds no image data"
        if marker <= 0xBF or 0xD0 <= marker <= 0xD8 or 0xF0 <= marker <= 0xFD:
            return f"it has the marker {marker:#x} where none may be"
        position += 1 if marker == 0xFF else 2 + struct.unpack_from(">H", content, position + 2)[0]
        if marker == 0xDD:
            has_restarts = content[position - 2 : position] != b"\0\0"
        if marker == 0xDA:
            has_scan = True
            for n_restarts, match in enumerate(JPEG_MARKER.finditer(content, position)):
                if not 0xD0 <= match[0][1] <= 0xD7:
                    position = match.start()
                    break
                if not has_restarts or match[0][1] != 0xD0 + n_restarts % 8:
                    return "its restart marks are out of order"
            else:
                return CUT_OFF


def _tiff_problem(image: TiffImageFile, size: int) -> str | None:
    tags = image.tag_v2
    is_tiled = 324 in tags
    starts, lengths = tags.get(324 if is_tiled else 273), tags.get(325 if is_tiled else 279)
    if not starts or not lengths or len(starts) != len(lengths):
        return "it does not say where its pixels are"
    if any(start + length > size for start, length in zip(starts, lengths, strict=True)):
        return CUT_OFF
    width, height = tags[256], tags[257]
    if not is_tiled and len(starts) < -(-height // min(tags.get(278, height), height)):
        return "it has fewer strips than its height needs"
    row_bits = width * sum(tags.get(258, (1,)))
    is_packed = tags.get(259, 1) != 1 or tags.get(262) == 6  # compressed, or subsampled
    return CUT_OFF if not is_packed and sum(lengths) < -(-row_bits // 8) * height else None
