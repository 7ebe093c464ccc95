"""A run that is killed again and again ends with the files of one that was left alone.

The kill -9 falls at seeded moments: while the program starts, trains, writes a checkpoint, saves the state
of a task, evaluates it. Two attempts are whole `medcil run` processes. The others fork from a process that
has imported everything and drawn the images already (this file, run as a program), which saves seconds each.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from medcil.config import load_config

RECIPE = """
label: killed
data: {name: phantom, side: 20, crop: 16}
scenario: {base: 3, increment: 2}
network: {backbone: resnet8_cifar}
memory: {per_class: 5}
training: {epochs: 4, batch_size: 64}
method: {name: balanced}
execution: {device: cpu, threads: 1}
"""
N_TASKS = 3

Moment = tuple[str, Callable[[Path], bool], float]
"""Its name, how it shows on the disk, and the most seconds to wait after it has shown."""


def n_logged(run: Path) -> int:
    log = run / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def logged(n: int) -> Callable[[Path], bool]:
    return lambda run: n_logged(run) >= n


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda run: any(run.glob(pattern))


MOMENTS: list[Moment] = [
    ("starting", lambda run: True, 0.1),
    ("any time", lambda run: True, 0.6),
    ("training task 1", logged(3), 0.3),
    ("writing a checkpoint of task 1", exists("tasks/01/progress/.phase-0-epoch-4.*"), 0.002),
    ("saving the state of task 1", exists("tasks/01/state"), 0.005),
    ("evaluating task 1", exists("tasks/01/state/manifest.json"), 0.02),
    ("writing the results of task 1", exists("tasks/01/predictions.csv"), 0.005),
    ("any time", lambda run: True, 0.6),
    ("starting task 2", exists("tasks/01/result.json"), 0.1),
    ("training task 2", logged(5), 0.2),
    ("writing a checkpoint of task 2", exists("tasks/02/progress/phase-0-epoch-3.*"), 0.002),
    ("after the last epoch of task 2", logged(8), 0.005),
    ("saving the exemplars of task 2", exists("tasks/02/state/exemplars/*"), 0.005),
    ("evaluating task 2", exists("tasks/02/state/manifest.json"), 0.02),
    ("training task 3", logged(10), 0.1),
    ("saving the state of task 3", exists("tasks/03/state"), 0.01),
    ("writing the results of task 3", exists("tasks/03/predictions.csv"), 0.005),
]


def where(run: Path) -> str:
    """What a killed run was doing, as far as its files tell."""
    for number in range(1, N_TASKS + 1):
        task = run / "tasks" / f"{number:02d}"
        if not (task / "state" / "manifest.json").exists():
            return "saving a state" if (task / "state").exists() else "training"
        if not (task / "result.json").exists():
            return "evaluating"
    return "finished"


def kill_when(moment: Moment, run: Path, is_running: Callable[[], bool], kill: Callable[[], None]) -> None:
    _, has_come, jitter = moment
    while not has_come(run) and is_running():
        time.sleep(0.0002)
    time.sleep(random.uniform(0, jitter))
    kill()


def fork_and_kill(recipe: Path, run: Path) -> None:
    """One attempt per moment, each killed; prints where each was."""
    from medcil.bench.experiment import run_experiment
    from medcil.build import build_stream

    config = load_config(recipe)
    stream = build_stream(config)
    random.seed(0)
    for moment in MOMENTS:
        child = os.fork()
        if child == 0:
            try:
                run_experiment(config, run, stream=stream)
                os._exit(0)
            finally:
                os._exit(1)
        ended: list[int] = []

        def is_running(child: int = child, ended: list[int] = ended) -> bool:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended.extend([status] if pid else [])
            return not ended

        kill_when(moment, run, is_running, lambda child=child: os.kill(child, signal.SIGKILL))
        status = ended[0] if ended else os.waitpid(child, 0)[1]
        by_us = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"moment": moment[0], "killed": by_us, "where": where(run)}))


def medcil_run(recipe: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "medcil", "run", str(recipe), "--out", str(run)]


def kill_the_program(recipe: Path, run: Path) -> None:
    process = subprocess.Popen(medcil_run(recipe, run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kill_when(("", logged(2), 0.2), run, lambda: process.poll() is None, process.kill)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"


def results(run: Path) -> dict[str, bytes]:
    """All files that must not depend on what happened on the way, and the exemplars in their order."""
    paths = [run / "log.jsonl", run / "metrics.json"]
    content = {}
    for number in range(1, N_TASKS + 1):
        task = run / "tasks" / f"{number:02d}"
        paths += [task / "confusion.csv", task / "predictions.csv", task / "result.json"]
        paths += [task / "state" / "tensors.safetensors"]
        manifest = json.loads((task / "state" / "manifest.json").read_text())
        for place, entry in enumerate(manifest["exemplars"]):
            content[f"task {number}, exemplar {place} of {entry['class']}"] = (
                task / "state" / entry["file"]
            ).read_bytes()
    return content | {str(path.relative_to(run)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    recipe, whole, killed = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(RECIPE)
    subprocess.run(medcil_run(recipe, whole), check=True, capture_output=True)

    kill_the_program(recipe, killed)
    forks = subprocess.run(
        [sys.executable, __file__, str(recipe), str(killed)], check=True, capture_output=True, text=True
    )
    attempts = [json.loads(line) for line in forks.stdout.splitlines()]
    print(forks.stdout)
    assert all(attempt["killed"] or attempt["where"] == "finished" for attempt in attempts)
    assert sum(attempt["killed"] for attempt in attempts) >= 10
    assert {attempt["where"] for attempt in attempts} >= {"training", "saving a state", "evaluating"}
    subprocess.run(medcil_run(recipe, killed), check=True, capture_output=True)

    expected, found = results(whole), results(killed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    lines = (killed / "log.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines) == N_TASKS * 4


if __name__ == "__main__":
    fork_and_kill(Path(sys.argv[1]), Path(sys.argv[2]))
