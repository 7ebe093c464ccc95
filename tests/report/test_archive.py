"""A suite's runs in one file: the same tables, nothing of the machine, a source of runs for rankings."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medcil.cli.main import app
from medcil.report.leaderboard import build_leaderboard
from medcil.report.results import read_results
from medcil.report.runs import read_archive, read_run, write_archive
from medcil.report.suite import write_tables

from ..errors.raises import raises
from .fake_results import metrics_of, suite_of, write_fake_results, write_run

NETWORK = {"weights": "/somebody/resnet18.safetensors"}
COMMON = {
    "data": {"name": "phantom", "root": "/somebody/images"},
    "method": {"name": "balanced"},
    "network": NETWORK,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    suite = suite_of(
        common=COMMON, rows={"balanced": {}, "ucir": {}}, settings={"3-2": {}}, published={}, figures=[]
    )
    folder = write_fake_results(tmp_path / "out", suite, set=["training.epochs=2"])
    for run in (tmp_path / "out/runs").iterdir():
        (run / "environment.json").write_text(json.dumps({"git_commit": "a1" * 20}))
        (run / "data.json").write_text(json.dumps({"train": {"images": 7}}))
    return folder


def rows(text: str) -> list[str]:
    return [line.split("](<")[0] + line.split(">)")[-1] for line in text.splitlines()]


def test_an_archive_gives_the_same_tables_as_the_runs(folder, tmp_path):
    archive = tmp_path / "made"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(archive)])
    assert result.exit_code == 0, result.output
    write_tables(read_results(folder))
    first, again = ((place / "table.md").read_text(encoding="utf-8") for place in (folder, archive))
    assert rows(again) == rows(first)
    assert "commit a1a1a1a1a" in again
    assert "--set training.epochs=2" in again
    assert "[0](<runs.jsonl#L1>)" in again
    assert sorted(path.name for path in archive.iterdir() if path.is_file()) == [
        "index.html",
        "runs.jsonl",
        "suite.yaml",
        "table.md",
    ]
    assert 'href="runs.jsonl#L1"' in (archive / "index.html").read_text(encoding="utf-8")


def test_a_line_is_the_run_without_the_paths_of_the_machine(folder, tmp_path):
    write_archive(folder, tmp_path / "made")
    text = (tmp_path / "made/runs.jsonl").read_text()
    assert "somebody" not in text
    first = read_archive(tmp_path / "made/runs.jsonl")[0]
    assert first.content["places"] == [["balanced", "3-2", 0]]
    assert first.content["config"]["network"]["weights"] == "resnet18.safetensors"
    assert first.content["data"] == {"train": {"images": 7}}
    run, archived = read_run(tmp_path / "out/runs/0000"), read_run(first)
    assert archived.steps == run.steps
    assert archived.summary == run.summary
    assert archived.environment == run.environment


def test_matrices_of_many_classes_are_left_out(tmp_path):
    suite = suite_of(
        common=COMMON, rows={"balanced": {}}, settings={"3-2": {}}, orders=[0], published={}, figures=[]
    )
    folder = write_fake_results(tmp_path / "out", suite)
    names = [str(i) for i in range(24)]
    metrics = metrics_of(0.9, 0, sizes=(20, 4), names=names)
    (tmp_path / "out/runs/0000/metrics.json").write_text(json.dumps(metrics))
    write_archive(folder, tmp_path / "made")
    (run,) = read_archive(tmp_path / "made/runs.jsonl")
    assert [step["confusion"] is None for step in run.content["metrics"]["steps"]] == [False, True]


def test_runs_of_an_earlier_archive_stay_unless_they_were_computed_again(folder, tmp_path):
    archive = tmp_path / "made"
    write_archive(folder, archive)
    index = json.loads((folder / "runs.json").read_text())
    (folder / "runs.json").write_text(json.dumps(index | {"runs": index["runs"][:1]}))
    metrics = tmp_path / "out/runs/0000/metrics.json"
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"acc_micro": 0.123}))
    write_archive(folder, archive)
    runs = read_archive(archive / "runs.jsonl")
    assert len(runs) == 6
    assert {tuple(place) for run in runs for place in run.content["places"]} == {
        (row, "3-2", order) for row in ("balanced", "ucir") for order in (0, 1, 2)
    }
    assert read_results(archive).values("balanced", "3-2", "acc_micro").values[0] == pytest.approx(12.3)


def test_other_folders_are_not_written_into(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with raises("output.folder.exists"):
        write_archive(folder, tmp_path / "mine")
    write_archive(folder, tmp_path / "made")
    with raises("suite.results.missing"):
        write_archive(tmp_path / "made", tmp_path / "other")


def test_a_leaderboard_ranks_archived_runs_beside_run_directories(folder, tmp_path):
    write_archive(folder, tmp_path / "archives/made")
    write_run(tmp_path / "runs/mine", metrics_of(0.5, 0, label="mine"), method={"name": "finetune"})
    results = build_leaderboard([tmp_path / "archives", tmp_path / "runs"], tmp_path / "board")
    (setting,) = results.settings
    paths = [run.path for _, _, run in results.every_run(setting)]
    assert "../runs/mine" in paths
    assert "../archives/made/runs.jsonl#L1" in paths


@pytest.mark.parametrize("line", ["{", "[]"])
def test_a_damaged_line_is_named(folder, tmp_path, line):
    write_archive(folder, tmp_path / "made")
    file = tmp_path / "made/runs.jsonl"
    file.write_text(file.read_text() + line + "\n")
    with raises("run.archive.damaged", "Line 7"):
        read_results(tmp_path / "made")
