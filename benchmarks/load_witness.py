"""Witnesses: requests whose answers were recorded on an idle server, asked again under load and compared whole."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from load_server import API_KEY

from yunque.protocol.sse import DONE, SseDecoder

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


@dataclass(frozen=True)
class Case:
    """One request, asked whole or as a stream."""

    name: str
    path: str
    body: Mapping[str, Any]


def cases(draw: random.Random) -> list[Case]:
    """Greedy and seeded, short and of many pages, constrained, with tools, several choices, and a shared prefix."""
    shared = [draw.randrange(256) for _ in range(300)]
    ids = {name: [draw.randrange(256) for _ in range(size)] for name, size in (("short", 9), ("long", 700))}
    fixed = {"ignore_eos": True, "return_token_ids": True}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a page?"}], "return_token_ids": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    sampled = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 5, "max_new_tokens": 24, "ignore_eos": True}
    return [
        Case("greedy ids", COMPLETIONS, {"prompt": ids["short"], "max_tokens": 40, "temperature": 0, **fixed}),
        Case("greedy, many pages", COMPLETIONS, {"prompt": ids["long"], "max_tokens": 24, "temperature": 0, **fixed}),
        *(
            Case(
                f"shared prefix {number}",
                COMPLETIONS,
                {"prompt": [*shared, number], "max_tokens": 20, "seed": number, "temperature": 0.8, **fixed},
            )
            for number in range(3)
        ),
        Case("seeded chat", CHAT, {**chat, "max_tokens": 32, "seed": 11}),
        Case("greedy chat", CHAT, {**chat, "max_tokens": 32, "temperature": 0, "reasoning_effort": "none"}),
        Case("three choices", CHAT, {**chat, "max_tokens": 16, "seed": 3, "n": 3}),
        Case(
            "penalties", CHAT, {**chat, "max_tokens": 24, "seed": 4, "presence_penalty": 1, "repetition_penalty": 1.2}
        ),
        Case("with a tool", CHAT, {**chat, "max_tokens": 24, "seed": 8, "tools": [_TOOL], "tool_choice": "required"}),
        Case(
            "a schema", CHAT, {**chat, "max_tokens": 60, "seed": 9, "response_format": form, "reasoning_effort": "none"}
        ),
        Case(
            "log-probabilities",
            GENERATE,
            {"input_ids": ids["short"], "return_logprob": True, "sampling_params": sampled},
        ),
    ]


@dataclass
class Witnesses:
    """Knows the right answers. ``asked``, ``refused`` and ``wrong`` count what came under load."""

    url: str
    cases: list[Case]
    right: dict[tuple[str, bool], Any] = field(default_factory=dict)
    asked: int = 0
    refused: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    async def record(self) -> None:
        """Ask every case twice, whole and as a stream, one after the other; they must agree with themselves."""
        async with _client(self.url) as client:
            for _ in range(2):
                for case in self.cases:
                    for is_stream in (False, True):
                        answer = await _ask(client, case, is_stream=is_stream)
                        if self.right.setdefault((case.name, is_stream), answer) != answer:
                            raise RuntimeError(f"{case.name}: two answers on an idle server: {answer}")
        for case in self.cases:
            if self.right[case.name, True]["tokens"] != self.right[case.name, False]["tokens"]:
                raise RuntimeError(f"{case.name}: streamed and whole replies differ")

    async def watch(self, draw: random.Random, until: asyncio.Event) -> None:
        """Ask and compare until the load is over."""
        async with _client(self.url) as client:
            while not until.is_set():
                case, is_stream = draw.choice(self.cases), draw.random() < 0.5
                try:
                    answer = await _ask(client, case, is_stream=is_stream)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.wrong[f"{case.name}: {type(error).__name__}: {error}"[:200]] += 1
                    continue
                if answer is None:
                    self.refused += 1
                    await asyncio.sleep(0.2 + draw.random())
                    continue
                self.asked += 1
                if answer != self.right[case.name, is_stream]:
                    self.wrong[case.name] += 1


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=120, verify=False, trust_env=False
    )


async def _ask(client: httpx.AsyncClient, case: Case, *, is_stream: bool) -> dict[str, Any] | None:
    """What matters of the answer; None for a 429."""
    response = await client.post(case.path, json={**case.body, "stream": is_stream})
    if response.status_code == 429:
        return None
    response.raise_for_status()
    if not is_stream:
        return _whole(case.path, response.json())
    decoder = SseDecoder()
    events = [event.data for event in (*decoder.feed(response.content), *decoder.finish())]
    if events.pop() != DONE:
        raise ValueError("the stream does not end with [DONE]")
    return _joined(case.path, [json.loads(event) for event in events])


def _whole(path: str, body: Any) -> dict[str, Any]:
    if path == GENERATE:
        return _generated(body)
    choices = body["choices"]
    return {
        "tokens": [choice["token_ids"] for choice in choices],
        "texts": [_texts(choice.get("message", choice)) for choice in choices],
        "reasons": [choice["finish_reason"] for choice in choices],
    }


def _joined(path: str, bodies: list[Any]) -> dict[str, Any]:
    if path == GENERATE:
        return _generated(bodies[-1])
    tokens: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for body in bodies for choice in body["choices"]):
        index = choice["index"]
        tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        shown = _texts(choice.get("delta", choice))
        texts[index] = [before + more for before, more in zip(texts.get(index, [""] * 4), shown, strict=True)]
        reasons[index] = choice["finish_reason"] or reasons.get(index, "")
    order = sorted(reasons)
    return {
        "tokens": [tokens[index] for index in order],
        "texts": [texts[index] for index in order],
        "reasons": [reasons[index] for index in order],
    }


def _generated(body: Any) -> dict[str, Any]:
    meta = body["meta_info"]
    return {
        "tokens": [body["output_ids"]],
        "texts": [body["text"]],
        "reasons": [meta["finish_reason"]],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
    }


def _texts(part: Mapping[str, Any]) -> list[str]:
    """All that is shown: thought, content, text, calls. What is drawn anew each time (ids of calls) is left out."""
    calls = "".join(
        (call["function"].get("name") or "") + call["function"]["arguments"] for call in part.get("tool_calls") or ()
    )
    return [*(part.get(name) or "" for name in ("reasoning_content", "content", "text")), calls]
