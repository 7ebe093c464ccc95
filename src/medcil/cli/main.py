"""The command line: parse, call, print. Everything heavy is imported inside the command that needs it."""

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.markup import escape
from typer import Option
from typer.exceptions import TyperException

from medcil.cli import data, experiments, model, weights
from medcil.cli.bench import bench
from medcil.cli.console import messages, printable, show, warn
from medcil.errors import MedcilError

app = typer.Typer(
    no_args_is_help=True, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False
)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "A model of your own images": (
        *(model.train, model.update, model.predict, model.evaluate, model.explain, model.export),
        *(model.serve, model.history, model.rebalance, model.relabel, model.retire, model.merge),
        *(model.rollback, model.erase, data.phantom),
    ),
    "Images": (data.datasets, data.check, data.prepare),
    "Experiments": (
        *(experiments.demo, experiments.run, experiments.methods, experiments.report),
        *(bench, experiments.compare, experiments.tune),
    ),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(weights.app, name="weights", rich_help_panel=next(iter(COMMANDS)))


@app.callback()
def _show_version(
    *, version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False
) -> None:
    """Class-incremental learning for imbalanced medical images."""
    if version:
        from importlib import metadata

        show(f"medcil {metadata.version('medcil')}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and end the process with an exit code of docs/reference/exit-codes.md."""
    # Threads that wait for each other should sleep: spinning, the default, makes training several times
    # slower as soon as anything else runs on the machine. PyTorch reads this when it is imported, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.showwarning = _show_warning
    words = sys.argv[1:] if arguments is None else arguments
    try:
        sys.exit(app(args=words, prog_name="medcil", standalone_mode=False) or 0)
    except MedcilError as error:
        _show_error(str(error))
        sys.exit(error.exit_code)
    except TyperException as error:
        _show_error(_usage_error(error, words))
        sys.exit(error.exit_code)
    except OSError as error:  # one that no command foresaw
        path = "" if error.filename is None else f"{error.filename}: "
        reason = escape(f"{path}{error.strerror or error}")
        messages.print(f"[bold red]{reason}. Fix this and run the same command again.[/]", soft_wrap=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.stdout = io.StringIO()  # Python would try to write the rest of its buffer at exit, and fail
        sys.exit(MedcilError.exit_code)


def _show_error(message: str) -> None:
    """Print the first line in red: it is all that someone in a hurry reads."""
    for number, line in enumerate(message.splitlines()):
        text = printable(line)
        messages.print(text if number else f"[bold red]{text}[/]", soft_wrap=True)


def _usage_error(error: TyperException, words: Sequence[str]) -> str:
    """Say which word of the command is wrong and where its help is; empty if the help was shown already."""
    reason = " ".join(error.format_message().split())
    command = [word for word in words[:1] if word in typer.main.get_group(app).commands]
    end = "" if reason.endswith((".", "?")) else "."
    return f"{reason}{end} See `{' '.join(['medcil', *command])} --help`." if reason else ""


def _show_warning(message: Warning | str, *place: object, **options: object) -> None:
    """Print a Python warning in one line, without its place in the source."""
    warn(f"Note: {' '.join(str(message).split())}")
