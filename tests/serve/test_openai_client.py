"""The official ``openai`` client against a server that listens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from pydantic import BaseModel

from yunque.protocol.generation import JsonConstraint
from yunque.serve.settings import ServeSettings
from yunque.text import Renderer

from .servers import Served, listening, serve
from .test_chat import CALLS, TOOL

USER = [{"role": "user", "content": "Paris?"}]


class Answer(BaseModel):
    """A structured answer."""

    city: str
    days: int


@contextmanager
def connected(served: Served, api_key: str = "key") -> Iterator[openai.OpenAI]:
    with (
        listening(served) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=20) as client,
    ):
        yield client


def keyed(renderer: Renderer, *replies: str, **script: object) -> Served:
    return serve(renderer, *replies, settings=ServeSettings(port=0, api_keys=("key",)), **script)


def test_a_conversation_with_parallel_tools_and_their_results(renderer: Renderer) -> None:
    served = keyed(renderer, CALLS, "warm</think>It is warm.<|user|>")
    with connected(served) as client:
        first = client.chat.completions.create(model="scripted", messages=USER, tools=[TOOL])  # type: ignore[arg-type]
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": 'Pa"r\nis'}, {"days": 2}]  # type: ignore[union-attr]
        history = [
            *USER,
            choice.message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "21"} for call in calls),
        ]
        second = client.chat.completions.create(model="scripted", messages=history, tools=[TOOL])  # type: ignore[arg-type]
    assert second.choices[0].message.content == "It is warm."
    assert second.choices[0].message.reasoning_content == "warm"  # type: ignore[attr-defined]
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens // 2
    # What the model sampled stands in the next prompt as it was sampled.
    prompt, sampled = served.engine.requests[1].tokens, served.ids(CALLS)
    first_prompt = served.engine.requests[0].tokens
    assert prompt[: len(first_prompt) + len(sampled)] == (*first_prompt, *sampled)


def test_streams_of_text_and_tools(renderer: Renderer) -> None:
    served = keyed(renderer, CALLS, chunk=2)
    with connected(served) as client:
        stream = client.chat.completions.create(
            model="scripted",
            messages=USER,  # type: ignore[arg-type]
            tools=[TOOL],  # type: ignore[list-item]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    *most, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in most)
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in most)
    arguments = {0: "", 1: ""}
    for chunk in most:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments[call.index] += call.function.arguments or ""
    assert (text, thought) == ("Looking.", "need it")
    assert [json.loads(value) for value in arguments.values()] == [{"city": 'Pa"r\nis'}, {"days": 2}]
    assert most[-1].choices[0].finish_reason == "tool_calls"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(served.ids(CALLS))


def test_the_streaming_helper_accumulates_the_same_message(renderer: Renderer) -> None:
    with (
        connected(keyed(renderer, CALLS, chunk=3)) as client,
        client.chat.completions.stream(model="scripted", messages=USER, tools=[TOOL]) as stream,  # type: ignore[arg-type]
    ):
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Looking."
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [
        {"city": 'Pa"r\nis'},
        {"days": 2},
    ]


def test_a_json_schema_is_parsed_into_its_model(renderer: Renderer) -> None:
    served = keyed(renderer, 'x</think>{"city": "Paris", "days": 2}<|user|>')
    with connected(served) as client:
        parsed = client.chat.completions.parse(model="scripted", messages=USER, response_format=Answer)  # type: ignore[arg-type]
    assert parsed.choices[0].message.parsed == Answer(city="Paris", days=2)
    constraint = served.engine.requests[0].sampling.constraint
    assert isinstance(constraint, JsonConstraint)
    assert set(constraint.schema["properties"]) == {"city", "days"}


def test_errors_are_the_clients_own_exceptions(renderer: Renderer) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]
    with connected(keyed(renderer, "x", max_model_len=60)) as client:
        with pytest.raises(openai.BadRequestError, match="image_url") as caught:
            client.chat.completions.create(model="scripted", messages=image)  # type: ignore[arg-type]
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="scripted", prompt="x " * 200)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=USER)  # type: ignore[arg-type]
    with connected(keyed(renderer, "x"), api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with connected(keyed(renderer, "x", max_live=0)) as client, pytest.raises(openai.RateLimitError) as limited:
        client.completions.create(model="scripted", prompt="x")
    assert limited.value.response.headers["retry-after"] == "3"


def test_an_engine_that_breaks_in_a_stream_raises_in_the_client(renderer: Renderer) -> None:
    served = keyed(renderer, "a</think>bcd<|user|>")
    served.engine.fails_after = 4
    with connected(served) as client:
        stream = client.chat.completions.create(model="scripted", messages=USER, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)


def test_completions_and_models(renderer: Renderer) -> None:
    with connected(keyed(renderer, "one two<|endoftext|>")) as client:
        (model,) = client.models.list().data
        assert (model.id, model.max_model_len) == ("scripted", 8192)  # type: ignore[attr-defined]
        whole = client.completions.create(model="scripted", prompt=[5, 6], logprobs=2)
        assert whole.choices[0].text == "one two"
        assert whole.choices[0].logprobs is not None
        pieces = client.completions.create(model="scripted", prompt="a", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "one two"
