"""A command at a pseudo-terminal of its own: typed at, and read until something is shown."""

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import yunque

# The command's terminal becomes its controlling one, so that Ctrl-C reaches it as a signal. Tests that a shell runs in
# the background inherit from it that SIGINT is ignored; at a terminal it is not.
START = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from yunque.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


class Terminal:
    """``yunque`` with these arguments; it has ended when the block is left."""

    def __init__(self, arguments: Sequence[str], *, env: Mapping[str, str]) -> None:
        self._fd, child = pty.openpty()
        settings = termios.tcgetattr(child)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(child, termios.TCSANOW, settings)
        source = str(Path(yunque.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": source, "TERM": "xterm", **env},
        )
        os.close(child)
        self.shown = ""
        self._read_to = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._fd, text.encode())

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """What is shown from the last look on until ``text`` is shown."""
        end = time.monotonic() + timeout_s
        while (place := self.shown.find(text, self._read_to)) < 0:
            left_s = end - time.monotonic()
            assert left_s > 0, f"{text!r} was not shown; there is {self.shown[self._read_to :]!r}"
            if select.select([self._fd], [], [], min(left_s, 0.2))[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(f"the command ended; it had shown {self.shown!r}") from None
        begin, self._read_to = self._read_to, place + len(text)
        return self.shown[begin : self._read_to]

    def end(self, timeout_s: float = 20.0) -> int:
        """The exit code."""
        return self._process.wait(timeout_s)
