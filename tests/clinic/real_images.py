"""HAM10000 as a practitioner would have it: folders of images with a manifest, in the order of arrival."""

import csv
import io
import random
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
ARRIVALS = {"first": ("MEL", "NV", "BCC", "BKL"), "second": ("AKIEC", "DF"), "third": ("VASC",)}
COLUMNS = ("path", "label", "lesion_id", "age", "sex")


@dataclass(frozen=True)
class Picture:
    image: str
    label: str
    lesion: str
    age: str
    sex: str

    @property
    def path(self) -> str:
        return f"{self.label}/{self.image}.jpg"


def write_folders(archive: Path, out: Path, *, train: int, test: int, seed: int = 0) -> dict[str, Path]:
    """At most so many images of each class: first/, second/ and third/ from the benchmark's training part,
    eval/ from its test part. No lesion is in eval/ and in another folder.

    eval/ has a manifest for each moment: first.csv has the classes of first/, second.csv those of second/
    too, third.csv all.
    """
    draw = random.Random(seed)
    with tarfile.open(archive) as tar:
        pictures = _pictures(tar)
        held = _some_of_each(pictures["test"], test, draw)
        measured = {picture.lesion for picture in held}
        free = [picture for picture in pictures["train"] if picture.lesion not in measured]
        drawn = _some_of_each(free, train, draw)
        folder_of = {name: folder for folder, names in ARRIVALS.items() for name in names}
        places = {picture.image: out / folder_of[picture.label] / picture.path for picture in drawn}
        places |= {picture.image: out / "eval" / picture.path for picture in held}
        _unpack(tar, places)
    known: list[str] = []
    for folder, names in ARRIVALS.items():
        known += names
        _write_manifest(out / folder / "images.csv", [p for p in drawn if p.label in names])
        _write_manifest(out / "eval" / f"{folder}.csv", [p for p in held if p.label in known])
    return {name: out / name for name in (*ARRIVALS, "eval")}


def _pictures(tar: tarfile.TarFile) -> dict[str, list[Picture]]:
    facts = {row["image_id"]: row for row in _rows(tar, "HAM10000_metadata.csv")}

    def picture(row: dict[str, str]) -> Picture:
        (label,) = (name for name in CLASSES if float(row[name]) == 1)
        about = facts[row["image"]]
        return Picture(row["image"], label, about["lesion_id"], about["age"], about["sex"])

    return {part: [picture(row) for row in _rows(tar, f"split_{part}.csv")] for part in ("train", "test")}


def _rows(tar: tarfile.TarFile, name: str) -> list[dict[str, str]]:
    file = tar.extractfile(f"ham10000/{name}")
    assert file is not None
    return list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))


def _some_of_each(pictures: Iterable[Picture], n: int, draw: random.Random) -> list[Picture]:
    found: dict[str, list[Picture]] = {name: [] for name in CLASSES}
    for picture in pictures:
        found[picture.label].append(picture)
    return [
        picture for of_class in found.values() for picture in draw.sample(of_class, min(n, len(of_class)))
    ]


def _unpack(tar: tarfile.TarFile, places: dict[str, Path]) -> None:
    for place in places.values():
        place.parent.mkdir(parents=True, exist_ok=True)
    for member in tar:
        place = places.get(Path(member.name).stem)
        if place is not None:
            file = tar.extractfile(member)
            assert file is not None
            place.write_bytes(file.read())


def _write_manifest(path: Path, pictures: Iterable[Picture]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((p.path, p.label, p.lesion, p.age, p.sex) for p in pictures)
