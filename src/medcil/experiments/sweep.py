"""Computes the runs of a suite that are not finished, through a launcher, and writes down how each ended.

A run's directory says whether it is finished, and its lock whether someone computes it: a sweep keeps nothing
else in mind, so that several may work in one folder, and one that was killed is just started again.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from medcil.errors import ProcessLost, RunLocked
from medcil.experiments.cost import Progress, Speeds, progress_of
from medcil.experiments.launchers.protocol import Ended, Job, Launcher
from medcil.experiments.suite_runs import PlannedRun
from medcil.experiments.sweep_plan import Work
from medcil.experiments.sweep_record import begin, write_record
from medcil.experiments.sweep_request import ResultsFolder

ATTEMPTS = 3
"""Of a run whose process or node is lost; one that ends by an error of its own is not tried again."""
TICK = 1.0
ELSEWHERE_TICK = 2.0
"""Seconds between two looks at a run that another sweep computes."""
SHOWN = 12
"""Running runs whose progress is read; a cluster may have hundreds."""


@dataclass(frozen=True)
class Standing:
    """How a sweep stands."""

    n_asked: int
    n_finished: int
    running: Sequence[tuple[PlannedRun, str]]
    """The first of them, each with how far it is."""
    n_running: int
    n_elsewhere: int
    """That another sweep computes."""
    failed: Sequence[tuple[PlannedRun, str]]
    seconds_left: float | None
    news: Sequence[str]
    """Since the last time."""

    @property
    def n_waiting(self) -> int:
        return self.n_asked - self.n_finished - self.n_running - self.n_elsewhere - len(self.failed)


Watch = Callable[[Standing], None]


def sweep(work: Work, launcher: Launcher, watch: Watch = lambda standing: None) -> Standing:
    """Returns once every run is finished or has failed. Interrupted, it stops those that run."""
    return _Sweep(work, launcher, watch).go_through()


class _Sweep:
    def __init__(self, work: Work, launcher: Launcher, watch: Watch) -> None:
        self.work, self.launcher, self.watch = work, launcher, watch
        self.results: ResultsFolder = work.request.results
        self.runs = {run.key: run for run in work.asked}
        self.waiting = deque(run.key for run in work.unfinished)
        self.started: list[str] = []
        self.elsewhere: dict[str, float] = {}  # -> when to look again
        self.finished = set(self.runs) - set(self.waiting)
        self.failed: dict[str, str] = {}  # -> why
        self.attempts: Counter[str] = Counter()
        self.speeds = Speeds.of(self.results)
        self.news: list[str] = []

    def go_through(self) -> Standing:
        begin(self.work)
        try:
            while self.waiting or self.started or self.elsewhere:
                self._start_some()
                for ended in self.launcher.wait(TICK):
                    self._take_in(ended)
                self._look_elsewhere()
                self._show()
        finally:
            self.launcher.stop()
            self._write_record()
        return self._show()

    def _start_some(self) -> None:
        while self.waiting and len(self.started) < self.launcher.capacity:
            key = self.waiting.popleft()
            if self.results.is_finished(key):
                self._finish(key)
            elif self.results.is_at_work(key):
                self._leave_to_others(key)
            else:
                recipe = self.work.write_recipe(self.runs[key])
                self.started.append(key)
                self.attempts[key] += 1
                self.launcher.start(Job(key, recipe.absolute(), self.results.run(key).absolute()))

    def _take_in(self, ended: Ended) -> None:
        key, code = ended.key, ended.exit_code
        self.started.remove(key)
        if code == RunLocked.exit_code:
            self.attempts[key] -= 1
            self._leave_to_others(key)
        elif code == 0 and self.results.is_finished(key):
            self._finish(key)
        elif is_lost(code) and self.attempts[key] < ATTEMPTS:
            self.news.append(f"{name_of(self.runs[key])}: its process was lost ({code}), it goes on")
            self.waiting.append(key)
        else:
            why = reason(ended)
            self.failed[key] = why
            self.news.append(f"{name_of(self.runs[key])} failed: {why}")
            self._write_record()

    def _finish(self, key: str) -> None:
        self.finished.add(key)
        self.news.append(f"{name_of(self.runs[key])} finished, {len(self.finished)} of {len(self.runs)}")
        with suppress(OSError):  # without timings there is nothing to learn from it
            self.speeds.add(self.results.run(key), self.runs[key].config)
        self._write_record()

    def _leave_to_others(self, key: str) -> None:
        if key not in self.elsewhere:
            self.news.append(f"{name_of(self.runs[key])}: another process computes it")
        self.elsewhere[key] = time.monotonic() + ELSEWHERE_TICK

    def _look_elsewhere(self) -> None:
        """A run that another process has finished, or left, comes back."""
        for key in [key for key, at in self.elsewhere.items() if time.monotonic() > at]:
            if self.results.is_at_work(key):
                self.elsewhere[key] = time.monotonic() + ELSEWHERE_TICK
            else:
                del self.elsewhere[key]
                self.waiting.appendleft(key)

    def _show(self) -> Standing:
        running = [key for key in self.started if self.launcher.is_running(key)]
        progress = {key: progress_of(self.results.run(key)) for key in running[:SHOWN]}
        standing = Standing(
            n_asked=len(self.runs),
            n_finished=len(self.finished),
            running=[(self.runs[key], found.words) for key, found in progress.items()],
            n_running=len(running),
            n_elsewhere=len(self.elsewhere),
            failed=[(self.runs[key], why) for key, why in self.failed.items()],
            seconds_left=self._seconds_left(progress, len(running)),
            news=self.news,
        )
        self.watch(standing)
        self.news = []
        return standing

    def _seconds_left(self, progress: Mapping[str, Progress], n_running: int) -> float | None:
        # A cluster takes all at once and runs as many as it has room for.
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

    def _write_record(self) -> None:
        write_record(self.work, self.failed)


def is_lost(code: int) -> bool:
    """Ended by a signal, or with one of those it trains together with: nothing was wrong with the run."""
    return code < 0 or code > 128 or code == ProcessLost.exit_code


def reason(ended: Ended) -> str:
    """Why it failed, in a line."""
    code = ended.exit_code
    if code < 0 or code > 128:  # what it said before has nothing to do with it
        return f"its process was killed (signal {-code if code < 0 else code - 128})"
    *_, last = ["", *ended.said.strip().splitlines()]
    return last or f"it ended with code {code}"


def name_of(run: PlannedRun) -> str:
    """`balanced · 3-2 · order 0`, the first of its places."""
    place = run.places[0]
    return f"{place.row} · {place.setting} · order {place.order_and_seed}"
