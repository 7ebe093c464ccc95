"""A run that is killed again and again ends with the files of one that was left alone.

SIGKILL comes just before or after the writes that count, and at random moments. To save start-up time most
attempts fork from a process that has imported everything and drawn the images already, which is this file run
as a program; one is a whole `medcil run`.
"""

import fnmatch
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from medcil.build import load_recipe

N_TASKS, EPOCHS = 3, 4
RECIPE = f"""
label: killed
data: {{name: phantom, side: 20, crop: 16}}
scenario: {{base: 3, increment: 2}}
network: {{backbone: resnet8_cifar}}
memory: {{per_class: 5}}
training: {{epochs: {EPOCHS}, batch_size: 64}}
execution: {{device: cpu, threads: 1, checkpoint_every: 1}}
"""

N_TRAINED = {"balanced": N_TASKS, "analytic": 1}
"""Tasks in which a method trains the network. Later tasks of `analytic` add to its statistics alone."""
N_RANDOM_KILLS = 10
# In the order in which they come, so that each is reached.
WRITES: list[tuple[Literal["before", "after"], str]] = [
    ("before", "config.yaml"),
    ("after", "config.yaml"),
    ("before", "data.json"),
    ("before", "tasks/01/progress/phase-0-epoch-1.safetensors"),
    ("before", "tasks/01/progress/progress.json"),
    ("after", "tasks/01/progress/progress.json"),
    ("after", "tasks/01/progress/phase-0-epoch-4.safetensors"),
    ("before", "tasks/01/.state.part/tensors/*.safetensors"),
    ("after", "tasks/01/.state.part/exemplars/*.png"),
    ("before", "tasks/01/.state.part/manifest.json"),
    ("before", "tasks/01/state"),
    ("after", "tasks/01/state"),
    ("after", "tasks/01/predictions.csv"),
    ("before", "tasks/01/result.json"),
    ("after", "tasks/01/result.json"),
    ("before", "metrics.json"),
    ("before", "tasks/02/progress/phase-0-epoch-3.safetensors"),
    ("after", "tasks/02/.state.part/tensors/*.safetensors"),
    ("after", "tasks/02/confusion.csv"),
    ("after", "tasks/03/progress/progress.json"),
    ("after", "tasks/03/.state.part/manifest.json"),
    ("before", "tasks/03/result.json"),
]


def writes_of(n_trained: int) -> list[tuple[Literal["before", "after"], str]]:
    """Leave out checkpoints of tasks without training."""
    return [(when, f) for when, f in WRITES if "progress" not in f or int(f.split("/")[1]) <= n_trained]


def kill_at_write(when: str, target: str) -> None:
    """Arms this process to kill itself where a file or folder gets its final name."""
    for name in ("replace", "rename"):
        setattr(os, name, functools.partial(_fatal, getattr(os, name), when, target))


def _fatal(rename: Callable[..., None], when: str, target: str, source: str, destination: str) -> None:
    is_target = fnmatch.fnmatch(str(destination), f"*/{target}")
    if is_target and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, destination)
    if is_target:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_forks(recipe: Path, written: Path, timed: Path, n_trained: int) -> None:
    """Prints how each attempt to be killed ended; at last lets `written` run to its end."""
    import torch._dynamo  # noqa: F401  # optimizers import it when they are made

    from medcil.build import build_stream
    from medcil.experiments.run import run_experiment

    config = load_recipe(recipe)
    stream = build_stream(config)

    def attempt(folder: Path, arm: Callable[[], None] = lambda: None) -> None:
        arm()
        run_experiment(config, folder, stream=stream)

    def start(*arguments: object) -> multiprocessing.Process:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=arguments)
        child.start()
        return child

    for when, target in writes_of(n_trained):
        child = start(written, lambda when=when, target=target: kill_at_write(when, target))
        child.join()
        print(json.dumps({"moment": f"{when} {target}", "exit": child.exitcode}))

    began = time.monotonic()
    child = start(timed.with_name("left-alone"))
    child.join()
    duration = time.monotonic() - began
    randomly = random.Random(0)
    for number in range(N_RANDOM_KILLS):
        child = start(timed)
        delay = randomly.uniform(0, duration / 6)  # ten of them do not last for the whole run
        child.join(delay)
        child.kill()
        child.join()
        print(json.dumps({"moment": f"{number}: after {delay:.3f} s", "exit": child.exitcode}))

    start(written).join()


def medcil_run(recipe: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "medcil", "run", str(recipe), "--out", str(run)]


def finish(command: list[str]) -> str:
    """What a command prints that must end well."""
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def kill_the_program(recipe: Path, run: Path) -> None:
    process = subprocess.Popen(medcil_run(recipe, run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = run / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 2):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"


def results(run: Path) -> dict[str, bytes]:
    """All files that must not depend on what happened on the way, and the exemplars in their order."""
    paths = [run / "log.jsonl", run / "metrics.json"]
    content = {}
    for number in range(1, N_TASKS + 1):
        task = run / "tasks" / f"{number:02d}"
        paths += [task / name for name in ("confusion.csv", "predictions.csv", "result.json")]
        manifest = json.loads((task / "state" / "manifest.json").read_text())
        listed = [name for group in manifest["tensors"].values() for name in group]
        content[f"task {number}, tensors"] = b"".join(
            (task / "state" / "tensors" / name).read_bytes() for name in listed
        )
        for place, entry in enumerate(manifest["exemplars"]):
            name = f"task {number}, exemplar {place}, {entry['rank']} of {entry['class']}"
            content[name] = (task / "state" / entry["file"]).read_bytes()
    return content | {str(path.relative_to(run)): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("method", N_TRAINED)
def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(method: str, tmp_path: Path) -> None:
    recipe, whole = tmp_path / "recipe.yaml", tmp_path / "whole"
    written, timed = tmp_path / "killed-at-writes", tmp_path / "killed-at-random"
    recipe.write_text(f"{RECIPE}method: {method}\n")
    n_trained = N_TRAINED[method]
    finish(medcil_run(recipe, whole))

    kill_the_program(recipe, timed)
    printed = finish([sys.executable, __file__, *map(str, (recipe, written, timed, n_trained))])
    attempts = [json.loads(line) for line in printed.splitlines()]
    assert len(attempts) == len(writes_of(n_trained)) + N_RANDOM_KILLS
    assert [a["moment"] for a in attempts if a["exit"] != -signal.SIGKILL] == [], "not hit alive"
    finish(medcil_run(recipe, timed))

    expected = results(whole)
    assert len(expected) == 2 + 4 * N_TASKS + 5 * (3 + 5 + 7)
    for run in (written, timed):
        found = results(run)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
        lines = (run / "log.jsonl").read_text().splitlines()
        assert len(set(lines)) == len(lines) == n_trained * EPOCHS


if __name__ == "__main__":
    kill_forks(*(Path(argument) for argument in sys.argv[1:4]), n_trained=int(sys.argv[4]))
