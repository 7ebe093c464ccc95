"""The JSON API, against the Python API on the same images."""

import asyncio
import base64
import io
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.predict import predict
from medcil.errors import InvalidInput
from medcil.serving.app import make_app
from medcil.serving.model import ServedModel, overlay
from medcil.serving.uploads import UploadLimits, shown_name

from .conftest import CPU, picture

RED, GREEN = (200, 60, 60), (60, 200, 60)
SMALL = UploadLimits(file_bytes=20_000, request_bytes=60_000, files=3)


@pytest.fixture(scope="module")
def app(model):
    return make_app(model, SMALL, execution=CPU)


def ask(app, method: str, address: str, **options) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, address, **options)

    return asyncio.run(once())


def files(*given: tuple[str, bytes]) -> list:
    return [("files", pair) for pair in given]


@pytest.mark.parametrize("prior", ["uniform", "training"])
def test_the_answers_are_those_of_predict(app, model, tmp_path, prior):
    images = {
        "red.png": picture(RED),
        "green.jpg": picture(GREEN, file_format="JPEG"),
        "bad.png": b"no image",
    }
    for name, content in images.items():
        (tmp_path / name).write_bytes(content)
    expected = predict(model, [tmp_path / name for name in images], prior=prior, execution=CPU)
    answer = ask(app, "POST", "/api/predict", files=files(*images.items()), data={"prior": prior})
    assert answer.status_code == 200
    content = answer.json()
    assert (content["version"], content["prior"]) == ("v2", prior)
    assert [row["file"] for row in content["rows"]] == list(images)
    for row, wanted in zip(content["rows"][:2], expected.rows[:2], strict=True):
        found = {of["name"]: of["probability"] for of in row["classes"]}
        by_name = dict(zip(expected.class_names, wanted.probabilities, strict=True))
        assert found == pytest.approx(by_name, abs=1e-6)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert (row["predicted"], row["is_unlike"], row["error"]) == (
            wanted.predicted,
            wanted.is_unlike,
            None,
        )
    assert "cannot be read as an image" in content["rows"][2]["error"]
    assert "classes" not in content["rows"][2]


def test_a_file_of_shares_joins_the_priors_and_a_request_names_none_of_its_own(model, tmp_path):
    shares = tmp_path / "clinic.csv"
    shares.write_text("alpha,0.7\nbeta,0.1\ngamma,0.1\ndelta,0.1\n")
    app = make_app(model, SMALL, prior=shares, execution=CPU)
    assert list(ask(app, "GET", "/api/model").json()["priors"]) == ["uniform", "training", "clinic.csv"]
    sent = files(("a.png", picture(RED)))
    uniform, clinic = (
        {of["name"]: of["probability"] for of in answer.json()["rows"][0]["classes"]}
        for answer in (
            ask(app, "POST", "/api/predict", files=sent, data={"prior": name})
            for name in ("uniform", "clinic.csv")
        )
    )
    # Bayes: the odds of two classes change by the ratio of their shares.
    odds = [p["alpha"] / p["beta"] for p in (uniform, clinic)]
    assert odds[1] == pytest.approx(7 * odds[0], rel=1e-6)
    refused = ask(app, "POST", "/api/predict", files=sent, data={"prior": str(shares)})
    assert refused.status_code == 400
    assert "no such prior" in refused.json()["error"]


def test_the_model_and_its_past_are_told(app, model):
    told = ask(app, "GET", "/api/model").json()
    assert (told["version"], told["classes"]) == ("v2", ["alpha", "beta", "gamma", "delta"])
    assert "not a medical device" in told["notice"]
    assert told["card"] == (model / "versions/v2/card.md").read_text()
    assert told["limits"] == {"file_bytes": 20_000, "request_bytes": 60_000, "files": 3}
    newest, first = ask(app, "GET", "/api/history").json()["versions"]
    assert (newest["version"], newest["parent"], newest["classes_added"]) == ("v2", "v1", ["delta"])
    assert (newest["is_served"], first["is_served"], first["forgetting"]) == (True, False, None)
    assert newest["forgetting"] == json.loads((model / "versions/v2/forgetting.json").read_text())
    everything = json.dumps([told, newest, first])
    assert str(model.parent) not in everything


def decoded(address: str) -> np.ndarray:
    kind, _, content = address.partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_an_explanation_shows_what_was_seen_and_exemplars_that_are_in_the_folder(app, model):
    sent = files(("red.png", picture(RED)))
    row = ask(app, "POST", "/api/predict", files=sent).json()["rows"][0]
    told = ask(app, "POST", "/api/explain", files=sent).json()
    for of, wanted in zip(told["classes"], row["classes"][:2], strict=True):
        assert of["name"] == wanted["name"]
        assert of["probability"] == pytest.approx(wanted["probability"], abs=1e-6)
    seen = decoded(told["seen"])
    assert np.abs(seen.mean(axis=(0, 1)) - RED).max() < 12
    state = model / "versions/v2/state"
    listed = json.loads((state / "manifest.json").read_text())["exemplars"]
    for of in told["classes"]:
        assert decoded(of["saliency"]).shape == (*seen.shape[:2], 4)
        kept = [
            np.asarray(Image.open(model / "images" / e["file"])) for e in listed if e["class"] == of["name"]
        ]
        assert len(of["nearest"]) == 4
        for near in of["nearest"]:
            assert any(np.array_equal(decoded(near["image"]), exemplar) for exemplar in kept)


def test_without_captum_there_is_nothing_to_ask_for(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    app = make_app(model, SMALL, execution=CPU)
    assert ask(app, "GET", "/api/model").json()["explains"] is False
    answer = ask(app, "POST", "/api/explain", files=files(("red.png", picture(RED))))
    assert (answer.status_code, answer.json()) == (404, {"error": "There is nothing here."})


def test_the_overlay_is_red_for_and_blue_against_and_clear_where_nothing_speaks():
    laid = overlay(np.array([[2.0, -1.0], [0.0, 0.5]]), strongest=2.0)
    red, blue, clear, weak = laid.reshape(4, 4).tolist()
    assert (red[0] > red[2], blue[2] > blue[0], weak[0] > weak[2]) == (True, True, True)
    assert [red[3], blue[3], clear[3], weak[3]] == [190, 95, 0, round(190 / 4)]
    assert overlay(np.zeros((1, 1)), strongest=0.0)[0, 0, 3] == 0


def test_what_is_too_large_is_refused(app):
    large = files(("fine.png", picture(RED)), ("large.png", b"x" * 20_001))
    rows = ask(app, "POST", "/api/predict", files=large).json()["rows"]
    assert rows[0]["error"] is None
    assert "more than 20,000 bytes" in rows[1]["error"]
    many = ask(app, "POST", "/api/predict", files=files(*[("a.png", b"x")] * 4))
    assert (many.status_code, "more than 3 files" in many.json()["error"]) == (413, True)
    one = ask(app, "POST", "/api/explain", files=files(("a.png", b"x"), ("b.png", b"x")))
    assert (one.status_code, "One image" in one.json()["error"]) == (400, True)
    unreadable = ask(app, "POST", "/api/explain", files=files(("a.png", b"x")))
    assert (unreadable.status_code, "cannot be read" in unreadable.json()["error"]) == (422, True)


def test_a_large_request_is_refused_while_it_comes_in(app):
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        for _ in range(10_000):
            sent += 1000
            yield b"x" * 1000

    kind = {"content-type": "multipart/form-data; boundary=b"}
    answer = ask(app, "POST", "/api/predict", content=endless(), headers=kind)
    assert (answer.status_code, "more than 60,000 bytes" in answer.json()["error"]) == (413, True)
    assert sent <= 62_000


def test_a_request_that_never_ends_is_given_up(model):
    async def slow() -> AsyncIterator[bytes]:
        yield b"--b\r\n"
        await asyncio.sleep(30)

    app = make_app(model, UploadLimits(seconds=0.05), execution=CPU)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    assert ask(app, "POST", "/api/predict", content=slow(), headers=kind).status_code == 408


def test_requests_wait_for_each_other(model, monkeypatch):
    app = make_app(model, UploadLimits(at_once=3), execution=CPU)
    now, most, threads = 0, 0, set()

    def counted(self, given, wanted) -> dict:
        nonlocal now, most
        now += 1
        most = max(most, now)
        threads.add(threading.current_thread().name)
        time.sleep(0.01)
        now -= 1
        return {"files": [file.name for file in given]}

    monkeypatch.setattr(ServedModel, "predict", counted)

    async def all_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            posts = (client.post("/api/predict", files=files((f"{i}.png", b"x"))) for i in range(8))
            return await asyncio.gather(*posts)

    answers = asyncio.run(all_at_once())
    assert [answer.json()["files"] for answer in answers] == [[f"{i}.png"] for i in range(8)]
    assert (most, len(threads)) == (1, 1)


def test_other_pages_are_kept_out(app, model):
    foreign = ask(app, "GET", "/api/model", headers={"host": "rebound.example"})
    assert (foreign.status_code, "localhost" in foreign.json()["error"]) == (400, True)
    sent = files(("a.png", picture(RED)))
    for origin, status in (("http://evil.example", 403), ("null", 403), ("http://localhost:8000", 200)):
        answer = ask(app, "POST", "/api/predict", files=sent, headers={"origin": origin})
        assert answer.status_code == status
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
    reachable = make_app(model, SMALL, execution=CPU, hosts={"station-3"})
    names = {"station-3:8000": 200, "Station-3": 200, "10.1.2.3:8000": 200, "[fe80::1]:80": 200}
    for name, status in {**names, "station-3.rebound.example": 400, "10.1.2.3.rebound.example": 400}.items():
        assert ask(reachable, "GET", "/api/model", headers={"host": name}).status_code == status, name


def test_a_folder_that_changed_under_the_server_is_said_to_have(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    app = make_app(copy, SMALL, execution=CPU)
    (copy / "versions/v1/metrics.json").write_text("{")
    answer = ask(app, "GET", "/api/history")
    newest, broken = answer.json()["versions"]
    assert (newest["version"], newest["error"], newest["parent"]) == ("v2", None, "v1")
    assert (broken["version"], broken["is_served"], broken["is_current"]) == ("v1", False, False)
    assert "versions/v1/metrics.json was changed or damaged" in broken["error"]
    assert str(tmp_path) not in answer.text
    (copy / "versions/v1/calibration.json").unlink()
    folder = ModelFolder(copy)
    folder.write(folder.hashes, "v1")
    told = ask(app, "GET", "/api/model").json()
    assert (told["version"], told["current"]) == ("v2", "v1")
    assert "calibration.json is missing" in told["behind"]
    assert str(tmp_path) not in told["behind"]
    (copy / "model.json").write_text("{")
    answer = ask(app, "POST", "/api/predict", files=files(("a.png", picture(RED))))
    assert (answer.status_code, answer.json()["version"]) == (200, "v2")
    assert ask(app, "GET", "/api/history").status_code == 409


def test_no_model_no_server(tmp_path):
    with pytest.raises(InvalidInput, match="does not exist"):
        make_app(tmp_path / "none")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("lesion 1.png", "lesion 1.png"),
        ("läsion.png", "läsion.png"),
        ("../../etc/passwd", "passwd"),
        ("C:\\scans\\me\\a.png", "a.png"),
        ("folder/", "folder"),
        ("..", "image"),
        ("", "image"),
        ("\x1b[31mred.png", "\\x1b[31mred.png"),
        ("a" * 500, "a" * 120),
    ],
)
def test_names_are_for_reading(sent, shown):
    assert shown_name(sent) == shown
