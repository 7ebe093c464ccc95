"""Kept records say which commit computed them, where the run itself could not."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs"))
import keep_records

from ..report.fake_results import suite_of, write_fake_results

COMMIT, OTHER = "a1" * 20, "b2" * 20


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three runs of a suite called `made`, computed from a copy without .git."""
    network = {"weights": None}
    common = {"data": {"name": "phantom"}, "method": {"name": "balanced"}, "network": network}
    suite = suite_of(
        common=common, rows={"balanced": {}}, settings={"3-2": {}}, published={}, figures=[], compare=[]
    )
    write_fake_results(tmp_path / "results", suite)
    for run in (tmp_path / "results/runs").iterdir():
        (run / "environment.json").write_text(json.dumps({"device_kind": "cuda", "git_commit": None}))
        (run / "data.json").write_text("{}")
    return tmp_path / "results"


def kept(results: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    into = results.parent / "kept"
    monkeypatch.setattr(sys, "argv", ["keep_records.py", str(results), str(into), "made", *options])
    keep_records.main()
    return into


def commits(folder: Path) -> list[str | None]:
    files = sorted(folder.glob("runs/*/environment.json"))
    return [json.loads(file.read_text())["git_commit"] for file in files]


def table(folder: Path) -> str:
    return (folder / "made/tables/made.md").read_text()


def test_the_commit_is_kept_with_the_runs_and_named_by_the_table(results, monkeypatch):
    into = kept(results, monkeypatch, "--commit", COMMIT)
    assert commits(into) == [COMMIT] * 3
    assert json.loads((into / "runs/0000/environment.json").read_text())["device_kind"] == "cuda"
    assert f"- The code is that of commit {COMMIT[:9]}.\n" in table(into)


def test_runs_of_no_known_commit_are_kept_as_they_are(results, monkeypatch):
    into = kept(results, monkeypatch)
    assert commits(into) == [None] * 3
    assert "commit" not in table(into)


def test_a_run_kept_again_keeps_its_commit_as_long_as_it_is_the_same(results, monkeypatch):
    kept(results, monkeypatch, "--commit", COMMIT)
    metrics = results / "runs/0001/metrics.json"
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"acc_micro": 0.5}))
    assert commits(kept(results, monkeypatch)) == [COMMIT, None, COMMIT]
    assert commits(kept(results, monkeypatch, "--commit", OTHER)) == [OTHER] * 3


def test_a_run_that_knows_another_commit_is_refused_before_anything_is_copied(results, monkeypatch):
    (results / "runs/0001/environment.json").write_text(json.dumps({"git_commit": OTHER}))
    with pytest.raises(SystemExit, match=f"^Leave --commit out, or give {OTHER}: 0001"):
        kept(results, monkeypatch, "--commit", COMMIT)
    assert not (results.parent / "kept").exists()
    assert commits(kept(results, monkeypatch, "--commit", OTHER)) == [OTHER] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--commit", "a1b2c3d"], "all forty digits"), (["--commit", COMMIT, "--draw"], "--draw")],
)
def test_a_commit_that_cannot_be_meant_is_refused(results, monkeypatch, capsys, options, said):
    with pytest.raises(SystemExit):
        kept(results, monkeypatch, *options)
    assert said in capsys.readouterr().err
    assert not (results.parent / "kept").exists()
