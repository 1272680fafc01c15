"""What ``yunque generate`` writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from yunque.cli.generate import Writer
from yunque.cli.main import main
from yunque.model import PackedBatch, PackedView
from yunque.text import chat_template


def test_greedy_completion_is_the_argmax_of_the_training_forward(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), "import os", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    writer = Writer.load(checkpoint)
    ids = writer.tokenizer.encode("import os")
    with torch.no_grad():
        for _ in range(12):
            batch = PackedBatch.from_documents([ids])
            logits = writer.model.logits(writer.model(batch.tokens_T, PackedView(batch)).hidden_TD)
            token = int(logits[-1].argmax())
            if token in writer.tokenizer.special.eos_ids:
                break
            ids = [*ids, token]
    assert out == writer.tokenizer.decode(ids) + "\n"


def test_a_seed_gives_the_same_draws_and_another_seed_others(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        main(["generate", str(checkpoint), "x", "--temperature", "1", "--seed", seed, "--max-new-tokens", "24"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_the_chat_format_is_the_one_of_the_checkpoint(checkpoint: Path) -> None:
    assert Writer.load(checkpoint).renderer.chat_format == "glm-5.1"


def test_a_chat_with_tools_runs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tmp_path / "tools.json"
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    tools.write_text(json.dumps([tool]))
    arguments = ["generate", str(checkpoint), "What is 3 plus 4?", "--chat", "--tools", str(tools)]
    assert main([*arguments, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hello", "--temperature", "-1"], "temperature is -1.0"),
        (["hello", "--top-p", "0"], "top_p is 0.0"),
        (["hello", "--system", "Be brief."], "need --chat"),
        (["hello", "--chat-format", "glm-5"], "need --chat"),
        (["hello", "--max-new-tokens", "100000"], "exceed the model's context of 512"),
        (["", "--max-new-tokens", "4"], "the prompt has no tokens"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(
    checkpoint: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_folder_is_a_mistake_not_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "hello"]) == 2
    assert "nothing" in capsys.readouterr().err


FOREIGN = ["{{ messages }}", chat_template("glm-5") + " ", None]


@pytest.fixture(params=FOREIGN, ids=["foreign", "nearly ours", "none"])
def foreign(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with a chat template that is none of the four formats, or without one."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    if request.param is not None:
        (folder / "chat_template.jinja").write_text(request.param)
    return folder


def test_an_unknown_chat_template_is_named_once_with_what_it_is_taken_for_and_the_choices(
    foreign: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    chat = ["generate", str(foreign), "What is 3 plus 4?", "--chat", "--max-new-tokens", "8"]
    assert main(chat) == 0
    assumed = capsys.readouterr()
    assert assumed.err.count("\n") == 1
    for words in (
        str(foreign / "chat_template.jinja"),
        "as in glm-5;",
        "--chat-format (glm-5, glm-5.1, glm-5.2, glm-5.3",
    ):
        assert words in assumed.err
    assert main([*chat, "--chat-format", "glm-5"]) == 0
    chosen = capsys.readouterr()
    assert (chosen.out, chosen.err) == (assumed.out, "")


def test_a_completion_writes_no_messages_and_warns_of_no_template(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(foreign), "import os", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_the_chosen_chat_format_stands_in_for_the_checkpoint_s(checkpoint: Path) -> None:
    assert Writer.load(checkpoint, chat_format="glm-5.3").renderer.chat_format == "glm-5.3"
