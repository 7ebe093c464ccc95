"""Images of a model folder: each stored once, under a keyed hash of its content."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from medcil.errors import DamagedFile
from medcil.storage.atomic import write_bytes

KEY = "key"
NAME = re.compile(r"[0-9a-f]{64}\.png")


@dataclass(frozen=True)
class ImageStore:
    """A folder of PNG files whose names verify their content.

    The names are HMAC-SHA256 under a random key in the same folder. A plain hash would tell everyone who sees
    a list of names, and has a picture, whether that picture is in the model.
    """

    root: Path

    def create(self) -> None:
        """Draw the key, unless there is one."""
        if not (self.root / KEY).exists():
            write_bytes(self.root / KEY, secrets.token_hex(32).encode())

    def put(self, content: bytes) -> str:
        """Store an image and return its name."""
        name = self._name(content)
        if not (self.root / name).exists():
            write_bytes(self.root / name, content)
        return name

    def read(self, name: str) -> bytes:
        """Return the verified content of an image."""
        path = self.root / name
        if not NAME.fullmatch(name):
            raise DamagedFile(f"{name!r} is no image of {self.root}. Restore the model folder.")
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise DamagedFile(
                f"{path} is missing, though a version lists it; restore it.", code="model.image.missing"
            ) from None
        if self._name(content) != name:
            raise DamagedFile(
                f"{path} was changed or damaged (its name differs from its keyed hash); restore it.",
                code="model.image.damaged",
            )
        return content

    def remove_except(self, names: Iterable[str]) -> None:
        """Delete every image that is not named."""
        listed = set(names)
        for path in self.root.glob("*.png"):
            if path.name not in listed:
                path.unlink()

    def _name(self, content: bytes) -> str:
        try:
            key = bytes.fromhex((self.root / KEY).read_text())
        except (OSError, ValueError):
            raise DamagedFile(
                f"{self.root / KEY} is missing or damaged; restore it.", code="model.image.key"
            ) from None
        return hmac.new(key, content, hashlib.sha256).hexdigest() + ".png"
