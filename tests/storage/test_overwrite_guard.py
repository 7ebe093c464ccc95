"""What a command may replace, and that nothing is put into a model folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from medcil.cli.main import main
from medcil.storage.overwrite_guard import refuse_other_files

from ..clinic.generated import content
from ..clinic.tiny_model import NAMES, tiny_state, write_model
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
        "report": [given / "run", "-o", out / "report.html"],
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


@pytest.mark.parametrize("command", PAGES)
def test_no_file_of_anyone_else_is_replaced(command, told, tmp_path):
    """Each of the files that the command writes, with something else under its name."""
    assert told(command, tmp_path / "clean") == (0, "")
    written = content(tmp_path / "clean")
    assert len(written) >= 3
    for number, name in enumerate(written):
        other = tmp_path / str(number) / name
        other.parent.mkdir(parents=True)
        other.write_text("my own")
        code, first = told(command, tmp_path / str(number))
        assert code == 4, name
        assert f"{other} is there and was not written by this command" in first
        assert content(tmp_path / str(number)) == {name: b"my own"}


@pytest.mark.parametrize("command", PAGES)
def test_its_own_files_are_written_again(command, told, tmp_path, monkeypatch):
    """Also where it was killed after any of them."""
    in_order = []

    def replace(source: Path, target: Path) -> None:
        in_order.append(target.relative_to(tmp_path).as_posix())
        os.rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", replace)
        assert told(command, tmp_path) == (0, "")
    written = content(tmp_path)
    assert sorted(in_order) == sorted(written)
    for n_kept in {1, len(in_order) // 2, len(in_order) - 1}:
        for name in in_order[n_kept:]:
            (tmp_path / name).unlink()
        assert told(command, tmp_path) == (0, "")
        assert content(tmp_path) == written


def test_a_page_of_another_kind_is_left(told, tmp_path):
    told("compare", tmp_path / "compared")
    told("explain", tmp_path / "explained")
    for command, page in (("compare", "explained/index.html"), ("explain", "compared/index.html")):
        before = content(tmp_path)
        code, first = told(command, (tmp_path / page).parent)
        assert (code, content(tmp_path)) == (4, before)
        assert f"{tmp_path / page} is there" in first


def test_pages_of_several_reports_lie_side_by_side(given, tmp_path):
    """Their figures are the newest's; a page of anyone else does not make figures ours."""
    for name in ("one.html", "two.html", "one.html"):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(given / "run"), "-o", str(tmp_path / name)])
        assert not ended.value.code
    for name in ("one.html", "two.html"):
        (tmp_path / name).write_text("my own")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(given / "run"), "-o", str(tmp_path / "three.html")])
    assert ended.value.code == 4


def test_a_page_that_was_deleted_from_its_run_is_written_again(given, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(given / "run", run)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(run)])
        assert not ended.value.code
        assert (run / "figures/accuracy.svg").exists()
        (run / "report.html").unlink()


def test_a_leaderboard_of_before_is_written_again(told, tmp_path):
    """Its page named the generator that pages of suites name."""
    assert told("compare", tmp_path) == (0, "")
    page, mark = tmp_path / "index.html", 'content="medcil {}"'
    page.write_text(page.read_text().replace(mark.format("compare"), mark.format("results")))
    assert told("compare", tmp_path) == (0, "")


def test_two_sweeps_that_begin_at_once_do_not_take_each_other_for_strangers(tmp_path, monkeypatch):
    """The other one writes its record after this one has looked for the first of the files."""
    record, copy = tmp_path / "runs.json", tmp_path / "suite.yaml"
    is_there = os.path.lexists

    def looked_for(path: Path) -> bool:
        found = is_there(path)
        record.write_text('{"suite": "smoke"}')
        copy.write_text("title: smoke")
        return found

    monkeypatch.setattr("os.path.lexists", looked_for)
    refuse_other_files({record: b'"suite": ', copy: None})


def test_a_suite_keeps_its_page(told, tmp_path):
    """A leaderboard looks like the page of a suite, and is another."""
    (tmp_path / "index.html").write_text('<meta name="generator" content="medcil results">')
    assert told("compare", tmp_path)[0] == 4


def test_a_run_is_not_begun_where_its_page_would_be_refused(told, tmp_path):
    for command in ("run", "demo"):
        (tmp_path / command).mkdir()
        (tmp_path / command / "report.html").write_text("my own")
        code, first = told(command, tmp_path / command)
        assert (code, content(tmp_path / command)) == (4, {"report.html": b"my own"})
        assert "report.html is there" in first


@pytest.mark.parametrize(
    ("command", "file"),
    [
        *(("bench", f"smoke/{name}") for name in ("runs.json", "suite.yaml", "index.html", "table.md")),
        *(("tune", name) for name in ("tuned.yaml", "tuning.md")),
    ],
)
def test_a_sweep_or_a_search_replaces_nothing_of_anyone_else(command, file, told, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("my own")
    code, first = told(command, tmp_path)
    assert (code, content(tmp_path)) == (4, {file: b"my own"})
    assert "is there and was not written by this command" in first


def test_figures_lie_beside_the_page_in_a_folder_that_is_there(given, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(given / "run"), "-o", str(tmp_path / "there")])
    assert not ended.value.code
    assert {path.name for path in tmp_path.iterdir()} == {"there"}
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"report.html", "figures"}


@pytest.mark.parametrize("command", [*PAGES, "phantom"])
def test_what_may_not_be_written_is_said_first(command, told, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    with ordinary_user():
        code, first = told(command, tmp_path / "closed" / ("new" if command == "phantom" else ""))
    assert code == 2
    assert f"{tmp_path / 'closed'} may not be written to" in first


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
    assert "lies in a model folder" in first
    assert "which holds versions and nothing else: give another place." in first
    assert content(given) == before


def test_a_link_into_a_model_folder_is_no_way_in(given, told, tmp_path):
    (tmp_path / "link").symlink_to(given / "model")
    assert told("explain", tmp_path / "link" / "there")[0] == 2
    assert not (given / "model" / "there").exists()
