"""A prepared store holds the pixels and the columns of its catalog, and notices whatever changes."""

import errno
import functools
import hashlib
import io
import json
import os
import pickle
import random
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.config import ExecutionConfig
from medcil.data import cache_plan
from medcil.data.cache import Store, changed_sources, is_store, open_store, prepare
from medcil.data.catalog import Catalog, decode_plainly, numbered_groups
from medcil.data.decoding.fundus import decode_fundus
from medcil.data.samples import ImageSource
from medcil.data.stream import Task
from medcil.errors import DamagedFile, InvalidInput, RunConflict, RunLocked
from medcil.methods.balanced import Balanced
from medcil.training.feed import Feed
from medcil.training.loop import learn_task
from medcil.training.sampling import Key

from ..small import (
    PREPROCESSING,
    SIDE,
    SMALLEST,
    changed_names,
    content_of,
    new_state,
    plain_epoch,
    short_training,
    training_batches,
)

FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP")
CHUNK = 8


@dataclass(frozen=True)
class Contents:
    """Files in memory."""

    contents: dict[str, bytes]

    def names(self) -> Sequence[str]:
        return list(self.contents)

    def read(self, name: str) -> bytes:
        if name not in self.contents:
            raise InvalidInput(f"{name} is not there.")
        return self.contents[name]


def image_file(rng: np.random.Generator, image_format: str) -> bytes:
    height, width = rng.integers(9, 30, size=2)
    pixels = rng.integers(256, size=(height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=image_format)
    return buffer.getvalue()


def catalog_of(n: int, *, seed: int = 0, **changes: Any) -> Catalog:
    """Small images of five formats and three classes, two of a patient, some for testing."""
    rng = np.random.default_rng(seed)
    names = tuple(f"images/{i:04d}.{FORMATS[i % 5].lower()}" for i in range(n))
    catalog = Catalog(
        files=Contents({name: image_file(rng, FORMATS[i % 5]) for i, name in enumerate(names)}),
        names=names,
        labels=rng.integers(3, size=n),
        class_names=("a", "b", "c"),
        groups=tuple(f"patient {1 + i // 2}" for i in range(n)),
        is_test=rng.random(n) < 0.3,
    )
    return replace(catalog, **changes)


def with_contents(catalog: Catalog, changes: dict[str, bytes]) -> Catalog:
    assert isinstance(catalog.files, Contents)
    return replace(catalog, files=Contents({**catalog.files.contents, **changes}))


def content_of_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def states_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(p.relative_to(folder)): (
            p.stat().st_mtime_ns,
            p.stat().st_ino,
            p.read_bytes() if p.is_file() else b"",
        )
        for p in folder.rglob("*")
    }


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_plan, "CHUNK_IMAGES", CHUNK)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return catalog_of(50)


@pytest.fixture
def store(catalog: Catalog, tmp_path: Path) -> Store:
    made = prepare(catalog, tmp_path / "store", side=SIDE)
    assert made is not None
    return made


def test_a_store_has_the_pixels_and_columns_of_its_catalog(catalog, store):
    assert torch.equal(store.samples().read_all(), catalog.samples(SIDE).read_all())
    assert torch.equal(store.samples().labels, catalog.samples(SIDE).labels)
    assert (store.names, store.class_names, store.groups) == (
        catalog.names,
        catalog.class_names,
        catalog.groups,
    )
    assert store.labels.tolist() == catalog.labels.tolist()
    assert store.is_test.tolist() == catalog.is_test.tolist()
    assert list(store.sha256s) == [hashlib.sha256(catalog.read(i)).hexdigest() for i in range(50)]
    assert store.skipped == ()
    assert len(store) == 50


def test_a_catalog_without_groups_and_split_stays_without(tmp_path):
    store = prepare(catalog_of(5, groups=None, is_test=None), tmp_path / "store", side=SIDE)
    assert (store.groups, store.is_test, store.dataset) == (None, None, "own")
    assert len(store.samples("all")) == 5
    with pytest.raises(InvalidInput, match="no split of its own"):
        store.samples("test")


def test_the_splits_are_those_of_the_catalog(catalog, store):
    pixels, labels = catalog.samples(SIDE).read_all(), torch.from_numpy(catalog.labels)
    for split, chosen in (("test", catalog.is_test), ("train", ~catalog.is_test)):
        samples = store.samples(split)
        assert torch.equal(samples.read_all(), pixels[torch.from_numpy(chosen)])
        assert torch.equal(samples.labels, labels[torch.from_numpy(chosen)])
    assert 0 < len(store.samples("test")) < len(store.samples("train"))


def test_the_files_are_plain_bytes_and_a_manifest(catalog, store):
    paths = sorted((store.folder / "pixels").iterdir())
    assert len(paths) == 7
    pixels = np.concatenate([np.fromfile(p, np.uint8).reshape(-1, 3, SIDE, SIDE) for p in paths])
    assert np.array_equal(pixels, catalog.samples(SIDE).read_all().numpy())
    content = json.loads((store.folder / "manifest.json").read_text())["content"]
    assert content["side"] == SIDE
    assert content["names"] == list(catalog.names)
    assert [c["crc32"] for c in content["chunks"]] == [zlib.crc32(p.read_bytes()) for p in paths]
    assert content["decode"] == "medcil.data.catalog.decode_plainly"
    assert {p.name for p in store.folder.iterdir()} == {"manifest.json", "pixels", ".lock"}


def test_large_chunks_are_bounded_by_their_bytes(catalog, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_plan, "CHUNK_BYTES", 3 * 3 * SIDE**2 + 1)
    store = prepare(catalog, tmp_path / "store", side=SIDE)
    assert [p.stat().st_size for p in sorted((tmp_path / "store/pixels").iterdir())] == [900] * 16 + [600]
    assert torch.equal(store.samples().read_all(), catalog.samples(SIDE).read_all())


def test_any_way_of_preparing_gives_the_same_bytes(catalog, store, tmp_path):
    time.sleep(0.01)
    prepare(catalog, tmp_path / "later", side=SIDE, workers=1)
    assert content_of_folder(tmp_path / "later") == content_of_folder(store.folder)


def test_preparing_twice_touches_nothing(catalog, store):
    before, told = states_of(store.folder), []
    again = prepare(catalog, store.folder, side=SIDE, watch=lambda *numbers: told.append(numbers))
    assert states_of(store.folder) == before
    assert torch.equal(again.samples().read_all(), store.samples().read_all())


def test_preparing_twice_needs_no_right_to_write(catalog, store, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("replace", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert len(prepare(catalog, store.folder, side=SIDE)) == 50


OTHERS = {
    "side": lambda catalog: (catalog, SIDE + 1),
    "labels": lambda catalog: (replace(catalog, labels=(catalog.labels + 1) % 3), SIDE),
    "one label": lambda catalog: (
        replace(catalog, labels=np.r_[(catalog.labels[0] + 1) % 3, catalog.labels[1:]]),
        SIDE,
    ),
    "class names": lambda catalog: (replace(catalog, class_names=("a", "b", "d")), SIDE),
    "groups": lambda catalog: (replace(catalog, groups=("someone", *catalog.groups[1:])), SIDE),
    "no groups": lambda catalog: (replace(catalog, groups=None), SIDE),
    "split": lambda catalog: (replace(catalog, is_test=~catalog.is_test), SIDE),
    "order": lambda catalog: (catalog.select(np.arange(50)[::-1].copy()), SIDE),
    "preprocessing": lambda catalog: (replace(catalog, decode=decode_fundus), SIDE),
    "fewer": lambda catalog: (catalog.select(np.arange(49)), SIDE),
    "dataset": lambda catalog: (replace(catalog, dataset="isic"), SIDE),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_finished", [True, False])
def test_another_catalog_or_side_is_refused_and_nothing_touched(catalog, tmp_path, other, is_finished):
    folder = tmp_path / "store"
    prepare(catalog, folder, side=SIDE, shard=(1, 1 if is_finished else 2))
    assert is_store(folder) == is_finished
    before = states_of(folder)
    asked, side = OTHERS[other](catalog)
    with pytest.raises(RunConflict, match="Give another folder"):
        prepare(asked, folder, side=side)
    assert states_of(folder) == before


def test_what_has_no_name_of_its_own_decodes_no_store(catalog, tmp_path):
    def local(content: bytes, side: int, name: str) -> torch.Tensor:
        return decode_plainly(content, side, name)

    for nameless in (local, lambda *file: decode_plainly(*file), functools.partial(decode_plainly)):
        with pytest.raises(ValueError, match="can only tell functions of a module apart"):
            prepare(replace(catalog, decode=nameless), tmp_path / "store", side=SIDE)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["notes.txt", "plan.json", "manifest.json"])
@pytest.mark.parametrize("content", ["", "[1]", '{"version": 1}', "my plan"])
def test_a_folder_of_something_else_is_refused_and_not_touched(catalog, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    before = states_of(tmp_path)
    with pytest.raises(RunConflict, match="Give a new or empty folder"):
        prepare(catalog, tmp_path, side=SIDE)
    assert states_of(tmp_path) == before


def test_a_file_is_no_folder(catalog, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match="not a folder"):
        prepare(catalog, tmp_path / "file", side=SIDE)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("request_", [{"side": 0}, {"shard": (0, 1)}, {"shard": (3, 2)}, {"workers": -1}])
def test_what_cannot_be_is_refused_before_anything_is_written(catalog, tmp_path, request_):
    with pytest.raises(InvalidInput):
        prepare(catalog, tmp_path / "store", **{"side": SIDE, **request_})
    assert not (tmp_path / "store").exists()


def test_no_images_make_no_store(catalog, tmp_path):
    with pytest.raises(InvalidInput):
        prepare(catalog.select(np.arange(0)), tmp_path / "store", side=SIDE)


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())["content"]


def rewrite_manifest(folder: Path, content: Any) -> None:
    """By somebody who knows how its sha256 is made."""
    written = {"sha256": cache_plan.digest_of(content), "content": content}
    (folder / "manifest.json").write_text(json.dumps(written))


def test_a_store_says_what_it_was_read_as(catalog, tmp_path):
    store = prepare(replace(catalog, dataset="cifar100"), tmp_path / "store", side=SIDE)
    assert store.dataset == open_store(store.folder).dataset == "cifar100"
    prepare(replace(catalog, dataset="cifar100"), tmp_path / "half", side=SIDE, shard=(1, 2))
    assert json.loads((tmp_path / "half/plan.json").read_bytes())["dataset"] == "cifar100"


def test_a_store_that_does_not_say_of_which_dataset_it_is_is_refused(catalog, store, tmp_path):
    nameless, half = manifest_of(store.folder), tmp_path / "half"
    del nameless["dataset"]
    rewrite_manifest(store.folder, nameless)
    prepare(catalog, half, side=SIDE, shard=(1, 2))
    plan = json.loads((half / "plan.json").read_bytes())
    del plan["dataset"]
    (half / "plan.json").write_text(json.dumps(plan))
    reason = "does not say of which dataset its images are: prepare them anew, into another folder"
    with pytest.raises(InvalidInput, match=reason):
        open_store(store.folder)
    for folder in (store.folder, half):
        with pytest.raises(InvalidInput, match=reason):
            prepare(catalog, folder, side=SIDE)


def test_no_patients_id_is_in_a_store_and_its_groups_are_the_same(catalog, store, tmp_path):
    ids = (*(f"Jane Doe {i // 2}" for i in range(49)), f"image {catalog.names[49]}")
    named, folder = replace(catalog, groups=ids), tmp_path / "named"
    assert prepare(named, folder, side=SIDE, shard=(1, 2)) is None
    assert not any(b"Jane" in content for content in content_of_folder(folder).values())
    made = prepare(named, folder, side=SIDE)
    assert not any(b"Jane" in content for content in content_of_folder(folder).values())
    together = [[a == b for b in ids] for a in ids]
    assert [[a == b for b in made.groups] for a in made.groups] == together
    assert made.groups[49] == ids[49], "nobody's id"
    # The digest of the catalog is one of numbers too: nobody can try out ids on it.
    renamed = replace(catalog, groups=tuple(group.replace("Jane", "Anne") for group in ids))
    assert prepare(renamed, folder, side=SIDE) is not None


def test_groups_of_a_published_dataset_keep_their_names(catalog, tmp_path):
    groups = tuple(f"HAM_{i // 2}" for i in range(50))
    published = replace(catalog, groups=groups, dataset="ham10000")
    assert prepare(published, tmp_path / "store", side=SIDE).groups == groups


def test_numbers_in_place_of_ids_stay_as_they_are():
    groups = ("p", "image c", "q" * 12, "p", "image a", "image d", "image d")
    numbered = numbered_groups(groups, "bcdeafg")
    assert numbered == ("patient 1", "image c", "patient 3", "patient 1", "image a", "patient 2", "patient 2")
    assert numbered_groups(numbered, "bcdeafg") == numbered
    many = tuple(f"patient {i}" for i in range(1, 120))
    assert numbered_groups(many, [str(i) for i in range(119)]) == many


# Bad files

BAD = {f"images/{i:04d}.{FORMATS[i % 5].lower()}": b"no image %d" % i for i in range(0, 50, 2)}


@pytest.fixture
def spoiled(catalog: Catalog) -> Catalog:
    return with_contents(catalog, BAD)


def test_all_bad_files_are_named_at_the_end_and_the_rest_is_kept(catalog, spoiled, store, tmp_path):
    folder, decoded = tmp_path / "spoiled", []

    @functools.wraps(decode_plainly)
    def decode(content: bytes, side: int, name: str) -> torch.Tensor:
        decoded.append(name)
        return decode_plainly(content, side, name)

    with pytest.raises(InvalidInput) as refusal:
        prepare(spoiled, folder, side=SIDE)
    first, *lines = str(refusal.value).splitlines()
    assert first.startswith("25 of 50 files cannot be decoded: replace them, or leave them out (--skip-bad).")
    assert len(lines) == 21
    assert all(name in line for name, line in zip(sorted(BAD), lines[:20], strict=False))
    assert lines[-1].strip() == "and 5 more"
    assert not is_store(folder)

    prepare(replace(catalog, decode=decode), folder, side=SIDE)
    assert sorted(decoded) == sorted(BAD), "only what was bad is decoded again"
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_bad_files_can_be_left_out(catalog, spoiled, tmp_path):
    folder = tmp_path / "store"
    store = prepare(spoiled, folder, side=SIDE, skip_bad=True)
    good = np.arange(1, 50, 2)
    wanted = catalog.select(good)
    assert (store.names, store.groups) == (wanted.names, wanted.groups)
    assert store.labels.tolist() == wanted.labels.tolist()
    assert store.is_test.tolist() == wanted.is_test.tolist()
    assert torch.equal(store.samples().read_all(), wanted.samples(SIDE).read_all())
    assert [skipped.name for skipped in store.skipped] == sorted(BAD)
    assert [skipped.sha256 for skipped in store.skipped] == [
        hashlib.sha256(BAD[name]).hexdigest() for name in sorted(BAD)
    ]
    assert not any("0x" in skipped.problem for skipped in store.skipped)

    before = states_of(folder)
    assert prepare(spoiled, folder, side=SIDE, skip_bad=True).names == store.names
    with pytest.raises(InvalidInput, match="25 of 50"):
        prepare(spoiled, folder, side=SIDE)
    assert states_of(folder) == before
    assert changed_sources(store, spoiled) == []
    assert changed_sources(store, catalog) == sorted(BAD)


def test_leaving_out_comes_to_the_same_whether_asked_for_at_first_or_later(spoiled, tmp_path):
    with pytest.raises(InvalidInput):
        prepare(spoiled, tmp_path / "later", side=SIDE)
    for name in ("later", "first"):
        prepare(spoiled, tmp_path / name, side=SIDE, skip_bad=True)
    assert content_of_folder(tmp_path / "later") == content_of_folder(tmp_path / "first")


def test_a_whole_chunk_of_bad_files_leaves_no_gap(catalog, tmp_path):
    bad = {catalog.names[i]: b"" for i in range(CHUNK, 2 * CHUNK)}
    store = prepare(with_contents(catalog, bad), tmp_path / "store", side=SIDE, skip_bad=True)
    good = [i for i in range(50) if not CHUNK <= i < 2 * CHUNK]
    assert torch.equal(store.samples().read_all(), catalog.samples(SIDE).read_all()[good])


def test_a_store_of_nothing_is_not_made(catalog, tmp_path):
    bad = with_contents(catalog, dict.fromkeys(catalog.names, b""))
    with pytest.raises(InvalidInput, match="50 of 50"):
        prepare(bad, tmp_path / "store", side=SIDE, skip_bad=True)
    assert not is_store(tmp_path / "store")


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_that_cannot_be_read_is_never_left_out(catalog, store, tmp_path, skip_bad):
    class Failing(Contents):
        def read(self, name: str) -> bytes:
            if name == catalog.names[3]:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(name)

    folder = tmp_path / "failing"
    failing = replace(catalog, files=Failing({**catalog.files.contents, catalog.names[5]: b"no image"}))
    with pytest.raises(InvalidInput) as refusal:
        prepare(failing, folder, side=SIDE, skip_bad=skip_bad)
    first, *lines = str(refusal.value).splitlines()
    assert first.startswith("1 of 50 files cannot be read: see that their disk is there and open to you")
    assert lines == [
        f"  {catalog.names[3]}: [Errno 5] Input/output error",
        "  1 more cannot be decoded",
    ]
    assert not is_store(folder)
    prepare(catalog, folder, side=SIDE, skip_bad=skip_bad)
    assert content_of_folder(folder) == content_of_folder(store.folder), "nothing is left of the outage"


def test_a_share_that_goes_away_makes_no_store_with_gaps(catalog, tmp_path):
    class Away(Contents):
        def read(self, name: str) -> bytes:
            if name >= catalog.names[25]:
                raise InvalidInput(f"{name} cannot be read (No such file or directory); make it readable.")
            return super().read(name)

    away = replace(catalog, files=Away(catalog.files.contents))
    with pytest.raises(InvalidInput, match="25 of 50 files cannot be read"):
        prepare(away, tmp_path / "store", side=SIDE, skip_bad=True)
    assert not is_store(tmp_path / "store")
    assert prepare(catalog, tmp_path / "store", side=SIDE, skip_bad=True).skipped == ()


def test_a_decoder_that_breaks_its_word_is_an_error(catalog, tmp_path):
    @functools.wraps(decode_plainly)
    def in_gray(content: bytes, side: int, name: str) -> torch.Tensor:
        return torch.zeros(1, side, side, dtype=torch.uint8)

    gray = replace(catalog, decode=in_gray)
    with pytest.raises(ValueError, match=r"images/00\d\d\.\w+ was decoded to uint8 \(1, 10, 10\)"):
        prepare(gray, tmp_path / "store", side=SIDE, workers=1)


# Shards and locks


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_shards_in_any_order_give_the_bytes_of_one(catalog, store, tmp_path, order):
    folder = tmp_path / "sharded"
    *early, last = order
    for index in early:
        assert prepare(catalog, folder, side=SIDE, shard=(index, 3)) is None
        assert not is_store(folder)
    made = prepare(catalog, folder, side=SIDE, shard=(last, 3))
    assert made.names == catalog.names
    assert content_of_folder(folder) == content_of_folder(store.folder)
    before = states_of(folder)
    assert prepare(catalog, folder, side=SIDE, shard=(2, 3)).names == catalog.names
    assert states_of(folder) == before


@pytest.mark.parametrize("n_shards", [2, 7, 10])
def test_shards_at_the_same_time_give_the_bytes_of_one(catalog, store, tmp_path, n_shards):
    folder = tmp_path / "sharded"
    with ThreadPoolExecutor(n_shards) as pool:
        shards = range(1, n_shards + 1)
        made = list(pool.map(lambda i: prepare(catalog, folder, side=SIDE, shard=(i, n_shards)), shards))
    assert any(made)
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_shards_made_apart_are_put_together_by_copying(catalog, store, tmp_path):
    together = tmp_path / "together"
    for index in (1, 2):
        part = tmp_path / f"part {index}"
        assert prepare(catalog, part, side=SIDE, shard=(index, 2)) is None
        for name, content in content_of_folder(part).items():
            (together / name).parent.mkdir(parents=True, exist_ok=True)
            (together / name).write_bytes(content)

    @functools.wraps(decode_plainly)
    def refuse(*arguments: object) -> None:
        pytest.fail("nothing is decoded again")

    undecodable = replace(catalog, decode=refuse)
    assert prepare(undecodable, together, side=SIDE) is not None
    assert content_of_folder(together) == content_of_folder(store.folder)


class Held:
    """A decoder that waits until it is let go."""

    def __init__(self) -> None:
        functools.update_wrapper(self, decode_plainly)  # what it is to a store
        self.began, self.let_go = threading.Event(), threading.Event()

    def __call__(self, content: bytes, side: int, name: str) -> torch.Tensor:
        self.began.set()
        assert self.let_go.wait(20)
        return decode_plainly(content, side, name)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.let_go.set()


@pytest.mark.parametrize("second", [(1, 2), (1, 1), (3, 3)])
def test_two_processes_never_write_the_same_chunk(catalog, store, tmp_path, held, second):
    folder = tmp_path / "locked"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(prepare, replace(catalog, decode=held), folder, side=SIDE, shard=(1, 2))
        assert held.began.wait(20)
        with pytest.raises(RunLocked, match="Another process is preparing"):
            prepare(catalog, folder, side=SIDE, shard=second)
        held.let_go.set()
        assert first.result() is None
    assert prepare(catalog, folder, side=SIDE) is not None
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_who_is_done_while_another_works_leaves_the_finish_to_it(catalog, store, tmp_path, held):
    folder = tmp_path / "locked"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(prepare, replace(catalog, decode=held), folder, side=SIDE, shard=(2, 2))
        assert held.began.wait(20)
        assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is None
        held.let_go.set()
        assert slow.result() is not None
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_nobody_finishes_while_another_still_looks_through_its_shard(catalog, store, tmp_path):
    class Waiting(Contents):
        began, let_go = threading.Event(), threading.Event()

        def read(self, name: str) -> bytes:
            self.began.set()
            assert self.let_go.wait(20)
            return super().read(name)

    folder = tmp_path / "locked"
    assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is None
    waiting = replace(catalog, files=Waiting(catalog.files.contents))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(prepare, waiting, folder, side=SIDE, shard=(1, 2))
        assert Waiting.began.wait(20)
        early = prepare(catalog, folder, side=SIDE, shard=(2, 2))
        Waiting.let_go.set()
        assert slow.result() is not None
    assert early is None, "every chunk is written, but one may yet be written anew"
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_a_shard_that_came_over_in_part_is_not_taken_for_done(catalog, store, tmp_path):
    folder = tmp_path / "sharded"
    assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is None
    path = folder / "pixels/000001.u8"
    path.write_bytes(path.read_bytes()[:-1])
    assert prepare(catalog, folder, side=SIDE, shard=(2, 2)) is None
    assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is not None
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_the_bad_files_of_all_shards_are_named_by_the_last(catalog, tmp_path):
    spoiled = with_contents(catalog, {catalog.names[0]: b"", catalog.names[49]: b""})
    with pytest.raises(InvalidInput, match="1 of 50"):
        prepare(spoiled, tmp_path / "store", side=SIDE, shard=(1, 2))
    with pytest.raises(InvalidInput, match="2 of 50"):
        prepare(spoiled, tmp_path / "store", side=SIDE, shard=(2, 2))
    assert len(prepare(spoiled, tmp_path / "store", side=SIDE, shard=(2, 2), skip_bad=True)) == 48


# Interruptions; test_store_killed.py has the hard ones


def test_what_watches_is_told_how_far_it_is(catalog, tmp_path):
    told = []
    prepare(catalog, tmp_path / "store", side=SIDE, shard=(1, 2), watch=lambda *numbers: told.append(numbers))
    done, totals = zip(*told, strict=True)
    assert set(totals) == {3 * CHUNK}
    assert sorted(done) == list(done)
    assert done[-1] == 3 * CHUNK


def test_stopped_by_the_keyboard_it_goes_on_where_it_was(catalog, store, tmp_path):
    folder, decoded = tmp_path / "stopped", []

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    @functools.wraps(decode_plainly)
    def slowly(content: bytes, side: int, name: str) -> torch.Tensor:
        time.sleep(0.05)
        decoded.append(name)
        return decode_plainly(content, side, name)

    with pytest.raises(KeyboardInterrupt):
        prepare(replace(catalog, decode=slowly), folder, side=SIDE, workers=1, watch=stop)
    assert len(decoded) < CHUNK, "it stops within a chunk"
    assert list(folder.rglob("*.tmp")) == []
    prepare(catalog, folder, side=SIDE)
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_a_source_changed_between_two_attempts_is_decoded_anew(catalog, tmp_path):
    folder = tmp_path / "store"
    assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is None
    changed = with_contents(catalog, {catalog.names[5]: catalog.read(15)})
    store = prepare(changed, folder, side=SIDE)
    assert torch.equal(store.samples().read_all(), changed.samples(SIDE).read_all())
    assert changed_sources(store, changed) == []


@pytest.mark.parametrize(
    "damage", ["pixels cut", "pixels changed", "pixels gone", "record cut", "record of none"]
)
def test_a_chunk_damaged_before_the_end_is_made_again(catalog, store, tmp_path, damage):
    folder = tmp_path / "damaged"
    assert prepare(catalog, folder, side=SIDE, shard=(1, 2)) is None
    pixels, record = folder / "pixels/000001.u8", folder / "unfinished/000001.json"
    content = pixels.read_bytes()
    match damage:
        case "pixels cut":
            pixels.write_bytes(content[:-1])
        case "pixels changed":
            pixels.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
        case "pixels gone":
            pixels.unlink()
        case "record cut":
            record.write_bytes(record.read_bytes()[:-3])
        case "record of none":
            record.write_text("[]")
    prepare(catalog, folder, side=SIDE)
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_a_full_disk_ends_it_with_a_reason_and_loses_nothing(catalog, store, tmp_path, monkeypatch):
    folder, fsync, calls = tmp_path / "full", os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InvalidInput, match=r"cannot be written to \(No space left on device\)"):
            prepare(catalog, folder, side=SIDE)
    assert list((folder / "unfinished").glob("*.json")) != []
    assert list(folder.rglob("*.tmp")) == []
    prepare(catalog, folder, side=SIDE)
    assert content_of_folder(folder) == content_of_folder(store.folder)


def test_too_little_room_is_found_before_anything_is_written(catalog, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 50 * 3 * SIDE**2 - 1, "total": 2**40})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(InvalidInput, match="has no room"):
        prepare(catalog, tmp_path / "store", side=SIDE)
    assert not (tmp_path / "store").exists()
    usage.free += 1
    assert prepare(catalog, tmp_path / "store", side=SIDE) is not None


def test_a_place_that_takes_no_files_is_said_to_be_one(catalog, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0, "total": 0}))
        with pytest.raises(InvalidInput, match=r"store cannot be made: you may not write to .*"):
            prepare(catalog, tmp_path / "store", side=SIDE)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(InvalidInput, match="cannot be made: you may not write to"):
            prepare(catalog, tmp_path / "a/b/store", side=SIDE)
    assert list(tmp_path.iterdir()) == []


def test_pytorchs_threads_are_as_many_as_before(catalog, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        prepare(catalog, tmp_path / "store", side=SIDE)
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


# Opening


def test_what_is_no_store_cannot_be_opened(catalog, tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        assert not is_store(folder)
        with pytest.raises(InvalidInput, match="holds no prepared store"):
            open_store(folder)
    prepare(catalog, tmp_path / "half", side=SIDE, shard=(1, 2))
    with pytest.raises(InvalidInput, match="is not finished: run the command that prepares it once more"):
        open_store(tmp_path / "half")


def test_any_changed_byte_of_the_pixels_is_found(catalog, store):
    paths, rng = sorted((store.folder / "pixels").iterdir()), random.Random(0)
    places = [(paths[0], 0), (paths[-1], paths[-1].stat().st_size - 1)]
    places += [(path, rng.randrange(path.stat().st_size)) for path in rng.choices(paths, k=30)]
    for path, place in places:
        content = path.read_bytes()
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
        open_store(store.folder, verify="sizes")
        with pytest.raises(DamagedFile, match=path.name):
            open_store(store.folder)
        with pytest.raises(DamagedFile, match=path.name):
            prepare(catalog, store.folder, side=SIDE)
        path.write_bytes(content)
    open_store(store.folder)


def test_pixels_that_are_missing_or_cut_are_found_at_once(store):
    path = store.folder / "pixels/000002.u8"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"0", b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile, match="000002"):
            open_store(store.folder)
    path.unlink()
    with pytest.raises(DamagedFile, match="000002"):
        open_store(store.folder)


def test_any_changed_byte_of_the_manifest_is_found_or_means_nothing(store):
    path, rng = store.folder / "manifest.json", random.Random(1)
    content, n_found = path.read_bytes(), 0
    for place in rng.sample(range(len(content)), 150):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        )
        try:
            opened = open_store(store.folder)
        except DamagedFile:
            n_found += 1
        else:
            assert (opened.names, opened.sha256s, opened.groups) == (store.names, store.sha256s, store.groups)
            assert opened.labels.tolist() == store.labels.tolist()
    assert n_found > 100
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedFile, match=r"manifest\.json"):
        open_store(store.folder)


UNTRUE = {
    "nothing": lambda c: c.clear(),
    "nothing but its kind": lambda c: [
        c.pop(k) for k in list(c) if k not in ("format", "version", "dataset")
    ],
    **{
        f"no {key}": lambda c, key=key: c.pop(key)
        for key in (
            "side",
            "class_names",
            "names",
            "labels",
            "groups",
            "is_test",
            "sha256s",
            "chunks",
            "skipped",
        )
    },
    "a label of no class": lambda c: c["labels"].__setitem__(3, 7),
    "a label below 0": lambda c: c["labels"].__setitem__(3, -1),
    "a label in words": lambda c: c["labels"].__setitem__(3, "b"),
    "a label that is a truth": lambda c: c["labels"].__setitem__(3, True),
    "an image less": lambda c: c["names"].pop(),
    "a group less": lambda c: c["groups"].pop(),
    "a part of the split less": lambda c: c["is_test"].pop(),
    "a file less": lambda c: c["chunks"].pop(),
    "files without images": lambda c: c.update(chunks=[]),
    "a file of less than nothing": lambda c: c["chunks"][0].update(images=-8),
    "a file without checksum": lambda c: c["chunks"][0].pop("crc32"),
    "a side of nothing": lambda c: c.update(side=0),
    "half a side": lambda c: c.update(side=SIDE + 0.5),
    "other images": lambda c: c.update(n_images=51),
    "a text for a list": lambda c: c.update(names="x" * 50),
    "no class": lambda c: c.update(class_names=[]),
    "a dataset without name": lambda c: c.update(dataset=None),
    "skipped for no reason": lambda c: c.update(skipped=[{"name": "a"}], n_images=51),
    "skipped unread": lambda c: c.update(skipped=[{"name": "a", "sha256": None, "problem": ""}], n_images=51),
    "skipped for more": lambda c: c.update(
        skipped=[{"name": "a", "sha256": "b", "problem": "c", "more": "d"}], n_images=51
    ),
}


@pytest.mark.parametrize("untruth", UNTRUE)
def test_a_manifest_that_is_whole_and_wrong_is_damaged(catalog, store, untruth):
    content = manifest_of(store.folder)
    UNTRUE[untruth](content)
    rewrite_manifest(store.folder, content)
    with pytest.raises(DamagedFile, match=r"manifest\.json .*delete the folder and prepare it again"):
        open_store(store.folder)


def test_a_manifest_nested_beyond_reading_is_damaged(store):
    (store.folder / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(DamagedFile, match=r"manifest\.json"):
        open_store(store.folder)


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_another_version_is_refused(catalog, store, tmp_path, version):
    half = tmp_path / "half"
    rewrite_manifest(store.folder, manifest_of(store.folder) | {"version": version})
    prepare(catalog, half, side=SIDE, shard=(1, 2))
    plan = json.loads((half / "plan.json").read_bytes())
    (half / "plan.json").write_text(json.dumps(plan | {"version": version}))
    reason = f"of version {version}, not 2: prepare the images anew, into another folder"
    with pytest.raises(InvalidInput, match=reason):
        open_store(store.folder)
    for folder in (store.folder, half):
        before = states_of(folder)
        with pytest.raises(InvalidInput, match=reason):
            prepare(catalog, folder, side=SIDE)
        assert states_of(folder) == before


# Reading


def test_images_are_read_by_index_as_copies(catalog, store):
    pixels = catalog.samples(SIDE).read_all()
    indices = torch.tensor([49, 0, 7, 8, 7, 23])
    images = store.images.read(indices)
    assert isinstance(store.images, ImageSource)
    assert torch.equal(images, pixels[indices])
    images.zero_()
    assert torch.equal(store.images.read(indices), pixels[indices])
    assert store.images.read(torch.empty(0, dtype=torch.int64)).shape == (0, 3, SIDE, SIDE)
    for outside in (-1, 50):
        with pytest.raises(IndexError):
            store.images.read(torch.tensor([3, outside]))


def test_images_travel_to_another_process_as_a_path(store):
    everything = torch.arange(50)
    wanted = store.images.read(everything)
    sent = pickle.dumps(store.images)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent).read(everything), wanted)
    assert torch.equal(
        pickle.loads(pickle.dumps(store.samples("test"))).read_all(), store.samples("test").read_all()
    )


def test_images_are_read_by_many_threads_at_once(catalog, store):
    pixels = catalog.samples(SIDE).read_all()
    orders = [torch.randperm(50, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for order, images in zip(orders, pool.map(store.images.read, orders), strict=True):
            assert torch.equal(images, pixels[order])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_can_be_streamed(catalog, store, workers):
    epoch = plain_epoch(50, Key(3), batch_size=6)
    cpu = torch.device("cpu")
    streamed = Feed(store.samples(), PREPROCESSING, cpu, ExecutionConfig(resident=False, workers=workers))
    resident = Feed(catalog.samples(SIDE), PREPROCESSING, cpu, ExecutionConfig(resident=True))
    batches = zip(training_batches(streamed, epoch), training_batches(resident, epoch), strict=True)
    n_images = 0
    for (images, labels), (wanted_images, wanted_labels) in batches:
        assert torch.equal(images, wanted_images)
        assert torch.equal(labels, wanted_labels)
        n_images += len(images)
    assert n_images == 50


@pytest.mark.parametrize("resident", [True, False])
def test_learning_from_a_store_is_learning_from_its_catalog(catalog, store, resident):
    train = catalog.select(np.flatnonzero(~catalog.is_test)).samples(SIDE)
    test = catalog.select(np.flatnonzero(catalog.is_test)).samples(SIDE)
    from_files = Task(catalog.class_names, 0, train, test)
    from_store = Task(store.class_names, 0, store.samples("train"), store.samples("test"))
    config = short_training(execution={"device": "cpu", "resident": resident})
    tasks = (from_files, from_store)
    learned, same = (learn_task(new_state(spec=SMALLEST), task, Balanced(), config) for task in tasks)
    assert changed_names(content_of(learned.network), content_of(same.network)) == set()
    assert changed_names(content_of(new_state(spec=SMALLEST).network), content_of(learned.network)) != set()
    assert torch.equal(learned.memory.read_all(), same.memory.read_all())


# Changed sources


def test_no_changed_byte_of_a_source_goes_unnoticed(tmp_path):
    catalog = catalog_of(300, seed=3)
    store = prepare(catalog, tmp_path / "store", side=SIDE)
    assert changed_sources(store, catalog) == []
    rng, contents = random.Random(0), {}
    for number, name in enumerate(catalog.names):
        content = bytearray(catalog.files.read(name))
        # The first bytes tell the format, the last ones nothing: Pillow does not even read them.
        place = {0: rng.randrange(4), 1: len(content) - 1}.get(number % 4, rng.randrange(len(content)))
        content[place] = (content[place] + rng.randrange(1, 256)) % 256
        contents[name] = bytes(content)
    assert changed_sources(store, with_contents(catalog, contents)) == list(catalog.names)
    for name in rng.sample(catalog.names, 40):
        changed = with_contents(catalog, {name: contents[name]})
        assert changed_sources(store, changed) == [name]
    with pytest.raises(RunConflict, match="1 have changed since") as refusal:
        prepare(changed, tmp_path / "store", side=SIDE)
    assert name in str(refusal.value)


def test_bytes_added_or_cut_off_are_changes(catalog, store):
    first, second = catalog.names[:2]
    changes = {first: catalog.read(0) + b"\0", second: catalog.read(1)[:-1]}
    assert changed_sources(store, with_contents(catalog, changes)) == [first, second]


def test_missing_and_added_sources_are_changes(catalog, store):
    fewer = catalog.select(np.arange(1, 50))
    assert changed_sources(store, fewer) == [catalog.names[0]]
    gone = replace(
        catalog, files=Contents({n: c for n, c in catalog.files.contents.items() if n != catalog.names[7]})
    )
    assert changed_sources(store, gone) == [catalog.names[7]]
    more = catalog_of(52)
    assert changed_sources(store, more) == list(more.names[50:])
    absent = replace(more, files=catalog.files)
    assert changed_sources(store, absent) == list(more.names[50:]), "added to the list, but not there"


def test_a_real_dataset_is_the_same_from_its_store(shared_data, tmp_path):
    from medcil.data.sources.ham10000 import read_catalog

    catalog = read_catalog(shared_data / "ham10000_200x150.tar.gz").select(np.arange(0, 10_015, 501))
    store = prepare(catalog, tmp_path / "store", side=64)
    assert torch.equal(store.samples().read_all(), catalog.samples(64).read_all())
    assert changed_sources(store, catalog) == []
