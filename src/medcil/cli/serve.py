"""The command that puts a model behind a page: serve."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from medcil.cli.data import messages, screen


def serve(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, written by `medcil train`.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine can reach it.")
    ] = "127.0.0.1",
    prior: Annotated[
        Path | None, typer.Option(help="A file (class: share), to choose beside uniform and training.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that others open it by, besides addresses and this machine's own; repeatedly."
        ),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where it is computed.")] = "auto",
) -> None:
    """Open a local page for a model: drop images, see its answers and why, its versions and their cost."""
    from medcil.serving.server import is_loopback
    from medcil.serving.server import serve as serve_model

    def opened(address: str) -> None:
        if not is_loopback(host):
            messages.print(
                f"[yellow]Everyone who can reach {escape(host)} can use this model and see its exemplars: "
                "there is no password and no encryption.[/]",
                soft_wrap=True,
            )
        screen.print(f"Page: [bold]{escape(address)}[/] (Ctrl-C ends it)", soft_wrap=True)

    serve_model(model, port=port, host=host, prior=prior, name=name or (), device=device, watch=opened)
