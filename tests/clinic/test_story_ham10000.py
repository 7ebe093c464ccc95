"""The whole story on real images, from the command line alone: HAM10000, four classes first, three later."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from .patients import traces
from .real_images import ARRIVALS, write_folders

IMAGES, MEASURED, EPOCHS = 70, 40, 5
"""Of a class at most, to train and to measure on."""
FIRST, ALL = ARRIVALS["first"], (*ARRIVALS["first"], *ARRIVALS["second"], *ARRIVALS["third"])
COMMAND = Path(sys.executable).with_name("medcil")
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # so that the settings chosen are the same everywhere

Rows = dict[str, dict[str, str]]


def medcil(*arguments: object, expected: int = 0) -> str:
    """What a command says, in a process of its own."""
    done = subprocess.run([COMMAND, *map(str, arguments)], env=NO_GPU, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_the_story_on_real_images(shared_data: Path, tmp_path: Path) -> None:
    weights = shared_data.parent / "weights" / "resnet18_imagenet1k_v1_fp16.safetensors"
    archive = shared_data / "ham10000_200x150.tar.gz"
    data = write_folders(archive, tmp_path / "data", train=IMAGES, test=MEASURED)
    model, tuned = tmp_path / "model", tmp_path / "tuned"
    train(data, model, weights)
    data["first"].rename(tmp_path / "away")  # no later command may need the images
    first_rows = predict_first(data, model)

    update_by_fine_tuning(data, model, tuned)
    update(data, model)
    kept, lost = (content(folder, "v3", "metrics")["balanced_accuracy"] for folder in (model, tuned))
    print(f"Balanced accuracy over seven classes: {kept:.1%}; fine-tuned {lost:.1%}")
    assert kept > lost + 0.15

    erase(model, tmp_path / "away")
    rows = evaluate(data, model, tmp_path)
    explain(data, model, rows, tmp_path)
    export(data, model, rows, tmp_path)
    medcil("rollback", model, "v1")
    assert history(model) == {"v1": True, "v2": False, "v3": False}
    serve(data, model, first_rows)


def train(data: dict[str, Path], model: Path, weights: Path) -> None:
    options = ("--epochs", EPOCHS, "--weights", weights, "--eval", data["eval"] / "first.csv")
    said = medcil("train", data["first"], "--out", model, *options)
    assert "data.side 64 " in said
    assert "method.name balanced " in said
    found = content(model, "v1", "metrics")
    assert found["images"] == MEASURED * len(FIRST)
    assert found["balanced_accuracy"] > 0.35  # a guess: 0.25
    assert f"balanced accuracy {found['balanced_accuracy']:.1%}" in said


def predict_first(data: dict[str, Path], model: Path) -> Rows:
    """Classes had equally many images, so that a uniform prior changes no answer."""
    rows = predict(model, [data["eval"] / name for name in FIRST])
    assert len(rows) == MEASURED * len(FIRST)
    assert {row["version"] for row in rows.values()} == {"v1"}
    for entry in content(model, "v1", "metrics")["classes"]:
        assert recalls(rows)[entry["name"]] == pytest.approx(entry["recall"], abs=1 / MEASURED)
    return rows


def update_by_fine_tuning(data: dict[str, Path], model: Path, out: Path) -> None:
    """The same images, epochs and first version, in a copy; the gate does not let the second one pass."""
    shutil.copytree(model, out)
    options = ("--method", "finetune", "--eval", data["eval"] / "second.csv")
    medcil("update", out, data["second"], *options)
    assert listed(model) == ("v1", ["v1"])
    old = content(out, "v2", "forgetting")["mean_recall_of_old_classes"]
    assert old["high"] < -0.2  # certain, and most of what there was
    options = ("--eval", data["eval"] / "third.csv", "--max-forgetting", 5)
    said = medcil("update", out, data["third"], *options, expected=8)
    assert "v3 is not promoted" in said
    assert listed(out) == ("v2", ["v1", "v2", "v3"])
    assert content(out, "v3", "provenance")["settings"]["method"]["name"] == "finetune"


def update(data: dict[str, Path], model: Path) -> None:
    for number, name in ((2, "second"), (3, "third")):
        version = f"v{number}"
        said = medcil("update", model, data[name], "--eval", data["eval"] / f"{name}.csv")
        assert listed(model) == (version, [f"v{n + 1}" for n in range(number)])
        facts, cost = content(model, version, "provenance"), content(model, version, "forgetting")
        assert set(facts["classes_added"]) == set(ARRIVALS[name])
        assert facts["settings"]["training"]["epochs"] == EPOCHS  # as asked for when it was trained
        old = cost["mean_recall_of_old_classes"]
        print(f"{version}: old classes {old['before']:.1%} before, {old['after']:.1%} after")
        assert cost["verdict"] in said
        assert all(entry["recall"] > 0 for entry in cost["new_classes"])


def erase(model: Path, away: Path) -> None:
    """Lesions stand for patients, whom HAM10000 does not name: the one with the most exemplars."""
    people = content(model, "v1", "people")["patients"]
    person, n = max(((person, len(files)) for person, files in people.items()), key=lambda found: found[1])
    with (away / "images.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["lesion_id"] == person]
    files = [away / row["path"] for row in rows]
    assert len(files) >= n
    assert traces(model, files, person, side=64)
    said = medcil("erase", model, "--patient", person)
    assert f"Removed: {n} image" in said
    assert "Trained on images of this patient: v1, v2, v3." in said
    assert traces(model, files, person, side=64) == []


def evaluate(data: dict[str, Path], model: Path, tmp_path: Path) -> Rows:
    """What it measures is what can be counted in the rows of `predict`."""
    rows = predict(model, [data["eval"]])
    medcil("evaluate", model, data["eval"] / "third.csv", "-o", tmp_path / "evaluation", "--draws", 100)
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert found["version"] == "v3"
    by_hand = recalls(rows)
    assert set(by_hand) == set(ALL)
    figure = found["by_image"]["balanced_accuracy"]
    print(f"Evaluated under a uniform prior: {figure}")
    assert figure["value"] == pytest.approx(np.mean(list(by_hand.values())))
    assert set(found["by_subgroup"]) == {"age", "sex"}
    assert found["by_patient"]["n"] < found["by_image"]["n"] == len(rows)
    return rows


def explain(data: dict[str, Path], model: Path, rows: Rows, tmp_path: Path) -> None:
    image = sorted((data["eval"] / "MEL").iterdir())[0]
    medcil("explain", model, image, "-o", tmp_path / "explanation")
    found = json.loads((tmp_path / "explanation" / "explanation.json").read_text())
    first, second = found["classes"]
    row = rows[image.name]
    assert (first["name"], second["name"]) == (row["predicted"], row["top_2"])
    assert first["probability"] == pytest.approx(float(row["probability"]), abs=1e-4)
    assert np.std(first["saliency"]) > 0
    exemplars = json.loads((model / "versions/v3/state/manifest.json").read_text())["exemplars"]
    class_of = {entry["file"]: entry["class"] for entry in exemplars}
    for of_class in (first, second):
        assert {class_of[near["file"]] for near in of_class["nearest_exemplars"]} == {of_class["name"]}
    assert (tmp_path / "explanation" / "index.html").stat().st_size > 0


def export(data: dict[str, Path], model: Path, rows: Rows, tmp_path: Path) -> None:
    medcil("export", model, "--format", "onnx", "-o", tmp_path / "skin.onnx")
    exported = predict(tmp_path / "skin.onnx", [data["eval"]])
    assert exported.keys() == rows.keys()
    columns = [f"p({name})" for name in ALL]
    for name, row in rows.items():
        assert [float(exported[name][c]) for c in columns] == pytest.approx(
            [float(row[c]) for c in columns], abs=1e-4
        )


def history(model: Path) -> dict[str, bool]:
    """Which versions are listed, and whether each is the current one."""
    said = medcil("history", model)
    for version in ("v1", "v2", "v3"):
        assert f"{content(model, version, 'metrics')['balanced_accuracy']:.1%}" in said
    return {name: star == "*" for star, name in re.findall(r"(\*|\s|^)\s?(v\d)\b", said)}


def serve(data: dict[str, Path], model: Path, rows: Rows) -> None:
    image = sorted((data["eval"] / "NV").iterdir())[0]
    command = [COMMAND, "serve", str(model), "--port", "0"]
    with subprocess.Popen(
        command, env=NO_GPU, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert found is not None
            about = httpx.get(f"{found.group()}/api/model").raise_for_status().json()
            sent = {"files": (image.name, image.read_bytes())}
            answer = httpx.post(f"{found.group()}/api/predict", files=sent, timeout=60).raise_for_status()
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=120) == 0
        finally:
            server.kill()
    assert (about["version"], set(about["classes"])) == ("v1", set(FIRST))
    (row,) = answer.json()["rows"]
    said = {entry["name"]: entry["probability"] for entry in row["classes"]}
    expected = {name: float(rows[image.name][f"p({name})"]) for name in FIRST}
    assert said == pytest.approx(expected, abs=1e-4)  # as before any update


def predict(model: Path, images: list[Path]) -> Rows:
    """By the file's name."""
    out = model.with_name(f"{model.name}-predictions.csv")
    medcil("predict", model, *images, "-o", out)
    with out.open(newline="") as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert not any(row["error"] for row in rows.values())
    return rows


def recalls(rows: Rows) -> dict[str, float]:
    """Of the true classes, after which the folders are called."""
    right: dict[str, list[bool]] = {}
    for row in rows.values():
        true = Path(row["file"]).parent.name
        right.setdefault(true, []).append(row["predicted"] == true)
    return {name: float(np.mean(answers)) for name, answers in right.items()}


def listed(model: Path) -> tuple[str, list[str]]:
    found = json.loads((model / "model.json").read_text())
    return found["current"], list(found["versions"])


def content(model: Path, version: str, name: str) -> Any:
    return json.loads((model / "versions" / version / f"{name}.json").read_text())
