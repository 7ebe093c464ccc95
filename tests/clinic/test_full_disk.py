"""No space: on a disk that is full, and where a file must not grow. Both are the system's own errors."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .commands import WRITING, Place, arguments, run
from .full_disk import of_versions
from .generated import content

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_MOUNTS = ("unshare", "--map-root-user", "--mount")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def place(of_patients: Path, delta: Path, tmp_path: Path) -> Place:
    (tmp_path / "out").mkdir()
    model = Path(shutil.copytree(of_patients / "model", tmp_path / "model"))
    return Place(model, delta, of_patients / "first", tmp_path / "out")


UNFINISHED = ("trained/versions/.v1.part/", "trained/images/")


@pytest.mark.parametrize(
    ("command", "most"), [*((command, 0) for command in WRITING), ("update", 20_000), ("erase", 5_000)]
)
def test_a_command_without_space_loses_nothing_and_goes_on_later(command, most, place, capsys):
    before, given = of_versions(place.model), arguments(command, place)
    with files_of_at_most(most):
        said = run(capsys, *given)
    assert said.code == 1, said.err
    assert "No space left" in said.first
    assert "Free some and run the same command again" in said.first
    assert of_versions(place.model) == before
    assert [name for name in content(place.out) if not name.startswith(UNFINISHED)] == []
    said = run(capsys, *given)
    assert said.code == 0, said.err


@pytest.mark.slow
def test_a_full_disk(of_patients, delta, tmp_path):
    if (
        shutil.which("unshare") is None
        or subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here: the full disk is not tested")
    (tmp_path / "disk").mkdir()
    places = (of_patients / "model", of_patients / "first", delta, tmp_path / "disk")
    command = [*OWN_MOUNTS, sys.executable, "-m", "tests.clinic.full_disk", *map(str, places)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("history")["code"] == 0
    assert set(found) == set(WRITING)
    for command, what in found.items():
        assert what["code"] == 1, (command, what)
        assert "No space left" in what["said"], (command, what)
        assert "Free some and run the same command again" in what["said"], (command, what)
        assert what["is_as_before"], command
        assert what["written"] == [], command


def test_what_is_printed_finds_no_space(of_patients):
    """The device that is always full."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "medcil", "history", str(of_patients / "model")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("No space left on device. Fix this and run the same command again.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["predict", "export", "evaluate", "explain"])
def test_a_pipe_is_not_waited_for_and_not_replaced(command, place, capsys):
    """As a device would be: nobody's /dev/null becomes a file."""
    given = arguments(command, place)
    pipe = Path(given[given.index("-o") + 1])
    os.mkfifo(pipe)
    said = run(capsys, *given)
    assert said.code == (4 if command in ("predict", "export") else 2)
    assert "another" in said.first
    assert pipe.is_fifo()
    assert list(place.out.iterdir()) == [pipe]
