"""medcil weights: the pretrained weights that a model can start from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, no_type_check

import typer
from typer import Argument, Option

from medcil.cli.console import printable, show, show_table

if TYPE_CHECKING:
    from medcil.models.weights import Normalization, Weights

app = typer.Typer(no_args_is_help=False, invoke_without_command=True, add_completion=False)


@app.callback()
@no_type_check  # the context is of a class that typer does not name
def weights(context: typer.Context) -> None:
    """List known backbones and registered weights; `add` and `remove` change the latter."""
    if context.invoked_subcommand is not None:
        return
    from medcil.models.weights import IMAGENET, KNOWN, registered_weights, weights_folder

    rows = [
        (name, str(known.side), _short(known.normalization), known.source, known.license)
        for name, known in KNOWN.items()
    ]
    show_table(("backbone", "side", "scaled as", "usual weights", "their license"), rows, right=(1,))
    show(
        f"[dim]ImageNet: {_both(IMAGENET)}.\nOther timm networks: medcil weights add FILE --backbone NAME[/]"
    )
    registered = registered_weights()
    if not registered:
        show(f"\nNo weights are registered in {printable(str(weights_folder()))}.")
        show("`medcil weights add FILE` registers a file. Nothing is downloaded.")
        return
    show("\nRegistered, the newest first:")
    for entry in registered:
        _show_entry(entry)


@app.command()
def add(
    file: Annotated[Path, Argument(metavar="FILE", help="A safetensors file, or a state dict (.pth, .pt).")],
    backbone: Annotated[
        str | None, Option(help="The timm name of its network. By default, it is recognized.")
    ] = None,
    license: Annotated[str | None, Option(help="The license of the weights, for the model card.")] = None,
    source: Annotated[str | None, Option(help="Who trained them on what, for the model card.")] = None,
) -> None:
    """Check a local file of weights and register a copy, for `medcil train` to start from."""
    from medcil.models.weights import add_weights

    entry, fit = add_weights(file, backbone=backbone, license=license, source=source)
    show("Registered:")
    _show_entry(entry)
    if fit.head:
        show(f"Left out, as no part of the network: {printable(', '.join(fit.head))}.")
    show(f"`medcil train` with {printable(entry.backbone)} starts from them. Does their license allow it?")


@app.command()
def remove(
    name: Annotated[str, Argument(metavar="NAME", help="A name from `medcil weights`.")],
) -> None:
    """Remove registered weights. Models that started from them stay as they are."""
    from medcil.models.weights import remove_weights

    remove_weights(name)
    show(f"Removed: {printable(name)}.")


def _show_entry(entry: "Weights") -> None:
    size = entry.path.stat().st_size / 1e6 if entry.path is not None and entry.path.is_file() else 0
    show(f"[bold]{printable(entry.name)}[/]")
    for key, value in (
        ("backbone", entry.backbone),
        ("normalization", "unknown" if entry.normalization is None else _both(entry.normalization)),
        ("source", entry.source or "not stated"),
        ("license", entry.license or "not stated"),
        ("registered", str(entry.registered)),
        ("size", f"{size:.1f} MB"),
        ("sha256", str(entry.sha256)),
        ("path", str(entry.path)),
    ):
        show(f"  {key}: {printable(value)}")


def _short(normalization: "Normalization") -> str:
    from medcil.models.weights import IMAGENET

    return "ImageNet" if normalization == IMAGENET else "0.5, 0.5"


def _both(normalization: "Normalization") -> str:
    mean, deviation = normalization
    return f"mean {_channels(mean)}, deviation {_channels(deviation)}"


def _channels(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
