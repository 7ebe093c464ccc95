"""What `medcil bench` is asked for, where its results lie, and whether it was all done before.

No torch: a call that finds everything finished ends at once.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medcil.errors import DamagedFile, InvalidInput
from medcil.experiments.suite import find_suite
from medcil.storage.atomic import read_json, sha256, write_json
from medcil.storage.run_dir import RunDir

SHARED = ("runs", "recipes", "stores", "logs")
"""The folders of the results that all suites have in common."""


@dataclass(frozen=True)
class Request:
    suite: str
    """A name, or the path of a file."""
    out: Path
    data: tuple[str, ...] = ()
    """`DIR` or `NAME=DIR`"""
    settings: tuple[str, ...] = ()
    """`key=value` over every recipe"""
    weights: str | None = None
    only: tuple[str, ...] = ()
    """Patterns: the rows that any is like, in the settings that any is like. Where none is like one: all."""
    orders: tuple[str, ...] = ()
    """None: all."""
    seeds: tuple[str, ...] = ()
    """None: all."""
    device: str = "auto"

    @property
    def name(self) -> str:
        name = find_suite(self.suite).stem
        if name in SHARED:
            raise InvalidInput(f"A suite cannot be called {name!r}, as a folder of the results: rename it.")
        return name

    @property
    def results(self) -> "ResultsFolder":
        return ResultsFolder(self.out)

    @property
    def folder(self) -> Path:
        """Of this suite's tables and figures."""
        return self.out / self.name

    def digest(self) -> str:
        """Of all that decides which runs are asked for and what is made of them, our own code included."""
        asked = {key: value for key, value in asdict(self).items() if key not in ("out", "device", "suite")}
        found = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
        package = Path(__file__).parents[1]
        sources = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        for path in [find_suite(self.suite), *sorted(sources)]:
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()


@dataclass(frozen=True)
class ResultsFolder:
    """Of all suites: docs/how-to/run-a-suite.md says what lies where."""

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
        except (FileNotFoundError, NotADirectoryError, DamagedFile):  # the run itself says what is damaged
            return False

    def is_at_work(self, key: str) -> bool:
        """Whether a process computes this run in this moment."""
        lock = self.run(key) / ".lock"
        if not lock.exists():
            return False
        probe = FileLock(lock, timeout=0)
        try:
            probe.acquire()
        except Timeout:
            return True
        probe.release()
        return False


def note_done(request: Request, made: list[Path]) -> None:
    """So that the same call finds at once that nothing is left to do."""
    files = [str(path.relative_to(request.folder)) for path in made]
    of = sha256((request.folder / "runs.json").read_bytes())
    write_json(request.folder / "done.json", {"asked": request.digest(), "runs_sha256": of, "made": files})


def is_done(request: Request) -> bool:
    """Whether this was all done, and is all still there."""
    folder = request.folder
    try:
        done, runs = read_json(folder / "done.json"), read_json(folder / "runs.json")
        return (
            done["asked"] == request.digest()
            and done["runs_sha256"] == sha256((folder / "runs.json").read_bytes())
            and all((folder / name).exists() for name in done["made"])
            and all(_counts(request.results, run) for run in runs["runs"])
        )
    except (OSError, DamagedFile, KeyError, TypeError):
        return False


def _counts(results: ResultsFolder, run: dict[str, Any]) -> bool:
    return run["state"] == "finished" and results.is_finished(run["key"])
