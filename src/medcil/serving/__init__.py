"""Serve a model on a local page and as a JSON API, until Ctrl-C. Docs: docs/how-to/serve.md."""

import ipaddress
import logging
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, needs_extra


def serve(
    model: Path | str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    prior: Path | str | None = None,
    name: Collection[str] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    watch: Callable[[str], None] | None = None,
) -> None:
    """Serve the page and the API of a model; call `watch` with the address as soon as it is open.

    Port 0 is any that is free. `name` adds host names to the addresses and names of this machine.
    """
    with needs_extra("serve"):
        import uvicorn

        from medcil.serving.app import LOOPBACK_NAMES, make_app

    own = () if is_loopback(host) else (host, socket.gethostname())
    names = {each.lower() for each in (*LOOPBACK_NAMES, *own, *name)}
    app = make_app(
        model,
        prior=None if prior is None else Path(prior),
        execution=ExecutionConfig(device=device),
        hosts=names,
    )
    # No log of requests: it would hold names of files. Nor of senseless ones: they are answered.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    config = uvicorn.Config(app, log_level="error", access_log=False, server_header=False, ws="none")
    with _listen(host, port) as listening:
        if watch is not None:
            shown = f"[{host}]" if ":" in host else host
            watch(f"http://{shown}:{listening.getsockname()[1]}")
        with suppress(KeyboardInterrupt):  # how a server is meant to end
            uvicorn.Server(config).run(sockets=[listening])


def is_loopback(host: str) -> bool:
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
            f"Cannot listen on {host}, port {port} ({reason}). Choose others with --host and --port.",
            code="server.address.invalid",
        ) from None
