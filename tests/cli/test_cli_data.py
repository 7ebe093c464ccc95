"""The commands about data: what they print, which code they end with, and what they leave on the disk."""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from medcil.cli import console
from medcil.cli.console import printable
from medcil.cli.main import _show_warning, main
from medcil.data.cache import open_cache
from medcil.data.sources import DATASETS


def ended_with(arguments: Sequence[str]) -> int:
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    code = ending.value.code
    return 0 if code is None else int(code)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_picture(path: Path, seed: int) -> None:
    spots = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(spots).resize((64, 48), Image.Resampling.BICUBIC).save(path)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty sound images of two classes; the current folder is another one."""
    for seed in range(40):
        save_picture(tmp_path / "images" / ("mole", "scar")[seed % 2] / f"{seed}.png", seed)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "images"


def test_which_columns_were_recognized_is_printed(images, tmp_path, capsys):
    rows = [f"{path.stem},{path.parent.name},p{path.stem}" for path in images.glob("*/*.png")]
    (images / "labels.csv").write_text("\n".join(["image_id,dx,Subject ID", *rows]))
    line = "columns: image ← image_id, class ← dx, patient ← Subject ID"
    assert ended_with(["check", str(images)]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert ended_with(["prepare", str(images), "--out", str(tmp_path / "store"), "--side", "32"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert open_cache(tmp_path / "store").class_names == ("mole", "scar")


def test_sound_images_end_with_0_and_a_report_in_the_current_folder(images, capsys):
    before = files_of(images)
    assert ended_with(["check", str(images)]) == 0
    shown = capsys.readouterr()
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "own 40 images · 2 classes · imbalance 1.0 : 1" in lines
    assert [line.split()[:2] for line in lines if line.startswith(("mole", "scar"))] == [
        ["mole", "20"],
        ["scar", "20"],
    ]
    assert "Nothing found." in lines
    assert sum(line.startswith("No patient is known") for line in lines) == 1
    assert lines[-1] == "Report: check.json"
    assert "40 images in" in shown.err
    report = json.loads(Path("check.json").read_text())
    assert (report["worst"], report["n_images"], report["dataset"]) == (None, 40, "own")
    assert files_of(images) == before


def test_patients_are_known_by_a_column_however_it_is_written(images, capsys):
    paths = sorted(path.relative_to(images).as_posix() for path in images.glob("*/*.png"))
    rows = [f"{path},{path.split('/')[0]},person {i // 4}" for i, path in enumerate(paths)]
    (images / "list.csv").write_text("\n".join(["path,label,Patient ID", *rows]))
    assert ended_with(["check", str(images)]) == 0
    shown = capsys.readouterr().out
    assert "10 patients or lesions" in shown
    assert "No patient is known" not in shown


def test_warnings_end_with_10_and_errors_with_11(images, capsys):
    save_picture(images / "mole" / "again.png", 0)
    assert ended_with(["check", str(images)]) == 10
    shown = capsys.readouterr().out
    assert "1 warning" in shown
    assert "exact-duplicates · 1" in shown
    assert ended_with(["check", str(images), "--no-duplicates"]) == 0
    assert "Duplicates were not searched for." in capsys.readouterr().out
    (images / "scar" / "1.png").write_bytes(b"no image")
    assert ended_with(["check", str(images)]) == 11
    shown = capsys.readouterr().out
    assert "Found 1 error, 1 warning:" in shown
    assert "scar/1.png: " in shown


def test_notes_alone_end_with_0(images, capsys):
    with Image.open(images / "mole" / "0.png") as image:
        image.resize((80, 60)).save(images / "mole" / "0.png")
    assert ended_with(["check", str(images)]) == 0
    assert "1 note" in capsys.readouterr().out


def test_only_some_examples_are_shown_and_the_rest_is_in_the_report(images, capsys):
    for number in range(10):
        (images / "mole" / f"bad{number}.png").write_bytes(bytes([number]))
    assert ended_with(["check", str(images), "--json", "reports/mine.json"]) == 11
    shown = capsys.readouterr().out
    assert shown.count("mole/bad") == 3
    assert "and 7 more in mine.json" in shown
    findings = json.loads(Path("reports/mine.json").read_text())["findings"]
    assert len(findings[0]["examples"]) == 10
    assert not Path("check.json").exists()


@pytest.mark.parametrize("where", ["check.json", "mole/deep/report.json"])
def test_the_report_is_never_written_into_the_data(images, capsys, monkeypatch, where):
    before = files_of(images)
    monkeypatch.chdir(images)
    assert ended_with(["check", ".", "--json", where]) == 2
    assert "is inside the data" in capsys.readouterr().err.splitlines()[0]
    assert files_of(images) == before


def test_the_report_takes_the_place_of_a_report_only(images, capsys):
    for _ in range(2):
        assert ended_with(["check", str(images)]) == 0
    capsys.readouterr()
    for content in ("my thesis", '{"other": 1}'):
        Path("check.json").write_text(content)
        assert ended_with(["check", str(images)]) == 4
        assert "check.json" in capsys.readouterr().err.splitlines()[0]
        assert Path("check.json").read_text() == content


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["missing"], "missing"),
        (["{images}", "--dataset", "ham1000"], "Did you mean 'ham10000'?"),
        (["{images}", "--dataset", "phantom"], "drawn, not read"),
        (["{images}", "--dataset", "ham10000"], "images"),
    ],
)
@pytest.mark.parametrize("command", ["check", "prepare"])
def test_data_that_cannot_be_found_is_named_and_nothing_is_written(images, capsys, command, arguments, hint):
    chosen = [argument.format(images=images) for argument in arguments]
    out = ["--out", "store"] if command == "prepare" else []
    assert ended_with([command, *chosen, *out]) == 2
    assert hint in capsys.readouterr().err.splitlines()[0]
    assert files_of(Path.cwd()) == {}


def with_manifest(images: Path, name: str, missing: Sequence[str] = ()) -> Path:
    files = [path.relative_to(images).as_posix() for path in sorted(images.rglob("*.png"))] + list(missing)
    columns = {"path": files, "label": [file.split("/")[0] for file in files]}
    if name.endswith(".csv"):
        rows = zip(*columns.values(), strict=True)
        (images / name).write_text("\n".join(["path,label", *map(",".join, rows)]))
    else:
        pq.write_table(pa.table(columns), images / name)
    return images / name


@pytest.mark.parametrize("name", ["list.csv", "list.parquet"])
def test_a_manifest_is_checked_and_prepared(images, capsys, name):
    path = with_manifest(images, name)
    assert ended_with(["check", str(path)]) == 0
    assert json.loads(Path("check.json").read_text())["n_images"] == 40
    assert ended_with(["prepare", str(path), "--out", "store", "--side", "8"]) == 0
    assert len(open_cache(Path("store"))) == 40


def test_missing_files_are_reported_by_a_check_and_refused_by_prepare(images, capsys):
    path = with_manifest(images, "list.csv", ["mole/gone.png", "scar/gone too.png"])
    assert ended_with(["check", str(path)]) == 11
    assert "mole/gone.png: " in capsys.readouterr().out
    (missing,) = json.loads(Path("check.json").read_text())["findings"]
    assert (missing["code"], missing["count"]) == ("unreadable", 2)
    assert [example.split(":")[0] for example in missing["examples"]] == [
        "mole/gone.png",
        "scar/gone too.png",
    ]
    assert ended_with(["prepare", str(path), "--out", "store"]) == 2
    first, *named = capsys.readouterr().err.splitlines()
    assert "2 of 42 files that" in first
    assert named == ["  row 42: mole/gone.png", "  row 43: scar/gone too.png"]


def test_a_known_dataset_with_missing_images_is_reported_by_a_check_and_refused_by_prepare(images, capsys):
    root = images.parent / "ham"
    for seed in range(4):
        save_picture(root / "images" / f"ISIC_{seed}.jpg", seed)
    rows = [f"{seed // 2},ISIC_{seed},{('nv', 'mel')[seed % 2]}" for seed in range(6)]
    (root / "HAM10000_metadata.csv").write_text("\n".join(["lesion_id,image_id,dx", *rows]))
    assert ended_with(["check", str(root)]) == 11
    report = json.loads(Path("check.json").read_text())
    assert report["dataset"] == "ham10000"
    missing = next(found for found in report["findings"] if found["code"] == "unreadable")
    assert [example.split(":")[0] for example in missing["examples"]] == ["ISIC_4.jpg", "ISIC_5.jpg"]
    capsys.readouterr()
    assert ended_with(["prepare", str(root), "--out", "store"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  ISIC_4.jpg", "  ISIC_5.jpg"]


def test_class_names_that_collide_are_reported_by_a_check_and_refused_by_prepare(images, capsys):
    for seed in range(100, 125):
        save_picture(images / "Mole" / f"{seed}.png", seed)
    assert ended_with(["check", str(images)]) == 11
    codes = {found["code"] for found in json.loads(Path("check.json").read_text())["findings"]}
    assert codes == {"class-names-collide"}
    assert ended_with(["prepare", str(images), "--out", "store"]) == 2
    assert "two classes that differ in case" in capsys.readouterr().err


def test_an_unfinished_store_is_said_to_be_one(images, capsys):
    (images / "scar" / "1.png").write_bytes(b"no image")
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "8"]) == 2
    capsys.readouterr()
    assert ended_with(["check", "store"]) == 2
    assert "store is not finished" in " ".join(capsys.readouterr().err.split())


def test_a_terminal_is_never_told_what_to_do_by_a_manifest(images, capsys):
    path = with_manifest(images, "list.csv", ["mole/\u202egone.png"])
    ended_with(["prepare", str(path), "--out", "store"])
    path.write_text(path.read_text() + "\nmole/\x1b[2J.png,mole\n", encoding="utf-8")
    ended_with(["check", str(path)])
    shown = capsys.readouterr()
    assert not {"\x1b", "\u202e"} & set(shown.err + shown.out)
    assert "\\u202egone.png" in shown.err
    assert "\\x1b[2J.png" in shown.err


def test_own_images_can_be_asked_for_by_name(images, capsys):
    assert ended_with(["check", str(images), "--dataset", "own"]) == 0
    assert "own  40 images" in capsys.readouterr().out


def test_a_terminal_is_never_told_what_to_do_by_a_file_name():
    assert printable("a\x1b[31m[bold]b\udcff.png") == "a\\x1b[31m\\[bold]b\\udcff.png"


def test_images_are_prepared_and_the_store_can_be_checked(images, capsys):
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "40"]) == 0
    shown = capsys.readouterr()
    assert "Prepared: store  40 images of 40 x 40 · 2 classes" in shown.out
    assert "images/s" in shown.err
    store = open_cache(Path("store"))
    assert (len(store), store.pixels.side) == (40, 40)
    assert ended_with(["check", "store"]) == 0
    assert "own 40 images · 2 classes" in " ".join(capsys.readouterr().out.split())
    pixels = next(path for path in sorted(Path("store").rglob("*")) if path.suffix == ".u8")
    content = bytearray(pixels.read_bytes())
    content[100] ^= 1
    pixels.write_bytes(content)
    assert ended_with(["check", "store"]) == 5
    assert str(pixels) in capsys.readouterr().err.splitlines()[0]


def write_ham(root: Path, n: int) -> Path:
    """A small part of a known dataset, with a lesion for each two of its images."""
    for seed in range(n):
        save_picture(root / "images" / f"ISIC_{seed}.jpg", seed)
    rows = [f"{seed // 2},ISIC_{seed},{('nv', 'mel')[seed % 2]}" for seed in range(n)]
    (root / "HAM10000_metadata.csv").write_text("\n".join(["lesion_id,image_id,dx", *rows]))
    return root


def test_a_store_knows_its_dataset_and_is_checked_against_its_published_counts(images, capsys):
    ham = write_ham(images.parent / "ham", 6)
    assert ended_with(["prepare", str(ham), "--out", "store", "--side", "40"]) == 0
    assert open_cache(Path("store")).dataset == "ham10000"
    assert ended_with(["check", "store"]) == 11
    findings = json.loads(Path("check.json").read_text())["findings"]
    assert findings[0]["code"] in ("class-too-small", "incomplete")
    missing = next(found for found in findings if found["code"] == "incomplete")
    assert (missing["count"], missing["details"]) == (7, {"images": 10_009})
    assert (
        ended_with(["prepare", str(ham), "--out", "store", "--side", "40", "--dataset", "own"]) == 4
    )  # other data
    assert ended_with(["prepare", str(images), "--out", "own", "--side", "40"]) == 0
    assert open_cache(Path("own")).dataset == "own"


def test_a_changed_list_of_prepared_images_ends_with_5(images, capsys):
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "40"]) == 0
    path = Path("store/images.json")
    content = json.loads(path.read_text())
    content["labels"][0] = 7
    path.write_text(json.dumps(content))
    assert ended_with(["check", "store"]) == 5
    assert "images.json is damaged" in capsys.readouterr().err


RECIPE = """
data: {{name: {name}, root: {root}, side: 12, crop: 8}}
scenario: {{base: 1, increment: 1}}
network: {{backbone: resnet8_cifar}}
memory: {{per_class: 2}}
training: {{epochs: 1, batch_size: 8}}
method: {{name: finetune}}
execution: {{device: cpu, threads: 1}}
"""


def test_a_run_refuses_the_store_of_another_dataset(images, capsys):
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "12"]) == 0
    capsys.readouterr()
    Path("recipe.yaml").write_text(RECIPE.format(name="breastmnist", root="store"))
    assert ended_with(["run", "recipe.yaml", "--out", "run"]) == 2
    assert "was prepared as own, but data.name is breastmnist" in capsys.readouterr().err.splitlines()[0]


def test_a_warning_is_one_line_without_its_place_in_the_source(images, tmp_path):
    Path("recipe.yaml").write_text(RECIPE.format(name="own", root=images))
    command = [sys.executable, "-m", "medcil", "run", "recipe.yaml", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 1
    assert notes[0].startswith("Note: No split and no patients came with these images")
    assert notes[0].endswith("if every image is of another patient.")
    assert "UserWarning" not in done.stderr
    assert ".py:" not in done.stderr


def test_a_warning_tells_a_terminal_nothing_to_do(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert ended_with(["datasets"]) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", _show_warning)
        warnings.warn("of [bold]a\x1b[2J\n  and b", stacklevel=1)
    assert capsys.readouterr().err == "Note: of [bold]a\\x1b[2J and b\n"


def test_a_bad_file_stops_preparing_unless_it_may_be_left_out(images, capsys):
    (images / "scar" / "1.png").write_bytes(b"no image")
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "40"]) == 2
    message = capsys.readouterr().err
    assert "scar/1.png" in message
    assert "skip" in message
    assert ended_with(["prepare", str(images), "--out", "store", "--side", "40", "--skip-bad"]) == 0
    assert "39 images of 40 x 40 · 2 classes" in capsys.readouterr().out
    assert ended_with(["check", "store"]) == 10
    assert "skipped · 1" in capsys.readouterr().out


def test_a_store_is_not_written_into_the_data(images, capsys):
    before = files_of(images)
    assert ended_with(["prepare", str(images), "--out", str(images / "store")]) == 2
    assert "is inside the data" in capsys.readouterr().err.splitlines()[0]
    assert files_of(images) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "prepare"])
def test_ctrl_c_ends_with_130_and_says_how_to_go_on(shared_data, tmp_path, command):
    archive = str(shared_data / "ham10000_200x150.tar.gz")
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
from medcil.cli.main import _show_warning, main
from medcil.data.image_table import ImageTable
reads, original = [0], ImageTable.read

def read(self, index):
    reads[0] += 1
    if reads[0] == 200:
        os.kill(os.getpid(), signal.SIGINT)
    return original(self, index)

ImageTable.read = read
main(sys.argv[1:])
"""
    outs = {"check": ["--json", "check.json"], "prepare": ["--side", "64", "--out", "store"]}
    *options, out = outs[command]
    run = [sys.executable, "-c", code, command, archive, *options, str(tmp_path / out)]
    started = time.monotonic()
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "run the same command again" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "check.json").exists()
    assert time.monotonic() - started < 60


def test_every_dataset_is_listed_with_its_counts_and_page(capsys, monkeypatch):
    monkeypatch.setattr(console.screen, "width", 200)
    assert ended_with(["datasets"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 1 + len(DATASETS) + 1
    assert lines[-1].startswith("own Your own images")
    assert next(line for line in lines if line.startswith("pathmnist ")).startswith("pathmnist 9 107,180 ")
    listed = next(line for line in lines if line.startswith("ham10000 "))
    assert listed.startswith("ham10000 7 10,015 3-2, 3-1 Harvard Dataverse")


@pytest.mark.slow
def test_the_real_ham10000_is_recognized_and_examined(shared_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console.screen, "width", 100)
    monkeypatch.chdir(tmp_path)
    archive = shared_data / "ham10000_200x150.tar.gz"
    assert ended_with(["check", str(archive), "--no-duplicates"]) == 10
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "ham10000 10,015 images · 7 classes · 7,470 patients or lesions · imbalance 57.1 : 1"
    counts = {line.split()[0]: line.split()[1:5] for line in lines[5:13] if line}
    assert counts["NV"] == ["6,705", "5,363", "1,342", "5,403"]
    assert counts["DF"][:3] == ["115", "94", "21"]
    assert "As many images as published." in lines
    assert "warning groups-across-split · 697" in lines
    report = json.loads(Path("check.json").read_text())
    assert [c["images"] for c in report["classes"]] == [1113, 6705, 514, 327, 1099, 115, 142]
    assert report["findings"][0]["details"] == {"groups": 697, "images": 1677, "test_images": 759}
