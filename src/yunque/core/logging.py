"""Messages for people: one logger tree under "yunque", shown on standard error."""

import logging

from yunque.core.errors import ConfigError, unknown

_ROOT = "yunque"
LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: pass ``__name__``. It prints only warnings until `setup` is called."""
    return logging.getLogger(name if name == _ROOT or name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")


def setup(level: str = "info") -> None:
    """Show messages from ``level`` (one of LEVELS) up on standard error; a second call replaces the first."""
    if level not in LEVELS:
        raise ConfigError(unknown("log level", level, LEVELS))
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
    handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    root = logging.getLogger(_ROOT)
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
