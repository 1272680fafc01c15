"""The constraints file pins every dependency by name and version, and says nothing of any machine."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")


def faults(text: str) -> list[str]:
    """Lines that are more than a pin (paths, addresses, local versions), and CUDA libraries."""
    return [line for line in text.splitlines() if not PIN.fullmatch(line) or line.startswith("nvidia-")]


def test_constraints_hold_pins_only():
    text = (ROOT / "constraints.txt").read_text()
    assert faults(text) == []
    assert len(text.splitlines()) > 50


@pytest.mark.parametrize(
    "line",
    [
        "torch==2.13.0+cpu",
        "torch @ file:///a/torch.whl",
        "--find-links folder",
        "-e .",
        "nvidia-nccl-cu13==2.1",
        "",
    ],
)
def test_fault_checker_refuses_what_ties_the_file_to_a_machine(line):
    assert faults(f"numpy==2.4.6\n{line}\ntorch==2.13.0\n") == [line]


def test_every_declared_dependency_is_pinned_inside_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(line) for group in groups for line in group if not line.startswith("yunque[")]
    assert len(requirements) > 15
    for requirement in requirements:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
