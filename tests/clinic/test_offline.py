"""No command reaches for another host. Two witnesses: Python's own audit of every process, and the system's
count of what had no way out, where the commands may have a network of their own: libraries that are not
written in Python are seen by the second only."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_NETWORK = ("unshare", "--map-root-user", "--net")


def test_no_command_asks_another_host(tmp_path):
    work, home, record = tmp_path / "work", tmp_path / "home", tmp_path / "record.txt"
    work.mkdir()
    home.mkdir()
    may_have_own = bool(shutil.which("unshare")) and not subprocess.call([*OWN_NETWORK, "true"])
    # Nothing else of the environment: on machines that test software, some libraries are more reserved.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent / "watched"), str(REPOSITORY))),
        "RECORD_OF_CONNECTIONS": str(record),
        "OMP_NUM_THREADS": "1",
    }
    command = [*(OWN_NETWORK if may_have_own else ()), sys.executable, "-m", "tests.clinic.offline"]
    done = subprocess.run([*command, str(record)], cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {what: code for what, code in found["codes"].items() if code not in (0, 10)} == {}
    assert found["page"].pop("exit code") == 0
    assert len(found["page"]) >= 8
    assert set(found["page"].values()) == {200}

    assert found["asked"] == []
    assert found["refused"] == 0
    assert [path for path in home.rglob("*") if "onnxruntime" in path.name] == []  # kept until it is sent

    # What does reach out is seen, in a process and in those that it starts.
    events = [line.split()[0] for line in found["attempts"]]
    for event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request"):
        assert events.count(event) >= 2, event
    assert found["own_network"] == may_have_own
    assert found["refused_attempts"] is None or found["refused_attempts"] >= 4
