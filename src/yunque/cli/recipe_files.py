"""The run files that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from yunque.core.errors import ConfigError, unknown


def recipe_names() -> tuple[str, ...]:
    """Every recipe: "quickstart", "glm-5/pretrain", ..."""
    folder = _folder()
    return tuple(sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.toml")))


def run_file(name: str) -> Path:
    """The file of a run: a path to a TOML file, or the name of a recipe.

    Raises ``ConfigError`` for neither, naming the nearest recipe.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        if not path.is_file():
            raise ConfigError(f"{name}: no such run file")
        return path
    if name not in recipe_names():
        raise ConfigError(unknown("recipe", name, recipe_names()))
    return _folder() / f"{name}.toml"


def _folder() -> Path:
    return Path(str(files("yunque") / "recipes"))
