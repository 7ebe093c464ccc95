"""Compute the unfinished runs of a suite through a launcher; record how each ends; estimate the time left.

A run's directory tells whether it is finished, and its lock whether a process computes it. A sweep keeps no
other state: several may share a folder, and one that was killed is started again.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medcil.build import RunConfig, arrangement, method_settings
from medcil.data.sources import find_dataset
from medcil.errors import MedcilError, ProcessLost, RunLocked
from medcil.experiments.launcher import Exit, Job, Launcher
from medcil.experiments.plan import PlannedRun, SweepPlan
from medcil.experiments.results_folder import ResultsFolder, begin_record, update_record
from medcil.storage.run_dir import RunDir

ATTEMPTS = 3
"""Attempts at a run whose process or node is lost; a run that ends with an error of its own has one."""
TICK = 1.0
ELSEWHERE_TICK = 2.0
"""Seconds between two looks at a run that another sweep computes."""
SHOWN = 12
"""Running runs whose progress is read; a cluster may have hundreds."""
TIMED_RUNS = 50
"""The number of newest runs from which speeds are measured."""


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
        self.speeds = Speeds.measured(self.results)
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
        with suppress(OSError):  # a run without timings
            self.speeds.add(self.results.run(key), self.runs[key].config)
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
        progress = {key: read_progress(self.results.run(key)) for key in running[:SHOWN]}
        status = Status(
            n_runs=len(self.runs),
            n_finished=len(self.finished),
            running=[(self.runs[key], at.text) for key, at in progress.items()],
            n_running=len(running),
            n_elsewhere=len(self.elsewhere),
            failed=[(self.runs[key], why) for key, why in self.failed.items()],
            seconds_left=self._seconds_left(progress, len(running)),
            news=self.news,
        )
        self.watch(status)
        self.news = []
        return status

    def _seconds_left(self, progress: Mapping[str, "RunProgress"], n_running: int) -> float | None:
        # A cluster accepts all runs and runs as many as it has room for.
        seconds = []
        for key in (*self.waiting, *self.started, *self.elsewhere):
            config = self.runs[key].config
            whole = self.speeds.seconds(config)
            if whole is None:
                return None
            seconds.append(whole * (1 - progress[key].share_of(config) if key in progress else 1))
        at_once = min(self.launcher.capacity, n_running or len(seconds))
        at_once = max(1, min(at_once, len(seconds)))
        return max([sum(seconds) / at_once, *seconds], default=0.0)


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


# How far a run is, and what it costs.


@dataclass(frozen=True)
class RunProgress:
    """The number of epochs that a run has logged, and the last of them."""

    epochs: int
    last: Mapping[str, Any]

    @property
    def text(self) -> str:
        if not self.last:
            return "starting"
        return "step {task}, {phase}, epoch {epoch}/{epochs}".format(**self.last)

    def share_of(self, config: RunConfig) -> float:
        """Compute the share of the run that is done, not counting second stages."""
        return min(1.0, self.epochs / max(1, n_epochs(config)))


def read_progress(run: Path) -> RunProgress:
    """Read the last complete line of a run's log."""
    log = RunDir(run).log_path
    content = log.read_bytes() if log.exists() else b""
    lines = content[: content.rfind(b"\n") + 1]
    last = next(_records(lines[lines.rfind(b"\n", 0, -1) + 1 :]), {})
    return RunProgress(lines.count(b"\n"), last)


def n_epochs(config: RunConfig) -> int:
    """Count the epochs of all tasks; 0 if the classes are not known."""
    dataset = find_dataset(config.data.name)
    if not dataset.class_names:
        return 0
    _, sizes = arrangement(config, dataset)
    is_first = [number == 0 or config.scenario.cumulative for number in range(len(sizes))]
    return sum(config.training_of_task(is_first=first).epochs for first in is_first)


class Speeds:
    """Seconds per epoch of finished runs: of a network on a dataset with this method, or with any."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, ...], tuple[float, int]] = {}

    @classmethod
    def measured(cls, results: ResultsFolder) -> "Speeds":
        """Measure the newest finished runs of all suites."""
        speeds = cls()
        times = {path.parent: path.stat().st_mtime for path in (results.root / "runs").glob("*/metrics.json")}
        for run in sorted(times, key=lambda path: times[path])[-TIMED_RUNS:]:
            if results.is_finished(run.name):
                with suppress(MedcilError, OSError):  # a damaged run
                    speeds.add(run, RunDir(run).read_config(RunConfig))
        return speeds

    def add(self, run: Path, config: RunConfig) -> None:
        spent = seconds_spent(run)
        for kind in self._kinds(config):
            seconds, epochs = self.totals.get(kind, (0.0, 0))
            self.totals[kind] = seconds + spent, epochs + n_epochs(config)

    def seconds(self, config: RunConfig) -> float | None:
        """Estimate the time of a whole run; None if no similar run was timed."""
        seconds, epochs = next((self.totals[k] for k in self._kinds(config) if k in self.totals), (0.0, 0))
        return n_epochs(config) * seconds / epochs if epochs else None

    def _kinds(self, config: RunConfig) -> list[tuple[str, ...]]:
        """List what a run is similar to, the most specific first."""
        network = (config.data.name, str(config.data.crop), config.network.backbone)
        return [(*network, method_settings(config.method)["name"]), network]


def seconds_spent(run: Path) -> float:
    """Add up the times from each start of a run to the last epoch it completed."""
    total, first, last = 0.0, 0.0, 0.0
    for record in _records(RunDir(run).timings_path.read_bytes()):
        if "started" in record:
            total, first = total + last - first, float(record["unix_time"])
        last = float(record["unix_time"])
    return total + last - first


def _records(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        with suppress(ValueError):  # half a line, of a process that was killed
            yield json.loads(line)
