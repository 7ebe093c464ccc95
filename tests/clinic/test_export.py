"""The exported file says what the network says, and needs no torch."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from medcil.clinic import export as export_module
from medcil.clinic.calibration import Calibration, Unlike
from medcil.clinic.export import export_state, largest_difference
from medcil.clinic.inference import OnnxModel
from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.train import train
from medcil.clinic.update import update
from medcil.config import ExecutionConfig
from medcil.data.samples import Samples, TensorImages
from medcil.data.sources import list_images
from medcil.data.stream import Task
from medcil.data.transforms import Preprocessing
from medcil.errors import DamagedFile, InvalidInput, MedcilError
from medcil.methods import METHODS
from medcil.training.inference import Scorer, predict_scores
from medcil.training.loop import learn_task
from medcil.training.state import State, initial_state

from ..small import SMALLEST, new_state, random_images, short_training, task_of, with_readout
from .real_images import write_folders

TEMPERATURE = 0.4
CLASSES = 4


@cache
def learned(method: str) -> State:
    """Two tasks of two classes."""
    state = new_state(spec=SMALLEST)
    for n_old, counts in ((0, [6, 4]), (2, [5, 3])):
        task = task_of(counts, n_old=n_old, seed=n_old)
        state = learn_task(state, task, METHODS[method](), short_training())
    return state


@pytest.mark.parametrize(
    ("backbone", "views"),
    [
        ("test_efficientnet", 8),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("test_vit", "test_convnext")),
        pytest.param("test_vit", 1, marks=pytest.mark.slow),
    ],
)
def test_stages_of_other_families_are_exported(backbone, views, tmp_path):
    shown = Preprocessing(side=68, crop=64, views=views)
    state = initial_state(replace(SMALLEST, backbone=backbone), shown, seed=0)
    images = Samples(TensorImages(random_images(8, side=68)), torch.arange(8) % 2)
    task = Task(("a", "b"), 0, images, images)
    state = learn_task(state, task, METHODS["analytic"](stages=2), short_training())
    assert export_state(state, tmp_path / "model.onnx", calibration=calibrated(state)).difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "weights"),
    [
        ("resnet18", "resnet18_imagenet1k_v1_fp16"),
        ("tf_efficientnet_lite0", "tf_efficientnet_lite0_imagenet_fp16"),
    ],
)
def test_the_file_and_the_network_agree_on_real_images(backbone, weights, shared_data, tmp_path):
    """HAM10000: `analytic` with an adapted network, a pretrained copy and two stages of both."""
    data = write_folders(shared_data / "ham10000_200x150.tar.gz", tmp_path / "data", train=30, test=120)
    file = shared_data.parent / "weights" / f"{weights}.safetensors"
    about = {"method": "analytic", "epochs": 1, "side": 64, "backbone": backbone, "weights": str(file)}
    train(data["first"], tmp_path / "model", **about, settings=["data.views=8", "execution.device=cpu"])
    update(tmp_path / "model", data["second"], settings=["execution.device=cpu"])
    version = ModelFolder(tmp_path / "model").version()
    learned, calibration = version.load_state(), version.calibration()
    assert learned.readout.feature_spec.stages == 2
    assert learned.readout.companion is not None
    pixels = list_images(data["eval"] / "third.csv").loaded(64).samples(64).read_all()[:500]
    assert len(pixels) == 500
    prior = np.array([0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    for views in (8, 1):
        state, path = in_views(learned, views), tmp_path / f"{views}.onnx"
        export_state(state, path, calibration=calibration)
        found = OnnxModel(path).answers(pixels.numpy(), prior.tolist()).probabilities
        scores = Scorer(state, ExecutionConfig(device="cpu")).answer(pixels.numpy())[0]
        log_prior = state.readout.log_prior.double().numpy()
        weights_of = np.exp((scores - log_prior) / calibration.temperature) * prior
        difference = np.abs(found - weights_of / weights_of.sum(axis=1, keepdims=True)).max()
        print(f"{backbone}, {views} views: {difference:.1e} in probability on 500 images")
        assert difference < 1e-4


def calibrated(state: State, temperature: float = TEMPERATURE) -> Calibration:
    prior = tuple(state.readout.log_prior.tolist())
    return Calibration(temperature, prior, Unlike(0.3, 0.05, "hold-out"), images=9)


def by_hand(state: State, pixels: torch.Tensor, prior: list[float]) -> np.ndarray:
    samples = Samples(TensorImages(pixels), torch.zeros(len(pixels), dtype=torch.int64))
    scores = predict_scores(state, samples, ExecutionConfig(device="cpu")).double()
    evidence = (scores - state.readout.log_prior) / TEMPERATURE
    weights = torch.exp(evidence - evidence.amax(dim=1, keepdim=True)) * torch.tensor(prior)
    return (weights / weights.sum(dim=1, keepdim=True)).numpy()


def in_views(state: State, views: int) -> State:
    return replace(state, preprocessing=replace(state.preprocessing, views=views))


METHODS_TO_EXPORT = [
    ("balanced", 1),
    ("balanced", 8),
    ("gaussians", 8),
    ("analytic", 8),
    ("slda", 8),
    ("fecam", 8),
    *(pytest.param(name, 8, marks=pytest.mark.slow) for name in ("simplecil", "ranpac", "acil")),
    pytest.param("icarl", 8, marks=pytest.mark.slow),
    *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("icarl", "der", "lo2ln", "podnet", "bic")),
]


@pytest.mark.parametrize(("method", "views"), METHODS_TO_EXPORT)
def test_the_file_and_the_network_agree(method, views, tmp_path):
    state, path = in_views(learned(method), views), tmp_path / "model.onnx"
    was_training = state.network.training
    exported = export_state(state, path, calibration=calibrated(state))
    assert state.network.training == was_training
    assert exported.difference < 1e-4
    assert exported.n_compared == len(state.memory)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]

    model, pixels = OnnxModel(path), random_images(70, seed=5)
    prior = [0.7, 0.1, 0.15, 0.05]
    np.testing.assert_allclose(
        model.answers(pixels.numpy(), prior).probabilities, by_hand(state, pixels, prior), atol=1e-4
    )
    uniform = model.answers(pixels[:1].numpy())  # the prior may be left out
    np.testing.assert_allclose(uniform.probabilities, by_hand(state, pixels[:1], [0.25] * CLASSES), atol=1e-4)
    with torch.no_grad():  # of the image as it is
        embedding = state.network.eval()(state.preprocessing.normalize(pixels[:1, :, 1:9, 1:9])).embedding
    np.testing.assert_allclose(uniform.embedding, embedding, rtol=1e-4, atol=1e-5)
    unit = uniform.embedding / np.linalg.norm(uniform.embedding)
    np.testing.assert_allclose(
        uniform.likeness, (unit @ state.readout.class_means.numpy().T).max(axis=1), atol=1e-5
    )
    scores, likeness = model(random_images(0).numpy())
    assert (scores.shape, likeness.shape) == ((0, CLASSES), (0,))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    state = learned("balanced")
    export_state(state, path, calibration=calibrated(state))
    return path


def test_the_file_describes_itself(exported):
    state = learned("balanced")
    session = onnxruntime.InferenceSession(exported)
    assert [(i.name, i.type, i.shape[1:]) for i in session.get_inputs()] == [
        ("images", "tensor(uint8)", [3, 10, 10])
    ]
    assert [i.name for i in session.get_overridable_initializers()] == ["log_prior"]
    assert [o.name for o in session.get_outputs()] == ["scores", "embedding", "likeness", "probabilities"]
    metadata = session.get_modelmeta().custom_metadata_map
    assert "not a medical device" in metadata["notice"]
    described = json.loads(metadata["medcil"])
    assert described["class_names"] == list(state.class_names)
    assert described["preprocessing"]["resize"]["side"] == 10
    inside = described["preprocessing"]["inside_the_graph"]
    assert (inside["crop"], inside["crop_starts_at"]) == (8, 1)
    assert inside["mean"] == [0.485, 0.456, 0.406]
    assert inside["std"] == [0.229, 0.224, 0.225]
    assert inside["views"] == 1
    assert described["calibration"]["temperature"] == TEMPERATURE
    assert described["calibration"]["class_prior_in_scores"] == state.readout.log_prior.tolist()


def test_the_file_says_nothing_of_the_machine(exported):
    content = exported.read_bytes()
    folders = {Path(export_module.__file__).parents[2], Path(torch.__file__).parents[1], exported.parent}
    assert [folder for folder in folders if str(folder).encode() in content] == []
    assert b".py" not in content


def test_a_network_that_cannot_be_exported_is_named(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.onnx.OnnxExporterError("an operator is unknown")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(
        MedcilError, match=r"resnet8_cifar cannot be written as ONNX.*\nan operator is unknown"
    ):
        export_state(learned("balanced"), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_disagrees_is_not_left(exported, tmp_path, monkeypatch):
    state = learned("balanced")
    content = exported.read_bytes()
    monkeypatch.setattr(export_module, "onnx_bytes", lambda *_: content)
    export_state(state, tmp_path / "sound.onnx", calibration=calibrated(state))
    with pytest.raises(MedcilError, match="no file was written"):
        export_state(state, tmp_path / "off.onnx", calibration=calibrated(state, 0.41))
    assert [file.name for file in tmp_path.iterdir()] == ["sound.onnx"]


def test_no_class_no_file(tmp_path):
    with pytest.raises(InvalidInput, match="knows no class"):
        export_state(new_state(spec=SMALLEST), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_class_with_no_share_gets_none(exported):
    answers = OnnxModel(exported).answers(random_images(2).numpy(), [0.5, 0.0, 0.25, 0.25])
    assert (answers.probabilities[:, 1] == 0).all()
    np.testing.assert_allclose(answers.probabilities.sum(axis=1), 1, atol=1e-6)


def test_what_is_no_exported_model_is_refused(exported, tmp_path):
    with pytest.raises(InvalidInput, match="There is no file"):
        OnnxModel(tmp_path / "none.onnx")
    content = exported.read_bytes()
    with pytest.raises(DamagedFile, match="cannot be read as an ONNX model"):
        OnnxModel(content[: len(content) // 2])
    with pytest.raises(InvalidInput, match="not written by medcil"):
        OnnxModel(content.replace(b"medcil\x12", b"medciX\x12"))
    for damaged in (
        content.replace(b'"class_names"', b'"glass_names"'),
        content.replace(b'"side": 10', b'"side": 11'),
        content.replace(b'"views": 1', b'"views": 0'),
    ):
        with pytest.raises(DamagedFile, match="description is damaged"):
            OnnxModel(damaged)
    with pytest.raises(InvalidInput, match="newer medcil"):
        OnnxModel(content.replace(b'"format": 1, "medcil"', b'"format": 9, "medcil"'))


def test_one_bit_of_the_weights_is_enough(exported, tmp_path):
    content = bytearray(exported.read_bytes())
    weights = max((w.raw_data for w in onnx.load(exported).graph.initializer), key=len)
    content[content.index(weights) + len(weights) // 2] ^= 1
    (tmp_path / "bent.onnx").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"bent\.onnx was changed or damaged"):
        OnnxModel(tmp_path / "bent.onnx")


def test_views_that_were_left_out_are_noticed(exported):
    state = learned("balanced")
    model = OnnxModel(exported)
    assert largest_difference(in_views(state, 8), calibrated(state), model, state.memory) > 1e-3


def test_a_likeness_that_differs_is_noticed(exported):
    state = learned("balanced")
    moved = with_readout(state, class_means=state.readout.class_means.roll(1, dims=1))
    assert largest_difference(state, calibrated(state), OnnxModel(exported), state.memory) < 1e-4
    assert largest_difference(moved, calibrated(state), OnnxModel(exported), state.memory) > 1e-2


def test_a_name_by_which_no_model_is_known_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"must end in \.onnx"):
        export_state(learned("balanced"), tmp_path / "model")


def test_another_state_is_another_file(exported):
    """The comparison could not fail if the file's numbers did not follow the state's."""
    state = learned("balanced")
    pixels = random_images(3, seed=8)
    moved = with_readout(state, log_prior=state.readout.log_prior + torch.tensor([1.0, 0, 0, 0]))
    answers = OnnxModel(exported).answers(pixels.numpy(), [0.25] * CLASSES).probabilities
    assert np.abs(answers - by_hand(moved, pixels, [0.25] * CLASSES)).max() > 1e-2
