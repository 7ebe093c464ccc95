"""Launchers start the runs of a sweep as processes and report how they ended: `local`, `ray` or `slurm`.

All results are in the run directories, so a sweep begun with one launcher may end with another.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field, TypeAdapter, ValidationError

from medcil.errors import InvalidInput, nearest

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "local": {},
    "ray": {"address": str, "cpus_per_run": Amount, "gpus_per_run": Amount, "retries": Count},
    "slurm": {
        "partition": str,
        "cpus_per_run": Count,
        "gpus_per_run": Count,
        "minutes_per_run": Count,
        "retries": Count,
    },
}
"""Launcher -> its options with their types; they are parameters of its class."""
SBATCH = "sbatch."
"""`sbatch.account=lab`: any option of sbatch."""


@dataclass(frozen=True)
class Job:
    """One run: `medcil run RECIPE --out OUT`, which resumes where an earlier attempt stopped."""

    key: str
    recipe: Path
    out: Path

    @property
    def command(self) -> list[str]:
        # -P: a file in the working folder must not be imported as a module.
        program = [sys.executable, "-P", "-m", "medcil.experiments.launchers.local"]
        return [*program, "run", str(self.recipe), "--out", str(self.out), "--no-report"]


@dataclass(frozen=True)
class Exit:
    """How a job's process ended: its exit code and, if that is not 0, the last lines of its output."""

    key: str
    exit_code: int
    output: str = ""


@runtime_checkable
class Launcher(Protocol):
    @property
    def capacity(self) -> int:
        """The number of jobs it accepts at once; a cluster with a queue accepts all."""
        ...

    def start(self, job: Job) -> None: ...

    def is_running(self, key: str) -> bool:
        """Whether the job runs; False while it waits in a queue."""
        ...

    def wait(self, seconds: float) -> Sequence[Exit]:
        """Return the jobs that have ended since the last call; wait for one up to a timeout."""
        ...

    def stop(self) -> None:
        """End all jobs as Ctrl-C would: every run resumes from its last checkpoint later."""
        ...


def make_launcher(
    name: str, *, out: Path, at_once: int | None, options: Mapping[str, str], gpus: Sequence[str] = ()
) -> Launcher:
    """Build a launcher by name, with options as people type them.

    `at_once` is the maximum number of parallel runs; None: as many as a cluster can take, or one locally.
    `gpus` are those of this machine; a cluster assigns its own.
    """
    if name not in OPTIONS:
        raise InvalidInput(
            f"No such launcher: {name!r}. {nearest(name, OPTIONS)}", code="sweep.launcher.unknown"
        )
    if at_once is not None and at_once < 1:
        raise InvalidInput(f"--at-once {at_once} is too low. Give 1 or more.", code="sweep.at_once.invalid")
    logs = out / "logs"
    sbatch = {key: options[key] for key in options if name == "slurm" and key.startswith(SBATCH)}
    values = _values(name, {key: options[key] for key in options if key not in sbatch})
    if name == "slurm":
        from medcil.experiments.launchers.slurm import SlurmLauncher

        sbatch = {key.removeprefix(SBATCH): value for key, value in sbatch.items()}
        return SlurmLauncher(logs / "slurm", logs=logs, at_once=at_once, sbatch=sbatch, **values)
    if name == "ray":
        from medcil.experiments.launchers.ray import RayLauncher

        return RayLauncher(logs, at_once=at_once, **values)
    from medcil.experiments.launchers.local import LocalLauncher

    return LocalLauncher(logs, at_once=at_once or 1, gpus=gpus)


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """Split `key=value` texts."""
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(
                f"--launcher-option {text} has no value. Write key=value.",
                code="sweep.launcher_option.invalid",
            )
        options[key.strip()] = value.strip()
    return options


def _values(launcher: str, options: Mapping[str, str]) -> dict[str, Any]:
    types, values = OPTIONS[launcher], {}
    for key, text in options.items():
        if key not in types:
            hint = nearest(key, types) if types else "It has none."
            raise InvalidInput(
                f"The launcher {launcher!r} has no option {key!r}. {hint}",
                code="sweep.launcher_option.unknown",
            )
        try:
            values[key] = TypeAdapter(types[key]).validate_python(text)
        except ValidationError as error:
            raise InvalidInput(
                f"--launcher-option {key}={text}: {error.errors()[0]['msg']}.",
                code="sweep.launcher_option.invalid",
            ) from None
    return values
