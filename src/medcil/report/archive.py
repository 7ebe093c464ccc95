"""Copy a suite's finished runs into a folder of a few files, from which its tables are drawn again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medcil.errors import InvalidInput, RunConflict
from medcil.report.read import ARCHIVE, read_archive, read_content
from medcil.storage.atomic import read_json, write_bytes

LARGEST_CONFUSION = 20
"""Classes. A larger matrix would be most of the file."""


def write_archive(folder: Path, out: Path) -> None:
    """Write suite.yaml and runs.jsonl, a line a run, into `out`.

    Runs that `out` has already stay there, unless `folder` has one of the same row, setting, order and seed.
    Weights, predictions, logs and the paths of this machine are left out.
    """
    if not (folder / "runs.json").is_file():
        raise InvalidInput(
            f"No runs.json in {folder}. Give the suite's folder that `medcil bench` wrote.",
            code="suite.results.missing",
        )
    if out.exists() and any(out.iterdir()) and not (out / ARCHIVE).is_file():
        raise RunConflict(
            f"{out} holds other files. Give a new folder as --out.", code="output.folder.exists"
        )
    index = read_json(folder / "runs.json")
    finished = [run for run in index["runs"] if run["state"] == "finished"]
    lines = [
        {"key": run["key"], "places": run["places"], "set": index["set"]}
        | _shareable(read_content(folder / run["path"]))
        for run in finished
    ]
    taken = [place for line in lines for place in line["places"]]
    earlier = [dict(run.content) for run in read_archive(out / ARCHIVE)] if (out / ARCHIVE).is_file() else []
    for line in earlier:
        line["places"] = [place for place in line["places"] if place not in taken]
    lines = [line for line in earlier if line["places"]] + lines
    text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False, allow_nan=False) for line in lines)
    write_bytes(out / "suite.yaml", (folder / "suite.yaml").read_bytes())
    write_bytes(out / ARCHIVE, "".join(f"{line}\n" for line in text).encode())


def _shareable(content: Mapping[str, Any]) -> dict[str, Any]:
    config, metrics = content["config"], content["metrics"]
    config["data"]["root"] = None
    if config["network"].get("weights") is not None:
        config["network"]["weights"] = Path(config["network"]["weights"]).name
    for step in metrics["steps"]:
        if len(step["classes"]) > LARGEST_CONFUSION:
            step["confusion"] = None
    return {**content, "config": config, "metrics": metrics}
