"""Whether an image file goes on to its end: what a decoder passes over, as it fills the rest with gray."""

import re
import struct
import zlib

from PIL.TiffImagePlugin import TiffImageFile

CUT_OFF = "the file ends before the image does"
_MARKER = re.compile(rb"\xff[^\x00\xff]")


def end_problem(content: bytes, image_format: str) -> str | None:
    """A TIFF is only told once it is opened: `tiff_problem`."""
    checks = {"JPEG": _jpeg_problem, "PNG": _png_problem, "BMP": _bmp_problem, "WEBP": _webp_problem}
    try:
        check = checks.get(image_format)
        return check(content) if check else None
    except struct.error:  # a number was to be read beyond the end
        return CUT_OFF


def _jpeg_problem(content: bytes) -> str | None:
    """Walks from segment to segment up to the end mark; phones write more after it."""
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
            for n_restarts, match in enumerate(_MARKER.finditer(content, position)):
                if not 0xD0 <= match[0][1] <= 0xD7:
                    position = match.start()
                    break
                if not has_restarts or match[0][1] != 0xD0 + n_restarts % 8:
                    return "its restart marks are out of order"
            else:
                return CUT_OFF


def _png_problem(content: bytes) -> str | None:
    position, has_data = 8, False
    while True:
        length, kind = struct.unpack_from(">I4s", content, position)
        end = position + 12 + length
        (checksum,) = struct.unpack_from(">I", content, end - 4)
        if zlib.crc32(memoryview(content)[position + 4 : end - 4]) != checksum:
            return f"the checksum of its {kind.decode('ascii', 'replace')!r} chunk is wrong"
        has_data |= kind == b"IDAT"
        if kind == b"IEND":
            return None if has_data else "it holds no image data"
        position = end


def _bmp_problem(content: bytes) -> str | None:
    declared, _, start, header = struct.unpack_from("<4I", content, 2)
    width, height, _, bits = struct.unpack_from("<4H" if header == 12 else "<iiHH", content, 18)
    compression = 0 if header == 12 else struct.unpack_from("<I", content, 30)[0]
    n_bytes = (width * bits + 31) // 32 * 4 * abs(height) if compression in (0, 3, 6) else 0
    return CUT_OFF if max(declared, start + n_bytes) > len(content) else None


def _webp_problem(content: bytes) -> str | None:
    end, position = 8 + struct.unpack_from("<I", content, 4)[0], 12
    while position < end <= len(content):
        (length,) = struct.unpack_from("<I", content, position + 4)
        position += 8 + length + length % 2
    return CUT_OFF if position > end or end > len(content) else None


def tiff_problem(image: TiffImageFile, size: int) -> str | None:
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
