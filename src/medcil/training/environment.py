"""Prepare this machine for a run, and record what it is: packages, device, cores, commit."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from medcil.config import ExecutionConfig, usable_cores
from medcil.errors import InvalidInput
from medcil.training.distributed import Ranks
from medcil.training.inference import choose_device

THREADS = torch.get_num_threads()
"""PyTorch's default, which respects OMP_NUM_THREADS, before a run sets another number."""
RECORDED_PACKAGES = ("medcil", "torch", "torchvision", "timm", "numpy", "pillow")


def prepare_machine(execution: ExecutionConfig) -> None:
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "execution.device is cuda, but no CUDA device is available. Use auto or cpu.",
            code="config.device.missing",
        )
    torch.backends.cudnn.deterministic = True  # a run repeats exactly on a GPU, too
    torch.backends.cudnn.allow_tf32 = execution.precision != "float32"
    share = max(1, usable_cores() // execution.processes)
    torch.set_num_threads(execution.threads or min(share, THREADS))


def visible_gpus() -> list[str]:
    """Name the GPUs the same way in every process, whatever its CUDA_VISIBLE_DEVICES is."""
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
    """Return the commit of the checkout that medcil runs from, marked if files differ; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
