"""`medcil bench`: what it prints, which code it ends with, what it leaves on the disk."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import medcil.experiments.launcher
import medcil.experiments.run
from medcil.experiments.launcher import Exit, Job
from medcil.experiments.suite import ResultsFolder, known_suites

from .tiny_suite import (
    ALL_EPOCHS,
    SUITE,
    SameProcess,
    ended_with,
    epochs_of,
    runs_of,
    starts_of,
    write_images,
    write_suite,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    write_images(folder / "own")
    write_suite(folder)
    return folder


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> SameProcess:
    launcher = SameProcess()
    monkeypatch.setattr(medcil.experiments.launcher, "make_launcher", lambda name, options, **where: launcher)
    return launcher


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    return ["bench", str(folder / "tiny.yaml"), "--data", str(folder / "own"), "--out", str(out), *more]


def program(folder: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "medcil", *arguments(folder, out, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_a_suite_ends_with_its_tables_and_a_second_call_does_nothing(folder, tmp_path, launcher, capsys):
    out = tmp_path / "out"
    assert ended_with(arguments(folder, out)) == 0
    shown = capsys.readouterr()
    assert str(out / "tiny" / "index.html") in shown.out.replace("\n", "")
    assert "balanced · 2-2 · order seed-2 finished, 4 of 4" in shown.err
    assert (out / "tiny" / "table.md").exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    started = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", "medcil", *arguments(folder, out)]
    again = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - started
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    imported = {line.rpartition("|")[2].strip() for line in again.stderr.splitlines()}
    assert not imported & {"torch", "timm"}
    assert seconds < 5
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before

    # What has gone is made again: a page from the runs, a run from its recipe.
    (out / "tiny" / "index.html").unlink()
    assert ended_with(arguments(folder, out)) == 0
    assert (out / "tiny" / "index.html").exists()
    assert len(launcher.started) == 4
    key = launcher.started[0]
    (out / "runs" / key / "metrics.json").unlink()
    assert ended_with(arguments(folder, out)) == 0
    assert launcher.started[4:] == [key]
    assert epochs_of(out / "runs" / key) == ALL_EPOCHS
    # Another request is not taken for the same.
    assert ended_with(arguments(folder, out, "--set", "training.epochs=1")) == 0
    assert len(launcher.started) == 9
    assert json.loads((out / "tiny" / "runs.json").read_text())["set"] == ["training.epochs=1"]


@pytest.mark.parametrize("where", ["orders", "setting"])
def test_class_orders_may_be_lists_of_classes(folder, tmp_path, launcher, where):
    """Once the runs were computed and the tables failed: a list is no key of a dictionary."""
    text = SUITE.replace("orders: [seed-1, seed-2]", "orders: [[c, a, d, b], [3, 2, 1, 0]]")
    if where == "setting":
        text = SUITE.replace("base: 2", "order: [c, a, d, b], base: 2")
    suite, out = write_suite(tmp_path, text), tmp_path / "out"
    words = ["bench", suite, "--data", folder / "own", "--out", out, "--only", "fine-tuning"]
    assert ended_with([*words, "--orders", "c-a-d-b"]) == 0
    [run] = runs_of(out)
    assert run["places"] == [["fine-tuning", "2-2", "c-a-d-b"]]
    metrics = json.loads((out / "tiny" / run["path"] / "metrics.json").read_text())
    assert metrics["class_names"] == ["c", "a", "d", "b"]
    assert "fine-tuning" in (out / "tiny" / "table.md").read_text()


def test_a_failed_run_is_named_at_the_end(folder, tmp_path, launcher, capsys):
    launcher.instead = lambda job: Exit(job.key, 1, "It burst.") if job.key == launcher.started[0] else None
    assert ended_with(arguments(folder, tmp_path / "out")) == 7
    told = capsys.readouterr().err
    assert "1 of 4 runs failed: fix the cause" in told
    assert (
        f"fine-tuning · 2-2 · order seed-1: It burst. ({tmp_path}/out/logs/{launcher.started[0]}.log)" in told
    )
    states = [run["state"] for run in runs_of(tmp_path / "out")]
    assert states == ["failed", "finished", "finished", "finished"]
    assert (tmp_path / "out" / "tiny" / "table.md").exists()
    assert not (tmp_path / "out" / "tiny" / "done.json").exists()


def test_no_results_are_announced_where_every_run_failed(folder, tmp_path, launcher, capsys):
    launcher.instead = lambda job: Exit(job.key, 1, "It burst.")
    assert ended_with(arguments(folder, tmp_path / "out")) == 7
    told = capsys.readouterr()
    assert "4 of 4 runs failed" in told.err
    assert "Results" not in told.out


def test_weights_that_do_not_fit_are_refused_before_images_are_prepared(folder, tmp_path, launcher, capsys):
    weights, out = tmp_path / "w.safetensors", tmp_path / "out"
    save_file({"conv.weight": torch.zeros(1)}, weights)
    words = arguments(folder, out, "--weights", str(weights), "--set", "network.backbone=resnet10t")
    assert ended_with(words) == 2
    assert "does not fit resnet10t" in capsys.readouterr().err.replace("\n", " ")
    assert not out.exists()


def test_a_finished_run_that_cannot_be_read_is_no_success(folder, tmp_path, launcher, capsys, monkeypatch):
    out = tmp_path / "out"
    some = ("--only", "balanced")
    assert ended_with(arguments(folder, out, *some)) == 0
    (out / "runs" / launcher.started[0] / "metrics.json").write_text('{"finished": true}')
    (out / "tiny" / "index.html").unlink()
    assert ended_with(arguments(folder, out, *some)) == 7
    told = capsys.readouterr().err
    assert "1 of 2 runs failed" in told
    assert "order seed-1: Unknown format" in told
    assert not (out / "tiny" / "done.json").exists()


def test_tables_are_there_before_features_are_computed(folder, tmp_path, launcher, monkeypatch):
    def breaks(found: Path) -> list[str]:
        assert (found / "table.md").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(medcil.experiments.run, "write_features_for_figures", breaks)
    assert ended_with(arguments(folder, tmp_path / "out", "--orders", "seed-1", "--only", "balanced")) == 130


def test_sigterm_stops_the_runs_like_ctrl_c(folder, tmp_path, launcher, capsys):
    def terminate(job: Job) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    launcher.instead = terminate
    before = signal.getsignal(signal.SIGTERM)
    assert ended_with(arguments(folder, tmp_path / "out")) == 130
    assert "Run the same command again" in capsys.readouterr().err
    assert launcher.is_stopped
    assert signal.getsignal(signal.SIGTERM) is before
    assert [run["state"] for run in runs_of(tmp_path / "out")] == ["unfinished"] * 4


def test_a_dry_run_lists_costs_and_writes_nothing(tmp_path, launcher, capsys):
    out = tmp_path / "out"
    assert (
        ended_with(["bench", "smoke", "--out", out, "--dry-run", "--only", "joint", "--orders", "0,1"]) == 0
    )
    shown = capsys.readouterr().out
    assert "2 runs · 2 to compute" in shown
    assert "Nothing was started" in shown
    assert not out.exists()
    assert launcher.started == []
    timed = tmp_path / "timed"
    tiny = write_suite(
        tmp_path, SUITE.replace("name: own, side: 16, crop: 12, split: images", "name: phantom")
    )
    assert ended_with(["bench", tiny, "--out", timed, "--dry-run", "--orders", "seed-1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fine-tuning"))
    run = timed / "runs" / row.split()[-1]
    run.mkdir(parents=True)
    (run / "metrics.json").write_text('{"finished": true}')
    assert ended_with(["bench", tiny, "--out", timed, "--dry-run", "--orders", "seed-1"]) == 0
    *_, first, second, total = capsys.readouterr().out.splitlines()
    assert first.startswith("fine-tuning")
    assert first.split()[3] == "finished"
    assert "to do" in second
    assert "2 runs · 1 to compute" in total


def test_seeds_are_chosen_and_shown(tmp_path, launcher, capsys):
    phantom = SUITE.replace("name: own, side: 16, crop: 12, split: images", "name: phantom")
    tiny = write_suite(tmp_path, phantom + "seeds: [0, 1, 2]\n")
    assert ended_with(["bench", tiny, "--out", tmp_path / "out", "--dry-run", "--seeds", "0, 2"]) == 0
    shown = capsys.readouterr().out
    assert "8 runs · 8 to compute" in shown
    lines = [line for line in shown.splitlines() if "fine-tuning" in line]
    assert ["seed-1, seed 0" in lines[0], "seed-1, seed 2" in lines[1]] == [True, True]


def test_without_a_name_the_suites_are_listed(capsys):
    assert ended_with(["bench"]) == 0
    shown = capsys.readouterr().out
    assert "42" in next(line for line in shown.splitlines() if line.startswith("smoke"))
    assert all(name[:12] in shown for name in known_suites())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bench", "smok"], "Did you mean 'smoke'?"),
        (["bench", "ham10000"], "ham10000 is left out: give its images with --data ham10000=DIR."),
        (["bench", "ham10000", "--data", "nowhere"], "no such file or folder: nowhere"),
        (["bench", "smoke", "--data", "."], "needs no images"),
        (["bench", "smoke", "--set", "training.epoch=1"], "Did you mean 'epochs'?"),
        (["bench", "smoke", "--orders", "7"], "--orders"),
        (["bench", "smoke", "--launcher", "lokal"], "Did you mean 'local'?"),
        (["bench", "smoke", "--at-once", "0"], "1 or more"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_written(tmp_path, capsys, words, hint):
    assert ended_with([*words, "--out", tmp_path / "out"]) == 2
    assert hint in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_to_is_named(folder, tmp_path, capsys, launcher):
    (tmp_path / "file").write_text("in the way")
    assert ended_with(["bench", "smoke", "--out", tmp_path / "file"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_the_same_command_goes_on(folder, tmp_path):
    out = tmp_path / "out"
    sweep = program(folder, out, "--orders", "seed-1", "--only", "balanced", "--set", "training.epochs=400")
    results, deadline = ResultsFolder(out), time.monotonic() + 300
    while not list(out.glob("runs/*/log.jsonl")):
        assert sweep.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    told, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert "Run the same command again" in told
    assert "Traceback" not in told
    [run] = out.glob("runs/*")
    assert not results.is_running(run.name)
    assert not results.is_finished(run.name)
    assert "Interrupted" in (out / "logs" / f"{run.name}.log").read_text()


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_work(folder, tmp_path):
    out = tmp_path / "out"
    sweeps = [program(folder, out, "--at-once", "1", "--orders", "seed-1") for _ in range(2)]
    told = [sweep.communicate(timeout=400)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], told
    assert [run["state"] for run in runs_of(out)] == ["finished"] * 2
    for run in out.glob("runs/*"):
        assert epochs_of(run) == ALL_EPOCHS
        assert starts_of(run) == 1
