"""Checkpoints of a task in progress, from which learning resumes after any interruption."""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from medcil.errors import MedcilError
from medcil.storage.atomic import read_json, read_verified, sha256, write_bytes, write_json
from medcil.storage.run_dir import RunDir

EMBEDDING = "embedding"


@dataclass(frozen=True)
class Progress:
    """What `watch` is told after every step and every epoch.

    A pass over the images for a readout's statistics is called `EMBEDDING`; its steps are images.
    """

    phase: str
    number: int
    """The phase's number in its task, from 1: phases may share a name."""
    epoch: int
    epochs: int
    step: int
    steps: int
    losses: dict[str, float] | None = None
    """Means over the epoch, once it is finished."""

    @property
    def is_embedding(self) -> bool:
        return self.phase == EMBEDDING


Watch = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    epoch: int
    """Number of finished epochs of the phase."""
    tensors: dict[str, Tensor]


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse to save a network that has diverged.

    Every loss can be finite where a tensor is not: batch norm divides by the statistics of the batch, so its
    running variance may overflow without an effect on the training loss.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise MedcilError(
                f"Training diverged: {name} has values that are not finite. Lower training.learning_rates.",
                code="run.training.diverged",
            )


class Journal:
    """Where learning records its progress. This one keeps nothing: learning restarts with its process."""

    def latest(self, phase: int) -> Checkpoint | None:
        """Return the newest checkpoint of a phase, or None if the phase has not begun."""
        return None

    def save(self, phase: int, checkpoint: Checkpoint) -> None:
        """Copy the tensors, which may change at once, and write them in the background."""

    def finish(self) -> None:
        """Wait until everything saved is on disk."""

    def log(self, record: dict[str, Any]) -> None:
        """Append a record of an epoch."""

    def note(self, record: dict[str, Any]) -> None:
        """Append a record of what happens between phases, unless the log has it: a resume repeats that."""


class PeerJournal(Journal):
    """Reads the checkpoints that the first process of a run writes, for the others."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.folder: Path = run.task(number).progress
        self.index = self.folder / "progress.json"

    def latest(self, phase: int) -> Checkpoint | None:
        phases = read_json(self.index)["phases"] if self.index.exists() else []
        if phase >= len(phases):
            return None
        entry = phases[phase]
        content = read_verified(self.folder / entry["file"], entry["sha256"])
        return Checkpoint(epoch=entry["epoch"], tensors=safetensors.torch.load(content))


class FileJournal(PeerJournal):
    """Writes checkpoints into a task's `progress` folder. A checkpoint counts once `progress.json` names it.

    That file also holds the length of the log at that moment; later lines are dropped on resuming. A thread
    writes one checkpoint at a time while training continues.
    """

    def __init__(self, run: RunDir, number: int, *, log_size_before: int) -> None:
        super().__init__(run, number)
        self.run = run
        self.number = number
        self.phases: list[dict[str, Any]] = []
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None
        if self.index.exists():
            content = read_json(self.index)
            self.phases, log_size_before = content["phases"], content["log_size"]
        run.truncate_log(log_size_before)

    def latest(self, phase: int) -> Checkpoint | None:
        self.finish()
        return super().latest(phase)

    def save(self, phase: int, checkpoint: Checkpoint) -> None:
        self.finish()
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in checkpoint.tensors.items()}
        copied = Checkpoint(checkpoint.epoch, tensors)
        self.writing = self.writer.submit(self._write, phase, copied, self.run.log_size())

    def finish(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def _write(self, phase: int, checkpoint: Checkpoint, log_size: int) -> None:
        name = f"phase-{phase}-epoch-{checkpoint.epoch}.safetensors"
        content = safetensors.torch.save({k: t.contiguous() for k, t in checkpoint.tensors.items()})
        write_bytes(self.folder / name, content)
        entry = {"epoch": checkpoint.epoch, "file": name, "sha256": sha256(content)}
        superseded = self.phases[phase]["file"] if phase < len(self.phases) else None
        self.phases[phase:] = [entry]
        self.run.flush_log()
        write_json(self.index, {"phases": self.phases, "log_size": log_size})
        if superseded is not None and superseded != name:
            (self.folder / superseded).unlink(missing_ok=True)

    def note(self, record: dict[str, Any]) -> None:
        lines = self.run.log_path.read_text().splitlines() if self.run.log_path.exists() else []
        own = {"task": self.number, **record}
        if own not in map(json.loads, lines):
            self.run.append(self.run.log_path, own)

    def log(self, record: dict[str, Any]) -> None:
        self.run.append(self.run.log_path, {"task": self.number, **record})
        # In a file of their own: the log is the same whenever this run is computed.
        place = {"task": self.number, "phase": record["phase"], "epoch": record["epoch"]}
        self.run.append(self.run.timings_path, {**place, "unix_time": round(time.time(), 3)})
