"""What holds for every request and every answer, whatever it is about."""

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
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

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
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
        if self.hosts is not None and _without_port(host) not in self.hosts:
            # A foreign name that resolves to this machine would let a foreign page read our answers.
            reason = "This server answers to localhost alone; open it under that name."
            await JSONResponse({"error": reason}, 400)(scope, receive, send_guarded)
        elif origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            reason = "Another page has made this request; open this server's own page."
            await JSONResponse({"error": reason}, 403)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()
