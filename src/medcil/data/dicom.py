"""A DICOM file becomes the 8-bit pixels that a viewer shows first. Tables: docs/reference/data-formats.md.

Only tags about pixels are read, and no message repeats what a library or the file says, so that nothing of a
patient can slip into one.
"""

import importlib.util
import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from medcil.data.decoding import (
    CUT_OFF,
    FILTERS_LOCK,
    MAX_PIXELS,
    TOO_LARGE,
    ImageFacts,
    is_dicom,
)

if TYPE_CHECKING:
    from pydicom import Dataset

GRAY = ("MONOCHROME1", "MONOCHROME2")
COLOR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
PALETTE = "PALETTE COLOR"
CHANNELS = [
    f"{color}PaletteColorLookupTable{part}"
    for color in ("Red", "Green", "Blue")
    for part in ("Descriptor", "Data")
]
TAGS = [
    "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "BitsAllocated",
    "BitsStored", "HighBit", "PixelRepresentation", "NumberOfFrames", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "PixelData",
    "PixelPaddingValue", "PixelPaddingRangeLimit",
    *CHANNELS,
]  # fmt: skip
DEFLATED = b"1.2.840.10008.1.2.1.99"
ITEMS_END = b"\xfe\xff\xdd\xe0\0\0\0\0"
J2K_START = b"\xff\x4f\xff\x51"
JPEG_START = b"\xff\xd8\xff"
JPEG_SIZES = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
"""Second bytes of the markers that announce a frame's size, JPEG-LS's the last."""
PLUGINS = {
    "1.2.840.10008.1.2.4.50": "pillow",  # JPEG baseline
    "1.2.840.10008.1.2.4.51": "pillow",  # JPEG extended, of 8 bits; those of 12 need libjpeg
    "1.2.840.10008.1.2.4.57": "gdcm",  # JPEG Lossless
    "1.2.840.10008.1.2.4.70": "gdcm",  # JPEG Lossless, first-order prediction
    "1.2.840.10008.1.2.4.80": "pyjpegls",  # JPEG-LS Lossless
    "1.2.840.10008.1.2.4.81": "pyjpegls",  # JPEG-LS Near-Lossless
    "1.2.840.10008.1.2.4.90": "pylibjpeg",  # JPEG 2000 Lossless
    "1.2.840.10008.1.2.4.91": "pylibjpeg",  # JPEG 2000
    "1.2.840.10008.1.2.4.201": "pylibjpeg",  # High-Throughput JPEG 2000
    "1.2.840.10008.1.2.4.202": "pylibjpeg",
    "1.2.840.10008.1.2.4.203": "pylibjpeg",
    "1.2.840.10008.1.2.5": "pydicom",  # run lengths
}
"""One decoder for each way to compress, so that the pixels do not depend on what else is installed."""
JPEG_EXTENDED = "1.2.840.10008.1.2.4.51"

START, END = b"\xff\xd8", b"\xff\xd9"
SOF3, DHT, SOS, DRI, COMMENT = 0xC3, 0xC4, 0xDA, 0xDD, 0xFE
APPLICATION = range(0xE0, 0xF0)
STRAY_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)


class _Reason(Exception):
    """In our own words."""


def examine_dicom(content: bytes, *, decode: bool) -> tuple[ImageFacts, Image.Image | None]:
    facts, picture = ImageFacts("DICOM"), None
    problems: list[str] = []
    try:
        dataset = _read(content)
        problems += _problems(dataset)
        facts = replace(
            facts,
            mode="" if problems else str(dataset.PhotometricInterpretation),
            width=int(dataset.get("Columns") or 0),
            height=int(dataset.get("Rows") or 0),
        )
        if decode and not problems:
            picture = Image.fromarray(_levels(dataset)).convert("RGB")
    except _Reason as reason:
        problems.append(str(reason))
    except Exception:
        problems.append("it is damaged")
    return replace(facts, problems=tuple(problems)), picture


def _read(content: bytes) -> "Dataset":
    if not is_dicom(content):
        raise _Reason("it has no DICM mark after 128 bytes")
    if importlib.util.find_spec("pydicom") is None:
        raise _Reason("pydicom is missing: pip install 'medcil[dicom]'")
    if DEFLATED in content:
        raise _Reason("it is deflated as a whole: convert it to Explicit VR Little Endian")
    from pydicom import dcmread

    with _quiet():
        dataset = dcmread(io.BytesIO(content), specific_tags=list(TAGS))
        list(dataset.iterall())  # values are converted, and warned of, where they are first looked at
    if "PixelData" in dataset and dataset["PixelData"].is_undefined_length:
        end = content.find(dataset.PixelData) + len(dataset.PixelData)
        if not content.startswith(ITEMS_END, end):  # pydicom warns and goes on
            raise _Reason(CUT_OFF)
    return dataset


@contextmanager
def _quiet() -> Iterator[None]:
    with FILTERS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"pydicom\.")
        yield


def _problems(dataset: "Dataset") -> Iterator[str]:
    n_frames = int(dataset.get("NumberOfFrames") or 1)
    if not dataset.get("PixelData"):
        yield "it has no pixel data" if "Rows" not in dataset else f"{CUT_OFF}, or it has no pixel data"
    elif n_frames > 1:
        yield f"it holds {n_frames} frames: write the one that is meant to a file of its own"
    elif dataset.Rows * dataset.Columns > MAX_PIXELS:
        yield TOO_LARGE
    elif dataset.PhotometricInterpretation not in (*GRAY, *COLOR, PALETTE):
        yield "its photometric interpretation is not known"
    elif dataset.BitsAllocated not in (8, 16) or not 1 <= dataset.BitsStored <= dataset.BitsAllocated:
        yield "its pixels have neither 8 nor up to 16 bits"
    elif problem := _encoding_problem(dataset):
        yield problem


def _encoding_problem(dataset: "Dataset") -> str | None:
    from pydicom.encaps import get_frame

    syntax = dataset.file_meta.get("TransferSyntaxUID")
    if syntax is None or syntax.is_private or not syntax.is_transfer_syntax:
        return "its transfer syntax is not known"
    if syntax.is_encapsulated:
        if syntax not in PLUGINS:
            return f"{syntax.name} cannot be decoded: convert it to Explicit VR Little Endian"
        if _is_12_bit_jpeg(dataset) and importlib.util.find_spec("libjpeg") is None:
            return (
                "JPEG of 12 bits needs a decoder: pip install pylibjpeg-libjpeg, or convert it to "
                "Explicit VR Little Endian"
            )
        if not _is_installed(PLUGINS[syntax]):
            return f"no decoder for {syntax.name} is installed: pip install 'medcil[dicom]', or convert it"
        frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
        size = lossless_size(frame) if PLUGINS[syntax] == "gdcm" else _compressed_size(frame)
        if size is not None and size != (dataset.Rows, dataset.Columns):
            return "its compressed pixels are not of the size it announces"
        return None
    n_values = dataset.Rows * dataset.Columns * dataset.SamplesPerPixel
    if dataset.PhotometricInterpretation == "YBR_FULL_422":
        n_values = n_values * 2 // 3
    n_bytes = n_values * dataset.BitsAllocated // 8
    if len(dataset.PixelData) < n_bytes:
        return CUT_OFF
    dataset.PixelData = dataset.PixelData[: n_bytes + n_bytes % 2]  # some devices write more
    return None


def _is_12_bit_jpeg(dataset: "Dataset") -> bool:
    return dataset.file_meta.TransferSyntaxUID == JPEG_EXTENDED and dataset.BitsStored > 8


def _is_installed(plugin: str) -> bool:
    modules = {"pyjpegls": "jpeg_ls", "pylibjpeg": "openjpeg", "pillow": "PIL"}
    return importlib.util.find_spec(modules.get(plugin, plugin)) is not None


def _compressed_size(frame: bytes) -> tuple[int, int] | None:
    """Return the rows and columns of compressed pixels; None where no header tells them.

    A small image may announce itself and a huge one follow.
    """
    start = frame.find(J2K_START)
    if start >= 0:
        right, bottom, left, top = struct.unpack_from(">4I", frame, start + 8)
        return bottom - top, right - left
    place = frame.find(JPEG_START) + 2
    while place >= 2 and place + 9 <= len(frame) and frame[place] == 0xFF:
        marker, length = struct.unpack_from(">xBH", frame, place)
        if marker in JPEG_SIZES:
            rows, columns = struct.unpack_from(">HH", frame, place + 5)
            return rows, columns
        place += 2 + length
    return None


def _decoded(dataset: "Dataset") -> Num[np.ndarray, "height width *channels"]:
    from pydicom.pixels.utils import pixel_array

    plugin = PLUGINS.get(dataset.file_meta.TransferSyntaxUID, "")
    if _is_12_bit_jpeg(dataset):
        plugin = "pylibjpeg"  # with its part libjpeg
    if plugin == "gdcm":
        import gdcm

        for silence in (gdcm.Trace.DebugOff, gdcm.Trace.WarningOff, gdcm.Trace.ErrorOff):
            silence()  # it writes to the terminal
    return np.asarray(pixel_array(dataset, decoding_plugin=plugin))


def _levels(dataset: "Dataset") -> UInt8[np.ndarray, "height width *channels"]:
    from pydicom.pixels.processing import apply_color_lut

    stored = _decoded(dataset)
    if dataset.PhotometricInterpretation in COLOR:
        return _as_bytes(stored / (2**dataset.BitsStored - 1))
    if dataset.PhotometricInterpretation == PALETTE:
        colors = apply_color_lut(stored, dataset)
        return _as_bytes(colors / np.iinfo(colors.dtype).max)
    levels = _gray(stored, dataset)
    return 255 - levels if dataset.PhotometricInterpretation == "MONOCHROME1" else levels


def _gray(stored: Num[np.ndarray, "height width"], dataset: "Dataset") -> UInt8[np.ndarray, "height width"]:
    """Apply the modality table or rescaling, then the VOI table or window, and return 8 bits."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    values = apply_modality_lut(stored, dataset)
    if dataset.get("VOILUTSequence"):
        bits = dataset.VOILUTSequence[0].LUTDescriptor[2]
        return _as_bytes(apply_voi(np.rint(values).astype(np.int64), dataset) / (2**bits - 1))
    center, width = (_first(dataset.get(tag)) for tag in ("WindowCenter", "WindowWidth"))
    if center is not None and width is not None:
        return _as_bytes(_windowed(values, center, width, str(dataset.get("VOILUTFunction") or "LINEAR")))
    if dataset.get("ModalityLUTSequence"):
        return _as_bytes(values / (2 ** dataset.ModalityLUTSequence[0].LUTDescriptor[2] - 1))
    levels = _full_range(stored, dataset)
    return 255 - levels if float(dataset.get("RescaleSlope") or 1) < 0 else levels


def _full_range(stored: Num[np.ndarray, "h w"], dataset: "Dataset") -> UInt8[np.ndarray, "h w"]:
    """Map the values that occur to black through white, as viewers do where there is no window.

    Unsigned values of up to 8 bits are ready for a screen and stay as they are. Padding around the image does
    not count.
    """
    bits = dataset.BitsStored
    if bits <= 8 and not dataset.PixelRepresentation:
        return _as_bytes(stored / (2**bits - 1))
    padding = dataset.get("PixelPaddingValue")
    values = stored
    if padding is not None:
        limit = dataset.get("PixelPaddingRangeLimit", padding)
        is_image = (stored < min(padding, limit)) | (stored > max(padding, limit))
        values = stored[is_image] if is_image.any() else stored
    low, high = int(values.min()), int(values.max())
    return _as_bytes((stored.astype(np.int64) - low) / max(1, high - low))


def _windowed(
    values: Num[np.ndarray, "h w"], center: float, width: float, function: str
) -> Num[np.ndarray, "h w"]:
    """Map the window to 0 through 1, as part 3 of the standard has it (C.11.2.1.2 and C.11.2.1.3)."""
    if width <= 0 or (function == "LINEAR" and width < 1) or not np.isfinite([center, width]).all():
        raise _Reason("its window has no width")
    if function == "LINEAR_EXACT":
        return (values - center) / width + 0.5
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
    if function != "LINEAR":
        raise _Reason("the function of its window is not known")
    if width == 1:
        return (values > center - 0.5).astype(np.float64)
    return (values - (center - 0.5)) / (width - 1) + 0.5


def _as_bytes(shares: Num[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    return np.asarray(np.floor(255 * np.clip(shares, 0, 1) + 0.5), dtype=np.uint8)


def _first(value: Any) -> float | None:
    """Return the value of the first window, which viewers show first."""
    values = [value] if isinstance(value, int | float | str) else list(value or [])
    return None if not values or values[0] in ("", None) else float(values[0])


def lossless_size(stream: bytes) -> tuple[int, int]:
    """Return rows and columns of a JPEG Lossless stream; ValueError or struct.error where it is unsound.

    GDCM ends the process on a damaged header, so the stream is checked strictly before. ITU-T T.81, annexes B
    and H: a stream is a start, segments of a marker and a length, and after the segment "start of scan" the
    compressed bits, in which 0xFF is followed by 0 or by a restart marker.
    """
    _require(stream.startswith(START))
    place, frame, tables = 2, b"", set[int]()
    while True:
        mark, marker, length = struct.unpack_from(">BBH", stream, place)
        segment = stream[place + 4 : place + 2 + length]
        _require(mark == 0xFF and len(segment) == length - 2)
        place += 2 + length
        if marker == SOF3:
            _require(not frame)
            frame = segment
            _check_frame(frame)
        elif marker == DHT:
            tables |= _tables(segment)
        elif marker == SOS:
            _check_scan(segment, frame, tables)
            _check_bits(stream[place:])
            rows, columns = struct.unpack_from(">xHH", frame)
            return rows, columns
        else:
            _require(marker in (DRI, COMMENT, *APPLICATION) and (marker != DRI or length == 4))


def _check_frame(segment: bytes) -> None:
    """Check bits, rows, columns and the number of components, then three bytes for each component."""
    bits, n = segment[0], segment[5]
    _require(n in (1, 3) and len(segment) == 6 + 3 * n and len(set(segment[6::3])) == n)
    _require(2 <= bits <= 16 and set(segment[7::3]) == {0x11})


def _tables(segment: bytes) -> set[int]:
    """Return the numbers of the Huffman tables, each with as many codes as fit their lengths."""
    numbers = set()
    while segment:
        number, counts = segment[0], segment[1:17]
        values, segment = segment[17 : 17 + sum(counts)], segment[17 + sum(counts) :]
        code = 0
        for length, count in enumerate(counts, start=1):
            code = 2 * code + count
            _require(code <= 1 << length)
        _require(len(counts) == 16 and 0 < len(values) == sum(counts) and max(values) <= 16 and number <= 3)
        numbers.add(number)
    return numbers


def _check_scan(segment: bytes, frame: bytes, tables: set[int]) -> None:
    bits, n = frame[0], frame[5]
    _require(len(segment) == 4 + 2 * n and segment[0] == n and segment[1 : 1 + 2 * n : 2] == frame[6::3])
    _require(all(table & 15 == 0 and table >> 4 in tables for table in segment[2 : 2 + 2 * n : 2]))
    predictor, last, shift = segment[-3:]
    _require(1 <= predictor <= 7 and last == 0 and shift < min(16, bits))


def _check_bits(rest: bytes) -> None:
    end = rest.rfind(END)
    _require(end >= 0 and not rest[end + 2 :].strip(b"\0") and STRAY_MARKER.search(rest[: end + 1]) is None)
    _require(not rest[:end].endswith(b"\xff"))


def _require(condition: bool) -> None:  # noqa: FBT001
    if not condition:
        raise ValueError("the JPEG Lossless stream is damaged")
