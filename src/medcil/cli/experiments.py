"""The commands about experiments: demo, run, tune, methods, report, compare."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Literal

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text
from typer import Argument, Option

from medcil.cli.console import (
    CONTINUE,
    Settings,
    TrainingBars,
    can_be_interrupted,
    note,
    out_option,
    progress_bars,
    show,
    show_table,
    training_progress,
    warn,
)
from medcil.errors import InvalidInput, needs_extra

if TYPE_CHECKING:
    from medcil.experiments.run import RunWatch
    from medcil.experiments.tune import Begins, Ended, Order, Search, Trial, Values
    from medcil.report.results import Results

Sampler = Annotated[
    Literal["optuna", "grid"], Option(help="`optuna` learns from trials; `grid` tries the paper's values.")
]
Objective = Annotated[
    Literal["acc_balanced", "acc_micro", "last_balanced"], Option(help="The metric to maximize.")
]


def demo(
    out: Annotated[Path, out_option("Folder for the four runs and their report.")] = Path("demo"),
) -> None:
    """Train four methods on synthetic images, in a few minutes, and compare what they forget."""
    from medcil.build import build_stream
    from medcil.experiments.run import demo_configs, run_experiment
    from medcil.storage.overwrite_guard import claim_output_folder

    claim_output_folder(out, "demo")
    show("Synthetic images ([bold]phantom[/]): no clinical meaning.")
    configs = demo_configs()
    stream = build_stream(next(iter(configs.values())))
    with can_be_interrupted(CONTINUE), training_progress() as bars:
        for folder, config in configs.items():
            run_experiment(config, out / folder, stream=stream, watch=TrainingBars(bars, str(config.label)))
    runs = [out / folder for folder in configs]
    show_runs(runs)
    write_report_if_possible(runs, out)


def run(
    recipe: Annotated[Path, Argument(help="A recipe in YAML. There are examples in recipes/.")],
    out: Annotated[Path, out_option("Folder for the run. An unfinished one is continued.")],
    settings: Settings = None,
    *,
    report: Annotated[bool, Option(help="Write a page of results at the end.")] = True,
) -> None:
    """Train and test as a recipe says. Run the same command again to continue an unfinished run."""
    from medcil.build import load_recipe, resolve
    from medcil.experiments.processes import is_first_process
    from medcil.experiments.run import run_experiment
    from medcil.methods.outline import plugin_reach

    config = resolve(load_recipe(recipe, settings or ()))
    if not is_first_process(config.execution):  # of those that torchrun started: the first one speaks
        run_experiment(config, out)
        return
    _show_reach(plugin_reach(config.method))
    if (share := config.data.held_out) is not None:
        show(f"Tested on {share:.0%} of the training images, held out; no test image is read.")
    with can_be_interrupted(CONTINUE), training_progress() as bars:
        run_experiment(config, out, watch=TrainingBars(bars, str(config.label)))
    show_runs([out])
    if report:
        write_report_if_possible([out], out)


def tune(
    recipe: Annotated[Path, Argument(help="A YAML recipe of `balanced`, or of a method with its losses.")],
    out: Annotated[Path, out_option("Folder for the trials and tuned.yaml. A search in it is continued.")],
    data: Annotated[Path | None, Option(help="The images. Short for --set data.root=DIR.")] = None,
    trials: Annotated[int, Option(min=1, help="Number of trials, including finished ones.")] = 20,
    orders: Annotated[str | None, Option(help="Class orders that each trial runs, such as 0,1,2.")] = None,
    sampler: Sampler = "optuna",
    objective: Objective = "acc_balanced",
    held_out: Annotated[float | None, Option(help="Share of images to hold out. By default 0.2.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the sampler.")] = 0,
    settings: Settings = None,
) -> None:
    """Choose α, λ_d and λ_k on held-out training images, never on the test set, and write a recipe."""
    from medcil.build import load_recipe, resolve
    from medcil.experiments.tune import Search
    from medcil.experiments.tune import tune as search_on

    changes = [*(settings or ()), *([f"data.root={json.dumps(str(data))}"] if data is not None else [])]
    changes += [f"data.held_out={held_out}"] if held_out is not None else []
    search = Search(
        recipe=resolve(load_recipe(recipe, changes)),
        out=out,
        sampler=sampler,
        objective=objective,
        orders=_orders(orders),
        seed=seed,
    )
    advice = f"{CONTINUE} tuned.yaml holds the best so far."
    with can_be_interrupted(advice), _trial_progress(search, trials) as (begins, ended):
        choice = search_on(search, trials, begins=begins, ended=ended)
    show(escape(choice.explanation))
    show(f"Recipe: [bold]{escape(str(out / 'tuned.yaml'))}[/]")


def _orders(text: str | None) -> tuple[int | str, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise InvalidInput(
            f"--orders {text!r}: write different class orders, as in --orders 0,1,2.",
            code="option.orders.invalid",
        )
    return tuple(int(part) if part.isdigit() else part for part in parts)


@contextmanager
def _trial_progress(search: "Search", n_trials: int) -> Iterator[tuple["Begins", "Ended"]]:
    """Show one bar over the trials, with the values and the step of the one that runs."""

    def text(values: "Values") -> str:
        return " ".join(f"{parameter.symbol} {values[key]:g}" for key, parameter in search.space.items())

    def begins(number: int, values: "Values", order: "Order") -> "RunWatch":
        now = f"{text(values)} · order {order}"
        return lambda task, n_tasks, at: progress.update(
            bar, now=f"{now} · step {task}/{n_tasks} epoch {at.epoch + 1}/{at.epochs}"
        )

    def ended(number: int, trial: "Trial") -> None:
        score = "failed" if trial.score is None else f"{search.objective} {100 * trial.score:.1f}%"
        progress.console.print(f"trial {number}: {text(trial.values)}: {score}", markup=False)
        progress.update(bar, completed=number + 1, total=max(n_trials, number + 1), now="")

    columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bars(*columns, "[dim]{task.fields[now]}[/]") as progress:
        bar = progress.add_task("trials", total=n_trials, now="")
        yield begins, ended


def methods(
    name: Annotated[str | None, Argument(help="The method to show. Without it, list all methods.")] = None,
    settings: Settings = None,
) -> None:
    """List the methods, or show the hyper-parameters, presets and phases of one."""
    from medcil.methods import METHODS, PRESETS
    from medcil.methods.outline import summary
    from medcil.methods.terms import PLUGINS

    if name is not None:
        _show_method(name, settings or ())
        return
    if settings:
        raise InvalidInput(
            "--set needs a method to change: medcil methods NAME --set ...", code="option.set.invalid"
        )
    rows = []
    for known, method in METHODS.items():
        presets = Text(fill(", ".join(PRESETS.get(known, ())), width=28))
        rows.append((Text(known, "bold"), presets, summary(method)))
    show_table(("method", "presets", "what it is"), rows)
    show("\nMore about one: medcil methods NAME. What can be plugged into each of them:")
    plugins = [(f"method.plugins.{key}", ", ".join(kinds)) for key, kinds in PLUGINS.items()]
    show_table(("key of a recipe", "kinds"), plugins)


def _show_method(name: str, settings: Sequence[str]) -> None:
    from medcil.build import build_method, method_settings, with_preset
    from medcil.methods import METHODS, PRESETS
    from medcil.methods.outline import NOMINAL, choices, outline, plugin_reach, summary
    from medcil.recipe import leaves, override, written

    for key in override({}, settings):
        if key != "method":
            raise InvalidInput(
                f"--set {key}: only `method` and what is in it can be changed here.",
                code="option.set.unknown",
            )
    method = build_method(with_preset({"method": {"name": name}}, settings)["method"])
    name = method_settings(method)["name"]
    show(f"[bold]{name}[/]\n{escape(summary(METHODS[name]))}\n")

    defaults = dict(leaves(method_settings(build_method({"name": name}))))
    rows = []
    for key, value in leaves(method_settings(method)):
        default = defaults.get(key, value)
        text = written(value) if value == default else f"{written(value)} (default {written(default)})"
        if key != "name":
            rows.append((key, text, choices(METHODS[name], key)))
    show_table(("hyper-parameter", "value", "choices"), rows)
    if presets := PRESETS.get(name, {}):
        rows = [
            (preset, section, written(content)[1:-1])
            for preset, piece in presets.items()
            for section, content in piece.items()
        ]
        show()
        show_table(("preset", "section", "what it sets there"), rows)
    phases = []
    for phase in outline(method):
        losses = "; in turn with ".join(
            ", ".join(terms) for terms in (phase.terms, phase.alternate_terms) if terms
        )
        sampler, moves = phase.sampler or "recipe's", ", ".join(phase.moves)
        phases.append((phase.task, phase.phase, losses, phase.part, sampler, str(phase.epochs), moves))
    if phases:
        show(f"\nPhases, where the recipe has {NOMINAL.epochs} epochs:")
        show_table(("task", "phase", "losses", "images", "sampler", "epochs", "moves"), phases)
    else:
        show("\nIt trains nothing: the network stays as it came.")
    _show_reach(plugin_reach(method))


def _show_reach(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        show(f"Plug-ins: {escape(sentence)}")


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs, or one folder of a suite's results.")],
    out: Annotated[Path | None, out_option("Folder to write. By default, the first one given.")] = None,
    *,
    exemplars: Annotated[bool, Option(help="Show the stored images on the page.")] = True,
) -> None:
    """Write the page of finished runs, or a suite's tables, figures and page. Nothing is trained."""
    from medcil.storage.overwrite_guard import check_output_folder, check_writable, claim_output_folder

    if (runs[0] / "suite.yaml").is_file():
        _report_suite(runs, out)
        return
    folder = out or runs[0]
    is_new = folder not in runs  # the page of a run is part of the run
    if is_new:
        check_output_folder(folder, "report")
    show_runs(runs)
    if is_new:
        claim_output_folder(folder, "report")
    else:
        check_writable(folder)
    _write_report(runs, folder, exemplars=exemplars)


def _report_suite(folders: Sequence[Path], out: Path | None) -> None:
    from medcil.report.runs import write_archive
    from medcil.report.suite import write_results
    from medcil.storage.atomic import writing

    if len(folders) > 1:
        raise InvalidInput(
            f"Two folders where a suite's results are one: {folders[1]}. Report on each by itself, or rank "
            "their runs with `medcil compare`.",
            code="option.report.invalid",
        )
    target = out or folders[0]
    with writing(target):
        if out is not None:
            write_archive(folders[0], out)
        written = write_results(target)
    show(f"Results: [bold]{escape(str(written[0]))}[/]")


def compare(
    runs: Annotated[list[Path], Argument(help="Folders of runs, or folders that hold runs or a runs.jsonl.")],
    out: Annotated[Path, out_option("Folder for the tables, figures and page.")] = Path("leaderboard"),
) -> None:
    """Rank comparable runs. Runs that differ only in class order or seed share a row."""
    from medcil.report.leaderboard import build_leaderboard
    from medcil.report.suite import write_all
    from medcil.storage.atomic import writing
    from medcil.storage.overwrite_guard import check_output_folder, claim_output_folder

    check_output_folder(out, "compare")
    results = build_leaderboard(runs, out)
    for setting in results.settings:
        _show_setting(results, setting)
    for sentence in results.left_out:
        warn(sentence)
    claim_output_folder(out, "compare")
    with writing(out):
        *_, page = write_all(results)
    show(f"Leaderboard: [bold]{escape(str(page))}[/]")


def _show_setting(results: "Results", setting: str) -> None:
    from medcil.report.suite import setting_table

    table = setting_table(results, setting)
    rows = [
        [row, *(Text(f.text, "bold") if f.is_best else f.text for f in figures)]
        for row, figures in table.rows.items()
    ]
    show_table([setting, *table.header[1:]], rows)
    show()


def show_runs(runs: Sequence[Path]) -> None:
    from medcil.report.page import best_rows, comparison_rows, findings
    from medcil.report.runs import read_run

    records = [read_run(path) for path in runs]
    rows, best = comparison_rows(records), best_rows(records)
    cells = [
        [Text(text, "bold") if i in best.get(column, ()) else text for column, text in row.items()]
        for i, row in enumerate(rows)
    ]
    show_table([*rows[0]], cells)
    for sentence in findings(records):
        show(escape(sentence))


def write_report_if_possible(runs: Sequence[Path], folder: Path) -> None:
    """A finished run is a success, also on a machine that cannot draw its page."""
    try:
        _write_report(runs, folder)
    except InvalidInput as error:
        note(str(error))


def _write_report(runs: Sequence[Path], folder: Path, *, exemplars: bool = True) -> None:
    from medcil.storage.atomic import writing

    with needs_extra("report"), writing(folder):
        from medcil.report.page import write_report

        page = write_report(list(runs), folder / "report.html", show_exemplars=exemplars)
    show(f"Report: [bold]{escape(str(page))}[/]")
