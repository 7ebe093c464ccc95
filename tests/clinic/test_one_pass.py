"""`medcil train` reads and decodes each image of a folder once."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import ImageFile

import medcil
from medcil.clinic.model_dir import File
from medcil.clinic.train import Watches
from medcil.storage.atomic import read_json

from ..errors.raises import raises
from .generated import FEW, QUICK, write_folder
from .test_full_disk import files_of_at_most

_watched: list[tuple[Path, Counter[str]]] = []


def _count_opens(event: str, arguments: tuple[object, ...]) -> None:
    # An opener reports the same file once more, without a mode.
    if event == "open" and _watched and isinstance(arguments[0], str | Path) and arguments[1] is not None:
        folder, opens = _watched[-1]
        path = Path(arguments[0])
        if path.is_relative_to(folder) and path.suffix == ".png":
            opens[path.relative_to(folder).as_posix()] += 1


@contextmanager
def counted_opens(folder: Path) -> Iterator[Counter[str]]:
    """Count how often this process opens each image below a folder."""
    opens: Counter[str] = Counter()
    _watched.append((folder, opens))
    try:
        yield opens
    finally:
        _watched.pop()


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often Pillow decodes each content."""
    counts: Counter[bytes] = Counter()
    decode = ImageFile.ImageFile.load

    def load(image: ImageFile.ImageFile) -> object:
        if image.tile:  # pixels that are not decoded yet
            position = image.fp.tell()
            image.fp.seek(0)
            counts[image.fp.read()] += 1
            image.fp.seek(position)
        return decode(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    return counts


def test_every_image_is_read_once_and_decoded_once(tmp_path, decodes):
    data = write_folder(tmp_path / "data", "alpha", "beta", "gamma")
    content = {path.relative_to(data).as_posix(): path.read_bytes() for path in data.rglob("*.png")}
    sys.addaudithook(_count_opens)
    with counted_opens(data) as opens:
        medcil.train(data, tmp_path / "model", **QUICK)
    once = dict.fromkeys(content, 1)
    assert opens == once
    assert {name: decodes[pixels] for name, pixels in content.items()} == once


def test_more_pixels_than_memory_go_to_a_file_without_a_name_beside_the_model(tmp_path, decodes, monkeypatch):
    data = write_folder(tmp_path / "data", "alpha", "beta", "gamma")
    new = write_folder(tmp_path / "new", "delta")
    medcil.train(data, tmp_path / "in memory", **QUICK)
    monkeypatch.setattr(importlib.import_module("medcil.check.scan"), "MEMORY_BYTES", 0)
    (tmp_path / "disk").mkdir()
    model, maps = tmp_path / "disk/model", list[str]()

    def watch(progress: object) -> None:
        maps.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if "/disk/" in line)
        assert [path.name for path in model.parent.iterdir()] == ["model"]

    for command, images, options in ((medcil.train, data, QUICK), (medcil.update, new, FEW)):
        maps.clear()
        decodes.clear()
        given = (images, model) if command is medcil.train else (model, images)
        command(*given, **options, watches=Watches(training=watch))
        assert maps
        assert all(line.endswith(" (deleted)") for line in maps)
        assert {decodes[path.read_bytes()] for path in images.rglob("*.png")} == {1}
    states = [read_json(place / "versions/v1" / File.STATE) for place in (model, tmp_path / "in memory")]
    assert states[0]["tensors"] == states[1]["tensors"]


def test_without_space_for_the_pixels_it_ends_before_training(tmp_path, monkeypatch):
    data = write_folder(tmp_path / "data", "alpha", "beta")
    monkeypatch.setattr(importlib.import_module("medcil.check.scan"), "MEMORY_BYTES", 0)
    with files_of_at_most(50_000), raises("output.no_space", "No space left"):
        medcil.train(data, tmp_path / "model", **QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
