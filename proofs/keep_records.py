"""What of a sweep's results is worth keeping beside the docs: small files, and nothing of the machine.

    python proofs/keep_records.py RESULTS KEPT SUITE...

Copies the finished runs of these suites from RESULTS, a folder that `medcil bench --out RESULTS` filled, to
KEPT/runs: recipe, environment, data and metrics, a few kilobytes a run. Left out are weights, predictions,
logs, timings, where images and weights lay, confusion matrices of more than twenty classes. What KEPT/SUITE
already lists stays in it unless RESULTS has the same row, setting, order and seed. Then KEPT/SUITE is drawn:
tables and figures, without the page.

    python proofs/keep_records.py --draw KEPT SUITE...

only draws again, from the records alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from medcil.report.results import write_results
from medcil.runs import write_bytes, write_json

FILES = ("environment.json", "data.json")
LARGEST_CONFUSION = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RESULTS KEPT SUITE")
    parser.add_argument("--draw", action="store_true")
    arguments = parser.parse_args()
    results = None if arguments.draw else arguments.folders.pop(0)
    kept, *suites = arguments.folders
    for suite in suites:
        if results is not None:
            keep(results, kept, suite.name)
        draw(kept / suite)


def keep(results: Path, kept: Path, suite: str) -> None:
    content = json.loads((results / suite / "runs.json").read_text())
    finished = [run for run in content["runs"] if run["state"] == "finished"]
    for run in finished:
        keep_run(results / "runs" / run["key"], kept / "runs" / run["key"])
    places = [place for run in finished for place in run["places"]]
    listed = kept / suite / "runs.json"
    before = json.loads(listed.read_text()) if listed.exists() else {"runs": [], "left_out": []}
    for run in before["runs"]:
        run["places"] = [place for place in run["places"] if place not in places]
    runs = [run for run in before["runs"] if run["places"]] + finished
    (kept / suite).mkdir(parents=True, exist_ok=True)
    write_json(listed, {**content, "runs": runs, "left_out": before["left_out"]})
    write_bytes(kept / suite / "suite.yaml", (results / suite / "suite.yaml").read_bytes())


def keep_run(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((source / "config.yaml").read_text())
    config["data"]["root"] = None
    if config["network"]["weights"] is not None:
        config["network"]["weights"] = Path(config["network"]["weights"]).name
    write_bytes(target / "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    for name in FILES:
        write_bytes(target / name, (source / name).read_bytes())
    metrics = json.loads((source / "metrics.json").read_text())
    metrics["steps"] = [without_large_confusion(step) for step in metrics["steps"]]
    write_bytes(target / "metrics.json", json.dumps(metrics, separators=(",", ":")).encode())


def without_large_confusion(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, "confusion": None} if len(step["classes"]) > LARGEST_CONFUSION else step


def draw(folder: Path) -> None:
    write_results(folder)
    (folder / "index.html").unlink()


if __name__ == "__main__":
    main()
