"""Writing a file so that a reader finds the old one or the new one, never half of it."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path
