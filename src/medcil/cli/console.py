"""What several commands share: options, two consoles, plain tables, progress bars."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer import Option

from medcil import errors

if TYPE_CHECKING:
    from medcil.config import ExecutionConfig
    from medcil.training.checkpoint import Progress as TrainingProgress

INTERRUPTED = 130
CONTINUE = "Run the same command again to continue where it stopped."
START_OVER = "Nothing was written; run the same command again to start over."

Repeated = list[str] | None
"""An option that may be given several times."""
Settings = Annotated[Repeated, Option("--set", help="Change a setting: key.subkey=value. May be repeated.")]
DatasetName = Annotated[str | None, Option(help="A dataset to read, or `own`. By default, it is recognized.")]
Weights = Annotated[
    str | None, Option(help="Weights to start from: a file, a name from `medcil weights`, `none` or `hub`.")
]
DeviceName = Literal["auto", "cpu", "cuda"]
Device = Annotated[DeviceName, Option(help="The device to compute on.")]


def out_option(help: str) -> Any:
    """Declare the option that every command that writes has."""
    return Option("--out", "-o", help=help)


screen = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


def show(text: str = "") -> None:
    """Print a line of results, in rich's markup; it may be longer than the screen is wide."""
    screen.print(text, soft_wrap=True)


def show_remarks(remarks: Iterable[str]) -> None:
    """Print how the files of images were understood."""
    for remark in remarks:
        show(f"[dim]{printable(remark)}[/]")


def note(text: str) -> None:
    """Print plain text beside the results, on standard error."""
    for line in text.splitlines():
        messages.print(printable(line), soft_wrap=True)


def warn(text: str) -> None:
    messages.print(f"[yellow]{printable(text)}[/]", soft_wrap=True)


def printable(text: str) -> str:
    """Escape what a terminal or rich would obey: the name of a file may hold anything."""
    return escape(errors.printable(text))


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Collection[int] = ()
) -> None:
    """Print a table without lines; `right` are columns of numbers. Strings are shown as they are."""
    table = Table(*map(printable, columns), box=None, padding=(0, 2, 0, 0))
    for index in right:
        table.columns[index].justify = "right"
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    screen.print(table)


def execution_on(device: DeviceName) -> "ExecutionConfig | None":
    """Return None for `auto`: a model of one file runs where torch is not installed."""
    if device == "auto":
        return None
    from medcil.config import ExecutionConfig

    return ExecutionConfig(device=device)


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


def progress_bars(*columns: str | ProgressColumn) -> Progress:
    """Show bars on a terminal, with these columns after their descriptions; elsewhere nothing."""
    return Progress("{task.description}", *columns, console=messages, disable=not messages.is_terminal)


@contextmanager
def image_progress(action: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and afterwards how long it took."""
    started, reached = time.monotonic(), 0
    with progress_bars(BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(action, total=None)

        def watch(done: int, total: int) -> None:
            nonlocal reached
            reached = done
            progress.update(bar, completed=done, total=total)

        yield watch
    if reached:
        seconds = time.monotonic() - started
        rate = f"{reached / max(seconds, 1e-3):,.0f} images/s"
        messages.print(f"[dim]{reached:,} images in {seconds:.1f} s, {rate}[/]")


class TrainingBars:
    """One bar per step of a run: its epoch, the parts of its loss, the time left."""

    def __init__(self, progress: Progress, label: str) -> None:
        self.progress, self.label = progress, label
        self.bars: dict[tuple[int, int], TaskID] = {}
        self.losses = ""

    def __call__(self, number: int, n_tasks: int, now: "TrainingProgress") -> None:
        key, epoch = (number, now.number), f"epoch {now.epoch + 1}/{now.epochs}"
        if now.is_embedding:
            epoch, self.losses = f"{now.step:,}/{now.steps:,} images", ""
        if key not in self.bars:
            text = f"{escape(self.label)} · step {number}/{n_tasks}{' · embedding' * now.is_embedding}"
            self.bars[key] = self.progress.add_task(text, total=now.epochs * now.steps, epoch="", losses="")
        if now.losses is not None:
            self.losses = "  ".join(f"{name} {value:.3f}" for name, value in now.losses.items())
            if not self.progress.console.is_terminal:
                note(f"{self.label} step {number}/{n_tasks} {now.phase} {epoch}  {self.losses}".rstrip())
        completed = now.epoch * now.steps + now.step
        self.progress.update(self.bars[key], completed=completed, epoch=epoch, losses=self.losses)


@contextmanager
def training_progress() -> Iterator[Progress]:
    """The display that `TrainingBars` draws in; afterwards it says how long training took."""
    started = time.monotonic()
    epoch, losses = "{task.fields[epoch]}", "[dim]{task.fields[losses]}[/]"
    with progress_bars(BarColumn(bar_width=12), epoch, TimeRemainingColumn(), losses) as progress:
        yield progress
    messages.print(f"[dim]{time.monotonic() - started:.0f} s[/]")
