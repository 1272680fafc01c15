"""Runs as TOML files: tiny ones tuned to learn in minutes, and the published stages of GLM-5."""

from __future__ import annotations

from pathlib import Path

from yunque.core.errors import ConfigError, unknown

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Every recipe: "quickstart", "glm-5/pretrain", ..."""
    files = _FOLDER.rglob("*.toml")
    return tuple(sorted(file.relative_to(_FOLDER).with_suffix("").as_posix() for file in files))


def recipe_path(name: str) -> Path:
    """The file of a recipe; raises ``ConfigError`` naming the nearest valid one."""
    if name not in names():
        raise ConfigError(unknown("recipe", name, names()))
    return _FOLDER / f"{name}.toml"
