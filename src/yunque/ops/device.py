"""Choice of the device and what only it can tell: the one place that names a device type."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from yunque.core.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


def pick_device(name: str) -> torch.device:
    """The device for ``name`` (one of ``DEVICES``); ``auto`` is CUDA where one is usable, else the CPU.

    Raises ``ConfigError`` for an unknown name or for CUDA without a usable device.
    """
    if name not in DEVICES:
        raise ConfigError(f"device is {name!r}; valid: {', '.join(DEVICES)}")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no usable CUDA device; valid here: auto, cpu")
    return torch.device("cuda")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that could be taken now: on the device for CUDA, else what the system calls available (where it does not
    say, half of what the machine has)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if table.exists():
        line = next(line for line in table.read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process held: on the device for CUDA, resident in the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux starts ru_maxrss at the size of the process that forked this one; the high-water mark is our own.
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
