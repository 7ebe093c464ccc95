"""Features of test images for the figures: the same images for every run, as the last network sees them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from medcil.build import RunConfig, build_stream, resolve
from medcil.data.stream import Stream
from medcil.errors import InvalidInput
from medcil.experiments import run as features
from medcil.experiments.run import (
    chosen_images,
    run_experiment,
    write_features,
    write_features_for_figures,
)
from medcil.storage.run_dir import RunDir
from medcil.training.state import load_state

RECIPE = {
    "data": {"name": "phantom", "side": 16, "crop": 14},
    "scenario": {"base": 4, "increment": 3, "order": 1},
    "network": {"backbone": "resnet8_cifar"},
    "memory": {"per_class": 2},
    "training": {"epochs": 1, "batch_size": 64},
    "method": {"name": "finetune"},
    "execution": {"device": "cpu", "threads": 1},
}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return resolve(RunConfig.model_validate(RECIPE))


@pytest.fixture(scope="module")
def stream(config: RunConfig) -> Stream:
    whole = build_stream(config)
    few = torch.cat([torch.nonzero(whole.train.labels == c).flatten()[:8] for c in range(7)])
    return replace(whole, train=whole.train.select(few))


@pytest.fixture(scope="module")
def finished(config: RunConfig, stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("features") / "runs" / "one"
    run_experiment(config, run, stream=stream)
    return run


def test_features_are_those_of_the_last_network(config: RunConfig, stream: Stream, finished: Path) -> None:
    file = write_features(finished, config, stream)
    with safe_open(file, framework="pt") as opened:
        vectors, labels, images = (opened.get_tensor(name) for name in ("features", "labels", "images"))
        about = json.loads(opened.metadata()["medcil"])
    state = load_state(RunDir(finished).task(2).state)
    assert (vectors.dtype, vectors.shape) == (torch.float16, (len(images), state.network.classifier.dim))
    assert about == {"class_names": list(state.class_names), "n_old": 4}
    for image, label in zip(images.tolist(), labels.tolist(), strict=True):
        true = stream.class_names[int(stream.test.labels[image])]
        assert about["class_names"][label] == true
    # By hand: the middle of the picture, scaled as the state says.
    pixels = stream.test.images.read(images[:5])[:, :, 1:15, 1:15].float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (state.preprocessing.mean, state.preprocessing.std))
    with torch.no_grad():
        expected = state.network.eval()((pixels - mean) / std).embedding
    torch.testing.assert_close(vectors[:5].float(), expected, rtol=2e-2, atol=2e-2)


def test_features_are_written_once(
    config: RunConfig, stream: Stream, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_features(finished, config, stream)
    content = file.read_bytes()
    monkeypatch.setattr(features, "load_state", None)
    assert write_features(finished, config, stream) == file
    monkeypatch.undo()
    file.unlink()
    assert write_features(finished, config, stream).read_bytes() == content


def test_up_to_so_many_of_each_class_the_same_every_time() -> None:
    labels = torch.tensor([0] * 400 + [1] * 20 + [2] * 160 + [3] * 5)[torch.randperm(585)]
    images = chosen_images(labels, [0, 1, 2])
    assert Counter(labels[images].tolist()) == {0: 150, 1: 20, 2: 150}
    assert images.tolist() == sorted(set(images.tolist()))
    assert torch.equal(images, chosen_images(labels, [0, 1, 2]))


def test_an_unfinished_run_has_none(config: RunConfig, stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Finish the run"):
        write_features(tmp_path, config, stream)


@pytest.fixture(scope="module")
def suite_folder(finished: Path) -> Path:
    """A suite with one finished run of its own, one of another row, one unfinished and one that is gone."""
    folder = finished.parents[1] / "suite"
    folder.mkdir()
    suite = {
        "title": "t",
        "metrics": {"Acc": "acc_micro"},
        "common": {},
        "settings": {"4-3": {}},
        "rows": {"a": {}, "b": {}, "c": {}},
        "figures": [{"kind": "tsne", "title": "t", "file": "tsne", "rows": ["a", "b"], "order": 1}],
    }
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    gone = {"key": "gone", "path": "../runs/gone", "places": [["b", "4-3", 1]], "state": "finished"}
    other = {"key": "c", "path": "../runs/c", "places": [["c", "4-3", 1]], "state": "finished"}
    late = {"key": "late", "path": "../runs/late", "places": [["b", "4-3", 1]], "state": "unfinished"}
    one = {
        "key": "one",
        "path": "../runs/one",
        "places": [["x", "y", 0], ["a", "4-3", 1]],
        "state": "finished",
    }
    (finished.parent / "gone").mkdir()
    (finished.parent / "gone" / "config.yaml").write_text("what: is this")
    (folder / "runs.json").write_text(json.dumps({"format": 1, "runs": [gone, other, late, one]}))
    return folder


def test_a_suite_says_of_which_runs(suite_folder: Path, finished: Path) -> None:
    file = finished / features.FEATURES
    file.unlink(missing_ok=True)
    (problem,) = write_features_for_figures(suite_folder)
    assert "gone" in problem
    assert file.is_file()


def test_of_several_seeds_the_run_of_the_first_is_drawn(
    config: RunConfig, stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(features, "build_stream", lambda config: stream)
    monkeypatch.setattr(features, "write_features", lambda run, config, stream: drawn.append(run.name))
    suite = {
        "title": "t",
        "metrics": {"Acc": "acc_micro"},
        "seeds": [5, 0],
        "common": {},
        "settings": {"4-3": {}},
        "rows": {"a": {}},
        "figures": [{"kind": "tsne", "title": "t", "file": "tsne", "order": 1}],
    }
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "suite.yaml").write_text(yaml.safe_dump(suite))
    runs = []
    for order, seed in ((0, 5), (1, 0), (1, 5)):
        run = tmp_path / "runs" / f"{order}-{seed}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        place = ["a", "4-3", order, seed]
        runs.append({"path": f"../runs/{run.name}", "places": [place], "state": "finished"})
    (tmp_path / "suite" / "runs.json").write_text(json.dumps({"format": 1, "runs": runs}))
    assert write_features_for_figures(tmp_path / "suite") == []
    assert drawn == ["1-5"]


def test_a_machine_that_cannot_compute_them_says_so(
    suite_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished / features.FEATURES).unlink(missing_ok=True)
    used: list[str] = []

    def out_of_memory(run_dir: Path, config: RunConfig, stream: Stream) -> Path:
        used.append(config.execution.device)
        raise RuntimeError("CUDA out of memory.\nTried to allocate 20.00 MiB.")

    monkeypatch.setattr(features, "write_features", out_of_memory)
    problems = write_features_for_figures(suite_folder)
    assert any(problem.endswith("so no t-SNE: CUDA out of memory.") for problem in problems)
    assert used == ["auto"]  # the run itself was made on the CPU
