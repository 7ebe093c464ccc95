import json
from pathlib import Path

import pytest

from medcil.errors import DamagedFile
from medcil.report.runs import read_run

from ..errors.raises import raises
from .fake_runs import CLASS_NAMES, write_run


def test_reads_every_file_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.label == "balanced"
    assert run.is_finished
    assert run.class_names == CLASS_NAMES
    assert [len(step.classes) for step in run.steps] == [3, 5, 7]
    assert run.steps[0].old is None
    assert len(run.epochs) == 60
    assert len(run.exemplars) == 35
    assert run.config["method"]["alpha"] == 0.5
    assert run.environment["device"] == "cpu"


def test_a_folder_that_is_no_run_says_what_to_name(tmp_path: Path) -> None:
    with raises("run.directory.invalid"):
        read_run(tmp_path)


@pytest.mark.parametrize("has_metrics", [False, True])
def test_a_run_without_a_finished_step_says_to_wait(tmp_path: Path, has_metrics: bool) -> None:
    run = write_run(tmp_path / "run", steps=[])
    if not has_metrics:
        (run / "metrics.json").unlink()
    with raises("run.step.missing"):
        read_run(run)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with raises("run.format.unsupported", "2"):
        read_run(write_run(tmp_path / "run", format=2))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.json").write_text(content)
    with pytest.raises(DamagedFile, match=r"metrics\.json"):
        read_run(run)


def test_lists_that_do_not_fit_the_classes_are_refused(tmp_path: Path) -> None:
    step = {"step": 1, "classes": ["a", "b"], "recall": [0.5]}
    with pytest.raises(DamagedFile, match="1 recalls for 2 classes"):
        read_run(write_run(tmp_path / "run", steps=[step]))
    step = {"step": 1, "classes": ["a", "b"], "confusion": [[1, 2]]}
    with pytest.raises(DamagedFile, match="confusion"):
        read_run(write_run(tmp_path / "other", steps=[step]))


def test_only_metrics_are_needed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("config.yaml", "environment.json", "log.jsonl", "tasks/03/state/manifest.json"):
        (run / name).unlink()
    record = read_run(run)
    assert (record.epochs, record.exemplars, record.config, record.environment) == ((), (), {}, {})


def test_an_epoch_run_again_counts_once_and_half_a_line_not_at_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    again = {"task": 3, "phase": "learn", "epoch": 20, "losses": {"classification": 0.5}, "total": 0.5}
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps(again) + '\n{"task": 3, "pha')
    epochs = read_run(run).epochs
    assert len(epochs) == 60
    assert epochs[-1].total == 0.5


def test_numbers_that_are_none_or_not_finite_are_unknown(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", acc_micro=None, acc_task=float("nan")))
    assert run.summary["acc_micro"] is None
    assert run.summary["acc_task"] is None


def test_a_metric_that_is_younger_than_the_run_is_computed_from_its_recalls(tmp_path: Path) -> None:
    """Three classes, then two, then two; no confusion matrices, as in kept records of many classes."""
    recalls = [[0.9, 0.6, 0.3], [0.8, 0.6, 0.1, 0.7, 0.5], [0.3, 0.3, 0.0, 0.6, 0.4, 0.9, None]]
    classes = [CLASS_NAMES[: len(row)] for row in recalls]
    steps = [{"step": i, "classes": classes[i - 1], "recall": recalls[i - 1]} for i in (1, 2, 3)]
    path = write_run(tmp_path / "run", steps=steps, acc_balanced=0.123)
    metrics = json.loads((path / "metrics.json").read_text())
    metrics.pop("acc_task")
    metrics.pop("acc_task_balanced", None)
    (path / "metrics.json").write_text(json.dumps(metrics))
    summary = read_run(path).summary
    assert summary["acc_task_balanced"] == pytest.approx((0.6 + (0.5 + 0.6) / 2 + (0.2 + 0.5 + 0.9) / 3) / 3)
    assert summary["acc_balanced"] == 0.123  # as written
    assert summary["acc_task"] is None  # it would need numbers of test images
    (path / "metrics.json").write_text(json.dumps(metrics | {"acc_task_balanced": None}))
    assert read_run(path).summary["acc_task_balanced"] is None


def test_recalls_that_do_not_fit_the_tasks_are_damage(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", task_sizes=[2, 2, 3])
    with pytest.raises(DamagedFile, match="recalls for"):
        read_run(path)


def test_exemplars_outside_the_state_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "secret.png").write_bytes(b"")
    manifest = run / "tasks/03/state/manifest.json"
    entry = {"file": "../../../../secret.png", "class": "nevus", "rank": 0}
    manifest.write_text(json.dumps({"exemplars": [entry]}))
    assert read_run(run).exemplars == ()
