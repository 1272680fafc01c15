"""The examples of docs/agents.md, run against a server as a reader would."""

import re
from pathlib import Path

import pytest

from yunque.cli.chat_session import HELP
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer, train_bpe

from ..serve.servers import listening, serve

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
CALL = "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>4</arg_value>"
REPLIES = (f"hm</think>{CALL}</tool_call><|observation|>", "hm</think>It is 7<|user|>")


@pytest.mark.parametrize(("number", "shown"), [(0, "assistant It is 7"), (1, "(-0.0625, -0.125)")])
def test_examples_run(number: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (len(BLOCKS), BLOCKS[number].count(ADDRESS)) == (2, 1)
    renderer = Renderer(train_bpe(["yes and no, add It is 3 plus 4\n"] * 8, 400), "glm-5")
    served = serve(renderer, *REPLIES, settings=ServeSettings(port=0))
    with listening(served) as url:
        code = compile(BLOCKS[number].replace(ADDRESS, url), f"docs/agents.md, example {number}", "exec")
        exec(code, {"__name__": "example"})
    assert shown in capsys.readouterr().out


def test_every_command_of_the_chat_is_on_the_page() -> None:
    commands = re.findall(r"^(/\w+)", HELP, re.MULTILINE)
    assert len(commands) == 10
    assert [command for command in commands if command not in PAGE] == []
