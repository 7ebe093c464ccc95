"""Where the runs of a sweep are computed. A launcher starts processes and says how they ended.

All that counts lies in the run directories, so a sweep begun with one launcher may end with another.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Job:
    """One run: `medcil run RECIPE --out OUT`, which goes on where an earlier attempt stopped."""

    key: str
    recipe: Path
    out: Path
    gpu: str | None = None
    """The only one it sees, by the name that CUDA knows it by; None: all there are."""

    @property
    def command(self) -> list[str]:
        # -P: what lies in the working folder is not imported.
        program = [sys.executable, "-P", "-m", "medcil.experiments.worker"]
        program += [] if self.gpu is None else ["--gpu", self.gpu]
        return [*program, "run", str(self.recipe), "--out", str(self.out), "--no-report"]


@dataclass(frozen=True)
class Ended:
    """How a job's process ended: its exit code and, where that is not 0, its last lines; the last is why."""

    key: str
    exit_code: int
    said: str = ""


@runtime_checkable
class Launcher(Protocol):
    """`local`, `ray`, `slurm`."""

    @property
    def capacity(self) -> int:
        """How many jobs it takes at once; those that queue by themselves take all."""
        ...

    def start(self, job: Job) -> None: ...

    def is_running(self, key: str) -> bool:
        """False for a job that is accepted but waits for its turn."""
        ...

    def wait(self, seconds: float) -> Sequence[Ended]:
        """The jobs that have ended since; returns when one ends, or after this time with none."""
        ...

    def stop(self) -> None:
        """Ends what still runs, as Ctrl-C would: every run goes on from its last checkpoint later."""
        ...
