"""A suite of four runs that take a moment each: two methods, two class orders, small images of one's own."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from medcil.cli.main import main
from medcil.experiments.launcher import Exit, Job

ROWS, ORDERS, EPOCHS, TASKS = ("fine-tuning", "balanced"), ("seed-1", "seed-2"), 2, 2
SUITE = f"""
title: Four small runs
metrics: {{Acc: acc_micro, Fgt: forgetting}}
orders: [{", ".join(ORDERS)}]
common:
  data: {{name: own, side: 16, crop: 12, split: images}}
  network: {{backbone: resnet8_cifar}}
  memory: {{per_class: 2}}
  training: {{epochs: {EPOCHS}, batch_size: 16}}
settings:
  2-2: {{scenario: {{base: 2, increment: 2}}}}
rows:
  fine-tuning: {{method: {{name: finetune}}}}
  balanced: {{method: {{name: balanced}}}}
"""


def write_suite(folder: Path, text: str = SUITE, name: str = "tiny") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def write_images(folder: Path) -> Path:
    """Four classes of ten images, a folder each."""
    rng = np.random.default_rng(0)
    for name in "abcd":
        (folder / name).mkdir(parents=True)
        for i in range(10):
            pixels = rng.integers(256, size=(16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def ended_with(arguments: Sequence[object]) -> int:
    """The exit code of a command in this process."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ending:
        return int(ending.code or 0)
    raise AssertionError("the command did not end the process")


class SameProcess:
    """A launcher that computes each job when it is waited for, one after the other, in this process.

    `instead` may end a job in its own way: it gets the job and returns how it ended, or None to compute it.
    """

    capacity = 2

    def __init__(self, instead: Callable[[Job], Exit | None] = lambda job: None) -> None:
        self.instead = instead
        self.jobs: list[Job] = []
        self.started: list[str] = []
        self.is_stopped = False

    def start(self, job: Job) -> None:
        assert job.key not in {waiting.key for waiting in self.jobs}, "it runs already"
        assert len(self.jobs) < self.capacity
        self.jobs.append(job)
        self.started.append(job.key)

    def is_running(self, key: str) -> bool:
        return key in {job.key for job in self.jobs}

    def wait(self, seconds: float) -> Sequence[Exit]:
        if not self.jobs:
            return []
        job = self.jobs.pop(0)
        own = self.instead(job)
        return [own or Exit(job.key, ended_with(job.command[4:]))]

    def stop(self) -> None:
        self.is_stopped = True


def pretend(job: Job) -> Exit:
    """A finished run, without computing one."""
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / "metrics.json").write_text('{"finished": true}')
    return Exit(job.key, 0)


def runs_of(out: Path, suite: str = "tiny") -> list[dict[str, object]]:
    content = json.loads((out / suite / "runs.json").read_text())
    return list(content["runs"])


def epochs_of(run: Path) -> list[tuple[int, str, int]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [(line["task"], line["phase"], line["epoch"]) for line in map(json.loads, lines)]


def starts_of(run: Path) -> int:
    return sum(
        "started" in line for line in map(json.loads, (run / "timings.jsonl").read_text().splitlines())
    )


ALL_EPOCHS = [(task, "learn", epoch) for task in range(1, TASKS + 1) for epoch in range(1, EPOCHS + 1)]


def outcome_of(out: Path, suite: str = "tiny") -> dict[str, bytes]:
    """What must not depend on how a sweep went: its record, tables and page, and what runs computed."""
    made = [path for path in (out / suite).rglob("[!.]*") if path.is_file() and path.name != "done.json"]
    named: Iterable[Path] = (
        path
        for name in ("metrics.json", "log.jsonl", "predictions.csv", "*.safetensors")
        for path in (out / "runs").rglob(name)
    )
    return {str(path.relative_to(out)): path.read_bytes() for path in (*made, *named)}
