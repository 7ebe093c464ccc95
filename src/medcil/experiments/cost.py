"""What a run costs: the images it trains on, and the seconds that takes where such runs were timed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from medcil.build import arrangement
from medcil.config import RunConfig
from medcil.data.long_tail import long_tail
from medcil.data.source import find_source
from medcil.data.sources import phantom
from medcil.errors import MedcilError
from medcil.experiments.sweep_request import ResultsFolder
from medcil.storage.run_dir import RunDir

START_UP = 5.0
"""Seconds of a process before its first epoch, about."""
TIMED_RUNS = 50
"""As many of the newest are read to learn how fast runs are."""


def images_seen(config: RunConfig) -> int | None:
    """Training images: over the tasks, epochs times the images at hand; None where nobody knows how many.

    About: second stages and samplers that draw fewer or more are not looked at, and splits drawn here are
    rounded.
    """
    counts, dataset = _training_counts(config), find_source(config.data.name)
    if counts is None:
        return None
    order, sizes = arrangement(config, dataset)
    arriving = [counts[c] for c in order]
    total = 0
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        begin = 0 if config.scenario.cumulative else end - size
        memory = sum(min(n, config.memory.quota(begin)) for n in arriving[:begin])
        epochs = config.training_of_task(is_first=begin == 0).epochs
        total += epochs * (sum(arriving[begin:end]) + memory)
    return total


def _training_counts(config: RunConfig) -> Sequence[int] | None:
    """Training images of each class, from what was published: no file is read."""
    dataset, kept = find_source(config.data.name), 1 - config.data.split_share
    if dataset.is_synthetic:
        counts: Sequence[int] = phantom.TRAIN_COUNTS
    elif {"train", "test"} <= set(dataset.published_counts):
        counts = dataset.published_counts["train"]
    elif "total" in dataset.published_counts:
        counts = [round(kept * n) for n in dataset.published_counts["total"]]
    elif "train" in dataset.published_sizes:
        n_classes = len(dataset.class_names)
        counts = [dataset.published_sizes["train"] // n_classes] * n_classes
    else:
        return None
    tail = config.scenario.long_tail
    if tail is None:
        return counts
    labels = np.repeat(np.arange(len(counts)), counts)
    left = labels[long_tail(labels, ratio=tail.ratio, seed=tail.seed)]
    return [int(n) for n in np.bincount(left, minlength=len(counts))]


@dataclass(frozen=True)
class Progress:
    """How far a run is: the epochs it has logged, and the last of them."""

    epochs: int
    now: Mapping[str, Any]

    @property
    def words(self) -> str:
        if not self.now:
            return "starting"
        return "step {task}, {phase}, epoch {epoch}/{epochs}".format(**self.now)

    def share_of(self, config: RunConfig) -> float:
        """Of the whole run, second stages not counted."""
        return min(1.0, self.epochs / max(1, _n_epochs(config)))


def progress_of(run: Path) -> Progress:
    """From the log's last whole line."""
    log = RunDir(run).log_path
    content = log.read_bytes() if log.exists() else b""
    lines = content[: content.rfind(b"\n") + 1]
    now = next(_records(lines[lines.rfind(b"\n", 0, -1) + 1 :]), {})
    return Progress(lines.count(b"\n"), now)


def _n_epochs(config: RunConfig) -> int:
    """Of all tasks; 0 where the classes are not known."""
    dataset = find_source(config.data.name)
    if not dataset.class_names:
        return 0
    _, sizes = arrangement(config, dataset)
    is_first = [number == 0 or config.scenario.cumulative for number in range(len(sizes))]
    return sum(config.training_of_task(is_first=first).epochs for first in is_first)


class Speeds:
    """Seconds per image of runs that are finished: of a method, backbone and crop, or of all methods."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, ...], tuple[float, int]] = {}

    @classmethod
    def of(cls, results: ResultsFolder) -> "Speeds":
        """From the newest finished runs of all suites."""
        speeds = cls()
        times = {path.parent: path.stat().st_mtime for path in (results.root / "runs").glob("*/metrics.json")}
        for run in sorted(times, key=lambda path: times[path])[-TIMED_RUNS:]:
            if results.is_finished(run.name):
                try:
                    speeds.add(run, RunDir(run).read_config())
                except (MedcilError, OSError):
                    continue  # a damaged run says nothing of speed
        return speeds

    def add(self, run: Path, config: RunConfig) -> None:
        seconds, images = seconds_spent(run), images_seen(config)
        if not seconds or not images:
            return
        for kind in self._kinds(config):
            before = self.known.get(kind, (0.0, 0))
            self.known[kind] = before[0] + seconds, before[1] + images

    def seconds(self, config: RunConfig) -> float | None:
        """Of a whole run; None where no such run was timed."""
        images = images_seen(config)
        found = [self.known[kind] for kind in self._kinds(config) if kind in self.known]
        return START_UP + images * found[0][0] / found[0][1] if found and images else None

    def _kinds(self, config: RunConfig) -> list[tuple[str, ...]]:
        """The most particular first."""
        network = (config.network.backbone, str(config.data.crop))
        return [(*network, str(config.method["name"])), network]


def seconds_spent(run: Path) -> float:
    """From each start of the run to the last epoch it ended, together."""
    total, first, last = 0.0, 0.0, 0.0
    for record in _records(RunDir(run).timings_path.read_bytes()):
        if "started" in record:
            total, first = total + last - first, float(record["unix_time"])
        last = float(record["unix_time"])
    return total + last - first


def _records(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # half a line, of a process that was killed
