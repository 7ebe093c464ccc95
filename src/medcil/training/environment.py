"""Where a run is computed: what its record needs to say, and what must be set before."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput
from medcil.processors import usable_cores
from medcil.training.distributed import Ranks
from medcil.training.inference import choose_device

THREADS = torch.get_num_threads()
"""PyTorch's choice, OMP_NUM_THREADS included; asked before a run sets another."""
RECORDED_PACKAGES = ("medcil", "torch", "torchvision", "timm", "numpy", "pillow")


def prepare_machine(execution: ExecutionConfig) -> None:
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("execution.device is cuda, but no CUDA device is available. Use auto or cpu.")
    torch.backends.cudnn.deterministic = True  # the same run gives the same result on a GPU, too
    torch.backends.cudnn.allow_tf32 = execution.precision != "float32"
    share = max(1, usable_cores() // execution.processes)
    torch.set_num_threads(execution.threads or min(share, THREADS))


def visible_gpus() -> list[str]:
    """By names that mean the same to every process, whatever CUDA_VISIBLE_DEVICES says."""
    numbers = range(torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in numbers]


def environment(execution: ExecutionConfig) -> dict[str, Any]:
    device = choose_device(execution)
    return {
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "device_kind": device.type,
        "precision": "bfloat16" if device.type == "cuda" and execution.precision == "auto" else "float32",
        "captured": device.type == "cuda" and execution.capture,
        "processes": Ranks().size,
        "threads": torch.get_num_threads(),
        "workers": execution.workers or usable_cores(),
        "cores": usable_cores(),
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the checkout medcil runs from, marked where files differ from it; None: there is none."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        inside = subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10
        )
        if commit.returncode or inside.returncode:
            return None
        status = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")
