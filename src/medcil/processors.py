"""How many processors this process may really use: in a container often fewer than the machine has."""

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of a container (cgroup v2): microseconds of computing in a period of microseconds, or `max`."""


def usable_cores(quota: Path = QUOTA) -> int:
    """Those it is bound to, and no more than its quota allows."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = (int(word) for word in quota.read_text().split())
    except (OSError, ValueError):  # no container, or `max`
        return bound
    return max(1, min(bound, round(allowed / period)))
