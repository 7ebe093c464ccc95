"""Compute the unfinished runs of a suite through a launcher; record how each ends.

A run's directory tells whether it is finished, and its lock whether a process computes it. A sweep keeps no
other state: several may share a folder, and one that was killed is started again.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medcil.errors import ProcessLost, RunLocked
from medcil.experiments.launcher import Exit, Job, Launcher
from medcil.experiments.plan import PlannedRun, SweepPlan
from medcil.experiments.suite import ResultsFolder, begin_record, update_record
from medcil.storage.run_dir import RunDir

ATTEMPTS = 3
"""Attempts at a run whose process or node is lost; a run that ends with an error of its own has one."""
TICK = 1.0
ELSEWHERE_TICK = 2.0
"""Seconds between two looks at a run that another sweep computes."""
SHOWN = 12
"""Running runs whose progress is read; a cluster may have hundreds."""


@dataclass(frozen=True)
class Status:
    """The state of a sweep."""

    n_runs: int
    n_finished: int
    running: Sequence[tuple[PlannedRun, str]]
    """The first of them with their progress."""
    n_running: int
    n_elsewhere: int
    """Runs that another sweep computes."""
    failed: Sequence[tuple[PlannedRun, str]]
    seconds_left: float | None
    """At the pace of the runs that this sweep has finished; None: there is none yet."""
    news: Sequence[str]
    """Sentences since the last status."""

    @property
    def n_waiting(self) -> int:
        return self.n_runs - self.n_finished - self.n_running - self.n_elsewhere - len(self.failed)


Watch = Callable[[Status], None]


def sweep(plan: SweepPlan, launcher: Launcher, watch: Watch = lambda status: None) -> Status:
    """Return when every run is finished or has failed. Interrupted, stop those that run."""
    return _Sweep(plan, launcher, watch).run()


class _Sweep:
    def __init__(self, plan: SweepPlan, launcher: Launcher, watch: Watch) -> None:
        self.plan, self.launcher, self.watch = plan, launcher, watch
        self.results: ResultsFolder = plan.request.results
        self.runs = {run.key: run for run in plan.runs}
        self.waiting = deque(run.key for run in plan.unfinished)
        self.started: list[str] = []
        self.elsewhere: dict[str, float] = {}  # -> when to look again
        self.finished = set(self.runs) - set(self.waiting)
        self.failed: dict[str, str] = {}  # -> why
        self.attempts: Counter[str] = Counter()
        self.began, self.n_ended = time.monotonic(), 0
        self.news: list[str] = []

    def run(self) -> Status:
        begin_record(self.plan)
        try:
            while self.waiting or self.started or self.elsewhere:
                self._start_runs()
                for ended in self.launcher.wait(TICK):
                    self._handle(ended)
                self._check_elsewhere()
                self._show()
        finally:
            self.launcher.stop()
            update_record(self.plan, self.failed)
        return self._show()

    def _start_runs(self) -> None:
        while self.waiting and len(self.started) < self.launcher.capacity:
            key = self.waiting.popleft()
            if self.results.is_finished(key):
                self._finish(key)
            elif self.results.is_running(key):
                self._leave_to_others(key)
            else:
                recipe = self.plan.write_recipe(self.runs[key])
                self.started.append(key)
                self.attempts[key] += 1
                self.launcher.start(Job(key, recipe.absolute(), self.results.run(key).absolute()))

    def _handle(self, ended: Exit) -> None:
        key, code = ended.key, ended.exit_code
        self.started.remove(key)
        if code == RunLocked.exit_code:
            self.attempts[key] -= 1
            self._leave_to_others(key)
        elif code == 0 and self.results.is_finished(key):
            self._finish(key)
        elif is_lost(code) and self.attempts[key] < ATTEMPTS:
            self.news.append(f"{self.runs[key].name}: its process was lost ({code}), it is started again")
            self.waiting.append(key)
        else:
            self.failed[key] = reason(ended)
            self.news.append(f"{self.runs[key].name} failed: {self.failed[key]}")
            update_record(self.plan, self.failed)

    def _finish(self, key: str) -> None:
        self.finished.add(key)
        self.news.append(f"{self.runs[key].name} finished, {len(self.finished)} of {len(self.runs)}")
        self.n_ended += 1
        update_record(self.plan, self.failed)

    def _leave_to_others(self, key: str) -> None:
        if key not in self.elsewhere:
            self.news.append(f"{self.runs[key].name}: another process computes it")
        self.elsewhere[key] = time.monotonic() + ELSEWHERE_TICK

    def _check_elsewhere(self) -> None:
        """Take back the runs that another process has finished or abandoned."""
        for key in [key for key, at in self.elsewhere.items() if time.monotonic() > at]:
            if self.results.is_running(key):
                self.elsewhere[key] = time.monotonic() + ELSEWHERE_TICK
            else:
                del self.elsewhere[key]
                self.waiting.appendleft(key)

    def _show(self) -> Status:
        running = [key for key in self.started if self.launcher.is_running(key)]
        n_left = len(self.runs) - len(self.finished) - len(self.failed)
        seconds = time.monotonic() - self.began
        status = Status(
            n_runs=len(self.runs),
            n_finished=len(self.finished),
            running=[(self.runs[key], read_progress(self.results.run(key))) for key in running[:SHOWN]],
            n_running=len(running),
            n_elsewhere=len(self.elsewhere),
            failed=[(self.runs[key], why) for key, why in self.failed.items()],
            seconds_left=seconds / self.n_ended * n_left if self.n_ended else None,
            news=self.news,
        )
        self.watch(status)
        self.news = []
        return status


def is_lost(code: int) -> bool:
    """Whether the process was killed, or lost a process that trained with it: no error of the run."""
    return code < 0 or code > 128 or code == ProcessLost.exit_code


def reason(ended: Exit) -> str:
    """Say in one line why a run failed."""
    code = ended.exit_code
    if code < 0 or code > 128:  # its output has nothing to do with it
        return f"its process was killed (signal {-code if code < 0 else code - 128})"
    *_, last = ["", *ended.output.strip().splitlines()]
    return last or f"it ended with code {code}"


def read_progress(run: Path) -> str:
    """Say how far a run is, from the last complete line of its log."""
    log = RunDir(run).log_path
    *_, line, _ = [b"", *log.read_bytes().split(b"\n")] if log.exists() else (b"", b"")
    try:
        return "step {task}, {phase}, epoch {epoch}/{epochs}".format(**json.loads(line))
    except (ValueError, KeyError):  # none, half a line that a killed process left, or no record of an epoch
        return "starting"
