"""A sweep survives the loss of a node, and may begin with one launcher and end with another.

    python proofs/ray_cluster.py --out build/proof-cluster        some minutes on two cores

Thirty small runs (phantom, ResNet-8, ten epochs for each of two tasks), three times over:
- local: the reference
- node lost: with `ray` on two nodes on this machine, one of which is lost while it computes
- begun local: with `local`, interrupted, then ended with `ray`
Of each: all runs are finished, every epoch is logged once, and runs.json, the tables, and metrics.json and
log.jsonl of every run are the same bytes as the reference's. What was found is printed and in result.json.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml
from two_nodes import TwoNodes, two_nodes

NAME = "thirty"
SUITE = {
    "title": "Thirty small runs",
    "metrics": {"Acc": "acc_micro", "Fgt": "forgetting"},
    "orders": [0, 1, 2],
    "common": {
        "data": {"name": "phantom", "side": 20, "crop": 16},
        "network": {"backbone": "resnet8_cifar"},
        "memory": {"per_class": 10},
        "method": {"name": "balanced"},
        "training": {"epochs": 10, "batch_size": 64},
        "execution": {"checkpoint_every": 1},
    },
    "settings": {"4-3": {"scenario": {"base": 4, "increment": 3}}},
    "rows": {"balanced": {}},
    "vary": {"seed": list(range(10))},
}
N_RUNS = 30
EPOCHS = [(task, epoch) for task in (1, 2) for epoch in range(1, 11)]
TOKEN = secrets.token_hex(32)


def start_sweep(out: Path, *options: str) -> "subprocess.Popen[bytes]":
    """`medcil bench` in a process of its own, as a person would call it."""
    command = [sys.executable, "-m", "medcil", "bench", str(out.parent / f"{NAME}.yaml"), "--out", str(out)]
    out.mkdir(exist_ok=True)
    with (out / "said.txt").open("ab") as said:
        return subprocess.Popen(
            [*command, *options],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_AUTH_TOKEN": TOKEN},
        )


def on(cluster: TwoNodes) -> list[str]:
    return ["--launcher", "ray", "--launcher-option", f"address={cluster.address}"]


def finished(out: Path) -> list[Path]:
    metrics = sorted(out.glob("runs/*/metrics.json"))
    return [path.parent for path in metrics if json.loads(path.read_text())["finished"]]


def wait_for_training(
    n: int, out: Path, sweep: "subprocess.Popen[bytes]", candidates: Callable[[], list[Path]]
) -> list[Path]:
    """Once n runs are finished: the candidates that have a checkpoint, and much to do."""
    found: list[Path] = []
    while len(finished(out)) < n or not found:
        assert sweep.poll() is None, f"The sweep has ended: see {out / 'said.txt'}"
        time.sleep(0.05)
        found = [run for run in candidates() if 2 <= len(logged(run)) <= len(EPOCHS) // 2]
    return found


def logged(run: Path) -> list[tuple[int, int]]:
    """(task, epoch) of every line."""
    path = run / "log.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["task"], line["epoch"]) for line in lines]


def parts(run: Path) -> int:
    """In how many processes a run was computed."""
    path = run / "timings.jsonl"
    return (
        sum("started" in json.loads(line) for line in path.read_text().splitlines()) if path.exists() else 0
    )


def check(out: Path, reference: Path) -> dict[str, int]:
    runs = finished(out)
    assert len(runs) == N_RUNS, f"{len(runs)} of {N_RUNS} runs are finished"
    for run in runs:
        assert Counter(logged(run)) == Counter(EPOCHS), run
    same = [
        Path(NAME) / "runs.json",
        *(path.relative_to(out) for path in (out / NAME / "tables").rglob("*.*")),
    ]
    same += [run.relative_to(out) / name for run in runs for name in ("metrics.json", "log.jsonl")]
    for path in same:
        assert (out / path).read_bytes() == (reference / path).read_bytes(), f"{out / path} differs"
    return {
        "finished": len(runs),
        "computed in one process": sum(parts(run) == 1 for run in runs),
        "resumed in another": sum(parts(run) > 1 for run in runs),
        "files equal to the reference's": len(same),
    }


def local(out: Path) -> None:
    assert start_sweep(out).wait() == 0


def node_lost(out: Path) -> None:
    with two_nodes(TOKEN, cpus_each=2) as cluster:
        sweep = start_sweep(out, *on(cluster))
        lost = wait_for_training(10, out, sweep, lambda: runs_on_the_second(cluster))
        cluster.lose_the_second()
        assert sweep.wait() == 0
    assert all(parts(run) == 2 for run in lost), "no run was interrupted"


def runs_on_the_second(cluster: TwoNodes) -> list[Path]:
    commands = [command for command in cluster.jobs_on_the_second() if "--out" in command]
    return [Path(command[command.index("--out") + 1]) for command in commands]


def begun_local(out: Path) -> None:
    sweep = start_sweep(out)
    stopped = wait_for_training(8, out, sweep, lambda: list(out.glob("runs/*")))
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait() == 130
    assert len(finished(out)) < N_RUNS
    with two_nodes(TOKEN, cpus_each=2) as cluster:
        assert start_sweep(out, *on(cluster)).wait() == 0
    assert all(parts(run) == 2 for run in stopped), "no run was interrupted"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / f"{NAME}.yaml").write_text(yaml.safe_dump(SUITE, sort_keys=False))
    results = {}
    for name, do in (("local", local), ("node lost", node_lost), ("begun local", begun_local)):
        began, out = time.monotonic(), folder / name.replace(" ", "-")
        do(out)
        results[name] = {**check(out, folder / "local"), "seconds": round(time.monotonic() - began)}
        print(name, json.dumps(results[name]), flush=True)
    (folder / "result.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
