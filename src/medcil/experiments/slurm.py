"""Runs on a SLURM cluster, through submitit.

submitit keeps jobs and results as pickles in its folder: anyone who can write there can execute code as this
user, so nobody else may.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from medcil.config import Section
from medcil.errors import InvalidInput, ProcessLost, needs_extra
from medcil.experiments.launcher import LOCK_PATIENCE, PATIENCE, Count, Exit, Job, run_on_node

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

POLL = 1.0
ASK_EVERY = 60.0
"""Seconds between two queries to SLURM about jobs without a result."""
LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "INTERRUPTED")
"""States of a job that ended without an error of its own (the last one: submitit's local executor)."""


@dataclass(frozen=True)
class Attempt:
    """Executes a job on a node. Preempted or out of time, submitit queues it again, and the run resumes."""

    command: tuple[str, ...]
    output: str
    folder: str

    def __call__(self) -> tuple[int, str]:
        return run_on_node(self.command, self.output, folder=self.folder, lock_patience=LOCK_PATIENCE)

    def checkpoint(self) -> "DelayedSubmission":
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmOptions(Section):
    partition: str | None = None
    cpus_per_run: Count = 4
    gpus_per_run: Count = 0
    minutes_per_run: Count = 240
    retries: Count = 3
    """How often submitit queues a job again that was preempted or ran out of time."""
    sbatch: Mapping[str, str] = Field(default_factory=dict)
    """Any option of sbatch: account, qos, constraint."""


class SlurmLauncher:
    """Submits one SLURM job per run.

    A job whose node is lost ends like a lost process, so a sweep starts it again.
    `cluster="local"` runs processes on this machine instead, to try it out.
    """

    def __init__(
        self,
        logs: Path,
        options: SlurmOptions,
        *,
        at_once: int | None = None,
        cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:
        with needs_extra("slurm"):
            import submitit
        folder = logs / "slurm"
        _check_private(folder)
        self._logs, self.capacity = logs, at_once or sys.maxsize
        try:
            self._executor = submitit.AutoExecutor(folder, cluster, slurm_max_num_timeout=options.retries)
        except RuntimeError as error:
            raise InvalidInput(
                f"SLURM is not available on this machine: {error}. Use another --launcher.",
                code="sweep.slurm.missing",
            ) from None
        self._executor.update_parameters(
            timeout_min=options.minutes_per_run,
            cpus_per_task=options.cpus_per_run,
            gpus_per_node=options.gpus_per_run,
            slurm_partition=options.partition,
            slurm_additional_parameters=dict(options.sbatch),
        )
        self._submitted: dict[str, Any] = {}  # key -> submitit's job
        self._asked_at = time.monotonic()

    def start(self, job: Job) -> None:
        self._output(job.key).unlink(missing_ok=True)  # once it exists, the job runs
        attempt = Attempt(tuple(job.command), str(self._output(job.key)), folder=str(Path.cwd()))
        self._executor.update_parameters(name=f"medcil-{job.key}")
        self._submitted[job.key] = self._executor.submit(attempt)

    def is_running(self, key: str) -> bool:
        return key in self._submitted and self._output(key).exists()

    def wait(self, seconds: float) -> Sequence[Exit]:
        deadline = time.monotonic() + seconds
        while True:
            lost = self._lost_jobs()
            exits = [self._exit(key, is_lost=key in lost) for key in list(self._submitted)]
            ended = [exit for exit in exits if exit]
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

    def _lost_jobs(self) -> set[str]:
        """Ask SLURM now and then which jobs are lost: submitit takes a preempted one for a waiting one."""
        if not self._submitted or time.monotonic() - self._asked_at < ASK_EVERY:
            return set()
        self._asked_at = time.monotonic()
        next(iter(self._submitted.values())).get_info()  # one query for all of them
        return {key for key, submitted in self._submitted.items() if submitted.state in LOST}

    def _exit(self, key: str, *, is_lost: bool) -> Exit | None:
        """Return None while the job goes on."""
        from submitit.core.utils import UncompletedJobError

        submitted = self._submitted[key]
        if not is_lost and not submitted.done():
            return None
        del self._submitted[key]
        if not submitted.paths.result_pickle.exists() and (state := submitted.state) in LOST:
            submitted.cancel(check=False)  # in case SLURM has queued it again by itself
            return Exit(key, ProcessLost.exit_code, f"SLURM reports {state}.")
        try:
            return Exit(key, *submitted.result())
        except UncompletedJobError as error:
            return Exit(key, 1, f"{error}\nThe job did not complete: {submitted.paths.stderr}")

    def _output(self, key: str) -> Path:
        return self._logs / f"{key}.log"


def _check_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise InvalidInput(
            f"Others can write to {folder}, whose files are executed. Run chmod 700 on it, or give "
            "another --out.",
            code="sweep.slurm.not_private",
        )
