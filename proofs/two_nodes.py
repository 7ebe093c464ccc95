"""A Ray cluster of two nodes on this machine, set up as docs/clusters.md says, for tests and proofs.

Everything it writes is in a folder of its own, and it ends exactly the processes it started.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTING = 60.0
"""Seconds."""


@dataclass
class TwoNodes:
    address: str
    first: subprocess.Popen[bytes]
    second: subprocess.Popen[bytes]

    def lose_the_second(self) -> None:
        """As when its machine fails: nothing of Ray on it says goodbye."""
        for pid in raylets_of(self.second.pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def two_nodes(token: str, *, cpus_each: int) -> Iterator[TwoNodes]:
    # Sockets lie in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        started: list[subprocess.Popen[bytes]] = []
        try:
            first = _start(token, home / "first.txt", cpus_each, "--head", "--port=0", f"--temp-dir={home}")
            started.append(first)
            address = _wait_for(lambda: _read(home / "ray_current_cluster"), first)
            second = _start(token, home / "second.txt", cpus_each, f"--address={address}")
            started.append(second)
            _wait_for(lambda: _found("Ray runtime started", home / "second.txt"), second)
            yield TwoNodes(address, first, second)
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(30)


def _start(token: str, output: Path, cpus: int, *options: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *options, f"--num-cpus={cpus}"]
    command += ["--num-gpus=0", "--object-store-memory=80000000", "--include-dashboard=false"]
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
        )


def _wait_for(found: Callable[[], str], process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + STARTING
    while not (value := found()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start: {process.args}")
        time.sleep(0.1)
    return value


def _found(words: str, path: Path) -> str:
    return words if words in _read(path) else ""


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def raylets_of(pid: int) -> list[int]:
    """Among the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if _read(Path(f"/proc/{child}/comm")) == "raylet"]
