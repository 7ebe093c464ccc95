"""Which outputs a command may replace; nothing is written into a model folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from medcil.cli.main import main
from medcil.storage.overwrite_guard import MARKER, check_output_file, check_output_folder, claim_output_folder

from ..clinic.generated import content
from ..clinic.tiny_model import NAMES, tiny_state, write_model
from ..errors.raises import raises
from ..ordinary_user import ordinary_user
from ..report.fake_runs import write_run
from ..small import random_images

RECIPE = """
data: {name: phantom, side: 12, crop: 10}
scenario: {base: 4, increment: 3}
network: {backbone: resnet8_cifar}
training: {epochs: 1}
method: {name: balanced}
"""
PAGES = ("evaluate", "explain", "report", "compare")
FOLDERS = (*PAGES, "tune", "demo")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images, a run and a recipe; no test writes there."""
    root = tmp_path_factory.mktemp("given")
    write_model(root / "model", tiny_state())
    for i, pixels in enumerate(random_images(6, seed=4)):
        image = root / "data" / NAMES[i % 3] / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(image)
    write_run(root / "run")
    (root / "recipe.yaml").write_text(RECIPE)
    return root


@pytest.fixture
def told(given: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], tuple[int, str]]:
    """(command, folder to write to) -> its exit code and the first line of its message."""

    def run(command: str, out: Path) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words(command, given, out)])
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("images/s")]
        return int(ended.value.code or 0), lines[0] if lines else ""

    return run


def words(command: str, given: Path, out: Path) -> list[object]:
    image, recipe = given / "data" / NAMES[0] / "0.png", given / "recipe.yaml"
    rest: dict[str, list[object]] = {
        "evaluate": [given / "model", given / "data", "--draws", "2", "-o", out],
        "explain": [given / "model", image, "-o", out],
        "report": [given / "run", "-o", out],
        "compare": [given / "run", "-o", out],
        "predict": [given / "model", image, "-o", out / "predictions.csv"],
        "export": [given / "model", "-o", out / "model.onnx"],
        "run": [recipe, "-o", out],
        "tune": [recipe, "-o", out, "--trials", "1"],
        "bench": ["smoke", "-o", out],
        "demo": ["-o", out],
        "phantom": ["-o", out],
        "prepare": [given / "data", "-o", out, "--side", "8"],
        "check": [given / "data", "--json", out / "check.json"],
        "train": [given / "data", "-o", out],
    }
    return [command, *rest[command]]


def test_a_folder_is_free_where_it_is_new_or_empty_or_was_written_by_the_same_command(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        check_output_folder(folder, "evaluate")
        claim_output_folder(folder, "evaluate")
        (folder / "page.html").write_text("of evaluate")
        check_output_folder(folder, "evaluate")
        with raises("output.exists", str(folder), "evaluate"):
            (folder / MARKER).unlink()
            check_output_folder(folder, "evaluate")


def test_a_folder_of_another_command_is_refused(tmp_path):
    claim_output_folder(tmp_path, "explain")
    (tmp_path / "index.html").write_text("of explain")
    with raises("output.exists", "medcil evaluate"):
        claim_output_folder(tmp_path, "evaluate")
    assert content(tmp_path) == {MARKER: b"medcil explain\n", "index.html": b"of explain"}


def test_a_file_is_free_where_it_is_new_or_begins_like_one_of_the_command(tmp_path):
    table = tmp_path / "predictions.csv"
    check_output_file(table, b"file,predicted,")
    table.write_text("file,predicted,probability\n")
    check_output_file(table, b"file,predicted,")
    table.write_text("date,visit\n" * 100 + "file,predicted,")
    with raises("output.exists"):
        check_output_file(table, b"file,predicted,")
    with raises("output.is_a_folder"):
        check_output_file(tmp_path, b"file,predicted,")


@pytest.mark.parametrize("kind", ["pipe", "broken link"])
def test_what_is_no_file_is_neither_read_nor_replaced(kind, tmp_path):
    place = tmp_path / "predictions.csv"
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path / "nowhere")
    with raises("output.exists"):
        check_output_file(place, b"file,predicted,")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with raises("output.not_a_folder"):
            claim_output_folder(place, "evaluate")


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_holds_something_else_is_left_as_it_is(command, told, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, first = told(command, tmp_path)
    assert (code, content(tmp_path)) == (4, {"notes.txt": b"mine"})
    assert f"{tmp_path} is not empty" in first


def test_a_suite_owns_its_folder_among_the_results(told, tmp_path):
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke/notes.txt").write_text("mine")
    code, first = told("bench", tmp_path)
    assert (code, content(tmp_path)) == (4, {"smoke/notes.txt": b"mine"})
    assert f"{tmp_path / 'smoke'} is not empty" in first


@pytest.mark.parametrize("command", PAGES)
def test_its_own_files_are_written_again(command, told, tmp_path):
    """Also where it was killed after any of them: the marker is the first."""
    assert told(command, tmp_path) == (0, "")
    written = content(tmp_path)
    assert len(written) > 1
    for name in list(written)[1::2]:
        if name != MARKER:
            (tmp_path / name).unlink()
    assert told(command, tmp_path) == (0, "")
    assert content(tmp_path) == written


@pytest.mark.parametrize("command", PAGES)
def test_the_marker_is_the_first_file_a_command_writes(command, told, tmp_path, monkeypatch):
    in_order = []

    def replace(source: Path, target: Path) -> None:
        in_order.append(Path(target).relative_to(tmp_path).as_posix())
        os.rename(source, target)

    monkeypatch.setattr("os.replace", replace)
    assert told(command, tmp_path) == (0, "")
    assert in_order[0] == MARKER
    assert sorted(in_order) == sorted(content(tmp_path))


def test_a_report_in_its_run_needs_no_marker(given, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(given / "run", run)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(run)])
        assert not ended.value.code
        (run / "report.html").unlink()
    assert not (run / MARKER).exists()


@pytest.mark.parametrize("command", [*PAGES, "phantom"])
def test_what_may_not_be_written_is_said_first(command, told, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    with ordinary_user():
        code, first = told(command, tmp_path / "closed" / ("new" if command == "phantom" else ""))
    assert code == 2
    assert f"Cannot write to {tmp_path / 'closed'}" in first


@pytest.mark.parametrize(
    "command",
    [
        *(*PAGES, "predict", "export", "run", "tune", "bench", "demo", "phantom", "prepare", "check"),
        "train",
    ],
)
@pytest.mark.parametrize("place", ["there", "versions/v1/there"])
def test_nothing_is_put_into_a_model_folder(command, place, given, told):
    before = content(given)
    code, first = told(command, given / "model" / place)
    assert code == 2
    assert "is inside the model folder" in first
    assert content(given) == before


def test_a_link_into_a_model_folder_is_no_way_in(given, told, tmp_path):
    (tmp_path / "link").symlink_to(given / "model")
    assert told("explain", tmp_path / "link" / "there")[0] == 2
    assert not (given / "model" / "there").exists()
