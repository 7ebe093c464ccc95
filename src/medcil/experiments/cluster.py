"""Runs on a cluster: Ray schedules them, or SLURM through submitit; docs/how-to/use-a-cluster.md says how.

submitit keeps jobs and results as pickles in its folder: anyone who can write there can execute code as this
user, so nobody else may.
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from medcil.config import Section, usable_cores
from medcil.errors import InvalidInput, ProcessLost, needs_extra
from medcil.experiments.launcher import PATIENCE, Count, Exit, Job, run_on_node

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

OBJECT_STORE = 80 * 2**20
"""Bytes, about the least that Ray accepts: only exit codes and last lines pass through it."""
POLL = 1.0
ASK_EVERY = 60.0
"""Seconds between two queries to SLURM about jobs without a result."""
LOST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "INTERRUPTED")
"""States of a job that ended without an error of its own (the last one: submitit's local executor)."""


class RayOptions(Section):
    address: str | None = None
    """`auto`: the cluster of this machine; None: a new, local one."""
    cpus_per_run: Annotated[float, Field(gt=0)] = 1
    gpus_per_run: Annotated[float, Field(ge=0)] | None = None
    """A fraction of 1 or a whole number; None: 1 if the cluster has GPUs."""
    retries: Count = 3
    """How often a job is scheduled again whose node or worker is lost."""


class RayLauncher:
    """Runs jobs on a cluster. The output of a run is in `logs`/KEY.log."""

    def __init__(self, logs: Path, options: RayOptions, *, at_once: int | None = None) -> None:
        self._logs, self.capacity = logs, at_once or sys.maxsize
        self._jobs: dict[Any, str] = {}  # Ray's reference to the result -> key of the job
        self._session: tempfile.TemporaryDirectory[str] | None = None
        self._ray = _import_ray(is_local=options.address is None)
        self._connect(options.address)
        try:
            resources = self._resources(options)
            self._run = self._ray.remote(run_on_node).options(
                num_cpus=resources["CPU"],
                num_gpus=resources["GPU"],
                max_retries=options.retries,
                scheduling_strategy="SPREAD",  # long runs: better one on each node than many on the first
            )
        except InvalidInput:
            self.stop()
            raise

    def start(self, job: Job) -> None:
        output = self._output(job.key)
        output.unlink(missing_ok=True)  # once it exists, the job runs
        self._jobs[self._run.remote(job.command, str(output), folder=str(Path.cwd()))] = job.key

    def is_running(self, key: str) -> bool:
        return key in self._jobs.values() and self._output(key).exists()

    def wait(self, seconds: float) -> Sequence[Exit]:
        if not self._jobs:
            time.sleep(seconds)
            return ()
        self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        ready, _ = self._ray.wait(list(self._jobs), num_returns=len(self._jobs), timeout=0)
        return [self._exit(self._jobs.pop(result), result) for result in ready]

    def stop(self) -> None:
        """Cancel all jobs; a cluster that was started elsewhere keeps running."""
        if not self._ray.is_initialized():
            return
        for result in self._jobs:
            self._ray.cancel(result)
        if self._jobs:
            self._ray.wait(list(self._jobs), num_returns=len(self._jobs), timeout=PATIENCE + 5)
        self._jobs.clear()
        self._ray.shutdown()  # whatever still runs ends with its worker
        if self._session:
            self._session.cleanup()

    def _output(self, key: str) -> Path:
        return self._logs / f"{key}.log"

    def _exit(self, key: str, result: Any) -> Exit:
        try:
            return Exit(key, *self._ray.get(result))
        except self._ray.exceptions.RayTaskError as error:  # raised by our own code, on the node
            return Exit(key, 1, f"The node could not start it: {error.cause}")
        except self._ray.exceptions.RayError as error:  # its last retry was lost, too
            return Exit(key, 1, f"Ray gave up: {' '.join(str(error).split())}")

    def _connect(self, address: str | None) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        if address is None:
            # It holds sockets, whose paths must be short: not in a long TMPDIR.
            self._session = tempfile.TemporaryDirectory(
                prefix="medcil-", dir="/tmp", ignore_cleanup_errors=True
            )
            options |= {"num_cpus": usable_cores(), "object_store_memory": OBJECT_STORE}
            options |= {"include_dashboard": False, "_temp_dir": self._session.name}
        try:
            self._ray.init(address=address or "local", **options)
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            # Ray does not say which: a wrong token ends like no cluster at all.
            raise InvalidInput(
                f"No access to a Ray cluster at {address}. Check that it runs and that its token is in "
                f"~/.ray/auth_token; omit the address to start a local one.\n{error}",
                code="sweep.ray.unreachable",
            ) from None

    def _resources(self, options: RayOptions) -> dict[str, float]:
        """Return what a job needs; refuse one that fits on no node, because it would wait forever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        largest = {kind: max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in ("CPU", "GPU")}
        gpus = min(1.0, largest["GPU"]) if options.gpus_per_run is None else options.gpus_per_run
        needed = {"CPU": options.cpus_per_run, "GPU": gpus}
        for kind, amount in needed.items():
            if amount > largest[kind]:
                raise InvalidInput(
                    f"A run needs {amount:g} {kind}s, but the largest node has {largest[kind]:g}. "
                    f"Lower {kind.lower()}s_per_run, or add a node.",
                    code="sweep.ray.too_large",
                )
        if gpus > 1 and gpus % 1:
            raise InvalidInput(
                f"gpus_per_run={gpus:g}: give a fraction of 1 or a whole number.", code="sweep.ray.invalid"
            )
        return needed


def _import_ray(*, is_local: bool) -> ModuleType:
    """Import Ray with a token and without usage statistics: it reads these variables when it is loaded."""
    if (mode := os.environ.setdefault("RAY_AUTH_MODE", "token")) != "token":
        raise InvalidInput(
            f"RAY_AUTH_MODE is {mode!r}. Set it to token, or unset it: without a token, anyone who can reach "
            "a cluster can execute code on it.",
            code="sweep.ray.no_token",
        )
    if is_local:  # a token for this once; Ray would leave one in the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("ray"):
        import ray
    return ray


@dataclass(frozen=True)
class Attempt:
    """Executes a job on a node. Preempted or out of time, submitit queues it again, and the run resumes."""

    command: tuple[str, ...]
    output: str
    folder: str

    def __call__(self) -> tuple[int, str]:
        return run_on_node(self.command, self.output, folder=self.folder)

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
        while not (exits := self._exits()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return exits

    def stop(self) -> None:
        for submitted in self._submitted.values():
            submitted.cancel(check=False)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not all(job.done() for job in self._submitted.values()):
            time.sleep(0.1)
        self._submitted.clear()

    def _exits(self) -> list[Exit]:
        lost = self._lost_jobs()
        exits = [self._exit(key, is_lost=key in lost) for key in list(self._submitted)]
        return [exit for exit in exits if exit]

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
