"""The commands as someone types them."""

import csv
import json
import shutil

import pytest
from PIL import Image

from medcil.cli.main import main

from ..small import random_images
from .tiny_model import NAMES, tiny_state, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "skin", tiny_state())


@pytest.fixture
def data(tmp_path):
    for i, pixels in enumerate(random_images(9, seed=6)):
        path = tmp_path / "data" / NAMES[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "data"


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def test_predict_writes_a_table(model, data, tmp_path, capsys):
    (data / "wart" / "bad.png").write_text("no image")
    out = tmp_path / "predictions.csv"
    assert run("predict", model, data, "-o", out, "--sensitivity", "wart=0.9", "--device", "cpu") == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 10
    assert [bool(row["error"]) for row in rows].count(True) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "10 rows" in said
    assert "version v1, prior uniform" in said
    assert "1 of 10 files cannot be read" in said
    assert "wart is flagged from a probability of" in said
    assert run("predict", model, data, "-o", out, "--device", "cpu") == 0  # such a table may be replaced


def test_a_few_predictions_are_listed_with_their_probabilities(model, data, tmp_path, capsys):
    (data / "wart" / "bad.png").write_text("no image")
    out = tmp_path / "predictions.csv"
    assert run("predict", model, data, "-o", out, "--device", "cpu", "--abstain-below", "0.999999") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert lines[0].split() == ["predicted", "probability", "image"]
    for line, row in zip(lines[1:], rows, strict=False):  # the last line names the table
        shown = line.split()
        assert shown[2] == row["file"]
        if row["error"]:
            assert shown[:2] == ["–", "–"]
            assert line.endswith(f"{row['file']} (cannot be read)")
            continue
        assert shown[0] == row["predicted"]
        assert float(shown[1].rstrip("%")) == pytest.approx(100 * float(row["probability"]), abs=0.051)
        assert ("unlike anything known" in line) == (row["unlike"] == "yes")
        assert line.endswith("abstained)")
    assert len(lines) == 12
    assert run("predict", model, data, "-o", out, "--device", "cpu", "--quiet") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_many_predictions_are_counted_for_every_class(model, data, tmp_path, capsys):
    for i in range(3):
        shutil.copytree(data / NAMES[0], data / f"again {i}" / "x")
        shutil.copytree(data / NAMES[1], data / f"again {i}" / "y")
    out = tmp_path / "predictions.csv"
    assert run("predict", model, data, "-o", out, "--device", "cpu") == 0
    header, *lines, last = capsys.readouterr().out.splitlines()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 27
    assert header.split() == ["predicted", "images", "mean", "probability"]
    assert {line.split()[0] for line in lines} == set(NAMES)
    for line in lines:
        name, n, mean = line.split()
        own = [float(row["probability"]) for row in rows if row["predicted"] == name]
        assert int(n) == len(own)
        if own:
            assert float(mean.rstrip("%")) == pytest.approx(100 * sum(own) / len(own), abs=0.051)
        else:
            assert mean == "–"
    assert "27 rows" in last


def test_a_mistyped_class_is_answered_with_all_that_the_model_knows(model, data, capsys):
    known = f"The model knows: {', '.join(NAMES)}."
    assert run("predict", model, data, "--sensitivity", "wort=0.9") == 2
    assert known in capsys.readouterr().err
    (data / "prior.csv").write_text("nothing,1")
    assert run("predict", model, data, "--prior", data / "prior.csv") == 2
    assert known in capsys.readouterr().err
    (data / "prior.csv").unlink()
    for name in NAMES:
        (data / name).rename(data / f"{name} of another kind")
    assert run("evaluate", model, data) == 2
    assert known in capsys.readouterr().err


def test_a_name_does_not_become_a_formula(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (data / "wart" / "2.png").rename(tmp_path / "=1+1.png")
    (tmp_path / "@bad.png").write_text("no image")
    assert run("predict", model, "=1+1.png", "@bad.png", "-o", "out.csv", "--device", "cpu") == 0
    sound, bad = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert sound["file"] == "'=1+1.png"
    assert 0 < float(sound["probability"]) <= 1
    assert bad["file"] == "'@bad.png"
    assert bad["error"].startswith("'@bad.png cannot be read")


def test_evaluate_writes_figures_and_a_page(model, data, tmp_path, capsys):
    out = tmp_path / "out"
    grades = ",".join(NAMES)
    assert run("evaluate", model, data, "-o", out, "--draws", 20, "--grades", grades, "--device", "cpu") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        ".medcil",
        "evaluation.html",
        "evaluation.json",
        "evaluation.md",
    ]
    content = json.loads((out / "evaluation.json").read_text())
    assert content["by_image"]["n"] == 9
    assert "quadratic_kappa" in content["by_image"]
    assert "Balanced accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("predict", "MODEL", "DATA", "--sensitivity", "wart"), 2, "write CLASS=SHARE once"),
        (("predict", "MODEL", "DATA", "--sensitivity", "wart=high"), 2, "write CLASS=SHARE once"),
        (("predict", "MODEL", "DATA", "--sensitivity", "wort=0.9"), 2, "Did you mean 'wart'?"),
        (
            ("predict", "MODEL", "DATA", "--sensitivity", "wart=0.9", "--sensitivity", "wart=0.8"),
            2,
            "write CLASS=SHARE once",
        ),
        (("predict", "MODEL", "DATA", "--prior", "uniforn"), 2, "neither `uniform` nor `training`"),
        (("predict", "MODEL", "DATA/none"), 2, "There is nothing at"),
        (("predict", "DATA", "DATA"), 2, "is no model folder"),
        (("predict", "MODEL", "DATA", "-o", "DATA/wart/2.png"), 4, "was not written by this command"),
        (("evaluate", "MODEL", "DATA", "-o", "DATA/out"), 2, "is inside the data"),
        (("evaluate", "MODEL", "DATA/none"), 2, "there is nothing at"),
        (("evaluate", "MODEL", "DATA", "--version", "v7"), 2, "no version 'v7'"),
    ],
)
def test_bad_input_is_answered(model, data, capsys, arguments, code, said):
    before = {path: path.read_bytes() for path in data.rglob("*.png")}
    texts = [text.replace("MODEL", str(model)).replace("DATA", str(data)) for text in arguments]
    assert run(*texts) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in data.rglob("*.png")} == before
