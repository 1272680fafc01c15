"""Set-up: skipped when nothing changed, repaired when interrupted, and clear about which torch it takes.

The script runs for real; python and uv are stand-ins that note what they were asked, so no network is needed.
"""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One program in both roles. It fails when its arguments hold a word of $STUB_FAILS, hangs when they hold
# $STUB_HANGS, and without an index finds torch only where $UV_FIND_LINKS names the folder $STUB_TORCH.
STUB = """#!/bin/bash
echo "$(basename "$0") $* links=${UV_FIND_LINKS:-}" >> "$STUB_LOG"
refuse() { echo "  cause: stub refused" >&2; exit 1; }
if [ -n "${STUB_HANGS:-}" ] && [[ " $* " == *" $STUB_HANGS "* ]]; then sleep 60; fi
for word in ${STUB_FAILS:-}; do [[ " $* " == *" $word "* ]] && refuse; done
if [[ " $* " == *" --no-index "* ]] && [[ ",$UV_FIND_LINKS," != *",${STUB_TORCH:-none},"* ]]; then refuse; fi
case "$*" in
  "-c import sys; sys.exit"*) exit 0 ;;
  "-c import sys; print"*) echo "$0" ;;
  --version) echo "Python 3.11.0" ;;
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv ;;
  "- "*) cat > /dev/null; echo "setup: torch checked, from $2" ;;
esac
"""
TOOLS = ["bash", "basename", "cat", "cksum", "cp", "cut", "dirname", "mkdir", "mktemp", "rm", "sed", "sleep"]


@dataclass
class Clone:
    """A copy of what set-up reads, in a folder of its own, and a PATH that holds only stand-ins."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def setup(self, profile: str = "run", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "scripts/setup.sh", profile],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        """What the stand-ins were asked since the last look."""
        log = Path(self.environment["STUB_LOG"])
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path) -> Clone:
    folder, tools = tmp_path / "clone", tmp_path / "tools"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    tools.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    for name, program in (("python3", STUB), ("uname", '#!/bin/bash\necho "$STUB_MACHINE"\n')):
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    return Clone(folder, {"PATH": str(tools), "STUB_LOG": str(tmp_path / "log")})


def test_repeated_set_up_asks_nothing_and_takes_well_under_a_second(clone):
    assert clone.setup().returncode == 0
    assert not (clone.folder / ".venv.incomplete").exists()
    assert clone.calls() != []
    start = time.perf_counter()
    again = clone.setup()
    assert time.perf_counter() - start < 0.5
    assert (again.returncode, again.stdout, clone.calls()) == (0, "", [])


def test_changed_inputs_or_a_wider_profile_set_up_again_in_place(clone):
    clone.setup("run")
    (clone.folder / ".venv" / "mine").touch()
    clone.calls()
    assert clone.setup("dev").returncode == 0
    assert any("-e .[dev]" in call for call in clone.calls())
    assert clone.setup("run").stdout == "", "dev holds what run needs"
    with open(clone.folder / "constraints.txt", "a") as file:
        file.write("something==1.0\n")
    assert clone.setup("run").returncode == 0
    assert any("-e ." in call for call in clone.calls())
    assert (clone.folder / ".venv" / "mine").exists()
    assert len(list((clone.folder / ".venv").glob(".yunque-*"))) == 1


@pytest.mark.parametrize("moment", ["venv", "uv>=0.9", "torch", ".", "-"])
def test_killed_at_any_step_the_same_command_starts_from_an_empty_environment(clone, moment):
    process = subprocess.Popen(
        ["bash", "scripts/setup.sh", "run"],
        cwd=clone.folder,
        env=clone.environment | {"STUB_HANGS": moment, "UV_FIND_LINKS": "/a", "STUB_TORCH": "/a"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = Path(clone.environment["STUB_LOG"])
    deadline = time.monotonic() + 10
    while not (log.exists() and f" {moment} " in log.read_text()):
        assert time.monotonic() < deadline, "the step was never reached"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert list(clone.folder.glob(".venv/.yunque-*")) == []
    (clone.folder / ".venv").mkdir(exist_ok=True)
    (clone.folder / ".venv" / "half-made").touch()
    clone.calls()

    repaired = clone.setup()
    assert repaired.returncode == 0
    assert "an earlier set-up was interrupted" in repaired.stdout
    assert not (clone.folder / ".venv" / "half-made").exists()
    assert any("-m venv .venv" in call for call in clone.calls())
    assert clone.setup().stdout == ""


def test_what_does_not_import_is_a_failure_and_leaves_no_stamp(clone):
    failed = clone.setup(STUB_FAILS="-")
    assert failed.returncode == 1
    assert "do not import" in failed.stderr
    assert clone.setup().returncode == 0


@pytest.mark.parametrize(("name", "value"), [("PIP_FIND_LINKS", " /a  /b "), ("UV_FIND_LINKS", "/a,/b")])
def test_torch_comes_from_find_links_where_the_environment_names_them(clone, name, value):
    result = clone.setup(STUB_TORCH="/b", **{name: value})
    assert "from find-links" in result.stdout
    assert [call.split("links=")[1] for call in clone.calls() if "-e ." in call] == ["/a,/b"]
    shutil.rmtree(clone.folder / ".venv")
    result = clone.setup(STUB_TORCH="/c", **{name: value})
    assert "find-links hold no fitting torch wheel; looking further" in result.stdout
    assert "from the PyTorch index, backend auto" in result.stdout


@pytest.mark.parametrize(("machine", "stated"), [("Linux x86_64", True), ("Darwin arm64", False)])
def test_unreachable_pytorch_index_falls_back_and_states_the_size(clone, machine, stated):
    result = clone.setup(STUB_FAILS="--torch-backend", STUB_MACHINE=machine)
    assert result.returncode == 0
    assert "the PyTorch index cannot be used (stub refused)" in result.stdout
    assert ("2.8 GB" in result.stdout) == stated
    assert "from the default package index" in result.stdout


def test_a_chosen_backend_is_not_replaced_by_another(clone):
    assert "backend cu130" in clone.setup(UV_TORCH_BACKEND="cu130").stdout
    assert any("--torch-backend cu130 torch" in call for call in clone.calls())
    shutil.rmtree(clone.folder / ".venv")
    result = clone.setup(UV_TORCH_BACKEND="cu130", STUB_FAILS="--torch-backend")
    assert result.returncode == 1
    assert "could not install torch with UV_TORCH_BACKEND=cu130" in result.stderr


def test_missing_python_and_unknown_profile_are_said_plainly(clone):
    result = clone.setup("fun")
    assert (result.returncode, result.stderr) == (2, "setup: unknown profile 'fun'; valid: run, dev\n")
    os.remove(Path(clone.environment["PATH"]) / "python3")
    result = clone.setup()
    assert result.returncode == 1
    assert "no Python 3.11 or newer found" in result.stderr
    assert "PYTHON=/path/to/python3 make setup" in result.stderr
    assert not (clone.folder / ".venv").exists()
