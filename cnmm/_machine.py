"""The machine that this process runs on: CPU model, usable cores, memory."""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

_UNKNOWN_MEMORY = 2**40
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Machine(TypedDict):
    """What a latency depends on besides the network and the runtime."""

    cpu: str
    cores: int


def machine() -> Machine:
    """CPU model and usable cores of this machine."""
    return {"cpu": _cpu_model(), "cores": usable_cores()}


def usable_cores() -> int:
    """Cores that this process may run on, and that its container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _quota())))


def usable_memory() -> int:
    """Bytes of memory that this machine has, or that its container may use; many where nobody knows."""
    found = [_UNKNOWN_MEMORY]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of control groups, version 2 and 1
        with suppress(OSError, ValueError):
            found.append(int((Path("/sys/fs/cgroup") / name).read_text("utf-8")))
    return min(size for size in found if size > 0)


def keep_freed_memory() -> None:
    """Asks glibc to keep large freed blocks: every step needs them again, and page faults cost 5 to 15 % of it."""
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError, TypeError):  # another C library, another system
        pass


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("model name", "hardware", "cpu model") and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _quota() -> float:
    """Cores that the control group's quota allows (version 2, then 1); infinite if there is none."""
    groups = Path("/sys/fs/cgroup")
    try:
        quota, period = (groups / "cpu.max").read_text("utf-8").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        micros = int((groups / "cpu/cpu.cfs_quota_us").read_text("utf-8"))
        return micros / int((groups / "cpu/cpu.cfs_period_us").read_text("utf-8")) if micros > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
