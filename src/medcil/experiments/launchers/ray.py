"""Runs on a Ray cluster. Ray places them, and again when a node is lost; all that counts is in their folders.

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

from medcil.errors import InvalidInput
from medcil.experiments.child_processes import LOCK_PATIENCE, PATIENCE, run_to_its_end
from medcil.experiments.launchers.protocol import Ended, Job
from medcil.processors import usable_cores

OBJECT_STORE = 80 * 2**20
"""Bytes, about the least that Ray accepts: nothing but exit codes and last words pass through it."""


class RayLauncher:
    """On the cluster at `address` (`auto`: the one this machine belongs to); None: on a new one, local.

    `gpus_per_run` may be a fraction; None: 1 where the cluster has GPUs. A job whose node or worker is lost
    is placed again up to `retries` times. What a run says is kept in `logs`/KEY.log.
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
        self._logs, self._at_once, self._lock_patience = logs.absolute(), at_once, lock_patience
        self._jobs: dict[Any, str] = {}  # what Ray will give the result under -> key of the job
        self._session: tempfile.TemporaryDirectory[str] | None = None
        self._ray = _import_ray(is_local=address is None)
        self._connect(address)
        try:
            gpus = min(1.0, self._largest("GPU")) if gpus_per_run is None else gpus_per_run
            self._check_fits(CPU=cpus_per_run, GPU=gpus)
        except InvalidInput:
            self.stop()
            raise
        self._run = self._ray.remote(run_to_its_end).options(
            num_cpus=cpus_per_run,
            num_gpus=gpus,
            max_retries=retries,
            scheduling_strategy="SPREAD",  # long runs: better one on each node than many on the first
        )

    @property
    def capacity(self) -> int:
        return self._at_once or sys.maxsize

    def start(self, job: Job) -> None:
        output = self._output(job.key)
        output.unlink(missing_ok=True)  # its being there says that the job has begun
        result = self._run.remote(
            job.command, str(output), folder=str(Path.cwd()), lock_patience=self._lock_patience
        )
        self._jobs[result] = job.key

    def is_running(self, key: str) -> bool:
        return key in self._jobs.values() and self._output(key).exists()

    def wait(self, seconds: float) -> Sequence[Ended]:
        if not self._jobs:
            time.sleep(seconds)
            return ()
        self._ray.wait(list(self._jobs), num_returns=1, timeout=seconds)
        ready, _ = self._ray.wait(list(self._jobs), num_returns=len(self._jobs), timeout=0)
        return [self._ended(self._jobs.pop(result), result) for result in ready]

    def stop(self) -> None:
        """What was submitted is cancelled; a cluster that was not started here goes on."""
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

    def _ended(self, key: str, result: Any) -> Ended:
        try:
            exit_code, said = self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:  # in our own lines, on the node
            return Ended(key, 1, f"The node could not start it: {error.cause}")
        except self._ray.exceptions.RayError as error:  # the last of its retries was lost, too
            return Ended(key, 1, f"Ray has given it up: {' '.join(str(error).split())}")
        return Ended(key, exit_code, said)

    def _connect(self, address: str | None) -> None:
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        try:
            if address is None:
                # Sockets lie in it, whose paths must be short: not in a long TMPDIR.
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
                f"No Ray cluster at {address} lets us in: see that it runs, and that ~/.ray/auth_token holds "
                f"the token it was started with; give no address for a cluster of our own.\n{error}"
            ) from None

    def _largest(self, kind: str) -> float:
        """As much as any one node has of it."""
        return max(
            (node["Resources"].get(kind, 0.0) for node in self._ray.nodes() if node["Alive"]), default=0.0
        )

    def _check_fits(self, **needed: float) -> None:
        """A job that fits on no node would wait forever."""
        for kind, amount in needed.items():
            if amount > self._largest(kind):
                raise InvalidInput(
                    f"A run asks for {amount:g} {kind}s, the largest node has {self._largest(kind):g}: "
                    f"lower {kind.lower()}s_per_run, or add a node."
                )
        if needed["CPU"] <= 0 or needed["GPU"] < 0 or (needed["GPU"] > 1 and needed["GPU"] % 1):
            raise InvalidInput("A run needs more than 0 CPUs, and 0, a part of 1, or a whole number of GPUs.")


def _import_ray(*, is_local: bool) -> ModuleType:
    """Ray as we use it: with a token, and without telling anyone. It reads these when it is loaded."""
    if (mode := os.environ.setdefault("RAY_AUTH_MODE", "token")) != "token":
        raise InvalidInput(
            f"RAY_AUTH_MODE is {mode!r}: set it to token, or unset it. Whoever reaches another cluster can "
            "execute anything on it."
        )
    if is_local:  # a token for this once; Ray would leave one in the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InvalidInput(
            "The launcher `ray` needs Ray, which is not installed: pip install 'medcil[ray]'"
        ) from None
    return ray
