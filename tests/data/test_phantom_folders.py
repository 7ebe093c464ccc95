"""`medcil phantom`: what a newcomer gets to try the workflow with."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from medcil.cli.main import main
from medcil.data.sources import phantom_folders
from medcil.data.sources.phantom_folders import write_phantom_images

TRAINED = ("first", "second", "third")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("phantom") / "images"
    assert exit_code("phantom", "--out", out) == 0
    return out


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "images.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_manifest_lists_what_is_in_its_folder(images):
    for name in (*TRAINED, "eval"):
        found = {path.relative_to(images / name).as_posix() for path in (images / name).glob("*/*.png")}
        assert {row["path"] for row in rows(images / name)} == found
        assert {row["path"].split("/")[0] for row in rows(images / name)} == {
            row["label"] for row in rows(images / name)
        }
    with Image.open(images / "new/001.png") as unlabeled:
        assert unlabeled.size == (64, 64)


def test_classes_arrive_one_delivery_after_another_and_are_unequal(images):
    counts = {name: Counter(row["label"] for row in rows(images / name)) for name in (*TRAINED, "eval")}
    arriving = [label for name in TRAINED for label in counts[name]]
    assert len(arriving) == len(set(arriving)) == 6
    assert set(counts["eval"]) == set(arriving)
    assert max(counts["first"].values()) >= 5 * min(counts["first"].values())


def test_patients_have_several_images_and_one_folder(images):
    of_folder = {name: Counter(row["patient"] for row in rows(images / name)) for name in (*TRAINED, "eval")}
    every = Counter(person for persons in of_folder.values() for person in persons)
    assert set(every.values()) == {1}
    assert {n for persons in of_folder.values() for n in persons.values()} == {1, 2}
    for name in (*TRAINED, "eval"):
        facts = {(row["patient"], row["age"], row["sex"]) for row in rows(images / name)}
        assert len(facts) == len(of_folder[name])
        assert {row["sex"] for row in rows(images / name)} == {"f", "m"}


def test_no_picture_is_there_twice_and_the_doctor_finds_nothing(images, tmp_path):
    drawn = [hashlib.sha256(path.read_bytes()).digest() for path in images.rglob("*.png")]
    assert len(drawn) == len(set(drawn)) == 527
    for name in ("first", "second", "eval"):  # the third is of one class, which is for an update alone
        assert exit_code("check", images / name, "--json", tmp_path / f"{name}.json") == 0


def test_what_is_there_is_left_as_it_is(images, capsys):
    assert exit_code("phantom", "--out", images) == 4
    assert "is there already" in capsys.readouterr().err


def test_interrupted_it_leaves_nothing_and_can_be_run_again(tmp_path, monkeypatch, capsys):
    few = {"first": {"NV": 6, "DF": 3}, "eval": {"NV": 2}}
    monkeypatch.setattr(phantom_folders, "FOLDERS", few)
    with monkeypatch.context() as broken:
        broken.setattr(phantom_folders, "write_csv", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        assert exit_code("phantom", "--out", tmp_path / "images") == 130
    assert not (tmp_path / "images").exists()
    assert write_phantom_images(tmp_path / "images") == {"first": 9, "eval": 2, "new": 12}
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
    write_phantom_images(tmp_path / "again")
    for path in (tmp_path / "images").rglob("*.png"):  # the same images every time
        again = tmp_path / "again" / path.relative_to(tmp_path / "images")
        assert path.read_bytes() == again.read_bytes()
    assert exit_code("phantom", "--out", tmp_path / "images/new/001.png/x") == 2
    assert "is not a folder" in capsys.readouterr().err
