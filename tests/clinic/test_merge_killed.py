"""`merge` is killed with SIGKILL just before some change in the file system: the new model is whole or not
there, and the same command completes, with the very files of one that was left alone.

To save start-up time all attempts are forks of one process, which runs this file as a program.
"""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir")
ATTEMPTS = 12


class Deadly:
    """Counts what this process changes in the file system, and kills it before the change of a number."""

    def __init__(self, number: int | None) -> None:
        self.number, self.done = number, 0
        for name in CHANGES:
            setattr(os, name, functools.partial(self.change, getattr(os, name)))

    def change(self, function: Callable[..., Any], *places: Any, **options: Any) -> Any:
        self.done += 1
        if self.done == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*places, **options)


def kill_forks(a: Path, b: Path, folder: Path) -> None:
    """Print what was found after each attempt, and after the same command again."""
    from medcil.clinic.merge import merge

    def attempt(place: Path, number: int | None) -> None:
        deadly = Deadly(number)
        merge(a, b, out=place, with_holdouts=True)
        place.with_suffix(".json").write_text(json.dumps(deadly.done))

    def start(place: Path, number: int | None = None) -> int | None:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(place, number))
        child.start()
        child.join()
        return child.exitcode

    reference = folder / "reference"
    assert start(reference) == 0
    last = json.loads(reference.with_suffix(".json").read_text()) - 1  # of the request; its folder goes next
    for number in sorted({1 + step * (last - 1) // (ATTEMPTS - 1) for step in range(ATTEMPTS)}):
        place = folder / str(number)
        found = {"number": number, "exit": start(place, number), "loaded": load(place)}
        print(json.dumps(found | {"again": start(place), "end": load(place), "left": left(place)}))
    print(json.dumps({"end": load(reference), "left": left(reference), "sources": [load(a), load(b)]}))


def load(model: Path) -> list[Any] | None:
    """Load it as any command does: tensors by name, sealed images and figures; None without a model."""
    from medcil.clinic.model_dir import ModelFolder

    if not ModelFolder(model).exists:
        return None
    version = ModelFolder(model).version()
    state = version.load_state()
    tensors = sorted(version.tensor_names())
    return [tensors, list(state.class_names), len(version.holdout()), version.metrics()["accuracy"]]


def left(model: Path) -> list[str]:
    listed = {"v1", ".lock"}
    hidden = [path.name for path in model.rglob(".*") if path.name not in listed]
    return sorted(hidden + [path.name for path in (model / "versions").iterdir() if path.name not in listed])


def test_killed_anywhere_it_completes_and_is_never_there_in_part(tmp_path):
    from medcil.clinic.train import train

    from .generated import QUICK, write_folder  # not above: as a program this file has no package

    options = {**QUICK, "method": "analytic"}
    train(write_folder(tmp_path / "first", "alpha", "beta", seed=1), tmp_path / "A", **options)
    train(
        write_folder(tmp_path / "second", "beta", "gamma", seed=2),
        tmp_path / "B",
        start=tmp_path / "A",
        settings=QUICK["settings"],
    )
    places = [tmp_path / name for name in ("A", "B", "forks")]
    places[-1].mkdir()
    command = [sys.executable, __file__, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *attempts, reference = map(json.loads, done.stdout.splitlines())
    assert len(attempts) >= ATTEMPTS
    assert reference["end"][1:3] == [["alpha", "beta", "gamma"], 20]
    assert [source[1] for source in reference["sources"]] == [["alpha", "beta"], ["beta", "gamma"]]
    for found in attempts:
        number = found["number"]
        assert found["exit"] == -signal.SIGKILL, number
        assert found["loaded"] in (None, reference["end"]), number
        assert (found["again"], found["end"], found["left"]) == (0, reference["end"], []), number
    assert {found["loaded"] is None for found in attempts} == {True, False}


if __name__ == "__main__":
    kill_forks(*map(Path, sys.argv[1:]))
