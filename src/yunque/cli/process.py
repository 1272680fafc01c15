"""Settings of the process that a command makes for itself and a library must not."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune() -> None:
    """Make tensor work on a CPU faster; call before torch is imported.

    OpenMP threads sleep instead of spinning when there is nothing to do (spinning costs seconds as soon as another
    process wants the core), unless the user chose otherwise. glibc keeps freed blocks instead of returning them to
    the system after every operation, which would fault each page in again; the price is that the process stays at
    its peak size.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
        except (OSError, AttributeError):
            return  # another C library: it has other habits
        mallopt(_M_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
