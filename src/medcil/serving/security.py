"""What holds for every request and every answer, whatever it is about."""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost"})
HEADERS = {
    # The browser itself refuses whatever does not come from here.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",  # answers are about people
}


class Guard:
    """Refuses requests that other pages make a browser send, and adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(_without_port(host)):
            # A foreign name that resolves to this machine would let a foreign page read our answers.
            reason = (
                "This server has another name: open it as localhost, by its address, or give it a --name."
            )
            await JSONResponse({"error": reason}, 400)(scope, receive, send_guarded)
        elif origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            reason = "Another page has made this request; open this server's own page."
            await JSONResponse({"error": reason}, 403)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _is_ours(self, name: str) -> bool:
        """An address resolves to nothing but itself: only names can be made to point here by others."""
        try:
            return name in self.hosts or bool(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            return False


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()
