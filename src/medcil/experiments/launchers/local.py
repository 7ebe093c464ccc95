"""Runs on this machine, several at once, each in a process of its own."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medcil.experiments.child_processes import exit_code, last_lines, start_child, stop_children
from medcil.experiments.launchers.protocol import Ended, Job
from medcil.processors import usable_cores

ON_A_GPU = 3
"""Runs that share a GPU well, as measured for a ResNet-18 at batch 32; docs/explanation/speed.md."""
POLL = 0.05


def bearable(*, n_gpus: int, threads: int) -> int:
    """How many runs of so many threads the GPUs or, without one, the cores bear at once."""
    return ON_A_GPU * n_gpus or max(1, usable_cores() // threads)


class LocalLauncher:
    """Its jobs end with it, however it ends. What each says is in `logs`/KEY.log.

    Where it has `gpus` to share out, a job sees the least busy of them alone.
    """

    def __init__(self, logs: Path, *, at_once: int, gpus: Sequence[str] = ()) -> None:
        self.logs, self.at_once, self.gpus = logs, at_once, gpus
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.gpu_of: dict[str, str] = {}
        self.begun: set[str] = set()

    @property
    def capacity(self) -> int:
        return self.at_once

    def start(self, job: Job) -> None:
        if job.key not in self.begun:  # what an earlier sweep's attempt said would pass for this one's
            self._log(job.key).unlink(missing_ok=True)
            self.begun.add(job.key)
        if self.gpus:
            busy = [self.gpu_of[key] for key in self.children]
            self.gpu_of[job.key] = min(self.gpus, key=busy.count)
            job = replace(job, gpu=self.gpu_of[job.key])
        self.children[job.key] = start_child(job.command, self._log(job.key))

    def is_running(self, key: str) -> bool:
        return key in self.children

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while not (ended := self._ended()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return ended

    def _ended(self) -> list[Ended]:
        codes = {key: exit_code(child) for key, child in self.children.items()}
        ended = {key: code for key, code in codes.items() if code is not None}
        for key in ended:
            del self.children[key]
        return [Ended(key, code, last_lines(self._log(key)) if code else "") for key, code in ended.items()]

    def stop(self) -> None:
        stop_children(self.children.values())
        self.children.clear()

    def _log(self, key: str) -> Path:
        return self.logs / f"{key}.log"
