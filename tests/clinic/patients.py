"""A model trained on images of known patients, and a search for all that is of one of them."""

import base64
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

import medcil
from medcil.clinic.model_dir import ModelFolder
from medcil.data.samples import decode_image, encode_png
from medcil.storage.atomic import sha256

from .generated import SIDE, content, write_folder, write_manifest

QUICK = {"epochs": 1, "settings": ("execution.threads=1",)}


def write_model_of_patients(root: Path) -> Path:
    """Seven patients of three images in each class; of those trained on, five a class are exemplars."""
    write_manifest(write_folder(root / "first", "alpha", "beta", images=21))
    write_manifest(write_folder(root / "second", "gamma", images=21))
    medcil.train(root / "first", root / "model", backbone="resnet8_cifar", exemplars=5, **QUICK)
    medcil.update(root / "model", root / "second", **QUICK)
    return root


def originals(images: Path, patient: str) -> list[Path]:
    found = [path for path in images.glob("[fs]*/*/*.png") if person_of(path) == patient]
    assert len(found) == 3
    return found


def person_of(path: Path) -> str:
    return f"{path.parent.name.upper()}-PERSON-{int(path.stem) // 3}"


def pixels(file: Path | bytes) -> bytes:
    return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file).convert("RGB").tobytes()


def stored(model: Path) -> Counter[bytes]:
    return Counter(pixels(found) for name, found in content(model).items() if name.endswith(".png"))


def search(model: Path, images: Path, patient: str) -> list[str]:
    return traces(model, originals(images, patient), patient)


def traces(model: Path, files: Sequence[Path], patient: str, *, side: int = SIDE) -> list[str]:
    """Where anything of the patient is found: id, hashes, pixels, in the open or packed."""
    kept = [png_of_ours(path, side) for path in files]
    theirs = {pixels(file) for file in (*files, *kept)}
    hashes = {sha256(file).encode() for file in (*(path.read_bytes() for path in files), *kept)}
    found = []
    for name, raw in content(model).items():
        packed = [base64.b64decode(text) for text in re.findall(rb"base64,([A-Za-z0-9+/=]+)", raw)]
        for part in (raw, *packed):
            if part[:4] == b"\x89PNG" and pixels(part) in theirs:
                found.append(f"{name}: picture")
            found += [f"{name}: pixels" for picture in theirs if picture in part]
            found += [
                f"{name}: hash" for value in hashes if value in part or bytes.fromhex(value.decode()) in part
            ]
            if patient.lower().encode() in part.lower():
                found.append(f"{name}: id")
    return found


def png_of_ours(path: Path, side: int = SIDE) -> bytes:
    """As it is stored."""
    return encode_png(decode_image(path.read_bytes(), side))


def people(model: Path, *, version: str, part: str) -> list[str]:
    """Patients with a file in exemplars/ or holdout/."""
    found = ModelFolder(model).version(version).people()
    return [person for person, files in found.items() if any(file.startswith(part) for file in files)]
