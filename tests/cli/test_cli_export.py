"""The commands export and explain: what they print, write and refuse."""

import sys
from pathlib import Path

import pytest

from medcil.cli.main import main

from ..clinic.tiny_model import tiny_state, write_model


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "skin", tiny_state())


def ended(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and messages of a command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    return int(end.value.code or 0), " ".join(shown.out.split()), " ".join(shown.err.split())


def test_export_names_the_file_and_the_difference(model, capsys):
    code, out, _ = ended(capsys, "export", "skin")
    assert code == 0
    assert Path("skin.onnx").stat().st_size > 100_000
    assert "differ by at most" in out
    assert "on 60 images of the hold-out" in out
    assert "medcil predict skin.onnx IMAGES" in out


def test_explain_names_both_classes_and_the_page(model, capsys):
    image = next(model.rglob("*.png"))
    code, out, _ = ended(capsys, "explain", "skin", str(image), "-o", "why")
    assert code == 0
    assert "version v1" in out
    assert "why/index.html" in out
    assert Path("why/index.html").is_file()


def test_what_they_refuse_has_its_own_message_and_code(model, capsys):
    for command in (("export", "none"), ("explain", "none", "a.png")):
        code, _, err = ended(capsys, *command)
        assert code == 2
        assert "none does not exist" in err or "There is nothing at a.png" in err
    assert ended(capsys, "export", "skin", "--version", "v7")[0] == 2
    assert ended(capsys, "export", "skin", "--format", "tflite")[0] == 2
    Path("file").write_text("")
    code, _, err = ended(capsys, "export", "skin", "-o", "file/skin.onnx")
    assert code == 2
    assert "not a folder" in err
    code, _, err = ended(capsys, "export", "skin", "-o", ".")
    assert code == 2
    assert "is a folder" in err


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [("onnx", "export", "medcil[export]"), ("captum.attr", "explain", "medcil[explain]")],
)
def test_a_missing_library_is_named(missing, command, extra, model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    image = next(model.rglob("*.png"))
    code, _, err = ended(capsys, command, "skin", *([str(image)] if command == "explain" else []))
    assert code == 2
    assert missing.partition(".")[0] in err
    assert extra in err
    assert not Path("skin.onnx").exists()
