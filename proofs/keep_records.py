"""What of a sweep's results is worth keeping beside the docs: small files, and nothing of the machine.

    python proofs/keep_records.py RESULTS KEPT SUITE... [--commit ID]

Copies the finished runs of these suites from RESULTS, a folder that `medcil bench --out RESULTS` filled, to
KEPT/runs: recipe, environment, data and metrics, a few kilobytes a run. Left out are weights, predictions,
logs, timings, where images and weights lay, confusion matrices of more than twenty classes. What KEPT/SUITE
already lists stays in it unless RESULTS has the same row, setting, order and seed. Then KEPT/SUITE is drawn:
tables and figures, without the page.

A run that was computed from a copy without .git does not know its commit: --commit says it, all forty digits,
and tables name it. A run that knows another is refused, before anything is copied. Kept again without
--commit, a run with the same metrics keeps the commit it has.

    python proofs/keep_records.py --draw KEPT SUITE...

only draws again, from the records alone.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml

from medcil.report.results import write_results
from medcil.storage.atomic import write_bytes, write_json

COMMIT = re.compile(r"[0-9a-f]{40}")
LARGEST_CONFUSION = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RESULTS KEPT SUITE")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--commit", metavar="ID", help="that computed the runs which do not know theirs")
    arguments = parser.parse_args()
    if arguments.commit is not None and arguments.draw:
        parser.error("--commit belongs to runs that are copied: leave it out, or --draw.")
    if arguments.commit is not None and not COMMIT.fullmatch(arguments.commit):
        parser.error(f"--commit {arguments.commit}: give all forty digits, as `git rev-parse HEAD` does.")
    results = None if arguments.draw else arguments.folders.pop(0)
    kept, *suites = arguments.folders
    if results is not None and arguments.commit is not None:
        for suite in suites:
            refuse_other_commits(results, suite.name, arguments.commit)
    for suite in suites:
        if results is not None:
            keep(results, kept, suite.name, arguments.commit)
        draw(kept / suite)


def refuse_other_commits(results: Path, suite: str, commit: str) -> None:
    for run in finished_runs(results, suite):
        known = commit_of(results / "runs" / run["key"])
        if known not in (None, commit):
            raise SystemExit(f"Leave --commit out, or give {known}: {run['key']} was computed by that one.")


def finished_runs(results: Path, suite: str) -> list[dict[str, Any]]:
    content = json.loads((results / suite / "runs.json").read_text())
    return [run for run in content["runs"] if run["state"] == "finished"]


def commit_of(run: Path) -> str | None:
    commit: str | None = json.loads((run / "environment.json").read_text()).get("git_commit")
    return commit


def keep(results: Path, kept: Path, suite: str, commit: str | None = None) -> None:
    content = json.loads((results / suite / "runs.json").read_text())
    finished = finished_runs(results, suite)
    for run in finished:
        keep_run(results / "runs" / run["key"], kept / "runs" / run["key"], commit)
    places = [place for run in finished for place in run["places"]]
    listed = kept / suite / "runs.json"
    before = json.loads(listed.read_text()) if listed.exists() else {"runs": [], "left_out": []}
    for run in before["runs"]:
        run["places"] = [place for place in run["places"] if place not in places]
    runs = [run for run in before["runs"] if run["places"]] + finished
    (kept / suite).mkdir(parents=True, exist_ok=True)
    write_json(listed, {**content, "runs": runs, "left_out": before["left_out"]})
    write_bytes(kept / suite / "suite.yaml", (results / suite / "suite.yaml").read_bytes())


def keep_run(source: Path, target: Path, commit: str | None = None) -> None:
    target.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((source / "config.yaml").read_text())
    config["data"]["root"] = None
    if config["network"]["weights"] is not None:
        config["network"]["weights"] = Path(config["network"]["weights"]).name
    write_bytes(target / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    metrics = json.loads((source / "metrics.json").read_text())
    metrics["steps"] = [without_large_confusion(step) for step in metrics["steps"]]
    content = json.dumps(metrics, separators=(",", ":")).encode()
    is_same = (target / "metrics.json").exists() and (target / "metrics.json").read_bytes() == content
    environment = json.loads((source / "environment.json").read_text())
    known = commit_of(source) or commit or (commit_of(target) if is_same else None)
    write_json(
        target / "environment.json", environment if known is None else {**environment, "git_commit": known}
    )
    write_bytes(target / "data.json", (source / "data.json").read_bytes())
    write_bytes(target / "metrics.json", content)


def without_large_confusion(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, "confusion": None} if len(step["classes"]) > LARGEST_CONFUSION else step


def draw(folder: Path) -> None:
    write_results(folder)
    (folder / "index.html").unlink()


if __name__ == "__main__":
    main()
