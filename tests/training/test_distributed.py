"""Processes that train together: the same gradients, the same files, and an end when one is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from medcil.build import build_stream, load_recipe
from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, MedcilError
from medcil.experiments import processes as processes_module
from medcil.experiments.processes import processes
from medcil.experiments.run import run_experiment

from ..small import Interrupted

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RECIPE = {
    "data": {"name": "phantom", "side": 20, "crop": 16},
    "scenario": {"base": 4, "increment": 3},
    "method": {"name": "balanced"},
    "network": {"backbone": "resnet8_cifar"},
    "memory": {"per_class": 10},
    "training": {"epochs": 2, "batch_size": 64},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_every": 1},
}


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def start(*arguments: object) -> "subprocess.Popen[str]":
    words = [str(argument) for argument in arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def medcil_run(recipe: Path, out: Path, *settings: str) -> list[object]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["-m", "medcil", "run", recipe, "--out", out, *chosen]


@pytest.mark.slow
def test_two_processes_compute_the_gradients_of_one(tmp_path):
    script = Path(__file__).with_name("gradients.py")
    alone = start(sys.executable, script, tmp_path / "alone")
    together = start(*TORCHRUN, script, tmp_path / "together")
    for running in (alone, together):
        printed, _ = running.communicate(timeout=300)
        assert running.returncode == 0, printed
    expected, found = load_file(tmp_path / "alone"), load_file(tmp_path / "together")
    assert len(expected) > 300
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype in (torch.float64, torch.int64), name
        error = (found[name] - tensor).norm() if tensor.is_floating_point() else 0
        assert error <= 1e-12 * tensor.double().norm(), name


@pytest.mark.slow
def test_a_run_of_two_processes_is_written_once_and_scores_alike(recipe, tmp_path):
    longer = ["training.epochs=6", "scenario.base=5", "scenario.increment=2"]
    config = load_recipe(recipe, longer)
    alone = run_experiment(config, tmp_path / "alone")
    together = run_experiment(load_recipe(recipe, [*longer, "execution.processes=2"]), tmp_path / "together")
    files = [
        sorted(str(f.relative_to(tmp_path / n)) for f in (tmp_path / n).rglob("*.json*"))
        for n in ("alone", "together")
    ]
    assert files[0] == files[1]
    assert len((tmp_path / "together" / "log.jsonl").read_text().splitlines()) == 12
    environment = json.loads((tmp_path / "together" / "environment.json").read_text())
    assert environment["processes"] == 2
    for key in ("acc_micro", "acc_balanced"):
        assert together[key] == pytest.approx(alone[key], abs=0.01), key


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(recipe, tmp_path, before, after):
    steps = []

    def stop(number, n_tasks, progress):
        steps.append(number)
        if number == 2 and progress.epoch == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_experiment(load_recipe(recipe, [f"execution.processes={before}"]), tmp_path / "run", watch=stop)
    metrics = run_experiment(load_recipe(recipe, [f"execution.processes={after}"]), tmp_path / "run")
    assert metrics["finished"]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(line["task"], line["epoch"]) for line in log] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def training_peer(pid: int, run: Path, deadline: float) -> int:
    """The second process, once the first epoch is over."""
    log = run / "log.jsonl"
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().count("\n") >= 1:
            for child in children_of(pid):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        time.sleep(0.05)
    raise TimeoutError


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the second", "the first"])
def test_a_lost_process_ends_the_run_and_it_can_go_on(recipe, tmp_path, victim):
    command = medcil_run(recipe, tmp_path / "run", "execution.processes=2", "training.epochs=400")
    running = start(sys.executable, *command)
    peer = training_peer(running.pid, tmp_path / "run", time.monotonic() + 300)
    os.kill(peer if victim == "the second" else running.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    printed, _ = running.communicate(timeout=120)
    assert time.monotonic() - killed_at < 60
    if victim == "the second":
        assert running.returncode == 6, printed
        assert "Process 1 of those that train together has ended. Run the same command again" in printed
        assert "Traceback" not in printed
    while peer_is_there(peer):
        assert time.monotonic() - killed_at < 60, "the second process outlives the first"
        time.sleep(0.1)
    done = len((tmp_path / "run" / "log.jsonl").read_text().splitlines())
    seen = []

    def stop(number, n_tasks, progress):
        seen.append(progress.epoch)
        raise Interrupted

    again = load_recipe(recipe, ["training.epochs=400"])
    with pytest.raises(Interrupted):
        run_experiment(again, tmp_path / "run", watch=stop)
    assert seen[0] >= done - 1 >= 0


def peer_is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
def test_torchrun_starts_processes_that_speak_once(recipe, tmp_path):
    running = start(*TORCHRUN, *medcil_run(recipe, tmp_path / "run")[0:])
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    assert printed.count("Balanced accuracy") <= 2  # the two columns of one table
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["finished"]


@pytest.mark.slow
def test_an_error_of_the_run_is_not_taken_for_a_lost_process(recipe, tmp_path):
    hot = ["execution.processes=2", "training.learning_rates={classifier: 1e30, backbone: 1e30}"]
    with pytest.raises(MedcilError, match="Training diverged"):
        run_experiment(load_recipe(recipe, [*hot, "training.gradient_clamp=null"]), tmp_path / "run")


@pytest.mark.slow
def test_a_stream_given_is_that_of_every_process(recipe, tmp_path):
    config = load_recipe(recipe, ["execution.processes=2", "training.epochs=1"])
    stream = build_stream(load_recipe(recipe, ["scenario.order=1"]))
    metrics = run_experiment(config, tmp_path / "run", stream=stream)
    assert metrics["class_order"] == list(stream.order)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(processes_module, "choose_device", lambda execution: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(InvalidInput, match="processes is 2, but there are only 1 GPUs"),
        processes(ExecutionConfig(processes=2), lambda: None),
    ):
        raise AssertionError


def test_wrong_input_is_said_before_other_processes_start(recipe, tmp_path):
    with pytest.raises(InvalidInput, match="crop"):
        run_experiment(
            load_recipe(recipe, ["network.backbone=vit_tiny_patch16_224", "execution.processes=2"]),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
