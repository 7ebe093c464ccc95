"""What a sweep writes down in the suite's folder: runs.json, and which files were made of it.

Several sweeps may write there. Whoever makes results holds the folder's lock from the record they are made
of to done.json; others write their records before or after.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medcil.errors import DamagedFile, InvalidInput
from medcil.experiments.suite import find_suite
from medcil.experiments.suite_runs import PlannedRun
from medcil.experiments.sweep_plan import Work
from medcil.storage.atomic import TEMPORARY, read_json, write_bytes, write_json
from medcil.storage.overwrite_guard import claim_output_folder

LEFT_BEHIND = 3600.0
"""Seconds after which a temporary file is that of a process which was killed."""


def begin(work: Work) -> None:
    """Makes the folder, and takes away what would pass for the results of this sweep."""
    folder = work.request.folder
    claim_output_folder(folder, "bench")
    try:
        with FileLock(folder / ".lock"):
            _discard_results(work)
            _tidy(folder)
            _tidy(work.request.out / "recipes")
            _write(work, {})
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be written to ({error.strerror}). Give another --out.") from None


def write_record(work: Work, failed: Mapping[str, str]) -> None:
    """How the runs are by now; left for later while another sweep makes its results from its own record."""
    try:
        with FileLock(work.request.folder / ".lock", timeout=0):
            _write(work, failed)
    except Timeout:
        return


@contextmanager
def own_record(work: Work, failed: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, the folder's record is that of this sweep."""
    with FileLock(work.request.folder / ".lock"):
        _write(work, failed)
        yield


def _write(work: Work, failed: Mapping[str, str]) -> None:
    """runs.json: which runs stand at which place, and how they are; and suite.yaml, which is known by it."""

    def entry(run: PlannedRun) -> dict[str, Any]:
        is_finished = request.results.is_finished(run.key)
        why = None if is_finished else failed.get(run.key)
        state = "finished" if is_finished else "unfinished" if why is None else "failed"
        path, places = f"../runs/{run.key}", [place.listed() for place in run.places]
        return {"key": run.key, "path": path, "places": places, "state": state, "why": why}

    request = work.request
    weights = [] if request.weights is None else [f"network.weights={Path(request.weights).name}"]
    write_json(
        request.folder / "runs.json",
        {
            "format": 1,
            "suite": request.name,
            "set": [*request.settings, *weights],
            "left_out": list(work.left_out),
            "runs": [entry(run) for run in work.listed],
        },
    )
    write_bytes(request.folder / "suite.yaml", find_suite(request.suite).read_bytes())


def _discard_results(work: Work) -> None:
    """done.json, until this is done again, and what was made for another request."""
    folder = work.request.folder
    try:
        done = read_json(folder / "done.json")
        if done["asked"] != work.request.digest():
            for path in ((folder / name).resolve() for name in done["made"]):
                if path.is_relative_to(folder.resolve()):
                    path.unlink(missing_ok=True)
    except (FileNotFoundError, DamagedFile, KeyError, TypeError):
        pass
    (folder / "done.json").unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    for path in folder.rglob(f".*{TEMPORARY}"):
        if time.time() - path.stat().st_mtime > LEFT_BEHIND:
            path.unlink(missing_ok=True)
