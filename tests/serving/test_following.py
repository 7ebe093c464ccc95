"""A server answers with whatever version is current, from the next request on."""

import shutil
from pathlib import Path

import pytest

from medcil.clinic.model_dir import ModelFolder
from medcil.clinic.predict import predict
from medcil.clinic.update import rollback
from medcil.serving.app import make_app
from medcil.training.state import save_state

from ..clinic.generated import reseal
from ..small import with_readout
from .conftest import CPU, picture
from .test_api import RED, SMALL, ask, files


def test_the_server_follows_the_model(model, tmp_path):
    """Gone back, promoted again, and with other exemplars, as `erase` leaves them: each time from the next
    request on."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    app, sent = make_app(copy, SMALL, execution=CPU), files(("a.png", picture(RED)))
    for version, n_classes in (("v2", 4), ("v1", 3), ("v2", 4)):
        rollback(copy, version)
        answer = ask(app, "POST", "/api/predict", files=sent).json()
        assert (answer["version"], len(answer["rows"][0]["classes"])) == (version, n_classes)
        told = ask(app, "GET", "/api/model").json()
        assert (told["version"], told["current"], told["behind"]) == (version, version, None)
        assert len(told["classes"]) == len(told["priors"]["training"]) == n_classes
        expected = predict(copy, [_written(tmp_path, picture(RED))], execution=CPU).rows[0]
        assert answer["rows"][0]["likeness"] == pytest.approx(expected.likeness, abs=1e-6)
    folder, place, before = ModelFolder(copy), copy / "versions/v2", expected.likeness
    state = folder.version("v2").load_state()
    other = with_readout(state, class_means=state.readout.class_means.roll(1, 1))
    shutil.rmtree(place / "state")
    save_state(other, place / "state", folder.store)
    reseal(copy)
    answer = ask(app, "POST", "/api/predict", files=sent).json()
    expected = predict(copy, [_written(tmp_path, picture(RED))], execution=CPU).rows[0]
    assert answer["rows"][0]["likeness"] == pytest.approx(expected.likeness, abs=1e-6)
    assert expected.likeness != pytest.approx(before, abs=1e-3)


def _written(folder: Path, content: bytes) -> Path:
    (folder / "a.png").write_bytes(content)
    return folder / "a.png"


def test_what_cannot_be_loaded_now_is_tried_again(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    app = make_app(copy, SMALL, execution=CPU)
    path = copy / "versions/v1/calibration.json"
    content = path.read_bytes()
    rollback(copy, "v1")
    path.unlink()
    for _ in range(2):
        told = ask(app, "GET", "/api/model").json()
        assert (told["version"], told["current"]) == ("v2", "v1")
        assert "missing" in told["behind"]
    path.write_bytes(content)
    told = ask(app, "GET", "/api/model").json()
    assert (told["version"], told["behind"]) == ("v1", None)


def test_a_version_that_cannot_be_loaded_holds_up_no_other(model, tmp_path):
    """Each request is answered by what is current then, also a moment after a broken one was."""
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    shutil.copytree(copy / "versions/v1", copy / "versions/v3")
    reseal(copy)
    (copy / "versions/v1/state/manifest.json").write_bytes(b"damaged")
    app, sent = make_app(copy, SMALL, execution=CPU), files(("a.png", picture(RED)))
    for current, answers in (("v1", "v2"), ("v3", "v3"), ("v1", "v3"), ("v2", "v2"), ("v1", "v2")):
        promote(copy, current)
        assert ask(app, "POST", "/api/predict", files=sent).json()["version"] == answers
        told = ask(app, "GET", "/api/model").json()
        assert (told["version"], told["current"]) == (answers, current)
        if current == answers:
            assert told["behind"] is None
        else:
            assert "versions/v1/state/manifest.json was changed or damaged" in told["behind"]


def promote(model: Path, version: str) -> None:
    """Of any version: `rollback` refuses one that is damaged already."""
    folder = ModelFolder(model)
    folder.write(folder.hashes, version)


def test_the_past_is_that_of_the_version_that_is_current_now(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    app = make_app(copy, SMALL, execution=CPU)
    rollback(copy, "v1")
    past = ask(app, "GET", "/api/history").json()["versions"]
    assert [(one["version"], one["is_current"], one["is_served"]) for one in past] == [
        ("v2", False, False),
        ("v1", True, True),
    ]


def test_a_card_that_is_no_text_stops_no_answer(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    app = make_app(copy, SMALL, execution=CPU)
    (copy / "versions/v1/card.md").write_bytes(b"caf\xe9")
    reseal(copy)
    rollback(copy, "v1")
    told = ask(app, "GET", "/api/model").json()
    assert (told["version"], told["card"]) == ("v1", "caf\ufffd")


def test_a_file_of_shares_must_fit_the_new_version_too(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    shares = tmp_path / "clinic.csv"
    shares.write_text("alpha,0.7\nbeta,0.1\ngamma,0.1\ndelta,0.1\n")
    app = make_app(copy, SMALL, prior=shares, execution=CPU)
    rollback(copy, "v1")
    told = ask(app, "GET", "/api/model").json()
    assert (told["version"], told["current"]) == ("v2", "v1")
    assert "clinic.csv" in told["behind"]
    assert str(tmp_path) not in told["behind"]
