"""A Ray cluster of two nodes, one of which is lost while jobs run: all end, and nothing is done twice."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from medcil.errors import InvalidInput
from medcil.experiments.cluster import RayLauncher, RayOptions
from medcil.experiments.launcher import Job

from .test_launchers import (
    TOKEN,
    FakeJob,
    epochs_logged,
    fake_job,
    is_alive,
    starts,
    wait_for_all,
    wait_until,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proofs"))
from two_nodes import TwoNodes, two_nodes

pytestmark = pytest.mark.slow

RECIPE = {
    "data": {"name": "phantom", "side": 20, "crop": 16},
    "scenario": {"base": 4, "increment": 3},
    "method": {"name": "finetune"},
    "network": {"backbone": "resnet8_cifar"},
    "training": {"epochs": 3, "batch_size": 64},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_every": 1},
}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with two_nodes(TOKEN, cpus_each=2) as nodes:
        yield nodes


def real_job(seed: int, tmp_path: Path) -> Job:
    recipe = tmp_path / f"{seed}.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "seed": seed}))
    return Job(f"real-{seed}", recipe, tmp_path / "runs" / f"real-{seed}")


def processes_in_the_log(job: Job) -> set[int]:
    return {json.loads(line)["pid"] for line in (job.out / "log.jsonl").read_text().splitlines()}


def come_with_another_token(cluster: TwoNodes, tmp_path: Path) -> str:
    code = f"""
from pathlib import Path
from medcil.experiments.cluster import RayLauncher, RayOptions
RayLauncher(Path({str(tmp_path)!r}), RayOptions(address={cluster.address!r}))
"""
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
def test_thirty_jobs_end_though_a_node_is_lost(cluster, tmp_path):
    with pytest.raises(InvalidInput, match="needs 1 GPUs, but the largest node has 0"):
        RayLauncher(tmp_path, RayOptions(address=cluster.address, gpus_per_run=1))
    launcher = RayLauncher(tmp_path / "logs", RayOptions(address=cluster.address))
    real = [real_job(seed, tmp_path) for seed in range(2)]
    short = [fake_job(f"short-{i}", tmp_path, epochs=5, seconds=0.05) for i in range(26)]
    long = [fake_job(f"long-{i}", tmp_path, epochs=50, seconds=0.1) for i in range(4)]

    def begun_on_the_second() -> list[FakeJob]:
        begun = [job for job in long if 0 < len(epochs_logged(job)) < 25]
        there = cluster.jobs_on_the_second()
        return [job for job in begun if job.command in [command[:-1] for command in there]]

    try:
        for job in (*real, *short[:12], *long, *short[12:]):
            launcher.start(job)
        wait_until(lambda: bool(begun_on_the_second()))
        lost = begun_on_the_second()
        cluster.lose_the_second()
        wait_until(lambda: not any(is_alive(starts(job)[0]) for job in lost), seconds=10)
        said = come_with_another_token(cluster, tmp_path)
        assert "Unauthenticated" in said
        assert "~/.ray/auth_token" in said
        ended = wait_for_all(launcher, 32, seconds=90)
    finally:
        launcher.stop()
    assert {end.key: end.exit_code for end in ended.values()} == dict.fromkeys(ended, 0)
    for job in (*short, *long):
        assert epochs_logged(job) == list(range(job.epochs)), job.key
    for job in lost:  # ended with its node, and went on from there
        assert len(processes_in_the_log(job)) == 2, job.key
    for job in real:
        assert json.loads((job.out / "metrics.json").read_text())["finished"]
        lines = [json.loads(line) for line in (job.out / "log.jsonl").read_text().splitlines()]
        times = Counter((line["task"], line["phase"], line["epoch"]) for line in lines)
        assert len(times) == 6  # 4 classes, then 3; 3 epochs each
        assert set(times.values()) == {1}
