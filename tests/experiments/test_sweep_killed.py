"""A sweep that is killed again and again ends as one that was left alone, and no run is computed twice.

SIGKILL comes just before or after the sweep's own writes, and while its runs are at work. To save start-up
time the sweeps fork from a process that has imported everything, which is this file run as a program; the
runs they start are whole programs.
"""

import fnmatch
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Moment = tuple[str, str, int]
"""`before` or `after` the sweep writes the n-th file of this name, or once n such files `appear`."""
# In the order in which they come, so that each is reached.
MOMENTS: list[Moment] = [
    ("before", "tiny/suite.yaml", 1),
    ("before", "tiny/runs.json", 1),
    ("before", "recipes/*.yaml", 1),
    ("after", "recipes/*.yaml", 2),
    ("appear", "logs/*.log", 2),  # their processes have just begun
    ("appear", "runs/*/log.jsonl", 1),
    ("appear", "runs/*/tasks/01/result.json", 2),
    ("before", "tiny/runs.json", 2),  # a run has ended, and it is not written down
    ("after", "tiny/runs.json", 3),
    ("after", "tiny/tables/*", 1),
    ("before", "tiny/done.json", 1),
]


def kill_at_write(when: str, name: str, count: int) -> None:
    """Arms this process to kill itself where a file gets its final name for the n-th time."""
    replace, left = os.replace, count

    @functools.wraps(replace)
    def fatal(source: str, destination: str) -> None:
        nonlocal left
        is_named = fnmatch.fnmatch(str(destination), f"*/{name}")
        left -= is_named
        if is_named and left == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, destination)
        if is_named and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = fatal  # type: ignore[assignment]


def kill_sweeps(command: list[str], out: Path) -> None:
    """Prints how each attempt ended, and what it left of finished runs; the last one is left alone."""
    import torch._dynamo  # noqa: F401  # optimizers import it when they are made

    import medcil.experiments.run
    import medcil.experiments.sweep
    import medcil.report.suite  # noqa: F401  # for the forks
    from medcil.cli.main import main

    def attempt(arm: Callable[[], None]) -> None:
        os.dup2(2, 1)
        arm()
        main(command)

    def start(arm: Callable[[], None] = lambda: None) -> multiprocessing.Process:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(arm,))
        child.start()
        return child

    for when, name, count in MOMENTS:
        if when == "appear":
            child = start()
            while child.is_alive() and len(list(out.glob(name))) < count:
                time.sleep(0.001)
            child.kill()
        else:
            child = start(functools.partial(kill_at_write, when, name, count))
        child.join()
        say(f"{when} {name} {count}", child, out)
    child = start()
    child.join()
    say("left alone", child, out)


def say(moment: str, child: multiprocessing.Process, out: Path) -> None:
    finished = [m.parent for m in out.glob("runs/*/metrics.json") if json.loads(m.read_text())["finished"]]
    timings = {run.name: (run / "timings.jsonl").read_text() for run in finished}
    print(json.dumps({"moment": moment, "exit": child.exitcode, "finished": timings}), flush=True)


@pytest.mark.slow
def test_killed_at_any_moment_a_sweep_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    from . import tiny_suite as tiny

    suite, images = tiny.write_suite(tmp_path), tiny.write_images(tmp_path / "own")
    whole, out = tmp_path / "whole", tmp_path / "killed"
    launcher = tiny.SameProcess()
    with monkeypatch.context() as patch:
        patch.setattr("medcil.experiments.launcher.make_launcher", lambda name, options, **where: launcher)
        assert tiny.ended_with(["bench", suite, "--data", images, "--out", whole]) == 0

    command = ["bench", str(suite), "--data", str(images), "--out", str(out), "--at-once", "2"]
    program = [sys.executable, __file__, str(out), *command]
    done = subprocess.run(program, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["moment"] for a in attempts if a["exit"] != -signal.SIGKILL] == ["left alone"], "not hit alive"
    assert len(attempts) == len(MOMENTS) + 1
    assert attempts[-1]["exit"] == 0

    expected, found = tiny.outcome_of(whole), tiny.outcome_of(out)
    assert len(expected) >= 4 * 5
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    for run in out.glob("runs/*"):
        assert tiny.epochs_of(run) == tiny.ALL_EPOCHS
    # A run that was finished is not touched again.
    for earlier, later in pairwise(attempts):
        assert earlier["finished"].items() <= later["finished"].items()
    assert len(attempts[-1]["finished"]) == 4


if __name__ == "__main__":
    kill_sweeps(sys.argv[2:], Path(sys.argv[1]))
