"""`update` is killed with SIGKILL just before or after the writes that count: the old version still predicts,
and the same command completes, with the very weights of an update that was left alone.

To save start-up time all attempts are forks of one process, which runs this file as a program.
"""

import fnmatch
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WRITES = [
    ("before", ".v2.part/request.json"),
    ("after", "images/*.png"),
    ("after", ".v2.part/version/holdout.json"),
    ("after", ".v2.part/training/tasks/01/progress/progress.json"),
    ("after", "tensors/*.safetensors"),
    ("before", ".v2.part/.state.part/manifest.json"),
    ("after", ".v2.part/state"),
    ("after", ".v2.part/version/state"),
    ("after", ".v2.part/version/calibration.json"),
    ("before", ".v2.part/version/provenance.json"),
    ("before", "versions/v2"),
    ("after", "versions/v2"),
    ("before", "model.json"),
    ("after", "model.json"),
]
CHECKPOINT = "after .v2.part/training/tasks/01/progress/progress.json"
TRAIN_WRITES = [
    ("after", ".v1.part/training/tasks/01/progress/progress.json"),
    ("after", "versions/v1"),
    ("after", "model.json"),
]
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "settings": ("execution.threads=1", "execution.checkpoint_every=1"),
}


def kill_at_write(when: str, target: str) -> None:
    """Arms this process to kill itself where a file or folder gets its final name."""
    for name in ("replace", "rename"):
        setattr(os, name, functools.partial(_fatal, getattr(os, name), when, target))


def _fatal(rename: Callable[..., None], when: str, target: str, source: Any, destination: Any) -> None:
    is_target = fnmatch.fnmatch(str(destination), f"*/{target}")
    if is_target and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, destination)
    if is_target:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_while_tidying(count: Path, number: int | None = None) -> None:
    """Arms this process to count what it removes once model.json is written, and to kill itself before the
    removal of a number. Files are listed before folders, an order that some disk may have."""

    @contextmanager
    def files_first(list_folder: Callable[..., Any], place: Any) -> Iterator[Any]:
        with list_folder(place) as found:
            yield iter(sorted(found, key=lambda entry: entry.is_dir(follow_symlinks=False)))

    def removing(remove: Callable[..., None], *arguments: Any, **options: Any) -> None:
        done = len(count.read_bytes()) if count.exists() else 0
        if done + 1 == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count.write_bytes(b"." * (done + 1))
        remove(*arguments, **options)

    def replacing(replace: Callable[..., None], source: Any, destination: Any) -> None:
        replace(source, destination)
        if Path(destination).name == "model.json":
            for name in ("unlink", "rmdir"):
                setattr(os, name, functools.partial(removing, getattr(os, name)))
            os.scandir = functools.partial(files_first, os.scandir)  # type: ignore[assignment]

    os.replace = functools.partial(replacing, os.replace)  # type: ignore[assignment]


def kill_forks(model: Path, new_data: Path, folder: Path) -> None:
    """Prints what was found after each attempt, and after the same command again."""
    from medcil.clinic.update import update

    def attempt(arm: Callable[[], None], place: Path) -> None:
        arm()
        update(place, new_data, **OPTIONS)

    def start(arm: Callable[[], None], place: Path) -> int | None:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(arm, place))
        child.start()
        child.join()
        return child.exitcode

    def arm_for(when: str, target: str) -> Callable[[], None]:
        return lambda: kill_at_write(when, target)

    def alone() -> None: ...

    reference, count = Path(shutil.copytree(model, folder / "reference")), folder / "count"
    assert start(lambda: kill_while_tidying(count), reference) == 0
    last = len(count.read_bytes()) - 1  # of the request; the empty folder goes after it
    for number in sorted({1, *range(max(1, last - 2), last + 1)}):
        count.unlink(missing_ok=True)
        place = Path(shutil.copytree(model, folder / f"tidying{number}"))
        arm = functools.partial(kill_while_tidying, count, number)
        found = {"moment": f"before removal {number}", "exit": start(arm, place), "old": _state(place, "v1")}
        print(json.dumps(found | {"again": start(alone, place), **_end(place)}))
    for number, (when, target) in enumerate(WRITES):
        place = Path(shutil.copytree(model, folder / str(number)))
        found = {"moment": f"{when} {target}", "exit": start(arm_for(when, target), place)}
        print(json.dumps(found | {"old": _state(place, "v1"), "again": start(alone, place), **_end(place)}))
    print(json.dumps({"moment": "left alone", **_end(reference)}))


def kill_trainings(data: Path, folder: Path) -> None:
    """The same of `train`."""
    from medcil.clinic.model_dir import ModelFolder
    from medcil.clinic.train import train

    def attempt(place: Path, when: str, target: str) -> None:
        if target:
            kill_at_write(when, target)
        train(data, place, backbone="resnet8_cifar", **OPTIONS)

    for number, (when, target) in enumerate([*TRAIN_WRITES, ("", "")]):
        place, exits = folder / f"trained{number}", []
        for arguments in ((place, when, target), (place, "", ""))[: 2 if target else 1]:
            child = multiprocessing.get_context("fork").Process(target=attempt, args=arguments)
            child.start()
            child.join()
            exits.append(child.exitcode)
        hidden = [path.name for path in (place / "versions").iterdir() if path.name.startswith(".")]
        found = {"moment": f"{when} {target}", "exits": exits, "left": hidden, "state": _state(place, "v1")}
        print(json.dumps(found | {"current": ModelFolder(place).current}))


def _state(model: Path, version: str) -> dict[str, Any]:
    """Loaded as any command loads it, with what it says of its sealed images."""
    from medcil.clinic.model_dir import ModelFolder
    from medcil.config import ExecutionConfig
    from medcil.training.inference import predict_scores

    folder = ModelFolder(model).version(version)
    state = folder.load_state()
    scores = predict_scores(state, folder.holdout(), ExecutionConfig(device="cpu"))
    return {"classes": list(state.class_names), "scores": scores.double().sum().item()}


def _end(model: Path) -> dict[str, Any]:
    from medcil.clinic.model_dir import ModelFolder

    folder = ModelFolder(model)
    hidden = [path.name for path in (model / "versions").iterdir() if path.name.startswith(".")]
    temporary = [path.name for path in model.rglob(".*.tmp")]
    return {
        "versions": list(folder.versions),
        "current": folder.current,
        "left": hidden + temporary,
        "new": _state(model, "v2"),
        "cost": json.loads((folder.version("v2").root / "forgetting.json").read_text())["verdict"],
    }


def printed(*arguments: Path) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_training_killed_anywhere_completes(first_model, tmp_path):
    *attempts, reference = printed(first_model.parent / "data", tmp_path)
    assert len(attempts) == len(TRAIN_WRITES)
    for found in attempts:
        assert found["exits"] == [-signal.SIGKILL, 0], found["moment"]
        assert (found["current"], found["left"]) == ("v1", []), found["moment"]
        assert found["state"] == reference["state"], found["moment"]


@pytest.mark.parametrize(
    ("method", "writes_not", "known"),
    [("balanced", [], {}), ("analytic", [CHECKPOINT], {}), ("analytic", [CHECKPOINT], {"alpha": 12})],
)
def test_an_update_killed_anywhere_completes_and_never_harms_the_old_version(
    first_model, delta, tmp_path, method, writes_not, known
):
    from medcil.clinic.train import train

    from .generated import write_counts

    model = tmp_path / "model"
    if method == "balanced":
        shutil.copytree(first_model, model)
    else:
        train(first_model.parent / "data", model, method=method, backbone="resnet8_cifar", **OPTIONS)
    data = Path(shutil.copytree(delta, tmp_path / "images"))
    *attempts, reference = printed(model, write_counts(data, known, seed=7), tmp_path)
    moments = [found["moment"] for found in attempts]
    assert moments[-len(WRITES) :] == [f"{when} {target}" for when, target in WRITES]
    assert sum(moment.startswith("before removal") for moment in moments) >= 3
    assert [found["moment"] for found in attempts if found["exit"] != -signal.SIGKILL] == writes_not
    for found in (found for found in attempts if found["moment"] not in writes_not):
        moment = found["moment"]
        assert found["old"] == attempts[0]["old"], moment
        assert found["old"]["classes"] == ["alpha", "beta", "gamma"], moment
        assert found["again"] == 0, moment
        assert (found["versions"], found["current"], found["left"]) == (["v1", "v2"], "v2", []), moment
        assert found["new"]["classes"] == ["alpha", "beta", "gamma", "delta"], moment
        assert found["cost"] == reference["cost"], moment
        # Bit for bit, as if nothing had happened.
        assert found["new"] == reference["new"], moment


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  # an optimizer imports it when it is made, each fork anew: two seconds

    arguments = [Path(argument) for argument in sys.argv[1:]]
    kill_forks(*arguments) if len(arguments) == 3 else kill_trainings(*arguments)
