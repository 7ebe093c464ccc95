"""Processes that end with the one that started them, however that one ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from medcil.errors import RunLocked

PATIENCE = 20.0
"""Seconds a process has between Ctrl-C and being killed."""
LOCK_PATIENCE = 600.0
"""Seconds a job waits for another process in its run directory: longer than a lost node's file lock lives."""
POLL = 0.1
LOCK_POLL = 2.0

# A small program that becomes the command, for code between fork and exec can hang where the starter has
# threads. Linux kills a process whose starter is gone, if it asks for that. And Ctrl-C must be heard, though
# some starters (Ray's workers, jobs in a shell's background) do not hear it and hand that down.
_BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
if os.getppid() == int(sys.argv[1]):  # it was still there when we asked
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_child(
    command: Sequence[str], output: Path, *, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command in a folder (None: this one); what it says is added to the file `output`.

    The child does not hear Ctrl-C on the terminal; `stop_children` passes it on. Start it from a thread that
    lives as long as the child may: on Linux it is killed when that thread ends. Elsewhere it may outlive us,
    and then the lock of its run directory keeps others out.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-ISc", _BECOME, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )


def exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """None while it runs; 128 + n for one that signal n has ended, as shells say it."""
    code = child.poll()
    return 128 - code if code is not None and code < 0 else code


def stop_children(children: Iterable[subprocess.Popen[bytes]], *, patience: float = PATIENCE) -> None:
    """Ends them as Ctrl-C would; kills those that have not ended after `patience` seconds, and theirs."""
    children = [child for child in children if child.poll() is None]
    for child in children:
        child.send_signal(signal.SIGINT)
    deadline = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def last_lines(path: Path, n: int = 20) -> str:
    """The end of what a child has said."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * n))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-n:]).strip()
    except FileNotFoundError:
        return ""


def run_to_its_end(
    command: Sequence[str], output: str, *, folder: str, lock_patience: float
) -> tuple[int, str]:
    """Exit code, and the last lines said where that is not 0. What a cluster's node executes for a job.

    Where another process works in the run directory (a lost node's child may live on for a while), it waits
    its turn. Whatever interrupts this (a cancelled task, the end of the time granted) ends the child, too.
    """
    deadline = time.monotonic() + lock_patience
    while True:
        child = start_child(command, Path(output), folder=Path(folder))
        try:
            while (code := exit_code(child)) is None:
                time.sleep(POLL)  # short: an interrupt is heard between two of them
        except BaseException:
            stop_children([child])
            raise
        if code != RunLocked.exit_code or time.monotonic() > deadline:
            return code, last_lines(Path(output)) if code else ""
        time.sleep(LOCK_POLL)
