"""What a terminal shows while images are checked and a network learns."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from medcil.cli.data import image_progress, messages

if TYPE_CHECKING:
    from medcil.training.checkpoint import Progress as TrainingProgress

CONTINUE = "Run the same command again to continue from the last checkpoint."


class Bars:
    """One bar per step of a run: its epoch, the parts of its loss, the time left."""

    def __init__(self, progress: Progress, label: str) -> None:
        self.progress = progress
        self.label = label
        self.bars: dict[tuple[int, int], TaskID] = {}
        self.losses = ""

    def __call__(self, number: int, n_tasks: int, now: "TrainingProgress") -> None:
        key = (number, now.number)
        if key not in self.bars:
            text = f"{escape(self.label)} · step {number}/{n_tasks}"
            self.bars[key] = self.progress.add_task(text, total=now.epochs * now.steps, epoch="", losses="")
        if now.losses is not None:
            self.losses = "  ".join(f"{name} {value:.3f}" for name, value in now.losses.items())
            if not self.progress.console.is_terminal:
                place = f"{self.label} step {number}/{n_tasks} {now.phase} epoch {now.epoch + 1}/{now.epochs}"
                self.progress.console.print(f"{place}  {self.losses}", markup=False, soft_wrap=True)
        self.progress.update(
            self.bars[key],
            completed=now.epoch * now.steps + now.step,
            epoch=f"epoch {now.epoch + 1}/{now.epochs}",
            losses=self.losses,
        )


class Checking:
    """A bar of its own, from the first image to the last."""

    def __init__(self) -> None:
        self.bar = ExitStack()
        self.watch: Callable[[int, int], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        self.watch = self.watch or self.bar.enter_context(image_progress("checking"))
        self.watch(done, total)
        if done == total:
            self.bar.close()
            self.watch = None


@contextmanager
def progress_bars() -> Iterator[Progress]:
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[epoch]}"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[losses]}[/]"),
    )
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        yield progress
    messages.print(f"[dim]{time.monotonic() - started:.0f} s[/]")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
