"""Start the processes that train together, and end them together.

Either this process starts the others (`execution.processes`), or torchrun has started all of them, on one
machine or several that share a file system.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist

from medcil.config import ExecutionConfig
from medcil.errors import InvalidInput, MedcilError, ProcessLost
from medcil.training.distributed import Ranks
from medcil.training.inference import choose_device

TIMEOUT = timedelta(hours=2)
"""How long one process may work alone while the others wait."""
PATIENCE = 10.0
"""Seconds in which a process should notice by itself that a peer has ended."""


def is_first_process(execution: ExecutionConfig) -> bool:
    """Tell whether this process is the first of those that train together."""
    join_torchrun(execution)
    return Ranks().is_first


def join_torchrun(execution: ExecutionConfig) -> None:
    if not dist.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    dist.init_process_group(_prepare_backend(execution, dist.get_node_local_rank(0)), timeout=TIMEOUT)
    atexit.register(dist.destroy_process_group)


@contextmanager
def processes(execution: ExecutionConfig, work: Callable[[], object]) -> Iterator[None]:
    """Let `execution.processes - 1` peers do the same work within the block."""
    if execution.processes == 1 or not Ranks().is_alone:  # torchrun has started the others
        yield
        return
    if not dist.is_available():
        raise InvalidInput("execution.processes needs a PyTorch with torch.distributed: set it to 1.")
    n_gpus = torch.cuda.device_count()
    if choose_device(execution).type == "cuda" and execution.processes > n_gpus:
        raise InvalidInput(
            f"execution.processes is {execution.processes}, but there are only {n_gpus} GPUs: lower it."
        )
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        spawn = multiprocessing.get_context("spawn")
        peers = [
            spawn.Process(target=_be_peer, args=(work, execution, meeting, rank), daemon=True)
            for rank in range(1, execution.processes)
        ]
        for peer in peers:
            peer.start()
        is_over = threading.Event()
        threading.Thread(target=_watch_peers, args=(peers, is_over), daemon=True).start()
        try:
            _meet(execution, meeting, rank=0)
            yield
            dist.barrier()
        except Exception as error:
            if not isinstance(error, MedcilError):  # such an error has ended the peers, too
                is_over.wait(1.0)  # the connection breaks before the peer's exit code is known
                if rank := _lost(peers):
                    raise ProcessLost(_message(rank)) from error
            raise
        finally:
            is_over.set()
            _end(peers)


def _meet(execution: ExecutionConfig, meeting: Path, *, rank: int) -> None:
    dist.init_process_group(
        _prepare_backend(execution, rank),
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=execution.processes,
        timeout=TIMEOUT,
    )


def _be_peer(work: Callable[[], object], execution: ExecutionConfig, meeting: Path, rank: int) -> None:
    first = multiprocessing.parent_process()
    if first is not None:
        threading.Thread(target=_end_with, args=(first.sentinel,), daemon=True).start()
    try:
        _meet(execution, meeting, rank=rank)
        work()
        dist.barrier()
    except KeyboardInterrupt:  # the first process reports it
        sys.exit(130)
    except Exception as error:  # one line: the first process prints the whole message
        message = f"Process {rank}: {type(error).__name__}: {error}"
        print(message.partition("\n")[0], file=sys.stderr, flush=True)
        sys.exit(1)


def _end_with(sentinel: int) -> None:
    """End a peer with the first process. A peer writes no files, so nothing stays half-written."""
    wait([sentinel])
    os._exit(1)


def _watch_peers(peers: list[SpawnProcess], is_over: threading.Event) -> None:
    """End this process if it does not notice that a peer has ended: GPUs would wait for hours."""
    while not is_over.wait(0.2):
        if (rank := _lost(peers)) and not is_over.wait(PATIENCE):
            print(_message(rank), file=sys.stderr, flush=True)
            os._exit(ProcessLost.exit_code)


def _lost(peers: list[SpawnProcess]) -> int | None:
    """Return the rank of a peer that has failed; None if all are fine."""
    return next((rank for rank, peer in enumerate(peers, start=1) if peer.exitcode), None)


def _message(rank: int) -> str:
    return (
        f"Process {rank} of those that train together has ended. Run the same command again to continue from "
        "the last checkpoint, with as many processes or fewer."
    )


def _end(peers: list[SpawnProcess]) -> None:
    for peer in peers:
        peer.join(timeout=1)
        if peer.is_alive():
            peer.kill()
            peer.join()
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare_backend(execution: ExecutionConfig, gpu: int) -> str:
    """Choose how the processes communicate; on GPUs, give this process its own."""
    if choose_device(execution).type != "cuda":
        return "gloo"
    if gpu >= torch.cuda.device_count():
        raise InvalidInput(
            f"There are more processes than GPUs ({torch.cuda.device_count()}) on a machine: start fewer."
        )
    torch.cuda.set_device(gpu)
    return "nccl"
