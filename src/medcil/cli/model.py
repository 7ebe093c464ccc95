"""The commands that change a model: train, update, history, rollback, erase."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from medcil.cli.console import (
    CONTINUE,
    CheckingBar,
    TrainingBars,
    can_be_interrupted,
    duration,
    plain_table,
    printable,
    screen,
    show,
    training_progress,
    warn,
)
from medcil.errors import NotPromoted

if TYPE_CHECKING:
    from medcil.clinic.settings import Choice
    from medcil.clinic.train import Lesson, Trained, Watches
    from medcil.clinic.update import Plan

UNCHANGED = f"{CONTINUE} No version was changed."
SHOWN = 10  # flipped images on the screen
Data = Annotated[
    Path, typer.Argument(metavar="DIR", help="One folder per class, a manifest, an archive, or a store.")
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")]
Eval = Annotated[
    Path | None, typer.Option("--eval", help="Images to measure on, laid out alike; none may be trained on.")
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Times to go through all images; default: from their number.")
]
NewHoldout = Annotated[
    int | None,
    typer.Option(min=0, help="Images of each new class to seal for measuring; default: as for the model."),
]
NewMethod = Annotated[
    str | None, typer.Option(help="A name from `medcil methods`; default: as for the model.")
]
NewExemplars = Annotated[
    int | None, typer.Option(min=1, help="Images to keep of each class; default: as for the model.")
]
Conflicts = Annotated[
    str,
    typer.Option(
        metavar="refuse|skip|CLASS",
        help="One picture in several classes: refuse it, skip it, or believe this class.",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting of a recipe: key.subkey=value, repeatedly.")
]


def train(
    data: Data,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The new model folder. An unfinished one is continued.")
    ],
    eval_: Eval = None,
    holdout: Annotated[
        int | None,
        typer.Option(min=0, help="Images of each class to seal for measuring; default: 20, without --eval."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="A name from `medcil methods`; default: balanced.")
    ] = None,
    epochs: Epochs = None,
    exemplars: Annotated[
        int | None, typer.Option(min=1, help="Images to keep of each class; default: 20.")
    ] = None,
    side: Annotated[
        int | None, typer.Option(min=8, help="Pixels on a side of the images; default: from their size.")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="The network, by its timm name; default: from the side.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Its pretrained weights: a safetensors file, or `hub` to download them."),
    ] = None,
    settings: Settings = None,
    conflicts: Conflicts = "refuse",
) -> None:
    """Learn the classes of a folder of images: checks them, chooses settings, writes a model folder."""
    from medcil.clinic.measure import summary
    from medcil.clinic.train import train as train_model

    with can_be_interrupted(UNCHANGED), _watches("training") as watches:
        done = train_model(
            data,
            out,
            eval=eval_,
            holdout=holdout,
            method=method,
            epochs=epochs,
            exemplars=exemplars,
            side=side,
            backbone=backbone,
            weights=weights,
            settings=tuple(settings or ()),
            conflicts=conflicts,
            watches=watches,
        )
    _show_classes(done.metrics)
    show(summary(done.metrics))
    _show_place(out, done.version)


def update(
    model: Model,
    new_data: Annotated[
        Path, typer.Argument(metavar="NEW_DIR", help="Images of the new classes, laid out as for train.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Leave MODEL as it is; write a new model folder with all versions."),
    ] = None,
    max_forgetting: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Points of the old classes' mean recall that may be lost at most."),
    ] = None,
    eval_: Eval = None,
    holdout: NewHoldout = None,
    method: NewMethod = None,
    epochs: Epochs = None,
    exemplars: NewExemplars = None,
    settings: Settings = None,
    conflicts: Conflicts = "refuse",
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen; write nothing.")] = False,
) -> None:
    """Add new classes to a model, as a new version beside the old one, and say what it cost."""
    from medcil.clinic.update import Plan
    from medcil.clinic.update import update as update_model

    with can_be_interrupted(UNCHANGED), _watches("update") as watches:
        done = update_model(
            model,
            new_data,
            out=out,
            max_forgetting=max_forgetting,
            dry_run=dry_run,
            eval=eval_,
            holdout=holdout,
            method=method,
            epochs=epochs,
            exemplars=exemplars,
            settings=tuple(settings or ()),
            conflicts=conflicts,
            watches=watches,
        )
    if isinstance(done, Plan):
        _show_plan(done)
        return
    _show_forgetting(done)
    _show_place(out or model, done.version)
    if not done.promoted:
        gate = done.forgetting["gate"]
        raise NotPromoted(
            f"{done.version} is not promoted: the old classes lost {gate['loss_in_points']:.1f} points of "
            f"mean recall, more than {gate['max_forgetting']:g}. "
            f"The model still uses {done.provenance['parent']}.\n"
            f"`medcil rollback {out or model} {done.version}` makes it current all the same."
        )


def history(model: Model) -> None:
    """List a model's versions: classes, dates, images, how well each does, what each update cost."""
    from medcil.clinic.update import history as versions_of
    from medcil.report.markup import percent

    table = plain_table(
        "", "version", "written (UTC)", "classes added", "images", "balanced", "old classes", ""
    )
    for past in versions_of(model):
        change = past.change_of_old_recall
        table.add_row(
            "[bold]*[/]" if past.is_current else "",
            past.version,
            past.when[:16].replace("T", " "),
            printable(", ".join(past.classes_added)),
            f"{past.images:,}",
            percent(past.balanced_accuracy) + (" (optimistic)" if past.measured_on == "exemplars" else ""),
            "" if change is None else f"{100 * change:+.1f} points",
            "" if past.is_promoted else "not promoted",
        )
    screen.print(table)
    screen.print("[dim]* current[/]")


def rollback(
    model: Model,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As `medcil history` lists it.")],
) -> None:
    """Make another version of a model current; nothing is deleted."""
    from medcil.clinic.update import rollback as go_back

    before = go_back(model, version)
    screen.print(f"{escape(str(model))}: [bold]{escape(version)}[/] is current, {before} was.")


@contextmanager
def _watches(label: str) -> Iterator["Watches"]:
    """Bars while images are checked and while the network learns; in between what was chosen."""
    from medcil.clinic.train import Watches

    with training_progress() as progress:
        bars = TrainingBars(progress, label)
        yield Watches(checking=CheckingBar(), settings=_show_choices, training=lambda now: bars(1, 1, now))


def _show_choices(choices: Sequence["Choice"], lesson: "Lesson") -> None:
    trained, sealed = lesson.table.counts(lesson.train), lesson.table.counts(lesson.sealed)
    table = plain_table("class", "to train on", "sealed")
    for name, n in trained.items():
        table.add_row(printable(name), f"{n:,}", f"{sealed[name]:,}")
    screen.print(table)
    _show_settings(choices)


def _show_settings(choices: Sequence["Choice"]) -> None:
    table = plain_table("setting", "value", "why")
    for choice in choices:
        table.add_row(choice.key, escape(str(choice.value)), escape(choice.why))
    screen.print(table)


def _show_plan(plan: "Plan") -> None:
    table = plain_table("new class", "to train on", "sealed")
    for name, n in plan.images.items():
        table.add_row(printable(name), f"{n:,}", f"{plan.holdout[name]:,}")
    screen.print(f"Would add to {plan.parent}, as version [bold]{plan.version}[/]:")
    screen.print(table)
    _show_settings(plan.choices)
    took = "its pace is not known" if plan.seconds is None else f"about {duration(plan.seconds)}"
    show(
        f"{plan.epochs} epochs of {plan.images_per_epoch:,} images: {took} on a machine like the one that "
        f"made {plan.parent}. Nothing was written."
    )


def _show_forgetting(done: "Trained") -> None:
    from medcil.clinic.measure import FORGETTING_COLUMNS, forgetting_rows
    from medcil.report.markup import percent

    cost = done.forgetting
    table = plain_table(*FORGETTING_COLUMNS)
    for row in forgetting_rows(cost):
        table.add_row(*map(printable, row))
    screen.print(table)
    for key, what in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy")):
        before, after, every = cost[key].values()
        screen.print(
            f"{what}: old classes {percent(before)} before, {percent(after)} after; all {percent(every)}."
        )
    for entry in cost["confusions"][:3]:
        images = "1 image" if entry["images"] == 1 else f"{entry['images']} images"
        screen.print(f"{printable(entry['class'])} taken for {printable(entry['taken_for'])}: {images}")
    flipped = cost["flipped"]
    screen.print(f"{len(flipped)} images of old classes are predicted otherwise than before.")
    for entry in flipped[:SHOWN]:
        line = f"  {entry['file']} ({entry['class']}): {entry['before']} before, {entry['after']} after"
        show(f"[dim]{printable(line)}[/]")
    if len(flipped) > SHOWN:
        screen.print(f"[dim]  and {len(flipped) - SHOWN} more in forgetting.json[/]")
    said = cost["verdict"] or f"No verdict: {cost['note'] or 'nothing to measure on'}."
    show(f"[bold]{printable(said)}[/]")


def _show_classes(metrics: dict[str, Any]) -> None:
    from medcil.clinic.measure import interval

    table = plain_table("class", "images", "recognized (95% interval)")
    for entry in metrics["classes"]:
        table.add_row(printable(entry["name"]), str(entry["images"]), interval(entry))
    screen.print(table)


def _show_place(model: Path, version: str) -> None:
    show(
        f"Model: [bold]{escape(str(model))}[/] · version {version} · report: "
        f"{escape(str(model / 'versions' / version / 'report.html'))}"
    )


def erase(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")
    ],
    patient: Annotated[str, typer.Option(help="The patient's id, as the data had it.")],
) -> None:
    """Remove a patient's images and everything made of them from all versions of a model."""
    from medcil.clinic.erase import erase as erase_patient

    with can_be_interrupted("Run the same command again to finish it; until then images may remain."):
        done = erase_patient(model, patient)
    images = "1 image" if done.images == 1 else f"{done.images} images"
    show(f"Removed: {images}, and what was made of them. Rewritten: {', '.join(done.versions)}.")
    if done.trained:
        show(
            f"[bold]The weights are not unlearned.[/] Trained on images of this patient: "
            f"{', '.join(done.trained)}. Only training again without them makes a model that never saw them."
        )
    else:
        screen.print("No version was trained on images of this patient.")
    for version, classes in done.without_exemplars.items():
        warn(
            f"{version} has no exemplar of {', '.join(classes)} any more: it still recognizes these classes, "
            "but an update will forget them sooner."
        )
    for name in done.thrown_away:
        show(f"Also removed, for it may have held images: {escape(name)}")
    if done.left:
        show(f"[yellow]Not looked into, for no part of a model: {escape(', '.join(done.left))}.[/]")
    show(
        "[dim]Copies, backups, exported files and predictions elsewhere are not reached; on most disks "
        "deleted bytes remain until they are written over.[/]"
    )
