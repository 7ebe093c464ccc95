"""Files in a folder or an archive, hostile until proven otherwise. Nothing is unpacked to disk."""

import bz2
import gzip
import lzma
import os
import re
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from medcil.data.image_table import Files, MemoryFiles
from medcil.errors import InvalidInput

BLOCK, HEADER_BYTES = 512, 1 << 20  # of a tar; what a long name may take
EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
REGULAR_ONLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, no pipe
DAMAGED = (
    *(OSError, EOFError, ValueError, IndexError, RecursionError, MemoryError, NotImplementedError),
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
"""What the libraries raise for damaged archives."""
Place = TypeVar("Place")


@dataclass(frozen=True)
class Limits:
    members: int = 2_000_000
    member_bytes: int = 256 << 20
    total_bytes: int = 1 << 40
    memory_bytes: int = 4 << 30
    """What a compressed tar may unpack to: it can be read in one go only, so its files stay in memory."""
    ratio: int = 200
    ratio_from_bytes: int = 64 << 20
    """Below, any ratio of unpacked to packed bytes is fine: a few blank images pack 1000 to 1."""


LIMITS = Limits()  # enforced while reading too, because a header may be wrong


def open_files(path: Path, *, limits: Limits = LIMITS) -> Files:
    """Open a folder, a zip, or a tar, plain or compressed; told by their content, not by their name."""
    try:
        if path.is_dir():
            return FolderFiles(path, limits)
        with path.open("rb") as file:
            start = file.read(BLOCK)
        if start.startswith(b"PK"):
            return ZipFiles(path, limits)
        for magic, unpack in COMPRESSED.items():
            if start.startswith(magic):
                with unpack(path) as unpacked:
                    return MemoryFiles(_read_compressed_tar(unpacked, path, limits))
        if start[257:262] == b"ustar" or path.suffix == ".tar":
            return TarFiles(path, limits)
    except UnicodeDecodeError as error:
        _refuse(path, error.object.rstrip(b"\0"), "has a name that is not UTF-8")
    except DAMAGED as error:
        raise InvalidInput(f"{path} is absent, unreadable or damaged ({error}); download it again.") from None
    raise InvalidInput(f"{path} is neither a folder nor a zip nor a tar; give one of these.")


class _Placed(Generic[Place]):
    def __init__(self, path: Path, limits: Limits = LIMITS) -> None:
        self.path, self.limits = path, limits
        self.places = _collected(self._scan(), path, limits)

    def _scan(self) -> Iterator[tuple[str, Place]]:
        raise NotImplementedError

    def names(self) -> Sequence[str]:
        return list(self.places)

    def _find(self, name: str) -> Place:
        if name not in self.places:
            raise InvalidInput(f"{self.path} has no file {name!r}; add it, or leave it out of the list.")
        return self.places[name]


class FolderFiles(_Placed[Path]):
    """The regular files below a folder; a link anywhere in it is refused."""

    def _scan(self) -> Iterator[tuple[str, Path]]:
        folders = [self.path]
        while folders:
            for path in folders.pop().iterdir():
                name, mode = path.relative_to(self.path).as_posix(), path.lstat().st_mode
                if _plain_name(name, self.path) is None:
                    continue
                if stat.S_ISDIR(mode):
                    folders.append(path)
                elif stat.S_ISREG(mode):
                    yield name, path
                else:
                    _refuse(self.path, name, "is a link" if stat.S_ISLNK(mode) else "is no regular file")

    def read(self, name: str) -> bytes:
        path = self._find(name)
        try:
            with open(path, "rb", opener=lambda path, flags: os.open(path, flags | REGULAR_ONLY)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # what was opened
                    _refuse(self.path, name, "is no regular file any more")
                content = file.read(self.limits.member_bytes + 1)
        except OSError as error:
            reason = "it is no regular file any more" if path.is_symlink() else error.strerror
            raise InvalidInput(f"{path} cannot be read ({reason}); make it readable.") from None
        _check_size(len(content), name, self.path, self.limits)
        return content


class TarFiles(_Placed[tuple[int, int]]):
    """A plain tar, by offset and size. Each read opens it again: threads must not share a position."""

    def _scan(self) -> Iterator[tuple[str, tuple[int, int]]]:
        with tarfile.open(self.path, "r:", **STRICT) as archive:
            for member in _tar_members(archive, self.path, self.limits):
                yield member.name, (member.offset_data, member.size)

    def read(self, name: str) -> bytes:
        offset, size = self._find(name)
        with self.path.open("rb") as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise InvalidInput(f"{self.path} is cut off; download it again.")
        return content


class ZipFiles(_Placed[zipfile.ZipInfo]):
    """A zip of stored or deflated members."""

    def _scan(self) -> Iterator[tuple[str, zipfile.ZipInfo]]:
        self._archive = zipfile.ZipFile(self.path, metadata_encoding="utf-8")  # threads may share it
        members, end = self._archive.infolist(), self._archive.start_dir
        for member in sorted(members, key=lambda member: member.header_offset, reverse=True):
            if member.header_offset + 30 + member.compress_size > end:
                _refuse(self.path, member.filename, "overlaps what comes after it")
            end = member.header_offset
            name, mode = member.orig_filename, member.external_attr >> 16
            self._check(name, mode, member)
            if name.endswith("/") or stat.S_ISDIR(mode):
                _plain_name(name, self.path)
            else:
                yield name, member
        _check_total(sum(m.file_size for m in members), self.limits.total_bytes, self.path, self.limits)

    def _check(self, name: str, mode: int, member: zipfile.ZipInfo) -> None:
        if member.flag_bits & 0x2041:
            _refuse(self.path, name, "is encrypted; write the zip without a password")
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            _refuse(self.path, name, "is a link" if stat.S_ISLNK(mode) else "is no regular file")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            _refuse(self.path, name, "is packed in an unusual way; write the zip with deflate")
        _check_size(max(member.file_size, member.compress_size // 2), name, self.path, self.limits)

    def read(self, name: str) -> bytes:
        member = self._find(name)
        content = None
        with suppress(*DAMAGED), self._archive.open(member) as file:
            content = file.read(member.file_size + 1)  # without a number it unpacks all that is there
        if content is None or len(content) != member.file_size:
            _refuse(self.path, name, "has not the content that the archive's directory promises")
        return content


class _TarHeader(tarfile.TarInfo):
    """A header of a tar: a damaged one is not taken for the end, and a long one not read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_TarHeader":
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(BLOCK):  # the end
                raise
            raise tarfile.ReadError("it is cut off" if len(buf) < BLOCK else str(error)) from None
        if header.type in EXTENSIONS and not 0 <= header.size <= HEADER_BYTES:
            raise tarfile.ReadError(f"the file {header.name!r} in it has a header that is too long")
        return header


STRICT: dict[str, Any] = {"tarinfo": _TarHeader, "encoding": "utf-8", "errors": "strict"}


class _Counted:
    """An unpacked stream, read up to the limits."""

    def __init__(self, file: Any, path: Path, limits: Limits) -> None:
        self.file, self.path, self.limits, self.n_read = file, path, limits, 0

    def read(self, size: int = -1, /) -> bytes:
        content: bytes = self.file.read(size)
        self.n_read += len(content)
        _check_total(self.n_read, self.limits.memory_bytes, self.path, self.limits)
        return content


def _read_compressed_tar(unpacked: Any, path: Path, limits: Limits) -> dict[str, bytes]:
    file: Any = _Counted(unpacked, path, limits)
    with tarfile.open(fileobj=file, mode="r|", **STRICT) as archive:
        members = _tar_members(archive, path, limits)
        files = ((member.name, archive.extractfile(member)) for member in members)
        contents = ((name, content.read()) for name, content in files if content is not None)
        collected = _collected(contents, path, limits)
    while file.read(1 << 20):  # the checksum comes last
        pass
    return collected


def _tar_members(archive: tarfile.TarFile, path: Path, limits: Limits) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        if member.isdir():
            _plain_name(member.name, path)
            continue
        is_sparse = member.issparse() or any(key.startswith("GNU.sparse") for key in member.pax_headers)
        if is_sparse or not member.isreg():
            is_link = member.issym() or member.islnk()
            _refuse(path, member.name, "is a link" if is_link else "is no regular file")
        _check_size(member.size, member.name, path, limits)
        yield member


def _plain_name(name: str, path: Path) -> str | None:
    """Return the one form of a name; None for what operating systems leave behind."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        _refuse(path, name, "has control characters in its name, or is not UTF-8")
    if name.startswith("/") or "\\" in name or ".." in parts or re.match("[A-Za-z]:", name):
        _refuse(path, name, "has a name that leads elsewhere")
    is_ignored = not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return None if is_ignored else unicodedata.normalize("NFC", "/".join(parts))


def _collected(found: Iterable[tuple[str, Place]], path: Path, limits: Limits) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for n, (name, place) in enumerate(found):
        if n >= limits.members:
            raise InvalidInput(f"{path} holds more than {limits.members:,} files; divide it.")
        plain = _plain_name(name, path)
        if plain in places:
            _refuse(path, name, "is there twice")
        if plain is not None:
            places[plain] = place
    return dict(sorted(places.items()))


def _check_size(size: int, name: str, path: Path, limits: Limits) -> None:
    if not 0 <= size <= limits.member_bytes:
        _refuse(path, name, f"has more than {limits.member_bytes:,} bytes")


def _check_total(unpacked: int, allowed: int, path: Path, limits: Limits) -> None:
    if unpacked > max(limits.ratio_from_bytes, limits.ratio * path.stat().st_size):
        raise InvalidInput(f"{path} unpacks to {limits.ratio} times its size; download it again.")
    if unpacked > allowed:
        raise InvalidInput(f"{path} unpacks to more than {allowed:,} bytes; unpack it and give the folder.")


def _refuse(path: Path, name: str | bytes, reason: str) -> NoReturn:
    raise InvalidInput(f"{path}: the file {name!r} in it {reason}; repair or remove it.")
