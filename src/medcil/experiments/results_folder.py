"""The folder of a sweep's results: what was requested, the record of its runs, and whether all is done.

Several sweeps may share the folder. Tables and figures are made under its lock, from the record of one sweep.
Imports no torch, so that a call that finds everything finished ends within a second.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from medcil.errors import DamagedFile, InvalidInput
from medcil.experiments.suite import find_suite
from medcil.storage.atomic import read_json, sha256, write_bytes, write_json, writing
from medcil.storage.overwrite_guard import claim_output_folder
from medcil.storage.run_dir import RunDir

if TYPE_CHECKING:
    from medcil.experiments.plan import PlannedRun, SweepPlan

SHARED = ("runs", "recipes", "stores", "logs")
"""Folders of the results that all suites share."""


@dataclass(frozen=True)
class Request:
    """The arguments of `medcil bench`."""

    suite: str
    """A name, or the path of a file."""
    out: Path
    data: tuple[str, ...] = ()
    """`DIR` or `NAME=DIR`."""
    settings: tuple[str, ...] = ()
    """`key=value`, for every recipe."""
    weights: str | None = None
    only: tuple[str, ...] = ()
    """Patterns of rows and settings; no pattern for the one or the other: all of them."""
    orders: tuple[str, ...] = ()
    """Empty: all."""
    seeds: tuple[str, ...] = ()
    """Empty: all."""
    device: str = "auto"

    @property
    def name(self) -> str:
        name = find_suite(self.suite).stem
        if name in SHARED:
            raise InvalidInput(
                f"A suite cannot be called {name!r}, like a folder of the results. Rename its file.",
                code="suite.name.reserved",
            )
        return name

    @property
    def results(self) -> "ResultsFolder":
        return ResultsFolder(self.out)

    @property
    def folder(self) -> Path:
        """The folder of this suite's tables and figures."""
        return self.out / self.name

    def digest(self) -> str:
        """Hash everything that decides which runs are shown and how, medcil's code included."""
        arguments = {
            key: value for key, value in asdict(self).items() if key not in ("out", "device", "suite")
        }
        digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
        package = Path(__file__).parents[1]
        sources = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        for path in [find_suite(self.suite), *sorted(sources)]:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class ResultsFolder:
    """The paths that all suites share; docs/how-to/run-a-suite.md describes them."""

    root: Path

    def run(self, key: str) -> Path:
        return self.root / "runs" / key

    def recipe(self, key: str) -> Path:
        return self.root / "recipes" / f"{key}.yaml"

    def store(self, dataset: str, side: int) -> Path:
        return self.root / "stores" / f"{dataset}-{side}"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def is_finished(self, key: str) -> bool:
        try:
            return bool(read_json(RunDir(self.run(key)).metrics_path).get("finished") is True)
        except (FileNotFoundError, NotADirectoryError, DamagedFile):  # the run itself reports the damage
            return False

    def state(self, key: str) -> str:
        """Return `finished`, `begun` or `to do`."""
        if self.is_finished(key):
            return "finished"
        return "begun" if self.run(key).exists() else "to do"

    def is_running(self, key: str) -> bool:
        """Whether any process holds the run's lock."""
        lock = self.run(key) / ".lock"
        try:
            if lock.exists():
                with FileLock(lock, timeout=0):
                    return False
        except Timeout:
            return True
        return False


def begin_record(plan: "SweepPlan") -> None:
    """Create the folder and its record."""
    claim_output_folder(plan.request.folder, "bench")
    with writing(plan.request.folder), final_record(plan, {}):
        pass


def update_record(plan: "SweepPlan", failed: Mapping[str, str]) -> None:
    """Record the states of the runs; skip it while another sweep makes results from its own record."""
    with suppress(Timeout), final_record(plan, failed, timeout=0):
        pass


@contextmanager
def final_record(plan: "SweepPlan", failed: Mapping[str, str], *, timeout: float = -1) -> Iterator[None]:
    """Write this sweep's record and hold the folder's lock while results are made from it."""
    with FileLock(plan.request.folder / ".lock", timeout=timeout):
        _discard_results(plan.request)
        _write_record(plan, failed)
        yield


def mark_done(request: Request, files: list[Path]) -> None:
    """Record that all is finished, and the files that were drawn: the same call then returns at once."""
    names = [str(path.relative_to(request.folder)) for path in files]
    runs_sha256 = sha256((request.folder / "runs.json").read_bytes())
    content = {"asked": request.digest(), "runs_sha256": runs_sha256, "made": names}
    write_json(request.folder / "done.json", content)


def is_done(request: Request) -> bool:
    """Whether `mark_done` was called for this request and everything still exists."""
    folder, results = request.folder, request.results
    try:
        done, runs = read_json(folder / "done.json"), read_json(folder / "runs.json")
        return (
            done["asked"] == request.digest()
            and done["runs_sha256"] == sha256((folder / "runs.json").read_bytes())
            and all((folder / name).exists() for name in done["made"])
            and all(run["state"] == "finished" and results.is_finished(run["key"]) for run in runs["runs"])
        )
    except (OSError, DamagedFile, KeyError, TypeError):
        return False


def _write_record(plan: "SweepPlan", failed: Mapping[str, str]) -> None:
    """Write runs.json (the runs of each place and their states) and suite.yaml."""

    def entry(run: "PlannedRun") -> dict[str, Any]:
        is_finished = request.results.is_finished(run.key)
        why = None if is_finished else failed.get(run.key)
        state = "finished" if is_finished else "unfinished" if why is None else "failed"
        path, places = f"../runs/{run.key}", [place.as_list() for place in run.places]
        return {"key": run.key, "path": path, "places": places, "state": state, "why": why}

    request = plan.request
    weights = [] if request.weights is None else [f"network.weights={Path(request.weights).name}"]
    content = {
        "format": 1,
        "suite": request.name,
        "set": [*request.settings, *weights],
        "left_out": list(plan.left_out),
        "runs": [entry(run) for run in plan.shown],
    }
    write_json(request.folder / "runs.json", content)
    write_bytes(request.folder / "suite.yaml", find_suite(request.suite).read_bytes())


def _discard_results(request: Request) -> None:
    """Delete the mark that all is done, and what was drawn for another request."""
    folder = request.folder
    with suppress(FileNotFoundError, DamagedFile, KeyError, TypeError):
        done = read_json(folder / "done.json")
        if done["asked"] != request.digest():
            for path in ((folder / name).resolve() for name in done["made"]):
                if path.is_relative_to(folder.resolve()):
                    path.unlink(missing_ok=True)
    (folder / "done.json").unlink(missing_ok=True)
