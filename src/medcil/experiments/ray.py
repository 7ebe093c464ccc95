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
from typing import Annotated, Any

from pydantic import Field

from medcil.config import Section
from medcil.errors import InvalidInput, needs_extra
from medcil.experiments.launcher import LOCK_PATIENCE, PATIENCE, Count, Exit, Job, run_on_node
from medcil.processors import usable_cores

OBJECT_STORE = 80 * 2**20
"""Bytes, about the least that Ray accepts: only exit codes and last lines pass through it."""


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

    def __init__(
        self,
        logs: Path,
        options: RayOptions,
        *,
        at_once: int | None = None,
        lock_patience: float = LOCK_PATIENCE,
    ) -> None:
        self._logs, self.capacity, self._lock_patience = logs, at_once or sys.maxsize, lock_patience
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
