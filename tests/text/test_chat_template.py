import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from yunque.core.records import Message, ToolSpec
from yunque.text import ChatFormat, Renderer, Tokenizer, chat_template

from .conversations import MESSAGES, OPTIONS, TOOLS, tool_rounds

FORMATS = st.sampled_from(list(ChatFormat))


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def jinja(chat_format: str, messages: list[Any], **context: Any) -> str:
    return compiled(chat_format).render(messages=messages, **context)


@cache
def compiled(chat_format: str) -> Template:
    """The template in the environment that transformers sets up, without its loop control extension."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(chat_template(chat_format))


def openai(message: Message, as_text: bool) -> dict[str, Any]:
    """OpenAI's object, with arguments as JSON text or as objects."""
    shape = message.to_openai()
    if not as_text:
        for call, source in zip(shape.get("tool_calls", ()), message.tool_calls, strict=True):
            call["function"]["arguments"] = dict(source.arguments)
    return shape


@given(FORMATS, MESSAGES | tool_rounds(), TOOLS, OPTIONS, st.booleans(), st.booleans())
def test_template_renders_what_the_code_renders(
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    messages: list[Message],
    tools: list[ToolSpec],
    options: dict[str, Any],
    prompts: bool,
    as_text: bool,
) -> None:
    """zai-org/GLM-5#158 too: arguments as JSON text and as objects give the same string."""
    ours = Renderer(tokenizer, chat_format).render_text(messages, tools, add_generation_prompt=prompts, **options)
    shapes = [openai(message, as_text) for message in messages]
    raws = [tool.raw for tool in tools]
    assert jinja(chat_format, shapes, tools=raws, add_generation_prompt=prompts, **options) == ours


@pytest.mark.parametrize("chat_format", ChatFormat)
def test_text_parts_render_like_their_text(chat_format: ChatFormat) -> None:
    """vllm-project/recipes#327: list content of a tool rendered an empty tool response."""
    texts = [
        {"role": "user", "content": "hi you"},
        {"role": "assistant", "content": "ab"},
        {"role": "tool", "content": "hot"},
    ]
    parts = [dict(m, content=[{"type": "text", "text": m["content"][:2]}, m["content"][2:]]) for m in texts]
    assert jinja(chat_format, parts) == jinja(chat_format, texts)
    assert "<tool_response>hot</tool_response>" in jinja(chat_format, parts)


@pytest.mark.parametrize("chat_format", ChatFormat)
def test_missing_content_is_empty_where_null_may_not_be(tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
    """huggingface/transformers#45422: transformers drops null fields before it renders."""
    shapes = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
    ]
    ours = Renderer(tokenizer, chat_format).render_text([Message.from_openai(shape) for shape in shapes])
    assert jinja(chat_format, shapes) == ours
    assert "None" not in ours


@pytest.mark.parametrize("chat_format", ChatFormat)
def test_template_keeps_to_what_small_engines_have(chat_format: ChatFormat) -> None:
    """noonghunna/club-3090#1255: ``x.0`` breaks minja; ``break`` and ``fromjson`` are missing elsewhere."""
    text = chat_template(chat_format)
    assert re.search(r"\.\d", re.sub(r"'[^']*'|\"[^\"]*\"|\{#.*?#\}", "", text, flags=re.DOTALL)) is None
    assert re.search(r"\b(break|continue|fromjson|ensure_ascii|unique|groupby)\b", text) is None


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":1,"b":[1,{"c":"d\\n\\"e"},[]],"c":{}}',
        ' { "a" : "\\u00e9\\ud83d\\ude00\\/\\\\" , "b" :\t-0, "c": 1.50, "d": 1E5, "e": true,"f":null } ',
        '{"<arg_key>": "x</arg_value>", "\\b\\f": "\\b\\f\\r\\t"}',
        "{}",
        " {\n} ",
        '{"": ""}',
        '{"a": [[], [{}], "{[,:]}"]}',
    ],
)
def test_json_text_renders_like_the_object_it_encodes(arguments: str) -> None:
    """zai-org/GLM-5#158, on the spellings of JSON that ``json.dumps`` does not use."""
    shapes = [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": given}}],
            }
        ]
        for given in (arguments, json.loads(arguments))
    ]
    assert jinja("glm-5", shapes[0]) == jinja("glm-5", shapes[1])


def test_what_the_template_cannot_write_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": "[1]"}}
    for message in (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "critic", "content": "no"},
    ):
        with pytest.raises(TemplateError):
            jinja("glm-5.3", [message])


def test_transformers_renders_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Through ``apply_chat_template``, to the same ids: text without look-alikes has one tokenisation."""
    transformers = pytest.importorskip("transformers")
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "tool", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "21 degrees"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    for chat_format in ChatFormat:
        folder = tmp_path / chat_format
        tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text(chat_template(chat_format), "utf-8")
        theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        ours = Renderer(tokenizer, chat_format).render(
            [Message.from_openai(message) for message in messages],
            [ToolSpec.from_openai(tool) for tool in tools],
            add_generation_prompt=True,
        )
        assert tuple(theirs) == ours.tokens
