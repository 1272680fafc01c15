from dataclasses import dataclass
from typing import Any

import pytest

from yunque.core.errors import DataError
from yunque.data.chat_samples import chat_samples
from yunque.data.conversations import ConversationSource, parse_conversation
from yunque.data.source import ThinkingMode
from yunque.data.tool_chats import ToolChatSource, tool_chats
from yunque.text.formats import ChatFormat
from yunque.text.render import Renderer
from yunque.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "hi"}
BYE = {"role": "user", "content": "bye"}
THOUGHT = {"role": "assistant", "content": "hello", "reasoning_content": "greet"}
PLAIN = {"role": "assistant", "content": "hello"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "need it",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "hot"}


@dataclass(frozen=True)
class Shown:
    """A sample as text, and the parts of it that are learned, joined by spaces."""

    text: str
    learned: str


@pytest.fixture
def show(tokenizer: Tokenizer) -> Any:
    def show(messages: list[dict[str, Any]], chat_format: str, thinking: ThinkingMode = "interleaved") -> list[Shown]:
        conversation = parse_conversation({"messages": messages}, "a:1")
        settings = ConversationSource(path=".", thinking=thinking)
        shown = []
        for sample in chat_samples(conversation, Renderer(tokenizer, chat_format), settings):
            assert sample.mask is not None
            parts, previous = [], 0
            for token, flag in zip(sample.tokens.tolist(), sample.mask.tolist(), strict=True):
                if flag and not previous:
                    parts.append([])
                if flag:
                    parts[-1].append(token)
                previous = flag
            learned = " ".join(tokenizer.decode(part) for part in parts)
            shown.append(Shown(tokenizer.decode(sample.tokens.tolist()), learned))
        return shown

    return show


def test_masks_of_a_tool_conversation_by_hand(show: Any) -> None:
    """The ids that end turns are learned, ``<|observation|>`` too; ``<|assistant|><think>`` is not."""
    assert show([SYSTEM, HI, CALL, RESULT, THOUGHT], "glm-5") == [
        Shown(
            "[gMASK]<sop><|system|>Be brief.<|user|>hi<|assistant|><think>need it</think>"
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|><tool_response>hot</tool_response>"
            "<|assistant|><think>greet</think>hello<|endoftext|>",
            "need it</think>"
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|> "
            "greet</think>hello<|endoftext|>",
        )
    ]


def test_cleared_thinking_gives_one_sample_for_each_turn_as_inference_sees_it(show: Any) -> None:
    assert show([HI, THOUGHT, BYE, THOUGHT], "glm-5") == [
        Shown(
            "[gMASK]<sop><|user|>hi<|assistant|><think>greet</think>hello<|user|>",
            "greet</think>hello<|user|>",
        ),
        Shown(
            "[gMASK]<sop><|user|>hi<|assistant|></think>hello<|user|>bye"
            "<|assistant|><think>greet</think>hello<|endoftext|>",
            "greet</think>hello<|endoftext|>",
        ),
    ]


@pytest.mark.parametrize(
    ("chat_format", "thinking"),
    [("glm-5", "preserved"), ("glm-5.1", "preserved"), ("glm-5.3", "interleaved")],
)
def test_preserved_thinking_gives_one_sample_with_every_turn(show: Any, chat_format: str, thinking: str) -> None:
    (sample,) = show([HI, THOUGHT, BYE, THOUGHT], chat_format, thinking)
    assert sample.learned == "greet</think>hello<|user|> greet</think>hello<|endoftext|>"


@pytest.mark.parametrize("chat_format", list(ChatFormat))
def test_thinking_off_drops_all_reasoning_and_gives_one_sample(show: Any, chat_format: str) -> None:
    inline = {"role": "assistant", "content": "<think>greet</think>hello"}
    (sample,) = show([HI, THOUGHT, BYE, inline], chat_format, "off")
    assert "greet" not in sample.text
    own = "</think>hello" if chat_format == "glm-5.3" else "hello"
    assert sample.learned == f"{own}<|user|> {own}<|endoftext|>"


def test_thinking_is_switched_turn_by_turn(show: Any) -> None:
    """GLM-5.1 would write a thinking turn without a thought as ``<think></think>``; this one is off."""
    assert show([HI, THOUGHT, BYE, PLAIN], "glm-5.1") == [
        Shown(
            "[gMASK]<sop><|user|>hi<|assistant|><think>greet</think>hello<|user|>",
            "greet</think>hello<|user|>",
        ),
        Shown(
            "[gMASK]<sop><|user|>hi<|assistant|></think>hello<|user|>bye<|assistant|></think>hello<|endoftext|>",
            "hello<|endoftext|>",
        ),
    ]
    (sample,) = show([HI, PLAIN, BYE, THOUGHT], "glm-5.1")
    assert sample.learned == "hello<|user|> greet</think>hello<|endoftext|>"


def test_wrong_messages_stay_in_context_and_are_not_learned(show: Any) -> None:
    wrong = PLAIN | {"content": "wrong", "train": False}
    (sample,) = show([HI, wrong, BYE, PLAIN], "glm-5")
    assert sample.text == (
        "[gMASK]<sop><|user|>hi<|assistant|></think>wrong<|user|>bye<|assistant|></think>hello<|endoftext|>"
    )
    assert sample.learned == "hello<|endoftext|>"
    (sample,) = show([HI, CALL | {"weight": 0}, RESULT, THOUGHT], "glm-5")
    assert sample.learned == "greet</think>hello<|endoftext|>"


def test_a_call_without_result_is_learned_to_end_in_observation(show: Any) -> None:
    samples = show([HI, CALL, BYE, PLAIN], "glm-5")
    assert [sample.learned.rpartition("<")[2] for sample in samples] == ["|observation|>", "|endoftext|>"]


def test_nothing_to_learn_is_an_error(show: Any) -> None:
    with pytest.raises(DataError, match="nothing is learned"):
        show([HI, PLAIN | {"train": False}], "glm-5")


def test_control_tokens_in_messages_stay_text(show: Any) -> None:
    (sample,) = show([{"role": "user", "content": "<|assistant|>x"}, PLAIN], "glm-5")
    assert sample.learned == "hello<|endoftext|>"


@pytest.mark.parametrize("chat_format", list(ChatFormat))
@pytest.mark.parametrize("thinking", ["interleaved", "preserved", "off"])
def test_every_learned_token_is_what_inference_would_sample(
    tokenizer: Tokenizer, chat_format: str, thinking: ThinkingMode
) -> None:
    """Before the first learned token of a turn stands the prompt that inference renders for that turn."""
    renderer = Renderer(tokenizer, chat_format)
    settings = ToolChatSource(num_train=40, max_questions=2, reasoning_share=0.5, thinking=thinking)
    for index, row in enumerate(tool_chats(settings, "train")):
        conversation = parse_conversation(row, f"tools:{index}")
        samples = chat_samples(conversation, renderer, settings)
        found = [tuple(s.tokens[:i].tolist()) for s in samples for i in _starts(s)]
        expected = []
        for at, message in enumerate(conversation.messages):
            if message.role == "assistant":
                expected.append(_prompt_before(at, row, renderer, thinking))
        assert sorted(found) == sorted(expected)


def _starts(sample: Any) -> list[int]:
    return [i for i in range(len(sample.mask)) if sample.mask[i] and not sample.mask[i - 1]]


def _prompt_before(at: int, row: dict[str, Any], renderer: Renderer, thinking: ThinkingMode) -> tuple[int, ...]:
    raw = [
        {k: v for k, v in message.items() if thinking != "off" or k != "reasoning_content"}
        for message in row["messages"]
    ]
    conversation = parse_conversation(row | {"messages": raw}, "a:1")
    users = [i for i, m in enumerate(raw) if m["role"] == "user"]
    start = max(i for i in users if i < at)
    end = min((i for i in users if i > at), default=len(raw))
    return renderer.render(
        conversation.messages[:at],
        conversation.tools,
        add_generation_prompt=True,
        enable_thinking=any(m.get("reasoning_content") is not None for m in raw[start:end]),
        clear_thinking=False if thinking == "preserved" else None,
    ).tokens
