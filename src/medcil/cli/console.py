"""What every command prints with: two consoles, plain tables, progress bars."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from medcil import errors

if TYPE_CHECKING:
    from medcil.training.checkpoint import Progress as TrainingProgress

INTERRUPTED = 130
CONTINUE = "Run the same command again to continue where it stopped."
START_OVER = "Nothing was written; run the same command again to start over."

screen = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


def show(text: str) -> None:
    """Print a line of results that may be longer than the screen is wide."""
    screen.print(text, soft_wrap=True)


def note(text: str) -> None:
    """Print plain text beside the results, on standard error."""
    for line in text.splitlines():
        messages.print(printable(line), soft_wrap=True)


def warn(text: str) -> None:
    messages.print(f"[yellow]{printable(text)}[/]", soft_wrap=True)


def printable(text: str) -> str:
    """Escape what a terminal or rich would obey: the name of a file may hold anything."""
    return escape(errors.printable(text))


def plain_table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def can_be_interrupted(advice: str) -> Iterator[None]:
    """On Ctrl-C, print the advice and end with the exit code of an interruption."""
    try:
        yield
    except KeyboardInterrupt:
        messages.print(f"Interrupted. {advice}")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def image_progress(action: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and afterwards how long it took."""
    started, reached = time.monotonic(), 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        bar = progress.add_task(action, total=None, rate="")

        def watch(done: int, total: int) -> None:
            nonlocal reached
            reached = done
            rate = f"{done / max(time.monotonic() - started, 1e-3):,.0f} images/s"
            progress.update(bar, completed=done, total=total, rate=rate)

        yield watch
    if reached:
        seconds = time.monotonic() - started
        rate = f"{reached / max(seconds, 1e-3):,.0f} images/s"
        messages.print(f"[dim]{reached:,} images in {seconds:.1f} s, {rate}[/]")


class CheckingBar:
    """A bar from the first checked image to the last; called with (images done, images in all)."""

    def __init__(self) -> None:
        self.bar = ExitStack()
        self.watch: Callable[[int, int], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        self.watch = self.watch or self.bar.enter_context(image_progress("checking"))
        self.watch(done, total)
        if done == total:
            self.bar.close()
            self.watch = None


class TrainingBars:
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


@contextmanager
def training_progress() -> Iterator[Progress]:
    """The display that `TrainingBars` draws in; afterwards it says how long training took."""
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
