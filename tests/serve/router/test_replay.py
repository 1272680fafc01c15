"""Text replies over two engines: a replay is cut exactly where the client stands, and a wrong one is found out."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yunque.serve.router.continuation import CannotContinue
from yunque.serve.router.replay import CHAT, COMPLETIONS, TextReply, text_reply

IDS = list(range(10, 22))


def chunks(sizes: list[int], *, lag: int, name: str) -> list[dict]:
    """A chat reply in chunks of ``sizes`` tokens whose text lags ``lag`` tokens behind: reasoning, text, a call."""
    made: list[dict] = [chunk({"role": "assistant", "content": ""}, name=name)]
    place, said = 0, 0
    for size in [*sizes, len(IDS)]:
        ids = IDS[place : place + size]
        place += len(ids)
        upto = place if place == len(IDS) else max(said, place - lag)
        delta: dict = {}
        for token in IDS[said:upto]:
            if token < 14:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + f"r{token}."
            elif token < 18:
                delta["content"] = delta.get("content", "") + f"c{token}."
            else:
                call = delta.setdefault("tool_calls", [{"index": 0, "function": {"arguments": ""}}])[0]
                if token == 18:
                    call |= {"id": f"call-{name}", "type": "function"}
                    call["function"]["name"] = "look"
                call["function"]["arguments"] += f"a{token}."
        said = upto
        entries = [{"token": str(token), "logprob": -token / 8} for token in ids]
        made.append(chunk(delta, name=name, token_ids=ids, weight_versions=[name] * len(ids)))
        made[-1]["choices"][0]["logprobs"] = {"content": entries}
        if place == len(IDS):
            made[-1]["choices"][0]["finish_reason"] = "tool_calls"
            break
    made.append({"id": name, "choices": [], "usage": {"completion_tokens": len(IDS)}})
    return made


def chunk(delta: dict, *, name: str, **more) -> dict:
    return {"id": name, "created": len(name), "choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}


def read(told: list[dict]) -> dict:
    """What a client makes of the chunks."""
    seen: dict = {"ids": [], "entries": [], "roles": 0, "names": {event["id"] for event in told}, "calls": {}}
    for event in told:
        seen["usage"] = event.get("usage", seen.get("usage"))
        for choice in event["choices"]:
            delta = choice["delta"]
            seen["ids"] += choice.get("token_ids", [])
            assert len(choice.get("weight_versions", [])) == len(choice.get("token_ids", []))
            seen["entries"] += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", [])]
            seen["roles"] += "role" in delta
            seen["finish"] = choice["finish_reason"]
            for kind in ("reasoning_content", "content"):
                seen[kind] = seen.get(kind, "") + delta.get(kind, "")
            for call in delta.get("tool_calls", []):
                known = seen["calls"].setdefault(call["index"], {"id": call.get("id"), "arguments": ""})
                known["arguments"] += call["function"]["arguments"]
                assert call.get("id", known["id"]) == known["id"], "a call was announced twice"
    return seen


SIZES = st.lists(st.integers(1, 4), max_size=12)


@given(SIZES, SIZES, st.integers(0, 3), st.integers(0, 3), st.integers(0, 13), st.booleans())
def test_wherever_the_first_engine_dies_the_client_reads_the_undisturbed_reply(first, second, lag, other, cut, asks):
    body = {"stream": True, "messages": [], **({"return_token_ids": True} if asks else {})}
    before, after = chunks(first, lag=lag, name="one"), chunks(second, lag=other, name="two")
    undisturbed = TextReply(body)
    expected = read([told for event in deepcopy(before) if (told := undisturbed.feed(event))])
    reply = TextReply(body)
    cut = min(cut, len(before) - 2)  # before the chunk that has the finish
    told = [reply.feed(event) for event in before[:cut]]
    asked = reply.next_body(streams=True)
    assert asked["return_token_ids"] is True
    assert asked.get("resume_token_ids", []) == IDS[: reply.tokens]
    told += [reply.feed(event) for event in after]
    found = read([event for event in told if event is not None])
    assert reply.is_finished
    if not cut:
        expected |= {"names": {"two"}, "calls": found["calls"]}
    elif found["calls"] and found["calls"][0]["id"] == "call-two":  # the call began on the second engine
        found["calls"][0]["id"] = "call-one"
    assert found == expected
    assert found["ids"] == (IDS if asks else [])


def test_chunks_pass_untouched_when_the_client_asked_for_ids():
    reply = TextReply({"stream": True, "return_token_ids": True})
    assert all(reply.feed(event) is event for event in chunks([3, 3], lag=1, name="one"))


def test_ids_that_the_client_did_not_ask_for_are_not_shown():
    reply = TextReply({"stream": True})
    head = chunk({"role": "assistant"}, name="one") | {"prompt_token_ids": [1, 2]}
    assert "prompt_token_ids" not in reply.feed(head)
    told = [reply.feed(event) for event in chunks([3], lag=0, name="one")]
    assert not any("token_ids" in choice for event in told for choice in event["choices"])


def test_an_engine_that_samples_anew_is_found_out_before_it_says_a_word():
    reply = TextReply({"stream": True})
    reply.feed(chunk({"content": "ab"}, name="one", token_ids=[1, 2]))
    reply.next_body(streams=True)
    assert reply.feed(chunk({"content": "a"}, name="two", token_ids=[1])) is None
    with pytest.raises(CannotContinue, match="does not continue"):
        reply.feed(chunk({"content": "x"}, name="two", token_ids=[7]))


def test_an_engine_that_ends_too_early_is_found_out():
    reply = TextReply({"stream": True})
    reply.feed(chunk({"content": "ab"}, name="one", token_ids=[1, 2]))
    reply.next_body(streams=True)
    event = chunk({"content": "a"}, name="two", token_ids=[1])
    event["choices"][0]["finish_reason"] = "stop"
    with pytest.raises(CannotContinue, match="before the point"):
        reply.feed(event)


def test_text_without_ids_is_not_continued_but_a_role_alone_is():
    reply = TextReply({"stream": True})
    reply.feed(chunk({"role": "assistant", "content": ""}, name="one"))
    assert "resume_token_ids" not in reply.next_body(streams=True)
    assert reply.feed(chunk({"role": "assistant", "content": ""}, name="two")) is None
    reply.feed(chunk({"content": "a"}, name="two"))
    with pytest.raises(CannotContinue, match="no token ids"):
        reply.next_body(streams=True)


def test_completions_are_cut_by_the_same_rule():
    def event(text, ids, finish=None, tops=None):
        logprobs = {"tokens": [str(i) for i in ids], "token_logprobs": tops or [-0.5] * len(ids)}
        choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
        return {"id": "one", "choices": [choice]}

    reply = TextReply({"stream": True})
    reply.feed(event("ab", [1, 2, 3]))
    reply.next_body(streams=True)
    told = reply.feed(event("abcd", [1, 2, 3, 4], finish="stop"))["choices"][0]
    assert told["text"] == "cd"
    assert told["logprobs"] == {"tokens": ["4"], "token_logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("path", "body", "is_followed"),
    [
        (CHAT, {"stream": True}, True),
        (CHAT, {}, False),
        (CHAT, {"stream": True, "n": 2}, False),
        (COMPLETIONS, {"stream": True, "prompt": "a"}, True),
        (COMPLETIONS, {"stream": True, "prompt": [1, 2]}, True),
        (COMPLETIONS, {"stream": True, "prompt": ["a", "b"]}, False),
        (COMPLETIONS, {"stream": True, "prompt": "a", "echo": True}, False),
        ("/v1/messages", {"stream": True}, False),
    ],
)
def test_single_streamed_replies_are_followed(path, body, is_followed):
    assert (text_reply(path, body) is not None) is is_followed
