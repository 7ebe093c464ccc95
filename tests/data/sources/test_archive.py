"""Files come out of folders and archives as they went in; hostile ones are refused, nothing is written."""

import bz2
import gzip
import io
import lzma
import os
import re
import resource
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medcil.data.image_table import Files
from medcil.data.sources.archive import FolderFiles, Limits, MemoryFiles, TarFiles, ZipFiles, open_files
from medcil.errors import InvalidInput

CONTENTS = {
    "a.jpg": b"first",
    "class one/b.jpg": bytes(range(256)) * 20,
    "class one/deeper/c.png": b"",
    "class two/Ærøskøbing.jpg": b"named in Danish",
    "list.csv": b"x" * 512,
}
LONG = "/".join(["a folder with a long name"] * 12) + "/d.jpg"
LITTER = {
    ".DS_Store": b"1",
    "class one/._b.jpg": b"2",
    "__MACOSX/class one/._b.jpg": b"3",
    ".git/config": b"4",
}


def tar(members: dict[str, bytes] | list[tarfile.TarInfo], *, format=tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        if isinstance(members, list):
            for member in members:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
        else:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def packed(members: dict[str, bytes] | list[zipfile.ZipInfo], method=zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        if isinstance(members, list):
            for member in members:
                archive.writestr(member, b"content")
        else:
            for name, content in members.items():
                archive.writestr(name, content)
    return buffer.getvalue()


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


PACKERS = {
    "plain.tar": tar,
    "gnu.tar": lambda members: tar(members, format=tarfile.GNU_FORMAT),
    "old.tar": lambda members: tar(
        {k: v for k, v in members.items() if k != LONG}, format=tarfile.USTAR_FORMAT
    ),
    "gzip.tar.gz": lambda members: gzip.compress(tar(members)),
    "two.tgz": lambda members: gzip.compress(tar(members)[:2000]) + gzip.compress(tar(members)[2000:]),
    "bzip.tar.bz2": lambda members: bz2.compress(tar(members)),
    "xz.tar.xz": lambda members: lzma.compress(tar(members)),
    "deflated.zip": packed,
    "stored.zip": lambda members: packed(members, zipfile.ZIP_STORED),
}


@pytest.mark.parametrize("kind", ["folder", *PACKERS])
def test_everything_that_went_in_comes_out_and_litter_does_not(kind, tmp_path):
    contents = CONTENTS | {LONG: b"long"}
    if kind == "folder":
        for name, content in (contents | LITTER).items():
            put(tmp_path / kind, name, content)
    else:
        put(tmp_path, kind, PACKERS[kind](contents | LITTER))
    files = open_files(tmp_path / kind)
    expected = {name: content for name, content in contents.items() if name != LONG or kind != "old.tar"}
    assert isinstance(files, Files)
    assert list(files.names()) == sorted(expected)
    assert {name: files.read(name) for name in files.names()} == expected


def test_the_kind_of_an_archive_is_told_by_its_content(tmp_path):
    for name, content, kind in [
        ("a.bin", tar(CONTENTS), TarFiles),
        ("b.tar", packed(CONTENTS), ZipFiles),
        ("c.zip", gzip.compress(tar(CONTENTS)), MemoryFiles),
    ]:
        files = open_files(put(tmp_path, name, content))
        assert isinstance(files, kind)
        assert files.read("a.jpg") == b"first"
    assert isinstance(open_files(tmp_path), FolderFiles)


def test_a_leading_dot_slash_is_no_part_of_a_name(tmp_path):
    content = tar({"./": b"", "./a.jpg": b"1", "./x//y/./b.jpg": b"2"})
    assert list(open_files(put(tmp_path, "a.tar", content)).names()) == ["a.jpg", "x/y/b.jpg"]


def test_names_are_composed_however_they_were_written(tmp_path):
    decomposed, composed = "u\u0308.jpg", "\u00fc.jpg"
    for kind, content in [("a.tar", tar({decomposed: b"1"})), ("a.zip", packed({decomposed: b"1"}))]:
        files = open_files(put(tmp_path, kind, content))
        assert list(files.names()) == [composed]
        assert files.read(composed) == b"1"


def test_unmarked_names_in_utf8_as_macos_writes_them_are_read(tmp_path):
    name = "Grüße.jpg"
    content = packed({"Gr~~e__.jpg": b"1"}).replace(b"Gr~~e__.jpg", "Grüße.jpg".encode())
    assert list(open_files(put(tmp_path, "a.zip", content)).names()) == [name]


@pytest.mark.parametrize("kind", ["folder", "plain.tar", "deflated.zip", "memory"])
def test_many_threads_read_alike(kind, tmp_path):
    contents = {f"{i}.bin": bytes([i]) * (1000 + i) for i in range(100)}
    for name, content in contents.items():
        put(tmp_path / "folder", name, content)
    if kind == "memory":
        files: Files = MemoryFiles(contents)
    else:
        files = open_files(
            tmp_path / kind if kind == "folder" else put(tmp_path, kind, PACKERS[kind](contents))
        )
    names = sorted(contents) * 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(files.read, names)) == [contents[name] for name in names]


@pytest.mark.parametrize("kind", ["folder", "plain.tar", "deflated.zip", "gzip.tar.gz"])
def test_a_file_that_is_not_there_is_named(kind, tmp_path):
    put(tmp_path / "folder", "a.jpg", b"1")
    path = tmp_path / kind if kind == "folder" else put(tmp_path, kind, PACKERS[kind]({"a.jpg": b"1"}))
    for name in ("b.jpg", "../a.jpg", "/etc/passwd", ""):
        with pytest.raises(InvalidInput, match="has no file"):
            open_files(path).read(name)


@pytest.mark.parametrize("content", [b"", b"hello", b"GIF89a", bytes(600)])
def test_what_is_no_archive_is_refused(content, tmp_path):
    with pytest.raises(InvalidInput, match="neither a folder nor a zip nor a tar"):
        open_files(put(tmp_path, "a.bin", content))
    with pytest.raises(InvalidInput, match="absent"):
        open_files(tmp_path / "nowhere.zip")


@pytest.mark.parametrize("kind", [kind for kind in PACKERS if kind != "two.tgz"])
def test_an_archive_that_is_cut_off_is_refused_wherever_it_was_cut(kind, tmp_path):
    whole = PACKERS[kind](CONTENTS)
    # A plain tar ends with two blocks of zeros and padding, of which one block is enough.
    last = len(whole.rstrip(b"\0")) if kind.endswith(".tar") else len(whole) - 1
    for length in sorted({*range(last, 8, -max(1, last // 60)), 513, 1024, 1536}):
        if 8 < length <= last:
            path = put(tmp_path, kind, whole[:length])
            with pytest.raises(InvalidInput, match=r"download it again|neither"):
                open_files(path)


def test_a_tar_that_ends_after_a_whole_file_is_still_cut_off(tmp_path):
    whole = tar({"a.bin": bytes([1]) * 512, "b.bin": bytes([2]) * 512}, format=tarfile.USTAR_FORMAT)
    with pytest.raises(InvalidInput, match="is cut off"):
        open_files(put(tmp_path, "a.tar", whole[:1024]))


@pytest.mark.parametrize("kind", ["gzip.tar.gz", "bzip.tar.bz2", "xz.tar.xz"])
def test_a_flipped_bit_in_a_compressed_tar_is_noticed(kind, tmp_path):
    whole = PACKERS[kind]({"a.bin": os.urandom(5000)})
    for place in range(30, len(whole) - 30, len(whole) // 25):
        damaged = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        with pytest.raises(InvalidInput):
            open_files(put(tmp_path, kind, damaged))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_in_a_zip_member_is_noticed(method, tmp_path):
    whole = packed({"a.bin": b"some text " * 100}, method)
    place = whole.index(b"a.bin") + 12
    files = open_files(put(tmp_path, "a.zip", whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]))
    with pytest.raises(InvalidInput, match=r"'a\.bin' in it has not the content"):
        files.read("a.bin")


@pytest.mark.parametrize(
    ("target", "kind"), [("real", "a link"), ("nowhere", "a link"), ("real/a.jpg", "a link")]
)
def test_links_in_a_folder_are_refused(target, kind, tmp_path):
    put(tmp_path / "real", "a.jpg", b"1")
    (tmp_path / "data" / "class").mkdir(parents=True)
    (tmp_path / "data" / "class" / "link.jpg").symlink_to(tmp_path / target)
    with pytest.raises(InvalidInput, match=rf"'class/link\.jpg' in it is {kind}"):
        open_files(tmp_path / "data")


def test_named_pipes_in_a_folder_are_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(InvalidInput, match=r"'pipe\.jpg' in it is no regular file"):
        open_files(tmp_path)


def test_a_file_that_becomes_a_link_later_is_refused(tmp_path):
    put(tmp_path, "secret", b"secret")
    path = put(tmp_path / "data", "a.jpg", b"1")
    files = open_files(tmp_path / "data")
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match="no regular file any more"):
        files.read("a.jpg")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_that_is_exchanged_between_two_looks_is_refused(tmp_path, monkeypatch, kind):
    """Somebody waits for the moment in which it has just been found to be a regular file."""
    put(tmp_path, "secret", b"secret")
    path, regular = put(tmp_path / "data", "a.jpg", b"1"), (tmp_path / "secret").lstat()
    files = open_files(tmp_path / "data")
    path.unlink()
    path.symlink_to(tmp_path / "secret") if kind == "link" else os.mkfifo(path)
    monkeypatch.setattr(Path, "lstat", lambda self: regular)
    with pytest.raises(InvalidInput, match=r"no regular file any more|cannot be read"):
        files.read("a.jpg")


@pytest.mark.parametrize("name", [b"bad\xff.jpg", b"new\nline.jpg", b"esc\x1b[2J.jpg", b"back\\slash.jpg"])
def test_odd_names_in_a_folder_are_refused(name, tmp_path):
    (tmp_path / os.fsdecode(name)).write_bytes(b"1")
    with pytest.raises(InvalidInput, match=r"control characters|leads elsewhere") as refusal:
        open_files(tmp_path)
    assert str(refusal.value).isprintable()


def member(name: str, *, kind=tarfile.REGTYPE, size=7, **pax: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/passwd"
    info.pax_headers = {key.replace("_", "."): value for key, value in pax.items()}
    return info


def entry(name: str, *, mode=0, flags=0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("placeholder")
    info.filename = info.orig_filename = name
    info.external_attr = mode << 16
    info.flag_bits |= flags
    return info


HOSTILE_NAMES = {
    "absolute": "/etc/cron.d/x",
    "up": "../x.jpg",
    "up in the middle": "a/../../x.jpg",
    "up and back": "a/../b.jpg",
    "up at the end": "a/..",
    "up behind a dot": "./../x.jpg",
    "up in litter": "__MACOSX/../../x",
    "backslashes": "..\\..\\x.jpg",
    "one backslash": "a\\b.jpg",
    "network share": "\\\\server\\x.jpg",
    "drive": "C:/x.jpg",
    "drive without a slash": "c:x.jpg",
    "new line": "a\nb.jpg",
    "escape": "\x1b[31mred.jpg",
    "bell": "a\x07.jpg",
    "delete": "a\x7f.jpg",
    "C1 control": "a\x9b.jpg",
    "carriage return": "a\r.jpg",
}
HOSTILE_TARS = {
    **{name: lambda path=path: tar([member(path)]) for name, path in HOSTILE_NAMES.items()},
    "folder up": lambda: tar([member("../x", kind=tarfile.DIRTYPE, size=0)]),
    "symbolic link": lambda: tar([member("x.jpg", kind=tarfile.SYMTYPE, size=0)]),
    "hard link": lambda: tar([member("x.jpg", kind=tarfile.LNKTYPE, size=0)]),
    "link to a folder": lambda: tar([member("class", kind=tarfile.SYMTYPE, size=0), member("class/x.jpg")]),
    "character device": lambda: tar([member("x.jpg", kind=tarfile.CHRTYPE, size=0)]),
    "block device": lambda: tar([member("x.jpg", kind=tarfile.BLKTYPE, size=0)]),
    "named pipe": lambda: tar([member("x.jpg", kind=tarfile.FIFOTYPE, size=0)]),
    "sparse": lambda: tar([member("x.jpg", kind=tarfile.GNUTYPE_SPARSE)]),
    "unknown kind": lambda: tar([member("x.jpg", kind=b"Z", size=0)]),
    "sparse in pax": lambda: tar([member("x.jpg", GNU_sparse_major="1")]),
    "twice": lambda: tar([member("x.jpg"), member("x.jpg")]),
    "twice after a dot": lambda: tar([member("x.jpg"), member("./x.jpg")]),
    "twice after composing": lambda: tar([member("\u00fc.jpg"), member("u\u0308.jpg")]),
    "pax path": lambda: tar([member("x.jpg", path="../x.jpg")]),
    "NUL in pax": lambda: tar([member("x.jpg", path="x.jpg\0.png")]),
    "name in Latin-1": lambda: recoded(tar([member("Gr~~e.jpg")], format=tarfile.USTAR_FORMAT)),
    "huge": lambda: tar([member("x.jpg")]).replace(*huge_size()),
    "long name": lambda: tar([member("x.jpg", path="y" * (2 << 20))]),
    "negative size": lambda: signed(tar([member("x.jpg")], format=tarfile.USTAR_FORMAT), -512),
    "size beyond": lambda: signed(tar([member("x.jpg")], format=tarfile.USTAR_FORMAT), 1 << 50),
    "checksum": lambda: tar([member("x.jpg")]).replace(b"x.jpg", b"y.jpg"),
}


def checked(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def recoded(content: bytes) -> bytes:
    return checked(bytearray(content[:512]).replace(b"Gr~~e", b"Gr\xfc\xdfe")) + content[512:]


def signed(content: bytes, size: int) -> bytes:
    header = bytearray(content[:512])
    header[124:136] = (0x80 if size >= 0 else 0xFF).to_bytes(1, "big") + size.to_bytes(11, "big", signed=True)
    return checked(header) + content[512:]


def huge_size() -> tuple[bytes, bytes]:
    content = tar([member("x.jpg")])
    header = bytearray(content[:512])
    header[124:136] = b"77777777777\0"
    return content[:512], checked(header)


HOSTILE_ZIPS = {
    **{name: lambda path=path: packed([entry(path)]) for name, path in HOSTILE_NAMES.items()},
    "folder up": lambda: packed([entry("../x/")]),
    "NUL": lambda: packed([entry("xjpg")]).replace(b"xjpg", b"x\0pg"),
    "symbolic link": lambda: packed([entry("x.jpg", mode=stat.S_IFLNK | 0o777)]),
    "character device": lambda: packed([entry("x.jpg", mode=stat.S_IFCHR)]),
    "block device": lambda: packed([entry("x.jpg", mode=stat.S_IFBLK)]),
    "named pipe": lambda: packed([entry("x.jpg", mode=stat.S_IFIFO)]),
    "socket": lambda: packed([entry("x.jpg", mode=stat.S_IFSOCK)]),
    "encrypted": lambda: flagged(packed([entry("x.jpg")]), 0x1),
    "strongly encrypted": lambda: flagged(packed([entry("x.jpg")]), 0x41),
    "hidden headers": lambda: flagged(packed([entry("x.jpg")]), 0x2000),
    "bzip2": lambda: packed({"x.jpg": b"1"}, zipfile.ZIP_BZIP2),
    "lzma": lambda: packed({"x.jpg": b"1"}, zipfile.ZIP_LZMA),
    "twice after a dot": lambda: packed([entry("x.jpg"), entry("./x.jpg")]),
    "twice after composing": lambda: packed([entry("\u00fc.jpg"), entry("u\u0308.jpg")]),
    "name in Latin-1": lambda: packed([entry("Gr~~e.jpg")]).replace(b"Gr~~e", b"Gr\xfc\xdfe"),
    "name falsely marked": lambda: flagged(packed([entry("Gr~~e.jpg")]), 0x800).replace(
        b"Gr~~e", b"Gr\xfc\xdfe"
    ),
    "huge": lambda: sized(packed([entry("x.jpg")]), 1 << 31),
    "overlapping": lambda: overlapping(),
}


def flagged(content: bytes, flags: int) -> bytes:
    changed, place = bytearray(content), content.index(b"PK\x01\x02")
    for at in (6, place + 8):
        changed[at : at + 2] = struct.pack("<H", flags)
    return bytes(changed)


def sized(content: bytes, size: int) -> bytes:
    """The directory says so; what is packed stays as it is."""
    changed, place = bytearray(content), content.index(b"PK\x01\x02")
    changed[place + 24 : place + 28] = struct.pack("<I", size)
    return bytes(changed)


def overlapping() -> bytes:
    """Two members in the directory, one after the other, whose content is the same bytes."""
    content = packed({"a.jpg": b"1" * 100, "b.jpg": b"1" * 100}, zipfile.ZIP_STORED)
    second = content.rindex(b"PK\x01\x02")
    return content[: second + 42] + struct.pack("<I", 20) + content[second + 46 :]


CASES = [("tar", name) for name in HOSTILE_TARS] + [("zip", name) for name in HOSTILE_ZIPS]


@pytest.fixture
def nothing_is_written(tmp_path, monkeypatch):
    """In the working directory, beside the archive, and wherever temporary files go."""
    places = [tmp_path / place for place in ("here", "temporary", "archive")]
    for place in places:
        place.mkdir()
    monkeypatch.chdir(places[0])
    monkeypatch.setattr("tempfile.tempdir", str(places[1]))
    yield places[2]
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert [path for path in found if not path.startswith("archive/hostile.")] == []
    assert {path.name for path in tmp_path.iterdir()} == {"here", "temporary", "archive"}


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_hostile_members_are_refused_and_nothing_is_written(kind, case, nothing_is_written):
    content = (HOSTILE_TARS if kind == "tar" else HOSTILE_ZIPS)[case]()
    before = hostile_state(nothing_is_written)
    paths = [put(nothing_is_written, f"hostile.{kind}", content)]
    if kind == "tar":
        paths.append(put(nothing_is_written, "hostile.tar.gz", gzip.compress(content)))
    for path in paths:
        with pytest.raises(InvalidInput) as refusal:
            open_files(path)
        message = str(refusal.value)
        assert message.isprintable()
        assert re.search("the file b?'", message) or case == "checksum", message
    assert hostile_state(nothing_is_written) == before


def hostile_state(folder: Path) -> list[str]:
    """What lies where a name that leads up from the archive or the working directory would lead."""
    near = [*folder.parent.parent.iterdir(), *folder.parent.iterdir(), Path("/etc/cron.d/x"), Path("/x.jpg")]
    return sorted(f"{path} {path.exists()}" for path in near)


def test_there_are_enough_hostile_members():
    assert len(CASES) == len(HOSTILE_TARS) + len(HOSTILE_ZIPS) >= 60


def test_the_reasons_are_the_right_ones(tmp_path):
    reasons = {
        "symbolic link": "is a link",
        "encrypted": "is encrypted; write the zip without a password",
        "twice after a dot": "is there twice",
        "huge": "has more than 268,435,456 bytes",
        "lzma": "write the zip with deflate",
        "NUL": "control characters",
        "name in Latin-1": "not UTF-8",
        "overlapping": "overlaps",
        "drive": "leads elsewhere",
        "named pipe": "is no regular file",
    }
    for case, reason in reasons.items():
        with pytest.raises(InvalidInput, match=reason):
            open_files(put(tmp_path, "a.zip", HOSTILE_ZIPS[case]()))
        if case in HOSTILE_TARS:
            with pytest.raises(InvalidInput, match=reason):
                open_files(put(tmp_path, "a.tar", HOSTILE_TARS[case]()))


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_a_size_that_lies_is_noticed_while_reading(change, tmp_path):
    content = packed({"a.bin": b"0123456789" * 200})
    files = open_files(put(tmp_path, "a.zip", sized(content, 2000 + change)))
    with pytest.raises(InvalidInput, match="has not the content"):
        files.read("a.bin")


def test_each_limit_is_kept(tmp_path):
    contents = {f"{i}.bin": os.urandom(1000) for i in range(10)}
    for kind in ("plain.tar", "deflated.zip", "gzip.tar.gz"):
        path = put(tmp_path, kind, PACKERS[kind](contents))
        assert len(open_files(path, limits=Limits(members=10, member_bytes=1000)).names()) == 10
        with pytest.raises(InvalidInput, match="holds more than 9 files"):
            open_files(path, limits=Limits(members=9))
        with pytest.raises(InvalidInput, match=r"'\d\.bin' in it has more than 999 bytes"):
            open_files(path, limits=Limits(member_bytes=999))
    for name, content in contents.items():
        put(tmp_path / "folder", name, content)
    with pytest.raises(InvalidInput, match="holds more than 9 files"):
        open_files(tmp_path / "folder", limits=Limits(members=9))
    with pytest.raises(InvalidInput, match="has more than 999 bytes"):
        open_files(tmp_path / "folder", limits=Limits(member_bytes=999)).read("0.bin")
    with pytest.raises(InvalidInput, match="unpacks to more than 9,999 bytes; unpack it"):
        open_files(tmp_path / "deflated.zip", limits=Limits(total_bytes=9999))
    with pytest.raises(InvalidInput, match="unpacks to more than 9,999 bytes; unpack it"):
        open_files(tmp_path / "gzip.tar.gz", limits=Limits(memory_bytes=9999))


@pytest.mark.parametrize("kind", ["deflated.zip", "gzip.tar.gz", "bzip.tar.bz2", "xz.tar.xz"])
def test_what_packs_as_no_image_does_is_refused(kind, tmp_path):
    path = put(tmp_path, kind, PACKERS[kind]({"a.bin": bytes(3_000_000)}))
    assert len(open_files(path).read("a.bin")) == 3_000_000
    with pytest.raises(InvalidInput, match="unpacks to 200 times its size"):
        open_files(path, limits=Limits(ratio_from_bytes=1_000_000))


def test_reading_stops_where_the_limit_is(tmp_path):
    """Behind it the archive is cut off, which nobody finds out."""
    whole = PACKERS["gzip.tar.gz"]({f"{i}.bin": os.urandom(10_000) for i in range(50)})
    path = put(tmp_path, "a.tar.gz", whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match="unpacks to more than 100,000 bytes"):
        open_files(path, limits=Limits(memory_bytes=100_000))
    with pytest.raises(InvalidInput, match="damaged"):
        open_files(path)


def zeros_deflated(gibibytes: int) -> bytes:
    """A raw deflate stream; a fully flushed piece can be repeated without packing it again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(1 << 26)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * (16 * gibibytes) + b"\x03\x00"


def zip_bomb(*, declared: int, stream: bytes) -> bytes:
    name, sizes = b"a.jpg", (min(len(stream), 2**32 - 1), min(declared, 2**32 - 1))
    extra = struct.pack("<HHQ", 1, 8, declared) if declared >= 2**32 - 1 else b""
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 8, 0, 0, 0, *sizes, len(name), 0) + name + stream
    entry = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 8, 0, 0, 0, *sizes, len(name), len(extra), 0, 0, 0, 0, 0
    )
    directory = entry + name + extra
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(local), 0)
    return local + directory + end


def tar_bomb(stream: bytes, *, kind: bytes, size: int) -> bytes:
    """One header, then zeros for ever, as gzip; the header is packed before the zeros."""
    head = tar([member("a.jpg")], format=tarfile.USTAR_FORMAT)[:512]
    header = bytearray(signed(head, size))
    header[156:157] = kind
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(checked(header)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + first + stream + bytes(8)


@pytest.mark.slow
def test_memory_stays_bounded_on_bombs(tmp_path):
    """Ten gigabytes of zeros: announced; hidden behind a small number; as a file, a header, padding."""
    stream, shorter = zeros_deflated(10), zeros_deflated(1)
    bombs = [
        zip_bomb(declared=10 << 30, stream=stream),
        zip_bomb(declared=100 << 20, stream=stream),
        zip_bomb(declared=1000, stream=stream),
        tar_bomb(stream, kind=tarfile.REGTYPE, size=10 << 30),
        tar_bomb(stream, kind=tarfile.XHDTYPE, size=10 << 30),
        tar_bomb(shorter, kind=tarfile.REGTYPE, size=200 << 20),
        tar_bomb(shorter, kind=tarfile.DIRTYPE, size=0),
    ]
    paths = [put(tmp_path, f"bomb{i}", content) for i, content in enumerate(bombs)]
    code = (
        "import sys, resource; from pathlib import Path; from medcil.data.sources.archive import open_files\n"
        "from medcil.errors import InvalidInput\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        files = open_files(Path(path)); files.read(files.names()[0]); print('read', path)\n"
        "    except InvalidInput:\n"
        "        pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400 * 1024  # in KiB: less than two members may take


def test_a_bomb_smaller_than_a_member_may_be_is_read_within_bounds(tmp_path):
    path = put(tmp_path, "a.zip", zip_bomb(declared=1000, stream=zeros_deflated(1)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInput, match="has not the content"):
        open_files(path).read("a.jpg")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_real_archives_are_read(shared_data):
    files = open_files(shared_data / "aptos2019_160.tar")
    assert isinstance(files, TarFiles)
    assert len(files.names()) == 3663
    with tarfile.open(shared_data / "aptos2019_160.tar") as archive:
        for name in files.names()[::500]:
            assert files.read(name) == archive.extractfile(name).read()
