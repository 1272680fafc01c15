"""OpenAI requests read into records: every spelling that clients send."""

import pytest

from yunque.core.records import Message
from yunque.protocol.errors import RequestError
from yunque.protocol.generation import JsonConstraint, RegexConstraint
from yunque.protocol.openai import (
    REFUSED_FIELDS,
    ChatCompletionRequest,
    messages_of,
    output_of,
    prompts_of,
    refuse,
    tools_of,
)
from yunque.protocol.sampling_fields import SamplingFields, structured


def chat(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def test_content_is_text_parts_or_null_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = messages_of(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "reasoning_content": "r", "refusal": None},
            {"role": "tool", "content": parts, "tool_call_id": "c", "name": "f"},
        ]
    )
    assert read == (
        Message("system", "d"),
        Message("user", "ab"),
        Message("assistant", "", "r"),
        Message("tool", "ab", tool_call_id="c", name="f"),
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"messages\\[0\\].content\\[0\\]: part type '{kind}'") as caught:
        messages_of([{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "no", '{"a": NaN}'])
def test_a_past_call_with_broken_arguments_becomes_text(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    whole = {"id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    (message,) = messages_of([{"role": "assistant", "content": None, "tool_calls": [call, whole]}])
    assert message.content == f"<tool_call>f{arguments}"
    assert [call.name for call in message.tool_calls] == ["g"]
    (told,) = messages_of([{"role": "assistant", "content": "<tool_call>f...", "tool_calls": [call]}])
    assert (told.content, told.tool_calls) == ("<tool_call>f...", ())


def test_tools_are_read_and_double_names_and_other_types_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert [spec.name for spec in tools_of([tool])] == ["f"]
    assert tools_of(None) == ()
    for wrong, words in (
        ([tool, tool], "taken"),
        ([{"type": "web_search"}], "web_search"),
        ([{"type": "function"}], "name"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            tools_of(wrong)
        assert caught.value.param == "tools"


def test_response_formats() -> None:
    schema = {"type": "object"}
    assert output_of(None) is None
    assert output_of({"type": "text"}) is None
    assert output_of({"type": "json_object"}) == JsonConstraint()
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert output_of(asked) == JsonConstraint(schema)
    for wrong in ({"type": "json_schema"}, {"type": "grammar"}, {}):
        with pytest.raises(RequestError):
            output_of(wrong)
    assert structured({"regex": "a+"}) == RegexConstraint("a+")
    assert structured({"json": schema, "regex": None}) == JsonConstraint(schema)
    assert structured({}) is None
    with pytest.raises(RequestError, match="grammar"):
        structured({"grammar": "x"})


def test_both_spellings_of_the_limit_and_the_newer_one_wins() -> None:
    assert chat(max_tokens=3).max_new_tokens == 3
    assert chat(max_completion_tokens=4).max_new_tokens == 4
    assert chat(max_tokens=3, max_completion_tokens=4).max_new_tokens == 4
    assert chat().max_new_tokens is None


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_fields_whose_loss_would_change_the_answer_are_refused(name: str) -> None:
    refuse(chat(**{name: None}))
    with pytest.raises(RequestError, match=name):
        refuse(chat(**{name: {"x": 1}}))


def test_template_options_from_every_place() -> None:
    assert chat().template_options(enable_thinking=True) == {"enable_thinking": True}
    assert chat(reasoning_effort="none").template_options(enable_thinking=True) == {"enable_thinking": False}
    asked = chat(thinking={"type": "disabled", "clear_thinking": False}, reasoning_effort="high")
    assert asked.template_options(enable_thinking=True) == {
        "enable_thinking": False,
        "clear_thinking": False,
        "reasoning_effort": "high",
    }
    asked = chat(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    assert asked.template_options(enable_thinking=False) == {"enable_thinking": True}


def test_prompts_of_every_form() -> None:
    assert prompts_of("a", vocab_size=9) == ("a",)
    assert prompts_of(["a", ""], vocab_size=9) == ("a", "")
    assert prompts_of([1, 2], vocab_size=9) == ((1, 2),)
    assert prompts_of([[1], [2, 3]], vocab_size=9) == ((1,), (2, 3))
    for wrong in ([], [[]], [1, "a"], ["a", 1], [9], [-1], [True], {"a": 1}, None, 3, [[1, 2.5]]):
        with pytest.raises(RequestError) as caught:
            prompts_of(wrong, vocab_size=9)
        assert caught.value.param == "prompt"


def test_sampling_fields_become_settings() -> None:
    fields = SamplingFields.model_validate(
        {"temperature": 0, "top_k": -1, "logit_bias": {"3": 1.5}, "stop": "x", "stop_token_ids": [4], "seed": 7}
    )
    params = fields.params(max_new_tokens=5, vocab_size=10, eos_ids=(1, 2))
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
    assert (params.logit_bias, params.stop, params.stop_ids) == ({3: 1.5}, ("x",), frozenset({1, 2, 4}))
    ignoring = SamplingFields(ignore_eos=True).params(max_new_tokens=5, vocab_size=10, eos_ids=(1, 2))
    assert ignoring.stop_ids == frozenset()
    for key in ("10", "-1", "a", "1.0", "٣", "9" * 30):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingFields(logit_bias={key: 1.0}).params(max_new_tokens=None, vocab_size=10)
    with pytest.raises(RequestError, match="at most 64"):
        SamplingFields(stop=["x"] * 65).params(max_new_tokens=None, vocab_size=10)
