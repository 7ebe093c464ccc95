"""Images and tensors of a model folder: each stored once, under a hash of its content."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medcil.errors import DamagedFile
from medcil.storage.atomic import sha256, write_bytes

Kind = Literal["png", "safetensors"]
FOLDERS: dict[str, str] = {"png": "images", "safetensors": "tensors"}
KEY = "images/key"
NAME = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(FOLDERS)})")


@dataclass(frozen=True)
class ContentStore:
    """The folders `images` and `tensors`, of files whose names verify their content.

    The name of tensors is their SHA-256; that of an image is its HMAC-SHA256 under a random key in the same
    folder. A plain hash would tell everyone who sees a list of names, and has a picture, whether that picture
    is in the model.
    """

    root: Path

    @property
    def folders(self) -> list[Path]:
        return [self.root / name for name in FOLDERS.values()]

    def create_key(self) -> None:
        """Draw the key of the images, unless there is one."""
        if not (self.root / KEY).exists():
            key = secrets.token_hex(32)
            write_bytes(self.root / KEY, f"{key} {sha256(key.encode())}\n".encode())

    def put(self, content: bytes, kind: Kind) -> str:
        """Store a file and return its name."""
        name = self._name(content, kind)
        if not self.path(name).exists():
            write_bytes(self.path(name), content)
        return name

    def path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise DamagedFile(f"{name!r} is no image or tensor file of {self.root}. Restore the folder.")
        return self.root / FOLDERS[name.partition(".")[2]] / name

    def read(self, name: str) -> bytes:
        """Return the verified content of a file."""
        path = self.path(name)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise DamagedFile(
                f"{path} is missing, though a manifest lists it; restore it.", code="store.file.missing"
            ) from None
        if self._name(content, path.suffix[1:]) != name:
            raise DamagedFile(
                f"{path} was changed or damaged (its name differs from its hash); restore it.",
                code="store.file.damaged",
            )
        return content

    def hashed(self, kind: str, content: bytes) -> str:
        """Hash something that is not stored, under the key: 32 hexadecimal digits; the kinds do not mix."""
        return self._keyed(kind.encode() + b"\0" + content)[:32]

    def remove_except(self, names: Iterable[str]) -> None:
        """Delete every file that is not named."""
        listed = set(names)
        for path in (path for folder in self.folders for path in folder.glob("*")):
            if NAME.fullmatch(path.name) and path.name not in listed:
                path.unlink()

    def _name(self, content: bytes, kind: str) -> str:
        digest = sha256(content) if kind == "safetensors" else self._keyed(content)
        return f"{digest}.{kind}"

    def _keyed(self, content: bytes) -> str:
        path = self.root / KEY
        try:
            key, checksum = path.read_text().split()
        except (OSError, ValueError):
            key = checksum = ""
        if sha256(key.encode()) != checksum:
            raise DamagedFile(f"{path} is missing or damaged; restore it.", code="store.key.damaged")
        return hmac.new(bytes.fromhex(key), content, hashlib.sha256).hexdigest()
