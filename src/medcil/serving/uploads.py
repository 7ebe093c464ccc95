"""Read uploaded images in memory, within limits, and never write them to disk."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from medcil.errors import printable

MIB = 1 << 20
LONGEST_NAME = 120
LONGEST_VALUE = 1000
"""Bytes of a field that is not a file."""
MOST_FIELDS = 8
"""Fields of a form that are not files."""


@dataclass(frozen=True)
class UploadLimits:
    """What one request may bring; the server refuses a larger one while it arrives."""

    file_bytes: int = 32 * MIB
    request_bytes: int = 128 * MIB
    files: int = 32
    seconds: float = 120.0
    """Time for a request to arrive."""
    at_once: int = 4
    """Requests held in memory at the same time; further ones wait."""


class Refused(HTTPException):
    """A request that is answered with a 4xx status and a sentence."""


@dataclass(frozen=True)
class Upload:
    name: str
    """For people to read; never a path."""
    content: bytes
    error: str | None = None
    """Why the content was dropped."""


class _Parser(MultiPartParser):
    """Refuse a body that is too large or cut off, from within the stream: then `parse` closes all files."""

    is_complete = False

    def on_end(self) -> None:
        self.is_complete = True

    async def checked(self, body: AsyncIterator[bytes], limits: UploadLimits) -> AsyncGenerator[bytes, None]:
        n_bytes = 0
        async for chunk in body:
            n_bytes += len(chunk)
            if n_bytes > limits.request_bytes:
                raise Refused(413, f"The request has more than {limits.request_bytes:,} bytes. Send less.")
            yield chunk
        if not self.is_complete:
            raise Refused(400, "The multipart form is cut off. Send it again.")


async def read_form(request: Request, limits: UploadLimits) -> tuple[list[Upload], dict[str, str]]:
    """Return the files of a multipart form in their order, and its other fields."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refused(415, "Send the images as multipart/form-data, each in a field called `files`.")
    parser = _Parser(
        request.headers,
        request.stream(),
        max_files=limits.files,
        max_fields=MOST_FIELDS,
        max_part_size=LONGEST_VALUE,
    )
    parser.stream = parser.checked(request.stream(), limits)
    parser.spool_max_size = limits.request_bytes  # files of this size and more would go to the disk
    try:
        async with asyncio.timeout(limits.seconds):
            form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            too_many = f"The request has more than {limits.files} files. Send fewer at once."
            raise Refused(413, too_many) from None
        raise Refused(400, f"The form cannot be read: {error.message}") from None
    except TimeoutError:
        raise Refused(408, f"The request took longer than {limits.seconds:g} seconds. Send less.") from None
    try:
        return await _content(form, limits)
    finally:
        await form.close()


async def _content(form: FormData, limits: UploadLimits) -> tuple[list[Upload], dict[str, str]]:
    files, fields = list[Upload](), dict[str, str]()
    for field, value in form.multi_items():
        if isinstance(value, str):
            fields[field] = value
        elif field != "files":
            raise Refused(400, "Files belong in the field `files`; another field holds one.")
        elif (value.size or 0) > limits.file_bytes:
            too_large = f"It has more than {limits.file_bytes:,} bytes. Shrink it."
            files.append(Upload(shown_name(value.filename), b"", too_large))
        else:
            files.append(Upload(shown_name(value.filename), await value.read()))
    if not files:
        raise Refused(400, "The request holds no image: send some in the field `files`.")
    return files, fields


def shown_name(sent: str | None) -> str:
    """Return the last part of the name that a browser sent, without anything a screen would obey."""
    last = (sent or "").replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = printable(last.strip()[:LONGEST_NAME])
    return name if name.strip(".") else "image"
