"""Runs on a Ray cluster. Ray schedules them, also again after a node is lost; results are in their folders.

docs/how-to/use-a-cluster.md says how to set a cluster up.
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from medcil.errors import InvalidInput, needs_extra
from medcil.experiments.launchers import Exit, Job
from medcil.experiments.launchers.local import LOCK_PATIENCE, PATIENCE, run_on_node
from medcil.processors import usable_cores

OBJECT_STORE = 80 * 2**20
"""Bytes, about the least that Ray accepts: only exit codes and last lines pass through it."""


class RayLauncher:
    """Runs jobs on the cluster at `address` (`auto`: that of this machine); None: on a new, local one.

    `gpus_per_run` may be a fraction; None: 1 if the cluster has GPUs. A job whose node or worker is lost is
    scheduled again up to `retries` times. The output of a run is in `logs`/KEY.log.
    """

    def __init__(
        self,
        logs: Path,
        *,
        address: str | None = None,
        at_once: int | None = None,
        cpus_per_run: float = 1,
        gpus_per_run: float | None = None,
        retries: int = 3,
        lock_patience: float = LOCK_PATIENCE,
    ) -> None:
        self._logs, self.capacity, self._lock_patience = (
            logs.absolute(),
            at_once or sys.maxsize,
            lock_patience,
        )
        self._jobs: dict[Any, str] = {}  # Ray's reference to the result -> key of the job
        self._session: tempfile.TemporaryDirectory[str] | None = None
        self._ray = _import_ray(is_local=address is None)
        self._connect(address)
        try:
            gpus = min(1.0, self._largest("GPU")) if gpus_per_run is None else gpus_per_run
            self._check_fits(CPU=cpus_per_run, GPU=gpus)
        except InvalidInput:
            self.stop()
            raise
        self._run = self._ray.remote(run_on_node).options(
            num_cpus=cpus_per_run,
            num_gpus=gpus,
            max_retries=retries,
            scheduling_strategy="SPREAD",  # long runs: better one on each node than many on the first
        )

    def start(self, job: Job) -> None:
        output = self._output(job.key)
        output.unlink(missing_ok=True)  # once it exists, the job runs
        result = self._run.remote(
            job.command, str(output), folder=str(Path.cwd()), lock_patience=self._lock_patience
        )
        self._jobs[result] = job.key

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
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        try:
            if address is None:
                # It holds sockets, whose paths must be short: not in a long TMPDIR.
                self._session = tempfile.TemporaryDirectory(
                    prefix="medcil-", dir="/tmp", ignore_cleanup_errors=True
                )
                self._ray.init(
                    address="local",
                    num_cpus=usable_cores(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE,
                    _temp_dir=self._session.name,
                    **quiet,
                )
            else:
                self._ray.init(address=address, **quiet)
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            # Ray does not say which: a wrong token ends like no cluster at all.
            raise InvalidInput(
                f"No access to a Ray cluster at {address}. Check that it runs and that its token is in "
                f"~/.ray/auth_token; omit the address to start a local one.\n{error}",
                code="sweep.ray.unreachable",
            ) from None

    def _largest(self, kind: str) -> float:
        """Find the amount that the largest node has."""
        return max(
            (node["Resources"].get(kind, 0.0) for node in self._ray.nodes() if node["Alive"]), default=0.0
        )

    def _check_fits(self, **needed: float) -> None:
        """Refuse a job that fits on no node: it would wait forever."""
        for kind, amount in needed.items():
            if amount > self._largest(kind):
                raise InvalidInput(
                    f"A run needs {amount:g} {kind}s, but the largest node has {self._largest(kind):g}. "
                    f"Lower {kind.lower()}s_per_run, or add a node.",
                    code="sweep.ray.too_large",
                )
        if needed["CPU"] <= 0 or needed["GPU"] < 0 or (needed["GPU"] > 1 and needed["GPU"] % 1):
            raise InvalidInput(
                "A run needs more than 0 CPUs, and 0, a part of 1, or a whole number of GPUs.",
                code="sweep.ray.invalid",
            )


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
