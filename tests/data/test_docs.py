"""Every example of docs/data.md, run as a reader would."""

import ast
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from yunque.core.config import from_mapping
from yunque.data.conversations import parse_conversation
from yunque.data.sources import AnySource
from yunque.train.settings import DataSettings
from yunque.train.stages import Stage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data.md"
SOURCES = sorted(ROOT.glob("src/yunque/data/*.py"))


@dataclass(frozen=True)
class PartOfARun:
    """What the page shows of a run file."""

    data: DataSettings
    stage: tuple[Stage, ...]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_tables_are_valid_configurations() -> None:
    shown = []
    for block in _blocks("toml"):
        run = from_mapping(PartOfARun, tomllib.loads(block))
        config = run.data.for_stage(run.stage[0])
        shown.append((list(config.sources), len(config.mixture.phases), config.packing.buffer_documents))
    assert shown == [(["python", "notes"], 2, 64), (["mine", "practice"], 1, 256)]


def test_json_lines_are_in_the_formats_they_show() -> None:
    text, chat = (json.loads(block) for block in _blocks("json"))
    assert isinstance(text["text"], str)
    assert parse_conversation(chat, "docs").learned == (True, False, True, True, True, True)


@pytest.mark.parametrize("number", [0, 1])
def test_code_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _blocks("python")
    assert len(blocks) == 2
    exec(compile(blocks[number], f"docs/data.md, example {number}", "exec"), {"__name__": "example"})


def test_every_kind_and_reason_is_listed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    kinds = [source.__dataclass_fields__["kind"].default for source in AnySource.__args__]
    assert all(f"| `{kind}` |" in page for kind in kinds)
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    calls = [node.args for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "problem"]
    reasons = {args[2].value for args in calls if len(args) > 2 and isinstance(args[2], ast.Constant)}
    assert len(reasons) > 12
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()
