"""``yunque chat``: the conversation, its commands, what is shown, pipes and terminals."""

import asyncio
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from yunque.agents import BadCall, ChatOptions, ChatReply, ChatUsage, Toolset
from yunque.cli.chat_input import History, PipedInput, read_message
from yunque.cli.chat_session import ChatSession, SessionSettings
from yunque.cli.chat_view import ChatView
from yunque.cli.local_chat import LocalChatClient
from yunque.cli.main import main
from yunque.core.errors import ConfigError
from yunque.core.records import Message
from yunque.data.conversations import parse_conversation
from yunque.protocol.errors import EngineUnavailable
from yunque.serve.settings import ServeSettings
from yunque.text import ReasoningDelta, Renderer, TextDelta, train_bpe

from ..agents.scripted_client import ScriptedChat, says
from ..serve.scripted_engine import ScriptedEngine, ScriptSettings
from ..serve.servers import Served, listening, serve
from .terminals import Terminal


class Screen:
    """A session with what it writes."""

    def __init__(self, client: Any, *, is_terminal: bool = True, **settings: Any) -> None:
        self.out, self.aside = io.StringIO(), io.StringIO()
        ticks = iter(range(10**6))
        self.view = ChatView(self.out, self.aside, is_terminal=is_terminal, clock=lambda: float(next(ticks)))
        self.session = ChatSession(client, self.view, ChatOptions(), SessionSettings(**settings), Toolset())

    def say(self, *texts: str) -> str:
        """What is written on the screen for these."""
        begin = len(self.out.getvalue())
        for text in texts:
            asyncio.run(self.session.take(text))
        return self.out.getvalue()[begin:]


def contents(messages: tuple[Message, ...]) -> list[tuple[str, str | None]]:
    return [(message.role, message.content) for message in messages]


def test_a_conversation_grows_and_the_system_message_stands_first() -> None:
    client = ScriptedChat(says("one"), says("two"))
    screen = Screen(client, system="Be brief.")
    screen.say("a", "/system Be long.", "b")
    assert contents(client.asked[0][0]) == [("system", "Be brief."), ("user", "a")]
    assert contents(client.asked[1][0]) == [
        ("system", "Be long."),
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
    ]
    screen.say("/system", "/clear", "c")
    assert contents(client.asked[2][0]) == [("user", "c")]


def test_commands_set_the_options_of_the_next_reply() -> None:
    client = ScriptedChat(says("x"))
    screen = Screen(client, seed=7)
    screen.say("a", "/think off", "/temperature 0.5", "b", "/think on", "c")
    options = [asked[2] for asked in client.asked]
    assert [(o.enable_thinking, o.temperature, o.seed) for o in options] == [
        (None, None, 7),
        (False, 0.5, 8),
        (True, 0.5, 9),
    ]
    assert "temperature 0.5" in screen.say("/temperature")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/thnk on", "did you mean 'think'"),
        ("/think maybe", "/think on, /think off"),
        ("/temperature hot", "'hot' is not a number"),
        ("/temperature 101", "between 0 and 100"),
        ("/temperature nan", "between 0 and 100"),
        ("/save", "needs a file"),
        ("/retry", "no message"),
        ("/tools nothing.py", "no such file"),
    ],
)
def test_commands_that_cannot_be_obeyed_say_what_is_valid(command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Screen(ScriptedChat(says("x"))).say(command)


def test_a_space_makes_a_slash_text() -> None:
    client = ScriptedChat(says("x"))
    Screen(client).say(" /etc/passwd is a file")
    assert client.asked[0][0][0].content == "/etc/passwd is a file"


def test_retry_answers_the_last_message_again_without_the_first_answer() -> None:
    client = ScriptedChat(says("one"), says("two"), says("three"))
    screen = Screen(client)
    screen.say("a", "b", "/retry")
    assert contents(client.asked[2][0]) == [("user", "a"), ("assistant", "one"), ("user", "b")]
    assert contents(screen.session.messages)[-1] == ("assistant", "three")


def test_a_message_without_a_reply_is_forgotten_but_can_be_retried() -> None:
    class Fails(ScriptedChat):
        fails = True

        async def stream(self, *asked: Any):  # type: ignore[override]
            if self.fails:
                raise EngineUnavailable("no engine")
            async for event in super().stream(*asked):
                yield event

    client = Fails(says("x"))
    screen = Screen(client)
    with pytest.raises(EngineUnavailable):
        screen.say("a")
    assert screen.session.messages == ()
    client.fails = False
    screen.say("/retry")
    assert contents(screen.session.messages) == [("user", "a"), ("assistant", "x")]


def test_a_stopped_reply_keeps_what_it_had_said() -> None:
    client = ScriptedChat(says("one two three"), delay_s=0.05)
    screen = Screen(client)

    async def stop() -> None:
        task = asyncio.ensure_future(screen.session.take("a"))
        while "two" not in screen.out.getvalue():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    assert contents(screen.session.messages) == [("user", "a"), ("assistant", "onetwo")]
    assert client.left == 1


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''


def test_tools_of_a_file_are_run_and_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOLS)
    client = ScriptedChat(says("so", ("add", {"a": 3, "b": 4})), says("7"))
    screen = Screen(client, is_terminal=False)
    shown = screen.say(f"/tools {tmp_path / 'mine.py'}", "What is 3 plus 4?")
    asides = screen.aside.getvalue().splitlines()
    assert asides[:2] == [f"running {tmp_path / 'mine.py'}", "tools: add(a, b)"]
    assert asides[2:4] == ["→ add(a=3, b=4)", "← add: 7"]
    assert shown == "so\n7\n"
    assert [message.role for message in screen.session.messages] == ["user", "assistant", "tool", "assistant"]
    screen.say("/tools off")
    assert screen.aside.getvalue().endswith("no tools\n")


def test_save_appends_rows_that_training_reads(tmp_path: Path) -> None:
    screen = Screen(ScriptedChat(says("one")), system="S")
    path = tmp_path / "kept.jsonl"
    screen.say("a", f"/save {path}", "b", f"/save {path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(parse_conversation(row, "kept").messages) for row in rows] == [3, 5]


def _events(*events: Any) -> ScriptedChat:
    class Plays(ScriptedChat):
        async def stream(self, *_: Any):  # type: ignore[override]
            for event in events:
                yield event

    return Plays(says(""))


REPLY = ChatReply(Message("assistant", "Hi"), "stop", (), ChatUsage(20, 8, 16, 3, drafted=6, accepted=3))


def test_a_terminal_shows_the_thought_dimmed_the_answer_and_the_figures() -> None:
    shown = Screen(_events(ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("H"), TextDelta("i"), REPLY)).say("a")
    figures = "8 tokens, 8.0 tokens/s, 50 % of 6 drafts accepted, 16 of 20 prompt tokens cached"
    assert shown == f"\033[2mhm\033[0m\nHi\n\033[2m{figures}\033[0m\n"


def test_a_folded_thought_is_a_line_that_says_how_long_it_is() -> None:
    screen = Screen(_events(ReasoningDelta("secret"), ReasoningDelta(" plan"), TextDelta("Hi"), REPLY))
    shown = screen.say("/fold on", "a")
    assert "secret" not in shown
    assert "\r\033[K\033[2mthought for 11 characters\033[0m\nHi\n" in shown


def test_a_pipe_gets_the_answer_alone() -> None:
    screen = Screen(_events(ReasoningDelta("hm"), TextDelta("Hi"), REPLY), is_terminal=False)
    assert screen.say("a") == "Hi\n"
    assert screen.aside.getvalue().startswith("8 tokens")


def test_nothing_that_a_model_or_a_tool_writes_reaches_the_terminal_as_a_command() -> None:
    def evil() -> str:
        return "\033]0;title\a"

    client = ScriptedChat(says("a\033[2Jb\x9b1m\r\tc", ("evil", {})), says("x"))
    screen = Screen(client)
    screen.session._tools = Toolset([evil])
    shown = screen.say("q").replace("\033[2m", "").replace("\033[0m", "")
    assert not set(shown) & {"\033", "\a", "\r", "\x9b"}
    assert "a\ufffd[2Jb\ufffd1m\ufffd\tc" in shown


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (says("x", ("f", {})), "stopped after 1 turns; the last calls were not run"),
        (says("x", finish="length"), "cut: the length is reached"),
        (says("x", finish="length", bad=[BadCall("f", "", "no end")]), "unusable call: no end"),
    ],
)
def test_unusual_ends_are_said(reply: ChatReply, words: str) -> None:
    assert words in Screen(ScriptedChat(reply), max_turns=1).say("a")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\\\nb\nc", ["a\nb", "c"]),
        ("\n\n a\n", [" a"]),
        ("```\nx = 1\n\ny\\\n```\nb\n", ["```\nx = 1\n\ny\\\n```", "b"]),
        ("see ``` here\nb\n", ["see ``` here", "b"]),
        ("```py\nopen", ["```py\nopen"]),
        ("a\\", ["a"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("", []),
    ],
)
def test_piped_lines_become_messages(text: str, messages: list[str]) -> None:
    prompter, found = PipedInput(io.StringIO(text), is_whole=False), []
    while (message := prompter.read()) is not None:
        found.append(message)
    assert found == messages


def test_all_of_a_pipe_may_be_one_message() -> None:
    prompter = PipedInput(io.StringIO("a\n/b\n\n"), is_whole=True)
    assert [prompter.read(), prompter.read()] == ["a\n/b", None]


def test_lines_that_have_come_already_belong_to_what_was_pasted() -> None:
    lines = ["a\\", "", "b", "c"]
    assert read_message(lambda _: lines.pop(0), lambda: len(lines) > 1) == "a\\\n\nb"


def test_history_keeps_texts_of_many_lines_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    for text in ("one", "two\nlines é", "x"):
        History(path).add(text)
    assert History(path).load() == ["one", "two\nlines é", "x"]
    assert path.stat().st_mode & 0o077 == 0
    with open(path, "a") as file:
        file.write("not json\n{}\n" + '"y"\n' * 2500)
    assert History(path).load() == ["y"] * 1000
    assert len(path.read_text().splitlines()) == 1000
    assert History(tmp_path).load() == []
    History(tmp_path).add("a folder is no file")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_bpe(["yes and no, x y z add\n"] * 8, 400), "glm-5")


CALLED = "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value><arg_key>b</arg_key><arg_value>4</arg_value>"


def local(renderer: Renderer, *replies: str, **script: Any) -> tuple[LocalChatClient, ScriptedEngine]:
    played = [renderer.tokenizer.encode_with_special(text) for text in replies]
    engine = ScriptedEngine(played, ScriptSettings(vocab_size=renderer.tokenizer.vocab_size, **script))
    return LocalChatClient(engine, renderer), engine


def test_an_engine_in_process_converses_with_tools(renderer: Renderer) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    client, engine = local(renderer, f"hm</think>so{CALLED}</tool_call><|observation|>", "easy</think>It is 7<|user|>")
    screen = Screen(client)
    screen.session._tools = Toolset([add])
    shown = screen.say("What is 3 plus 4?")
    assert all(part in shown for part in ("hm", "so\n", "→ add(a=3, b=4)", "← add: 7", "It is 7\n"))
    assert [message.content for message in screen.session.messages[1:]] == ["so", "7", "It is 7"]
    assert screen.session.messages[1].reasoning == "hm"
    assert "prompt tokens cached" in shown
    assert engine.pages_used == 0


def test_an_engine_s_broken_call_is_complained_about(renderer: Renderer) -> None:
    client, _ = local(renderer, "hm</think><tool_call>sub</tool_call><|observation|>", "hm</think>sorry<|user|>")

    def add(a: int) -> int:
        return a

    screen = Screen(client)
    screen.session._tools = Toolset([add])
    screen.say("a")
    assert [message.role for message in screen.session.messages] == ["user", "assistant", "user", "assistant"]
    assert "unknown tool" in (screen.session.messages[2].content or "")


def test_options_reach_the_engine_and_leaving_frees_its_pages(renderer: Renderer) -> None:
    client, engine = local(renderer, "x </think>" + "a b " * 200, delay_s=0.005)

    async def leave() -> None:
        options = ChatOptions(0.5, 0.9, 300, 4, enable_thinking=False, session="s")
        events = client.stream([Message("user", "a")], (), options)
        await anext(events)
        assert engine.pages_used > 0
        await events.aclose()
        assert engine.pages_used == 0

    asyncio.run(leave())
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed) == (0.5, 0.9, 300, 4)
    assert request.session == "s"
    assert renderer.tokenizer.decode(list(request.tokens)).endswith("</think>")


def test_an_engine_that_breaks_is_an_error_not_a_short_answer(renderer: Renderer) -> None:
    client, engine = local(renderer, "x </think>abc")
    engine.fails_after = 2
    with pytest.raises(EngineUnavailable, match="the script says so"):
        Screen(client).say("a")


def piped(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", *arguments])


def test_a_checkpoint_answers_piped_lines(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(checkpoint), "--temperature", "0", "--max-tokens", "8", "--no-think"]
    assert piped(monkeypatch, "What is 3 plus 4?\nimport os\n", *options) == 0
    found = capsys.readouterr()
    assert found.err.count("8 tokens, ") == 2
    assert "prompt tokens cached" in found.err
    assert piped(monkeypatch, "What is 3 plus 4?\n", *options) == 0
    again = capsys.readouterr()
    assert again.out
    assert found.out.startswith(again.out)  # greedy: the same first answer


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("/thnk on\n", [], "did you mean 'think'"),
        ("a\n", ["--temperature", "-1"], "temperature"),
        ("a\n", ["--max-turns", "0"], "--max-turns is 0"),
        ("a\n", ["--model", "m"], "are for servers"),
        ("a\n", ["--tools", "nothing.py"], "no such file"),
        ("x" * 5000 + "\n", [], "context"),
    ],
)
def test_mistakes_in_a_pipe_exit_with_2(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    words: str,
) -> None:
    assert piped(monkeypatch, text, str(checkpoint), *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_server_that_is_not_there_is_a_mistake_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, "a\n", "http://127.0.0.1:9") == 2
    error = capsys.readouterr().err
    assert "cannot be reached" in error
    assert error.count("\n") == 1


@pytest.fixture
def served(renderer: Renderer) -> Served:
    slow = "hm</think>" + "x y z " * 400
    return serve(renderer, "hm</think>yes<|user|>", slow, "hm</think>no<|user|>", settings=ServeSettings(port=0))


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with listening(served) as address:
        yield address


def test_a_server_answers_a_pipe(
    served: Served, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, "/system Be brief.\nhello\\\nthere\n", url) == 0
    assert capsys.readouterr().out == "yes\n"
    asked = served.renderer.tokenizer.decode(list(served.engine.requests[0].tokens))
    assert "Be brief." in asked
    assert "hello\nthere" in asked


def test_a_terminal_streams_stops_at_ctrl_c_goes_on_and_remembers(
    renderer: Renderer, served: Served, url: str, tmp_path: Path
) -> None:
    asked = served.engine.requests
    with Terminal(["chat", url], env={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.until("/help lists the commands")
        terminal.until("> ")
        terminal.type("first\n")
        shown = terminal.until("prompt tokens cached")
        assert "hm" in shown
        assert "yes" in shown
        terminal.until("> ")
        served.engine.settings = ScriptSettings(vocab_size=renderer.tokenizer.vocab_size, delay_s=0.02)
        terminal.type("a long one\n")
        terminal.until("x y")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.until("> ")
        terminal.type("```\n")
        terminal.until("… ")
        terminal.type("code\n")
        terminal.until("… ")
        terminal.type("```\n")
        terminal.until("no")
        terminal.until("> ")
        time.sleep(0.3)  # a signal between the prompt and the wait for a key would be seen only with the key
        terminal.type("\x03")
        terminal.until("> ")
        terminal.type("/nothing\n")
        terminal.until("unknown command 'nothing'")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    texts = [renderer.tokenizer.decode(list(request.tokens)) for request in asked]
    assert len(texts) == 3
    assert "```\ncode\n```" in texts[2]
    assert "x y" in texts[2]  # the stopped answer is part of the conversation
    assert len(served.engine.aborted) == 1
    assert History(tmp_path / "yunque" / "chat_history").load() == [
        "first",
        "a long one",
        "```\ncode\n```",
        "/nothing",
    ]


def test_what_is_pasted_into_a_terminal_is_one_message(
    renderer: Renderer, served: Served, url: str, tmp_path: Path
) -> None:
    with Terminal(["chat", url], env={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.until("> ")
        terminal.type("one\ntwo\n\nthree\n")
        terminal.until("prompt tokens cached")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0
    (request,) = served.engine.requests
    assert "one\ntwo\n\nthree" in renderer.tokenizer.decode(list(request.tokens))


def test_a_checkpoint_answers_at_a_terminal(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["chat", str(checkpoint), "--max-tokens", "8", "--fold"]
    with Terminal(arguments, env={"XDG_STATE_HOME": str(tmp_path)}) as terminal:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("8 tokens")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0
