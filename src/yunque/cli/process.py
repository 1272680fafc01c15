"""What a command sets up for itself and a library must not: process settings, the console."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune() -> None:
    """Make tensor work on a CPU faster; call before torch is imported.

    OpenMP threads wait for each other only briefly before they sleep: the usual long spin costs seconds as soon as
    another process wants the core, and sleeping at once costs a third of the speed of small models. Whatever the
    user chose (``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT``) stays. glibc keeps freed blocks instead of returning them to
    the system after every operation, which would fault each page in again; the price is that the process stays at
    its peak size.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
        except (OSError, AttributeError):
            return  # another C library: it has other habits
        mallopt(_M_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def allow_many_files() -> None:
    """As many open files as the system lets this process have: a server needs one for each connection, and shells
    often start with 1024."""
    try:
        import resource
    except ImportError:
        return  # not a Unix
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return  # a system that states no limit and has one: the soft limit stays


def make_console() -> Console:
    """Standard output for tables and progress: a terminal's own width, ``COLUMNS``, or 110 in a file or pipe."""
    from rich.console import Console

    class Output(Console):
        """Leaves a closed pipe to ``main``, where rich would end the process as if by a mistake."""

        def on_broken_pipe(self) -> None:
            raise

    is_free = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Output(width=None if is_free else 110)
