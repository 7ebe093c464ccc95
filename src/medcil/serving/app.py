"""The page and the JSON API. No path is ever taken from a request: what can be fetched is listed here."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from medcil.config import ExecutionConfig
from medcil.errors import MedcilError
from medcil.serving.model import ServedModel, told
from medcil.serving.security import LOOPBACK_NAMES, Guard
from medcil.serving.uploads import Form, Limits, Refused, read_form

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/report.js": ("report.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def make_app(
    model: Path | str,
    limits: Limits | None = None,
    *,
    prior: Path | None = None,
    execution: ExecutionConfig | None = None,
    hosts: Collection[str] = LOOPBACK_NAMES,
) -> FastAPI:
    """Loads the model. `prior`, a file of shares, joins the choices; `hosts` are names it answers to."""
    limits = limits or Limits()
    served = ServedModel(Path(model), prior=prior, execution=execution)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.thread.shutdown(cancel_futures=True)

    # The pages that FastAPI would add fetch their scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.add_middleware(Guard, hosts=hosts)
    _add_errors(app, served.folder.root)
    _add_page(app)
    _add_api(app, served, limits)
    return app


def _add_page(app: FastAPI) -> None:
    for address, (file, kind) in PAGE_FILES.items():
        answer = Response((PAGE / file).read_bytes(), media_type=kind)
        app.add_api_route(address, _always(answer), methods=["GET"])


def _always(answer: Response) -> Any:
    async def page() -> Response:
        return answer

    return page


def _add_api(app: FastAPI, served: ServedModel, limits: Limits) -> None:
    places = asyncio.Semaphore(limits.at_once)

    async def form_of(request: Request) -> Form:
        form = await read_form(request, limits)
        if not form.files:
            raise Refused(400, "The request holds no image: send some in the field `files`.")
        return form

    @app.get("/api/model")
    async def model() -> JSONResponse:
        described = await served.ask(served.describe)
        content = {**described, "limits": {"file_bytes": limits.file_bytes, "files": limits.files}}
        content["limits"]["request_bytes"] = limits.request_bytes
        return JSONResponse(content)

    @app.get("/api/history")
    async def history() -> JSONResponse:
        return JSONResponse(await served.ask(served.past))

    @app.post("/api/predict")
    async def predict(request: Request) -> JSONResponse:
        async with places:
            form = await form_of(request)
            prior = form.fields.get("prior", "uniform")
            return JSONResponse(await served.ask(lambda: served.predict(form.files, prior)))

    if not served.can_explain:
        return

    @app.post("/api/explain")
    async def explain(request: Request) -> JSONResponse:
        async with places:
            form = await form_of(request)
            if len(form.files) > 1:
                raise Refused(400, f"One image is explained at a time; the request holds {len(form.files)}.")
            return JSONResponse(await served.ask(lambda: served.explain(form.files[0])))


def _add_errors(app: FastAPI, root: Path) -> None:
    """Every error is {"error": a sentence}."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": error.reason}, error.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        reason = {404: "There is nothing here.", 405: "This address is not asked in this way."}
        said = reason.get(error.status_code, error.detail)
        return JSONResponse({"error": said}, error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "The request ended before it was whole."}, 400)

    @app.exception_handler(MedcilError)
    async def changed(request: Request, error: MedcilError) -> JSONResponse:
        """The folder is no longer as it was."""
        return JSONResponse({"error": told(error, root)}, 409)
