"""What `medcil serve` says and where it listens; the page's tests start it in earnest."""

import builtins
import socket

import pytest
import uvicorn

import medcil
from medcil.cli.main import main
from medcil.serving import app


@pytest.fixture
def listened(monkeypatch) -> list:
    """Where a server would have listened."""
    found = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: found.append(sockets[0].getsockname()))
    return found


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_by_default_only_this_machine_reaches_it(model, listened, capsys):
    assert run("serve", model, "--port", 0) == 0
    (host, port), told = listened[0], capsys.readouterr()
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}" in told.out
    assert told.err == ""


def test_its_equal_in_python(model, listened):
    addresses = []
    medcil.serve(model, port=0, watch=addresses.append)
    assert addresses == [f"http://127.0.0.1:{listened[0][1]}"]


def test_whoever_opens_it_to_others_is_warned(model, listened, capsys, monkeypatch):
    made, make_app = [], app.make_app
    monkeypatch.setattr(app, "make_app", lambda *args, **options: made.append(options) or make_app(*args))
    assert run("serve", model, "--port", 0, "--host", "0.0.0.0", "--name", "Page.Clinic.example") == 0
    assert made[0]["hosts"] == {"localhost", "0.0.0.0", socket.gethostname().lower(), "page.clinic.example"}
    assert listened[0][0] == "0.0.0.0"
    assert "no password" in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken_and_a_host_that_is_not_ours(model, listened, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run("serve", model, "--port", port) == 2
    assert f"Cannot listen on 127.0.0.1, port {port}" in " ".join(capsys.readouterr().err.split())
    assert run("serve", model, "--port", 0, "--host", "192.0.2.1") == 2
    assert listened == []


def test_no_model_and_no_server_library(tmp_path, capsys, monkeypatch):
    assert run("serve", tmp_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err
    whole = builtins.__import__

    def without(name, *rest, **options):
        if name == "uvicorn":
            raise ImportError(name="uvicorn")
        return whole(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run("serve", tmp_path) == 2
    assert "pip install 'medcil[serve]'" in capsys.readouterr().err
