"""The page and the JSON API. No path comes from a request: PAGE_FILES lists all that can be fetched."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medcil.config import ExecutionConfig
from medcil.errors import MedcilError
from medcil.serving.model import ServedModel, told
from medcil.serving.uploads import Refused, UploadLimits, read_form

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/report.js": ("report.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

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


def make_app(
    model: Path | str,
    limits: UploadLimits | None = None,
    *,
    prior: Path | None = None,
    execution: ExecutionConfig | None = None,
    hosts: Collection[str] = LOOPBACK_NAMES,
) -> FastAPI:
    """Load the model and make the application.

    `prior`, a file of shares, joins the choices; `hosts` are the host names that requests may use.
    """
    limits = limits or UploadLimits()
    served = ServedModel(Path(model), prior=prior, execution=execution)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.thread.shutdown(cancel_futures=True)

    # The pages that FastAPI would add fetch their scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(Guard, hosts=hosts)
    _add_errors(app, served.folder.root)
    for address, (file, kind) in PAGE_FILES.items():
        answer = Response((PAGE / file).read_bytes(), media_type=kind)
        app.router.routes.append(Route(address, answer, methods=["GET"]))
    _add_api(app, served, limits)
    return app


def _add_api(app: FastAPI, served: ServedModel, limits: UploadLimits) -> None:
    places = asyncio.Semaphore(limits.at_once)

    @app.get("/api/model")
    async def model() -> JSONResponse:
        sizes = {key: getattr(limits, key) for key in ("file_bytes", "files", "request_bytes")}
        return JSONResponse({**await served.ask(served.describe), "limits": sizes})

    @app.get("/api/history")
    async def history() -> JSONResponse:
        return JSONResponse(await served.ask(served.past))

    @app.post("/api/predict")
    async def predict(request: Request) -> JSONResponse:
        async with places:
            files, fields = await read_form(request, limits)
            prior = fields.get("prior", "uniform")
            return JSONResponse(await served.ask(lambda: served.predict(files, prior)))

    if not served.can_explain:
        return

    @app.post("/api/explain")
    async def explain(request: Request) -> JSONResponse:
        async with places:
            files, _ = await read_form(request, limits)
            if len(files) > 1:
                raise Refused(400, f"One image is explained at a time; the request holds {len(files)}.")
            return JSONResponse(await served.ask(lambda: served.explain(files[0])))


def _add_errors(app: FastAPI, root: Path) -> None:
    """Answer every error with {"error": a sentence}."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        reasons = {404: "There is nothing here.", 405: "This address does not take this method."}
        reason = reasons.get(error.status_code, error.detail)
        return JSONResponse({"error": reason}, error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "The request ended before it was whole."}, 400)

    @app.exception_handler(MedcilError)
    async def changed(request: Request, error: MedcilError) -> JSONResponse:
        """Report a model folder that has changed."""
        return JSONResponse({"error": told(error, root)}, 409)


class Guard:
    """Refuse requests that other pages make a browser send; add HEADERS to every answer."""

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
            reason = "This server has another name: open it as localhost, by its address, or give a --name."
            await JSONResponse({"error": reason}, 400)(scope, receive, send_guarded)
        elif origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            reason = "Another page has made this request; open this server's own page."
            await JSONResponse({"error": reason}, 403)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _is_ours(self, name: str) -> bool:
        """Accept our names and any IP address: others can make a name resolve to this machine, no address."""
        try:
            return name in self.hosts or bool(ipaddress.ip_address(name.strip("[]")))
        except ValueError:
            return False


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()
