"""The commands that take a model elsewhere and look into it: export, explain."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from medcil.cli.data import can_be_interrupted, screen

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")]
Version = Annotated[
    str | None, typer.Option(help="Another version than the current one, as `medcil history` lists it.")
]


class Format(StrEnum):
    onnx = "onnx"


def export(
    model: Model,
    file_format: Annotated[Format, typer.Option("--format", help="The kind of file.")] = Format.onnx,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: the model's name with .onnx, here.")
    ] = None,
    version: Version = None,
) -> None:
    """Write a model as one file that predicts without torch, once it agrees with the network."""
    from medcil.clinic.export import export as export_model

    path = out or Path(f"{model.resolve().name}.{file_format.value}")
    with can_be_interrupted("No file was written."):
        exported = export_model(model, path, version=version)
    screen.print(escape(exported.sentence()), soft_wrap=True)
    name = escape(shlex.quote(str(path)))
    screen.print(f"Predict with it: [bold]medcil predict {name} IMAGES -o predictions.csv[/]", soft_wrap=True)


def explain(
    model: Model,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image to explain.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the figure, its numbers and the page.")
    ] = Path("explanation"),
    version: Version = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it is computed.")] = "auto",
) -> None:
    """Show where in an image the answer comes from, and the exemplars it is nearest to."""
    from medcil.clinic.explain import explain as explain_image
    from medcil.config import ExecutionConfig

    with can_be_interrupted("Run the same command again to start over."):
        explanation = explain_image(
            model, image, out, version=version, execution=ExecutionConfig(device=device)
        )
    first, second = explanation.predicted, explanation.runner_up
    screen.print(
        f"[bold]{escape(first.name)}[/] {first.probability:.1%}, then {escape(second.name)} "
        f"{second.probability:.1%} (uniform prior, version {escape(explanation.version)})",
        soft_wrap=True,
    )
    if explanation.is_unlike:
        screen.print("[yellow]This image is unlike anything the model knows.[/]")
    screen.print(f"Page: [bold]{escape(str(out / 'index.html'))}[/]", soft_wrap=True)
