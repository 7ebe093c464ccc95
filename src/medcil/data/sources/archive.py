"""Files in a folder or an archive, hostile until proven otherwise. Nothing is unpacked to disk."""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from medcil.data.image_table import Files, MemoryFiles
from medcil.errors import InvalidInput

BLOCK, HEADER_BYTES = 512, 1 << 20  # of a tar; what a long name may take
EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
REGULAR_ONLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, no pipe
PAX_RECORD = re.compile(rb"([1-9]\d{0,6}) ([^=]+)=")
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
    """A folder, a zip, or a tar, plain or compressed; told by their content, not by their name."""
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError) as error:
        raise InvalidInput(f"{path} is absent, unreadable or damaged ({error}); download it again.") from None
    raise InvalidInput(f"{path} is neither a folder nor a zip nor a tar; give one of these.")


class _Placed(Generic[Place]):
    """Opened again for each read, so that threads and processes do not move each other's position."""

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
    """A plain tar, by offset and size."""

    def _scan(self) -> Iterator[tuple[str, tuple[int, int]]]:
        end = self.path.stat().st_size
        with self.path.open("rb") as file:
            for name, size in _tar_members(lambda n: _exactly(file, n, self.path), self.path, self.limits):
                offset = file.tell()
                yield name, (offset, size)
                file.seek(min(offset + _padded(size), end))  # at the end the next header is found missing

    def read(self, name: str) -> bytes:
        offset, size = self._find(name)
        with self.path.open("rb") as file:
            file.seek(offset)
            return _exactly(file, size, self.path)


class ZipFiles(_Placed[zipfile.ZipInfo]):
    """A zip of stored or deflated members."""

    def _scan(self) -> Iterator[tuple[str, zipfile.ZipInfo]]:
        try:
            with zipfile.ZipFile(self.path, metadata_encoding="utf-8") as archive:
                members, end = archive.infolist(), archive.start_dir
        except UnicodeDecodeError as error:
            _refuse(self.path, error.object, "has a name that is not UTF-8")
        except Exception as error:  # a damaged directory makes zipfile raise errors of many kinds
            raise InvalidInput(f"{self.path} cannot be read as a zip ({error}); download it again.") from None
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
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = _exactly(file, 30, self.path)
            file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:], "little"), 1)
            content = _exactly(file, member.compress_size, self.path)
        if member.compress_type == zipfile.ZIP_DEFLATED:
            try:
                content = zlib.decompressobj(-15).decompress(content, member.file_size + 1)
            except zlib.error:
                content = b""
        if (header[:4], len(content), zlib.crc32(content)) != (b"PK\x03\x04", member.file_size, member.CRC):
            _refuse(self.path, name, "has not the content that the archive's directory promises")
        return content


def _read_compressed_tar(file: io.BufferedIOBase, path: Path, limits: Limits) -> dict[str, bytes]:
    n_read = 0

    def read(size: int) -> bytes:
        nonlocal n_read
        _check_total(n_read := n_read + size, limits.memory_bytes, path, limits)
        return _exactly(file, size, path)

    members = _tar_members(read, path, limits)
    contents = _collected(((name, read(_padded(size))[:size]) for name, size in members), path, limits)
    while rest := file.read(1 << 20):  # the checksum comes last
        _check_total(n_read := n_read + len(rest), limits.memory_bytes, path, limits)
    return contents


def _tar_members(read: Callable[[int], bytes], path: Path, limits: Limits) -> Iterator[tuple[str, int]]:
    """Name and size of each file; the caller moves on behind its content before asking for the next."""
    extended: dict[str, bytes] = {}
    while (block := read(BLOCK)) != bytes(BLOCK):
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            if header.type in EXTENSIONS:
                if not 0 <= header.size <= HEADER_BYTES:
                    _refuse(path, header.name, "has a header that is too long")
                extended |= _extension(header.type, read(_padded(header.size))[: header.size])
                continue
            name = extended.get("path", header.name.encode()).decode()
            size = int(extended.get("size", header.size))
        except UnicodeDecodeError as error:
            _refuse(path, error.object.rstrip(b"\0"), "has a name that is not UTF-8")
        except (tarfile.HeaderError, ValueError):
            raise InvalidInput(f"{path} is no tar, or a damaged one; download it again.") from None
        is_sparse, extended = any(key.startswith("GNU.sparse") for key in extended), {}
        if header.isdir():
            _plain_name(name, path)
            continue
        if is_sparse or header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
            _refuse(path, name, "is a link" if header.issym() or header.islnk() else "is no regular file")
        _check_size(size, name, path, limits)
        yield name, size


def _extension(kind: bytes, content: bytes) -> dict[str, bytes]:
    """What a header says of the member after it; pax has lines "length key=value", of that whole length."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.removesuffix(b"\0")}
    records, position = dict[str, bytes](), 0
    while position < len(content) and kind == tarfile.XHDTYPE:
        start = PAX_RECORD.match(content, position)
        if start is None or not start.end() < (end := position + int(start[1])) <= len(content):
            raise ValueError("a pax header is damaged")
        records[start[2].decode()] = content[start.end() : end - 1]
        position = end
    return records


def _plain_name(name: str, path: Path) -> str | None:
    """The one form of a name; None for what operating systems leave behind."""
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


def _exactly(file: io.BufferedIOBase, size: int, path: Path) -> bytes:
    if len(content := file.read(size)) < size:
        raise InvalidInput(f"{path} is cut off: it ends before its last file does; download it again.")
    return content


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _refuse(path: Path, name: str | bytes, reason: str) -> NoReturn:
    raise InvalidInput(f"{path}: the file {name!r} in it {reason}; repair or remove it.")
