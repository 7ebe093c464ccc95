"""Launchers start the runs of a sweep as processes and report how they ended: `local`, `ray` or `slurm`.

The local one is here: runs on this machine, several in parallel. Each process ends with its starter. All
results are in the run directories, so a sweep begun with one launcher may end with another.

Run as a program, `python -m medcil.experiments.launcher run ...` is one such process: `medcil` whose last
line of output is the first line of its error, which a sweep reads from the log.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar, runtime_checkable

from pydantic import Field

from medcil.config import Section, usable_cores
from medcil.errors import InvalidInput, MedcilError, RunLocked, nearest
from medcil.recipe import parse, with_values

RUNS_PER_GPU = 3
"""Runs that share a GPU well, measured for a ResNet-18 at batch 32; docs/explanation/speed.md."""
PATIENCE = 20.0
"""Seconds between Ctrl-C and killing a process."""
LOCK_PATIENCE = 600.0
"""Seconds a job waits for another process in its run directory: longer than a lost node keeps a lock."""
POLL = 0.1
LOCK_POLL = 2.0

Count = Annotated[int, Field(ge=0)]
AnySection = TypeVar("AnySection", bound=Section)

# A small program that replaces itself by the command: code between fork and exec could hang if the starter
# has threads. On Linux the kernel kills the process when its starter is gone. The command must receive
# Ctrl-C, which some starters (Ray's workers, background jobs of a shell) ignore and pass that on.
_BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
if os.getppid() == int(sys.argv[1]):  # the starter was still there
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Job:
    """One run: `medcil run RECIPE --out OUT`, which resumes where an earlier attempt stopped."""

    key: str
    recipe: Path
    out: Path

    @property
    def command(self) -> list[str]:
        # -P: a file in the working folder must not be imported as a module.
        program = [sys.executable, "-P", "-m", "medcil.experiments.launcher"]
        return [*program, "run", str(self.recipe), "--out", str(self.out), "--no-report"]


@dataclass(frozen=True)
class Exit:
    """How a job's process ended: its exit code and, if that is not 0, the last lines of its output."""

    key: str
    exit_code: int
    output: str = ""


@runtime_checkable
class Launcher(Protocol):
    @property
    def capacity(self) -> int:
        """The number of jobs it accepts at once; a cluster with a queue accepts all."""

    def start(self, job: Job) -> None: ...

    def is_running(self, key: str) -> bool:
        """Whether the job runs; False while it waits in a queue."""

    def wait(self, seconds: float) -> Sequence[Exit]:
        """Return the jobs that have ended since the last call; wait for one up to a timeout."""

    def stop(self) -> None:
        """End all jobs as Ctrl-C would: every run resumes from its last checkpoint later."""


def make_launcher(
    name: str, options: Sequence[str], *, out: Path, at_once: int | None, gpus: Sequence[str] = ()
) -> Launcher:
    """Build a launcher by name, with `key=value` options.

    `at_once` is the maximum number of parallel runs; None: as many as a cluster can take, or one locally.
    `gpus` are those of this machine; a cluster assigns its own.
    """
    from medcil.experiments.cluster import RayLauncher, RayOptions, SlurmLauncher, SlurmOptions

    kinds: dict[str, type[Section]] = {"local": Section, "ray": RayOptions, "slurm": SlurmOptions}
    if name not in kinds:
        raise InvalidInput(
            f"No such launcher: {name!r}. {nearest(name, kinds)}", code="sweep.launcher.unknown"
        )
    if at_once is not None and at_once < 1:
        raise InvalidInput(f"--at-once {at_once} is too low. Give 1 or more.", code="sweep.at_once.invalid")
    logs, values = (out / "logs").absolute(), parse_options(options, kinds[name])
    if isinstance(values, RayOptions):
        return RayLauncher(logs, values, at_once=at_once)
    if isinstance(values, SlurmOptions):
        return SlurmLauncher(logs, values, at_once=at_once)
    return LocalLauncher(logs, at_once=at_once or 1, gpus=gpus)


def parse_options(texts: Sequence[str], kind: type[AnySection]) -> AnySection:
    """Check `key=value` texts against the fields of a section."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(
                f"--launcher-option {text} has no value. Write key=value.",
                code="sweep.launcher_option.invalid",
            )
        values[key.strip()] = value.strip()
    return parse(with_values({}, values), kind, source="--launcher-option")


def parallel_runs(*, n_gpus: int, threads: int) -> int:
    """Compute how many runs of so many threads the GPUs or, without one, the cores support in parallel."""
    return RUNS_PER_GPU * n_gpus or max(1, usable_cores() // threads)


class LocalLauncher:
    """Runs jobs as child processes; the output of each is in `logs`/KEY.log.

    With `gpus`, each job sees only one of them: the least busy.
    """

    def __init__(self, logs: Path, *, at_once: int, gpus: Sequence[str] = ()) -> None:
        self.logs, self.capacity, self.gpus = logs, at_once, gpus
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.gpu_of: dict[str, str] = {}
        self.attempted: set[str] = set()

    def start(self, job: Job) -> None:
        log, gpu = self._log(job.key), None
        if job.key not in self.attempted:  # the output of an earlier sweep would pass for this one's
            log.unlink(missing_ok=True)
            self.attempted.add(job.key)
        if self.gpus:
            busy = [self.gpu_of[key] for key in self.children]
            gpu = self.gpu_of[job.key] = min(self.gpus, key=busy.count)
        self.children[job.key] = start_child(job.command, log, gpu=gpu)

    def is_running(self, key: str) -> bool:
        return key in self.children

    def wait(self, seconds: float) -> Sequence[Exit]:
        deadline = time.monotonic() + seconds
        while not (exits := self._exits()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return exits

    def _exits(self) -> list[Exit]:
        codes = {key: exit_code(child) for key, child in self.children.items()}
        ended = {key: code for key, code in codes.items() if code is not None}
        for key in ended:
            del self.children[key]
        return [Exit(key, code, last_lines(self._log(key)) if code else "") for key, code in ended.items()]

    def stop(self) -> None:
        stop_children(self.children.values())
        self.children.clear()

    def _log(self, key: str) -> Path:
        return self.logs / f"{key}.log"


def start_child(
    command: Sequence[str], output: Path, *, folder: Path | None = None, gpu: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a folder (None: this one) and append its output to a file.

    The child does not receive Ctrl-C from the terminal; `stop_children` passes it on. Start it from a thread
    that lives as long as the child may: on Linux it is killed when that thread ends. Elsewhere it may outlive
    its starter, and then the lock of its run directory keeps others out.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = [] if gpu is None else ["env", f"CUDA_VISIBLE_DEVICES={gpu}"]
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-ISc", _BECOME, str(os.getpid()), *on_gpu, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )


def exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Return None while it runs, and 128 + n if signal n ended it, as shells do."""
    code = child.poll()
    return 128 - code if code is not None and code < 0 else code


def stop_children(children: Iterable[subprocess.Popen[bytes]], *, patience: float = PATIENCE) -> None:
    """End children as Ctrl-C would; kill those that need more than `patience` seconds, and their own."""
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
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        return "".join(deque(file, maxlen=n)).strip()


def run_on_node(
    command: Sequence[str], output: str, *, folder: str, lock_patience: float = LOCK_PATIENCE
) -> tuple[int, str]:
    """Run a job on a node of a cluster; return its exit code and, if that is not 0, its last lines.

    If another process works in the run directory (the child of a lost node may live on for a while), wait.
    Whatever interrupts this (a cancelled task, the end of the time limit) ends the child, too.
    """
    deadline = time.monotonic() + lock_patience
    while True:
        child = start_child(command, Path(output), folder=Path(folder))
        try:
            while (code := exit_code(child)) is None:
                time.sleep(POLL)  # short, so that an interrupt takes effect
        except BaseException:
            stop_children([child])
            raise
        if code != RunLocked.exit_code or time.monotonic() > deadline:
            return code, last_lines(Path(output)) if code else ""
        time.sleep(LOCK_POLL)


def main() -> None:
    try:
        runpy.run_module("medcil", run_name="__main__")
    except SystemExit as ending:
        error = ending.__context__  # the command line turns an error into an exit code
        if isinstance(error, MedcilError) and len(lines := str(error).splitlines()) > 1:
            print(lines[0], file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    main()
