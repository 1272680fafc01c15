import json
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.core.errors import DataError
from yunque.core.records import Message, ToolCall, ToolSpec
from yunque.text import (
    CONTROL_TOKENS,
    TAG_TOKENS,
    ChatFormat,
    Event,
    FailureReason,
    Malformed,
    ParsedTurn,
    ReasoningDelta,
    Renderer,
    TextDelta,
    Tokenizer,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    TurnParser,
)

from .turns import Turn, turns

USER = Message("user", "x")
FORMATTED = st.sampled_from(list(ChatFormat)).flatmap(lambda name: st.tuples(st.just(name), turns(name)))


def parsed(tokenizer: Tokenizer, text: str, *, in_reasoning: bool = False, **options: Any) -> ParsedTurn:
    """The turn that trusted text spells; tags in it are their own ids."""
    parser = TurnParser(tokenizer, in_reasoning=in_reasoning, **options)
    parser.feed(*tokenizer.encode_with_special(text))
    return parser.finish()


def streamed(parser: TurnParser, ids: list[int]) -> tuple[list[Event], ParsedTurn]:
    """Every event, id by id, and the turn."""
    events = list(chain.from_iterable(parser.feed(token) for token in ids))
    turn = parser.finish()
    return [*events, *turn.tail], turn


def arguments_of(events: list[Event], index: int) -> str:
    """The arguments that were streamed for one call."""
    return "".join(e.arguments for e in events if isinstance(e, ToolCallDelta) and e.index == index)


def rendered_turn(tokenizer: Tokenizer, chat_format: ChatFormat, message: Message) -> tuple[list[int], list[int]]:
    """The prompt and the ids of an assistant turn after one user message, its ending token included."""
    rendered = Renderer(tokenizer, chat_format).render([USER, message], close_last_turn=True)
    (span,) = rendered.turns
    assert span.stop == len(rendered.tokens)
    return list(rendered.tokens[: span.start]), list(rendered.tokens[span.start :])


def without_ids(message: Message, opens: bool) -> Message:
    """What a parser can know of a message: no call ids, and a thought wherever the prompt opened one."""
    reasoning = "" if message.reasoning is None and opens else message.reasoning
    return Message("assistant", message.content, reasoning, message.tool_calls)


@given(FORMATTED)
def test_parsing_a_rendered_turn_gives_the_turn(tokenizer: Tokenizer, drawn: tuple[ChatFormat, Turn]) -> None:
    chat_format, turn = drawn
    prompt, ids = rendered_turn(tokenizer, chat_format, turn.message)
    opens = tokenizer.special.opens_reasoning(prompt)
    events, result = streamed(TurnParser(tokenizer, turn.tools, in_reasoning=opens), ids)
    assert result.to_message() == without_ids(turn.message, opens)
    assert result.failures == ()
    assert result.stop == ("<|observation|>" if turn.message.tool_calls else "<|endoftext|>")
    assert result.finish_reason == ("tool_calls" if turn.message.tool_calls else "stop")
    assert rendered_turn(tokenizer, chat_format, result.to_message()) == (prompt, ids)
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == result.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == (result.reasoning or "")
    for index, call in enumerate(turn.message.tool_calls):
        assert arguments_of(events, index) == json.dumps(call.arguments, ensure_ascii=False)


@given(FORMATTED, st.data())
def test_every_way_of_feeding_gives_the_same_events(
    tokenizer: Tokenizer, drawn: tuple[ChatFormat, Turn], data: st.DataObject
) -> None:
    chat_format, turn = drawn
    _, ids = rendered_turn(tokenizer, chat_format, turn.message)
    expected = streamed(TurnParser(tokenizer, turn.tools, in_reasoning=True), ids)
    parser, events, at = TurnParser(tokenizer, turn.tools, in_reasoning=True), list[Event](), 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids) - at))
        events += parser.feed(*ids[at : at + size])
        at += size
    result = parser.finish()
    assert ([*events, *result.tail], result) == expected


PLAIN = st.text("ab <>/tool_callthink\né😀", max_size=8).filter(lambda text: "</" not in text)


@given(st.sampled_from(list(ChatFormat)), st.data())
def test_tags_spelled_by_ordinary_tokens_give_the_same_turn(
    tokenizer: Tokenizer, chat_format: ChatFormat, data: st.DataObject
) -> None:
    """Whatever tokens spell the turn: cut anywhere, inside tags and inside characters."""
    turn = data.draw(turns(chat_format, PLAIN))
    prompt, ids = rendered_turn(tokenizer, chat_format, turn.message)
    in_reasoning = tokenizer.special.opens_reasoning(prompt)
    raw = tokenizer.decode_bytes(ids[:-1])
    if any(tag in part for tag in TAG_TOKENS for part in strings(turn.message)):
        return
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    spelled: list[int] = []
    for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        piece = raw[a:b]
        try:
            spelled += tokenizer.encode(piece.decode())
        except UnicodeDecodeError:
            spelled += [single[bytes([byte])] for byte in piece]
    options = {"in_reasoning": in_reasoning, "text_tags": True}
    events, result = streamed(TurnParser(tokenizer, turn.tools, **options), [*spelled, ids[-1]])
    assert result == streamed(TurnParser(tokenizer, turn.tools, **options), ids)[1]
    assert result.to_message() == without_ids(turn.message, in_reasoning)
    assert not [e for e in events if isinstance(e, TextDelta) and any(tag in e.text for tag in TAG_TOKENS)]


def strings(value: Any) -> list[str]:
    """Every piece of text that a message writes between tags."""
    texts = [value.content, value.reasoning or ""]
    for call in value.tool_calls:
        texts += [call.name, *call.arguments]
        texts += [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in call.arguments.values()]
    return texts


SOUP = st.lists(
    st.sampled_from([*CONTROL_TOKENS, *TAG_TOKENS, *TAG_TOKENS, "f", "g", "7", " ", "\n", "é", "<th"]),
    max_size=25,
)


@given(SOUP, st.booleans(), st.booleans())
def test_any_ids_parse_into_whole_calls_and_typed_failures(
    tokenizer: Tokenizer, pieces: list[str], in_reasoning: bool, text_tags: bool
) -> None:
    ends = [tokenizer.id_of(token) for token in ("<|user|>", "<|observation|>", "<|endoftext|>")]
    ids = tokenizer.encode_with_special("".join(pieces))
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    tools = [ToolSpec.from_openai({"name": "f", "parameters": {"properties": {"g": {"type": "string"}}}})]
    parser = TurnParser(tokenizer, tools, in_reasoning=in_reasoning, text_tags=text_tags)
    events, result = streamed(parser, ids[: stop + 1])
    started = [e for e in events if isinstance(e, ToolCallStart)]
    ended = [e for e in events if isinstance(e, ToolCallEnd)]
    void = [e.index for e in events if isinstance(e, Malformed) and e.index is not None]
    assert [e.index for e in started] == list(range(len(started))) == sorted([e.index for e in ended] + void)
    assert tuple(e.call for e in ended) == result.tool_calls
    for end in ended:
        assert json.loads(arguments_of(events, end.index)) == end.call.arguments
    assert result.failures == tuple(e for e in events if isinstance(e, Malformed))
    shown = [e.text for e in events if isinstance(e, TextDelta | ReasoningDelta)]
    assert not any(token in text for text in shown for token in (*CONTROL_TOKENS, *TAG_TOKENS))
    assert result.content == result.content.strip()


def test_a_call_straight_out_of_the_thought(tokenizer: Tokenizer) -> None:
    """InternLM/lmdeploy#4737: ``<tool_call>`` leaves the thought too."""
    result = parsed(tokenizer, "thought<tool_call>f</tool_call><|observation|>", in_reasoning=True)
    assert (result.reasoning, result.content, result.tool_calls) == ("thought", "", (ToolCall("f", {}),))
    assert (result.failures, result.has_closed_reasoning) == ((), True)


def test_output_that_starts_in_the_middle_of_a_thought(tokenizer: Tokenizer) -> None:
    """waybarrios/vllm-mlx#725, vllm-project/vllm#31319, vllm-project/vllm#31383, zai-org/GLM-V#243."""
    for text in ("why</think>because", "<think>why</think>because", "why</think>\nbecause\n"):
        result = parsed(tokenizer, text, in_reasoning=True)
        assert (result.reasoning, result.content) == ("why", "because")
    cut = parsed(tokenizer, "why not", in_reasoning=True)
    assert (cut.reasoning, cut.content, cut.has_closed_reasoning, cut.finish_reason) == (
        "why not",
        "",
        False,
        "length",
    )


def test_thinking_off_is_ignored_by_a_format_that_always_thinks(tokenizer: Tokenizer) -> None:
    """smg-project/smg#2538: GLM-5.3 thinks although enable_thinking is false; its tags must not leak."""
    for name, in_reasoning in (("glm-5.3", True), ("glm-5.2", False)):
        prompt = Renderer(tokenizer, name).render([USER], add_generation_prompt=True, enable_thinking=False)
        assert prompt.opens_reasoning is in_reasoning
        output = "why</think>because" if in_reasoning else "because"
        result = parsed(tokenizer, output, in_reasoning=prompt.opens_reasoning)
        assert (result.reasoning, result.content) == ("why" if in_reasoning else None, "because")


def test_two_calls_streamed_leave_no_text(tokenizer: Tokenizer) -> None:
    """xorbitsai/inference#5019: the second call leaked as text."""
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    for text, text_tags in ((call + call, False), (f"{call}\n{call}\n", False), (call + call, True)):
        encode = tokenizer.encode if text_tags else tokenizer.encode_with_special
        events, result = streamed(TurnParser(tokenizer, in_reasoning=False, text_tags=text_tags), encode(text))
        assert result.tool_calls == (ToolCall("f", {"a": 1}),) * 2
        assert [e for e in events if isinstance(e, TextDelta | Malformed)] == []
        assert [arguments_of(events, index) for index in (0, 1)] == ['{"a": 1}'] * 2


def test_streamed_arguments_are_one_object(tokenizer: Tokenizer) -> None:
    """edison7009/EchoBird#187: the arguments came out twice. A string is streamed while it grows."""
    tools = [ToolSpec.from_openai({"name": "w", "parameters": {"properties": {"text": {"type": "string"}}}})]
    text = '<tool_call>w<arg_key>text</arg_key><arg_value>say "hi"\n</arg_value>'
    text += "<arg_key>n</arg_key><arg_value>[1,2]"
    parser = TurnParser(tokenizer, tools, in_reasoning=False)
    events = parser.feed(*tokenizer.encode_with_special(text))
    assert events[0] == ToolCallStart(0, "w")
    assert arguments_of(events, 0) == '{"text": "say \\"hi\\"\\n"'
    assert len(events) > 5
    events += parser.feed(*tokenizer.encode_with_special("</arg_value></tool_call>"))
    assert arguments_of(events, 0) == '{"text": "say \\"hi\\"\\n", "n": [1, 2]}'
    assert events[-1] == ToolCallEnd(0, ToolCall("w", {"text": 'say "hi"\n', "n": [1, 2]}))


def test_no_arguments_are_an_empty_object(tokenizer: Tokenizer) -> None:
    events, result = streamed(
        TurnParser(tokenizer, in_reasoning=False),
        tokenizer.encode_with_special("<tool_call>\nf\n</tool_call>"),
    )
    assert result.tool_calls == (ToolCall("f", {}),)
    assert arguments_of(events, 0) == "{}"


def test_newlines_between_tags_are_allowed(tokenizer: Tokenizer) -> None:
    """GLM-4.5 writes them; GLM-5 does not."""
    text = (
        "why</think>\n\nLook.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value> x </arg_value>\n</tool_call>\n<|observation|>"
    )
    result = parsed(tokenizer, text, in_reasoning=True)
    assert result.content == "Look."
    assert result.tool_calls == (ToolCall("f", {"a": 1, "b": " x "}),)


def test_white_space_inside_the_answer_stays(tokenizer: Tokenizer) -> None:
    assert parsed(tokenizer, " a \n b\n").content == "a \n b"
    assert parsed(tokenizer, "a \n<tool_call>f</tool_call>\nb ").content == "a \n\nb"


def test_an_unknown_tool_is_reported_and_is_no_call(tokenizer: Tokenizer) -> None:
    """PrimeIntellect-ai/renderers#114: some engines drop it without a word."""
    text = "Ok.<tool_call>serch<arg_key>q</arg_key><arg_value>x</arg_value></tool_call><|observation|>"
    tools = [ToolSpec.from_openai({"name": "search"})]
    events, result = streamed(TurnParser(tokenizer, tools, in_reasoning=False), tokenizer.encode_with_special(text))
    (failure,) = result.failures
    assert failure.reason is FailureReason.UNKNOWN_TOOL
    assert "'serch'" in failure.detail
    assert "did you mean 'search'?" in failure.detail
    assert failure.raw == text[3:-15]
    assert failure.index is None
    assert (result.content, result.tool_calls, result.finish_reason) == ("Ok.", (), "stop")
    assert not [e for e in events if isinstance(e, ToolCallStart | ToolCallDelta)]
    assert parsed(tokenizer, "<tool_call>f</tool_call>", tools=[]).failures[0].reason == "unknown tool"
    twice = TurnParser(tokenizer, tools, in_reasoning=False)
    known = twice.feed(*tokenizer.encode_with_special("<tool_call>f</tool_call><tool_call>search</tool_call>"))
    assert [e for e in known if isinstance(e, ToolCallStart)] == [ToolCallStart(0, "search")]


@pytest.mark.parametrize(
    ("text", "reason", "raw"),
    [
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1", "unclosed call", None),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "unclosed call", None),
        ("<tool_call>f", "unclosed call", None),
        ("<tool_call>", "unclosed call", None),
        ("<tool_call></tool_call>", "missing name", None),
        ("<tool_call> \n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "missing name", None),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</arg_key><arg_key>b</arg_key></tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_value>1</arg_value></tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>", "bad arguments", None),
        ("<tool_call>f<|assistant|></tool_call>", "bad arguments", None),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1<|system|></tool_call>", "bad arguments", None),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"
            "<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
            "duplicate argument",
            None,
        ),
        ("</tool_call>", "stray tag", None),
        ("<arg_key>", "stray tag", None),
        ("<|assistant|>", "stray tag", None),
        ("ok</think>", "stray tag", "</think>"),
    ],
)
def test_malformed_parts_are_reported_whole_and_not_repaired(
    tokenizer: Tokenizer, text: str, reason: str, raw: str | None
) -> None:
    for end in ("", "<|observation|>"):
        result = parsed(tokenizer, text + end)
        assert [(f.reason, f.raw) for f in result.failures] == [(reason, text if raw is None else raw)]
        assert (result.tool_calls, result.content) == ((), "ok" if text.startswith("ok") else "")


def test_a_malformed_call_does_not_take_the_next_one_with_it(tokenizer: Tokenizer) -> None:
    bad = "<tool_call>f<arg_key>a</arg_key>"
    events, result = streamed(
        TurnParser(tokenizer, in_reasoning=False),
        tokenizer.encode_with_special(f"{bad}<tool_call>g</tool_call>"),
    )
    assert [(f.reason, f.raw, f.index) for f in result.failures] == [(FailureReason.UNCLOSED_CALL, bad, 0)]
    assert result.tool_calls == (ToolCall("g", {}),)
    assert [e for e in events if isinstance(e, ToolCallStart)] == [
        ToolCallStart(0, "f"),
        ToolCallStart(1, "g"),
    ]


def test_other_tags_inside_a_value_are_its_text(tokenizer: Tokenizer) -> None:
    value = "if x: <think> </think> <tool_call> <arg_key> <tool_response>"
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
    assert parsed(tokenizer, text).tool_calls == (ToolCall("f", {"a": value}),)


def test_a_thought_may_open_in_the_answer(tokenizer: Tokenizer) -> None:
    result = parsed(tokenizer, "<think>a</think>b<think>c</think>d")
    assert (result.reasoning, result.content, result.failures) == ("ac", "bd", ())
    assert parsed(tokenizer, "</think>b").reasoning is None
    assert parsed(tokenizer, "<think></think>b").reasoning == ""


def test_held_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    parser = TurnParser(tokenizer, in_reasoning=False, text_tags=True)
    events = parser.feed(*tokenizer.encode("a <thi"))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "a"
    result = parser.finish()
    assert (result.tail, result.content) == ((TextDelta(" <thi"),), "a <thi")
    assert parser.finish() is result


def test_ids_after_the_end_are_refused(tokenizer: Tokenizer) -> None:
    parser = TurnParser(tokenizer, in_reasoning=False)
    parser.feed(tokenizer.special["<|user|>"])
    with pytest.raises(DataError, match=r"token id 5 .*<\|user\|>"):
        parser.feed(5)
    parser = TurnParser(tokenizer, in_reasoning=False)
    parser.finish()
    with pytest.raises(DataError, match=r"token id 5 .*finish"):
        parser.feed(5)
