"""Prepared images: whatever happens while they are made, they are whole, or not there."""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from medcil.data import cache
from medcil.data.cache import is_cache, is_unfinished_cache, open_cache, prepare, skipped_images
from medcil.data.image_table import ImageTable, MemoryFiles, without_ids
from medcil.data.samples import resized
from medcil.data.sources import list_images
from medcil.errors import DamagedFile, InvalidInput, RunConflict, RunLocked

from ..errors.raises import raises

SIDE, CHUNK, N = 6, 4, 18


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(7, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def table_of(contents: dict[str, bytes]) -> ImageTable:
    n = len(contents)
    return ImageTable(
        MemoryFiles(contents),
        tuple(contents),
        np.arange(n) % 3,
        ("a", "b", "c"),
        groups=tuple(f"person {i // 2}" for i in range(n)),
        is_test=np.arange(n) % 4 == 0,
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cache, "CHUNK", CHUNK)


@pytest.fixture
def contents() -> dict[str, bytes]:
    return {f"{i:02d}.png": png(i) for i in range(N)}


@pytest.fixture
def table(contents) -> ImageTable:
    return table_of(contents)


@pytest.fixture
def folder(table, tmp_path) -> Path:
    prepare(table, tmp_path / "prepared", side=SIDE)
    return tmp_path / "prepared"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_prepared_images_have_the_pixels_and_columns_of_their_table(table, folder):
    prepared = open_cache(folder)
    assert torch.equal(prepared.samples(SIDE).read_all(), table.samples(SIDE).read_all())
    assert (prepared.names, prepared.class_names) == (table.names, table.class_names)
    assert np.array_equal(prepared.labels, table.labels)
    assert np.array_equal(prepared.is_test, table.is_test)
    assert prepared.sha256 == table.loaded(SIDE).sha256
    assert sorted(files_of(folder)) == ["images.json", "pixels.u8"]
    assert (folder / "pixels.u8").read_bytes() == table.samples(SIDE).read_all().numpy().tobytes()


def test_no_id_of_a_patient_is_kept_and_groups_are_the_same(table, folder):
    prepared = open_cache(folder)
    assert b"person" not in (folder / "images.json").read_bytes()
    assert prepared.groups == tuple(f"patient {1 + i // 2}" for i in range(N))
    public = replace(table, dataset="ham10000")
    assert prepare(public, folder.parent / "public", side=SIDE).groups == table.groups


def test_a_table_without_groups_and_split_stays_without(table, tmp_path):
    prepared = prepare(replace(table, groups=None, is_test=None), tmp_path / "plain", side=SIDE)
    assert prepared.groups is prepared.is_test is None


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bytes(table, folder, tmp_path, workers):
    prepare(table, tmp_path / "again", side=SIDE, workers=workers)
    assert files_of(tmp_path / "again") == files_of(folder)


def test_preparing_twice_reads_and_changes_nothing(table, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    os.chmod(folder, 0o500)
    try:
        assert len(prepare(table, folder, side=SIDE)) == N
    finally:
        os.chmod(folder, 0o700)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def other_pixels(picture: Image.Image, side: int, name: str) -> torch.Tensor:
    return 255 - resized(picture, side)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: (table, SIDE + 1),
        lambda table: (table.select(np.arange(N - 1)), SIDE),
        lambda table: (replace(table, labels=table.labels[::-1].copy()), SIDE),
        lambda table: (replace(table, dataset="ham10000"), SIDE),
        lambda table: (replace(table, preprocess=other_pixels), SIDE),
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_other_images_are_refused_and_nothing_is_touched(table, folder, change, is_finished):
    if not is_finished:
        (folder / "images.json").unlink()
        (folder / "progress.jsonl").write_text(cache._plan(without_ids(table), SIDE).digest + "\n")
    before = files_of(folder)
    other, side = change(table)
    with raises("data.prepare.mismatch"):
        prepare(other, folder, side=side)
    assert files_of(folder) == before


def test_a_folder_of_something_else_is_refused(table, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(RunConflict):
        prepare(table, tmp_path, side=SIDE)
    with raises("output.not_a_folder"):
        prepare(table, tmp_path / "photo.jpg", side=SIDE)
    assert files_of(tmp_path) == {"photo.jpg": b"mine"}


@pytest.mark.parametrize("options", [{"side": 0}, {"side": SIDE, "workers": 0}])
def test_impossible_numbers_are_refused_before_anything_is_written(table, tmp_path, options):
    with raises("data.prepare.empty"):
        prepare(table, tmp_path / "prepared", **options)
    assert not (tmp_path / "prepared").exists()


def test_bad_files_are_named_and_the_rest_is_kept(contents, folder, tmp_path):
    whole = table_of(contents)
    contents |= {"03.png": b"no image", "17.png": contents["17.png"][:40]}
    bad, place = table_of(contents), tmp_path / "bad"
    with raises("data.prepare.damaged", "03.png", "17.png"):
        prepare(bad, place, side=SIDE)
    assert is_unfinished_cache(place)
    with raises("data.prepared.unfinished"):
        open_cache(place)
    kept = prepare(bad, place, side=SIDE, skip_bad=True)
    good = np.array([i for i in range(N) if i not in (3, 17)])
    assert torch.equal(kept.samples(SIDE).read_all(), whole.select(good).samples(SIDE).read_all())
    assert kept.groups == open_cache(folder).select(good).groups
    assert [line.split(" ")[0] for line in skipped_images(place)] == ["03.png", "17.png"]
    assert kept.pixels is not None
    assert len(kept.pixels) == N - 2
    with raises("data.prepare.damaged"):
        prepare(bad, place, side=SIDE)
    assert skipped_images(folder) == []


def test_where_every_file_is_bad_nothing_is_prepared(tmp_path):
    with raises("data.prepare.damaged"):
        prepare(table_of({"0.png": b"no image"}), tmp_path / "bad", side=SIDE, skip_bad=True)


def test_files_that_cannot_be_read_are_never_skipped(contents, tmp_path):
    full = table_of(contents)
    gone = replace(full, files=MemoryFiles({name: c for name, c in contents.items() if name != "05.png"}))
    with raises("data.prepare.unreadable", "05.png"):
        prepare(gone, tmp_path / "prepared", side=SIDE, skip_bad=True)
    assert len(prepare(full, tmp_path / "prepared", side=SIDE)) == N


def test_stopped_by_the_keyboard_it_continues_and_decodes_no_image_twice(
    table, folder, tmp_path, monkeypatch
):
    decode, decoded = ImageTable.decode_content, list[str]()

    def spy(self, content, side, name):
        decoded.append(name)
        if len(decoded) == 11:
            raise KeyboardInterrupt
        return decode(self, content, side, name)

    monkeypatch.setattr(ImageTable, "decode_content", spy)
    with pytest.raises(KeyboardInterrupt):
        prepare(table, tmp_path / "again", side=SIDE, workers=1)
    kept = set(decoded[: 2 * CHUNK])  # the chunks before the one that was stopped
    decoded.clear()
    monkeypatch.setattr(ImageTable, "decode_content", lambda *a: (decoded.append(a[3]), decode(*a))[1])
    prepare(table, tmp_path / "again", side=SIDE)
    assert kept
    assert not kept & set(decoded)
    assert files_of(tmp_path / "again") == files_of(folder)


def test_a_source_that_changed_between_two_attempts_is_decoded_again(contents, tmp_path):
    place = tmp_path / "prepared"
    with raises("data.prepare.damaged"):
        prepare(table_of({**contents, "17.png": b"no image"}), place, side=SIDE)
    contents["00.png"] = png(99)
    now = prepare(table_of(contents), place, side=SIDE)
    assert torch.equal(now.samples(SIDE).read_all(), table_of(contents).samples(SIDE).read_all())


def test_pixels_damaged_between_two_attempts_are_decoded_again(contents, tmp_path):
    place = tmp_path / "prepared"
    with raises("data.prepare.damaged"):
        prepare(table_of({**contents, "17.png": b"no image"}), place, side=SIDE)
    content = bytearray((place / "pixels.u8").read_bytes())
    content[5] ^= 1
    (place / "pixels.u8").write_bytes(content)
    now = prepare(table_of(contents), place, side=SIDE)
    assert torch.equal(now.samples(SIDE).read_all(), table_of(contents).samples(SIDE).read_all())


def test_two_processes_never_write_one_folder(table, tmp_path):
    (tmp_path / "prepared").mkdir()
    with FileLock(tmp_path / "prepared" / ".lock"), pytest.raises(RunLocked):
        prepare(table, tmp_path / "prepared", side=SIDE)


def test_a_full_disk_ends_it_with_a_reason_and_loses_nothing(table, folder, tmp_path, monkeypatch):
    write = os.pwrite

    def full(*arguments):
        if arguments[2] > 2 * CHUNK * 3 * SIDE**2:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with raises("output.no_space"):
        prepare(table, tmp_path / "again", side=SIDE)
    monkeypatch.setattr(os, "pwrite", write)
    prepare(table, tmp_path / "again", side=SIDE)
    assert open_cache(tmp_path / "again").sha256 == open_cache(folder).sha256


def test_too_little_room_is_found_before_anything_is_written(table, tmp_path, monkeypatch):
    usage = type("Usage", (), {"total": 10**9, "free": 100})()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda place: usage)
    with raises("data.prepare.no_room"):
        prepare(table, tmp_path / "prepared", side=SIDE)
    assert not (tmp_path / "prepared").exists()


def test_progress_is_told_and_pytorchs_threads_stay(table, tmp_path):
    threads, told = torch.get_num_threads(), list[tuple[int, int]]()
    prepare(table, tmp_path / "prepared", side=SIDE, watch=lambda *numbers: told.append(numbers))
    assert told[-1] == (N, N)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert torch.get_num_threads() == threads


def test_what_is_no_cache_cannot_be_opened(tmp_path):
    with raises("data.prepared.missing"):
        open_cache(tmp_path)


def test_any_changed_byte_of_the_pixels_is_found(folder):
    path = folder / "pixels.u8"
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 16
        path.write_bytes(changed)
        with raises("data.prepared.damaged"):
            open_cache(folder)
    for other in (content[:-1], content + b"x"):
        path.write_bytes(other)
        with raises("data.prepared.damaged"):
            open_cache(folder, verify="sizes")
    path.unlink()
    with raises("data.prepared.damaged"):
        open_cache(folder, verify="sizes")


def test_any_changed_byte_of_the_manifest_is_found_or_means_nothing(folder):
    path = folder / "images.json"
    content, before = path.read_bytes(), open_cache(folder)
    for place in range(0, len(content), 11):
        for bit in (1, 4):
            changed = bytearray(content)
            changed[place] ^= bit
            path.write_bytes(changed)
            try:
                now = open_cache(folder, verify="sizes")
            except (DamagedFile, InvalidInput):
                continue
            assert (now.names, now.groups, now.sha256) == (before.names, before.groups, before.sha256)
            assert np.array_equal(now.labels, before.labels)


UNTRUTHS = {
    "a label of no class": {"labels": [9] * N},
    "too few labels": {"labels": [0]},
    "no side": {"side": 0},
    "another version": {"version": 1},
    "another format": {"format": "something"},
    "too few groups": {"groups": ["one"]},
}


@pytest.mark.parametrize("untruth", UNTRUTHS)
def test_a_manifest_that_contradicts_itself_is_damaged(folder, untruth):
    false = cache._read_store(folder).model_copy(update=UNTRUTHS[untruth])
    signed = false.model_copy(update={"sha256": false.digest})
    (folder / "images.json").write_text(signed.model_dump_json(warnings=False))
    with raises("data.prepared.damaged"):
        open_cache(folder, verify="sizes")


def test_a_manifest_nested_beyond_reading_is_damaged(folder):
    (folder / "images.json").write_text("[" * 100_000)
    with raises("data.prepared.damaged"):
        open_cache(folder)


def test_no_changed_byte_of_a_source_goes_unnoticed(contents, folder):
    for name in ("00.png", "17.png"):
        changed = bytearray(contents[name])
        changed[-1] ^= 1
        with raises("data.prepare.changed", name):
            prepare(table_of({**contents, name: bytes(changed)}), folder, side=SIDE)


def test_images_are_read_by_index_from_threads_and_other_processes(table, folder):
    images, expected = open_cache(folder).pixels, table.samples(SIDE).read_all()
    again = pickle.loads(pickle.dumps(images))
    assert len(pickle.dumps(images)) < 1000
    indices = torch.tensor([17, 0, 4, 4])
    read = again.read(indices)
    read[0] = 0  # a copy
    assert torch.equal(images.read(indices), expected[indices])
    with pytest.raises(IndexError):
        images.read(torch.tensor([N]))
    with pytest.raises(IndexError):
        images.read(torch.tensor([-1]))
    threads = [threading.Thread(target=lambda: images.read(torch.arange(N))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_another_side_than_the_prepared_one_is_refused(folder):
    with raises("data.side.mismatch"):
        open_cache(folder).samples(SIDE + 1)


def test_only_functions_of_a_module_may_preprocess_prepared_images(table, tmp_path):
    with pytest.raises(ValueError, match="only functions of a module"):
        prepare(
            replace(table, preprocess=lambda picture, side, name: resized(picture, side)), tmp_path, side=SIDE
        )


KILLED = """
import sys
from pathlib import Path
from medcil.data import cache
from medcil.data.sources import list_images
cache.CHUNK = 4
cache.prepare(list_images(Path(sys.argv[1]), "own"), Path(sys.argv[2]), side=32, workers=2)
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(tmp_path):
    for i in range(200):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    table = list_images(tmp_path / "images", "own")
    prepare(table, tmp_path / "whole", side=32)
    random, kills = np.random.default_rng(0), 0
    for _ in range(12):
        arguments = [sys.executable, "-c", KILLED, str(tmp_path / "images"), str(tmp_path / "killed")]
        process = subprocess.Popen(arguments)
        while process.poll() is None and not (tmp_path / "killed").exists():
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills > 0
    prepare(table, tmp_path / "killed", side=32)
    assert is_cache(tmp_path / "killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
