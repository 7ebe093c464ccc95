"""Where learning goes on after an interruption, and what the log then holds."""

import json
import threading

import pytest
import torch

from medcil.errors import DamagedFile
from medcil.storage.atomic import write_bytes
from medcil.storage.run_dir import RunDir
from medcil.training.checkpoint import Checkpoint, FileJournal, Journal


def record(epoch, phase="learn"):
    return {"phase": phase, "epoch": epoch, "losses": {"classification": 1.0 / epoch}}


def checkpoint(epoch):
    # Not contiguous, as a network in channels_last is.
    return Checkpoint(epoch, {"network.a": torch.full((2, 3), float(epoch)).T, "n": torch.tensor(epoch)})


def logged(run):
    return [(line["phase"], line["epoch"]) for line in map(json.loads, run.log_path.read_text().splitlines())]


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def journal_of(run, before=0):
    return FileJournal(run, 1, log_size_before=before)


def save(journal, phase, checkpoint):
    journal.save(phase, checkpoint)
    journal.finish()


def test_a_new_journal_has_no_checkpoint(run):
    journal = journal_of(run)
    assert journal.latest(0) is None
    assert journal.latest(1) is None


def test_the_newest_checkpoint_of_each_phase_is_found_again(run):
    journal = journal_of(run)
    for phase, epoch in ((0, 1), (0, 2), (1, 1)):
        save(journal, phase, checkpoint(epoch))
    for reader in (journal, journal_of(run)):
        assert [reader.latest(phase).epoch for phase in (0, 1)] == [2, 1]
        assert reader.latest(2) is None
        assert torch.equal(reader.latest(0).tensors["network.a"], torch.full((3, 2), 2.0))
        assert reader.latest(1).tensors["n"].item() == 1


def test_superseded_checkpoints_are_removed(run):
    journal = journal_of(run)
    for epoch in (1, 2, 3):
        save(journal, 0, checkpoint(epoch))
    save(journal, 1, checkpoint(1))
    names = {path.name for path in run.task(1).progress.iterdir()}
    assert names == {"progress.json", "phase-0-epoch-3.safetensors", "phase-1-epoch-1.safetensors"}


def test_saving_an_epoch_again_keeps_it(run):
    journal = journal_of(run)
    save(journal, 0, checkpoint(1))
    save(journal, 0, checkpoint(1))
    assert journal_of(run).latest(0).epoch == 1


def test_what_was_logged_after_the_checkpoint_is_dropped(run):
    journal = journal_of(run)
    journal.log(record(1))
    save(journal, 0, checkpoint(1))
    journal.log(record(2))
    again = journal_of(run)
    assert logged(run) == [("learn", 1)]
    again.log(record(2))
    assert logged(run) == [("learn", 1), ("learn", 2)]


def test_without_a_checkpoint_the_log_goes_back_to_before_the_task(run):
    run.append(run.log_path, {"task": 0, **record(9, phase="earlier")})
    before = run.log_size()
    journal_of(run, before).log(record(1))
    journal_of(run, before)
    assert logged(run) == [("earlier", 9)]


def test_a_log_that_lost_its_end_is_damaged(run):
    journal = journal_of(run)
    journal.log(record(1))
    save(journal, 0, checkpoint(1))
    run.log_path.write_bytes(b"")
    with pytest.raises(DamagedFile, match="shorter"):
        journal_of(run)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_checkpoint_is_named(run, damage):
    save(journal_of(run), 0, checkpoint(1))
    path = run.task(1).progress / "phase-0-epoch-1.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\x99")
    with pytest.raises(DamagedFile, match=r"phase-0-epoch-1\.safetensors"):
        journal_of(run).latest(0)


def test_a_crash_while_saving_leaves_the_checkpoint_before(run, monkeypatch):
    journal = journal_of(run)
    journal.log(record(1))
    save(journal, 0, checkpoint(1))
    journal.log(record(2))

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("medcil.training.checkpoint.write_json", crash)
        with pytest.raises(KeyboardInterrupt):
            save(journal, 0, checkpoint(2))
    again = journal_of(run)
    assert again.latest(0).epoch == 1
    assert logged(run) == [("learn", 1)]
    again.log(record(2))
    save(again, 0, checkpoint(2))
    assert journal_of(run).latest(0).epoch == 2


def test_times_are_kept_apart_from_the_log(run):
    journal_of(run).log(record(1))
    assert "unix_time" not in run.log_path.read_text()
    assert json.loads(run.timings_path.read_text())["epoch"] == 1


def test_what_changes_after_saving_is_not_saved(run):
    tensors = {"network.a": torch.zeros(1000, 1000)}
    journal = journal_of(run)
    journal.save(0, Checkpoint(1, tensors))
    tensors["network.a"] += 1
    assert not journal.latest(0).tensors["network.a"].any()


def test_training_goes_on_while_a_checkpoint_is_written(run, monkeypatch):
    gate = threading.Event()

    def wait_then_write(path, content):
        assert gate.wait(10)
        write_bytes(path, content)

    monkeypatch.setattr("medcil.training.checkpoint.write_bytes", wait_then_write)
    journal = journal_of(run)
    journal.log(record(1))
    journal.save(0, checkpoint(1))
    journal.log(record(2))  # before the checkpoint is there, and not part of it
    gate.set()
    journal.finish()
    assert logged(run) == [("learn", 1), ("learn", 2)]
    assert journal_of(run).latest(0).epoch == 1
    assert logged(run) == [("learn", 1)]


def test_an_error_of_writing_comes_out(run, monkeypatch):
    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medcil.training.checkpoint.write_bytes", fail)
    journal = journal_of(run)
    journal.save(0, checkpoint(1))
    with pytest.raises(OSError, match="No space left"):
        journal.save(0, checkpoint(2))
    assert journal_of(run).latest(0) is None


def test_no_journal_remembers_nothing():
    journal = Journal()
    journal.log(record(1))
    journal.save(0, checkpoint(1))
    assert journal.latest(0) is None
