"""``/v1/completions`` over a scripted engine."""

import pytest

from yunque.text import Renderer

from .servers import events, serve

PATH = "/v1/completions"


def test_every_form_of_prompt(renderer: Renderer) -> None:
    served = serve(renderer, "b<|endoftext|>")
    a, bc = tuple(served.ids("a")), tuple(served.ids("b c"))
    for prompt, tokens in (
        ("a", [a]),
        (["a", "b c"], [a, bc]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        ("<|user|>", [(renderer.tokenizer.special["<|user|>"],)]),
    ):
        served.engine.requests.clear()
        body = served.post(PATH, {"prompt": prompt}).json()
        assert [request.tokens for request in served.engine.requests] == tokens
        assert [choice["text"] for choice in body["choices"]] == ["b"] * len(tokens)
        assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_max_tokens_is_sixteen_unless_given(renderer: Renderer) -> None:
    served = serve(renderer, rule=lambda _: [65] * 100)
    assert served.post(PATH, {"prompt": "a"}).json()["usage"]["completion_tokens"] == 16
    body = served.post(PATH, {"prompt": "a", "max_tokens": 3}).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")
    assert served.post(PATH, {"prompt": "a", "max_tokens": None}).json()["usage"]["completion_tokens"] == 100


def test_choices_are_numbered_prompt_by_prompt(renderer: Renderer) -> None:
    served = serve(renderer, *(f"{i}<|endoftext|>" for i in range(4)))
    body = served.post(PATH, {"prompt": ["a", "b c"], "n": 2, "seed": 5}).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(i, str(i)) for i in range(4)]
    assert [request.sampling.seed for request in served.engine.requests] == [5, 6, 5, 6]
    assert body["usage"]["prompt_tokens"] == len(served.ids("a")) + len(served.ids("b c"))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_and_its_logprobs(renderer: Renderer, stream: bool) -> None:
    served = serve(renderer, "yz<|endoftext|>")
    response = served.post(PATH, {"prompt": "abc", "echo": True, "logprobs": 1, "stream": stream})
    bodies = events(response) if stream else [response.json()]
    parts = [choice for body in bodies for choice in body["choices"]]
    logprobs = {key: [v for p in parts for v in p["logprobs"][key]] for key in parts[0]["logprobs"]}
    prompt, made = served.ids("abc"), served.ids("yz<|endoftext|>")
    assert "".join(part["text"] for part in parts) == "abcyz"
    assert logprobs["token_logprobs"] == [
        None,
        *(-place / 16 for place in range(1, len(prompt))),
        *(-(place + 1) / 4 for place in range(len(made))),
    ]
    assert "".join(logprobs["tokens"]) == "abcyz<|endoftext|>"
    assert logprobs["text_offset"][: len(prompt) + 1] == [*range(len(prompt)), 3]
    assert [top is None for top in logprobs["top_logprobs"]] == [True] * len(prompt) + [False] * len(made)
    assert parts[-1]["finish_reason"] == "stop"


def test_no_tokens_may_be_asked_for_only_with_echo(renderer: Renderer) -> None:
    served = serve(renderer, "yz<|endoftext|>")
    body = served.post(PATH, {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("abc", 0)
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 3
    assert served.post(PATH, {"prompt": "abc", "max_tokens": 0}).status_code == 400


@pytest.mark.parametrize("chunk", [1, 2, 50])
def test_a_stream_adds_up_and_shows_no_half_characters_or_stop_strings(renderer: Renderer, chunk: int) -> None:
    served = serve(renderer, "東京 café STOP more<|endoftext|>", chunk=chunk)
    request = {
        "prompt": [1],
        "stop": "STOP",
        "stream": True,
        "max_tokens": 99,
        "stream_options": {"include_usage": True},
    }
    *chunks, last = events(served.post(PATH, request))
    texts = [choice["text"] for body in chunks for choice in body["choices"]]
    assert "".join(texts) == "東京 café "
    assert not any("\ufffd" in text for text in texts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompt_and_reply(renderer: Renderer, stream: bool) -> None:
    served = serve(renderer, "yz<|endoftext|>")
    response = served.post(PATH, {"prompt": [[5, 6]], "return_token_ids": True, "stream": stream})
    bodies = events(response) if stream else [response.json()]
    parts = [choice for body in bodies for choice in body["choices"]]
    assert [token for part in parts for token in part.get("token_ids", ())] == served.ids("yz<|endoftext|>")
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [[5, 6]]


def test_what_is_refused(renderer: Renderer) -> None:
    served = serve(renderer, "x")
    for fields, param in (
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": "a", "logprobs": 101}, "logprobs"),
        ({}, "prompt"),
    ):
        response = served.post(PATH, fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.engine.requests == []
