"""Where a request says it belongs: session names in order, prefix hashes that agree exactly on shared blocks."""

import json

from hypothesis import given
from hypothesis import strategies as st

from yunque.serve.router.asks import BYTES_PER_BLOCK, MAX_BLOCKS, TOKENS_PER_BLOCK, ask_of, prefix_hashes, session_of


def shared(first, second) -> int:
    return sum(a == b for a, b in zip(first, second, strict=False))


def test_the_session_is_named_by_header_then_cache_key_then_user_then_api_key_if_wanted():
    headers = {"x-session-id": "h", "x-smg-routing-key": "r", "authorization": "Bearer k"}
    body = {"prompt_cache_key": "c", "user": "u"}
    assert session_of(headers, body) == "h"
    assert session_of({"x-smg-routing-key": "r"}, body) == "r"
    assert session_of({}, body) == "c"
    assert session_of({}, {"user": "u"}) == "u"
    assert session_of({"authorization": "Bearer k"}, {}) is None
    assert session_of({"authorization": "bearer k"}, {}, by_api_key=True) == "k"
    assert session_of({"x-api-key": "k"}, {"user": 7}, by_api_key=True) == "k"


@given(st.lists(st.integers(0, 10), max_size=300), st.lists(st.integers(0, 10), max_size=300))
def test_token_prompts_share_as_many_hashes_as_whole_blocks(first, second):
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    hashes = [prefix_hashes({"input_ids": ids}) for ids in (first, second)]
    assert [len(found) for found in hashes] == [len(ids) // TOKENS_PER_BLOCK for ids in (first, second)]
    assert shared(*hashes) == common // TOKENS_PER_BLOCK


def test_a_conversation_shares_all_blocks_with_its_next_turn():
    turns = [{"role": "user", "content": "question " * 200}, {"role": "assistant", "content": "answer " * 200}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    first = prefix_hashes({"messages": turns[:1], "tools": tools})
    second = prefix_hashes({"messages": [*turns, {"role": "user", "content": "more " * 300}], "tools": tools})
    assert len(first) >= 3
    assert shared(first, second) == len(first) < len(second)
    assert shared(first, prefix_hashes({"messages": turns[:1]})) == 0


def test_salts_and_kinds_of_prompt_share_nothing():
    ids = list(range(200))
    assert shared(prefix_hashes({"token_ids": ids}), prefix_hashes({"input_ids": ids})) == 3
    assert shared(prefix_hashes({"token_ids": ids}), prefix_hashes({"token_ids": ids, "cache_salt": "a"})) == 0


def test_hashes_are_bounded_and_odd_bodies_have_none():
    assert len(prefix_hashes({"prompt": "x" * BYTES_PER_BLOCK * 3000})) == MAX_BLOCKS
    assert len(prefix_hashes({"input_ids": [1] * TOKENS_PER_BLOCK * 3000})) == MAX_BLOCKS
    for body in ({}, {"prompt": 3}, {"messages": "text"}, {"input_ids": [[1], [2]]}, {"prompt": [-1, "a"]}):
        assert ask_of({}, body).blocks == (), body
    assert ask_of({}, json.loads('{"prompt": "\\ud800' + "x" * 600 + '"}')).blocks != ()
