"""The command that chooses hyper-parameters."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medcil.cli.data import can_be_interrupted, messages, screen
from medcil.errors import InvalidInput

if TYPE_CHECKING:
    from medcil.experiments.run import RunWatch
    from medcil.experiments.tune import Order, Search, Trial, Values, Watch
    from medcil.training.checkpoint import Progress as TrainingProgress

CONTINUE = "Run the same command again: it goes on where it stopped; tuned.yaml holds the best so far."


def tune(
    recipe: Annotated[
        Path, typer.Argument(help="A YAML recipe of `balanced`, or with its losses plugged in.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for the trials and tuned.yaml. A search there goes on."),
    ],
    data: Annotated[Path | None, typer.Option(help="The images: short for --set data.root=DIR.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, with those that are done.")] = 20,
    orders: Annotated[
        str | None, typer.Option(help="Class orders a trial is run with: 0,1,2; default: the recipe's.")
    ] = None,
    sampler: Annotated[
        Literal["optuna", "grid", "counts"],
        typer.Option(
            help="optuna: learns from trials; grid: the paper's values; counts: α by a rule, no runs."
        ),
    ] = "optuna",
    objective: Annotated[
        Literal["acc_balanced", "acc_micro", "last_balanced"], typer.Option(help="What is made large.")
    ] = "acc_balanced",
    held_out: Annotated[
        float | None, typer.Option(help="Share of the training images to choose on; default 0.2.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change the recipe: key.subkey=value, repeatedly.")
    ] = None,
) -> None:
    """Choose α, λ_d and λ_k on images held out of training, never on the test set; writes a recipe."""
    from medcil.build import load_recipe, resolve
    from medcil.experiments.tune import Search, tune_by_counts
    from medcil.experiments.tune import tune as search_on

    changes = [*(settings or []), *([f"data.root={json.dumps(str(data))}"] if data is not None else [])]
    changes += [f"data.held_out={held_out}"] if held_out is not None else []
    search = Search(
        recipe=resolve(load_recipe(recipe, changes)),
        out=out,
        sampler=sampler,
        objective=objective,
        orders=_orders(orders),
        seed=seed,
    )
    with can_be_interrupted(CONTINUE):
        if sampler == "counts":
            choice = tune_by_counts(search)
        else:
            with _bar() as progress:
                choice = search_on(search, trials, _watch(progress, search, trials))
    screen.print(escape(choice.explanation), soft_wrap=True)
    screen.print(f"Recipe: [bold]{escape(str(out / 'tuned.yaml'))}[/]", soft_wrap=True)


def _orders(text: str | None) -> tuple[int | str, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len(set(parts)) < len(parts):
        raise InvalidInput(f"--orders {text!r}: write different class orders, as in --orders 0,1,2.")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[now]}[/]"),
    )
    return Progress(*columns, console=messages, disable=not messages.is_terminal)


def _watch(progress: Progress, search: "Search", n_trials: int) -> "Watch":
    """One bar over the trials, with the values and the step of the one that runs."""
    from medcil.experiments.tune import Watch

    bar = progress.add_task("trials", total=n_trials, now="")

    def said(values: "Values") -> str:
        return " ".join(f"{parameter.symbol} {values[key]:g}" for key, parameter in search.space.items())

    class OnScreen(Watch):
        def begins(self, number: int, values: "Values", order: "Order") -> "RunWatch":
            now = f"{said(values)} · order {order}"

            def step(task: int, n_tasks: int, at: "TrainingProgress") -> None:
                progress.update(bar, now=f"{now} · step {task}/{n_tasks} epoch {at.epoch + 1}/{at.epochs}")

            return step

        def ended(self, number: int, trial: "Trial") -> None:
            score = "failed" if trial.score is None else f"{search.objective} {100 * trial.score:.1f}%"
            progress.console.print(f"trial {number}: {said(trial.values)}: {score}", markup=False)
            progress.update(bar, completed=number + 1, total=max(n_trials, number + 1), now="")

    return OnScreen()
