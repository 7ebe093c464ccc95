"""The command that removes a patient from a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from medcil.cli.data import can_be_interrupted, printable, screen


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
    screen.print(
        f"Removed: {images}, and what was made of them. Written anew: {', '.join(done.versions)}.",
        soft_wrap=True,
    )
    if done.trained:
        screen.print(
            f"[bold]The weights are not unlearned.[/] Trained on images of this patient: "
            f"{', '.join(done.trained)}. Only training anew without them makes a model that never saw them.",
            soft_wrap=True,
        )
    else:
        screen.print("No version was trained on images of this patient.")
    for version, classes in done.without_exemplars.items():
        screen.print(
            f"[yellow]{version} has no exemplar left of {printable(', '.join(classes))}: it still recognizes "
            "them, but an update will forget them sooner.[/]",
            soft_wrap=True,
        )
    for name in done.thrown_away:
        screen.print(f"Also removed, for it may have held images: {escape(name)}", soft_wrap=True)
    if done.left:
        screen.print(
            f"[yellow]Not looked into, for no part of a model: {escape(', '.join(done.left))}.[/]",
            soft_wrap=True,
        )
    screen.print(
        "[dim]Copies, backups, exported files and predictions elsewhere are not reached; on most disks "
        "deleted bytes remain until they are written over.[/]",
        soft_wrap=True,
    )
