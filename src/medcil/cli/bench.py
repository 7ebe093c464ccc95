"""The command that computes suites: the paper's tables and figures, on one machine or many."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from medcil.cli.console import (
    CONTINUE,
    can_be_interrupted,
    duration,
    image_progress,
    messages,
    note,
    plain_table,
    screen,
    show,
    warn,
)
from medcil.errors import InvalidInput, RunsFailed

if TYPE_CHECKING:
    from medcil.experiments.plan import SweepPlan
    from medcil.experiments.results_folder import Request
    from medcil.experiments.sweep import Status


def bench(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's name or YAML file; without it, list the suites.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="The images: DIR, or NAME=DIR for each of several datasets. Not needed twice."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for all results; suites share the runs in it.")
    ] = Path("results"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change every recipe: key.subkey=value, repeatedly.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Pretrained weights: a safetensors file, or `hub`.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only such rows or settings (* and ?), repeatedly: those rows in those settings."),
    ] = None,
    orders: Annotated[str | None, typer.Option(help="Only these class orders, such as 0,1.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Only these of the suite's seeds, such as 0,1.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where runs train.")] = "auto",
    launcher: Annotated[str, typer.Option(help="What starts the runs: local, ray or slurm.")] = "local",
    launcher_option: Annotated[
        list[str] | None, typer.Option(help="An option of the launcher: key=value, repeatedly.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="Runs at once; default: as many as the cores, the GPU or the cluster allow."),
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and their cost; start none.")
    ] = False,
) -> None:
    """Compute a suite's runs, what of them is not finished, then its tables and figures."""
    from medcil.experiments.results_folder import Request, is_done

    if suite is None:
        _list_suites()
        return
    request = Request(
        suite=suite,
        out=out,
        data=tuple(data or ()),
        settings=tuple(settings or ()),
        weights=weights,
        only=tuple(only or ()),
        orders=_listed(orders),
        seeds=_listed(seeds),
        device=device,
    )
    if not dry_run and is_done(request):
        screen.print("Everything is finished; nothing to do.")
        _show_page(request)
        return
    _compute(request, launcher, launcher_option or [], at_once=at_once, dry_run=dry_run)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _list_suites() -> None:
    from medcil.experiments.suite import cells, known_suites, load_suite

    table = plain_table("suite", "runs", "in the paper", "datasets", "what it is")
    table.columns[1].justify = "right"
    for name in known_suites():
        found = load_suite(name)
        every = list(cells(found))
        datasets = dict.fromkeys(cell.recipe["data"]["name"] for cell in every)
        about = (found.number or "", ", ".join(datasets), escape(found.title))
        table.add_row(f"[bold]{name}[/]", str(len(every)), *about)
    screen.print(table)
    screen.print("\nCompute one: medcil bench SUITE --data DIR. What it costs: --dry-run.")


def _compute(
    request: "Request", launcher: str, options: list[str], *, at_once: int | None, dry_run: bool
) -> None:
    from medcil.experiments.launchers import make_launcher, parse_options
    from medcil.experiments.plan import check_networks, plan_sweep
    from medcil.experiments.sweep import sweep

    plan = plan_sweep(request)
    for sentence in plan.left_out:
        warn(sentence)
    if launcher == "local" and at_once is None:
        at_once = plan.parallel_runs()
    if dry_run:
        _show_plan(plan, at_once)
        return
    check_networks(plan)
    with can_be_interrupted(CONTINUE), _terminated_like_interrupted():
        gpus = plan.gpus_to_share() if launcher == "local" else ()
        starter = make_launcher(
            launcher, out=request.out, at_once=at_once, options=parse_options(options), gpus=gpus
        )
        try:
            _prepare_images(plan)
            with _Board() as board:
                status = sweep(plan, starter, board.show)
        finally:
            starter.stop()  # also where preparing was interrupted
        unreadable = _write_results(plan, status)
    if status.failed or unreadable:
        raise RunsFailed(_failures(plan, status, unreadable))


def _prepare_images(plan: "SweepPlan") -> None:
    from medcil.experiments.plan import prepare_root

    for root in plan.roots.values():
        if root.source is not None:
            messages.print(f"Preparing {escape(str(root.source))} once, for all runs", soft_wrap=True)
            with image_progress("preparing") as watch:
                prepare_root(root, watch)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A cluster or a system that shuts down asks by SIGTERM; runs are stopped in order, as by Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Board:
    """On a terminal a table that is kept up to date; elsewhere a line for everything that happens."""

    def __init__(self) -> None:
        self.live = Live(console=messages, auto_refresh=False, transient=True)

    def __enter__(self) -> "_Board":
        if messages.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def show(self, status: "Status") -> None:
        for line in status.news:
            left = "" if messages.is_terminal else f"{_left(status)}"
            messages.print(f"{escape(line)}[dim]{left}[/]", soft_wrap=True)
        if messages.is_terminal:
            self.live.update(_table(status), refresh=True)


def _table(status: "Status") -> Group:
    from medcil.experiments.sweep import name_of

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for run, progress in status.running:
        table.add_row(escape(name_of(run)), f"[dim]{escape(progress)}[/]")
    facts = [f"[green]{status.n_finished} of {status.n_runs} finished[/]"]
    facts += [f"{status.n_running} running", f"{status.n_waiting} to do"]
    facts += [f"{status.n_elsewhere} computed by another sweep"] if status.n_elsewhere else []
    facts += [f"[red]{len(status.failed)} failed[/]"] if status.failed else []
    return Group(table, " · ".join(facts) + _left(status))


def _left(status: "Status") -> str:
    return "" if not status.seconds_left else f" · about {duration(status.seconds_left)} left"


def _show_plan(plan: "SweepPlan", at_once: int | None) -> None:
    from medcil.experiments.sweep import Speeds, images_seen

    speeds, unfinished = Speeds.measured(plan.request.results), {run.key for run in plan.unfinished}
    table = plain_table("row", "setting", "order", "state", "images", "about", "run")
    table.columns[4].justify = table.columns[5].justify = "right"
    table.columns[6].no_wrap = True
    costs, times = [], []
    for run in plan.runs:
        cost, seconds = images_seen(run.config), speeds.seconds(run.config)
        state = plan.state_of(run) if run.key in unfinished else "finished"
        if run.key in unfinished:
            costs.append(cost)
            times.append(seconds)
        shown = ("?" if cost is None else f"{cost:,}", "" if seconds is None else duration(seconds))
        for index, place in enumerate(run.places):
            names = (escape(place.row), escape(place.setting), str(place.order_and_seed))
            table.add_row(*names, *((state, *shown, run.key) if not index else ("the same", "", "", run.key)))
    screen.print(table)
    known = sum(cost for cost in costs if cost is not None)
    facts = [f"{len(plan.runs)} runs", f"{len(unfinished)} to compute", f"{known:,} training images"]
    measured = [seconds for seconds in times if seconds is not None]
    if len(measured) == len(times) and measured:
        facts.append(f"about {duration(sum(measured) / (at_once or 1))}, {at_once or 1} at once")
    screen.print(" · ".join(facts) + ". Nothing was started.")


def _write_results(plan: "SweepPlan", status: "Status") -> list[str]:
    """Finished runs are a success, also on a machine that cannot draw their figures.

    Returns a line for each run that is finished and cannot be read.
    """
    from medcil.experiments.features import write_features_for_figures
    from medcil.experiments.results_folder import final_record, mark_done
    from medcil.report.suite import read_results, write_results, write_tables

    folder = plan.request.folder
    with final_record(plan, {run.key: why for run, why in status.failed}):
        results = read_results(folder)
        write_tables(results)  # before anything that this machine may not be able to do
        problems = write_features_for_figures(folder)
        try:
            made = write_results(folder)
        except InvalidInput as error:
            problems.append(str(error))
        unreadable = [
            f"  {row} · {setting} · order {run.name}: {run.why}"
            for row, setting, run in results.not_finished()
            if plan.request.results.is_finished(Path(run.path).name)
        ]
        if not problems and not unreadable and not status.failed:
            mark_done(plan.request, made)
    if results.finished_records():
        _show_page(plan.request)
    for problem in problems:
        note(problem)
    return unreadable


def _show_page(request: "Request") -> None:
    page = request.folder / "index.html"
    shown = page if page.exists() else request.folder / "table.md"
    show(f"Results: [bold]{escape(str(shown))}[/]")


def _failures(plan: "SweepPlan", status: "Status", unreadable: list[str]) -> str:
    from medcil.experiments.sweep import name_of

    logs = plan.request.results.logs
    failures = [f"  {name_of(run)}: {why} ({logs / run.key}.log)" for run, why in status.failed] + unreadable
    first = f"{len(failures)} of {status.n_runs} runs failed: fix the cause and run the same command again."
    return "\n".join([first, *failures])
