"""Two Ray nodes on this machine, set up as in docs/how-to/use-a-cluster.md, for tests and proofs.

Everything it writes is in a folder of its own, and it ends exactly the processes it started.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTING = 120.0
"""Seconds."""


@dataclass
class TwoNodes:
    address: str
    first: subprocess.Popen[bytes]
    second: subprocess.Popen[bytes]

    def jobs_on_the_second(self) -> list[list[str]]:
        """The commands it executes: children of workers, which are children of the node's raylet."""
        workers = (worker for raylet in raylets_of(self.second.pid) for worker in _children(raylet))
        jobs = (job for worker in workers for job in _children(worker))
        return [_read(Path(f"/proc/{job}/cmdline")).split("\0") for job in jobs]

    def lose_the_second(self) -> None:
        """As when its machine fails: nothing of Ray on it says goodbye."""
        for pid in raylets_of(self.second.pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def two_nodes(token: str, *, cpus_each: int) -> Iterator[TwoNodes]:
    # It holds sockets, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        started: list[subprocess.Popen[bytes]] = []
        try:
            head = ("--head", "--port=0", f"--temp-dir={home}", "--include-dashboard=false")
            first = _start(token, home / "first.txt", cpus_each, *head)
            started.append(first)
            address = _wait_for(home / "ray_current_cluster", ":", first, home / "first.txt")
            second = _start(token, home / "second.txt", cpus_each, f"--address={address}")
            started.append(second)
            _wait_for(home / "second.txt", "Ray runtime started", second, home / "second.txt")
            yield TwoNodes(address, first, second)
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(30)


def _start(token: str, output: Path, cpus: int, *options: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *options, f"--num-cpus={cpus}"]
    command += ["--num-gpus=0", "--object-store-memory=80000000"]
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {
        "RAY_health_check_period_ms": "1000"
    }  # of Ray itself: 3 s, and a node is given up after five
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
        )


def _wait_for(file: Path, words: str, process: subprocess.Popen[bytes], output: Path) -> str:
    """The content of a file, once it holds these words."""
    deadline = time.monotonic() + STARTING
    while words not in (content := _read(file)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Ray did not start: {process.args}\n{_read(output)}")
        time.sleep(0.1)
    return content


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def raylets_of(pid: int) -> list[int]:
    """Among the children of a process."""
    return [child for child in _children(pid) if _read(Path(f"/proc/{child}/comm")) == "raylet"]


def _children(pid: int) -> list[int]:
    """Of any of its threads."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in _read(path).split()]
