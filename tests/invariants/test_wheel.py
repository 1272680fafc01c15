"""The wheel is complete: installed alone, outside the clone, it imports and its command runs."""

import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

import yunque

pytestmark = pytest.mark.xdist_group("wheel")  # one build serves them all

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """A wheel built from this clone and the environment it was installed into."""

    wheel: Path
    python: Path
    folder: Path


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """Builds the source archive, the wheel from it, and a bare environment holding only that wheel.

    The dependencies are lent by a .pth line, read after the environment's own packages; .pth files in the
    lent folder are not followed, so an editable install of the clone cannot stand in for the wheel.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return Installed(wheel, python, folder)


def test_wheel_holds_every_file_of_the_package(installed):
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "yunque").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("yunque/")}
    assert names == tree
    assert "yunque/py.typed" in names
    assert any(name.startswith("yunque/recipes/") and name.endswith(".toml") for name in names)


def test_metadata_bounds_torch_and_names_the_licence(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == yunque.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "torch<2.14,>=2.13" in (metadata.get_all("Requires-Dist") or [])


def test_installed_package_imports_from_the_wheel_not_from_the_clone(installed):
    place = run(installed.python, "-c", "import yunque; print(yunque.__file__)", cwd=installed.folder).strip()
    assert Path(place).is_relative_to(installed.folder / "env")


def test_installed_command_shows_its_help(installed):
    output = run(installed.folder / "env" / "bin" / "yunque", "--help", cwd=installed.folder)
    assert "train" in output
    assert "generate" in output
