"""A generated folder of images: a color for each class, noise for each image."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from medcil.clinic.model_dir import ModelFolder, VersionFolder

SIDE = 32
COLORS = {
    "alpha": (200, 60, 60),
    "beta": (60, 200, 60),
    "gamma": (60, 60, 200),
    "delta": (200, 200, 60),
    "epsilon": (60, 200, 200),
    "zeta": (200, 60, 200),
}
QUICK = {"epochs": 2, "backbone": "resnet8_cifar", "settings": ("execution.threads=1",)}
"""Options of `train`; an update has no backbone to choose."""
FEW = {"epochs": 2, "settings": ("execution.threads=1",)}


def write_folder(folder: Path, *names: str, images: int = 25, seed: int = 0) -> Path:
    return write_counts(folder, dict.fromkeys(names, images), seed=seed)


def write_counts(folder: Path, counts: Mapping[str, int], *, seed: int = 0) -> Path:
    """No two images are alike."""
    for name, n in counts.items():
        random = np.random.default_rng([seed, *name.encode()])
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(n):
            noisy = np.array(COLORS[name]) + random.normal(0, 40, (SIDE, SIDE, 3))
            Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / name / f"{number:03d}.png")
    return folder


def write_manifest(folder: Path, patients_of: int = 3) -> Path:
    """Each patient has so many images of a class, by the order of their names."""
    with (folder / "images.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "patient"])
        for path in sorted(folder.glob("*/*.png")):
            patient = f"{path.parent.name.upper()}-PERSON-{int(path.stem) // patients_of}"
            writer.writerow([path.relative_to(folder).as_posix(), path.parent.name, patient])
    return folder


def reseal(model: Path) -> None:
    """Accept files that a test has changed by hand: every version, and the current one as it was."""
    folder = ModelFolder(model)
    versions = sorted(path for path in folder.versions_path.glob("v*") if path.is_dir())
    hashes = {path.name: VersionFolder(path, folder.store).seal() for path in versions}
    current = json.loads(folder.manifest_path.read_text())["current"] if folder.exists else versions[-1].name
    folder.write(hashes, current)


def forget_versions(model: Path, *names: str) -> None:
    """List only the versions that are not named, as an older model.json would."""
    folder = ModelFolder(model)
    hashes = {name: found for name, found in folder.hashes.items() if name not in names}
    folder.write(hashes, max(hashes))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
