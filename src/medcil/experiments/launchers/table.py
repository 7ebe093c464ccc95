"""Launchers by name, with options as people type them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medcil.errors import InvalidInput, nearest
from medcil.experiments.launchers.protocol import Launcher


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value


OPTIONS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "local": {},
    "ray": {"address": str, "cpus_per_run": _amount, "gpus_per_run": _amount, "retries": _whole},
    "slurm": {
        "partition": str,
        "cpus_per_run": _whole,
        "gpus_per_run": _whole,
        "minutes_per_run": _whole,
        "retries": _whole,
    },
}
"""Launcher -> its options, each with what makes a value of the text. They are parameters of its class."""
SBATCH = "sbatch."
"""`sbatch.account=lab`: any option of sbatch."""
CALLED: Mapping[Callable[[str], Any], str] = {_whole: "a whole number", _amount: "a number"}


def make_launcher(
    name: str, *, out: Path, at_once: int | None, options: Mapping[str, str], gpus: Sequence[str] = ()
) -> Launcher:
    """`at_once`: the most runs at a time; None: as many as the cluster bears, one where there is none.

    `gpus` are this machine's; a cluster finds its own.
    """
    if name not in OPTIONS:
        raise InvalidInput(f"There is no launcher {name!r}. {nearest(name, OPTIONS)}")
    if at_once is not None and at_once < 1:
        raise InvalidInput(f"{at_once} runs at once: give 1 or more.")
    logs = out / "logs"
    if name == "slurm":
        from medcil.experiments.launchers.slurm import SlurmLauncher

        sbatch = {key.removeprefix(SBATCH): text for key, text in options.items() if key.startswith(SBATCH)}
        rest = {key: text for key, text in options.items() if not key.startswith(SBATCH)}
        return SlurmLauncher(logs / "slurm", logs=logs, at_once=at_once, sbatch=sbatch, **_values(name, rest))
    values = _values(name, options)
    if name == "ray":
        from medcil.experiments.launchers.ray import RayLauncher

        return RayLauncher(logs, at_once=at_once, **values)
    from medcil.experiments.launchers.local import LocalLauncher

    return LocalLauncher(logs, at_once=at_once or 1, gpus=gpus)


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """`key=value` each."""
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"--launcher-option {text}: write key=value.")
        options[key.strip()] = value.strip()
    return options


def _values(launcher: str, options: Mapping[str, str]) -> dict[str, Any]:
    known, values = OPTIONS[launcher], {}
    for key, text in options.items():
        if key not in known:
            hint = nearest(key, known) if known else "It has none."
            raise InvalidInput(f"The launcher {launcher!r} has no option {key!r}. {hint}")
        try:
            values[key] = known[key](text)
        except ValueError:
            raise InvalidInput(f"--launcher-option {key}={text}: {CALLED[known[key]]} is needed.") from None
    return values
