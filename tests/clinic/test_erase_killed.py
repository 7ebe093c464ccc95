"""`erase` is killed with SIGKILL just before some change in the folder: every version still loads, and the
same command completes, with the figures of one that was left alone.

To save start-up time all attempts are forks of one process, which runs this file as a program.
"""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir")


class Deadly:
    """Counts what this process changes in the file system, writes down every renaming of a version, and kills
    the process before the change of a number."""

    def __init__(self, number: int | None) -> None:
        self.number, self.done, self.swaps = number, 0, []

    def arm(self) -> "Deadly":
        for name in CHANGES:
            setattr(os, name, functools.partial(self.change, getattr(os, name)))
        return self

    def change(self, function: Callable[..., Any], *places: Any, **options: Any) -> Any:
        self.done += 1
        if self.done == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        if Path(str(places[-1])).parent.name == "versions" and len(places) == 2:
            self.swaps.append(self.done)
        return function(*places, **options)


def kill_forks(model: Path, patient: str, folder: Path, images: Path | None) -> None:
    """Prints what was found after each attempt, and after the same command again."""
    from medcil.clinic.erase import erase

    def attempt(place: Path, number: int | None) -> None:
        deadly = Deadly(number).arm()
        done = erase(place, patient, images=images)
        found = {"done": asdict(done) | {"model": ""}, "changes": deadly.done, "swaps": deadly.swaps}
        place.with_suffix(".json").write_text(json.dumps(found))

    def start(place: Path, number: int | None = None) -> int | None:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(place, number))
        child.start()
        child.join()
        return child.exitcode

    reference = Path(shutil.copytree(model, folder / "reference"))
    assert start(reference) == 0
    left_alone = json.loads(reference.with_suffix(".json").read_text())
    last, swaps = left_alone["changes"], left_alone["swaps"]
    spread = [1 + step * (last - 1) // 3 for step in range(4)]  # from the first change to the last one
    for number in sorted({*spread, *swaps, *(swap + 1 for swap in swaps), last - 1}):
        place = Path(shutil.copytree(model, folder / str(number)))
        found = {"number": number, "exit": start(place, number), "loaded": load(place)}
        found |= {"again": start(place), **end(place)}
        print(json.dumps(found))
    print(json.dumps({"number": last, "swaps": swaps, **end(reference)}))


def load(model: Path) -> list[list[int]]:
    """Whole, as any command loads it: exemplars and sealed images of each version."""
    from medcil.clinic.model_dir import ModelFolder

    versions = [ModelFolder(model).version(name) for name in ModelFolder(model).versions]
    return [
        [
            *(len(version.load_state().memory), len(version.holdout()), version.metrics()["images"]),
            *version.load_state().inherent_counts.tolist(),
        ]
        for version in versions
    ]


def end(model: Path) -> dict[str, Any]:
    versions = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(model.glob("versions/v*/metrics.json"))
    }
    stones = json.loads((model / "tombstones.json").read_text())["tombstones"]
    return {
        "done": json.loads(model.with_suffix(".json").read_text())["done"],
        "metrics": versions,
        "tombstones": [[stone["images"], stone["versions"]] for stone in stones],
        "left": sorted(path.name for path in model.rglob(".*") if path.name != ".lock"),
    }


def test_killed_anywhere_it_completes_and_every_version_loads(of_patients, tmp_path):
    from .patients import people, search  # not above: as a program this file has no package

    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    patient = people(model, version="v2", part="exemplars")[0]
    before = load(model)
    command = [sys.executable, __file__, str(model), patient, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *attempts, reference = map(json.loads, done.stdout.splitlines())
    assert len(reference["swaps"]) == 6  # beside its place, the old one away, the new one there; twice
    assert len(attempts) >= 10
    after = load(tmp_path / "reference")
    for found in attempts:
        number = found["number"]
        assert found["exit"] == -signal.SIGKILL, number
        for version, loaded in enumerate(found["loaded"]):
            assert loaded in (before[version], after[version]), number
        assert found["again"] == 0, number
        for key in ("metrics", "tombstones", "done", "left"):
            assert found[key] == reference[key], (number, key)
        assert search(tmp_path / str(number), of_patients, patient) == [], number
    assert reference["left"] == []
    assert [loaded for found in attempts for loaded in found["loaded"] if loaded in after]


def test_killed_anywhere_the_patient_is_subtracted_once(tmp_path):
    from .deliveries import PATIENT, images_of, ridge_in, train_deliveries, write_deliveries
    from .patients import traces

    root = write_deliveries(tmp_path / "root")
    model = train_deliveries(root, tmp_path / "model", "method.adapt=never")
    theirs, before = images_of(root, tmp_path / "theirs"), load(model)
    command = [sys.executable, __file__, str(model), PATIENT, str(tmp_path), str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *attempts, reference = map(json.loads, done.stdout.splitlines())
    assert (len(reference["swaps"]), reference["done"]["subtracted"]) == (6, 9)
    after, expected = load(tmp_path / "reference"), ridge_in(tmp_path / "reference", "v2")
    assert [new != old for new, old in zip(after, before, strict=True)] == [True, True]
    for found in attempts:
        number = found["number"]
        assert (found["exit"], found["again"], found["left"]) == (-signal.SIGKILL, 0, []), number
        for version, loaded in enumerate(found["loaded"]):
            assert loaded in (before[version], after[version]), number
        place = tmp_path / str(number)
        assert load(place) == after
        assert ridge_in(place, "v2").sums.allclose(expected.sums, rtol=0, atol=1e-5), number
        assert traces(place, sorted(theirs.iterdir()), PATIENT) == [], number


if __name__ == "__main__":
    given = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    kill_forks(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), given)
