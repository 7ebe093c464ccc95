"""Files that a request brings: read in memory, counted while they come in, and never written anywhere."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from medcil.errors import printable

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MIB = 1 << 20
LONGEST_NAME = 120
LONGEST_VALUE = 1000
MOST_FIELDS = 8
"""Parts of a form that are no files."""


@dataclass(frozen=True)
class Limits:
    """Of one request; beyond them it is refused, as soon as that is known."""

    file_bytes: int = 32 * MIB
    request_bytes: int = 128 * MIB
    files: int = 32
    seconds: float = 120.0
    """In which a request must have come in whole."""
    at_once: int = 4
    """Requests that are held in memory together; further ones wait."""


class Refused(Exception):
    """A request that is answered with a 4xx status and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Upload:
    name: str
    """For people to read; never a path."""
    content: bytes
    error: str | None = None
    """Why the content was not kept."""


@dataclass(frozen=True)
class Form:
    files: tuple[Upload, ...]
    fields: Mapping[str, str]


async def read_form(content_type: str, body: AsyncIterator[bytes], limits: Limits) -> Form:
    """The files of a multipart form, in their order, and its other fields."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise Refused(415, "Send the images as multipart/form-data, each in a field called `files`.")
    try:
        reader = _FormReader(options.get(b"boundary", b""), limits)
        async with asyncio.timeout(limits.seconds):
            async for chunk in body:
                reader.write(chunk)
    except FormParserError:
        raise Refused(400, "The request is no sound multipart form; send it again.") from None
    except TimeoutError:
        raise Refused(408, f"The request took longer than {limits.seconds:g} seconds; send less.") from None
    return reader.form()


class _FormReader:
    """Takes the pieces as they arrive. A file that is too large is dropped, the others are kept."""

    def __init__(self, boundary: bytes, limits: Limits) -> None:
        if not boundary:
            raise Refused(400, "The multipart form has no boundary.")
        self.limits = limits
        self.files: list[Upload] = []
        self.fields: dict[str, str] = {}
        self.n_bytes, self.n_fields = 0, 0
        self.is_whole = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_part_data": self._data,
            "on_part_end": self._end_part,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end,
        }
        self.parser = MultipartParser(boundary, callbacks)

    def write(self, chunk: bytes) -> None:
        self.n_bytes += len(chunk)
        if self.n_bytes > self.limits.request_bytes:
            raise Refused(413, f"The request has more than {self.limits.request_bytes:,} bytes; send less.")
        self.parser.write(chunk)

    def form(self) -> Form:
        if not self.is_whole:
            raise Refused(400, "The multipart form is cut off; send it again.")
        return Form(tuple(self.files), self.fields)

    def _begin_part(self) -> None:
        self.header, self.value = b"", b""
        self.disposition = ""
        self.content, self.n_content = bytearray(), 0

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def _end_header(self) -> None:
        if self.header.lower() == b"content-disposition":
            self.disposition = self.value.decode("latin-1")
        self.header, self.value = b"", b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self.disposition)
        if kind != b"form-data" or b"name" not in options:
            raise Refused(400, "A part of the multipart form has no name.")
        self.field = options[b"name"].decode(errors="replace")
        self.file_name = options.get(b"filename")
        if self.file_name is None:
            self.n_fields += 1
            if self.n_fields > MOST_FIELDS:
                raise Refused(400, f"The form has more than {MOST_FIELDS} fields that are no files.")
        elif self.field != "files":
            raise Refused(400, "Files go into the field `files`; another field holds one.")
        elif len(self.files) >= self.limits.files:
            raise Refused(413, f"The request has more than {self.limits.files} files; send fewer at once.")

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.n_content += end - start
        allowed = LONGEST_VALUE if self.file_name is None else self.limits.file_bytes
        if self.n_content <= allowed:
            self.content += data[start:end]
        elif self.file_name is None:
            raise Refused(400, f"A field of the form has more than {LONGEST_VALUE:,} bytes.")
        else:
            self.content.clear()

    def _end_part(self) -> None:
        if self.file_name is None:
            self.fields[self.field] = self.content.decode(errors="replace")
            return
        is_large = self.n_content > self.limits.file_bytes
        error = f"It has more than {self.limits.file_bytes:,} bytes; shrink it." if is_large else None
        self.files.append(Upload(shown_name(self.file_name), bytes(self.content), error))

    def _end(self) -> None:
        self.is_whole = True


def shown_name(sent: bytes) -> str:
    """The last part of what was sent as a name, with nothing in it that a screen would obey."""
    last = sent.decode(errors="replace").replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = printable(last.strip()[:LONGEST_NAME])
    return name if name.strip(".") else "image"
