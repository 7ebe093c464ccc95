"""A store whose preparation is killed again and again ends with the bytes of one that was left alone.

SIGKILL comes just before or after the steps that count, and at random moments, to one process and to two
that share the work. Attempts fork from a process that has imported everything, which is this file run as a
program.
"""

import fnmatch
import functools
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

from medcil.data import cache_plan
from medcil.data.cache import open_store, prepare
from medcil.data.catalog import Catalog, decode_plainly

pytestmark = pytest.mark.slow

N_IMAGES, CHUNK, SIDE = 50, 8, 12
N_RANDOM_KILLS = 10
# In the order in which they come, so that each is reached.
STEPS: list[tuple[Literal["before", "after"], str]] = [
    ("before", "plan.json"),
    ("after", "plan.json"),
    ("before", "pixels/000000.u8"),
    ("after", "pixels/000000.u8"),
    ("before", "unfinished/000000.json"),
    ("after", "unfinished/000000.json"),
    ("after", "pixels/000003.u8"),
    ("before", "unfinished/000005.json"),
    ("after", "unfinished/000006.json"),
    ("before", "manifest.json"),
    ("after", "manifest.json"),
    ("before", "plan.json goes"),
]
# Of two shards that have a store in common, the chunks 0 to 2 and 3 to 6.
SHARED_STEPS: list[tuple[int, Literal["before", "after"], str]] = [
    (1, "after", "plan.json"),
    (2, "before", "pixels/000003.u8"),
    (1, "after", "pixels/000000.u8"),
    (2, "before", "unfinished/000004.json"),
    (1, "after", "unfinished/000001.json"),
    (2, "after", "pixels/000006.u8"),
]


@dataclass(frozen=True)
class Contents:
    contents: dict[str, bytes]

    def names(self) -> Sequence[str]:
        return list(self.contents)

    def read(self, name: str) -> bytes:
        return self.contents[name]


def slowly(content: bytes, side: int, name: str) -> torch.Tensor:
    time.sleep(0.01)  # a chunk outlasts most of the random moments, so that they come before the end
    return decode_plainly(content, side, name)


def small_catalog() -> Catalog:
    """Every seventh file is bad."""
    rng, contents = np.random.default_rng(0), {}
    for i in range(N_IMAGES):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(20, 15, 3), dtype=np.uint8)).save(buffer, format="JPEG")
        contents[f"{i:02d}.jpg"] = b"no image" if i % 7 == 6 else buffer.getvalue()
    labels = rng.integers(4, size=N_IMAGES)
    return Catalog(Contents(contents), tuple(contents), labels, tuple("abcd"), decode=slowly)


def kill_at(when: str, step: str) -> None:
    """Arms this process to kill itself where a file gets its final name, or where the plan is removed."""
    os.replace = functools.partial(_fatal, os.replace, when, step, "{1}")  # type: ignore[assignment]
    os.unlink = functools.partial(_fatal, os.unlink, when, step, "{0} goes")  # type: ignore[assignment]


def _fatal(
    act: Callable[..., None], when: str, step: str, form: str, *paths: object, **options: object
) -> None:
    is_step = fnmatch.fnmatch(form.format(*paths), f"*/{step}")
    if is_step and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    act(*paths, **options)
    if is_step:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_forks(folder: Path) -> None:
    """Prints how each attempt to be killed ended; at last lets every folder be finished."""
    cache_plan.CHUNK_IMAGES = CHUNK
    catalog = small_catalog()

    def attempt(store: str, shard: tuple[int, int] = (1, 1), arm: Callable[[], None] = lambda: None) -> None:
        arm()
        torch.set_num_threads(1)
        prepare(catalog, folder / store, side=SIDE, shard=shard, workers=2, skip_bad=True)

    def start(*arguments: object) -> multiprocessing.Process:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=arguments)
        child.start()
        return child

    def end(child: multiprocessing.Process, moment: str, delay: float | None = None) -> None:
        child.join(delay)
        child.kill()
        child.join()
        print(json.dumps({"moment": moment, "exit": child.exitcode}))

    began = time.monotonic()
    start("left alone").join()
    duration = time.monotonic() - began
    for when, step in STEPS:
        end(start("steps", (1, 1), functools.partial(kill_at, when, step)), f"{when} {step}")

    for shard, when, step in SHARED_STEPS:
        arm = functools.partial(kill_at, when, step)
        end(start("shared steps", (shard, 2), arm), f"shard {shard}, {when} {step}")

    randomly = random.Random(0)
    for number in range(N_RANDOM_KILLS):
        delay = randomly.uniform(0, duration / 3)
        end(start("random"), f"{number}: after {delay:.3f} s", delay)
    for number in range(N_RANDOM_KILLS // 2):
        children = [start("shared", (1, 2)), start("shared", (2, 2))]
        for child in children:
            delay = randomly.uniform(0, duration / 6)
            end(child, f"{number}, shared: after {delay:.3f} s", delay)

    children = [start("steps"), start("random")]
    children += [start(store, (i, 2)) for store in ("shared", "shared steps") for i in (2, 1)]
    for child in children:
        child.join()
        print(json.dumps({"moment": "at last", "exit": child.exitcode}))


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_killed_at_any_moment_a_store_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [a for a in attempts if a["moment"] != "at last"]
    assert len(killed) == len(STEPS) + len(SHARED_STEPS) + 2 * N_RANDOM_KILLS
    missed = [a["moment"] for a in killed if a["exit"] != -signal.SIGKILL]
    assert [moment for moment in missed if moment[0].isalpha()] == [], "not hit alive"
    assert len(missed) <= N_RANDOM_KILLS // 2, "too many came after the end"
    assert [a["exit"] for a in attempts[len(killed) :]] == [0] * 6

    expected = content_of(tmp_path / "left alone")
    assert len(expected) == 2 + -(-N_IMAGES // CHUNK)
    for name in ("steps", "random", "shared", "shared steps"):
        assert content_of(tmp_path / name) == expected
        store = open_store(tmp_path / name, verify="hashes")
        good = [i for i in range(N_IMAGES) if i % 7 != 6]
        wanted = small_catalog().select(np.array(good)).samples(SIDE)
        assert torch.equal(store.samples().read_all(), wanted.read_all())
        assert torch.equal(store.samples().labels, wanted.labels)


if __name__ == "__main__":
    kill_forks(Path(sys.argv[1]))
