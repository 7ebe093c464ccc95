"""An exported file predicts what the model folder predicts, in a process without torch."""

import ast
import csv
import re
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.clinic.evaluate import evaluate
from medcil.clinic.export import export
from medcil.clinic.predict import predict
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages, decode_image, encode_png
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.methods import METHODS
from medcil.models.network import NetworkSpec
from medcil.models.weights import load_weights
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

from ..small import random_images, short_training
from .tiny_model import NAMES, tiny_state, write_model

CPU = ExecutionConfig(device="cpu")
N_REAL = 500

WITHOUT_TORCH = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        unneeded = "torch torchvision timm safetensors onnx onnxscript scipy pyarrow matplotlib yaml filelock"
        if name.partition(".")[0] in unneeded.split():
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refused())
from medcil.cli.main import main

main(sys.argv[1:])
"""


def predict_without_torch(model: Path, images: Path, prior: str, out: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "predict", str(model), str(images)]
    command += ["--prior", prior, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model", tiny_state())


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for i, pixels in enumerate(random_images(5, side=16, seed=3)):
        (folder / f"{i}.png").write_bytes(encode_png(pixels))
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("prior", ["uniform", "training"])
def test_both_paths_write_the_same_rows(model, images, prior, tmp_path):
    file = tmp_path / "model.onnx"
    done = export(model, file)
    assert (done.path, done.n_compared, done.compared_on) == (file, 60, "images of the hold-out")
    assert done.difference < 1e-4
    predict(model, images, prior=prior, out=tmp_path / "torch.csv", execution=CPU)
    predict_without_torch(file, images, prior, tmp_path / "onnx.csv")
    ours, theirs = rows_of(tmp_path / "torch.csv"), rows_of(tmp_path / "onnx.csv")
    assert len(ours) == len(theirs) == 6
    for row, other in zip(ours, theirs, strict=True):
        assert list(row) == list(other)
        for column in row:
            if column == "version":
                assert (row[column], other[column]) == ("v1", "model.onnx")
            elif column == "probability" or column.startswith("p(") or column == "likeness":
                assert (row[column] == "") == (other[column] == "")
                assert abs(float(row[column] or 0) - float(other[column] or 0)) < 1e-4
            elif not column.endswith("_probability"):
                assert row[column] == other[column], column


def test_both_are_evaluated_alike(model, tmp_path):
    for i, pixels in enumerate(random_images(12, side=16, seed=5)):
        path = tmp_path / "data" / NAMES[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(pixels))
    export(model, tmp_path / "model.onnx")
    ours, theirs = (
        evaluate(path, tmp_path / "data", draws=0, execution=CPU).content["by_image"]
        for path in (model, tmp_path / "model.onnx")
    )
    assert ours["confusion"] == theirs["confusion"]
    assert ours["brier"]["value"] == pytest.approx(theirs["brier"]["value"], abs=1e-4)


@pytest.mark.slow
def test_it_starts_in_less_than_a_second(model, images, tmp_path):
    """In the processor's time, which other work on the machine hardly changes; the best of three."""
    file = tmp_path / "model.onnx"
    export(model, file)
    (images / "broken.png").unlink()
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        predict_without_torch(file, images, "uniform", tmp_path / "onnx.csv")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 1.0


@pytest.mark.slow
def test_the_benchmark_measures_it(model, images, tmp_path):
    export(model, tmp_path / "model.onnx")
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "onnx_start.py"
    command = [
        sys.executable,
        str(script),
        str(tmp_path / "model.onnx"),
        str(images / "0.png"),
        "--rounds",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    empty, libraries, predicting = (line.split("|")[3] for line in done.stdout.splitlines()[3:])
    assert 0 <= float(empty) < float(libraries) < float(predicting)


@pytest.mark.slow
def test_the_host_in_the_docs_says_the_same(model, tmp_path):
    """Of a photograph that is large and lies on its side."""
    docs = Path(__file__).resolve().parents[2] / "docs/how-to/export.md"
    blocks = re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "session" in block)
    export(str(model), str(tmp_path / "skin.onnx"))
    photograph = Image.fromarray(random_images(1, side=300, seed=3)[0].permute(1, 2, 0).numpy())
    on_its_side = Image.Exif()
    on_its_side[0x0112] = 6
    photograph.save(tmp_path / "new.jpg", exif=on_its_side)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = predict(model, tmp_path / "new.jpg", execution=CPU)
    said = ast.literal_eval(done.stdout)
    assert list(said) == list(expected.class_names)
    np.testing.assert_allclose(list(said.values()), expected.rows[0].probabilities, atol=1e-4)


@pytest.fixture(scope="session")
def real_images(shared_data: Path, tmp_path_factory) -> list[Path]:
    """The first ones of HAM10000 in a folder, as their owners wrote them."""
    folder = tmp_path_factory.mktemp("ham10000")
    with tarfile.open(shared_data / "ham10000_200x150.tar.gz") as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                content = archive.extractfile(member)
                assert content is not None
                (folder / Path(member.name).name).write_bytes(content.read())
            if len(list(folder.iterdir())) == N_REAL:
                break
    return sorted(folder.iterdir())


def learned(method: str, weights: Path, files: list[Path]) -> State:
    """ImageNet's ResNet-18 after two tasks of two made-up classes of real images."""
    spec = NetworkSpec(backbone="resnet18", last_relu=False, learn_scale=True)
    state = initial_state(spec, Preprocessing(side=64, crop=56), seed=0)
    load_weights(state.network.backbone, str(weights), name="resnet18")
    training = short_training(training={"epochs": 1, "batch_size": 8})
    for n_old in (0, 2):
        pixels = torch.stack(
            [decode_image(file.read_bytes(), 64) for file in files[8 * n_old : 8 * n_old + 16]]
        )
        samples = Samples(TensorImages(pixels), torch.arange(2).repeat_interleave(8) + n_old)
        task = Task(
            class_names=(f"class {n_old}", f"class {n_old + 1}"), n_old=n_old, train=samples, test=samples
        )
        state = learn_task(state, task, METHODS[method](), training)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("method", ["balanced", "icarl", "der"])
def test_both_paths_agree_on_real_images(method, real_images, shared_data, tmp_path):
    weights = shared_data.parent / "weights" / "resnet18_imagenet1k_v1_fp16.safetensors"
    state = learned(method, weights, real_images)
    pixels = torch.stack([decode_image(file.read_bytes(), 64) for file in real_images[-24:]])
    holdout = Samples(TensorImages(pixels), torch.arange(4).repeat_interleave(6))
    model = write_model(tmp_path / "model", state, holdout)
    export(model, tmp_path / "model.onnx")
    folder = real_images[0].parent
    ours, theirs = (predict(path, folder, execution=CPU) for path in (model, tmp_path / "model.onnx"))
    assert len(ours.rows) == len(theirs.rows) == N_REAL
    first, second = (np.array([row.probabilities for row in found.rows]) for found in (ours, theirs))
    assert np.abs(first - second).max() < 1e-4
    assert first.std(axis=0).min() > 1e-3  # the images are told apart at all
