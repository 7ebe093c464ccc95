"""Every benchmark of training speed runs, as small as can be, and writes what it measured."""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medcil.build import load_recipe
from medcil.data.samples import Samples, TensorImages
from medcil.data.sources.phantom import CLASS_NAMES
from medcil.data.stream import Stream
from medcil.experiments.run import run_experiment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import show
import whole_run

SMALLEST = "--backbone resnet8_cifar --pixels 8 --rounds 1"
RUN = {
    "data": {"name": "phantom", "side": 8, "crop": 8},
    "scenario": {"base": 3, "increment": 4},
    "network": {"backbone": "resnet8_cifar"},
    "memory": {"per_class": 2},
    "training": {"batch_size": 256},
    "method": "balanced",
}


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads, is_deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = is_deterministic


def measured(script: str, arguments: str, out: Path) -> dict[str, Any]:
    import_module(script).main([*arguments.split(), "--device", "cpu", "--out", str(out / f"{script}.json")])
    result = json.loads((out / f"{script}.json").read_text())
    assert {"benchmark", "machine", "settings", "rows"} <= set(result)
    assert result["benchmark"] == script
    assert {"cpu", "cores", "torch", "date", "commit"} <= set(result["machine"])
    return result


def test_a_step_beside_its_ceiling_and_a_usual_loop(tmp_path: Path) -> None:
    sizes = f"{SMALLEST} --batches 4 --steps 1 --files 4 --workers 0 --methods balanced lo2ln finetune"
    balanced, lo2ln, finetune = measured("step", sizes, tmp_path)["rows"]
    assert balanced["medcil/reference (0)"] == balanced["medcil"] / balanced["reference (0)"]
    assert lo2ln["medcil/ceiling"] == lo2ln["medcil"] / lo2ln["ceiling"]
    assert lo2ln["reference (0)"] is None
    # Fine-tuning has no exemplars: 20 of each of three classes.
    assert balanced["images an epoch"] == finetune["images an epoch"] + 60


def test_what_the_losses_cost(tmp_path: Path) -> None:
    [row] = measured("terms", f"{SMALLEST} --batches 32 --steps 1", tmp_path)["rows"]
    assert row["losses"] == 3
    assert row["share of the losses"] == 1 - row["without, ms a step"] / row["with, ms a step"]


def test_the_product_beside_a_bare_loop(tmp_path: Path) -> None:
    rows = measured("cpu", f"{SMALLEST} --steps 1 --threads 1", tmp_path)["rows"]
    assert [row["layout of the bare loop"] for row in rows] == ["usual", "channels last"]
    assert all(row["medcil/bare"] > 0 for row in rows)


def test_growth_compares_each_kind_with_its_first_size(tmp_path: Path) -> None:
    sizes = "--herd 50 100 --classes 4 8 --tasks 3 --quotas 2 4 --images 32"
    rows = measured("growth", f"{SMALLEST} {sizes}", tmp_path)["rows"]
    assert len(rows) == 16
    assert [row["touched"] for row in rows if row["what"] == "herding 20"] == [1, 2]
    assert {row["time"] for row in rows if row["size"] == "task 2"} == {1}


def test_streaming_trains_on_the_same_batches(tmp_path: Path) -> None:
    sizes = f"{SMALLEST} --images 40 --batches 8 --window-mb 0.002"
    rows = measured("streaming", sizes, tmp_path)["rows"]
    assert [row["images from"] for row in rows] == ["memory", "prepared store"]
    assert all(row["same losses"] and row["windows full"] > 1 for row in rows)


class Finished:
    def wait(self) -> int:
        return 0


def few_images() -> Stream:
    """Six of each of phantom's classes, random, for training and again for testing."""
    n_classes = len(CLASS_NAMES)
    pixels = torch.randint(256, (6 * n_classes, 3, 8, 8), dtype=torch.uint8)
    samples = Samples(TensorImages(pixels), torch.arange(len(pixels)) % n_classes)
    order = tuple(range(n_classes))
    return Stream(samples, samples, CLASS_NAMES, order, sizes=(3, 4), is_synthetic=True)


def run_here(recipe: Path, out: Path, settings: Sequence[str], environment: object = None) -> Finished:
    """In this process, which has loaded PyTorch already."""
    run_experiment(load_recipe(recipe, settings), out, stream=few_images())
    return Finished()


def test_whole_runs_alone_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "start_run", run_here)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RUN))
    [row] = measured("whole_run", f"--recipe {recipe} --epochs 2 --set", tmp_path)["rows"]
    assert 0 < row["inside epochs, s"] < row["learning and evaluation, s"] <= row["wall, s"]
    assert 0 <= row["acc_micro"] <= 1
    sizes = f"--recipe {recipe} --epochs 1 --at-once 1 --threads 1 --on-cpu-too --set"
    result = measured("together", sizes, tmp_path)
    assert [row["way"] for row in result["rows"]] == ["one after the other", "at once"]
    assert "MPS" in result["notes"][0]
    text = show.main([str(tmp_path / f"{name}.json") for name in ("together", "whole_run")])
    assert text.index("## whole_run") < text.index("## together")


def test_without_data_or_gpu_a_benchmark_says_so(tmp_path: Path) -> None:
    for script in ("whole_run", "together"):
        result = measured(script, f"--root {tmp_path / 'none'}", tmp_path)
        assert result["rows"] == []
        assert "left out" in result["notes"][0]


def test_epochs_are_timed_from_end_to_end_and_the_first_by_the_median() -> None:
    ends = {("learn", 1): (10.0, 12.0, 15.0, 17.0), ("balance", 2): (30.0, 31.0)}
    timings: list[dict[str, Any]] = [{"started": {}, "unix_time": 0.0}]
    for (phase, task), times in ends.items():
        timings += [{"task": task, "phase": phase, "epoch": i, "unix_time": t} for i, t in enumerate(times)]
    assert whole_run.seconds_inside_epochs(timings) == 7 + 2 + 1 + 1


def test_features_beside_the_forward_pass_alone(tmp_path: Path) -> None:
    sizes = "--images 14 --pixels 16 --backbone resnet8_cifar --views 1 8 --rounds 1"
    rows = measured("features", sizes, tmp_path)["rows"]
    cases = [(row["networks"], row["stages"], row["views"]) for row in rows]
    assert cases == [(n, stages, views) for n in (1, 2) for stages in (1, 2) for views in (1, 8)]
    # The last stages of this network have 32 and 64 maps; one feature is the constant.
    assert [row["features"] for row in rows[::2]] == [64 + 1, 96 + 1, 2 * 64 + 1, 2 * 96 + 1]
    for row in rows:
        ratio = row["ceiling, ms an image"] / row["embedding, ms an image"]
        assert row["embedding/ceiling"] == pytest.approx(ratio)
        assert row["prediction, ms an image"] > 0


@pytest.mark.slow
def test_an_update_is_timed_as_a_whole_command(tmp_path: Path) -> None:
    sizes = "--images 12 --pixels 32 --epochs 1 --backbone resnet8_cifar --variants analytic balanced"
    analytic, balanced = measured("update", sizes, tmp_path)["rows"]
    assert analytic["times faster"] == balanced["seconds"] / analytic["seconds"]
    assert (analytic["epochs"], balanced["epochs"]) == (0, 100)  # of balanced as many as it chooses
