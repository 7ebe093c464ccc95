"""The run directory: whole files or none, one process at a time, one recipe per folder."""

import csv
import hashlib
import json
import os
import subprocess
import sys
import threading

import pytest

from medcil.build import RunConfig
from medcil.errors import DamagedFile, InvalidInput, RunLocked
from medcil.storage.atomic import read_json, read_verified, write_bytes, write_csv, write_json
from medcil.storage.run_dir import RunDir

from ..errors.raises import raises
from ..ordinary_user import ordinary_user

HOLD_THE_LOCK = """
import sys, time
from pathlib import Path
from medcil.storage.run_dir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(60)
"""


def config(**changes) -> RunConfig:
    content = {
        "data": {"name": "phantom", "side": 32, "crop": 28},
        "scenario": {"base": 3, "increment": 2},
        "method": {"name": "balanced", "alpha": 0.5},
    }
    return RunConfig.model_validate({**content, **changes})


def files_in(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("failing", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing, failure):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(failure)):
        write_bytes(path, b"new")
    assert files_in(tmp_path) == {"file": b"old"}


def test_a_write_makes_its_folders(tmp_path):
    write_bytes(tmp_path / "a" / "b" / "file", b"content")
    assert files_in(tmp_path) == {"a/b/file": b"content"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_file_is_the_users_to_say(tmp_path, umask, mode):
    write = (
        "import sys, pathlib; from medcil.storage.atomic import write_bytes; "
        "write_bytes(pathlib.Path(sys.argv[1]), b'content')"
    )
    subprocess.run([sys.executable, "-c", write, tmp_path / "file"], umask=umask, check=True)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_reader_never_sees_a_part_of_a_file(tmp_path):
    path = tmp_path / "file"
    contents = [letter * 300_000 for letter in (b"a", b"b")]
    write_bytes(path, contents[0])
    seen, is_over = set(), threading.Event()

    def read():
        while not is_over.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(40):
        write_bytes(path, contents[i % 2])
    is_over.set()
    reader.join()
    assert seen
    assert seen <= set(contents)


def test_json_comes_back(tmp_path):
    content = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content == json.loads((tmp_path / "a.json").read_text())


def test_json_without_meaning_elsewhere_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b""])
def test_damaged_json_is_named(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with raises("file.json.damaged", "a.json"):
        read_json(path)


def test_csv_quotes_what_needs_it(tmp_path):
    write_csv(tmp_path / "a.csv", ["x", "y"], [[1, 'a,"b"'], [2.5, "c"]])
    assert (tmp_path / "a.csv").read_bytes() == b'x,y\n1,"a,""b"""\n2.5,c\n'


def test_csv_has_no_formula_and_numbers_stay_numbers(tmp_path):
    texts = ["=1+1", "+cmd", "-2.png", "@x", "\t=x", "\uff1dx", "HER2+", "a=b"]
    numbers = ["-0.125000", "+3", -1.5, -2]
    write_csv(tmp_path / "a.csv", ["=file", "n"], [*([text, 0] for text in texts), ["x", *numbers]])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["'=file", "n"]
    assert [row[0] for row in rows[:6]] == [f"'{text}" for text in texts[:6]]
    assert [row[0] for row in rows[6:8]] == texts[6:]
    assert rows[8] == ["x", "-0.125000", "+3", "-1.5", "-2"]


def test_a_file_is_verified_against_its_manifest(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    expected = hashlib.sha256(b"content").hexdigest()
    assert read_verified(path, expected) == b"content"
    path.write_bytes(b"Content")
    with raises("file.listed.damaged"):
        read_verified(path, expected)
    path.unlink()
    with raises("file.listed.missing"):
        read_verified(path, expected)


def test_a_second_process_is_kept_out_until_the_first_dies(tmp_path):
    run = RunDir(tmp_path / "run")
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(RunLocked, match="Another process is working in") as error, run.locked():
                pass
            assert error.value.exit_code == 3
        finally:
            other.kill()
    with run.locked():
        assert run.root.is_dir()


def test_a_lock_can_be_taken_again(tmp_path):
    run = RunDir(tmp_path)
    for _ in range(2):
        with run.locked():
            pass


@pytest.mark.parametrize("failure", [PermissionError("no"), FileExistsError("no"), OSError("no")])
def test_an_error_under_the_lock_comes_out_as_it_is_and_frees_it(tmp_path, failure):
    run = RunDir(tmp_path)
    with pytest.raises(type(failure)) as error, run.locked():
        raise failure
    assert error.value is failure
    with run.locked():
        pass


@pytest.mark.parametrize("place", ["file", "file/run", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, place):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(InvalidInput, match=r"place|--out"), RunDir(tmp_path / place).locked():
        pass
    assert files_in(tmp_path) == {"file": b"mine"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with (
        ordinary_user(),
        raises("output.unwritable", str(tmp_path)),
        RunDir(tmp_path).locked(),
    ):
        pass
    assert files_in(tmp_path) == {}


def test_a_new_folder_is_claimed_by_writing_the_recipe(tmp_path):
    run = RunDir(tmp_path / "run")
    with run.locked():
        run.claim(config())
    assert run.read_config(RunConfig) == config()


def test_the_same_recipe_goes_on_wherever_it_is_computed(tmp_path):
    run = RunDir(tmp_path)
    started = config()
    run.claim(started)
    run.claim(
        config(execution={"workers": 2}, data={"name": "phantom", "side": 32, "crop": 28, "root": "/x"})
    )
    assert run.read_config(RunConfig) == started


def test_a_half_written_line_does_not_spoil_the_next(tmp_path):
    run, path = RunDir(tmp_path), tmp_path / "timings.jsonl"
    run.append(path, {"epoch": 1})
    path.write_bytes(path.read_bytes() + b'{"epo')
    run.append(path, {"epoch": 2})
    assert path.read_bytes() == b'{"epoch": 1}\n{"epo\n{"epoch": 2}\n'


def test_another_recipe_is_refused_with_every_difference(tmp_path):
    run = RunDir(tmp_path)
    run.claim(config())
    before = files_in(tmp_path)
    other = config(seed=3, method={"name": "balanced", "alpha": 0.25})
    with raises("run.recipe.mismatch") as error:
        run.claim(other)
    assert error.value.exit_code == 4
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert lines == ["method.alpha: 0.5 -> 0.25", "seed: 0 -> 3"]
    assert files_in(tmp_path) == before


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    run = RunDir(tmp_path)
    with raises("run.folder.occupied", "'photo.jpg'"), run.locked():
        run.claim(config())
    assert files_in(tmp_path) == {"photo.jpg": b"mine"}


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe\x00", b"nonsense: 1", b"", b"- 1"])
def test_a_damaged_recipe_of_a_run_is_named(tmp_path, content):
    run = RunDir(tmp_path)
    run.config_path.write_bytes(content)
    with raises("run.config.damaged", "config.yaml"):
        run.claim(config())
    assert files_in(tmp_path) == {"config.yaml": content}


def test_the_log_goes_back_to_where_it_was(tmp_path):
    run = RunDir(tmp_path)
    assert run.log_size() == 0
    run.append(run.log_path, {"epoch": 1})
    size = run.log_size()
    run.append(run.log_path, {"epoch": 2})
    run.truncate_log(size)
    run.append(run.log_path, {"epoch": 2, "again": True})
    lines = [json.loads(line) for line in run.log_path.read_text().splitlines()]
    assert lines == [{"epoch": 1}, {"epoch": 2, "again": True}]


def test_a_log_shorter_than_its_checkpoint_is_damaged(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(DamagedFile, match=r"log\.jsonl is shorter"):
        run.truncate_log(1)
    run.append(run.log_path, {"epoch": 1})
    before = files_in(tmp_path)
    with pytest.raises(DamagedFile, match="shorter"):
        run.truncate_log(run.log_size() + 1)
    run.truncate_log(run.log_size())
    assert files_in(tmp_path) == before


def test_a_record_that_is_not_finite_is_not_logged(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        run.append(run.log_path, {"loss": float("inf")})
    assert run.log_size() == 0


def test_a_task_is_learned_and_done_by_its_files(tmp_path):
    task = RunDir(tmp_path).task(3)
    assert task.root.name == "03"
    assert not task.is_learned
    write_json(task.state / "manifest.json", {})
    assert task.is_learned
    assert not task.is_done
    write_json(task.result_path, {})
    assert task.is_done
    write_bytes(task.progress / "file", b"")
    task.discard_progress()
    assert not task.progress.exists()
    task.discard_progress()
