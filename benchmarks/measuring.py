"""What all benchmarks share: options, the record of the machine, works timed by turns, tables, JSON."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from medcil.config import ExecutionConfig
from medcil.training.environment import prepare_machine

Row = dict[str, Any]
WARM_UP = 3


def option_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the result")
    parser.add_argument("--commit", default=None, help="where git cannot tell it")
    return parser


def read_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    cpu: Mapping[str, Any] | None = None,
    cuda: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """With the device chosen, what is not given filled in for it, and PyTorch set up as for a run."""
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.command = shlex.join(["python", f"benchmarks/{Path(parser.prog).name}", *given])
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in ((cuda if options.device == "cuda" else cpu) or {}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    threads = getattr(options, "threads", None)
    prepare_machine(ExecutionConfig(device=options.device, threads=threads))
    return options


def machine(device: str, commit: str | None) -> Row:
    """Where and with what was measured."""
    found: Row = {"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found |= {"cudnn": torch.backends.cudnn.version()}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    found |= {"omp_wait_policy": os.environ.get("OMP_WAIT_POLICY")}
    return found | {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit or _git_commit()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _git_commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10)
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "") or None


def by_turns(
    works: Mapping[str, Callable[[], float]], rounds: int, *, skip: int = 0
) -> dict[str, list[float]]:
    """Each work tells its seconds; in every round all of them have a turn, in alternating order.

    The first `skip` rounds, which capture, allocate and warm up, are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(skip + rounds):
        for name in list(works) if number % 2 else list(works)[::-1]:
            taken = works[name]()
            if number >= skip:
                seconds[name].append(taken)
    return seconds


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """On a GPU by its own clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def captured(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """On a GPU what replays the function as one graph; the caller keeps the function's tensors alive."""
    if device.type != "cuda":
        return function
    torch.cuda.synchronize()  # what was made on the default stream is there for the side stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph.replay


def record(
    benchmark: str, doc: str | None, options: argparse.Namespace, rows: list[Row], notes: Sequence[str] = ()
) -> Row:
    """Prints the result and writes it where the options say."""
    apart = ("out", "commit", "command")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k not in apart}
    result = {
        "benchmark": benchmark,
        "about": (doc or "").partition("\n")[0],
        "command": options.command,
        "machine": machine(options.device, options.commit),
        "settings": settings,
        "rows": rows,
        "notes": list(notes),
    }
    print(markdown_table(rows))
    for note in notes:
        print(f"Note: {note}")
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def markdown_table(rows: Sequence[Row]) -> str:
    if not rows:
        return "(nothing was measured)"
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_written(row.get(column)) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _written(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
