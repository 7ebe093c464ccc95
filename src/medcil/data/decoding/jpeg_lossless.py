"""Check a JPEG Lossless stream strictly before GDCM decodes it: GDCM ends the process on a damaged header.

ITU-T T.81, annexes B and H. A stream is a start, segments of a marker and a length, and after the segment
"start of scan" the compressed bits, in which 0xFF is followed by 0 or by a restart marker.
"""

import re
import struct
from typing import NamedTuple

START, END = b"\xff\xd8", b"\xff\xd9"
SOF3, DHT, SOS, DRI, COMMENT = 0xC3, 0xC4, 0xDA, 0xDD, 0xFE
APPLICATION = range(0xE0, 0xF0)
STRAY_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)


class Frame(NamedTuple):
    rows: int
    columns: int
    bits: int
    components: tuple[int, ...]


def read_frame(stream: bytes) -> Frame:
    """Return what the headers announce; raise ValueError or struct.error where the stream is unsound."""
    _require(stream.startswith(START))
    place, frame, tables = 2, None, set[int]()
    while True:
        mark, marker, length = struct.unpack_from(">BBH", stream, place)
        segment = stream[place + 4 : place + 2 + length]
        _require(mark == 0xFF and len(segment) == length - 2)
        place += 2 + length
        if marker == SOF3:
            _require(frame is None)
            frame = _frame(segment)
        elif marker == DHT:
            tables |= _tables(segment)
        elif marker == SOS:
            _require(frame is not None)
            assert frame is not None
            _check_scan(segment, frame, tables)
            _check_bits(stream[place:])
            return frame
        else:
            _require(marker in (DRI, COMMENT, *APPLICATION) and (marker != DRI or length == 4))


def _frame(segment: bytes) -> Frame:
    bits, rows, columns, n = struct.unpack_from(">BHHB", segment)
    components = tuple(segment[6::3])
    _require(n in (1, 3) and len(segment) == 6 + 3 * n and len(set(components)) == n)
    _require(2 <= bits <= 16 and set(segment[7::3]) == {0x11})
    return Frame(rows, columns, bits, components)


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


def _check_scan(segment: bytes, frame: Frame, tables: set[int]) -> None:
    n = len(frame.components)
    _require(len(segment) == 4 + 2 * n and segment[0] == n)
    _require(tuple(segment[1 : 1 + 2 * n : 2]) == frame.components)
    _require(all(table & 15 == 0 and table >> 4 in tables for table in segment[2 : 2 + 2 * n : 2]))
    predictor, last, shift = segment[-3:]
    _require(1 <= predictor <= 7 and last == 0 and shift < min(16, frame.bits))


def _check_bits(rest: bytes) -> None:
    end = rest.rfind(END)
    _require(end >= 0 and not rest[end + 2 :].strip(b"\0") and STRAY_MARKER.search(rest[: end + 1]) is None)
    _require(not rest[:end].endswith(b"\xff"))


def _require(condition: bool) -> None:  # noqa: FBT001
    if not condition:
        raise ValueError("the JPEG Lossless stream is damaged")
