"""The command that puts a model behind a page: serve."""

import ipaddress
import logging
import socket
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from medcil.cli_data import messages, screen
from medcil.errors import InvalidInput


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
    try:
        import uvicorn

        from medcil.config import ExecutionConfig
        from medcil.serve.app import make_app
        from medcil.serve.guard import LOOPBACK_NAMES
    except ImportError as error:
        raise InvalidInput(
            f"Serving needs {error.name}, which is not installed: pip install 'medcil[serve]'."
        ) from None

    is_local = _is_loopback(host)
    own = () if is_local else (host, socket.gethostname())
    names = {each.lower() for each in (*LOOPBACK_NAMES, *own, *(name or ()))}
    app = make_app(model, prior=prior, execution=ExecutionConfig(device=device), hosts=names)
    listening = _listen(host, port)
    if not is_local:
        messages.print(
            f"[yellow]Everyone who can reach {escape(host)} can use this model and see its exemplars: there "
            "is no password and no encryption.[/]",
            soft_wrap=True,
        )
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    screen.print(f"Page: [bold]{escape(address)}[/] (Ctrl-C ends it)", soft_wrap=True)
    # No log of requests: it would hold names of files. Nor of senseless ones: they are answered.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    config = uvicorn.Config(app, log_level="error", access_log=False, server_header=False, ws="none")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # how a server is meant to end
        pass
    finally:
        listening.close()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"{host}, port {port} cannot be listened on ({reason}): choose others with --host and --port."
        ) from None
