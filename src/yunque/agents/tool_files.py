"""Tools from a Python file, which is run to get them."""

import importlib.util
import inspect
import sys
from pathlib import Path

from yunque.agents.tools import Tool
from yunque.core.errors import ConfigError


def load_tools(path: Path | str) -> tuple[Tool, ...]:
    """Run the file; its public functions, or those that ``__all__`` names, are the tools, in the file's order.

    Raises ``ConfigError`` when the file cannot be read or run, or a function cannot be a tool.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    name = f"yunque_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pydantic look names up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    named = getattr(module, "__all__", None)
    found = [value for value in vars(module).values() if inspect.isfunction(value) and value.__module__ == name]
    if named is None:
        functions = [function for function in found if not function.__name__.startswith("_")]
    else:
        functions = [getattr(module, str(entry), None) for entry in named]
    tools = tuple(Tool.of(function) for function in functions if callable(function))
    if not tools:
        raise ConfigError(f"{path}: it defines no public function")
    return tools
