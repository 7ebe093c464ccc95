"""Runs on a SLURM cluster, through submitit.

submitit keeps jobs and results as pickles in its folder. Whoever may write there can execute code as us, so
the folder must be ours alone.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from medcil.errors import InvalidInput
from medcil.experiments.child_processes import LOCK_PATIENCE, PATIENCE, run_to_its_end
from medcil.experiments.launchers.protocol import Ended, Job

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

POLL = 1.0
ASK_EVERY = 60.0
"""Seconds between two questions to SLURM about jobs that left no result."""
LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "INTERRUPTED")
"""States of a job that ended by no fault of its own (the last one: submitit's local stand-in)."""


@dataclass(frozen=True)
class Attempt:
    """What a node executes. Preempted or out of time, it is queued again by submitit, and the run resumes."""

    command: tuple[str, ...]
    output: str
    folder: str
    lock_patience: float

    def __call__(self) -> tuple[int, str]:
        return run_to_its_end(self.command, self.output, folder=self.folder, lock_patience=self.lock_patience)

    def checkpoint(self) -> "DelayedSubmission":
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmLauncher:
    """One SLURM job for each run. `sbatch` holds further options of sbatch: account, qos, constraint.

    A job that was preempted, ran out of time or lost its node is queued again up to `retries` times.
    """

    def __init__(
        self,
        folder: Path,
        *,
        logs: Path,
        at_once: int | None = None,
        partition: str | None = None,
        cpus_per_run: int = 4,
        gpus_per_run: int = 0,
        minutes_per_run: int = 240,
        retries: int = 3,
        sbatch: Mapping[str, str] | None = None,
        cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:
        """cluster="local": processes on this machine instead, to try it out."""
        try:
            import submitit
        except ImportError:
            raise InvalidInput(
                "The launcher `slurm` needs submitit, which is not installed: pip install 'medcil[slurm]'"
            ) from None
        _keep_others_out(folder)
        self._logs, self._at_once, self._retries = logs.absolute(), at_once, retries
        try:
            self._executor = submitit.AutoExecutor(folder.absolute(), cluster, slurm_max_num_timeout=retries)
        except RuntimeError as error:
            raise InvalidInput(f"SLURM is not to be had on this machine: {error}") from None
        self._executor.update_parameters(
            timeout_min=minutes_per_run,
            cpus_per_task=cpus_per_run,
            gpus_per_node=gpus_per_run,
            slurm_partition=partition,
            slurm_additional_parameters=dict(sbatch or {}),
        )
        self._jobs: dict[str, Job] = {}
        self._submitted: dict[str, Any] = {}  # key -> submitit's job
        self._losses: dict[str, int] = {}
        self._asked = time.monotonic()

    @property
    def capacity(self) -> int:
        return self._at_once or sys.maxsize

    def start(self, job: Job) -> None:
        self._output(job.key).unlink(missing_ok=True)  # its being there says that the job has begun
        self._jobs[job.key], self._losses[job.key] = job, 0
        self._submit(job)

    def is_running(self, key: str) -> bool:
        return key in self._submitted and self._output(key).exists()

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            lost = self._ask_about()
            found = [self._ended(key, is_lost=key in lost) for key in list(self._submitted)]
            ended = [end for end in found if end]
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(POLL, left))

    def stop(self) -> None:
        for submitted in self._submitted.values():
            submitted.cancel(check=False)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not all(job.done() for job in self._submitted.values()):
            time.sleep(0.1)
        self._submitted.clear()

    def _submit(self, job: Job) -> None:
        attempt = Attempt(
            tuple(job.command),
            str(self._output(job.key)),
            folder=str(Path.cwd()),
            lock_patience=LOCK_PATIENCE,
        )
        self._executor.update_parameters(name=f"medcil-{job.key}")
        self._submitted[job.key] = self._executor.submit(attempt)

    def _ask_about(self) -> set[str]:
        """Now and then, the jobs that SLURM itself calls lost: submitit takes a preempted one for waiting."""
        if not self._submitted or time.monotonic() - self._asked < ASK_EVERY:
            return set()
        self._asked = time.monotonic()
        next(iter(self._submitted.values())).get_info()  # one question, to all of them
        return {key for key, submitted in self._submitted.items() if submitted.state in LOST}

    def _ended(self, key: str, *, is_lost: bool) -> Ended | None:
        """None: it goes on, or was lost and is submitted again."""
        from submitit.core.utils import UncompletedJobError

        submitted = self._submitted[key]
        if not is_lost and not submitted.done():
            return None
        if not submitted.paths.result_pickle.exists() and (state := submitted.state) in LOST:
            if self._losses[key] < self._retries:
                self._losses[key] += 1
                submitted.cancel(check=False)  # should SLURM have queued it again by itself: once is enough
                self._submit(self._jobs[key])
                return None
            ended = Ended(key, 1, f"SLURM says {state}, {self._losses[key] + 1} times over.")
        else:
            try:
                ended = Ended(key, *submitted.result())
            except UncompletedJobError as error:
                ended = Ended(key, 1, f"{error}\nIts job did not get to its end: {submitted.paths.stderr}")
        del self._submitted[key]
        return ended

    def _output(self, key: str) -> Path:
        return self._logs / f"{key}.log"


def _keep_others_out(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InvalidInput(
            f"{folder} can be written to by others, and what lies there is executed: make it yours alone "
            "(chmod 700), or give another --out."
        )
