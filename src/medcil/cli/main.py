"""The command line: parse, call, print. Everything heavy is imported inside the command that needs it."""

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from medcil.cli.bench import bench
from medcil.cli.compare import compare, report, show_table, write_report_if_possible
from medcil.cli.data import (
    can_be_interrupted,
    check,
    datasets,
    messages,
    plain_table,
    prepare,
    printable,
    screen,
)
from medcil.cli.erase import erase
from medcil.cli.export import explain, export
from medcil.cli.model import history, rollback, train, update
from medcil.cli.predict import evaluate, predict
from medcil.cli.progress import CONTINUE, Bars, progress_bars
from medcil.cli.serve import serve
from medcil.cli.tune import tune
from medcil.errors import InvalidInput, MedcilError

app = typer.Typer(
    no_args_is_help=True, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False
)
OWN, IMAGES, EXPERIMENTS = "A model of your own images", "Images", "Experiments"
LISTED: dict[str, tuple[Callable[..., None], ...]] = {
    OWN: (train, update, predict, evaluate, explain, export, serve, history, rollback, erase),
    IMAGES: (datasets, check, prepare),
    EXPERIMENTS: (report, bench, compare, tune),
}
for panel, commands in LISTED.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


@app.callback()
def _show_version(
    *, version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False
) -> None:
    """Class-incremental learning for imbalanced medical images."""
    if version:
        from importlib import metadata

        screen.print(f"medcil {metadata.version('medcil')}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends the process with the exit code of docs/reference/exit-codes.md."""
    # Threads that wait for each other should sleep: spinning, the default, makes training several times
    # slower as soon as anything else runs on the machine. PyTorch reads this when it is loaded, later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.showwarning = _show_warning
    given = sys.argv[1:] if arguments is None else arguments
    try:
        sys.exit(app(args=given, prog_name="medcil", standalone_mode=False) or 0)
    except MedcilError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except TyperException as error:
        _say(_misused(error, given))
        sys.exit(error.exit_code)
    except OSError as error:  # what no command foresaw
        place = "" if error.filename is None else f"{error.filename}: "
        reason = escape(f"{place}{error.strerror or error}")
        messages.print(f"[bold red]{reason}. See to that and run the same command again.[/]", soft_wrap=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.stdout = io.StringIO()  # else what is left to print would be refused again at the very end
        sys.exit(MedcilError.exit_code)


def _say(message: str) -> None:
    """The first line is what someone in a hurry reads."""
    for number, line in enumerate(message.splitlines()):
        text = printable(line)
        messages.print(text if number else f"[bold red]{text}[/]", soft_wrap=True)


def _misused(error: TyperException, given: Sequence[str]) -> str:
    """A word of the command is unknown, lacking or makes no sense; nothing is said where help was shown."""
    reason = " ".join(error.format_message().split())
    named = [word for word in given[:1] if word in typer.main.get_group(app).commands]
    end = "" if reason.endswith((".", "?")) else "."
    return f"{reason}{end} See `{' '.join(['medcil', *named])} --help`." if reason else ""


def _show_warning(message: Warning | str, *place: object, **options: object) -> None:
    """In a line, without the place in the source."""
    messages.print(f"[yellow]Note: {printable(' '.join(str(message).split()))}[/]", soft_wrap=True)


@app.command(rich_help_panel=EXPERIMENTS)
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the three runs and their report.")
    ] = Path("demo"),
) -> None:
    """Three methods on synthetic images, in a few minutes: what forgetting looks like, and what helps."""
    from medcil.build import build_stream
    from medcil.experiments.run import demo_configs, run_experiment
    from medcil.storage.overwrite_guard import claim_output_folder

    claim_output_folder(out, "demo")
    screen.print("Synthetic images ([bold]phantom[/]): no clinical meaning.")
    configs = demo_configs()
    stream = build_stream(next(iter(configs.values())))
    with can_be_interrupted(CONTINUE), progress_bars() as bars:
        for folder, config in configs.items():
            run_experiment(config, out / folder, stream=stream, watch=Bars(bars, str(config.label)))
    runs = [out / folder for folder in configs]
    show_table(runs)
    write_report_if_possible(runs, out)


@app.command(rich_help_panel=OWN)
def phantom(
    out: Annotated[Path, typer.Option("--out", "-o", help="The new folder.")] = Path("images"),
) -> None:
    """Draw synthetic images to try train, update and the others with: folders per class, with patients."""
    from medcil.data.sources.phantom_folders import write_phantom_images

    with can_be_interrupted("Nothing was written; run the same command again to start over."):
        counts = write_phantom_images(out)
    for folder, n_images in counts.items():
        screen.print(f"[bold]{escape(str(out / folder))}[/]  {n_images} images", soft_wrap=True)
    screen.print("Synthetic: no picture shows a patient, and no class is a disease.")


@app.command(rich_help_panel=EXPERIMENTS)
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe; see recipes/.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the run. An unfinished one is continued.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change the recipe: key.subkey=value, repeatedly."),
    ] = None,
    *,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the page and the figures at the end.")
    ] = True,
) -> None:
    """Run a recipe; run the same command again to continue it."""
    from medcil.build import build_method, load_recipe, resolve
    from medcil.experiments.processes import is_first_process
    from medcil.experiments.run import run_experiment
    from medcil.methods.outline import plugin_reach

    config = resolve(load_recipe(recipe, settings or []))
    if not is_first_process(config.execution):  # of those that torchrun started: the first one speaks
        run_experiment(config, out)
        return
    _show_reach(plugin_reach(build_method(config.method)))
    if (share := config.data.held_out) is not None:
        screen.print(f"Tested on {share:.0%} of the training images, held out; no test image is read.")
    with can_be_interrupted(CONTINUE), progress_bars() as bars:
        run_experiment(config, out, watch=Bars(bars, str(config.label)))
    show_table([out])
    if report:
        write_report_if_possible([out], out)


@app.command(rich_help_panel=EXPERIMENTS)
def methods(
    name: Annotated[str | None, typer.Argument(help="Show this method; without it, list them all.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Show it as a recipe changes it: method.key=value, repeatedly."),
    ] = None,
) -> None:
    """List the methods, or show one: its hyper-parameters, its presets, its phases."""
    from medcil.build import PLUGINS
    from medcil.methods import METHODS, PRESETS
    from medcil.methods.outline import summary

    if name is not None:
        _show_method(name, settings or [])
        return
    if settings:
        raise InvalidInput("--set needs a method to change: medcil methods NAME --set ...")
    table = plain_table("method", "presets", "what it is")
    table.columns[1].max_width = 28  # so that both columns take two lines on a screen of 100 characters
    for known, method in METHODS.items():
        table.add_row(f"[bold]{known}[/]", ", ".join(PRESETS.get(known, ())), escape(summary(method)))
    screen.print(table)
    screen.print("\nMore about one: medcil methods NAME. What can be plugged into each of them:")
    table = plain_table("key of a recipe", "kinds")
    for key, kinds in PLUGINS.items():
        table.add_row(f"method.plugins.{key}", ", ".join(kinds))
    screen.print(table)


def _show_method(name: str, settings: Sequence[str]) -> None:
    from medcil.build import build_method, method_settings, with_preset
    from medcil.methods import METHODS, PRESETS
    from medcil.methods.outline import NOMINAL, choices, outline, plugin_reach, summary
    from medcil.recipe import leaves, override, with_name, written

    for key in override({}, settings):
        if key != "method":
            raise InvalidInput(f"--set {key}: only `method` and what is in it can be changed here.")
    chosen = with_name(with_preset({"method": {"name": name}}, settings)["method"])
    method, name = build_method(chosen), chosen["name"]
    screen.print(f"[bold]{name}[/]\n{escape(summary(METHODS[name]))}\n")

    defaults = dict(leaves(method_settings(build_method({"name": name}))))
    table = plain_table("hyper-parameter", "value", "choices")
    for key, value in leaves(method_settings(method)):
        default = defaults.get(key, value)
        shown = written(value) if value == default else f"{written(value)} (default {written(default)})"
        if key != "name":
            table.add_row(key, escape(shown), choices(METHODS[name], key))
    screen.print(table)
    table = plain_table("\npreset", "\nsection", "\nwhat it sets there")
    for preset, piece in PRESETS.get(name, {}).items():
        for section, content in piece.items():
            table.add_row(preset, section, escape(written(content)[1:-1]))
    if table.row_count:
        screen.print(table)
    screen.print(f"\nPhases, where the recipe has {NOMINAL.epochs} epochs:")
    table = plain_table("task", "phase", "losses", "images", "sampler", "epochs", "moves")
    for found in outline(method):
        losses = [", ".join(terms) for terms in (found.terms, found.alternate_terms) if terms]
        sampler, moves = found.sampler or "recipe's", ", ".join(found.moves)
        row = (found.task, found.phase, "; in turn with ".join(losses), found.part, sampler)
        table.add_row(*row, str(found.epochs), moves)
    screen.print(table)
    _show_reach(plugin_reach(method))


def _show_reach(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        screen.print(f"Plug-ins: {escape(sentence)}", soft_wrap=True)
