"""Ctrl-C and SIGTERM as a request to stop after the present step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class StopRequest:
    """Whether somebody asked the run to stop. ``requested`` names the signal, or is None."""

    def __init__(self) -> None:
        self.requested: str | None = None

    @contextlib.contextmanager
    def listening(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying by them; the second one ends the process at once.

        ``notify`` gets a line for the user. Signals reach only the main thread; elsewhere nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            self.requested = signal.Signals(number).name
            for other in before:
                signal.signal(other, signal.SIG_DFL)
            notify("stopping after this step and saving; once more to stop at once")

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
