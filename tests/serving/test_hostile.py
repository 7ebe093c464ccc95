"""Two thousand requests that mean harm: every one gets an answer, and none gets anywhere."""

import asyncio
import json
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest

from medcil.serving.app import PAGE_FILES, make_app
from medcil.serving.uploads import UploadLimits

from ..clinic.generated import content as files_of
from .conftest import CPU
from .hostile import GOOD, hostile_request

N_REQUESTS = 2000
SMALL = UploadLimits(file_bytes=20_000, request_bytes=60_000, files=4)
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.system", "subprocess.Popen")
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
watches: list[list[tuple]] = []


def note(event: str, arguments: tuple) -> None:
    """Whoever in the process asks the system for it."""
    is_writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if watches and (is_writing or event in EVENTS or event in NETWORK):
        watches[-1].append((event, arguments))


@pytest.fixture(scope="module")
def hook() -> None:
    sys.addaudithook(note)  # it cannot be taken back


@contextmanager
def watched():
    """Everything that is written, started or connected to."""
    watches.append([])
    try:
        yield watches[-1]
    finally:
        watches.pop()


def test_the_watch_sees(hook, tmp_path):
    with watched() as seen:
        (tmp_path / "a").write_text("b")
        (tmp_path / "a").read_text()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect(("127.0.0.1", 9))  # sends nothing
    assert [event for event, _ in seen] == ["open", "socket.connect"]


def test_hostile_requests_get_nowhere(hook, model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    app = make_app(model, SMALL, execution=CPU)
    before, draw = files_of(model), random.Random(7)
    answers: list[tuple[httpx.Request, httpx.Response]] = []

    async def send_all() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        for _ in range(N_REQUESTS):
            request = hostile_request(draw)
            answer = await transport.handle_async_request(request)
            await answer.aread()
            answers.append((request, answer))

    asyncio.run(_once(httpx.ASGITransport(app)))  # what is imported late is imported now
    with watched() as seen:
        asyncio.run(send_all())
    assert seen == []
    assert list(tmp_path.iterdir()) == []
    assert files_of(model) == before
    statuses = Counter(answer.status_code for _, answer in answers)
    assert not [status for status in statuses if status >= 500], statuses
    assert {200, 400, 403, 404, 405, 413, 415, 422} <= set(statuses), statuses
    for request, answer in answers:
        _check(request, answer)


async def _once(transport: httpx.ASGITransport) -> None:
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for address in ("/api/predict", "/api/explain"):
            for content in (GOOD, bytes(128) + b"DICM" + b"\xff" * 400):
                await client.post(address, files=[("files", ("a.png", content))])


def _check(request: httpx.Request, answer: httpx.Response) -> None:
    assert b"root:" not in answer.content
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    path = request.url.raw_path.decode().partition("?")[0]
    if request.method == "HEAD":  # never has a body
        return
    if answer.status_code >= 400:
        said = json.loads(answer.content)
        assert list(said) == ["error"]
        assert said["error"]
    elif request.method == "GET":
        assert path in PAGE_FILES or path in ("/api/model", "/api/history")
    elif path == "/api/predict":
        for row in json.loads(answer.content)["rows"]:
            assert row["file"].isprintable()
            assert not {"/", "\\"} & set(row["file"].replace("\\x", "").replace("\\u", "")), row["file"]
            assert (row["error"] is None) == ("predicted" in row)
            assert row["error"] is None or row["error"].isprintable()


def test_a_client_that_leaves_is_no_error(model):
    app = make_app(model, SMALL, execution=CPU)
    scope = {"type": "http", "method": "POST", "path": "/api/predict", "raw_path": b"/api/predict"}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http"}
    scope["headers"] = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=b")]
    coming = [{"type": "http.request", "body": b"--b\r\n", "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return coming.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400
