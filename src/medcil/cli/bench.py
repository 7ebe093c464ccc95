"""The command that computes suites: the paper's tables and figures, on one machine or many."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from medcil.cli.console import (
    CONTINUE,
    Device,
    Repeated,
    Settings,
    Weights,
    can_be_interrupted,
    duration,
    image_progress,
    messages,
    note,
    out_option,
    show,
    show_table,
    warn,
)
from medcil.errors import InvalidInput, RunsFailed

if TYPE_CHECKING:
    from medcil.experiments.plan import SweepPlan
    from medcil.experiments.suite import Request
    from medcil.experiments.sweep import Status


def bench(
    suite: Annotated[str | None, Argument(help="A suite's name or file. Without it, list them.")] = None,
    data: Annotated[Repeated, Option(help="The images: DIR, or NAME=DIR for each dataset.")] = None,
    out: Annotated[Path, out_option("Folder for the results of all suites.")] = Path("bench-results"),
    settings: Settings = None,
    weights: Weights = None,
    only: Annotated[Repeated, Option(help="Compute only rows or settings like this (* and ?).")] = None,
    orders: Annotated[str | None, Option(help="Compute only these class orders, such as 0,1.")] = None,
    seeds: Annotated[str | None, Option(help="Compute only these seeds of the suite, such as 0,1.")] = None,
    device: Device = "auto",
    launcher: Annotated[str, Option(help="What starts the runs: local, ray or slurm.")] = "local",
    launcher_option: Annotated[Repeated, Option(help="An option of the launcher: key=value.")] = None,
    at_once: Annotated[int | None, Option(help="Runs computed at once. By default, as many as fit.")] = None,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="List the runs without starting any.")] = False,
) -> None:
    """Compute a suite's unfinished runs, then write its tables and figures."""
    from medcil.experiments.suite import Request, is_done

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
        show("Everything is finished; nothing to do.")
        _show_page(request)
        return
    _compute(request, launcher, launcher_option or [], at_once=at_once, dry_run=dry_run)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _list_suites() -> None:
    from medcil.experiments.suite import cells, known_suites, load_suite

    rows = []
    for name in known_suites():
        suite = load_suite(name)
        recipes = [recipe for _, recipe in cells(suite)]
        datasets = ", ".join(dict.fromkeys(recipe["data"]["name"] for recipe in recipes))
        rows.append((Text(name, "bold"), str(len(recipes)), suite.number or "", datasets, suite.title))
    show_table(("suite", "runs", "in the paper", "datasets", "what it is"), rows, right=(1,))
    show("\nCompute one: medcil bench SUITE --data DIR. Its runs: --dry-run.")


def _compute(
    request: "Request", launcher: str, options: list[str], *, at_once: int | None, dry_run: bool
) -> None:
    from medcil.experiments.launcher import make_launcher
    from medcil.experiments.plan import check_networks, plan_sweep, prepare_images
    from medcil.experiments.sweep import sweep

    plan = plan_sweep(request)
    for sentence in plan.left_out:
        warn(sentence)
    if dry_run:
        _show_plan(plan)
        return
    if launcher == "local" and at_once is None:
        at_once = plan.parallel_runs()
    check_networks(plan)
    with can_be_interrupted(CONTINUE), _terminated_like_interrupted():
        gpus = plan.gpus_to_share() if launcher == "local" else ()
        starter = make_launcher(launcher, options, out=request.out, at_once=at_once, gpus=gpus)
        try:
            for root in plan.roots.values():
                if root.source is not None:
                    note(f"Preparing {root.source} once, for all runs")
            with image_progress("preparing") as watch:
                prepare_images(plan, watch)
            with Live(console=messages, auto_refresh=False, transient=True) as live:
                status = sweep(plan, starter, partial(_show_status, live))
        finally:
            starter.stop()  # also where preparing was interrupted
        unreadable = _write_results(plan, status)
    if status.failed or unreadable:
        logs = request.results.logs
        failures = [f"  {run.name}: {why} ({logs / run.key}.log)" for run, why in status.failed] + unreadable
        raise RunsFailed(
            f"{len(failures)} of {status.n_runs} runs failed: fix the cause and run the same command again.\n"
            + "\n".join(failures)
        )


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A cluster or a system that shuts down asks by SIGTERM; runs are stopped in order, as by Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_status(live: Live, status: "Status") -> None:
    """Refresh a table on a terminal; elsewhere print a line for everything that happened."""
    left = "" if not status.seconds_left else f" · about {duration(status.seconds_left)} left"
    for line in status.news:
        messages.print(f"{escape(line)}[dim]{'' if messages.is_terminal else left}[/]", soft_wrap=True)
    if not messages.is_terminal:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for run, progress in status.running:
        table.add_row(escape(run.name), f"[dim]{escape(progress)}[/]")
    facts = [f"[green]{status.n_finished} of {status.n_runs} finished[/]"]
    facts += [f"{status.n_running} running", f"{status.n_waiting} to do"]
    facts += [f"{status.n_elsewhere} computed by another sweep"] if status.n_elsewhere else []
    facts += [f"[red]{len(status.failed)} failed[/]"] if status.failed else []
    live.update(Group(table, " · ".join(facts) + left), refresh=True)


def _show_plan(plan: "SweepPlan") -> None:
    rows, states = [], {run.key: plan.request.results.state(run.key) for run in plan.runs}
    for run in plan.runs:
        for place in run.places:
            state = states[run.key] if place is run.places[0] else "the same"
            rows.append((place.row, place.setting, str(place.order_and_seed), state, run.key))
    show_table(("row", "setting", "order", "state", "run"), rows)
    n_left = sum(state != "finished" for state in states.values())
    show(f"{len(states)} runs · {n_left} to compute. Nothing was started.")


def _write_results(plan: "SweepPlan", status: "Status") -> list[str]:
    """Finished runs are a success, also on a machine that cannot draw their figures.

    Returns a line for each run that is finished and cannot be read.
    """
    from medcil.experiments.run import write_features_for_figures
    from medcil.experiments.suite import final_record, mark_done
    from medcil.report.results import read_results
    from medcil.report.suite import write_results, write_tables

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
            for row, setting, run in results.every_run()
            if run.record is None and plan.request.results.is_finished(Path(run.path).name)
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
